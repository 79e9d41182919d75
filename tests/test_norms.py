"""Norms: by hand, against Flax, constant rows; and half precision, here and in whole models."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from transformer_jax.batch import Batch
from transformer_jax.config import NORMS, Config, Hyper
from transformer_jax.encoder_decoder import forward, init_transformer
from transformer_jax.norms import Norm, init_norm, norm


def config(kind: str, D: int = 7, epsilon: float = 1e-5) -> Config:
    return Config(norm=kind, d_model=D, num_heads=1, positions="none", norm_epsilon=epsilon)


def random_params(kind: str, D: int) -> Norm:
    rng = np.random.default_rng(0)
    scale, bias = jnp.asarray(rng.normal(1, 0.5, D), jnp.float32), jnp.asarray(rng.normal(0, 1, D), jnp.float32)
    return Norm(scale, bias if kind == "layernorm" else None)


def test_initial_parameters() -> None:
    for kind in NORMS:
        p = init_norm(config(kind))
        np.testing.assert_array_equal(p.scale_D, np.ones(7))
        assert (p.bias_D is None) == (kind == "rmsnorm")
    np.testing.assert_array_equal(init_norm(config("layernorm")).bias_D, np.zeros(7))


def test_by_hand() -> None:
    # x = [1, 2, 3, 6]: mean 3, variance (4+1+0+9)/4 = 3.5 (unbiased it would be 14/3), mean square 50/4.
    x = jnp.array([[[1.0, 2.0, 3.0, 6.0]]])
    ln, rms = config("layernorm", 4, 0.5), config("rmsnorm", 4, 0.25)
    got = norm(Norm(jnp.array([1.0, 2.0, 1.0, 1.0]), jnp.array([0.0, 0.0, 5.0, 0.0])), x, ln)
    # sqrt(3.5 + 0.5) = 2: epsilon stands inside the root.
    np.testing.assert_allclose(got[0, 0], [-1.0, -1.0, 5.0, 1.5], atol=1e-6)
    root = np.sqrt(12.75)
    got = norm(Norm(jnp.array([1.0, 2.0, 1.0, 1.0]), None), x, rms)
    np.testing.assert_allclose(got[0, 0], [1 / root, 4 / root, 3 / root, 6 / root], atol=1e-6)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("epsilon", [1e-5, 0.1])
def test_equals_the_loop_and_flax(kind: str, epsilon: float) -> None:
    D = 7
    x = np.random.default_rng(1).normal(1.0, 2.0, (2, 3, D)).astype(np.float32)
    p = random_params(kind, D)
    got = norm(p, jnp.asarray(x), config(kind, D, epsilon))
    np.testing.assert_allclose(got, reference.norm(reference.to_float64(p), x, kind, epsilon), atol=1e-5)
    if kind == "layernorm":
        flax = nn.LayerNorm(epsilon=epsilon, use_fast_variance=False)
        want = flax.apply({"params": {"scale": p.scale_D, "bias": p.bias_D}}, x)
    else:
        want = nn.RMSNorm(epsilon=epsilon).apply({"params": {"scale": p.scale_D}}, x)
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("D", [7, 64])
def test_d2_constant_row(D: int, dtype: jnp.dtype) -> None:
    p, c = random_params("layernorm", D), config("layernorm", D)
    x = jnp.full((1, 2, D), 1234.5, dtype)

    def total(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = norm(p, x, c)
        return jnp.sum(y.astype(jnp.float32) ** 2), y

    slope, y = jax.jit(jax.grad(total, has_aux=True))(x)
    assert y.dtype == slope.dtype == dtype
    np.testing.assert_array_equal(y, np.broadcast_to(p.bias_D.astype(dtype), x.shape))
    assert np.all(np.isfinite(np.asarray(slope, np.float32)))
    # At variance 0 the Jacobian is (I - 1/D) / sqrt(eps): not small, and finite.
    want = 2 * np.asarray(p.scale_D * p.bias_D) / np.sqrt(1e-5)
    if dtype == jnp.float32:
        np.testing.assert_allclose(slope[0, 0], want - want.mean(), rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("kind", NORMS)
def test_a_constant_row_is_finite_at_the_least_epsilon(kind: str) -> None:
    low = Config.__dataclass_fields__["norm_epsilon"].metadata["low"]
    p, c, x = init_norm(config(kind)), config(kind, epsilon=low), jnp.zeros((1, 2, 7))
    y, slope = jax.value_and_grad(lambda x: jnp.sum(norm(p, x, c) ** 2))(x)
    assert y == 0 and np.all(np.asarray(slope) == 0)


def test_d3_float16_is_squared_in_float32() -> None:
    p = Norm(jnp.ones(7), None)
    large = norm(p, jnp.full((1, 1, 7), 300.0, jnp.float16), config("rmsnorm"))
    np.testing.assert_allclose(np.asarray(large, np.float32), 1.0, atol=1e-3)
    small = norm(p, jnp.full((1, 1, 7), 1e-4, jnp.float16), config("rmsnorm", epsilon=1e-8))
    np.testing.assert_allclose(np.asarray(small, np.float32), 0.7071, atol=1e-3)
    # Deviations of 300 overflow in the same way.
    x = jnp.array([[[300.0, -300.0]]], jnp.float16)
    got = norm(Norm(jnp.ones(2), jnp.zeros(2)), x, config("layernorm", 2))
    np.testing.assert_allclose(np.asarray(got, np.float32), [[[1.0, -1.0]]], atol=1e-3)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_d4_type_in_is_type_out(kind: str, dtype: jnp.dtype) -> None:
    x = jnp.asarray(np.random.default_rng(2).normal(size=(2, 3, 7)), dtype)
    p = random_params(kind, 7)
    y = norm(p, x, config(kind))
    assert y.dtype == dtype and y.shape == x.shape
    want = reference.norm(reference.to_float64(p), np.asarray(x, np.float64), kind, 1e-5)
    # One rounding, at the end: half a unit in the last place of the type.
    bound = {jnp.float32: 1e-5, jnp.bfloat16: 2**-8, jnp.float16: 2**-11}[dtype]
    np.testing.assert_allclose(np.asarray(y, np.float64), want, rtol=1.1 * bound, atol=1e-5)


def test_c02_scale_cancels_but_for_epsilon() -> None:
    x = np.random.default_rng(3).normal(size=(1, 5, 64)).astype(np.float32)
    p = Norm(jnp.ones(64), None)

    def of(c: float, epsilon: float) -> np.ndarray:
        return np.asarray(norm(p, jnp.asarray(c * x), config("rmsnorm", 64, epsilon)))

    np.testing.assert_allclose(of(100.0, 1e-6), of(1.0, 1e-6), atol=1e-5)
    np.testing.assert_allclose(of(1e-3, 1e-15), of(1.0, 1e-15), atol=1e-5)
    np.testing.assert_allclose(of(-1.0, 1e-15), -of(1.0, 1e-15), atol=1e-6)
    assert np.max(np.abs(of(1e-3, 1e-6) - of(1.0, 1e-6))) > 0.5


def test_c04_rmsnorm_of_the_centred_is_layernorm() -> None:
    x = np.random.default_rng(4).normal(3.0, 1.0, (1, 5, 13)).astype(np.float32)
    ln = norm(Norm(jnp.ones(13), jnp.zeros(13)), jnp.asarray(x), config("layernorm", 13))
    centred = jnp.asarray(x - x.mean(-1, keepdims=True))
    rms = norm(Norm(jnp.ones(13), None), centred, config("rmsnorm", 13))
    np.testing.assert_allclose(rms, ln, atol=1e-5)
    assert np.max(np.abs(norm(Norm(jnp.ones(13), None), jnp.asarray(x), config("rmsnorm", 13)) - ln)) > 0.5


def test_c12_rows_are_independent() -> None:
    x = jnp.asarray(np.random.default_rng(5).normal(size=(3, 5, 7)), jnp.float32)
    p, c = random_params("layernorm", 7), config("layernorm")
    whole = norm(p, x, c)
    np.testing.assert_allclose(norm(p, x[1:2], c)[0], whole[1], atol=1e-6)


def primitives(jaxpr: Any, name: str) -> list[Any]:
    """Equations of that primitive, inner programs included."""
    found = [e for e in jaxpr.eqns if e.primitive.name == name]
    for equation in jaxpr.eqns:
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda v: hasattr(v, "jaxpr")):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                found += primitives(getattr(inner, "jaxpr", inner), name)
    return found


@pytest.mark.parametrize("ffn", ["gelu", "swiglu"])
@pytest.mark.parametrize("architecture", ["decoder", "encoder_decoder"])
def test_d4_d5_bfloat16_products_and_score_type(architecture: str, ffn: str) -> None:
    config = Config(
        vocab_size=11,
        d_model=8,
        num_heads=4,
        d_ff=13,
        architecture=architecture,
        ffn=ffn,
        compute_dtype="bfloat16",
        attention_bias=True,
        norm_placement="sandwich",
    )
    ids = jnp.zeros((2, 7), jnp.int32)
    batch = Batch(ids, ids, jnp.ones((2, 7)), source_BS=ids[:, :5])
    params = jax.eval_shape(lambda: init_transformer(jax.random.key(0), config))

    def program(c: Config) -> Any:
        return jax.make_jaxpr(lambda p: forward(p, c, Hyper(), batch)[0])(params).jaxpr

    jaxpr = program(config)
    products = primitives(jaxpr, "dot_general")
    assert len(products) >= 8 + 1  # a scanned body counts once
    assert {v.aval.dtype for e in products for v in e.invars} == {jnp.dtype(jnp.bfloat16)}
    assert {e.outvars[0].aval.dtype for e in products} == {jnp.dtype(jnp.float32)}  # sums are float32
    assert jaxpr.outvars[0].aval.dtype == jnp.float32  # logits
    (scan, *_) = primitives(jaxpr, "scan")
    assert scan.outvars[0].aval.dtype == jnp.bfloat16  # what one layer hands to the next
    for dtype in ("float32", "bfloat16"):
        largest = primitives(program(config.replace(score_dtype=dtype)), "reduce_max")
        assert {e.outvars[0].aval.dtype for e in largest} == {jnp.dtype(dtype)}
