"""Attention of rows split over devices is attention: values, gradients, and memory that falls with the devices."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.quick import jit
from transformer_jax import attention, masks, relative, ring, sharding
from transformer_jax.errors import ConfigError
from transformer_jax.masks import Mask
from transformer_jax.scores import Scoring

B, T, N, K, H = 4, 20, 4, 2, 3


def make(text: str) -> sharding.Mesh:
    return sharding.make_mesh(sharding.parse_mesh(text))


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def heads(S: int = T) -> tuple[jax.Array, jax.Array, jax.Array]:
    return normal(0, B, T, N, H), normal(1, B, S, K, H), normal(2, B, S, K, 2)


def agree(mesh: str, mask: Mask, arrays: tuple, numbers: dict, options: Any, block: int = 0) -> None:
    """Values and gradients of a ring and of dense attention, of all float arrays and numbers."""
    of, weights = options, normal(9, B, T, N, 2)

    def loss(attend: Any, arrays: tuple, numbers: dict) -> jax.Array:
        out = attend(*arrays, mask, **of(numbers))
        return jnp.sum(jnp.where(jnp.isfinite(out), out, 7.0) * weights)

    def both(arrays: tuple, numbers: dict) -> list:
        split = functools.partial(ring.attend, mesh=make(mesh), block=block)
        ways = (attention.attend, split)
        return [jax.value_and_grad(functools.partial(loss, way), argnums=(0, 1))(arrays, numbers) for way in ways]

    want, found = jit(both)(arrays, numbers)
    slopes = jax.tree.leaves(want[1])
    assert all(float(jnp.max(jnp.abs(slope))) > 1e-3 for slope in slopes)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5), found, want)


def test_padding_sink_cap_alibi_dropout() -> None:
    q, k, v = heads()
    lengths = jnp.array([T, 7, 0, 13])
    # NaN where no query may look: it stays there. Blocks of 2 do not divide the 5 of a device.
    hidden = jnp.arange(T)[None, :, None, None] >= lengths[:, None, None, None]
    k, v = jnp.where(hidden, jnp.nan, k), jnp.where(hidden, jnp.nan, v)

    def options(n: dict) -> dict:
        scoring = Scoring(softcap=n["cap"], sink_N=n["sink"], temperature=n["heat"])
        bias = relative.Bias((relative.ALiBi(n["slopes"]),))
        return {"scoring": scoring, "bias": bias, "dropout_rate": 0.3, "key": jax.random.key(7)}

    numbers = {
        "cap": jnp.float32(3.0),
        "sink": normal(3, N),
        "heat": jnp.float32(1.2),
        "slopes": relative.alibi_slopes(N),
    }
    agree("seq:4", masks.causal() & masks.padding(lengths), (q, k, v), numbers, options, block=2)


def test_segments_window_positions_t5_on_a_mesh_of_three_axes() -> None:
    positions = jnp.arange(T)[None] % 11  # packed documents count anew
    mask = Mask((masks.Causal(), masks.Window(jnp.int32(6)))) & masks.segments((jnp.arange(T)[None] >= 11).astype(int))

    def options(n: dict) -> dict:
        bias = relative.t5(n["table"], distance=9, bidirectional=False)
        return {"bias": bias.at(positions, positions), "scoring": Scoring(dk_exponent=n["exponent"])}

    numbers = {"table": normal(3, 6, N), "exponent": jnp.float32(0.3)}
    agree("data:2,model:2,seq:2", mask.at(positions, positions), heads(), numbers, options)


@pytest.mark.parametrize("normaliser", ["sigmoid", "relu"])
def test_cross_attention_under_any_mask_and_bias(normaliser: str) -> None:
    S = 12
    allowed = jax.random.bernoulli(jax.random.key(4), 0.5, (B, 1, T, S)) & (jnp.arange(T) != 3)[None, None, :, None]

    def options(n: dict) -> dict:
        return {"bias": relative.dense(n["bias"]), "scoring": Scoring(normaliser=normaliser)}

    agree("data:2,seq:4", masks.dense(allowed), heads(S), {"bias": normal(5, 1, N, T, S)}, options)


def test_a_bias_of_minus_infinity_gives_the_same_nan() -> None:
    q, k, v = heads()
    bias = jnp.where(jnp.arange(T)[:, None] == 4, -jnp.inf, normal(5, T, T))
    run = jit(lambda attend, bias: attend(q, k, v, bias=bias), static_argnums=0)
    found, want = run(functools.partial(ring.attend, mesh=make("seq:2")), bias), run(attention.attend, bias)
    assert bool(jnp.all(jnp.isnan(want[:, 4])))
    np.testing.assert_allclose(found, want, atol=1e-5)


def test_second_derivatives_by_two_backward_passes() -> None:
    q, k, v = (x[:1] for x in heads())

    def curvature(attend: Any, k: jax.Array) -> jax.Array:
        slope = jax.grad(lambda k: jnp.sum(jnp.square(attend(q, k, v, masks.causal()))))
        return jax.grad(lambda k: jnp.sum(slope(k) * normal(6, *k.shape)))(k)

    run = jit(curvature, static_argnums=0)
    found, want = run(functools.partial(ring.attend, mesh=make("seq:2")), k), run(attention.attend, k)
    assert float(jnp.max(jnp.abs(want))) > 0.1
    np.testing.assert_allclose(found, want, atol=1e-5, rtol=1e-5)


def test_memory_of_a_device_is_linear_in_its_part_of_the_row() -> None:
    """Forward and backward. Keys that were kept instead of passed round again would all be on each device."""

    def bytes_of(devices: int, length: int) -> int:
        mesh = make(f"seq:{devices}")
        spread = jax.sharding.NamedSharding(mesh, jax.P(None, "seq"))
        x = jax.ShapeDtypeStruct((1, length, 2, 32), jnp.float32, sharding=spread)
        loss = lambda q, k, v: jnp.sum(jnp.square(ring.attend(q, k, v, masks.causal(), mesh=mesh, block=64)))  # noqa: E731
        compiled = jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, x, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    few, many, longer = bytes_of(2, 4096), bytes_of(8, 4096), bytes_of(8, 16384)
    assert 0.9 < longer / few < 1.1
    assert many < 0.35 * few


def test_what_it_cannot_do_is_refused_by_name() -> None:
    q, k, v = heads()
    attend = functools.partial(ring.attend, mesh=make("seq:2"))
    for options, words in (
        ({"scoring": Scoring(normaliser="entmax15")}, r"\(seq:2\) cannot do normaliser entmax15: leave seq out"),
        ({"scoring": Scoring(score_dtype="bfloat16")}, r"half-precision scores \(bfloat16\)"),
        ({"weights": True}, "cannot do weights"),
        ({"mask": masks.dense(jnp.ones((T, 3), bool))}, "a Dense mask of"),
        ({"mask": masks.dense(jnp.ones((1, 3, T, T), bool))}, "a Dense mask of 3 heads in an attention of 4"),
        ({"bias": relative.alibi(8)}, "a ALiBi bias of 8 heads in an attention of 4"),
        ({"scoring": Scoring(sink_N=jnp.zeros(1))}, r"a sink of shape \(1,\) in an attention of 4 heads"),
    ):
        with pytest.raises(ConfigError, match=words):
            attend(q, k, v, **options)


def test_what_the_axis_does_not_divide_is_attention_as_it_was() -> None:
    q, k, v = heads()
    options = {"scoring": Scoring(normaliser="entmax15")}  # which a ring would refuse
    for mesh, (queries, keys, values) in (("seq:3", (q, k, v)), ("seq:4", (q, k[:, :11], v[:, :11]))):
        out = ring.attend(queries, keys, values, mesh=make(mesh), **options)
        np.testing.assert_array_equal(out, attention.attend(queries, keys, values, **options))
    linear = {"implementation": "linear", "mask": masks.causal()}
    np.testing.assert_array_equal(
        ring.attend(q, k, v, mesh=make("seq:2"), **linear), attention.attend(q, k, v, **linear)
    )
