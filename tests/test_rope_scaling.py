"""Stretched RoPE: each kind against its formula, Hugging Face's numbers, one table for prefill and decoding."""

import functools
import json
import math
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax import rope
from transformer_jax.config import ROPE_SCALINGS, Config, Hyper, from_dict
from transformer_jax.errors import ConfigError
from transformer_jax.rope_scaling import from_hugging_face, scaled_frequencies

GOLDEN = Path(__file__).parents[2] / "shared" / "golden" / "rope_scaling.json"
SCALED = tuple(kind for kind in ROPE_SCALINGS if kind != "none")
scaled = jax.jit(scaled_frequencies, static_argnames=("kind", "rotated", "original"))


def reference(
    kind: str, R: int, base: float, factor: float, original: int, slow: float, fast: float, length: int
) -> np.ndarray:
    """Pair by pair in float64."""
    if kind == "ntk":
        base = base * factor ** (R / (R - 2))
    if kind == "dynamic" and length > original:
        base = base * (factor * length / original - (factor - 1)) ** (R / (R - 2))
    out = []
    for i in range(R // 2):
        f = base ** (-2 * i / R)
        wavelength = 2 * math.pi / f
        if kind == "linear":
            f = f / factor
        elif kind == "llama3":
            if wavelength > original / slow:
                f = f / factor
            elif wavelength >= original / fast:
                smooth = (original / wavelength - slow) / (fast - slow)
                f = (1 - smooth) * f / factor + smooth * f
        elif kind == "yarn":
            low, high = (R * math.log(original / (r * 2 * math.pi)) / (2 * math.log(base)) for r in (fast, slow))
            low, high = max(math.floor(low), 0), min(math.ceil(high), R - 1)
            ramp = min(max((i - low) / (high - low), 0.0), 1.0)
            f = f / factor * ramp + f * (1 - ramp)
        out.append(f)
    return np.array(out)


CASES = [  # R, base, factor, original, slow, fast, length
    (64, 10000.0, 4.0, 4096, 1.0, 32.0, 16384),
    (10, 500.0, 3.0, 97, 0.5, 3.0, 101),
    (22, 1e6, 32.0, 1009, 2.0, 64.0, 1009),
    (128, 500000.0, 8.0, 8192, 1.0, 4.0, 8191),
]


@pytest.mark.parametrize("kind", ROPE_SCALINGS)
@pytest.mark.parametrize("case", CASES)
def test_each_kind_is_its_formula(kind: str, case: tuple[Any, ...]) -> None:
    R, base, factor, original, slow, fast, length = case
    numbers = {"factor": factor, "slow": slow, "fast": fast, "length": length}
    got, attention = scaled(kind, R, base, original=original, **numbers)
    want = reference(kind, *case)
    np.testing.assert_allclose(got[0] if kind == "dynamic" else got, want, rtol=1e-6)
    assert got.dtype == attention.dtype == jnp.float32 and attention.shape == ()
    assert float(attention) == pytest.approx(0.1 * math.log(factor) + 1 if kind == "yarn" else 1, rel=1e-6)


@pytest.mark.skipif(not GOLDEN.exists(), reason="the golden values are not beside this checkout")
@pytest.mark.parametrize(
    "case", ["linear_factor4", "dynamic_factor4_at16384", "yarn_factor4_orig4096", "llama3_factor8"]
)
def test_equals_hugging_face(case: str) -> None:
    golden = json.loads(GOLDEN.read_text())[case]
    # The dynamic case names no original context: it is the model's max_position_embeddings.
    fields = from_hugging_face(golden["parameters"], max_position_embeddings=4096)
    config = from_dict(Config, {"d_model": 64, "num_heads": 1} | {k: v for k, v in fields.items() if in_config(k)})
    hyper = from_dict(Hyper, {k: v for k, v in fields.items() if not in_config(k)})
    got, attention = scaled(
        config.rope_scaling,
        config.rotated,
        hyper.rope_base,
        factor=hyper.rope_factor,
        original=config.rope_original_positions,
        slow=hyper.rope_slow,
        fast=hyper.rope_fast,
        length=16384,
    )
    np.testing.assert_allclose(np.ravel(got), golden["inv_freq"], rtol=1e-6)
    assert float(attention) == pytest.approx(golden["attention_factor"], rel=1e-6)
    # The same through the settings, on the way that the model takes.
    turn = from_config(np.arange(16384)[None, -1:], config, hyper)
    np.testing.assert_allclose(turn.cos[0, 0], attention * np.cos(16383 * np.asarray(got).ravel()), atol=2e-3)


def in_config(name: str) -> bool:
    return name in ("rope_scaling", "rope_original_positions", "rope_fraction")


from_config = jax.jit(rope.from_config, static_argnames="config")


def settings(kind: str, **config: Any) -> tuple[Config, Hyper]:
    """Heads of 10, trained on 17 positions, stretched by 3."""
    hyper = Hyper(rope_base=500.0, rope_factor=3.0, rope_slow=0.25, rope_fast=2.0)
    return Config(d_model=10, num_heads=1, rope_scaling=kind, rope_original_positions=17, **config), hyper


def test_c6_llama3_bands() -> None:
    got, attention = scaled("llama3", 64, 5e5, factor=32.0, original=8192)
    plain = np.array([5e5 ** (-i / 32) for i in range(32)])
    np.testing.assert_array_equal(got[:15], rope.frequencies(64, 5e5)[:15])  # kept bit for bit
    np.testing.assert_allclose(plain[15:18], [2.13112e-3, 1.41421e-3, 9.38474e-4], rtol=5e-6)
    np.testing.assert_allclose(got[15:18], [1.29055e-3, 4.29557e-4, 9.70829e-5], rtol=5e-6)
    np.testing.assert_allclose(got[18:], plain[18:] / 32, rtol=1e-6)
    assert float(got[31]) == pytest.approx(9.41831e-8, rel=5e-6)
    assert float(attention) == 1.0


@pytest.mark.parametrize("kind", ROPE_SCALINGS)
def test_c2_positions_256_and_257_differ(kind: str) -> None:
    turn = from_config(jnp.array([[256, 257]]), *settings(kind, compute_dtype="bfloat16"))
    assert turn.cos.dtype == turn.sin.dtype == jnp.float32
    assert np.max(np.abs(np.diff(turn.cos, axis=1))) > 0.1
    with pytest.raises(TypeError, match="positions are bfloat16"):
        rope.from_config(jnp.zeros((1, 3), jnp.bfloat16), *settings(kind))


@pytest.mark.parametrize(
    ("layout", "want"),
    [
        ("half", [-1.984111, 1.959901, 2.462378, 4.019799]),
        ("interleaved", [-1.142640, 1.922076, 2.959851, 4.029799]),
    ],
)
def test_c3_both_layouts_by_hand(layout: str, want: list[float]) -> None:
    # Position 4, divided by 4, is position 1: angles 1 and 0.01, x = [1, 2, 3, 4].
    config = Config(d_model=4, num_heads=1, rope_layout=layout, rope_scaling="linear")
    turn = from_config(jnp.array([[4]]), config, Hyper(rope_factor=4.0))
    got = rope.rotate(jnp.array([[[[1.0, 2.0, 3.0, 4.0]]]]), turn, layout)
    np.testing.assert_allclose(got[0, 0, 0], want, atol=2e-6)


@pytest.mark.parametrize("kind", ROPE_SCALINGS)
def test_c7_prefill_then_decode_is_the_full_forward(kind: str) -> None:
    """A position turns alike in whatever company: a prompt of 300, then one token at a time."""
    asked = settings(kind)
    full = from_config(jnp.arange(303)[None], *asked)
    prefill = from_config(jnp.arange(300)[None], *asked)
    steps = [from_config(jnp.array([[t]]), *asked) for t in (300, 301, 302)]
    for whole, first, rest in zip(full, prefill, zip(*steps, strict=True), strict=True):
        if kind == "dynamic":  # by the length so far: the last step alone has all 303
            np.testing.assert_array_equal(rest[-1][0, 0], whole[0, 302])
            assert np.max(np.abs(first[0] - whole[0, :300])) > 1e-3
        else:
            np.testing.assert_array_equal(np.concatenate([first, *rest], axis=1), whole)


def test_c7_dynamic_reads_its_own_row_alone() -> None:
    asked = settings("dynamic")
    rows = jnp.array([[3, 4, 5], [29, 30, 31], [14, 15, 16], [0, 0, 17]])
    together = from_config(rows, *asked)
    assert together.cos.shape == (4, 3, 5)
    for b, length in enumerate((6, 32, 17, 18)):
        alone = from_config(rows[b : b + 1], *asked)
        np.testing.assert_array_equal(alone.cos[0], together.cos[b])
        np.testing.assert_array_equal(alone.sin[0], together.sin[b])
        angles = np.asarray(rows[b])[:, None] * reference("dynamic", 10, 500.0, 3.0, 17, 0, 0, length)
        np.testing.assert_allclose(together.sin[b], np.sin(angles), atol=1e-5)
        # Up to the 17 positions of training it is the plain table.
        plain = from_config(rows[b : b + 1], *settings("none"))
        assert (np.max(np.abs(plain.cos[0] - together.cos[b])) == 0) == (length <= 17)


@pytest.mark.parametrize("kind", SCALED)
def test_c8_a_longer_call_rebuilds_no_coarser_table(kind: str) -> None:
    half, full = settings(kind, compute_dtype="bfloat16"), settings(kind)
    positions = jnp.arange(4999, 5003)[None]
    before = from_config(jnp.arange(10)[None], *half)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 4, 2, 10)), jnp.bfloat16)
    got, fresh = from_config(positions, *half), from_config(positions, *full)
    np.testing.assert_array_equal(got.cos, fresh.cos)
    np.testing.assert_array_equal(from_config(jnp.arange(10)[None], *half).sin, before.sin)
    table, attention = scaled(kind, 10, 500.0, factor=3.0, original=17, slow=0.25, fast=2.0, length=5003)
    angles = np.asarray(positions)[0, :, None] * np.asarray(table, np.float64).reshape(1, 5)
    np.testing.assert_allclose(got.cos[0], attention * np.cos(angles), atol=1e-3)
    # A half-precision head is turned in float32 and rounded once.
    want = rope.rotate(x.astype(jnp.float32), fresh, "half").astype(jnp.bfloat16)
    np.testing.assert_array_equal(rope.rotate(x, got, "half"), want)


