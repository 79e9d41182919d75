"""Parameters from the tensors of other libraries' files, and back, bit for bit.

    config, hyper = llama_config(json.loads(Path("config.json").read_text()))
    tensors = llama_tensors(safetensors.numpy.load_file("model.safetensors"), config)
    params = from_tensors(tensors, config, llama_rules(config))
    tensors = to_tensors(params, llama_rules(config))

A file is described by rules, one for each of its tensors: its name, and which of our parameters it holds. One
list of rules serves both directions. A tensor that is missing, one that no rule knows and one of another
shape are refused, all of them by name: no parameter is ever left as it was drawn.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.config import Config, Hyper
from transformer_jax.encoder_decoder import Transformer, init_transformer
from transformer_jax.errors import CheckpointError, ConfigError
from transformer_jax.rope_scaling import from_hugging_face

Tensors = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Rule:
    """A tensor `name` holds our parameters at `paths` ("decoder/final_norm/scale_D"), of one layer or of no layer.

    inputs: a matrix [out, in], the transpose of ours, whose first so many axes are the input's; 0: a vector of all
    of ours; None: the same array. Several paths are parts of one tensor, one after another along its first axis.
    """

    name: str
    paths: tuple[str, ...]
    layer: int | None = None
    inputs: int | None = None

    def shape(self, ours: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """The tensor's, where our parameters have these."""
        if self.inputs is None:
            return ours[0]
        into = math.prod(ours[0][: self.inputs])
        out = sum(map(math.prod, ours)) // into
        return (out, into) if self.inputs else (out,)

    def split(self, tensor: np.ndarray, ours: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
        """Our parameters, of these shapes, from the tensor."""
        if self.inputs is None:
            return [tensor]
        into = math.prod(ours[0][: self.inputs])
        ends = np.cumsum([math.prod(shape) // into for shape in ours])[:-1]
        parts = np.split(tensor.reshape(-1, into), ends)
        return [part.T.reshape(shape) for part, shape in zip(parts, ours, strict=True)]

    def join(self, ours: Sequence[np.ndarray]) -> np.ndarray:
        """The tensor from our parameters."""
        if self.inputs is None:
            return ours[0]
        into = math.prod(ours[0].shape[: self.inputs])
        return np.concatenate([x.reshape(into, -1).T for x in ours]).reshape(self.shape([x.shape for x in ours]))


def _by_path(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def from_tensors(
    tensors: Tensors, config: Config, rules: Sequence[Rule], given: Mapping[str, np.ndarray] | None = None
) -> Transformer:
    """The parameters of `config`, float32. given: those that are in no tensor, by path.

    Raises CheckpointError, one line, naming every tensor that is missing, unknown or of another shape.
    """
    shapes = jax.eval_shape(lambda key: init_transformer(key, config), jax.random.key(0))
    ours = {path: leaf.shape for path, leaf in _by_path(shapes).items()}

    def shapes_of(rule: Rule) -> list[tuple[int, ...]]:
        return [ours[path] if rule.layer is None else ours[path][1:] for path in rule.paths]

    wanted = {rule.name: rule.shape(shapes_of(rule)) for rule in rules}
    wrong = [f"{name} is missing" for name in wanted if name not in tensors]
    wrong += [f"{name} is unknown" for name in tensors if name not in wanted]
    wrong += [
        f"{name} is {tensors[name].shape}, not {shape}"
        for name, shape in wanted.items()
        if name in tensors and tensors[name].shape != shape
    ]
    if wrong:
        raise CheckpointError(f"{len(wrong)} tensors do not fit the model: {'; '.join(wrong)}")
    parts: dict[str, Any] = {path: np.asarray(array) for path, array in (given or {}).items()}
    for rule in rules:
        split = rule.split(np.asarray(tensors[rule.name], np.float32), shapes_of(rule))
        for path, part in zip(rule.paths, split, strict=True):
            if rule.layer is None:
                parts[path] = part
            else:
                parts.setdefault(path, {})[rule.layer] = part
    made = {path: np.stack([x[i] for i in range(len(x))]) if isinstance(x, dict) else x for path, x in parts.items()}
    unset = [path for path, shape in ours.items() if path not in made or made[path].shape != shape]
    if unset:
        raise CheckpointError(f"no tensor holds all of {', '.join(unset)}")
    return jax.tree.unflatten(jax.tree.structure(shapes), [jnp.asarray(made[path], jnp.float32) for path in ours])


def to_tensors(params: Transformer, rules: Sequence[Rule]) -> dict[str, np.ndarray]:
    """The tensors of the file that `from_tensors` would read `params` from, float32."""
    ours = {path: np.asarray(leaf) for path, leaf in _by_path(params).items()}
    return {
        rule.name: np.ascontiguousarray(
            rule.join([ours[path] if rule.layer is None else ours[path][rule.layer] for path in rule.paths])
        )
        for rule in rules
    }


# --- LLaMA, as Hugging Face's files have it -------------------------------------------

LLAMA_WANTS = {"model_type": "llama", "hidden_act": "silu", "pretraining_tp": 1}


def llama_config(settings: Mapping[str, Any]) -> tuple[Config, Hyper]:
    """From the values of a config.json, a stretched RoPE included (rope_scaling.from_hugging_face).

    Raises ConfigError for a model that is no LLaMA, and for a RoPE scaling that is not known.
    """
    for name, wanted in LLAMA_WANTS.items():
        if settings.get(name, wanted) != wanted:
            raise ConfigError(f"{name}={settings[name]} cannot be imported: only {wanted}")
    base = settings.get("rope_theta")
    given = {"rope_theta": 10000.0 if base is None else base}
    # As Hugging Face reads a file that has both names.
    given |= settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    rope = from_hugging_face(given, settings.get("max_position_embeddings", 2048))
    numbers = {field.name: rope.pop(field.name) for field in dataclasses.fields(Hyper) if field.name in rope}
    config = Config(
        vocab_size=settings["vocab_size"],
        d_model=settings["hidden_size"],
        num_layers=settings["num_hidden_layers"],
        num_heads=settings["num_attention_heads"],
        num_kv_heads=settings.get("num_key_value_heads") or 0,
        head_dim=settings.get("head_dim") or 0,
        d_ff=settings["intermediate_size"],
        ffn="swiglu",
        norm="rmsnorm",
        norm_epsilon=settings.get("rms_norm_eps", 1e-6),
        positions="rope",
        **rope,
        seq_len=settings.get("max_position_embeddings", 2048),
        tie_embeddings=settings.get("tie_word_embeddings", False),
        scale_embeddings=False,
        attention_bias=settings.get("attention_bias", False),
        ffn_bias=settings.get("mlp_bias", False),
    )
    return config, Hyper(**numbers)


def llama_tensors(tensors: Tensors, config: Config) -> dict[str, np.ndarray]:
    """The tensors without those that repeat what is known: RoPE's frequencies, and the output layer where it is tied.

    Raises CheckpointError for a tied output layer that is not the embedding.
    """
    kept = {name: x for name, x in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    if config.tie_embeddings and "lm_head.weight" in kept:
        if not np.array_equal(kept.pop("lm_head.weight"), kept.get("model.embed_tokens.weight", ())):
            raise CheckpointError("lm_head.weight is not model.embed_tokens.weight, though tie_word_embeddings says so")
    return kept


def llama_rules(config: Config) -> list[Rule]:
    """The tensors of a LLaMA of this Config."""
    rules = [Rule("model.embed_tokens.weight", ("embedding/embed_VD",))]
    rules += [Rule("model.norm.weight", ("decoder/final_norm/scale_D",))]
    if not config.tie_embeddings:
        rules += [Rule("lm_head.weight", ("embedding/wout_DV",), None, 1)]
    attention = {"q": ("wq_DNH", "bq_NH", 1), "k": ("wk_DKH", "bk_KH", 1), "v": ("wv_DKH", "bv_KH", 1)}
    attention |= {"o": ("wo_NHD", "bo_D", 2)}
    ffn = {"gate": ("wg_DF", "bg_F", 1), "up": ("w1_DF", "b1_F", 1), "down": ("w2_FD", "b2_D", 1)}
    norms = {"input_layernorm": "attention_norms", "post_attention_layernorm": "ffn_norms"}
    kinds = (("self_attn", "attention", attention, config.attention_bias), ("mlp", "ffn", ffn, config.ffn_bias))
    for i in range(config.L):
        theirs, ours = f"model.layers.{i}", "decoder/layers"
        rules += [Rule(f"{theirs}.{a}.weight", (f"{ours}/{b}/norm/scale_D",), i) for a, b in norms.items()]
        for block, part, names, biased in kinds:
            for name, (weight, bias, inputs) in names.items():
                rules += [Rule(f"{theirs}.{block}.{name}_proj.weight", (f"{ours}/{part}/{weight}",), i, inputs)]
                if biased:
                    rules += [Rule(f"{theirs}.{block}.{name}_proj.bias", (f"{ours}/{part}/{bias}",), i, 0)]
    return rules
