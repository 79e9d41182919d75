"""Who may attend to whom: a small pytree, evaluated on blocks of positions.

A mask is not a [T, S] array: that alone is O(T S), and a kernel cannot read "causal"
off an array. It is a conjunction of parts, each with a static kind (its class) and
traced numbers (its fields). True means *may attend*. `&` composes; `.dense(T, S)`
makes the array; any boolean array is one more part, so that sweeps can stack
arbitrary masks.

    causal() & padding(lengths_B)        a decoder over padded rows
    cross(source_lengths_B)              decoder queries on encoder keys
    prefix_lm(8) & segments(ids_BT)      packed documents, bidirectional prefixes
"""

import dataclasses
from typing import Any, NamedTuple, Self

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import ArrayLike

from transformer_jax.config import Config, Hyper
from transformer_jax.errors import ConfigError


class Block(NamedTuple):
    """A block of queries against a block of keys: slots in the row, and positions in the text.

    Slots index arrays (segment ids, lengths); positions are what "past" and "future"
    mean, and differ from slots under left padding or in a cache.
    """

    q_slots_T: jax.Array
    k_slots_S: jax.Array
    q_positions: jax.Array  # [B or 1, 1, T, 1]
    k_positions: jax.Array  # [B or 1, 1, 1, S]


@struct.dataclass
class Causal:
    """Keys at or before the query: j <= i (article S0 §4.2)."""

    def allows(self, block: Block) -> jax.Array:
        return block.k_positions <= block.q_positions


@struct.dataclass
class Inverted:
    """The mask as the formula of article S2 §8.1 prints it, j >= i: wrong, for ablations.

    The text beside that formula asks for causal; this one shows the future and hides the past.
    """

    def allows(self, block: Block) -> jax.Array:
        return block.k_positions >= block.q_positions


@struct.dataclass
class Window:
    """Keys nearer than `width`: |i - j| < width, so that a causal window of 4 holds 4 keys."""

    width: Any

    def allows(self, block: Block) -> jax.Array:
        return jnp.abs(block.q_positions - block.k_positions) < self.width


@struct.dataclass
class PrefixLM:
    """Causal, but the first `length` positions are seen by all (Raffel et al. 2020)."""

    length: Any  # a number, or [B]

    @property
    def rows(self) -> int:
        return jnp.size(self.length) if jnp.ndim(self.length) else 1

    def allows(self, block: Block) -> jax.Array:
        length = jnp.asarray(self.length)
        length = length[:, None, None, None] if length.ndim else length
        return (block.k_positions <= block.q_positions) | (block.k_positions < length)


@struct.dataclass
class Padding:
    """Keys whose slot is below the row's length; queries are left alone."""

    lengths_B: jax.Array

    @property
    def rows(self) -> int:
        return self.lengths_B.shape[0]

    def allows(self, block: Block) -> jax.Array:
        return block.k_slots_S[None, None, None, :] < self.lengths_B[:, None, None, None]


@struct.dataclass
class Segments:
    """Query and key carry the same segment id: packed documents do not see each other."""

    q_ids_BT: jax.Array
    k_ids_BS: jax.Array

    @property
    def shape(self) -> tuple[int, int]:
        return self.q_ids_BT.shape[1], self.k_ids_BS.shape[1]

    @property
    def rows(self) -> int:
        return max(self.q_ids_BT.shape[0], self.k_ids_BS.shape[0])

    def allows(self, block: Block) -> jax.Array:
        q = self.q_ids_BT[:, block.q_slots_T][:, None, :, None]
        k = self.k_ids_BS[:, block.k_slots_S][:, None, None, :]
        return q == k


@struct.dataclass
class BlockSparse:
    """A query sees its own block of `size` positions, the one before, and the first block."""

    size: Any

    def allows(self, block: Block) -> jax.Array:
        q, k = block.q_positions // self.size, block.k_positions // self.size
        return (k == q) | (k == q - 1) | (k == 0)


@struct.dataclass
class Dense:
    """Any boolean array [B or 1, N or 1, T or 1, S or 1]; a side of length 1 is stretched."""

    allowed: jax.Array
    stretches = True

    @property
    def rows(self) -> int:
        return self.allowed.shape[0]

    @property
    def heads(self) -> int:
        return self.allowed.shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        return self.allowed.shape[2], self.allowed.shape[3]

    def allows(self, block: Block) -> jax.Array:
        rows, keys = self.allowed.shape[2:]
        # A side of length 1 is broadcast, as in [B, 1, 1, S].
        q = block.q_slots_T if rows > 1 else jnp.zeros_like(block.q_slots_T)
        k = block.k_slots_S if keys > 1 else jnp.zeros_like(block.k_slots_S)
        return self.allowed[:, :, q][:, :, :, k]


