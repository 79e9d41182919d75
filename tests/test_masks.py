"""Masks: every kind against a predicate, composition, positions, counts, refusals, and rows without a key."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from tests.quick import jit
from transformer_jax import masks
from transformer_jax.attention import attend
from transformer_jax.config import MASKS, Config, Hyper
from transformer_jax.errors import ConfigError
from transformer_jax.positions import sinusoidal
from transformer_jax.scores import Scoring, masked_softmax

HYPER = Hyper(window=3, prefix=4)
jit_attend = jit(attend, static_argnames=("weights", "implementation", "block", "band"))


def inputs(T: int = 5, S: int = 7, K: int = 6) -> tuple[np.ndarray, ...]:
    """q, k, v with 2 rows and 6 heads of 3."""
    rng = np.random.default_rng(0)
    shapes = (2, T, 6, 3), (2, S, K, 3), (2, S, K, 3)
    return tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)


def as_array(mask: masks.Mask, T: int, S: int) -> np.ndarray:
    return np.asarray(mask.dense(T, S))


@pytest.mark.parametrize(("T", "S"), [(11, 11), (7, 13), (13, 7), (1, 5)])
@pytest.mark.parametrize("kind", MASKS)
def test_every_kind_is_its_predicate(kind: str, T: int, S: int) -> None:
    see = reference.predicate(kind, window=3, prefix=4, block=2)
    got = as_array(masks.from_config(Config(mask=kind, block_size=2), HYPER), T, S)
    assert got.dtype == bool
    np.testing.assert_array_equal(got, reference.mask_array(lambda b, n, i, j: see(i, j), 1, 1, T, S))


def test_constructors_are_the_kinds() -> None:
    made = {
        "causal": masks.causal(),
        "none": masks.full(),
        "inverted": masks.inverted(),
        "window": masks.window(3),
        "prefix": masks.prefix_lm(4),
        "block_sparse": masks.block_sparse(2),
    }
    assert set(made) == set(MASKS)
    for kind, mask in made.items():
        want = masks.from_config(Config(mask=kind, block_size=2), HYPER)
        np.testing.assert_array_equal(as_array(mask, 11, 11), as_array(want, 11, 11))


def test_by_hand() -> None:
    np.testing.assert_array_equal(
        as_array(masks.causal(), 3, 3)[0, 0], np.array([[1, 0, 0], [1, 1, 0], [1, 1, 1]], bool)
    )
    np.testing.assert_array_equal(
        as_array(masks.prefix_lm(2), 4, 4)[0, 0],
        np.array([[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]], bool),
    )
    np.testing.assert_array_equal(
        as_array(masks.block_sparse(2), 7, 7)[0, 0][5:],
        np.array([[1, 1, 1, 1, 1, 1, 0], [1, 1, 0, 0, 1, 1, 1]], bool),
    )


def test_d07_inverted_shows_the_future_and_hides_the_past() -> None:
    got = as_array(masks.inverted(), 5, 5)[0, 0]
    np.testing.assert_array_equal(got, np.triu(np.ones((5, 5), bool)))
    assert got[-1].tolist() == [False] * 4 + [True]  # the last query attends only to itself


def test_b13_a_window_of_4_shows_query_10_the_keys_7_to_10() -> None:
    for mask in (masks.window(4), masks.from_config(Config(mask="window"), Hyper(window=4))):
        assert np.flatnonzero(as_array(mask, 13, 13)[0, 0, 10]).tolist() == [7, 8, 9, 10]
        # A cache: one query at position 10 over 13 slots.
        one = mask.at(jnp.array([[10]]), jnp.arange(13)[None])
        assert np.flatnonzero(as_array(one, 1, 13)[0, 0, 0]).tolist() == [7, 8, 9, 10]


def test_b1_positions_not_indices() -> None:
    cached = masks.causal().at(jnp.array([[3, 4]]), None)
    np.testing.assert_array_equal(as_array(cached, 2, 5)[0, 0], np.array([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], bool))


def test_positions_per_row() -> None:
    # Row 1 is padded on the left by two slots.
    positions = jnp.array([[0, 1, 2, 3, 4], [0, 0, 0, 1, 2]])
    mask = (masks.causal() & masks.segments(jnp.array([[1] * 5, [0, 0, 1, 1, 1]]))).at(positions, positions)
    got = as_array(mask, 5, 5)
    assert got.shape == (2, 1, 5, 5)
    np.testing.assert_array_equal(got[0, 0], np.tri(5, dtype=bool))
    np.testing.assert_array_equal(got[1, 0, 2:, 2:], np.tri(3, dtype=bool))
    assert not got[1, 0, 2:, :2].any()


def test_padding_hides_keys_alone() -> None:
    got = as_array(masks.padding(jnp.array([5, 3, 0])), 4, 5)
    for b, length in enumerate((5, 3, 0)):
        np.testing.assert_array_equal(got[b, 0], np.tile(np.arange(5) < length, (4, 1)))
    assert masks.cross(None).is_full
    np.testing.assert_array_equal(as_array(masks.cross(jnp.array([5, 3, 0])), 4, 5), got)


def test_f15_segments() -> None:
    q, k = np.array([[1, 1, 2], [1, 2, 3]]), np.array([[1, 2, 2, 0], [3, 3, 1, 1]])
    got = as_array(masks.segments(jnp.array(q), jnp.array(k)), 3, 4)
    want = reference.mask_array(lambda b, n, i, j: q[b, i] == k[b, j], 2, 1, 3, 4)
    np.testing.assert_array_equal(got, want)
    own = as_array(masks.segments(jnp.array(q)), 3, 3)
    np.testing.assert_array_equal(own, reference.mask_array(lambda b, n, i, j: q[b, i] == q[b, j], 2, 1, 3, 3))


def test_composition_is_conjunction() -> None:
    lengths, ids = jnp.array([7, 4, 2]), jnp.array([[1, 1, 1, 2, 2, 2, 2]] * 3)
    parts = [masks.causal(), masks.padding(lengths), masks.segments(ids), masks.full()]
    want = np.ones((3, 1, 7, 7), bool)
    together = masks.full()
    for part in parts:
        want = want & as_array(part, 7, 7)
        together = together & part
    np.testing.assert_array_equal(as_array(together, 7, 7), want)
    np.testing.assert_array_equal(as_array(parts[2] & (parts[1] & parts[0]), 7, 7), want)


def test_positions_survive_composition() -> None:
    at = masks.causal().at(jnp.array([[3, 4]]), None)
    for both in (at & masks.padding(jnp.array([2, 5])), masks.padding(jnp.array([2, 5])) & at):
        np.testing.assert_array_equal(as_array(both, 2, 5)[1], as_array(at, 2, 5)[0])
    other = masks.full().at(jnp.array([[0, 1]]), None)
    with pytest.raises(ConfigError, match="query positions"):
        at & other
    with pytest.raises(ConfigError, match="key positions"):
        at.at(None, jnp.arange(5)[None]) & masks.full().at(None, jnp.arange(5)[None])


def test_a4_combined_masks_stay_boolean() -> None:
    got = as_array(masks.causal() & masks.padding(jnp.array([5, 3, 1])), 5, 5)
    assert got.dtype == bool and got.shape == (3, 1, 5, 5)
    for b, length in enumerate((5, 3, 1)):
        np.testing.assert_array_equal(got[b, 0], np.tri(5, dtype=bool) & (np.arange(5) < length))


def test_a9_dense_shapes_agree() -> None:
    keys = np.arange(5)[None, :] < np.array([5, 3])[:, None]  # [B, S]
    shapes = [
        keys[:, None, None],
        np.tile(keys[:, None, None], (1, 1, 3, 1)),
        np.tile(keys[:, None, None], (1, 4, 3, 1)),
    ]
    for allowed in shapes:
        got = np.broadcast_to(as_array(masks.dense(jnp.array(allowed)), 3, 5), (2, 4, 3, 5))
        np.testing.assert_array_equal(got, np.broadcast_to(allowed, (2, 4, 3, 5)))
    square = np.arange(15).reshape(3, 5) % 4 == 0
    np.testing.assert_array_equal(as_array(masks.dense(square), 3, 5), square[None, None])
    np.testing.assert_array_equal(as_array(masks.dense(np.array([[[[1], [0], [1]]]], bool)), 3, 5)[0, 0, 1], False)


@pytest.mark.parametrize("dtype", ["int32", "float32", "uint8", "bfloat16"])
def test_a6_numbers_are_refused_as_masks(dtype: str) -> None:
    with pytest.raises(ConfigError, match=rf"mask of {dtype}: masks are boolean, True may attend"):
        masks.dense(jnp.ones((3, 3), dtype))


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"\(3, 5\).*\(3, 7\)"):
        as_array(masks.dense(np.ones((3, 5), bool)), 3, 7)
    with pytest.raises(ConfigError, match=r"\(5, 5\).*\(7, 7\)"):
        as_array(masks.causal() & masks.segments(jnp.zeros((2, 5), jnp.int32)), 7, 7)
    with pytest.raises(ConfigError, match=r"shape \(2, 3, 3\)"):
        masks.dense(np.ones((2, 3, 3), bool))
    # An index past the positions would be clamped, and the last position used twice.
    three = jnp.arange(3)[None]
    with pytest.raises(ConfigError, match=r"query positions of 3 .*\(5, 3\)"):
        as_array(masks.causal().at(three, three), 5, 3)
    with pytest.raises(ConfigError, match=r"key positions of 3 .*\(3, 5\)"):
        as_array(masks.causal().at(three, three), 3, 5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_c2_positions_are_integers(dtype: str) -> None:
    """From 257 on a bfloat16 position is its neighbour's: a causal mask would show the future."""
    places = jnp.arange(300)[None].astype(dtype)
    with pytest.raises(TypeError, match=f"query positions are {dtype}"):
        masks.causal().at(places, None)
    with pytest.raises(TypeError, match=f"key positions are {dtype}"):
        masks.causal().at(None, places)
    with pytest.raises(TypeError, match=f"positions are {dtype}"):
        sinusoidal(places, 4)


