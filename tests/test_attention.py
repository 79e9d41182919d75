"""attend(): against a float64 loop and Flax, by hand, the score factor, dropout, types, programs."""

import functools
import itertools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from tests.quick import jit
from transformer_jax import masks, ring, sharding
from transformer_jax.attention import (
    Attention,
    attend,
    attention,
    init_attention,
)
from transformer_jax.config import MASKS, Config, Hyper
from transformer_jax.errors import ConfigError
from transformer_jax.scores import Scoring, attention_scores, score_factor

B, T, S, N, H = 2, 5, 7, 6, 3
STATIC = ("weights", "implementation", "block", "band")
jit_attend = jit(attend, static_argnames=STATIC)


def inputs(K: int = N, *, T: int = T, S: int = S, width: int = H, seed: int = 0) -> tuple[np.ndarray, ...]:
    """q, k, v; the values may be of another width."""
    rng = np.random.default_rng(seed)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, width)
    return tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)


def mask_named(name: str, T: int, S: int) -> masks.Mask:
    rng = np.random.default_rng(1)
    if name in MASKS:
        return masks.from_config(Config(mask=name, block_size=2), Hyper(window=3, prefix=4))
    return {
        "padding": lambda: masks.padding(jnp.array([S, 3])),
        "segments": lambda: masks.segments(
            jnp.asarray(rng.integers(1, 3, (B, T))), jnp.asarray(rng.integers(1, 3, (B, S)))
        ),
        "dense": lambda: masks.dense(rng.random((B, N, T, S)) < 0.6),
        "causal & padding": lambda: masks.causal() & masks.padding(jnp.array([S, 2])),
    }[name]()


EVERY_MASK = (*MASKS, "padding", "segments", "dense", "causal & padding")


# --- the reference -----------------------------------------------------------------


