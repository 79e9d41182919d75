"""Attention in blocks of keys: the same function as dense, in memory linear in the length.

No [T, S] array exists: the mask and the bias are asked for a block of positions at a time.
Two passes over the keys (Rabe & Staats 2021, Dao et al. 2022 hold one online sum instead):

    1. the largest score of each row, without gradient;
    2. sums of powers and of powers times values, relative to it.

As the second pass only adds, its backward pass needs nothing but the blocks' inputs: one
`jax.checkpoint` a block makes both directions linear, without a custom gradient, and with
derivatives of any order. A block in which the mask allows nothing is skipped, forward and
backward, so that a causal mask costs half and a window its width.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.typing import ArrayLike

from transformer_jax import keys
from transformer_jax.masks import Mask
from transformer_jax.numerics import product_f32
from transformer_jax.relative import Bias
from transformer_jax.scores import Scoring, attention_scores

BLOCK = 128


class Dropout(NamedTuple):
    """Dropout of weights by bits that belong to a (row, head, query, key), whatever the implementation."""

    key: jax.Array
    rate: ArrayLike

    def __call__(self, weights_BNTS: jax.Array, q_slots_T: jax.Array, k_slots_S: jax.Array, T: int) -> jax.Array:
        """weights of a block, some 0 and the others over 1 - rate; T: queries of the whole row."""
        B, N = weights_BNTS.shape[:2]
        rows = jnp.arange(B * N, dtype=jnp.uint32).reshape(B, N, 1, 1) * jnp.uint32(T)
        rows = rows + q_slots_T.astype(jnp.uint32)[None, None, :, None]
        columns = k_slots_S.astype(jnp.uint32)[None, None, None, :]
        return keys.dropout_at(weights_BNTS, self.rate, self.key, "attention", rows, columns)


class Keys(NamedTuple):
    """A block of keys and values, with its slots."""

    k_BSKH: jax.Array
    v_BSKH: jax.Array
    slots_S: jax.Array


def blockwise(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    mask: Mask,
    scoring: Scoring,
    *,
    bias: Bias | None = None,
    dropout: Dropout | None = None,
    block: int = 0,
) -> jax.Array:
    """[B, T, N, H], equal to dense attention; memory O((T + S) H + block²) for each row and head.

    block: queries and keys taken at a time; 0: 128. Lengths need not be multiples of it.
    The normaliser is softmax (a sink is allowed), sigmoid or relu.
    """
    T, S = q_BTNH.shape[1], k_BSKH.shape[1]
    mask.check(T, S)
    if bias is not None:
        bias.check(T, S)
    q_size, k_size = min(block or BLOCK, T), min(block or BLOCK, S)
    rest = Keys(blocks(k_BSKH, k_size), blocks(v_BSKH, k_size), _slots(S, k_size))
    ends = (T if T % q_size else None, S if S % k_size else None)
    shared = Block(mask, bias, scoring, dropout, T, *ends, mask.hides(T, S))
    xs = (blocks(q_BTNH, q_size), _slots(T, q_size))
    out = jax.lax.map(lambda x: _query_block(x[0], x[1], rest, shared), xs)
    return rearrange(out, "blocks b t n h -> b (blocks t) n h")[:, :T]


def blocks(x: jax.Array, size: int) -> jax.Array:
    """[B, T, …] -> [blocks, B, size, …], with zeros at the end where T is no multiple of size."""
    padding = [(0, 0)] * x.ndim
    padding[1] = (0, -x.shape[1] % size)
    return rearrange(jnp.pad(x, padding), "b (blocks t) ... -> blocks b t ...", t=size)


def _slots(T: int, size: int) -> jax.Array:
    """[blocks, size]; the last block may run past T."""
    return jnp.arange(T + -T % size).reshape(-1, size)


class Block(NamedTuple):
    """What is the same for every pair of a query block and a key block."""

    mask: Mask
    bias: Bias | None
    scoring: Scoring
    dropout: Dropout | None
    T: int
    q_end: int | None  # the number of queries, where the last block is not full
    k_end: int | None  # and of keys
    hides: bool  # whether a key may be hidden from all queries

    def sink(self) -> jax.Array | None:
        """[1, N, 1, 1], float32."""
        return None if self.scoring.sink_N is None else self.scoring.sink_N.astype(jnp.float32)[None, :, None, None]

    def allowed(self, q_slots: jax.Array, k_slots: jax.Array) -> jax.Array:
        allowed = self.mask.block(q_slots, k_slots)
        if self.k_end is not None:
            allowed = allowed & (k_slots < self.k_end)[None, None, None, :]
        if self.q_end is not None:
            # Queries that fill up the last block see nothing: what they made of a bias of -inf would be NaN,
            # and 0 times it in the gradient of every key.
            allowed = allowed & (q_slots < self.q_end)[None, None, :, None]
        return allowed

    def scores(self, q: jax.Array, q_slots: jax.Array, kv: Keys, allowed: jax.Array) -> jax.Array:
        """Float32 scores, -inf where masked."""
        bias = None if self.bias is None else self.bias.block(q_slots, kv.slots_S)
        scores = attention_scores(q, self.shown(kv.k_BSKH, allowed), self.scoring, bias)
        return jnp.where(allowed, scores, -jnp.inf)

    def shown(self, x_BSKH: jax.Array, allowed: jax.Array) -> jax.Array:
        """Keys or values with those that no query of the block may see set to 0: NaN in padding stays there."""
        if not self.hides:
            return x_BSKH
        return jnp.where(jnp.any(allowed, axis=(1, 2))[:, :, None, None], x_BSKH, 0)

    def unless_empty(self, allowed: jax.Array, compute: Callable, otherwise):
        """compute() where the block allows anything, else `otherwise`: a branch that is really not taken."""
        if self.mask.is_full:
            return compute()
        return jax.lax.cond(jnp.any(allowed), compute, lambda: otherwise)


class Sums(NamedTuple):
    """What keys add to a block of queries, float32; sums over different keys add up.

    total [B, N, size, 1]: powers. out [B, N, size, H]: powers times values. some [B, N, size, 1]:
    above 0 where a row saw any key.
    """

    total: jax.Array
    out: jax.Array
    some: jax.Array


def _query_block(q: jax.Array, q_slots: jax.Array, rest: Keys, block: Block) -> jax.Array:
    """[B, size, N, H] of a block of queries against all keys."""
    known = survey(before(q, block), q, q_slots, rest, block)
    return divide(weigh(known, q, q_slots, rest, block), known, block).astype(q.dtype)


def before(q: jax.Array, block: Block) -> jax.Array:
    """[B, N, size, 1], what `survey` begins with: no key was seen."""
    column = jnp.zeros((q.shape[0], q.shape[2], q.shape[1], 1), jnp.float32)
    if block.scoring.normaliser != "softmax":
        return column
    sink = block.sink()
    return jnp.full_like(column, -jnp.inf) if sink is None else column + jax.lax.stop_gradient(sink)


def nothing(q: jax.Array, v: jax.Array) -> Sums:
    """The sums over no keys; only shapes are read."""
    column = jnp.zeros((q.shape[0], q.shape[2], q.shape[1], 1), jnp.float32)
    return Sums(column, jnp.zeros((*column.shape[:3], v.shape[-1]), jnp.float32), column)


def survey(known: jax.Array, q: jax.Array, q_slots: jax.Array, rest: Keys, block: Block) -> jax.Array:
    """`known` with the keys of `rest`: the largest score of each row (softmax), or how many it may see (sigmoid).

    Without gradient: it does not change what the weights are a function of.
    """
    if block.scoring.normaliser == "softmax":
        still_q, still_rest, parts = jax.lax.stop_gradient((q, rest, (block.mask, block.bias, block.scoring)))
        still = Block(*parts, None, *block[4:])

        def higher(top: jax.Array, kv: Keys) -> jax.Array:
            q, kv, slots = _tied(still_q, kv, q_slots)
            allowed = still.allowed(slots, kv.slots_S)

            def largest() -> jax.Array:
                return jnp.maximum(top, jnp.max(still.scores(q, slots, kv, allowed), axis=-1, keepdims=True))

            return still.unless_empty(allowed, largest, top)

        return _fold(higher, known, still_rest)
    if block.scoring.normaliser == "sigmoid":

        def more(count: jax.Array, kv: Keys) -> jax.Array:
            _, kv, slots = _tied(q, kv, q_slots)
            return count + jnp.sum(block.allowed(slots, kv.slots_S), axis=-1, keepdims=True)

        return _fold(more, known, rest)
    return known


def weigh(known: jax.Array, q: jax.Array, q_slots: jax.Array, rest: Keys, block: Block) -> Sums:
    """The sums over the keys of `rest`; known: what `survey` found in *all* keys."""
    normaliser, zero = block.scoring.normaliser, nothing(q, rest.v_BSKH)
    known = _usable(known, block)

    def powers(scores: jax.Array, allowed: jax.Array) -> jax.Array:
        if normaliser == "softmax":
            return jnp.exp(scores - known)
        # Scores of -inf have no finite derivative in these two: masked once more, before and after.
        scores = jnp.where(allowed, scores, 0)
        made = jax.nn.relu(scores) if normaliser == "relu" else jax.nn.sigmoid(scores - jnp.log(known))
        return jnp.where(allowed, made, 0)

    @jax.checkpoint
    def part(q: jax.Array, kv: Keys) -> Sums:
        q, kv, slots = _tied(q, kv, q_slots)
        allowed = block.allowed(slots, kv.slots_S)

        def compute() -> Sums:
            p = powers(block.scores(q, slots, kv, allowed), allowed)
            total = jnp.sum(p, axis=-1, keepdims=True)
            if block.dropout is not None:
                p = block.dropout(p, slots, kv.slots_S, block.T)
            v = block.shown(kv.v_BSKH, allowed)
            grouped = rearrange(p.astype(v.dtype), "b (k g) t s -> b k g t s", k=v.shape[2])
            out = rearrange(product_f32("bkgts,bskh->bkgth", grouped, v), "b k g t h -> b (k g) t h")
            some = jnp.broadcast_to(jnp.any(allowed, axis=-1, keepdims=True), total.shape)
            return Sums(total, out, some.astype(jnp.float32))

        return block.unless_empty(allowed, compute, zero)

    return _fold(lambda sums, kv: jax.tree.map(jnp.add, sums, part(q, kv)), zero, rest)


def divide(sums: Sums, known: jax.Array, block: Block) -> jax.Array:
    """[B, size, N, H], float32: the weighted mean of the values, from the sums over all keys."""
    total, out, some = sums
    sink = block.sink()
    if sink is not None:
        total = total + jnp.exp(sink - _usable(known, block))
    if block.scoring.normaliser == "softmax":
        # As in dense attention: no key, no weight; keys whose scores are all -inf, NaN.
        out = out / jnp.where((some > 0) | (total > 0), total, 1)
    elif block.scoring.normaliser == "relu":
        out = out / jnp.where(total > 0, total, 1)
    return rearrange(out, "b n t h -> b t n h")


def _usable(known: jax.Array, block: Block) -> jax.Array:
    if block.scoring.normaliser == "softmax":
        # A row that allows nothing, or only what a bias of -inf forbids, has no largest score.
        return jnp.where(jnp.isneginf(known), 0, known)
    return jnp.maximum(known, 1)


def _tied(q: jax.Array, kv: Keys, slots: jax.Array) -> tuple[jax.Array, Keys, jax.Array]:
    """The same, in one bundle that JAX cannot take apart.

    Slots are the same in every layer: inside a scan over layers JAX would compute the masks of
    all blocks once, before it, and keep them, [T, S] of them. Bundled with q they are its equals.
    """
    return jax.lax.optimization_barrier((q, kv, slots))


def _fold(step: Callable, first, blocks: Keys):
    """step(carry, block) over the key blocks."""
    return jax.lax.scan(lambda carry, kv: (step(carry, kv), None), first, blocks)[0]