@pytest.mark.parametrize("kind", ROPE_SCALINGS)
def test_factor_1_is_the_plain_table(kind: str) -> None:
    plain = np.asarray(jax.jit(rope.frequencies, static_argnums=0)(64, 5e5))
    for length in (5, 1024):
        got, attention = scaled(kind, 64, 5e5, factor=1.0, original=1024, length=length)
        np.testing.assert_array_equal(np.ravel(got), plain)
        assert float(attention) == 1.0
    default = from_config(jnp.arange(1000, 1024)[None], Config(rope_scaling=kind), Hyper())
    np.testing.assert_array_equal(default.cos, from_config(jnp.arange(1000, 1024)[None], Config(), Hyper()).cos)


@pytest.mark.parametrize("kind", SCALED)
def test_gradients_of_base_and_factor(kind: str) -> None:
    R, original, slow, fast, length = 10, 97, 0.5, 3.0, 203

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def slopes(base: jax.Array, factor: jax.Array) -> jax.Array:
        made = scaled_frequencies(
            kind, R, base, factor=factor, original=original, slow=slow, fast=fast, length=jnp.array([length])
        )
        return jnp.sum(made.frequencies) + made.attention_factor

    def total(base: float, factor: float) -> float:
        attention = 0.1 * math.log(factor) + 1 if kind == "yarn" else 1.0
        return float(np.sum(reference(kind, R, base, factor, original, slow, fast, length))) + attention

    got, h = slopes(500.0, 3.0), 1e-4
    assert float(got[0]) == pytest.approx((total(500 + h, 3) - total(500 - h, 3)) / (2 * h), rel=1e-4)
    assert float(got[1]) == pytest.approx((total(500, 3 + h) - total(500, 3 - h)) / (2 * h), rel=1e-4)
    for base, factor in ((10000.0, 1.0), (2.0, 1.0), (1e7, 64.0)):
        assert all(np.isfinite(slope) for slope in slopes(base, factor))


