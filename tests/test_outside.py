"""Models that others trained, against what others' programs make of them."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import outside
from tests.quick import jit
from transformer_jax.batch import Batch
from transformer_jax.beam import Penalty, beam_search
from transformer_jax.config import Config, Hyper
from transformer_jax.decode import generate
from transformer_jax.encoder_decoder import Transformer, forward
from transformer_jax.errors import CheckpointError, ConfigError
from transformer_jax.importing import from_tensors, llama_config, llama_rules, llama_tensors, to_tensors
from transformer_jax.samplers import GREEDY

pytestmark = pytest.mark.usefixtures("quick_decoding")
logits_of = jit(lambda c, p, h, b: forward(p, c, h, b)[0], static_argnums=0)
START, STOP = 1, 2


def batch_of(tokens: Any, **parts: Any) -> Batch:
    ids = jnp.asarray(tokens, jnp.int32)
    return Batch(ids, ids, jnp.ones(ids.shape), **parts)


def greedy(params: Transformer, config: Config, hyper: Hyper, prompts: Any, **options: Any) -> Any:
    return generate(params, config, hyper, prompts, jax.random.key(0), sampler=GREEDY, **options)


# --- Arabic to English letters, by CTranslate2 4.8.5 -----------------------------------

ARABIC = outside.TRANSLITERATION


@dataclasses.dataclass
class Words:
    """The model, the words' ids, and what the other program made of them; ids are those of its vocabularies."""

    params: Transformer
    sources: list[list[int]]
    targets: list[list[int]]
    said: list[dict[str, Any]]
    ids: dict[str, int]


@pytest.fixture(scope="module")
def words() -> Words:
    path = outside.folder("aren-transliteration")
    vocabularies = [
        {symbol: i for i, symbol in enumerate((path / f"{side}_vocabulary.txt").read_text("utf-8").splitlines())}
        for side in ("source", "target")
    ]
    table = outside.sinusoid(ARABIC.P, ARABIC.D) / ARABIC.D**0.5  # ours is multiplied by it
    with np.load(path / "weights_v2_fp32.npz") as file:
        params = from_tensors(file, ARABIC, outside.transliteration_rules(), {"embedding/position_PD": table})
    said = json.loads((path / "reference.json").read_text("utf-8"))
    sources = [[vocabularies[0][symbol] for symbol in one["src"]] for one in said]
    targets = [[START, *(vocabularies[1][symbol] for symbol in one["greedy"])] for one in said]
    return Words(params, sources, targets, said, vocabularies[1])


def test_transliteration_logits(words: Words) -> None:
    T, S = max(map(len, words.targets)), max(map(len, words.sources))
    tokens = [row + [0] * (T - len(row)) for row in words.targets]
    sources = jnp.asarray([row + [0] * (S - len(row)) for row in words.sources])
    lengths = jnp.asarray([len(row) for row in words.sources])
    got = logits_of(ARABIC, words.params, Hyper(), batch_of(tokens, source_BS=sources, source_lengths_B=lengths))
    for row, target, said in zip(got, words.targets, words.said, strict=True):
        np.testing.assert_allclose(row[: len(target)], said["logits"], atol=1e-4)


def test_transliteration_greedy(words: Words) -> None:
    made = greedy(
        words.params, ARABIC, Hyper(), [[START]] * 7, sources=words.sources, max_new_tokens=16, stop_ids=(STOP,)
    )
    for b, said in enumerate(words.said):
        length = int(made.lengths_B[b])
        assert made.ids_BT[b, :length].tolist() == [*(words.ids[symbol] for symbol in said["greedy"]), STOP]
        np.testing.assert_allclose(made.logp_BT[b].sum() / length, said["score"], atol=1e-4)


