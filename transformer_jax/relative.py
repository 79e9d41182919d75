"""Position biases: what distance adds to a score, as a small pytree evaluated on blocks of positions.

Like a mask, a bias is not a [T, S] array: it is a sum of parts, each with a static kind (its
class) and arrays (its fields). `+` composes; `.block` evaluates a block of query slots against a
block of key slots; `.dense(T, S)` makes the array; any array is one more part. Biases are added
to the scaled scores, float32.

    alibi(N)                              minus a slope times the distance, a slope a head
    t5(table_CN, distance=128)            a learned number for each bucket of distances and head
    dense(values) + alibi(N)              any array, infinities as they stand
"""

import bisect
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from transformer_jax import keys
from transformer_jax.errors import ConfigError
from transformer_jax.masks import Block, Placed


def alibi_slopes(N: int) -> jax.Array:
    """ALiBi's slope of each head, float32 [N] (Press et al. 2022 §3): 2**(-8n/N) for n in 1…N.

    Where N is no power of two: the slopes of the largest power P below N, then every other slope
    of 2P, from the first on. Raises ConfigError for N below 1.
    """
    if N < 1:
        raise ConfigError(f"ALiBi slopes for num_heads={N}: at least 1")
    P = 1 << (N.bit_length() - 1)
    powers = [-8 * n / P for n in range(1, P + 1)] + [-4 * n / P for n in range(1, 2 * P, 2)]
    return jnp.asarray(2.0 ** np.array(powers[:N]), jnp.float32)


