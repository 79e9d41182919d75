"""Absolute positions: the sinusoidal table with its shift matrices, and the learned table.

Vaswani et al. 2017 §3.5, articles S1 §6.2 and S2 §3.2:
    PE(pos, 2i) = sin(pos / 10000^(2i/D)),  PE(pos, 2i+1) = cos(pos / 10000^(2i/D)).
"""

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax import keys
from transformer_jax.errors import ConfigError


def _frequencies(D: int) -> np.ndarray:
    if D % 2:
        raise ConfigError(f"sinusoidal positions need an even width, not {D}")
    return 10000.0 ** (-np.arange(0, D, 2) / D)


def sinusoidal(positions_BT: jax.Array, D: int) -> jax.Array:
    """Sines in even columns, cosines in odd ones: float32 [B or 1, T, D]. Raises ConfigError for odd D.

    TypeError for positions that are not integers: they stay so until the angle.
    """
    if not jnp.issubdtype(positions_BT.dtype, jnp.integer):
        raise TypeError(f"positions are {positions_BT.dtype}: they stay integers until the angle")
    angles = positions_BT[..., None].astype(jnp.float32) * jnp.asarray(_frequencies(D), jnp.float32)[None, None, :]
    pairs = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return pairs.reshape(*angles.shape[:-1], D)


def shift_matrix(k: int, D: int) -> np.ndarray:
    """M_k with PE(pos + k) = M_k PE(pos) for every pos: float64 [D, D], orthogonal, M_a M_b = M_(a+b)."""
    matrix = np.zeros((D, D))
    for i, angle in enumerate(k * _frequencies(D)):
        c, s = np.cos(angle), np.sin(angle)
        matrix[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = [[c, s], [-s, c]]
    return matrix


def init_learned(key: jax.Array, P: int, D: int) -> jax.Array:
    """A learned table [P, D], drawn N(0, 1/D) as the embedding is."""
    return keys.normal(key, "position_PD", (P, D), D**-0.5)


def learned(position_PD: jax.Array, positions_BT: jax.Array) -> jax.Array:
    """Rows of the table: [B or 1, T, D]. A length past the table is refused at trace time.

    Positions themselves are traced: those past P or below 0 give NaN, never another's row.
    """
    P, T = position_PD.shape[-2], positions_BT.shape[-1]
    if T > P:
        raise ConfigError(f"a sequence of {T} is past the position table of {P} (max_positions)")
    return position_PD.at[positions_BT].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