def test_transliteration_beam_of_4(words: Words) -> None:
    """Its scores are sums over the length, its default length_penalty being 1, and the stop id counts.

    With a length_penalty it ends a word when as many hypotheses as beams have finished. Without that, two
    of the seven words have better ones.
    """
    options: Any = {"sources": words.sources, "max_new_tokens": 16, "stop_ids": (STOP,), "beam": 4, "n_best": 4}
    options["penalty"] = Penalty("power", 1.0)
    found = beam_search(words.params, ARABIC, Hyper(), [[START]] * 7, enough=4, **options)
    better = beam_search(words.params, ARABIC, Hyper(), [[START]] * 7, **options)
    for b, said in enumerate(words.said):
        for w, (symbols, score) in enumerate(said["beam4"]):
            got = found.ids_BWT[b, w, : int(found.lengths_BW[b, w])].tolist()
            assert got == [*(words.ids[symbol] for symbol in symbols), STOP], (said["src"], w)
            np.testing.assert_allclose(found.scores_BW[b, w], score, atol=1e-4)
    gains = np.asarray(better.scores_BW) - np.asarray(found.scores_BW)
    assert (gains > -1e-5).all() and (gains > 1e-3).any(axis=1).sum() == 2


# --- a LLaMA, by Hugging Face transformers 5.24 -----------------------------------------


@dataclasses.dataclass
class Stories:
    config: Config
    hyper: Hyper
    tensors: dict[str, np.ndarray]
    params: Transformer
    ids: np.ndarray
    logits: np.ndarray


@pytest.fixture(scope="module")
def stories() -> Stories:
    path = outside.folder("stories260K")
    config, hyper = llama_config(json.loads((path / "config.json").read_text()))
    tensors = outside.safetensors(path / "model.safetensors")
    with np.load(path / "reference_logits.npz") as said:
        ids, logits = said["ids"], said["logits"]
    return Stories(config, hyper, tensors, from_tensors(tensors, config, llama_rules(config)), ids, logits)


def test_stories_without_a_cache(stories: Stories) -> None:
    """Each id is the most probable one after those before it: greedy decoding, one position at a time."""
    got = logits_of(stories.config, stories.params, stories.hyper, batch_of(stories.ids[None]))[0]
    np.testing.assert_allclose(got, stories.logits, atol=1e-3)
    np.testing.assert_array_equal(jnp.argmax(got[:-1], axis=-1), stories.ids[1:])


def test_stories_with_the_cache(stories: Stories) -> None:
    made = greedy(stories.params, stories.config, stories.hyper, [[int(stories.ids[0])]], max_new_tokens=200)
    want = [*stories.ids[1:].tolist(), int(np.argmax(stories.logits[-1]))]
    assert made.ids_BT[0].tolist() == want


