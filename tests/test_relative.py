"""Position biases: slopes and buckets against other implementations, blocks against loops, refusals."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.quick import jit
from tests.test_beam import PAIR
from tests.test_decode import HYPER, parameters
from transformer_jax import masks, relative
from transformer_jax.errors import ConfigError
from transformer_jax.layers import apply_stack
from transformer_jax.relative import Bias, alibi_slopes, relative_buckets

GOLDEN = Path(__file__).parents[2] / "shared" / "golden"
buckets_of = jax.jit(relative_buckets, static_argnames=("buckets", "distance", "bidirectional"))


def loop(f: Callable[[int, int, int, int], float], *shape: int) -> np.ndarray:
    """f(row, head, query, key) in float64, one at a time: [B, N, T, S]."""
    return np.array([f(*where) for where in np.ndindex(*shape)]).reshape(shape)


def bucket(relative: int, buckets: int, distance: int, bidirectional: bool) -> int:
    """T5's formula for one number, in float64; a logarithm within 1e-9 of a whole number is that number."""
    n, start = (buckets // 2, buckets // 2 if relative > 0 else 0) if bidirectional else (buckets, 0)
    r = abs(relative) if bidirectional else max(-relative, 0)
    exact = n // 2
    if r < exact:
        return start + r
    wide = math.log(r / exact) / math.log(distance / exact) * (n - exact)
    return start + min(exact + math.floor(wide + 1e-9), n - 1)


@jax.jit
def blocked(bias: Bias, q_slots: jax.Array, k_slots: jax.Array) -> jax.Array:
    return bias.block(q_slots, k_slots)


def table(C: int, N: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((C, N)).astype(np.float32)


# --- ALiBi ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("N", "powers"),
    [
        (1, [8]),
        (2, [4, 8]),
        (3, [4, 8, 2]),
        (4, [2, 4, 6, 8]),
        (6, [2, 4, 6, 8, 1, 3]),
        (8, [1, 2, 3, 4, 5, 6, 7, 8]),
        (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),
    ],
)
def test_slopes(N: int, powers: list[float]) -> None:
    got = alibi_slopes(N)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, [2.0**-p for p in powers], rtol=1e-7)


@pytest.mark.skipif(not GOLDEN.exists(), reason="the golden values are not beside this checkout")
def test_slopes_equal_bloom() -> None:
    golden = json.loads((GOLDEN / "alibi.json").read_text())
    np.testing.assert_array_equal(alibi_slopes(golden["heads"]), np.float32(golden["slopes"]))


def test_alibi_is_a_slope_times_the_distance() -> None:
    slopes = [2.0**-4, 2.0**-8, 2.0**-2]
    got = relative.alibi(3).dense(5, 7)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, loop(lambda b, n, i, j: -slopes[n] * abs(i - j), 1, 3, 5, 7))


def test_alibi_is_the_same_anywhere() -> None:
    bias = relative.alibi(2)
    near, far = bias.dense(5, 5), bias.at(jnp.arange(5)[None] + 70000, jnp.arange(5)[None] + 70000).dense(5, 5)
    np.testing.assert_array_equal(near, far)


# --- T5 ---------------------------------------------------------------------------


@pytest.mark.skipif(not GOLDEN.exists(), reason="the golden values are not beside this checkout")
@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_equal_hugging_face(bidirectional: bool) -> None:
    with np.load(GOLDEN / "t5_buckets.npz") as golden:
        got = buckets_of(golden["relative_position"], buckets=32, distance=128, bidirectional=bidirectional)
        np.testing.assert_array_equal(got, golden[f"buckets_bidirectional_{bidirectional}"])


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(
    ("buckets", "distance"), [(32, 128), (32, 512), (8, 32), (6, 7), (64, 4096), (4, 3), (12, 1029), (6, 6591), (16, 9)]
)
def test_buckets_are_the_formula(buckets: int, distance: int, bidirectional: bool) -> None:
    limit = max(200, distance + 3)
    relatives = np.arange(-limit, limit + 1)
    got = buckets_of(relatives, buckets=buckets, distance=distance, bidirectional=bidirectional)
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, [bucket(int(r), buckets, distance, bidirectional) for r in relatives])
    ends = np.array([-(2**31), -(2**31) + 1, 2**31 - 1], np.int32)
    last = buckets // 2 - 1 if bidirectional else buckets - 1
    want = [last, last, buckets - 1 if bidirectional else 0]
    got = buckets_of(ends, buckets=buckets, distance=distance, bidirectional=bidirectional)
    np.testing.assert_array_equal(got, want)