@pytest.mark.parametrize(("K", "T", "S"), [(6, 7, 7), (6, 5, 7), (2, 7, 5), (1, 5, 7)])
def test_h07_every_mask_equals_the_loop(K: int, T: int, S: int) -> None:
    q, k, v = inputs(K, T=T, S=S, width=5)
    for name in EVERY_MASK:
        allowed = np.asarray(mask_named(name, T, S).dense(T, S))
        # Without jit: operations are compiled once for all masks.
        out, weights = attend(q, k, v, mask_named(name, T, S), weights=True)
        want, want_weights = reference.attend(*map(np.float64, (q, k, v)), allowed)
        np.testing.assert_allclose(out, want, atol=1e-5, err_msg=name)
        np.testing.assert_allclose(weights, want_weights, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("heads", [1, N])
@pytest.mark.parametrize("K", [1, 3, 6])
def test_h07_bias_exponent_temperature_equal_the_loop(K: int, heads: int) -> None:
    q, k, v = inputs(K)
    bias = np.random.default_rng(2).standard_normal((B if heads == 1 else 1, heads, T, S)).astype(np.float32)
    mask = mask_named("dense", T, S)
    allowed = np.asarray(mask.dense(T, S))
    for exponent, temperature in [(0.5, 1.0), (0.0, 1.0), (1.0, 1.0), (0.5, 0.3), (0.25, 2.0)]:
        got = jit_attend(q, k, v, mask, bias=bias, scoring=Scoring(dk_exponent=exponent, temperature=temperature))
        want, _ = reference.attend(
            *map(
                np.float64,
                (
                    q,
                    k,
                    v,
                ),
            ),
            allowed,
            np.float64(bias),
            exponent,
            temperature,
        )
        np.testing.assert_allclose(got, want, atol=1e-5)
    # A bias is added after the factor (article S2 §8.1 puts it before).
    bare = attention_scores(q, k, scoring=Scoring(dk_exponent=1.0, temperature=0.5))
    np.testing.assert_allclose(
        attention_scores(q, k, scoring=Scoring(dk_exponent=1.0, temperature=0.5), bias=bias), bare + bias, atol=1e-6
    )


def test_h07_equals_flax_and_jax() -> None:
    q, k, v = inputs()
    for name in ("causal", "padding", "causal & padding"):
        mask = mask_named(name, T, S)
        allowed = mask.dense(T, S)
        want = nn.dot_product_attention(q, k, v, mask=allowed)
        np.testing.assert_allclose(jit_attend(q, k, v, mask), want, atol=1e-5)
    for K in (1, 2):
        q, k, v = inputs(K)
        want = jax.nn.dot_product_attention(q, k, v, mask=allowed)
        np.testing.assert_allclose(jit_attend(q, k, v, mask), want, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
def test_h08_module_equals_flax(bias: bool) -> None:
    D = 10
    config = Config(d_model=D, num_heads=N, head_dim=4, attention_bias=bias, positions="none")
    rng = np.random.default_rng(3)
    p = jax.tree.map(
        lambda a: jnp.asarray(rng.normal(0, 0.5, a.shape), jnp.float32), init_attention(jax.random.key(0), config)
    )
    x, source = (
        jnp.asarray(rng.normal(size=(B, T, D)), jnp.float32),
        jnp.asarray(rng.normal(size=(B, S, D)), jnp.float32),
    )
    flax = nn.MultiHeadDotProductAttention(num_heads=N, qkv_features=N * 4, out_features=D, use_bias=bias)

    def part(w: jax.Array, b: jax.Array | None) -> dict[str, jax.Array]:
        return {"kernel": w} if b is None else {"kernel": w, "bias": b}

    theirs = {
        "query": part(p.wq_DNH, p.bq_NH),
        "key": part(p.wk_DKH, p.bk_KH),
        "value": part(p.wv_DKH, p.bv_KH),
        "out": part(p.wo_NHD, p.bo_D),
    }
    for y, mask in ((x, masks.causal()), (source, masks.padding(jnp.array([S, 3])))):
        want = jit(flax.apply)({"params": theirs}, x, y, mask=mask.dense(T, y.shape[1]))
        got, trace = jit(attention, static_argnums=4)(p, x, y, mask, config, Hyper())
        np.testing.assert_allclose(got, want, atol=1e-5)
        assert trace is None


def test_h18_two_by_two_by_hand() -> None:
    # q = k = I sqrt(2), d_k = 2: q.k = 2 I, over sqrt(2) is sqrt(2) I; weights e^sqrt2 : 1 = 0.8044 : 0.1956.
    eye = np.sqrt(2) * np.eye(2, dtype=np.float32)[None, :, None, :]
    v = np.array([[10.0, 0.0], [0.0, 1.0]], np.float32)[None, :, None, :]
    out, weights = attend(eye, eye, v, weights=True)
    a = np.exp(np.sqrt(2)) / (np.exp(np.sqrt(2)) + 1)
    assert a == pytest.approx(0.80443, abs=1e-5)
    np.testing.assert_allclose(weights[0, 0], [[a, 1 - a], [1 - a, a]], atol=1e-6)
    np.testing.assert_allclose(out[0, :, 0], [[10 * a, 1 - a], [10 * (1 - a), a]], atol=1e-5)
    masked, weights = attend(eye, eye, v, masks.causal(), weights=True)
    np.testing.assert_allclose(weights[0, 0], [[1, 0], [1 - a, a]], atol=1e-6)
    np.testing.assert_allclose(masked[0, :, 0], [[10, 0], [10 * (1 - a), a]], atol=1e-5)
    # D07: the printed formula lets the first query see the future, and the last only itself.
    np.testing.assert_allclose(
        attend(eye, eye, v, masks.inverted(), weights=True)[1][0, 0], [[a, 1 - a], [0, 1]], atol=1e-6
    )


def test_h06_outputs_are_means_of_the_values() -> None:
    q, k, v = inputs()
    out, weights = jit_attend(q, k, v, scoring=Scoring(temperature=0.1), weights=True)
    np.testing.assert_allclose(np.sum(weights, -1), 1.0, atol=1e-6)
    for n in range(N):
        assert np.all(out[:, :, n] <= v[:, :, n].max(axis=1, keepdims=True) + 1e-5)
        assert np.all(out[:, :, n] >= v[:, :, n].min(axis=1, keepdims=True) - 1e-5)


# --- the factor --------------------------------------------------------------------


def test_n6_scores_are_scaled_by_the_head_width() -> None:
    ones = jnp.ones((1, 1, 4, 16))  # d_model 64
    for exponent, want in ((0.0, 16.0), (0.5, 4.0), (1.0, 1.0)):
        np.testing.assert_array_equal(
            attention_scores(ones, ones, Scoring(dk_exponent=exponent)), np.full((1, 4, 1, 1), want)
        )


def ulps(a: np.ndarray, b: np.ndarray) -> int:
    """The largest distance in units of the last place of float32."""
    return int(np.max(np.abs(np.float32(a).view(np.int32).astype(np.int64) - np.float32(b).view(np.int32))))


def test_b20_no_factor_is_the_factor_at_another_temperature() -> None:
    """Worst case measured: 0 ulp with traced numbers, 1 ulp where XLA folds constants."""
    H = np.arange(1, 513, dtype=np.float32)
    factor = jit(jax.vmap(score_factor))
    half, none = np.full(512, 0.5, np.float32), np.zeros(512, np.float32)
    root = np.float32(np.sqrt(H.astype(np.float64)))
    on, off = factor(H, half, none + 1), factor(H, none, none + 1)
    np.testing.assert_array_equal(off, 1)
    assert ulps(factor(H, half, np.float32(H.astype(np.float64) ** -0.5)), off) <= 1
    assert ulps(factor(H, none, root), on) <= 1
    assert ulps(on, np.float32(H.astype(np.float64) ** -0.5)) <= 1
    for width in (1, 4, 16, 64, 256):
        assert float(on[width - 1]) == width**-0.5
    traced = jit(score_factor, static_argnums=0)
    for width in (1, 3, 4, 16, 17, 64, 256, 265):
        scalar, folded = traced(width, 0.5, 1.0), jit(functools.partial(score_factor, width, 0.5, 1.0))()
        assert ulps(scalar, on[width - 1]) <= 1 and ulps(folded, on[width - 1]) <= 1
        assert ulps(traced(width, 0.5, width**-0.5), np.float32(1)) <= 1
        assert ulps(jit(functools.partial(score_factor, width, 0.5, width**-0.5))(), np.float32(1)) <= 1
        if width in (1, 4, 16, 64, 256):
            assert scalar == folded == traced(width, 0.0, width**0.5) == width**-0.5


# --- weights, dropout, types -------------------------------------------------------


@pytest.mark.parametrize("name", EVERY_MASK)
def test_a5_float16_is_finite_and_near(name: str) -> None:
    q, k, v = inputs(2)
    mask = mask_named(name, T, S)
    want = jit_attend(q, k, v, mask)
    got = np.asarray(jit_attend(*(jnp.asarray(a, jnp.float16) for a in (q, k, v)), mask), np.float32)
    np.testing.assert_allclose(got, want, atol=2e-3)


@pytest.mark.parametrize(("dtype", "rate"), [("float32", None), ("float32", 0.3), ("bfloat16", None)])
def test_asking_for_weights_changes_nothing(dtype: str, rate: float | None) -> None:
    q, k, v = (jnp.asarray(a, dtype) for a in inputs(2))
    mask, key = mask_named("causal & padding", T, S), jax.random.key(0)
    bare = jit_attend(q, k, v, mask, dropout_rate=rate, key=key)
    both, weights = jit_attend(q, k, v, mask, dropout_rate=rate, key=key, weights=True)
    np.testing.assert_array_equal(bare, both)
    np.testing.assert_allclose(np.sum(weights, -1), 1.0, atol=1e-5)  # before dropout


def test_dropout_of_weights() -> None:
    # One key a query sees weighs 1/S; values 1: outputs are the kept weights, scaled.
    many, wide = 97, 101
    q, k, v = np.zeros((B, many, N, H)), np.zeros((B, wide, N, H)), np.ones((B, wide, N, 1))
    q, k, v = (a.astype(np.float32) for a in (q, k, v))
    key, rate = jax.random.key(1), 0.25
    no_key = jit_attend(q, k, v, dropout_rate=rate)
    np.testing.assert_allclose(no_key, 1.0, atol=1e-5)
    got = np.asarray(jit_attend(q, k, v, dropout_rate=rate, key=key))
    kept = got * (1 - rate) * wide
    np.testing.assert_allclose(kept, np.round(kept), atol=1e-3)
    draws = B * many * N * wide
    assert abs(kept.sum() / draws - (1 - rate)) < 4 * np.sqrt(rate * (1 - rate) / draws)
    assert got.mean() == pytest.approx(1.0, abs=3e-3)  # the expectation is kept
    np.testing.assert_array_equal(got, jit_attend(q, k, v, dropout_rate=rate, key=key))
    assert np.any(got != jit_attend(q, k, v, dropout_rate=rate, key=jax.random.key(2)))
    assert len({row.tobytes() for row in np.swapaxes(got, 1, 2).reshape(B * N, -1)}) == B * N  # rows and heads differ
    np.testing.assert_allclose(jit_attend(q, k, v, dropout_rate=0.0, key=key), 1.0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_d5_softmax_is_in_the_score_type(dtype: str) -> None:
    q, k, v = (jnp.asarray(a, jnp.bfloat16) for a in inputs())
    jaxpr = jax.make_jaxpr(functools.partial(attend, scoring=Scoring(score_dtype=dtype)))(q, k, v, masks.causal())
    exponentials = [e.outvars[0].aval.dtype for e in jaxpr.jaxpr.eqns if e.primitive.name == "exp"]
    assert exponentials == [jnp.dtype(dtype)]
    assert attend(q, k, v, scoring=Scoring(score_dtype=dtype)).dtype == jnp.bfloat16


def test_d5_4096_near_equal_weights_sum_to_1() -> None:
    q = jnp.ones((1, 1, 1, 2), jnp.bfloat16)
    k = jnp.asarray(1 + 0.01 * np.random.default_rng(5).standard_normal((1, 4096, 1, 2)), jnp.bfloat16)
    _, weights = attend(q, k, k, weights=True)
    assert weights.dtype == jnp.float32
    assert float(jnp.sum(weights)) == pytest.approx(1.0, abs=1e-3)


def test_f09_scores_may_be_large() -> None:
    q, k, v = inputs()
    shift = np.full((1, 1, T, S), 3e4, np.float32)
    cold = Scoring(temperature=1e-3)
    bare, shifted = jit_attend(q, k, v, scoring=cold), jit_attend(q, k, v, scoring=cold, bias=shift)
    np.testing.assert_allclose(shifted, bare, atol=2e-2)
    assert np.all(np.isfinite(bare))


# --- programs ----------------------------------------------------------------------


class Variants(chex.TestCase):
    """With and without jit: one number."""

    @chex.variants(with_jit=True, without_jit=True)
    def test_attend(self) -> None:
        q, k, v = inputs(2)
        mask = mask_named("causal & padding", T, S)
        want, _ = reference.attend(*map(np.float64, (q, k, v)), np.asarray(mask.dense(T, S)))
        np.testing.assert_allclose(self.variant(attend)(q, k, v, mask), want, atol=1e-5)


def test_k2_numbers_are_traced_once() -> None:
    q, k, v = inputs()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def run(exponent: jax.Array, temperature: jax.Array, rate: jax.Array, width: jax.Array) -> jax.Array:
        key = jax.random.key(0)
        mask = masks.window(width)
        return attend(
            q, k, v, mask, scoring=Scoring(dk_exponent=exponent, temperature=temperature), dropout_rate=rate, key=key
        )

    grid = itertools.product((0.0, 0.5), (0.3, 1.0), (0.0, 0.5), (1, 3))
    outs = {np.asarray(run(*map(jnp.asarray, point))).tobytes() for point in grid}
    assert len(outs) == 8 + 2  # a window of 1 knows neither exponent nor temperature


def test_a_bias_is_stretched_over_rows_heads_and_queries() -> None:
    q, k, v = inputs()
    row = jax.random.normal(jax.random.key(3), (S,))
    whole = attend(q, k, v, bias=jnp.broadcast_to(row, (B, N, T, S)))
    assert np.any(np.asarray(whole) != np.asarray(attend(q, k, v)))
    for shape in ((1, 1, 1, S), (1, 1, T, S), (T, S)):
        np.testing.assert_array_equal(attend(q, k, v, bias=jnp.broadcast_to(row, shape)), whole)


def test_a_bias_of_numpy_is_an_array_too() -> None:
    q, k, v = inputs()
    bias = np.random.default_rng(0).normal(size=(1, N, T, S)).astype(np.float32)
    mesh = sharding.make_mesh(sharding.parse_mesh("seq:1"))
    for of in (attend, functools.partial(ring.attend, mesh=mesh)):
        one, other = (jit(functools.partial(of, bias=b))(q, k, v) for b in (bias, jnp.asarray(bias)))
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("shape", [(S,), (1, T, S), (1, 1, S, T), (3, 1, T, S)])
def test_bias_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    q, k, _ = inputs()
    with pytest.raises(
        ConfigError, match=r"a bias of shape|DenseBias bias of \(7, 5\) in .* \(5, 7\)|of 3 rows in a batch of 2"
    ):
        attend(q, k, k, bias=jnp.zeros(shape))


def test_heads_that_do_not_fit_are_refused() -> None:
    q, k, v = inputs(4)
    with pytest.raises(ConfigError, match="6 heads of 3, keys 4 of 3"):
        attend(q, k, v)
    with pytest.raises(ConfigError, match="6 heads of 3, keys 6 of 2"):
        attention_scores(q, inputs()[1][..., :2], Scoring())


def test_initial_scale() -> None:
    config = Config(d_model=101, num_heads=6, num_kv_heads=2, head_dim=31, positions="none", attention_bias=True)
    p = init_attention(jax.random.key(0), config)
    assert isinstance(p, Attention)
    assert (p.wq_DNH.shape, p.wk_DKH.shape, p.wo_NHD.shape) == ((101, 6, 31), (101, 2, 31), (6, 31, 101))
    for w, fan_in in ((p.wq_DNH, 101), (p.wk_DKH, 101), (p.wv_DKH, 101), (p.wo_NHD, 186)):
        assert float(np.std(w)) == pytest.approx(fan_in**-0.5, rel=0.03)
    assert not np.array_equal(p.wk_DKH, p.wv_DKH)
    assert all(np.all(b == 0) for b in map(np.asarray, (p.bq_NH, p.bk_KH, p.bv_KH, p.bo_D)))


def test_a_bare_array_is_no_mask() -> None:
    x = jnp.ones((1, 3, 1, 2))
    with pytest.raises(ConfigError, match=r"masks\.dense"):
        attend(x, x, x, jnp.ones((3, 3), bool))  # type: ignore[arg-type]
