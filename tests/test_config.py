"""Settings: ranges, names, hashing, derived sizes, terms, plain values, presets."""

import dataclasses
import json

import chex
import jax
import jax.numpy as jnp
import pytest

from transformer_jax import config as settings
from transformer_jax.config import TERMS, Config, Hyper, check_ranges, from_dict, to_dict, with_terms
from transformer_jax.encoder_decoder import count_parameters
from transformer_jax.errors import ConfigError, UserError
from transformer_jax.presets import PRESETS, preset


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers=0 is out of range: at least 1"),
        ({"d_model": -4}, "d_model=-4 is out of range: at least 1"),
        ({"rope_fraction": 1.5}, "rope_fraction=1.5 is out of range: at least 0 and at most 1"),
        ({"norm_epsilon": float("nan")}, "norm_epsilon=nan is out of range: at least 1e-20"),
        ({"norm_epsilon": 0.0}, "norm_epsilon=0 is out of range: at least 1e-20"),
        ({"norm_epsilon": float("inf")}, "norm_epsilon=inf is out of range"),
        ({"num_layers": 2.5}, "num_layers=2.5: not a whole number"),
        ({"num_layers": True}, "num_layers=True: not a whole number"),
        ({"num_layers": "2"}, "num_layers='2': not a whole number"),
        ({"norm_epsilon": "1e-5"}, "norm_epsilon='1e-5': not a number"),
        ({"remat": 1}, "remat=1: Config wants a bool"),
        ({"remat": "False"}, "remat='False': Config wants a bool"),
        ({"text": 3}, "text=3: Config wants a str"),
        ({"norm": "layer_norm"}, "unknown norm 'layer_norm': did you mean layernorm"),
        ({"positions": "roope"}, "unknown positions 'roope': did you mean rope"),
        ({"mask": "casual"}, "unknown mask 'casual': did you mean causal"),
        ({"ffn": "zzz"}, "unknown ffn 'zzz': choose from geglu, gelu"),
        ({"terms": ("dropuot",)}, "unknown terms 'dropuot': did you mean dropout"),
    ],
)
def test_values_out_of_range_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(**changes)
    assert message in str(caught.value)
    assert isinstance(caught.value, UserError) and "\n" not in str(caught.value)
    with pytest.raises(ConfigError):  # a copy is checked anew
        Config().replace(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": 7, "num_heads": 2}, "num_heads=2 does not divide d_model=7"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads=3 does not divide num_heads=4"),
        ({"num_heads": 4, "num_kv_heads": 8}, "num_kv_heads=8 does not divide num_heads=4"),
        ({"batch_size": 8, "accumulation": 3}, "accumulation=3 does not divide batch_size=8"),
        ({"positions": "learned", "seq_len": 17, "max_positions": 16}, "seq_len=17 .* max_positions=16"),
        ({"d_model": 12, "num_heads": 4}, "RoPE turns pairs: head_dim=3 x rope_fraction=1.0 = 3 is odd"),
        ({"d_model": 16, "num_heads": 4, "rope_fraction": 0.25}, "= 1 is odd"),
        ({"head_dim": 8, "rope_fraction": 0.1}, "RoPE turns nothing: head_dim=8 x rope_fraction=0.1 is below 1"),
        ({"positions": "sinusoidal", "d_model": 7, "num_heads": 7}, "even d_model, not 7"),
        ({"schedule": "cosine", "steps": 10, "warmup_steps": 11}, "warmup_steps=11 is past steps=10"),
        ({"schedule": "wsd", "steps": 10, "warmup_steps": 6, "decay_steps": 5}, "warmup_steps=6 .* decay_steps=5"),
    ],
)
def test_settings_at_odds_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config(**changes)


def test_what_fits_is_taken() -> None:
    assert Config(d_model=7, num_heads=2, head_dim=4).H == 4
    assert Config(d_model=12, num_heads=4, positions="none").H == 3
    assert Config(d_model=12, num_heads=4, rope_fraction=0.67).rotated == 2
    assert Config(d_model=16, num_heads=1, rope_fraction=0.0).rotated == 0
    # 10 x 0.6 is 6 less a rounding error: it must not become 5, which is odd.
    assert Config(d_model=10, num_heads=1, rope_fraction=0.6).rotated == 6


def test_derived_sizes() -> None:
    c = Config(vocab_size=11, d_model=24, num_heads=3, num_layers=5, max_positions=13)
    assert (c.D, c.N, c.K, c.H, c.F, c.V, c.P, c.L, c.encoder_layers) == (24, 3, 3, 8, 96, 11, 13, 5, 5)
    c = c.replace(num_kv_heads=1, head_dim=6, d_ff=7, num_encoder_layers=2, steps=100, decay_steps=0)
    assert (c.K, c.H, c.F, c.encoder_layers, c.decay) == (1, 6, 7, 2, 20)
    with pytest.raises(ConfigError, match="vocab_size=0"):
        _ = Config().V


