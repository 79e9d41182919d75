"""Attention of rows that are split over devices: blockwise attention, the keys passed round in a ring.

Each of the n devices of a mesh axis holds T/n queries and S/n keys and values (Liu et al. 2023, Ring
Attention). In n turns every device meets all keys, handing those it has to its neighbour, and adds up
what blockwise attention adds up: first the largest score of each row, then the sums. Memory a device
is O((T + S)/n H + block²), forward and backward: keys that have passed are not kept, but passed round
once more in the backward pass, and their gradients with them.

Only this mesh axis is split by hand; batch and heads stay with the compiler, and masks, biases and
dropout are asked for global slots: the numbers do not depend on the mesh.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.sharding import Mesh, PartitionSpec
from jax.typing import ArrayLike

from transformer_jax import attention, masks, relative
from transformer_jax.blockwise import BLOCK, Block, Dropout, Keys, Sums, before, blocks, divide, survey, weigh
from transformer_jax.errors import ConfigError
from transformer_jax.masks import Mask
from transformer_jax.relative import Bias
from transformer_jax.scores import PLAIN, Scoring, check_heads, check_normaliser, check_sink, check_values

Shared = tuple[Mask, Bias | None, Scoring, Dropout | None]


def attend(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    mask: Mask | None = None,
    *,
    mesh: Mesh,
    axis: str = "seq",
    scoring: Scoring = PLAIN,
    bias: Bias | jax.Array | np.ndarray | None = None,
    dropout_rate: ArrayLike | None = None,
    key: jax.Array | None = None,
    weights: bool = False,
    implementation: str = "dense",
    block: int = 0,
    band: int = 0,
) -> Any:
    """`attention.attend` with T and S split over a mesh axis; inside jit.

    Where the axis does not divide T or S, and for linear attention, which is another function,
    it is attention.attend itself, and the compiler's to split.
    Raises ConfigError as attention.attend does, and for what blockwise attention cannot do.
    """
    (B, T, N), S, n = q_BTNH.shape[:3], k_BSKH.shape[1], mesh.shape[axis]
    if implementation == "linear" or T % n or S % n:
        given: Any = {"scoring": scoring, "bias": bias, "dropout_rate": dropout_rate, "key": key, "weights": weights}
        given |= {"implementation": implementation, "block": block, "band": band}
        return attention.attend(q_BTNH, k_BSKH, v_BSKH, mask, **given)
    check_heads(q_BTNH, k_BSKH)
    check_values(q_BTNH, k_BSKH, v_BSKH)
    mask = masks.full() if mask is None else mask
    bias = bias if isinstance(bias, Bias | None) else relative.dense(bias)
    dropout = None if dropout_rate is None or key is None else Dropout(key, dropout_rate)
    check_normaliser(scoring)
    check_sink(scoring, N)
    for feature, detail in attention.asked(mask, scoring, bias, dropout, weights, T, S).items():
        if feature not in attention.CAPABILITIES["blockwise"]:
            raise ConfigError(f"rows split over devices ({axis}:{n}) cannot do {feature}{detail}: leave {axis} out")
    for part in (mask, bias):
        if part is not None:
            part.check(T, S, B, N)
    return ring(q_BTNH, k_BSKH, v_BSKH, mask, scoring, mesh=mesh, axis=axis, bias=bias, dropout=dropout, block=block)


def ring(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    mask: Mask,
    scoring: Scoring,
    *,
    mesh: Mesh,
    axis: str = "seq",
    bias: Bias | None = None,
    dropout: Dropout | None = None,
    block: int = 0,
) -> jax.Array:
    """[B, T, N, H], equal to blockwise attention; T and S are multiples of the axis."""
    T, S, n = q_BTNH.shape[1], k_BSKH.shape[1], mesh.shape[axis]
    q_size, k_size = min(block or BLOCK, T // n), min(block or BLOCK, S // n)
    ends: Any = T, T, S, mask.hides(T, S)

    def local(place: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, shared: Shared) -> jax.Array:
        """[B, T/n, N, H] on one device; place: its number in the ring, [1]."""
        queries, slots = blocks(q, q_size), _slots(place[0], T, n, q_size)

        def of(owner: jax.Array, k: jax.Array, v: jax.Array) -> Keys:
            """The keys of the device `owner`, in blocks."""
            return Keys(blocks(k, k_size), blocks(v, k_size), _slots(owner, S, n, k_size))

        def look(turn: jax.Array, known: jax.Array, k: jax.Array) -> jax.Array:
            rest, parts = of((place[0] + turn) % n, k, k), Block(*jax.lax.stop_gradient(shared), *ends)
            return jax.lax.map(lambda xs: survey(xs[0], xs[1], xs[2], rest, parts), (known, queries, slots))

        def weighed(turn: jax.Array, given: Any, kv: tuple[jax.Array, jax.Array]) -> Sums:
            place, known, queries, slots, (mask, bias, scoring, dropout) = given
            rest, parts = of((place[0] + turn) % n, *kv), Block(mask, bias, scoring, dropout, *ends)
            return jax.lax.map(lambda xs: weigh(xs[0], xs[1], xs[2], rest, parts), (known, queries, slots))

        parts = Block(*shared, *ends)
        known = jax.lax.map(lambda q: before(q, parts), queries)
        if scoring.normaliser != "relu":
            known = _round(look, known, jax.lax.stop_gradient(k), axis, n)
        sums = _sum(weighed, (place, known, queries, slots, shared), (k, v), axis, n)
        out = jax.lax.map(lambda xs: divide(xs[0], xs[1], parts), (sums, known))
        return rearrange(out, "blocks b t n h -> b (blocks t) n h")[:, : T // n].astype(q.dtype)

    rows, whole = PartitionSpec(None, axis), PartitionSpec()
    split = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(PartitionSpec(axis), rows, rows, rows, whole),
        out_specs=rows,
        axis_names={axis},
        check_vma=False,
    )
    return split(jnp.arange(n), q_BTNH, k_BSKH, v_BSKH, (mask, bias, scoring, dropout))


def _pass(x: Any, axis: str, n: int) -> Any:
    """Arrays of the next device in the ring; n times, and all have their own again."""
    return jax.tree.map(lambda a: jax.lax.ppermute(a, axis, [((i + 1) % n, i) for i in range(n)]), x)


def _round(step: Callable[..., Any], first: Any, passed: Any, axis: str, n: int) -> Any:
    """step(turn, carry, passed) over the n turns in which `passed` goes round."""

    def turn(carry: tuple[Any, Any], i: jax.Array) -> tuple[tuple[Any, Any], None]:
        found, passed = carry
        return (step(i, found, passed), _pass(passed, axis, n)), None

    return jax.lax.scan(turn, (first, passed), jnp.arange(n))[0][0]


def _sum(f: Callable[..., Any], given: Any, passed: Any, axis: str, n: int) -> Any:
    """sum of f(turn, given, passed) over the turns, differentiable with what is passed round, not kept.

    As it is a sum, each term has the same cotangent: the backward pass goes round once more, with the
    gradient of what is passed beside it. f closes over no array: all that it reads is `given`. Backward
    passes of backward passes work (and keep what is passed); forward-mode derivatives do not.
    """
    leaves, tree = jax.tree.flatten(given)
    moving = [x if jnp.issubdtype(x.dtype, jnp.inexact) else None for x in leaves]
    fixed = [x if m is None else None for x, m in zip(leaves, moving, strict=True)]  # without gradient

    def term(turn: jax.Array, moving: list, fixed: list, passed: Any) -> Any:
        either = [x if m is None else m for x, m in zip(fixed, moving, strict=True)]
        return f(turn, jax.tree.unflatten(tree, either), passed)

    @jax.custom_vjp
    def total(moving: list, fixed: list, passed: Any) -> Any:
        shapes = jax.eval_shape(term, 0, moving, fixed, passed)
        zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        def add(turn: jax.Array, sums: Any, passed: Any) -> Any:
            return jax.tree.map(jnp.add, sums, term(turn, moving, fixed, passed))

        return _round(add, zero, passed, axis, n)

    def backward(kept: tuple, cotangent: Any) -> tuple:
        moving, fixed, passed = kept

        def add(turn: jax.Array, carry: tuple, passed: Any) -> tuple:
            slopes, its_slopes = carry
            _, pull = jax.vjp(lambda moving, passed: term(turn, moving, fixed, passed), moving, passed)
            slopes, its_slopes = jax.tree.map(jnp.add, (slopes, its_slopes), pull(cotangent))
            return slopes, _pass(its_slopes, axis, n)

        slopes, its_slopes = _round(add, jax.tree.map(jnp.zeros_like, (moving, passed)), passed, axis, n)
        return slopes, None, its_slopes

    total.defvjp(lambda *args: (total(*args), args), backward)
    return total(moving, fixed, passed)


def _slots(place: jax.Array, length: int, n: int, size: int) -> jax.Array:
    """[blocks, size]: the global slots of a device's part; what only fills the last block is past the end."""
    part = length // n
    i = jnp.arange(part + -part % size)
    return jnp.where(i < part, place * part + i, length).reshape(-1, size)