DATA_DEPENDENT = (Padding, Segments, Dense)


@struct.dataclass
class Placed:
    """Parts evaluated on blocks of slots, and where the slots stand: what a Mask and a Bias have in common.

    q_positions_BT, k_positions_BS: integer positions of the slots (None: the slots
    themselves). Both sides of a composition must agree on them.
    """

    parts: tuple[Any, ...] = ()
    q_positions_BT: jax.Array | None = None
    k_positions_BS: jax.Array | None = None

    def at(self, q_positions_BT: jax.Array | None, k_positions_BS: jax.Array | None) -> Self:
        """The same over slots with the given positions ([B or 1, T] and [B or 1, S]).

        Raises TypeError for positions that are not integers: bfloat16 ones are equal from 257 on.
        """
        for side, table in (("query", q_positions_BT), ("key", k_positions_BS)):
            if table is not None and not jnp.issubdtype(table.dtype, jnp.integer):
                raise TypeError(f"{side} positions are {table.dtype}: they stay integers")
        return dataclasses.replace(self, q_positions_BT=q_positions_BT, k_positions_BS=k_positions_BS)

    def check(self, T: int, S: int, B: int | None = None, N: int | None = None) -> None:
        """Raise ConfigError where a part or a position table does not fit T queries, S keys, B rows and N heads."""
        tables = (("query", self.q_positions_BT, T), ("key", self.k_positions_BS, S))
        for side, table, slots in tables:
            if table is not None and table.shape[1] != slots:
                raise ConfigError(f"{side} positions of {table.shape[1]} slots in an attention of {(T, S)}")
        rows = [(f"{side} positions", table.shape[0]) for side, table, _ in tables if table is not None]
        for part in self.parts:
            kind = f"a {type(part).__name__} {type(self).__name__.lower()}"
            held, stretches = getattr(part, "shape", (T, S)), getattr(part, "stretches", False)
            if any(n != wanted and not (n == 1 and stretches) for n, wanted in zip(held, (T, S), strict=True)):
                raise ConfigError(f"{kind} of {tuple(held)} in an attention of {(T, S)}")
            rows += [(kind, part.rows)] if hasattr(part, "rows") else []
            heads = getattr(part, "heads", 1)
            if N is not None and heads not in (1, N):
                raise ConfigError(f"{kind} of {heads} heads in an attention of {N}")
            lengths = known(part.lengths_B) if isinstance(part, Padding) else None
            if lengths is not None and (np.any(lengths < 0) or np.any(lengths > S)):
                raise ConfigError(f"lengths {lengths.tolist()} of rows with {S} keys")
        for name, size in rows:
            if B is not None and size not in (1, B):
                raise ConfigError(f"{name} of {size} rows in a batch of {B}")

    def _with(self, other: Self) -> Self:
        """The parts of both, in order, over the positions that either has."""

        def either(a: Any, b: Any, side: str) -> Any:
            if a is not None and b is not None and a is not b:
                kind = type(self).__name__.lower()
                raise ConfigError(f"{side} positions in both parts of a {kind}: set them once, with .at()")
            return b if a is None else a

        return type(self)(
            self.parts + other.parts,
            either(self.q_positions_BT, other.q_positions_BT, "query"),
            either(self.k_positions_BS, other.k_positions_BS, "key"),
        )

    def _place(self, q_slots_T: jax.Array, k_slots_S: jax.Array) -> Block:
        """The block of these slots, each at its position."""

        def positions(table: jax.Array | None, slots: jax.Array) -> jax.Array:
            return slots[None] if table is None else table[:, slots]

        return Block(
            q_slots_T,
            k_slots_S,
            positions(self.q_positions_BT, q_slots_T)[:, None, :, None],
            positions(self.k_positions_BS, k_slots_S)[:, None, None, :],
        )


@struct.dataclass
class Mask(Placed):
    """A conjunction of parts; no parts: everything may attend to everything."""

    def __and__(self, other: Self) -> Self:
        return self._with(other)

    @property
    def is_full(self) -> bool:
        """Whether it is known, without its numbers, that nothing is masked."""
        return not self.parts

    def hides(self, T: int, S: int) -> bool:
        """Whether one of S keys may be hidden from all of T queries: by padding and the like, or by its slot.

        Where T = S and positions are those of the slots, or both sides' the same, a token sees itself.
        """
        at_slots = self.q_positions_BT is None and self.k_positions_BS is None
        return any(isinstance(part, DATA_DEPENDENT) or (at_slots and T != S) for part in self.parts)

    def block(self, q_slots_T: jax.Array, k_slots_S: jax.Array) -> jax.Array:
        """Booleans [B or 1, N or 1, T, S] for a block of query slots against a block of key slots."""
        block = self._place(q_slots_T, k_slots_S)
        allowed = jnp.ones((1, 1, len(q_slots_T), len(k_slots_S)), bool)
        for part in self.parts:
            allowed = allowed & part.allows(block)
        return allowed

    def dense(self, T: int, S: int) -> jax.Array:
        """The whole mask as booleans [B or 1, N or 1, T, S]. Raises ConfigError where a part has another size."""
        self.check(T, S)
        return self.block(jnp.arange(T), jnp.arange(S))

    def pairs(self, T: int, S: int, rows: int = 256) -> int:
        """How many (query, key) pairs it allows, summed over its batch and heads, `rows` queries at a time."""
        starts = range(0, T, rows)
        keys = jnp.arange(S)
        blocks = (self.block(jnp.arange(i, min(i + rows, T)), keys) for i in starts)
        return sum(int(np.count_nonzero(np.asarray(block))) for block in blocks)