def test_lengths_and_sizes_of_another_kind_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"lengths of shape \(\): give one a row"):
        masks.padding(jnp.int32(5))
    for size in (2.5, jnp.float32(3)):
        with pytest.raises(ConfigError, match=f"window={size} is no whole number"):
            masks.window(size)
    with pytest.raises(ConfigError, match="window=0 is out of range: at least 1"):
        masks.from_config(Config(mask="window"), Hyper().replace(window=0))


@pytest.mark.parametrize("make", [masks.window, masks.block_sparse])
def test_sizes_below_one_are_refused(make: object) -> None:
    with pytest.raises(ConfigError, match="0 is out of range: at least 1"):
        make(0)
    with pytest.raises(ConfigError, match="prefix=-1"):
        masks.prefix_lm(-1)
    assert not as_array(masks.prefix_lm(0), 3, 3)[0, 0, 0, 1]


def test_i02_i03_pairs() -> None:
    n, w = 1024, 128
    assert masks.causal().pairs(n, n) == n * (n + 1) // 2 == 524_800
    assert masks.window(w).pairs(n, n) == n * w - w * (w - 1) // 2 == 122_944
    assert masks.full().pairs(n, n) == n * n == 1_048_576


@pytest.mark.parametrize("rows", [1, 3, 11, 256])
def test_pairs_counts_batch_and_heads_whatever_the_block(rows: int) -> None:
    allowed = np.random.default_rng(0).random((2, 3, 11, 7)) < 0.4
    mask = masks.dense(allowed) & masks.padding(jnp.array([7, 2]))
    assert mask.pairs(11, 7, rows=rows) == as_array(mask, 11, 7).sum()


