"""Random keys by name, so that adding a weight does not reshuffle the others'.

Two runs that share a key share every draw whose name and shape they share: this
is what makes the differences between the arms of a sweep paired.
"""

import zlib

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike


def named(key: jax.Array, name: str) -> jax.Array:
    """The key of `name` under `key`: `fold_in` with the name's CRC-32."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def normal(key: jax.Array, name: str, shape: tuple[int, ...], scale: float) -> jax.Array:
    """N(0, scale²) in float32 of `shape`, drawn from the key of `name`."""
    return scale * jax.random.normal(named(key, name), shape, jnp.float32)


def dropout(x: jax.Array, rate: ArrayLike, key: jax.Array | None, name: str) -> jax.Array:
    """Inverted dropout (Srivastava et al. 2014): drop with `rate`, scale the rest by 1/(1-rate).

    x: any shape. rate: a number in [0, 1), traced or not. key None: x as it is.
    """
    if key is None:
        return x
    keep = 1.0 - jnp.asarray(rate, jnp.float32)
    kept = jax.random.bernoulli(named(key, name), keep, x.shape)
    return jnp.where(kept, x / keep.astype(x.dtype), jnp.zeros((), x.dtype))