def test_buckets_at_their_edges_by_hand() -> None:
    # 16 buckets a direction: 8 exact, then a bucket for each factor of sqrt(2): 8, 11.3, 16, 22.6, 32, 45.3, 64, 90.5.
    at = {7: 7, 8: 8, 11: 8, 12: 9, 15: 9, 16: 10, 22: 10, 23: 11, 31: 11, 32: 12, 63: 13, 64: 14, 90: 14, 91: 15}
    got = buckets_of(-np.array(list(at)), buckets=32, distance=128, bidirectional=True)
    assert got.tolist() == list(at.values())
    ahead = buckets_of(np.array(list(at)), buckets=32, distance=128, bidirectional=True)
    assert ahead.tolist() == [16 + b for b in at.values()]
    # 3 exact, 3 wide, each 13 times the last: from 3, 39, 507. A float32 logarithm falls short of both edges.
    got = buckets_of(-np.array([38, 39, 506, 507, 6591]), buckets=6, distance=3 * 13**3, bidirectional=False)
    assert got.tolist() == [3, 4, 4, 5, 5]


@pytest.mark.parametrize(
    ("buckets", "distance", "bidirectional", "message"),
    [
        (7, 128, True, "relative_buckets=7 is odd"),
        (2, 128, True, "relative_buckets=2 is too few: at least 4"),
        (1, 128, False, "relative_buckets=1 is too few: at least 2"),
        (0, 128, False, "relative_buckets=0 is too few: at least 2"),
        (32, 8, True, "relative_distance=8 with relative_buckets=32: above 8"),
        (32, 16, False, "relative_distance=16 with relative_buckets=32: above 16"),
    ],
)
def test_counts_that_are_refused(buckets: int, distance: int, bidirectional: bool, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        relative_buckets(jnp.arange(3), buckets=buckets, distance=distance, bidirectional=bidirectional)
    with pytest.raises(ConfigError, match=message):
        relative.t5(jnp.zeros((buckets, 2)), distance=distance, bidirectional=bidirectional)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_reads_its_table(bidirectional: bool) -> None:
    values = table(6, 3)
    got = relative.t5(jnp.asarray(values), distance=7, bidirectional=bidirectional).dense(11, 13)
    want = loop(lambda b, n, i, j: values[bucket(j - i, 6, 7, bidirectional), n], 1, 3, 11, 13)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, want)
    # Key - query, not the other way round: a key ahead is another bucket, or bucket 0.
    assert float(got[0, 0, 0, 1]) == values[4 if bidirectional else 0, 0]
    assert float(got[0, 0, 1, 0]) == values[1, 0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gradients_reach_the_table(dtype: str) -> None:
    weights = np.random.default_rng(1).standard_normal((1, 3, 5, 7)).astype(np.float32)

    @jax.jit
    @jax.grad
    def slope(values: jax.Array) -> jax.Array:
        return jnp.sum(relative.t5(values, distance=7, bidirectional=True).dense(5, 7) * weights)

    want = np.zeros((6, 3))
    for n, i, j in np.ndindex(3, 5, 7):
        want[bucket(j - i, 6, 7, True), n] += weights[0, n, i, j]
    got = slope(jnp.asarray(table(6, 3), dtype))
    assert got.dtype == jnp.dtype(dtype)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=1e-5 if dtype == "float32" else 3e-2)


