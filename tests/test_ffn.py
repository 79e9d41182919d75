"""Feed-forward layers: each kind by hand and by loop, Flax, widths, positions kept apart, dropout by layer."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from transformer_jax import masks
from transformer_jax.config import FFN_KINDS, GATED, Config, Hyper
from transformer_jax.encoder_decoder import init_transformer
from transformer_jax.errors import ConfigError
from transformer_jax.ffn import ACTIVATIONS, FFN, ffn, init_ffn
from transformer_jax.layers import apply_stack


def config(kind: str, **changes: object) -> Config:
    return Config(**{"ffn": kind, "d_model": 5, "num_heads": 1, "d_ff": 7, "positions": "none", **changes})


def random_params(c: Config, seed: int = 0) -> FFN:
    """As `init_ffn`, with biases that are not 0."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), jnp.float32), init_ffn(jax.random.key(0), c))


def test_n3_gelu_at_minus_2() -> None:
    assert float(ACTIVATIONS["gelu"](-2.0)) == pytest.approx(-0.045500, abs=5e-7)
    assert float(ACTIVATIONS["gelu_tanh"](-2.0)) == pytest.approx(-0.045402, abs=5e-7)
    assert float(ACTIVATIONS["geglu"](-2.0)) == pytest.approx(-0.045500, abs=5e-7)


def test_c06_silu_has_its_minimum() -> None:
    for kind in ("silu", "swiglu"):
        assert float(ACTIVATIONS[kind](-1.27846)) == pytest.approx(-0.27846, abs=1e-5)
    assert set(ACTIVATIONS) == set(FFN_KINDS)


def test_n3_unknown_activation_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown ffn 'swigelu'.*swiglu"):
        config("swigelu")


@pytest.mark.parametrize(
    ("kind", "want"),
    [
        # x = [1, -2]; x W1 + b1 = [-2, 3], x Wg + bg = [2, -1] (below); W2 = [[1], [10]], b2 = [100].
        ("relu", 100 + 0 + 30),
        ("gelu", 100 - 0.0455003 + 10 * 3 * 0.9986501),
        ("gelu_tanh", 100 - 0.0454023 + 10 * 2.9963627),
        ("silu", 100 - 2 * 0.1192029 + 30 * 0.9525741),
        ("reglu", 100 + 2 * -2 + 0),
        ("geglu", 100 + 2 * 0.9772499 * -2 + 10 * -0.1586553 * 3),
        ("swiglu", 100 + 2 * 0.8807971 * -2 + 10 * -0.2689414 * 3),
    ],
)
def test_by_hand(kind: str, want: float) -> None:
    gated = kind in GATED
    p = FFN(
        w1_DF=jnp.array([[1.0, 2.0], [2.0, 0.0]]),  # [1, -2] W1 = [-3, 2]
        w2_FD=jnp.array([[1.0, 0.0], [10.0, 0.0]]),
        wg_DF=jnp.array([[0.0, -1.0], [-1.0, 1.0]]) if gated else None,  # [1, -2] Wg = [2, -3]
        b1_F=jnp.array([1.0, 1.0]),
        b2_D=jnp.array([100.0, 3.0]),
        bg_F=jnp.array([0.0, 2.0]) if gated else None,
    )
    got = ffn(p, jnp.array([[[1.0, -2.0]]]), config(kind, d_model=2, d_ff=2), Hyper())
    np.testing.assert_allclose(got[0, 0], [want, 3.0], atol=2e-4)


@pytest.mark.parametrize("kind", FFN_KINDS)
@pytest.mark.parametrize("bias", [True, False])
def test_equals_the_loop(kind: str, bias: bool) -> None:
    c = config(kind, ffn_bias=bias)
    p = random_params(c)
    assert (p.wg_DF is not None) == (kind in GATED)
    assert [b is not None for b in (p.b1_F, p.b2_D, p.bg_F)] == [bias, bias, bias and kind in GATED]
    x = np.random.default_rng(1).normal(size=(2, 3, 5)).astype(np.float32)
    got = jax.jit(ffn, static_argnums=2)(p, jnp.asarray(x), c, Hyper())
    want = reference.ffn(reference.to_float64(p), x.astype(np.float64), kind)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["relu", "gelu", "swiglu"])
def test_equals_flax(kind: str) -> None:
    c = config(kind)
    p = random_params(c, seed=2)
    x = jnp.asarray(np.random.default_rng(3).normal(size=(2, 3, 5)), jnp.float32)

    def layer(w: jax.Array, b: jax.Array, y: jax.Array) -> jax.Array:
        return nn.Dense(w.shape[1]).apply({"params": {"kernel": w, "bias": b}}, y)

    act = {"relu": nn.relu, "gelu": lambda y: nn.gelu(y, approximate=False), "swiglu": nn.silu}[kind]
    hidden = layer(p.w1_DF, p.b1_F, x)
    hidden = act(hidden) if p.wg_DF is None else act(layer(p.wg_DF, p.bg_F, x)) * hidden
    np.testing.assert_allclose(ffn(p, x, c, Hyper()), layer(p.w2_FD, p.b2_D, hidden), rtol=1e-5, atol=1e-5)


