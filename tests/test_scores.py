"""From dot products to weights: soft-cap, sinks, and the four normalisers, against float64 and by hand."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from tests.quick import jit
from transformer_jax import masks
from transformer_jax.attention import attend, attention, init_attention
from transformer_jax.config import Config, Hyper
from transformer_jax.scores import (
    Scoring,
    attention_scores,
    entmax15,
    masked_entmax15,
    masked_relu,
    masked_sigmoid,
    masked_softmax,
    softcap,
)

NORMALISERS: dict[str, Callable] = {
    "softmax": masked_softmax,
    "sigmoid": masked_sigmoid,
    "relu": masked_relu,
    "entmax15": masked_entmax15,
}


def naive(kind: str, scores: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """Weights of one row in float64: over the allowed entries, 0 elsewhere."""
    out = np.zeros(scores.shape)
    s = scores[allowed].astype(np.float64)
    if not len(s):
        return out
    if kind == "softmax":
        p = np.exp(s - s.max()) / np.exp(s - s.max()).sum()
    elif kind == "sigmoid":
        p = np.exp(-np.logaddexp(0, np.log(len(s)) - s))
    elif kind == "relu":
        p = np.maximum(s, 0) / (np.maximum(s, 0).sum() or 1)
    else:  # the threshold that makes the squares sum to 1, by bisection
        low, high = s.max() / 2 - 1, s.max() / 2
        for _ in range(200):
            tau = (low + high) / 2
            low, high = (tau, high) if (np.maximum(s / 2 - tau, 0) ** 2).sum() > 1 else (low, tau)
        p = np.maximum(s / 2 - low, 0) ** 2
    out[allowed] = p
    return out


@pytest.mark.parametrize("kind", NORMALISERS)
def test_f03_normalisers_equal_the_loop(kind: str) -> None:
    random = np.random.default_rng(0)
    scores = random.normal(size=(23, 13)).astype(np.float32) * np.linspace(0.1, 5, 23, dtype=np.float32)[:, None]
    allowed = random.random((23, 13)) < 0.7
    allowed[3], allowed[4], scores[5] = False, True, -np.abs(scores[5])
    got = jit(NORMALISERS[kind])(scores, jnp.asarray(allowed))
    want = np.stack([naive(kind, *row) for row in zip(scores, allowed, strict=True)])
    np.testing.assert_allclose(got, want, atol=1e-6)
    assert np.all(np.asarray(got)[~allowed] == 0)
    np.testing.assert_allclose(
        NORMALISERS[kind](scores, None), [naive(kind, row, np.ones(13, bool)) for row in scores], atol=1e-6
    )


def test_f03_normalisers_by_hand() -> None:
    row = jnp.array([[2.0, 1.0, -1.0]])
    np.testing.assert_allclose(masked_relu(row, None), [[2 / 3, 1 / 3, 0]], atol=1e-6)
    sigma = 1 / (1 + np.exp(-np.array([2.0, 1.0, -1.0]) + np.log(3)))
    np.testing.assert_allclose(masked_sigmoid(row, None), [sigma], atol=1e-6)
    # (1 - tau)^2 + (1/2 - tau)^2 = 1 has tau = (3 - sqrt 7) / 4; the third is outside.
    tau = (3 - np.sqrt(7)) / 4
    np.testing.assert_allclose(entmax15(row), [[(1 - tau) ** 2, (0.5 - tau) ** 2, 0]], atol=1e-6)
    np.testing.assert_array_equal(masked_relu(-jnp.abs(row), None), [[0, 0, 0]])  # no positive score


@pytest.mark.parametrize("kind", NORMALISERS)
def test_gradients_of_normalisers(kind: str) -> None:
    """First and second derivatives by finite differences, with masked entries and a row that allows nothing."""
    scores = jnp.array([[0.3, -0.2, 1.1, 0.7], [1.9, 0.4, -0.9, 0.2], [0.5, 0.1, 0.2, 0.3]])
    allowed = jnp.array([[1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]], bool)
    value = lambda s: jnp.sum(jnp.sin(3 * NORMALISERS[kind](s, allowed)))  # noqa: E731
    check_grads(value, (scores,), order=2, modes=("fwd", "rev"), atol=2e-2, rtol=2e-2, eps=1e-2)
    slope = jax.grad(value)(jnp.where(allowed, scores, jnp.nan))  # whatever stands in a masked place
    assert bool(jnp.all(jnp.isfinite(slope))) and bool(jnp.all(jnp.where(allowed, 0, slope) == 0))
    assert float(jnp.max(jnp.abs(slope))) > 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", NORMALISERS)
def test_a1_a5_rows_and_types(kind: str, dtype: str) -> None:
    scores = jnp.array([[-20000.0, 0, 0], [3, 2, 1], [1, 1, 1]]).astype(dtype)
    allowed = jnp.array([[1, 0, 0], [1, 1, 0], [0, 0, 0]], bool)
    got = NORMALISERS[kind](scores, allowed)
    assert got.dtype == scores.dtype and bool(jnp.all(jnp.isfinite(got)))
    want = [naive(kind, np.asarray(s, np.float64), np.asarray(a)) for s, a in zip(scores, allowed, strict=True)]
    np.testing.assert_allclose(np.asarray(got, np.float32), want, atol=4e-3)
    if kind in ("softmax", "entmax15"):
        assert float(got[0, 0]) == 1


def test_entmax_is_sparse_and_exact_at_any_width() -> None:
    scores = jax.random.normal(jax.random.key(0), (7, 513)) * 4
    p = np.asarray(jit(entmax15)(scores))
    np.testing.assert_allclose(p.sum(-1), 1, atol=1e-5)
    assert np.all((p > 0).sum(-1) < 60)
    np.testing.assert_allclose(jit(entmax15)(scores + 1000), p, atol=2e-3)  # float32 of 1000 + s
    np.testing.assert_allclose(entmax15(jnp.zeros((1, 5))), [[0.2] * 5], atol=1e-6)
    np.testing.assert_allclose(entmax15(jnp.array([[2.0, 2.0, -jnp.inf]])), [[0.5, 0.5, 0]], atol=1e-6)


def test_entmax_has_second_derivatives_in_a_scan() -> None:
    """One candidate for tau takes the root of 0 here; a custom rule does not survive the scan (jax 0.10)."""
    row, direction = jnp.array([3.0, 2.5, 0.0, -1.0]), jnp.array([0.7, -0.4, 1.0, 2.0])

    def value(turn: jax.Array) -> jax.Array:
        layer = lambda x, _: (x + jnp.sin(3 * entmax15(turn * x)), None)  # noqa: E731
        return jnp.sum(jnp.cos(jax.lax.scan(layer, row, length=1)[0]))

    slope = jax.grad(value)
    got = jit(jax.grad(lambda t: jnp.vdot(slope(t), direction)))(jnp.ones(4))
    apart = slope(1 + 0.01 * direction) - slope(1 - 0.01 * direction)
    np.testing.assert_allclose(got, apart / 0.02, atol=5e-3)
    assert float(jnp.max(jnp.abs(got))) > 1


def test_softcap() -> None:
    x = jnp.array([-1e4, -2.0, 0.0, 0.5, 30.0])
    np.testing.assert_allclose(softcap(x, 3.0), 3 * np.tanh(np.asarray(x) / 3), rtol=1e-6)
    assert float(jnp.max(jnp.abs(softcap(x, 3.0)))) <= 3
    np.testing.assert_array_equal(jit(softcap)(x, 0.0), x)  # a traced cap of 0 is none
    np.testing.assert_allclose(softcap(x[2:4], 1e4), x[2:4], atol=1e-6)
    assert all(bool(jnp.isfinite(jax.grad(lambda c: jnp.sum(softcap(x, c)))(cap))) for cap in (0.0, 3.0))


def test_softcap_stands_after_the_factor_and_before_the_bias() -> None:
    q, k = jnp.full((1, 1, 1, 4), 3.0), jnp.full((1, 2, 1, 4), 1.0)
    bias = jnp.array([[[[0.0, -jnp.inf]]]])
    got = attention_scores(q, k, Scoring(softcap=2.0, temperature=3.0), bias)
    np.testing.assert_allclose(got[0, 0, 0], [2 * np.tanh(12 / 2 / 3 / 2), -np.inf], rtol=1e-6)


def test_a_sink_is_a_key_without_a_value() -> None:
    B, T, N, H = 2, 5, 3, 4
    q, k, v = (jax.random.normal(jax.random.key(i), (B, T, N, H)) for i in range(3))
    sink, mask = jnp.array([-1.0, 0.0, 2.5]), masks.causal() & masks.padding(jnp.array([0, 4]))
    out, weights = attend(q, k, v, mask, scoring=Scoring(sink_N=sink), weights=True)
    scores = np.asarray(attention_scores(q, k, Scoring()), np.float64)
    powers = np.exp(scores) * np.asarray(mask.dense(T, T))
    want = powers / (powers.sum(-1, keepdims=True) + np.exp(np.asarray(sink, np.float64))[None, :, None, None])
    np.testing.assert_allclose(weights, want, atol=1e-6)
    np.testing.assert_allclose(out, np.einsum("bnts,bsnh->btnh", want, v), atol=1e-5)
    np.testing.assert_array_equal(out[0], 0)  # a row of length 0: the sink takes all

    def total(sink: jax.Array, implementation: str) -> jax.Array:
        made = attend(q, k, v, mask, scoring=Scoring(sink_N=sink), implementation=implementation, block=2)
        return jnp.sum(jnp.cos(made))  # type: ignore[arg-type]

    slopes = [jit(jax.grad(total), static_argnums=1)(sink, name) for name in ("dense", "blockwise")]
    np.testing.assert_allclose(*slopes, atol=1e-5)
    step = 1e-2
    by_hand = [
        (total(sink.at[n].add(step), "dense") - total(sink.at[n].add(-step), "dense")) / 2 / step for n in range(N)
    ]
    np.testing.assert_allclose(slopes[0], np.asarray(by_hand), atol=5e-3)


def test_extreme_sinks() -> None:
    q = jax.random.normal(jax.random.key(0), (1, 3, 1, 2))
    plain = attend(q, q, q)
    for implementation in ("dense", "blockwise"):
        run = functools.partial(attend, q, q, q, implementation=implementation)
        np.testing.assert_allclose(run(scoring=Scoring(sink_N=jnp.array([-200.0]))), plain, atol=1e-6)
        np.testing.assert_array_equal(run(scoring=Scoring(sink_N=jnp.array([200.0]))), jnp.zeros_like(q))


@pytest.mark.parametrize("implementation", ["dense", "blockwise", "banded"])
def test_a1_an_empty_row_is_0_whatever_its_sink(implementation: str) -> None:
    q = jax.random.normal(jax.random.key(0), (2, 3, 1, 2))
    mask = masks.window(3) & masks.padding(jnp.array([0, 3]))

    def run(sink: jax.Array, q: jax.Array) -> jax.Array:
        made: Any = attend(q, q, q, mask, scoring=Scoring(sink_N=sink), implementation=implementation, block=2)
        return made

    plain: Any = attend(q, q, q, mask, implementation=implementation, block=2)
    for low in (-20.0, -200.0, -jnp.inf):
        sink = jnp.array([low])
        np.testing.assert_array_equal(run(sink, q)[0], 0)
        np.testing.assert_allclose(run(sink, q)[1], plain[1], atol=1e-6)
        slopes = jax.grad(lambda s, q: jnp.sum(run(s, q) ** 2), argnums=(0, 1))(sink, q)
        assert all(bool(jnp.all(jnp.isfinite(slope))) for slope in slopes)
        np.testing.assert_array_equal(slopes[1][0], 0)
    half: Any = attend(
        q, q, q, mask, scoring=Scoring(sink_N=jnp.array([-18.0]), score_dtype="float16"), implementation="dense"
    )
    np.testing.assert_array_equal(half[0], 0)


def test_h03_qk_norm_makes_scores_cosines() -> None:
    """With scale 1 a score is H**(1 - exponent) times the cosine: longer inputs change nothing."""
    config = Config(d_model=12, num_heads=3, qk_norm=True, positions="none", norm_epsilon=1e-12)
    params = init_attention(jax.random.key(0), config)
    x, mask = jax.random.normal(jax.random.key(1), (1, 5, 12)), masks.causal()
    run = jit(lambda x, p: attention(p, x, x, mask, config, Hyper(), trace=True)[1])
    one = run(x, params)
    assert one is not None and params.q_scale_H is not None
    assert float(jnp.max(jnp.abs(one.scores_BNTS))) <= 4**0.5 + 1e-5  # H / sqrt(H)
    np.testing.assert_allclose(run(100 * x, params).scores_BNTS, one.scores_BNTS, atol=1e-4)
    louder = params.replace(q_scale_H=params.q_scale_H * 3)
    np.testing.assert_allclose(run(x, louder).scores_BNTS, 3 * one.scores_BNTS, atol=1e-4)
    same = jnp.tile(x[:, :1], (1, 5, 1))
    equal = params.replace(wk_DKH=params.wq_DNH)
    np.testing.assert_allclose(run(same, equal).scores_BNTS, 2.0, atol=1e-4)  # cosine 1, H = 4
