"""Faults that others were bitten by, in every way that attention is computed: types, memory, the output layer.

Numbers are those of the list of faults; see test_known_faults for masks and NaN.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Jaxpr, JaxprEqn

from tests import reference
from tests.quick import jit
from transformer_jax import masks, relative
from transformer_jax.attention import attend
from transformer_jax.batch import Batch
from transformer_jax.config import Config, Hyper
from transformer_jax.embedding import Embedding, unembed
from transformer_jax.encoder_decoder import Transformer, hidden, init_transformer
from transformer_jax.errors import ConfigError
from transformer_jax.meter import measure
from transformer_jax.scores import Scoring
from transformer_jax.train import gradients, token_sums

V, T = 11, 7
SMALL = Config(
    vocab_size=V, d_model=8, num_heads=4, num_kv_heads=2, d_ff=13, seq_len=T, num_layers=1, attention_block=3, band=T
)
WAYS: dict[str, dict[str, Any]] = {
    "blockwise": {},
    "banded": {"mask": "window"},
    "linear": {},
}
HYPER = Hyper(window=T)  # banded attention then sees what the others do
slopes_of = jit(gradients, static_argnums=1)


def tokens(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(0, V, shape), jnp.int32)


def shapes_of(config: Config) -> Transformer:
    return jax.eval_shape(lambda k: init_transformer(k, config), jax.random.key(0))


def drawn(config: Config, scale: float = 0.4) -> Transformer:
    rng = np.random.default_rng(0)

    def draw(path: tuple, leaf: Any) -> jax.Array:
        return jnp.asarray(rng.normal("scale" in path[-1].name, scale, leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes_of(config))


# --- types -------------------------------------------------------------------------


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """All equations of a program and of the programs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from equations(getattr(inner, "jaxpr", inner))


def types_of(jaxpr: Jaxpr, name: str) -> set[str]:
    """Types of the operands of a primitive."""
    return {str(v.aval.dtype) for e in equations(jaxpr) if e.primitive.name == name for v in e.invars}


@pytest.mark.parametrize("implementation", WAYS)
def test_d4_d5_half_inputs_stay_half_and_the_softmax_is_in_the_score_type(implementation: str) -> None:
    config = SMALL.replace(attention_implementation=implementation, compute_dtype="bfloat16", **WAYS[implementation])
    ids = tokens(2, T)
    batch = Batch(ids, ids, jnp.ones((2, T)))

    def program(config: Config) -> Any:
        return jax.make_jaxpr(lambda p: hidden(p, config, HYPER, batch)[0])(shapes_of(config)).jaxpr

    made = program(config)
    assert made.outvars[0].aval.dtype == jnp.bfloat16
    products = types_of(made, "dot_general")
    if implementation == "linear":  # its features and their sums are float32, whatever the compute type
        assert products == {"bfloat16", "float32"}
        return
    assert products == {"bfloat16"}
    outs = {str(e.outvars[0].aval.dtype) for e in equations(made) if e.primitive.name == "dot_general"}
    assert outs == {"float32"}
    assert types_of(made, "exp") == {"float32"}
    halved = config.replace(score_dtype="bfloat16")
    if implementation == "banded":
        assert types_of(program(halved), "exp") == {"bfloat16"}
    else:
        with pytest.raises(ConfigError, match="blockwise attention cannot do half-precision scores"):
            program(halved)


def test_d5_4096_near_equal_weights_sum_to_1_in_blocks() -> None:
    q = jnp.ones((1, 1, 1, 2), jnp.bfloat16)
    k = jnp.asarray(1 + 0.01 * np.random.default_rng(5).standard_normal((1, 4096, 1, 2)), jnp.bfloat16)
    v = jnp.ones((1, 4096, 1, 2)).at[:, :2048, :, 1].set(0.0)  # the sum of all weights, and of the last half
    # Sums kept in bfloat16 would stop at 2048, where 8 more is no more.
    out = attend(q.astype(jnp.float32), k, v, implementation="blockwise", block=8)
    np.testing.assert_allclose(out[0, 0, 0], [1.0, 0.5], atol=1e-3)
    halved = attend(q, k, v.astype(jnp.bfloat16), implementation="blockwise", block=8)
    np.testing.assert_array_equal(np.asarray(halved, np.float32)[0, 0, 0], [1.0, 0.5])