def test_numbers_are_traced_and_arms_share_a_program() -> None:
    @jax.jit
    @chex.assert_max_traces(n=1)
    def cos(hyper: Hyper) -> jax.Array:
        return rope.from_config(jnp.array([[7, 31]]), settings("yarn")[0], hyper).cos

    arms = [Hyper(rope_factor=f, rope_base=b, rope_slow=s) for f, b, s in ((1.0, 1e4, 0.0), (2.0, 5e5, 0.25))]
    each = [cos(jax.tree.map(jnp.float32, arm)) for arm in arms]
    together = jax.vmap(cos.__wrapped__.__wrapped__)(jax.tree.map(lambda *a: jnp.array(a, jnp.float32), *arms))
    np.testing.assert_allclose(together, np.stack(each), atol=1e-6)
    assert np.max(np.abs(each[0] - each[1])) > 0.1


@pytest.mark.parametrize("kind", SCALED)
def test_the_attention_factor_multiplies_what_is_turned(kind: str) -> None:
    config, hyper = settings(kind, rope_fraction=0.6)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 3, 2, 10)), jnp.float32)
    y = rope.rotate(x, from_config(jnp.arange(3)[None], config, hyper.replace(rope_attention_factor=1.5)), "half")
    np.testing.assert_allclose(
        np.linalg.norm(y[..., :6], axis=-1), 1.5 * np.linalg.norm(x[..., :6], axis=-1), rtol=1e-5
    )
    np.testing.assert_array_equal(y[..., 6:], x[..., 6:])