def test_init_t5(key: jax.Array) -> None:
    got = relative.init_t5(key, 101, 53, 16)
    assert got.shape == (101, 53) and float(jnp.std(got)) == pytest.approx(0.25, rel=0.03)


# --- any array, and sums ----------------------------------------------------------


def every_part() -> Bias:
    """A sum of all kinds over two rows of 7 slots and 3 heads."""
    values = np.random.default_rng(2).standard_normal((2, 3, 7, 7)).astype(np.float32)
    values[0, 1, 2, 3] = -np.inf
    made = relative.alibi(3) + relative.t5(jnp.asarray(table(6, 3)), distance=7, bidirectional=True)
    return made + relative.dense(jnp.asarray(values)) + relative.dense(np.arange(7.0)[None, None, None])


def test_dense_arrays_broadcast() -> None:
    for shape in ((1, 1, 1, 7), (2, 1, 1, 7), (2, 3, 5, 7), (1, 3, 5, 1)):
        values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        got = relative.dense(jnp.asarray(values)).dense(5, 7)
        assert got.shape == (*shape[:2], 5, 7)
        np.testing.assert_array_equal(got, np.broadcast_to(values, got.shape))
    square = np.arange(35.0).reshape(5, 7)
    np.testing.assert_array_equal(relative.dense(square).dense(5, 7), square[None, None])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_infinities_and_the_types_ends_stay(dtype: str) -> None:
    values = jnp.array([[-jnp.inf, jnp.inf, jnp.finfo(dtype).min]], dtype)
    got = (relative.dense(values) + Bias()).dense(1, 3)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got[0, 0, 0], np.asarray(values, np.float32)[0])


def test_a_sum_is_its_parts_in_any_order() -> None:
    a, b, c = relative.alibi(3), relative.dense(np.ones((2, 1, 5, 7))), relative.dense(table(5, 7))
    want = sum(np.asarray(part.dense(5, 7), np.float64) for part in (a, b, c))
    for together in (a + b + c, c + (b + a), Bias() + a + (b + c)):
        np.testing.assert_allclose(together.dense(5, 7), want, atol=1e-6)
    np.testing.assert_array_equal(Bias().dense(5, 7), np.zeros((1, 1, 5, 7)))


def test_blocks_tile_the_whole() -> None:
    bias = every_part()
    whole = bias.dense(7, 7)
    assert whole.shape == (2, 3, 7, 7)
    for rows in (slice(0, 3), slice(3, 7)):
        for cols in (slice(0, 5), slice(5, 7)):
            block = blocked(bias, np.arange(7)[rows], np.arange(7)[cols])
            np.testing.assert_array_equal(block, whole[:, :, rows, cols])


def test_slots_past_the_end_read_the_last() -> None:
    bias = every_part()
    tail = blocked(bias.at(jnp.arange(7)[None], jnp.arange(7)[None]), np.arange(4, 9), np.arange(5, 11))
    whole = np.asarray(bias.dense(7, 7))
    np.testing.assert_array_equal(tail, whole[:, :, np.minimum(range(4, 9), 6)][..., np.minimum(range(5, 11), 6)])


def test_positions_per_row_not_slots() -> None:
    # Row 1 is padded on the left by two slots; the queries are the last two of a cache of 5.
    k = np.array([[0, 1, 2, 3, 4], [0, 0, 0, 1, 2]])
    q, values, slopes = k[:, 3:], table(6, 3), [2.0**-4, 2.0**-8, 2.0**-2]
    bias = relative.alibi(3) + relative.t5(jnp.asarray(values), distance=7, bidirectional=False)
    got = bias.at(jnp.asarray(q), jnp.asarray(k)).dense(2, 5)

    def want(b: int, n: int, i: int, j: int) -> float:
        away = int(k[b, j] - q[b, i])
        return np.float32(-slopes[n] * abs(away)) + values[bucket(away, 6, 7, False), n]

    np.testing.assert_allclose(got, loop(want, 2, 3, 2, 5), atol=1e-6)
    assert np.max(np.abs(got[0] - got[1])) > 0.1