def test_d6_bfloat16_is_as_near_in_every_implementation() -> None:
    """Inputs are bfloat16 numbers in the float64 loop too: what is left is the rounding inside. Scores reach 20."""
    rng, T = np.random.default_rng(1), 31
    q, k, v = (jnp.asarray(rng.standard_normal((2, T, 4, 8)), jnp.bfloat16) for _ in range(3))
    exact, _ = reference.attend(*(np.asarray(x, np.float64) for x in (q, k, v)), np.tri(T)[None, None], temperature=0.2)
    sharp = Scoring(temperature=0.2)

    @functools.partial(jit, static_argnums=0)
    def run(implementation: str, q: jax.Array) -> jax.Array:
        mask = masks.window(T) if implementation == "banded" else masks.causal()
        return attend(q, k, v, mask, scoring=sharp, implementation=implementation, block=8)  # type: ignore[return-value]

    def error(implementation: str) -> float:
        return float(np.sqrt(np.mean((np.asarray(run(implementation, q), np.float64) - exact) ** 2)))

    least = error("dense")
    assert 1e-4 < least < 3e-3  # roundings of weights and outputs, not of scores
    for implementation in ("blockwise", "banded"):
        assert error(implementation) <= 2 * least


# --- memory ------------------------------------------------------------------------


def shape(*sizes: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def traced_batch(T: int, **parts: Any) -> Batch:
    return Batch(shape(1, T), shape(1, T), shape(1, T, dtype=jnp.float32), **parts)


@pytest.mark.parametrize("chunks", [3, T])
def test_k5_chunks_of_the_loss_change_no_gradient(chunks: int) -> None:
    ids = tokens(2, T)
    weights = jnp.ones((2, T)).at[0, 4:].set(0.0).at[1, 2].set(0.5)
    batch = Batch(ids, jnp.roll(ids, -1, axis=1), weights)
    config = SMALL.replace(terms=("label_smoothing", "z_loss"), tie_embeddings=False)
    p, hyper = drawn(config), HYPER.replace(label_smoothing=0.1, z_loss=0.01)
    (want, sums), (got, parts) = (slopes_of(p, config.replace(loss_chunks=n), hyper, batch) for n in (1, chunks))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), (got, parts), (want, sums))
    assert max(float(jnp.max(jnp.abs(g))) for g in jax.tree.leaves(want)) > 0.01


def test_k5_memory_falls_by_the_chunks() -> None:
    T, V, chunks = 4096, 50_000, 16

    def working(loss_chunks: int) -> tuple[int, int]:
        config = Config(
            vocab_size=V,
            d_model=32,
            num_heads=1,
            num_layers=1,
            attention_implementation="blockwise",
            seq_len=T,
            loss_chunks=loss_chunks,
        )

        def loss(p: Transformer, batch: Batch) -> jax.Array:
            return token_sums(p, config, Hyper(), batch).objective

        args = shapes_of(config), traced_batch(T)
        return measure(loss, *args).working_bytes, measure(jax.grad(loss), *args).working_bytes

    (plain, plain_slope), (chunked, chunked_slope) = working(1), working(chunks)
    assert plain >= 4 * T * V  # the logits in float32
    assert chunked < 1.05 * plain / chunks
    assert chunked_slope < 1.2 * plain_slope / chunks  # the embedding's own gradient does not shrink


ROWS = ("segments_BT", "positions_BT")
LONG: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "causal": ({}, ()),
    "packed": ({}, ROWS),
    "padded": ({"mask": "none"}, ("lengths_B",)),
    "packed, alibi": ({"positions": "alibi"}, ROWS),
    "packed, padded, t5, sinks": ({"positions": "t5", "attention_sink": True}, (*ROWS, "lengths_B")),
    "window, sigmoid": ({"mask": "window", "normaliser": "sigmoid"}, ROWS[:1]),
    "remat": ({"remat": True, "positions": "alibi"}, ROWS),
    "unrolled": ({"scan_unroll": 0}, ROWS),
    "banded": ({"attention_implementation": "banded", "mask": "window", "band": 128}, ROWS[:1]),
    "linear": ({"attention_implementation": "linear"}, ("lengths_B",)),
}


