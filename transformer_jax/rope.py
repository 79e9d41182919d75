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


class Rotation(NamedTuple):
    """cos and sin of the angles, float32 [B or 1, T, R/2]."""

    cos: jax.Array
    sin: jax.Array


def frequencies(rotated: int, base: ArrayLike) -> jax.Array:
    """base**(-2i/R) for i in 0…R/2-1: float32 [R/2], radians per position."""
    exponents = jnp.arange(0, rotated, 2, dtype=jnp.float32) / rotated
    return jnp.exp(-exponents * jnp.log(jnp.asarray(base, jnp.float32)))


def rotation(positions_BT: jax.Array, rotated: int, base: ArrayLike) -> Rotation:
    """Angles of integer positions [B or 1, T].

    Positions stay integers until the angle, and angles are float32 whatever the compute
    type: bfloat16 positions alias from 257 on. Raises TypeError for other positions.
    """
    if not jnp.issubdtype(positions_BT.dtype, jnp.integer):
        raise TypeError(f"positions are {positions_BT.dtype}: they stay integers until the angle")
    angles = positions_BT[..., None].astype(jnp.float32) * frequencies(rotated, base)[None, None, :]
    return Rotation(jnp.cos(angles), jnp.sin(angles))


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