@pytest.mark.parametrize("kind", ROPE_SCALINGS)
@pytest.mark.parametrize("rotated", [0, 2])
def test_narrow_heads(kind: str, rotated: int) -> None:
    got, _ = scaled(kind, rotated, 1e4, factor=4.0, original=4, length=16)
    # A single pair turns a radian a position; one of less than a turn in 4 positions is divided.
    want = {"linear": 0.25, "llama3": 0.25}.get(kind, 1.0)
    np.testing.assert_allclose(np.ravel(got), [want] * (rotated // 2))


def test_an_original_context_of_few_positions_still_scales() -> None:
    # No pair but the first makes a turn in 4 positions: yarn divides all the others.
    got, _ = scaled("yarn", 10, 1e4, factor=4.0, original=4)
    np.testing.assert_allclose(got[1:], [1e4 ** (-i / 5) / 4 for i in range(1, 5)], rtol=1e-6)


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown rope_scaling 'yan': did you mean yarn"):
        scaled_frequencies("yan", 4, 1e4, factor=2.0, original=8)
    with pytest.raises(ConfigError, match="dynamic depends on the length"):
        scaled("dynamic", 4, 1e4, factor=2.0, original=8)
    with pytest.raises(ConfigError, match=r"rope_slow=4 is not below rope_fast=4 \(rope_scaling=llama3\)"):
        scaled_frequencies("llama3", 4, 1e4, factor=2.0, original=8, slow=4.0)
    with pytest.raises(ConfigError, match="2 RoPE frequencies for 6 rotated"):
        rope.rotation(jnp.arange(3)[None], 6, 1e4, scaled("linear", 4, 1e4, factor=2.0, original=8))


# --- Hugging Face's dictionaries ------------------------------------------------------

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def test_names_are_translated() -> None:
    assert from_hugging_face({}) == from_hugging_face({"type": "default"}) == {"rope_scaling": "none"}
    assert from_hugging_face({"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}) == {
        "rope_scaling": "none",
        "rope_base": 5e5,
        "rope_fraction": 0.5,
    }
    want = {
        "rope_scaling": "llama3",
        "rope_factor": 8.0,
        "rope_slow": 1.0,
        "rope_fast": 4.0,
        "rope_original_positions": 8192,
    }
    for kind in ({"type": "llama3"}, {"rope_type": "llama3"}, {"type": "llama3", "rope_type": "llama3"}):
        assert from_hugging_face(kind | LLAMA3, max_position_embeddings=131072) == want
    yarn = {"type": "yarn", "factor": 4, "beta_fast": 16, "beta_slow": 2, "attention_factor": None, "truncate": True}
    assert from_hugging_face(yarn, max_position_embeddings=32768) == {
        "rope_scaling": "yarn",
        "rope_factor": 4,
        "rope_fast": 16,
        "rope_slow": 2,
        "rope_original_positions": 32768,
    }
    dynamic = {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 512}
    assert from_hugging_face(dynamic)["rope_original_positions"] == 512
    assert from_hugging_face(dynamic, max_position_embeddings=2048)["rope_original_positions"] == 2048


def test_mscale() -> None:
    yarn = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
    made = from_hugging_face(yarn | {"mscale": 0.707, "mscale_all_dim": 1.0})
    want = (0.0707 * math.log(40) + 1) / (0.1 * math.log(40) + 1)
    assert made["rope_attention_factor"] == pytest.approx(want, rel=1e-12)
    assert from_hugging_face(yarn | {"mscale": 1.0, "mscale_all_dim": 1.0})["rope_attention_factor"] == 1.0
    both = from_hugging_face(yarn | {"mscale": 0.707, "mscale_all_dim": 1.0, "attention_factor": 1.25})
    assert both["rope_attention_factor"] == 1.25
    assert "rope_attention_factor" not in from_hugging_face(yarn | {"mscale": 0.707})


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"type": "yarm", "factor": 2.0}, "unknown RoPE scaling 'yarm': did you mean yarn"),
        ({"rope_type": "longrope", "factor": 2.0}, "unknown RoPE scaling 'longrope'"),
        ({"rope_type": "yarn", "type": "linear", "factor": 2.0}, "two kinds: rope_type='yarn' and type='linear'"),
        ({"type": "linear", "factr": 2.0}, "unknown key of linear RoPE scaling 'factr': did you mean factor"),
        ({"type": "linear", "factor": 2.0, "beta_fast": 32}, "unknown key of linear RoPE scaling 'beta_fast'"),
        ({"factor": 2.0}, "unknown key of default RoPE scaling 'factor'"),
        ({"type": "linear"}, "linear RoPE scaling without factor"),
        ({"type": "dynamic", "factor": 2.0}, "dynamic RoPE scaling without original_max_position_embeddings"),
        ({"type": "llama3", "factor": None, "original_max_position_embeddings": 64},
         "llama3 RoPE scaling without factor and low_freq_factor and high_freq_factor"),
        ({"type": "llama3"} | LLAMA3 | {"high_freq_factor": 1.0}, "low_freq_factor=1.0 and high_freq_factor=1.0"),
        ({"type": "llama3"} | LLAMA3 | {"low_freq_factor": 0.0}, "low_freq_factor=0.0"),
        ({"type": "linear", "factor": 0.5}, "rope_factor=0.5 is out of range: at least 1"),
        ({"type": "linear", "factor": "4"}, "rope_factor='4': not a number"),
        ({"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "truncate": False}, "truncate=False"),
        ({"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "mscale": "1"}, "mscale='1'"),
    ],
)  # fmt: skip
def test_dictionaries_that_are_refused(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_hugging_face(parameters)