def test_positions_survive_composition() -> None:
    at, other = relative.alibi(2).at(jnp.array([[3, 4]]), None), relative.dense(np.ones((2, 5)))
    for both in (at + other, other + at):
        np.testing.assert_array_equal(both.dense(2, 5), at.dense(2, 5) + 1)
    with pytest.raises(ConfigError, match="query positions in both parts of a bias"):
        at + Bias().at(jnp.array([[0, 1]]), None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: relative.dense(np.ones((3, 5))).dense(3, 7), r"DenseBias bias of \(3, 5\).*\(3, 7\)"),
        (lambda: relative.alibi(2).at(jnp.arange(4)[None], None).dense(3, 5), r"query positions of 4 .*\(3, 5\)"),
        (lambda: relative.alibi(2).at(None, jnp.arange(4)[None]).dense(3, 5), r"key positions of 4 .*\(3, 5\)"),
        (lambda: relative.dense(np.ones((3, 5), bool)), "a bias of bool"),
        (lambda: relative.dense(np.ones((1, 3, 5))), r"shape \(1, 3, 5\)"),
        (lambda: alibi_slopes(0), "num_heads=0"),
    ],
)
def test_what_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_c2_float_positions_are_refused(dtype: str) -> None:
    positions = jnp.arange(3)[None].astype(dtype)
    t5 = relative.t5(jnp.asarray(table(6, 2)), distance=7, bidirectional=True)
    for bias in (relative.alibi(2), t5):
        with pytest.raises(TypeError, match=f"query positions are {dtype}"):
            bias.at(positions, positions)
        at = jnp.arange(3)
        block = masks.Block(at, at, positions[:, None, :, None], positions[:, None, None, :])  # past .at()
        with pytest.raises(TypeError, match=f"relative positions are {dtype}"):
            bias.parts[0].biases(block)


def test_biases_are_pytrees() -> None:
    @jax.jit
    @chex.assert_max_traces(n=1)
    def dense(bias: Bias) -> jax.Array:
        return bias.dense(5, 5)

    def made(seed: int) -> Bias:
        values = jnp.asarray(np.random.default_rng(seed).standard_normal((6, 3)), jnp.float32)
        return relative.alibi(3) + relative.t5(values, distance=7, bidirectional=True)

    each = [dense(made(seed)) for seed in (0, 1)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), made(0), made(1))
    np.testing.assert_array_equal(jax.vmap(lambda bias: bias.dense(5, 5))(stacked), np.stack(each))
    assert np.max(np.abs(each[0] - each[1])) > 0.1


# --- where they are added -----------------------------------------------------------


@pytest.mark.parametrize("positions", ["t5", "alibi", "rope"])
def test_n8_cross_attention_knows_no_distance(positions: str) -> None:
    """What the encoder gave may be read in any order, with its mask: only self-attention has the bias or the turn."""
    config = PAIR.replace(positions=positions)
    params, rng = parameters(config), np.random.default_rng(0)
    x, memory = (jnp.asarray(rng.normal(size=(1, n, config.D)), jnp.float32) for n in (5, 7))
    allowed, order = rng.random((1, 1, 5, 7)) < 0.6, rng.permutation(7)

    def run(x: jax.Array, memory: jax.Array, allowed: jax.Array) -> jax.Array:
        return apply_stack(
            params.decoder, x, config, HYPER, mask=masks.causal(), positions_BT=jnp.arange(5)[None], memory=memory,
            memory_mask=masks.dense(allowed),
        )[0]  # fmt: skip

    out = jit(run)(x, memory, jnp.asarray(allowed))
    mixed = jit(run)(x, memory[:, order], jnp.asarray(allowed[..., order]))
    np.testing.assert_allclose(mixed, out, atol=1e-5)
    other = jit(run)(x, memory[:, order], jnp.asarray(allowed))
    assert np.abs(other - out).max() > 1e-2, "the mask is no part of this"