def test_matched_width_gives_equal_weights() -> None:
    D = 96

    def weights(kind: str, match: bool) -> int:
        c = config(kind, d_model=D, d_ff=0, match_ffn_parameters=match, ffn_bias=False)
        shapes = jax.eval_shape(lambda k: init_ffn(k, c), jax.random.key(0))
        return sum(leaf.size for leaf in jax.tree.leaves(shapes))

    for kind in GATED:
        assert config(kind, d_model=D, d_ff=0, match_ffn_parameters=True).F == 256  # 8 D / 3
        assert weights(kind, True) == weights("relu", False) == weights("relu", True) == 8 * D * D
        assert weights(kind, False) == 12 * D * D
    assert config("swiglu", d_ff=7, match_ffn_parameters=True).F == 5
    assert config("relu", d_ff=0).F == 20


@pytest.mark.parametrize("kind", ["relu", "gelu", "swiglu"])
def test_h12_each_position_by_itself(kind: str) -> None:
    c = config(kind)
    p = random_params(c, seed=4)
    x = jnp.asarray(np.random.default_rng(5).normal(size=(1, 3, 5)), jnp.float32)
    jacobian = jax.jit(jax.jacrev(lambda y: ffn(p, y, c, Hyper())))(x)[0, :, :, 0]  # [T, D, T, D]
    blocks = np.abs(np.asarray(jacobian)).max(axis=(1, 3))
    assert np.all(np.diag(blocks) > 0)
    np.testing.assert_array_equal(blocks - np.diag(np.diag(blocks)), 0)


def test_initial_scale() -> None:
    c = config("swiglu", d_model=101, d_ff=211)
    p = init_ffn(jax.random.key(0), c)
    for w, fan_in in ((p.w1_DF, 101), (p.wg_DF, 101), (p.w2_FD, 211)):
        assert float(np.std(w)) == pytest.approx(fan_in**-0.5, rel=0.03)
    assert not np.array_equal(p.w1_DF, p.wg_DF)
    for b in (p.b1_F, p.b2_D, p.bg_F):
        np.testing.assert_array_equal(b, 0)


def test_activation_dropout_falls_on_the_hidden_units() -> None:
    c = config("relu", d_model=3, d_ff=997, terms=("activation_dropout",))
    # Hidden units are all 1 and each output sums them: kept / 997 / (1 - rate) is left.
    p = FFN(jnp.zeros((3, 997)), jnp.ones((997, 3)) / 997, None, jnp.ones(997), jnp.zeros(3), None)
    x, hyper = jnp.zeros((2, 5, 3)), Hyper(activation_dropout_rate=0.25)
    apply = jax.jit(ffn, static_argnums=2)
    np.testing.assert_allclose(apply(p, x, c, hyper), 1.0, atol=1e-5)  # no key: evaluation
    got = np.asarray(apply(p, x, c, hyper, jax.random.key(0)))
    assert got.mean() == pytest.approx(1.0, abs=0.02)
    assert 0.005 < got[..., 0].std() < 0.04  # sqrt(0.25 / 0.75 / 997) = 0.018
    kept = got * 0.75 * 997
    np.testing.assert_allclose(kept, np.round(kept), atol=0.01)
    off = c.replace(terms=())
    np.testing.assert_allclose(apply(p, x, off, hyper, jax.random.key(0)), 1.0, atol=1e-5)


@pytest.mark.parametrize("kind", FFN_KINDS)
def test_d4_bfloat16_in_bfloat16_out(kind: str) -> None:
    c = config(kind, compute_dtype="bfloat16")
    p = random_params(c, seed=6)
    y = jax.eval_shape(lambda x: ffn(p, x, c, Hyper()), jax.ShapeDtypeStruct((2, 3, 5), jnp.bfloat16))
    assert y.dtype == jnp.bfloat16 and y.shape == (2, 3, 5)


@pytest.mark.parametrize("unroll", [1, 0])
def test_e1_dropout_masks_differ_by_layer(unroll: int) -> None:
    # All weights are 0, so that a layer adds its feed-forward bias, or where the mask drops it, nothing.
    D, L = 97, 4
    config = Config(
        vocab_size=11, d_model=D, num_heads=1, num_layers=L, d_ff=1, positions="none", norm_placement="none",
        terms=("dropout",), scan_unroll=unroll,
    )  # fmt: skip
    shapes = jax.eval_shape(lambda k: init_transformer(k, config), jax.random.key(0))
    p = jax.tree.map(lambda a: jnp.zeros(a.shape), shapes)
    # The biases are 1, 10, 100, 1000: the digits of the output are the masks.
    bias = jnp.tile(10.0 ** jnp.arange(L)[:, None], (1, D))
    layers = p.decoder.layers.replace(ffn=p.decoder.layers.ffn.replace(b2_D=bias))
    stack = p.decoder.replace(layers=layers)
    run = jax.jit(lambda key: apply_stack(
        stack, jnp.zeros((2, 7, D)), config, Hyper(dropout_rate=0.25), mask=masks.causal(),
        positions_BT=jnp.arange(7)[None], key=key,
    )[0])  # fmt: skip
    digits = np.round(np.asarray(run(jax.random.key(1))) * 0.75).astype(int)
    kept = np.stack([digits // 10**i % 10 for i in range(L)]).reshape(L, -1)
    assert set(np.unique(kept)) == {0, 1}
    np.testing.assert_allclose(kept.mean(axis=1), 0.75, atol=4 * np.sqrt(0.25 * 0.75 / kept.shape[1]))
    # Independent masks agree in 1 - 2 (1/4) (3/4) of the places.
    for i in range(L):
        for j in range(i):
            assert np.mean(kept[i] == kept[j]) == pytest.approx(0.625, abs=0.06)
    np.testing.assert_array_equal(run(jax.random.key(1)), run(jax.random.key(1)))
