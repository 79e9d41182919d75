"""Rotary position embedding: rotate pairs of coordinates by an angle that grows with position.

Su et al. 2021; article S0 §2.4: <R_m q, R_n k> depends on m - n alone. A head of width H
turns its first R = `rotated` coordinates as R/2 pairs, pair i by position * base**(-2i/R).

Two layouts pair the coordinates: "half" (i, i + R/2), "interleaved" (2i, 2i + 1). They are
equal up to a fixed permutation of the coordinates; mixing them is a fault.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.typing import ArrayLike

from transformer_jax.config import Config, Hyper
from transformer_jax.errors import ConfigError
from transformer_jax.rope_scaling import Scaled, frequencies, scaled_frequencies


class Rotation(NamedTuple):
    """cos and sin of the angles, times the attention factor of a scaling: float32 [B or 1, T, R/2]."""

    cos: jax.Array
    sin: jax.Array


def rotation(positions_BT: jax.Array, rotated: int, base: ArrayLike, scaled: Scaled | None = None) -> Rotation:
    """Angles of integer positions [B or 1, T].

    scaled: frequencies to turn by instead of the base's own, [R/2], [B or 1, R/2] or [B, T, R/2], and the
    attention factor. Positions stay integers until the angle, and angles are float32 whatever the
    compute type: bfloat16 positions alias from 257 on. Raises TypeError for other positions,
    ConfigError for frequencies of another width.
    """
    if not jnp.issubdtype(positions_BT.dtype, jnp.integer):
        raise TypeError(f"positions are {positions_BT.dtype}: they stay integers until the angle")
    turns, attention_factor = (frequencies(rotated, base), None) if scaled is None else scaled
    if turns.shape[-1] != rotated // 2:
        raise ConfigError(f"{turns.shape[-1]} RoPE frequencies for {rotated} rotated coordinates")
    turns = turns[None, None] if turns.ndim == 1 else turns[:, None] if turns.ndim == 2 else turns
    angles = positions_BT[..., None].astype(jnp.float32) * turns
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return Rotation(cos, sin) if attention_factor is None else Rotation(cos * attention_factor, sin * attention_factor)


def lengths_of(
    positions_BT: jax.Array, real_BT: jax.Array | None = None, segments_BT: jax.Array | None = None
) -> jax.Array:
    """The largest real position + 1 of each row, [B or 1]; with segments, of each token's own, [B, T].

    So no result depends on padding, on another row, or on another document of a packed row.
    """
    positions_BT = positions_BT if real_BT is None else jnp.where(real_BT, positions_BT, -1)
    if segments_BT is None:
        return jnp.max(positions_BT, axis=1) + 1

    def of_segments(positions_T: jax.Array, ids_T: jax.Array) -> jax.Array:
        # Ids may be any numbers: the first place of one in their order is its own bin.
        bins_T = jnp.searchsorted(jnp.sort(ids_T), ids_T)
        return jnp.full_like(positions_T, -1).at[bins_T].max(positions_T)[bins_T] + 1

    return jax.vmap(of_segments)(*jnp.broadcast_arrays(positions_BT, segments_BT))


def from_config(
    positions_BT: jax.Array,
    config: Config,
    hyper: Hyper,
    real_BT: jax.Array | None = None,
    segments_BT: jax.Array | None = None,
) -> Rotation:
    """Angles of integer positions [B or 1, T] with the scaling that the settings name.

    real_BT: booleans, False for padding (None: all are real). segments_BT: ids of packed documents. Dynamic
    scaling alone reads them, for the length that it stretches to: see `lengths_of`.
    """
    scaled = scaled_frequencies(
        config.rope_scaling,
        config.rotated,
        hyper.rope_base,
        factor=hyper.rope_factor,
        original=config.rope_original_positions,
        slow=hyper.rope_slow,
        fast=hyper.rope_fast,
        attention_factor=hyper.rope_attention_factor,
        length=lengths_of(positions_BT, real_BT, segments_BT) if config.rope_scaling == "dynamic" else None,
    )
    return rotation(positions_BT, config.rotated, hyper.rope_base, scaled)


def rotate(x_BTNH: jax.Array, turn: Rotation, layout: str) -> jax.Array:
    """Rotate the first R coordinates of each head, in float32; same shape and type as x."""
    cos, sin = turn.cos[:, :, None, :], turn.sin[:, :, None, :]
    rotated = 2 * cos.shape[-1]
    head, rest = x_BTNH[..., :rotated].astype(jnp.float32), x_BTNH[..., rotated:]
    if layout == "half":
        a, b = head[..., : rotated // 2], head[..., rotated // 2 :]
        turned = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    else:
        a, b = head[..., 0::2], head[..., 1::2]
        turned = rearrange(jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1), "... r two -> ... (r two)")
    turned = turned.astype(x_BTNH.dtype)
    return turned if rest.shape[-1] == 0 else jnp.concatenate([turned, rest], axis=-1)


def half_from_interleaved(rotated: int) -> jax.Array:
    """The permutation p of R coordinates with rotate_half(x[p]) = rotate_interleaved(x)[p]."""
    return jnp.concatenate([jnp.arange(0, rotated, 2), jnp.arange(1, rotated, 2)])