def test_blocks_tile_the_dense_mask() -> None:
    mask = masks.window(3) & masks.padding(jnp.array([7, 2])) & masks.segments(jnp.array([[1, 1, 1, 1, 2, 2, 2]] * 2))
    mask = mask & masks.dense(np.random.default_rng(0).random((2, 3, 7, 7)) < 0.7)
    want = as_array(mask, 7, 7)
    for rows in (slice(0, 3), slice(3, 7)):
        for cols in (slice(0, 5), slice(5, 7)):
            block = mask.block(jnp.arange(7)[rows], jnp.arange(7)[cols])
            np.testing.assert_array_equal(block, want[:, :, rows, cols])


def test_prefix_length_may_differ_by_row() -> None:
    got = as_array(masks.prefix_lm(jnp.array([0, 3])), 5, 5)
    for b, length in enumerate((0, 3)):
        see = reference.predicate("prefix", prefix=length)
        np.testing.assert_array_equal(got[b], reference.mask_array(lambda b, n, i, j, f=see: f(i, j), 1, 1, 5, 5)[0])


def test_numbers_are_traced_and_masks_are_pytrees() -> None:
    @jax.jit
    @chex.assert_max_traces(n=1)
    def allowed(width: jax.Array, mask: masks.Mask) -> jax.Array:
        return (masks.window(width) & mask).dense(7, 7)

    for width in (1, 3, 7):
        got = allowed(jnp.int32(width), masks.padding(jnp.array([width, 7])))
        want = masks.window(width) & masks.padding(jnp.array([width, 7]))
        np.testing.assert_array_equal(got, as_array(want, 7, 7))
    widths = jnp.array([1, 3, 7])
    stacked = jax.vmap(lambda w: masks.window(w).dense(7, 7))(widths)
    assert [int(m.sum()) for m in stacked] == [7, 18, 28]