def test_config_is_frozen_hashable_and_static() -> None:
    a, b = Config(d_model=32), Config(d_model=32)
    assert a == b and hash(a) == hash(b) and a is not b
    assert len({a, b, Config(d_model=64), a.replace(norm="rmsnorm")}) == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.d_model = 8

    @jax.jit
    @chex.assert_max_traces(n=1)
    def double(x: jax.Array) -> jax.Array:
        return 2 * x

    jitted = jax.jit(lambda c, x: double(x) * c.d_model, static_argnums=0)
    assert float(jitted(a, jnp.float32(3))) == float(jitted(b, jnp.float32(3))) == 192


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_temperature": 0.0}, "attention_temperature=0 is out of range: above 0"),
        ({"dropout_rate": 1.0}, "dropout_rate=1 is out of range: at least 0 and below 1"),
        ({"dk_exponent": 3.0}, "dk_exponent=3 is out of range"),
        ({"window": 0}, "window=0 is out of range: at least 1"),
        ({"window": 2.5}, "window=2.5: not a whole number"),
        ({"learning_rate": "1e-3"}, "learning_rate='1e-3': not a number"),
        ({"learning_rate": float("nan")}, "learning_rate=nan is out of range"),
    ],
)
def test_hyper_ranges(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_ranges(Hyper(**changes))
    check_ranges(Hyper())
    check_ranges(Hyper(learning_rate=1, dk_exponent=0, attention_temperature=1e-6, dropout_rate=0.999))


def test_hyper_is_a_pytree_of_numbers() -> None:
    names = [f.name for f in dataclasses.fields(Hyper)]
    assert jax.tree.leaves(Hyper()) == [getattr(Hyper(), name) for name in names]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *(jax.tree.map(jnp.float32, Hyper(window=w)) for w in (1, 2, 3)))
    assert stacked.window.tolist() == [1, 2, 3]
    assert {n for n in names if isinstance(getattr(Hyper(), n), int)} == set(settings.INTEGER_HYPER)


def test_every_field_has_a_help_and_a_legal_default() -> None:
    for kind in (Config, Hyper):
        for field in dataclasses.fields(kind):
            assert len(field.metadata["help"]) > 10
            settings.check_value(kind.__name__, field, field.default)


def test_terms_follow_the_numbers() -> None:
    c = Config()
    assert with_terms(c, [Hyper()]).terms == ()
    assert with_terms(c, []).terms == ()
    assert with_terms(c, [Hyper(), Hyper(dropout_rate=0.1)]).terms == ("dropout",)
    # The order is one, so that the same terms are the same program.
    both = [Hyper(clip_norm=1.0), Hyper(dropout_rate=0.1)]
    assert with_terms(c, both) == with_terms(c, both[::-1])
    assert with_terms(c, both).terms == ("dropout", "clip")
    assert with_terms(c.replace(terms=("z_loss",)), both).terms == ("dropout", "z_loss", "clip")
    for term, names in TERMS.items():
        for name in names:
            used = with_terms(c, [Hyper(**{name: 0.5})])
            assert used.has(term) and used.terms == (term,)
    assert not c.has("dropout")


@pytest.mark.parametrize(
    "changes", [{"mask": "causal"}, {"mask": "prefix"}, {"mask": "window", "architecture": "encoder"}]
)
def test_a8_banded_attention_without_a_window_is_refused(changes: dict[str, str]) -> None:
    """It would be dense attention at dense attention's cost, without a word."""
    with pytest.raises(ConfigError, match=f"attention_implementation=banded .*mask={changes['mask']}: no self-att"):
        Config(attention_implementation="banded", **changes)  # type: ignore[arg-type]