def relative_buckets(relative: jax.Array, *, buckets: int, distance: int, bidirectional: bool) -> jax.Array:
    """T5's bucket of each relative position key - query (Raffel et al. 2020 §2.1): int32, same shape.

    bidirectional: the upper half of the buckets is for keys after the query; otherwise such keys
    share bucket 0 with the query's own. Of the n buckets of a direction the first n // 2 hold one
    distance each; the others widen as the logarithm does, up to `distance`, and the last holds
    all beyond. Raises ConfigError for an odd number of buckets in two directions, fewer than two a
    direction, or a `distance` that the exact ones reach; TypeError for positions that are not integers.
    """
    of_distance = jnp.asarray(_bucket_of_distance(buckets, distance, bidirectional))
    far = jnp.clip(_integers(relative), -distance, distance)
    if not bidirectional:
        return of_distance[jnp.maximum(-far, 0)]
    return of_distance[jnp.abs(far)] + jnp.where(far > 0, buckets // 2, 0).astype(jnp.int32)


def _integers(relative: jax.Array) -> jax.Array:
    if not jnp.issubdtype(relative.dtype, jnp.integer):
        raise TypeError(f"relative positions are {relative.dtype}: they stay integers")
    return relative


def _bucket_of_distance(buckets: int, distance: int, bidirectional: bool) -> np.ndarray:
    """The bucket of each distance 0…`distance`, within one direction: int32.

    Bucket e + k (e exact ones, w wide ones) begins where e (distance/e)**(k/w) <= r. Raised to the
    power w that is a comparison of whole numbers: no logarithm can round a distance over an edge.
    """
    if bidirectional and buckets % 2:
        raise ConfigError(f"relative_buckets={buckets} is odd: half of them are for each direction")
    n = buckets // 2 if bidirectional else buckets
    exact = n // 2
    if exact < 1:
        raise ConfigError(f"relative_buckets={buckets} is too few: at least {4 if bidirectional else 2}")
    if distance <= exact:
        raise ConfigError(
            f"relative_distance={distance} with relative_buckets={buckets}: above {exact}, which have one each"
        )
    wide = n - exact
    firsts = list(range(1, exact + 1))  # the least distance of each bucket but 0
    for k in range(1, wide):
        edge = distance**k * exact**wide
        firsts.append(bisect.bisect_left(range(distance), edge, key=lambda r, k=k: r**wide * exact**k))
    return np.searchsorted(firsts, np.arange(distance + 1), side="right").astype(np.int32)


@struct.dataclass
class ALiBi:
    """-slope * |i - j| for query position i and key position j, integers (Press et al. 2022)."""

    slopes_N: jax.Array

    @property
    def heads(self) -> int:
        return self.slopes_N.shape[0]

    def biases(self, block: Block) -> jax.Array:
        """[B or 1, N, T, S]."""
        distance = jnp.abs(_integers(block.k_positions - block.q_positions)).astype(jnp.float32)
        return -self.slopes_N.astype(jnp.float32)[None, :, None, None] * distance


@struct.dataclass
class T5:
    """A learned number for each bucket of key - query, and head (Raffel et al. 2020): see `relative_buckets`."""

    table_CN: jax.Array
    bidirectional: bool = struct.field(pytree_node=False)
    distance: int = struct.field(pytree_node=False)

    @property
    def heads(self) -> int:
        return self.table_CN.shape[1]

    def biases(self, block: Block) -> jax.Array:
        """[B or 1, N, T, S]."""
        buckets_BTS = relative_buckets(
            block.k_positions - block.q_positions,
            buckets=self.table_CN.shape[0],
            distance=self.distance,
            bidirectional=self.bidirectional,
        )[:, 0]
        return jnp.swapaxes(self.table_CN.astype(jnp.float32).T[:, buckets_BTS], 0, 1)


@struct.dataclass
class DenseBias:
    """Any array [B or 1, N or 1, T or 1, S or 1], by slot; infinities stay."""

    values: jax.Array
    stretches = True

    @property
    def rows(self) -> int:
        return self.values.shape[0]

    @property
    def heads(self) -> int:
        return self.values.shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[2], self.values.shape[3]

    def biases(self, block: Block) -> jax.Array:
        """[B or 1, N or 1, T, S]; slots past the end read the last."""
        rows, cols = self.shape
        q, k = jnp.minimum(block.q_slots_T, rows - 1), jnp.minimum(block.k_slots_S, cols - 1)
        return self.values[:, :, q][:, :, :, k].astype(jnp.float32)


@struct.dataclass
class Bias(Placed):
    """A sum of parts; no parts: 0 everywhere."""

    def __add__(self, other: Self) -> Self:
        return self._with(other)

    def block(self, q_slots_T: jax.Array, k_slots_S: jax.Array) -> jax.Array:
        """float32 [B or 1, N or 1, T, S] for a block of query slots against a block of key slots.

        Slots past the end of an array read its last entry: whoever asks for them masks them.
        """
        block = self._place(q_slots_T, k_slots_S)
        total = jnp.zeros((1, 1, len(q_slots_T), len(k_slots_S)), jnp.float32)
        for part in self.parts:
            total = total + part.biases(block)
        return total

    def dense(self, T: int, S: int) -> jax.Array:
        """The whole bias as float32 [B or 1, N or 1, T, S]. Raises ConfigError where a part has another size."""
        self.check(T, S)
        return self.block(jnp.arange(T), jnp.arange(S))


def alibi(N: int) -> Bias:
    """ALiBi for N heads."""
    return Bias((ALiBi(alibi_slopes(N)),))


def init_t5(key: jax.Array, C: int, N: int, D: int) -> jax.Array:
    """A table [C, N], drawn N(0, 1/D) as T5 draws it."""
    return keys.normal(key, "relative_CN", (C, N), D**-0.5)


def t5(table_CN: jax.Array, *, distance: int, bidirectional: bool) -> Bias:
    """T5's bias from its table. Raises ConfigError for a table whose C buckets and `distance` are at odds."""
    _bucket_of_distance(table_CN.shape[0], distance, bidirectional)
    return Bias((T5(table_CN, bidirectional, distance),))


def dense(values: jax.Array | np.ndarray) -> Bias:
    """Any array of numbers, [T, S] or [B or 1, N or 1, T or 1, S or 1], added as it stands.

    Raises ConfigError for booleans, which are a mask, and for another number of axes.
    """
    values = jnp.asarray(values)
    if values.dtype == bool:
        raise ConfigError("a bias of bool: booleans are a mask, and go to masks.dense")
    if values.ndim not in (2, 4):
        raise ConfigError(f"a bias of shape {values.shape}: give [T, S] or [B, N, T, S]")
    return Bias((DenseBias(values[None, None] if values.ndim == 2 else values),))