def test_what_a_mask_knows_of_itself() -> None:
    assert masks.full().is_full and not masks.causal().is_full
    assert not (masks.causal() & masks.window(3)).hides(7, 7) and not masks.full().hides(2, 4)
    assert masks.causal().hides(2, 4) and not masks.causal().at(jnp.arange(2)[None], jnp.arange(4)[None]).hides(2, 4)
    hiding = [masks.padding(jnp.array([2])), masks.segments(jnp.array([[1]])), masks.dense(np.ones((1, 1), bool))]
    assert all((masks.causal() & mask).hides(7, 7) for mask in hiding)


# --- what attend() does with them: rows without a key, constants, NaN ----------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a1_rows_without_a_key_are_0_and_the_others_untouched(dtype: str) -> None:
    q, k, v = (jnp.asarray(a, dtype) for a in inputs(8, 8))
    allowed = np.zeros((8, 8), bool)
    allowed[:4, :4] = True
    out, weights = jit_attend(q, k, v, masks.dense(allowed), scoring=Scoring(score_dtype=dtype), weights=True)
    assert out.dtype == jnp.dtype(dtype)
    out, weights = np.asarray(out, np.float32), np.asarray(weights, np.float32)
    np.testing.assert_array_equal(out[:, 4:], 0)
    np.testing.assert_array_equal(weights[:, :, 4:], 0)
    np.testing.assert_array_equal(weights[..., 4:], 0)
    alone = np.asarray(jit_attend(q[:, :4], k[:, :4], v[:, :4], scoring=Scoring(score_dtype=dtype)), np.float32)
    np.testing.assert_allclose(out[:, :4], alone, atol=1e-6 if dtype == "float32" else 2e-2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a2_gradients_of_rows_without_a_key_are_0(dtype: str) -> None:
    q, k, v = (jnp.asarray(a, dtype) for a in inputs(4, 4))
    bias = jnp.asarray(np.random.default_rng(4).standard_normal((1, 6, 4, 4)), dtype)
    allowed = np.tri(4, dtype=bool)
    allowed[2] = False

    @jit
    def slopes(q: jax.Array, bias: jax.Array, allowed: jax.Array, counts: jax.Array) -> tuple[jax.Array, ...]:
        def loss(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> jax.Array:
            out = attend(q, k, v, masks.dense(allowed), bias=bias, scoring=Scoring(score_dtype=dtype))
            return jnp.sum(counts[None, :, None, None] * out.astype(jnp.float32) ** 2)

        return jax.grad(loss, argnums=(0, 1, 2, 3))(q, k, v, bias)

    rest = np.array([0, 1, 3])
    without = [np.asarray(g, np.float32) for g in slopes(q[:, rest], bias[:, :, rest], allowed[rest], np.ones(3))]
    for counts in (np.ones(4), np.array([1.0, 1.0, 0.0, 1.0])):  # whether or not the loss counts the row
        got = [np.asarray(g, np.float32) for g in slopes(q, bias, allowed, counts)]
        np.testing.assert_array_equal(got[0][:, 2], 0)
        np.testing.assert_array_equal(got[3][:, :, 2], 0)
        for a, b in zip((got[0][:, rest], got[1], got[2], got[3][:, :, rest]), without, strict=True):
            assert np.all(np.isfinite(a)) and np.max(np.abs(b)) > 0.1
            np.testing.assert_allclose(a, b, atol=1e-5 if dtype == "float32" else 0.1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a5_the_masked_weigh_nothing_however_low_the_allowed(dtype: str) -> None:
    scores = jnp.array([[[[-20000.0, 0.0, 0.0]]]], dtype)
    weights = masked_softmax(scores, jnp.array([[[[True, False, False]]]]))
    np.testing.assert_array_equal(np.asarray(weights, np.float32)[0, 0, 0], [1, 0, 0])
    # The same through attend: q.k = -20000.
    q, k, v = jnp.full((1, 1, 1, 1), -100.0, dtype), jnp.array([200.0, 0.0], dtype), jnp.array([3.0, 5.0], dtype)
    mask = masks.dense(np.array([[True, False]]))
    out = attend(q, k.reshape(1, 2, 1, 1), v.reshape(1, 2, 1, 1), mask, scoring=Scoring(score_dtype=dtype))
    assert float(out[0, 0, 0, 0]) == 3.0


def test_a6_an_array_is_no_mask() -> None:
    q, k, v = inputs()
    for array in (np.ones((5, 7), np.int32), np.ones((5, 7), np.float32), np.ones((5, 7), bool)):
        with pytest.raises((AttributeError, TypeError, ConfigError)):
            attend(q, k, v, array)


def test_d06_constants_come_as_bias_and_show_their_nan() -> None:
    q, k, v = inputs()
    zero = np.zeros((1, 1, 5, 7), np.float32)

    def weights(fill: float, dtype: str, mask: masks.Mask | None = None) -> np.ndarray:
        bias = np.array(zero)
        bias[..., 2, :] = fill
        bias[..., 1, 3] = fill
        out = attend(q, k, v, mask, bias=jnp.asarray(bias), scoring=Scoring(score_dtype=dtype), weights=True)[1]
        return np.asarray(out, np.float32)

    for dtype in ("float32", "bfloat16", "float16"):
        low = float(jnp.finfo(dtype).min)
        for fill, uniform in ((-np.inf, False), (-1e9, dtype != "float16"), (low, True)):
            got = weights(fill, dtype)
            np.testing.assert_array_equal(got[:, :, 1, 3], 0)  # beside others, each constant hides
            if uniform:
                np.testing.assert_allclose(got[:, :, 2], 1 / 7, rtol=1e-2)
            else:
                assert np.all(np.isnan(got[:, :, 2]))
            assert np.all(np.isfinite(np.delete(got, 2, axis=2)))
    # Where the *mask* hides the row, no constant of a bias can bring NaN into it.
    hidden = np.ones((5, 7), bool)
    hidden[2] = False
    np.testing.assert_array_equal(weights(-np.inf, "float32", masks.dense(hidden))[:, :, 2], 0)


def test_a9_nan_in_keys_after_all_queries_stays_there() -> None:
    """Two queries and four keys, causal: nobody sees the last two."""
    q, k, v = inputs(2, 4)
    want = attend(q, k, v, masks.causal())
    k[:, 2:], v[:, 2:] = np.nan, np.nan
    for implementation in ("dense", "blockwise"):
        got = attend(q, k, v, masks.causal(), implementation=implementation, block=1)
        np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("kind", ["padding", "segments", "dense"])
def test_a9_nan_in_padding_stays_there(kind: str) -> None:
    q, k, v = inputs(7, 7, K=2)
    lengths = np.array([7, 3])
    hidden = np.arange(7)[None] >= lengths[:, None]
    mask = {
        "padding": masks.padding(jnp.array(lengths)),
        "segments": masks.segments(jnp.ones((2, 7), jnp.int32), jnp.asarray(~hidden, jnp.int32)),
        "dense": masks.dense(~hidden[:, None, None]),
    }[kind] & masks.causal()

    @jit
    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        def loss(*qkv: jax.Array) -> tuple[jax.Array, jax.Array]:
            out = attend(*qkv, mask)
            return jnp.sum(out**2), out

        slopes, out = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)
        return out, slopes

    clean = run(q, k, v)
    for bad in (np.nan, np.inf, 1e30):
        dirty = run(q, np.where(hidden[:, :, None, None], bad, k), np.where(hidden[:, :, None, None], bad, v))
        for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True):
            np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(np.asarray(clean[1][1])[hidden], 0)