def test_c4_positions_past_200_by_the_formulas_alone(stories: Stories) -> None:
    """The reference ends at position 199, where a wrong layout may not show yet: float64 goes on from there."""
    config, w, T = stories.config, {name: x.astype(np.float64) for name, x in stories.tensors.items()}, 320
    ids = np.random.default_rng(3).integers(3, config.V, T)
    ids[: len(stories.ids)] = stories.ids
    N, K, H = config.N, config.K, config.H

    def rms(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + config.norm_epsilon) * w[f"{name}.weight"]

    angles = np.arange(T)[:, None] * float(stories.hyper.rope_base) ** (-np.arange(0, H, 2) / H)
    turn = np.exp(1j * angles)[:, None]

    def heads(x: np.ndarray, name: str, n: int) -> np.ndarray:
        return (x @ w[f"{name}_proj.weight"].T).reshape(T, n, H)

    def turned(x: np.ndarray) -> np.ndarray:  # pairs (i, i + H/2) as complex numbers
        z = (x[..., : H // 2] + 1j * x[..., H // 2 :]) * turn
        return np.concatenate([z.real, z.imag], axis=-1)

    x = w["model.embed_tokens.weight"][ids]
    for i in range(config.L):
        layer = f"model.layers.{i}"
        y, block = rms(x, f"{layer}.input_layernorm"), f"{layer}.self_attn"
        q, k, v = turned(heads(y, f"{block}.q", N)), turned(heads(y, f"{block}.k", K)), heads(y, f"{block}.v", K)
        k, v = np.repeat(k, N // K, axis=1), np.repeat(v, N // K, axis=1)
        scores = np.einsum("tnh,snh->nts", q, k) / np.sqrt(H)
        scores = np.where(np.tri(T, dtype=bool), scores, -np.inf)
        powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out = np.einsum("nts,snh->tnh", powers / powers.sum(axis=-1, keepdims=True), v)
        x = x + out.reshape(T, N * H) @ w[f"{block}.o_proj.weight"].T
        y, mlp = rms(x, f"{layer}.post_attention_layernorm"), f"{layer}.mlp"
        gate = y @ w[f"{mlp}.gate_proj.weight"].T
        y = gate / (1 + np.exp(-gate)) * (y @ w[f"{mlp}.up_proj.weight"].T)
        x = x + y @ w[f"{mlp}.down_proj.weight"].T
    want = rms(x, "model.norm") @ w["model.embed_tokens.weight"].T
    np.testing.assert_allclose(want[: len(stories.ids)], stories.logits, atol=1e-3)
    got = logits_of(config, stories.params, stories.hyper, batch_of(ids[None]))[0]
    np.testing.assert_allclose(got[200:], want[200:], atol=1e-3)
    # It would show: the other layout is far off.
    other = logits_of(config.replace(rope_layout="interleaved"), stories.params, stories.hyper, batch_of(ids[None]))[0]
    assert np.abs(other[200:] - want[200:]).max() > 0.1


# --- import and export --------------------------------------------------------------


def test_n4_every_tensor_that_does_not_fit_is_named(stories: Stories) -> None:
    tensors, rules = dict(stories.tensors), llama_rules(stories.config)
    del tensors["model.layers.3.mlp.up_proj.weight"], tensors["model.norm.weight"]
    tensors |= {"model.layers.5.mlp.up_proj.weight": np.zeros((172, 64)), "lm_head.weight": np.zeros((512, 64))}
    tensors["model.layers.1.self_attn.k_proj.weight"] = np.zeros((64, 32), np.float32)
    with pytest.raises(CheckpointError) as error:
        from_tensors(tensors, stories.config, rules)
    message = str(error.value)
    assert message.startswith("5 tensors do not fit the model: ") and "\n" not in message
    for part in (
        "model.layers.3.mlp.up_proj.weight is missing", "model.norm.weight is missing", "lm_head.weight is unknown",
        "model.layers.5.mlp.up_proj.weight is unknown",
        "model.layers.1.self_attn.k_proj.weight is (64, 32), not (32, 64)",
    ):  # fmt: skip
        assert part in message


def test_n4_no_parameter_is_left_as_it_was_drawn(words: Words) -> None:
    """Rules that forget a parameter, or a layer of one, are refused as well."""
    rules = outside.transliteration_rules()
    tensors = to_tensors(words.params, rules)
    with pytest.raises(CheckpointError, match="no tensor holds all of embedding/position_PD"):
        from_tensors(tensors, ARABIC, rules)
    for forgotten in ("decoder/projection/bias", "decoder/layer_5/ffn/linear_0/bias"):
        kept = [rule for rule in rules if rule.name != forgotten]
        fewer = {name: x for name, x in tensors.items() if name != forgotten}
        given = {"embedding/position_PD": np.zeros((ARABIC.P, ARABIC.D))}
        with pytest.raises(CheckpointError, match="embedding/bout_V|decoder/layers/ffn/b1_F"):
            from_tensors(fewer, ARABIC, kept, given)


def test_n5_import_then_export_is_the_same_file(stories: Stories, words: Words) -> None:
    with np.load(outside.folder("aren-transliteration") / "weights_v2_fp32.npz") as file:
        files = [
            (stories.tensors, to_tensors(stories.params, llama_rules(stories.config))),
            (dict(file), to_tensors(words.params, outside.transliteration_rules())),
        ]
    for want, got in files:
        assert set(got) == set(want)
        for name, tensor in want.items():
            assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape
            assert got[name].tobytes() == np.ascontiguousarray(tensor).tobytes(), name


def test_n5_with_biases_and_an_output_layer_of_its_own_too() -> None:
    settings = {
        "model_type": "llama", "vocab_size": 7, "hidden_size": 6, "num_hidden_layers": 2, "num_attention_heads": 3,
        "num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 5, "attention_bias": True, "mlp_bias": True,
        "rope_theta": 500.0, "rms_norm_eps": 1e-4,
    }  # fmt: skip
    config, hyper = llama_config(settings)
    assert hyper.rope_base == 500.0 and config.norm_epsilon == 1e-4 and not config.tie_embeddings
    rng = np.random.default_rng(0)
    outs = {"q": (12, 6), "k": (4, 6), "v": (4, 6), "o": (6, 12), "gate": (5, 6), "up": (5, 6), "down": (6, 5)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (7, 6), "lm_head.weight": (7, 6)}
    shapes["model.norm.weight"] = (6,)
    for i in range(2):
        for norm in ("input", "post_attention"):
            shapes[f"model.layers.{i}.{norm}_layernorm.weight"] = (6,)
        for name, shape in outs.items():
            block = "self_attn" if name in "qkvo" else "mlp"
            shapes[f"model.layers.{i}.{block}.{name}_proj.weight"] = shape
            shapes[f"model.layers.{i}.{block}.{name}_proj.bias"] = shape[:1]
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    params = from_tensors(tensors, config, llama_rules(config))
    got = to_tensors(params, llama_rules(config))
    assert set(got) == set(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(got[name], tensor)
    assert params.decoder is not None
    wq, name = params.decoder.layers.attention.wq_DNH, "model.layers.1.self_attn.q_proj.weight"
    np.testing.assert_array_equal(wq[1, :, 2, 3], tensors[name][2 * 4 + 3])  # output 3 of head 2


def test_a_stretched_rope_is_imported(stories: Stories) -> None:
    llama3 = {"factor": 8.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    path = outside.folder("stories260K")
    settings = json.loads((path / "config.json").read_text())
    settings |= {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **llama3}}
    config, hyper = llama_config(settings)
    assert (config.rope_scaling, config.rope_original_positions) == ("llama3", 64)
    assert (hyper.rope_base, hyper.rope_factor, hyper.rope_slow, hyper.rope_fast) == (5e5, 8.0, 1.0, 4.0)
    del settings["rope_scaling"]
    plain, same = llama_config(settings)
    ids = stories.ids[None]
    runs = [logits_of(c, stories.params, h, batch_of(ids)) for c, h in ((config, hyper), (plain, same))]
    assert np.abs(runs[0] - runs[1]).max() > 0.01


def test_what_a_file_says_twice_is_read_once(stories: Stories) -> None:
    table = stories.tensors["model.embed_tokens.weight"]
    more = {"lm_head.weight": table, "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    assert llama_tensors(stories.tensors | more, stories.config).keys() == stories.tensors.keys()
    with pytest.raises(CheckpointError, match="lm_head.weight is not model.embed_tokens.weight"):
        llama_tensors(stories.tensors | {"lm_head.weight": table + 1}, stories.config)
    untied = stories.config.replace(tie_embeddings=False)
    assert "lm_head.weight" in llama_tensors(stories.tensors | more, untied)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mistral"}, "model_type=mistral cannot be imported: only llama"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3 RoPE scaling without low_freq_factor"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn RoPE scaling without factor"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 8.0}}, "RoPE scaling 'longrope'"),
    ],
)
def test_another_model_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        llama_config({"model_type": "llama", **changes})
