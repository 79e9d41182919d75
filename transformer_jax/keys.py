"""Random keys by name, so that adding a weight does not reshuffle the others'.

Two runs that share a key share every draw whose name and shape they share: this
is what makes the differences between the arms of a sweep paired.
"""

import zlib

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p
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


def dropout_at(
    x: jax.Array, rate: ArrayLike, key: jax.Array, name: str, rows: jax.Array, columns: jax.Array
) -> jax.Array:
    """Inverted dropout whose bits belong to places: an entry's fate is a function of (key, row, column).

    rows, columns: uint32 arrays that broadcast to x's shape. However x is cut into blocks,
    the same entries are dropped (threefry-2x32, Salmon et al. 2011, of the place as counter).
    """
    keep = 1.0 - jnp.asarray(rate, jnp.float32)
    words = jax.random.key_data(named(key, name)).astype(jnp.uint32)
    places = (jnp.broadcast_to(place, x.shape) for place in (words[0], words[1], rows, columns))
    bits, _ = threefry2x32_p.bind(*places)
    # 24 bits make a float32 in [0, 1) exactly.
    kept = (bits >> 8).astype(jnp.float32) * 2.0**-24 < keep
    return jnp.where(kept, x / keep.astype(x.dtype), jnp.zeros((), x.dtype))