def working_of_layers(T: int, changes: dict[str, Any], rows: tuple[str, ...]) -> tuple[int, int]:
    """Bytes that three layers need, forward and with the gradient."""
    base = {"vocab_size": V, "d_model": 8, "num_heads": 2, "d_ff": 8, "num_layers": 3, "seq_len": T}
    config = Config(**({"attention_implementation": "blockwise", **base} | changes))
    parts = {name: shape(1) if name == "lengths_B" else shape(1, T) for name in rows}

    def total(p: Transformer, batch: Batch) -> jax.Array:
        return jnp.sum(hidden(p, config, Hyper(window=128), batch)[0])

    args = shapes_of(config), traced_batch(T, **parts)
    return measure(total, *args).working_bytes, measure(jax.grad(total), *args).working_bytes


@pytest.mark.parametrize("name", LONG)
def test_k6_memory_of_layers_grows_linearly(name: str) -> None:
    short, long = (working_of_layers(T, *LONG[name]) for T in (8192, 16384))
    for few, many in zip(short, long, strict=True):
        assert math.log2(many / few) <= 1.05
        assert many < 2**29  # a quarter of the scores of 16k x 16k in two heads, float32


def test_k6_dense_layers_grow_quadratically() -> None:
    """What the bound above is held against."""
    dense = {"attention_implementation": "dense"}
    short, long = (working_of_layers(T, dense, ROWS) for T in (8192, 16384))
    assert all(math.log2(many / few) > 1.95 for few, many in zip(short, long, strict=True))


@pytest.mark.parametrize("kind", ["dense mask", "dense bias"])
def test_k6_arrays_that_are_given_are_read_by_blocks(kind: str) -> None:
    dtype = jnp.dtype(bool if kind == "dense mask" else jnp.float32)

    def working(T: int) -> tuple[int, ...]:
        q, kv = shape(1, T, 2, 8, dtype=jnp.float32), shape(1, T, 1, 8, dtype=jnp.float32)
        given = shape(1, 1, T, T, dtype=dtype)

        def total(q: Any, k: Any, v: Any, given: Any) -> jax.Array:
            mask, bias = masks.causal(), None
            if kind == "dense mask":
                mask = mask & masks.dense(given)
            else:
                bias = relative.dense(given) + relative.alibi(2)
            return jnp.sum(attend(q, k, v, mask, bias=bias, implementation="blockwise"))

        # The meter takes stop_gradient for a second array; in the program there is none.
        slopes = jax.grad(total, argnums=(0, 1, 2))
        return tuple(measure(f, q, kv, kv, given).working_bytes - T * T * dtype.itemsize for f in (total, slopes))

    for few, many in zip(working(8192), working(16384), strict=True):
        assert few > 0 and math.log2(many / few) <= 1.05


# --- the output layer ----------------------------------------------------------------


def test_n2_logits_are_scaled_where_the_embedding_is_tied() -> None:
    rng = np.random.default_rng(0)
    embed_VD, wout_DV = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((V, 4), (4, V)))
    x = jnp.asarray(rng.normal(size=(2, 3, 4)), jnp.float32)
    config = Config(vocab_size=V, d_model=4, num_heads=1, scale_logits=True)
    tied = unembed(Embedding(embed_VD, None, None), x, config, Hyper())
    untied = unembed(Embedding(embed_VD, None, wout_DV), x, config.replace(tie_embeddings=False), Hyper())
    np.testing.assert_allclose(tied, 0.5 * np.asarray(x) @ np.asarray(embed_VD).T, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(untied, np.asarray(x) @ np.asarray(wout_DV), rtol=1e-5, atol=1e-6)
    plain = unembed(Embedding(embed_VD, None, None), x, config.replace(scale_logits=False), Hyper())
    np.testing.assert_allclose(plain, 2 * np.asarray(tied), rtol=1e-6)
    for tie in (True, False):  # the flag alone decides which of the two a model has
        assert (shapes_of(config.replace(tie_embeddings=tie)).embedding.wout_DV is None) == tie


def test_d5_blocks_refuse_what_they_cannot_round() -> None:
    x = jnp.ones((1, 3, 2, 4), jnp.bfloat16)
    for implementation in ("blockwise", "linear"):
        with pytest.raises(ConfigError, match=f"{implementation} attention cannot do half-precision scores"):
            attend(x, x, x, scoring=Scoring(score_dtype="bfloat16"), implementation=implementation)