def known(value: ArrayLike) -> np.ndarray | None:
    """The value where it is a number (or array) already, None where it is traced."""
    return None if isinstance(value, jax.core.Tracer) else np.asarray(value)


def _positive(name: str, value: ArrayLike, low: int) -> ArrayLike:
    """`value`, refused where it is no whole number, or a known one below `low`; traced numbers pass."""
    if not jnp.issubdtype(jnp.result_type(value), jnp.integer):
        raise ConfigError(f"{name}={value} is no whole number")
    if (number := known(value)) is not None and np.any(number < low):
        raise ConfigError(f"{name}={value} is out of range: at least {low}")
    return value


def full() -> Mask:
    """Nothing is masked."""
    return Mask()


def causal() -> Mask:
    """Each position sees itself and the past."""
    return Mask((Causal(),))


def inverted() -> Mask:
    """The printed formula of S2 §8.1 (see `Inverted`)."""
    return Mask((Inverted(),))


def window(width: ArrayLike) -> Mask:
    """Causal, the nearest `width` keys, the query's own included."""
    return Mask((Causal(), Window(_positive("window", width, 1))))


def prefix_lm(length: ArrayLike) -> Mask:
    """Causal with a bidirectional prefix of `length` (a number or [B])."""
    return Mask((PrefixLM(_positive("prefix", length, 0)),))


def block_sparse(size: ArrayLike) -> Mask:
    """Causal, in blocks of `size`: own, previous and first."""
    return Mask((Causal(), BlockSparse(_positive("block_size", size, 1))))


def padding(lengths_B: jax.Array) -> Mask:
    """Hide the keys at and beyond each row's length."""
    lengths_B = jnp.asarray(lengths_B)
    if lengths_B.ndim != 1:
        raise ConfigError(f"lengths of shape {lengths_B.shape}: give one a row, [B]")
    return Mask((Padding(lengths_B),))


def cross(source_lengths_B: jax.Array | None) -> Mask:
    """Decoder queries on encoder keys: all real source positions (None: all)."""
    return full() if source_lengths_B is None else padding(source_lengths_B)


def segments(q_ids_BT: jax.Array, k_ids_BS: jax.Array | None = None) -> Mask:
    """Only within a segment; keys default to the queries' ids."""
    return Mask((Segments(q_ids_BT, q_ids_BT if k_ids_BS is None else k_ids_BS),))


def dense(allowed: jax.Array) -> Mask:
    """Any boolean array, [T, S] or [B or 1, N or 1, T or 1, S]; True may attend.

    Raises ConfigError for another dtype: a 0/1 array could mean either polarity.
    """
    allowed = jnp.asarray(allowed)
    if allowed.dtype != bool:
        raise ConfigError(f"a mask of {allowed.dtype}: masks are boolean, True may attend; biases go to `bias`")
    if allowed.ndim not in (2, 4):
        raise ConfigError(f"a mask of shape {allowed.shape}: give [T, S] or [B, N, T, S]")
    return Mask((Dense(allowed[None, None] if allowed.ndim == 2 else allowed),))


def segment_ids(mask: Mask) -> jax.Array | None:
    """The queries' segment ids [B or 1, T], of the first part that has them; None without one."""
    return next((part.q_ids_BT for part in mask.parts if isinstance(part, Segments)), None)


def looks_back(mask: Mask) -> bool:
    """Whether the mask is causal, among other things: no query sees a key after it."""
    return any(isinstance(part, Causal) for part in mask.parts)


def from_config(config: Config, hyper: Hyper) -> Mask:
    """The decoder's self-attention mask that `config.mask` names, with Hyper's numbers."""
    made = {
        "causal": lambda: causal(),
        "none": lambda: full(),
        "inverted": lambda: inverted(),
        "window": lambda: window(hyper.window),
        "prefix": lambda: prefix_lm(hyper.prefix),
        "block_sparse": lambda: block_sparse(config.block_size),
    }
    return made[config.mask]()