def test_the_band_follows_the_windows() -> None:
    c = Config(mask="window", attention_implementation="banded", seq_len=64)
    assert with_terms(c, [Hyper(window=4), Hyper(window=32)]).band == 32
    assert with_terms(c.replace(band=40), [Hyper(window=4)]).band == 40
    assert with_terms(c.replace(attention_implementation="dense"), [Hyper(window=4)]).band == 0
    with pytest.raises(ConfigError, match="window=65 is wider than a row: seq_len=64"):
        with_terms(c, [Hyper(window=4), Hyper(window=65)])
    with pytest.raises(ConfigError, match="band=8 is narrower than window=9"):
        with_terms(c.replace(band=8), [Hyper(window=9)])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"positions": "t5", "relative_buckets": 7}, "relative_buckets=7 is odd"),
        ({"positions": "t5", "relative_buckets": 2}, "relative_buckets=2 is out of range: at least 4"),
        ({"positions": "t5", "relative_distance": 16}, "relative_distance=16 leaves nothing .* relative_buckets=32"),
        ({"num_experts": 2, "experts_per_token": 3}, "experts_per_token=3 of num_experts=2"),
        ({"rope_scaling": "yarn", "positions": "alibi"}, "rope_scaling=yarn with positions=alibi"),
        ({"rope_scaling": "yarm"}, "unknown rope_scaling 'yarm': did you mean yarn"),
        ({"attention_implementation": "blokwise"}, "'blokwise': did you mean blockwise"),
        ({"normaliser": "entmax"}, "unknown normaliser 'entmax': did you mean entmax15"),
    ],
)
def test_settings_of_attention_at_odds_are_refused(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config(**values)


def test_round_trip_through_json() -> None:
    c = Config(d_model=32, terms=("dropout", "clip"), norm_epsilon=1e-6, remat=True, text="a/b.txt")
    assert from_dict(Config, json.loads(json.dumps(to_dict(c)))) == c
    assert hash(from_dict(Config, to_dict(c))) == hash(c)
    h = Hyper(learning_rate=3e-4, window=5, dropout_rate=0.0)
    assert from_dict(Hyper, json.loads(json.dumps(to_dict(h)))) == h
    assert set(to_dict(c)) == {f.name for f in dataclasses.fields(Config)}
    # p4: a false, a zero and an empty string are values.
    plain = from_dict(Config, {"scale_embeddings": False, "rope_fraction": 0.0, "text": ""})
    assert (plain.scale_embeddings, plain.rope_fraction) == (False, 0.0)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (Config, {"d_modle": 32}, "unknown Config field 'd_modle': did you mean d_model"),
        (Hyper, {"learning_rte": 1e-3}, "unknown Hyper field 'learning_rte': did you mean learning_rate"),
        (Hyper, {"dropout_rate": 1.5}, "dropout_rate=1.5 is out of range"),
        (Config, {"num_layers": 0}, "num_layers=0 is out of range"),
    ],
)
def test_from_dict_refuses(kind: type, values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_dict(kind, values)


def test_presets() -> None:
    with pytest.raises(ConfigError, match="unknown preset 'tinny': did you mean tiny"):
        preset("tinny")
    for name, made in PRESETS.items():
        assert preset(name) is made
        check_ranges(made)


def test_b22_mini_llama_has_40_million_parameters() -> None:
    c = preset("mini_llama_40m")
    assert (c.H, c.L) == (64, 12)
    D, F, V, L = 512, 1408, 6400, 12
    # Tied embedding; four projections; three of SwiGLU, no biases; two norms a layer and one after.
    want = V * D + L * (4 * D * D + 3 * D * F + 2 * D) + D
    assert count_parameters(c) == want
    assert want == pytest.approx(40e6, rel=0.1)


def test_vaswani_base_has_the_counted_parameters() -> None:
    c = preset("vaswani_base")
    V, D, F, L = 37_000, 512, 2048, 6
    ffn = 2 * D * F + F + D
    want = V * D + L * (4 * D * D + ffn + 4 * D) + L * (8 * D * D + ffn + 6 * D)
    assert count_parameters(c) == want == 63_045_632


def test_counts_by_kind() -> None:
    c = Config(vocab_size=11, d_model=8, num_layers=3, num_heads=4, d_ff=13, max_positions=17, positions="none")
    D, F, V, L = 8, 13, 11, 3
    base = V * D + L * (4 * D * D + 2 * D * F + F + D + 4 * D) + 2 * D
    assert count_parameters(c) == base
    assert count_parameters(c.replace(positions="rope")) == base
    assert count_parameters(c.replace(positions="sinusoidal")) == base
    assert count_parameters(c.replace(positions="learned", seq_len=16)) == base + 17 * D
    assert count_parameters(c.replace(tie_embeddings=False)) == base + V * D
    assert count_parameters(c.replace(attention_bias=True)) == base + L * 4 * D
    assert count_parameters(c.replace(ffn_bias=False)) == base - L * (F + D)
    assert count_parameters(c.replace(ffn="swiglu")) == base + L * (D * F + F)
    assert count_parameters(c.replace(norm="rmsnorm")) == base - L * 2 * D - D
    assert count_parameters(c.replace(norm_placement="post")) == base - 2 * D
    assert count_parameters(c.replace(norm_placement="none")) == base - 2 * D - L * 4 * D
    assert count_parameters(c.replace(norm_placement="sandwich")) == base + L * 4 * D
    assert count_parameters(c.replace(num_kv_heads=1)) == base - L * 2 * D * 6
    assert count_parameters(c.replace(head_dim=5)) == base + L * 4 * D * (4 * 5 - D)
    assert count_parameters(c.replace(architecture="encoder")) == base
