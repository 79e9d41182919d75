"""Settings: `Config` shapes the program, `Hyper` is numbers inside it.

A run is a pure function (Config, Hyper, key) -> metrics. Config is frozen, hashable
and static under jit: runs that share it share one compiled program. Hyper is a pytree
of numbers: runs that differ only there are arms of one program. Never `if` on a
Hyper value.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from flax import struct

from transformer_jax.errors import ConfigError, unknown

ARCHITECTURES = ("decoder", "encoder", "encoder_decoder")
FFN_KINDS = ("relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu", "reglu")
GATED = ("swiglu", "geglu", "reglu")
NORMS = ("layernorm", "rmsnorm")
PLACEMENTS = ("pre", "post", "sandwich", "none")
POSITIONS = ("rope", "sinusoidal", "learned", "alibi", "t5", "none")
ROPE_LAYOUTS = ("half", "interleaved")
ROPE_SCALINGS = ("none", "linear", "ntk", "dynamic", "yarn", "llama3")
IMPLEMENTATIONS = ("dense", "blockwise", "banded", "linear")
NORMALISERS = ("softmax", "sigmoid", "relu", "entmax15")
MASKS = ("causal", "none", "inverted", "window", "prefix", "block_sparse")
OPTIMIZERS = ("adam", "adamw", "sgd", "momentum")
SCHEDULES = ("constant", "inverse_sqrt", "cosine", "wsd")
TASKS = ("text", "pairs", "cmudict", "copy", "reverse", "induction", "recall", "markov", "modular")
# Which tasks read a field of the data; the others read none of these.
_TEXT, _PAIRS, _BOTH, _ALL = ("text",), ("pairs",), ("pairs", "cmudict"), ("text", "pairs", "cmudict")
FLOATS = ("float32", "bfloat16", "float16")
PRECISIONS = ("default", "high", "highest")

# A term that no arm uses is not in the program: each is switched on by the Hyper
# values that make it do something.
TERMS = {
    "dropout": ("dropout_rate",),
    "attention_dropout": ("attention_dropout_rate",),
    "activation_dropout": ("activation_dropout_rate",),
    "label_smoothing": ("label_smoothing",),
    "z_loss": ("z_loss",),
    "clip": ("clip_norm",),
    "attention_softcap": ("attention_softcap",),
    "final_softcap": ("final_softcap",),
    "ema": ("ema_decay",),
}


def _meta(help: str, **limits: Any) -> dict[str, Any]:
    return {"help": help, **limits}


def _one_of(default: str, choices: tuple[str, ...], help: str) -> Any:
    return dataclasses.field(default=default, metadata=_meta(help, choices=choices))


def _number(default: float, help: str, **limits: Any) -> Any:
    return dataclasses.field(default=default, metadata=_meta(help, **limits))


def _text(help: str, **limits: Any) -> Any:
    return dataclasses.field(default="", metadata=_meta(help, **limits))


def _switch(default: bool, help: str, **limits: Any) -> Any:
    return dataclasses.field(default=default, metadata=_meta(help, **limits))


@dataclasses.dataclass(frozen=True)
class Config:
    """What changes the program. Zero means "derived" where the help says so.

    Raises ConfigError for a value out of range, an unknown kind, or settings at odds.
    The shape letters D N K H F V P C E L are properties that give the derived sizes.
    """

    # --- the model -----------------------------------------------------------
    architecture: str = _one_of("decoder", ARCHITECTURES, "which stacks the model has")
    vocab_size: int = _number(0, "V, number of token ids; 0: the task's own", low=0)
    source_vocab_size: int = _number(0, "ids of a vocabulary of the encoder's own; 0: the decoder's, one table", low=0)
    d_model: int = _number(64, "D, width of the residual stream", low=1)
    num_layers: int = _number(2, "L, layers of a stack", low=1)
    num_encoder_layers: int = _number(0, "layers of the encoder; 0: num_layers", low=0)
    num_heads: int = _number(4, "N, query heads", low=1)
    num_kv_heads: int = _number(0, "K, key/value heads; 0: num_heads (1: multi-query)", low=0)
    head_dim: int = _number(0, "H (d_k), width of a head; 0: d_model / num_heads", low=0)
    d_ff: int = _number(0, "F, feed-forward width; 0: 4 d_model", low=0)
    ffn: str = _one_of("gelu", FFN_KINDS, "feed-forward kind")
    match_ffn_parameters: bool = _switch(False, "gated kinds take 2/3 of the width: equal weights")
    num_experts: int = _number(0, "E, experts of the feed-forward layers; 0: one net for all tokens", low=0)
    experts_per_token: int = _number(2, "experts that a token is sent to", low=1)
    expert_capacity: float = _number(1.25, "slots of an expert in a row over its fair share; 0: none dropped", low=0.0)
    norm: str = _one_of("layernorm", NORMS, "normalisation")
    norm_placement: str = _one_of("pre", PLACEMENTS, "where the norms stand")
    # Its power of -3/2, in the gradient of a constant row, must be finite in float32.
    norm_epsilon: float = _number(1e-5, "epsilon inside the root", low=1e-20)
    positions: str = _one_of("rope", POSITIONS, "how positions enter")
    rope_layout: str = _one_of("half", ROPE_LAYOUTS, "which coordinates RoPE pairs")
    rope_fraction: float = _number(1.0, "part of a head that RoPE turns", low=0.0, high=1.0)
    rope_scaling: str = _one_of("none", ROPE_SCALINGS, "how RoPE frequencies are stretched by rope_factor")
    rope_original_positions: int = _number(1024, "positions that RoPE was trained on, before its scaling", low=1)
    relative_buckets: int = _number(32, "C, buckets of the t5 positions; half of them a direction where both", low=4)
    relative_distance: int = _number(128, "distance from which the t5 positions are one bucket", low=2)
    max_positions: int = _number(1024, "P, rows of the learned position table", low=1)
    tie_embeddings: bool = _switch(True, "the output layer is the embedding's transpose")
    scale_embeddings: bool = _switch(True, "multiply embeddings by sqrt(d_model)")
    scale_logits: bool = _switch(False, "divide the logits by sqrt(d_model) where embeddings are tied, as T5 does")
    output_bias: bool = _switch(False, "a learned bias for each logit")
    attention_bias: bool = _switch(False, "biases in the attention projections")
    ffn_bias: bool = _switch(True, "biases in the feed-forward layers")
    qk_norm: bool = _switch(False, "RMS norm of every query and key head, with a learned scale")
    attention_sink: bool = _switch(False, "one learned logit a head in the normaliser, with no value")
    normaliser: str = _one_of("softmax", NORMALISERS, "how scores become weights")
    attention_implementation: str = _one_of(
        "dense", IMPLEMENTATIONS, "how attention is computed; linear is another function"
    )
    attention_block: int = _number(0, "queries and keys of a block or chunk; 0: the implementation's own", low=0)
    band: int = _number(0, "keys that a query of banded attention reads; 0: the largest window asked for", low=0)
    mask: str = _one_of("causal", MASKS, "what the decoder's self-attention may see")
    block_size: int = _number(16, "block of the block_sparse mask", low=1)
    # --- numerics ------------------------------------------------------------
    compute_dtype: str = _one_of("float32", FLOATS, "type of the layers' products")
    score_dtype: str = _one_of("float32", FLOATS, "type of attention scores and softmax")
    matmul_precision: str = _one_of("default", PRECISIONS, "XLA's matmul precision")
    scan_unroll: int = _number(1, "layers per iteration of the scan; 0: all", low=0)
    remat: bool = _switch(False, "recompute each layer in the backward pass")
    loss_chunks: int = _number(1, "parts that the loss takes a batch's tokens in: logits are never whole", low=1)
    terms: tuple[str, ...] = dataclasses.field(
        default=(), metadata=_meta("optional terms in the program; follows the numbers", parts=tuple(TERMS))
    )
    # --- optimisation --------------------------------------------------------
    optimizer: str = _one_of("adam", OPTIMIZERS, "update rule")
    schedule: str = _one_of("constant", SCHEDULES, "shape of the learning rate over steps")
    steps: int = _number(300, "updates of the run", low=1, high=2**31 - 1)
    warmup_steps: int = _number(0, "updates of linear warm-up", low=0)
    decay_steps: int = _number(0, "updates of the final decay of wsd; 0: a fifth of steps", low=0)
    batch_size: int = _number(8, "B, rows of a batch", low=1)
    accumulation: int = _number(1, "parts that a batch is split into, gradients summed", low=1)
    # --- data ----------------------------------------------------------------
    task: str = _one_of("text", TASKS, "what is learned")
    text: str = _text("a UTF-8 file for the text task; empty: the text that ships with Python", tasks=_TEXT)
    pairs: str = _text(
        "pairs to learn from: a TSV or JSONL file, or SOURCE,TARGET, two files line by line; gz, zip", tasks=_PAIRS
    )
    dev: str = _text(
        "pairs to choose on, as pairs are given; empty: a part of pairs, by a hash of the source", tasks=_PAIRS
    )
    test: str = _text("pairs to report on, as pairs are given; empty: those of dev", tasks=_PAIRS)
    tokenizer: str = _text(
        "bytes, chars, nfd, symbols, bpe or a tokenizer.json, of the source side; empty: by the data", tasks=_ALL
    )
    target_tokenizer: str = _text("the same for the target side; empty: by the data, or the source's", tasks=_BOTH)
    metrics: str = _text(
        "what outputs are judged by, a comma list, the best checkpoint by the first; empty: by the target side",
        tasks=_BOTH,
    )
    bpe_size: int = _number(4000, "tokens of a bpe vocabulary at most", low=260, tasks=_ALL)
    length_buckets: int = _number(4, "static shapes that pairs of all lengths are padded to", low=1, tasks=_BOTH)
    packing: bool = _switch(False, "documents, parted by empty lines, share rows; none sees another", tasks=_TEXT)
    seq_len: int = _number(64, "T, tokens of a row", low=1)

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.head_dim == 0 and self.d_model % self.num_heads:
            raise ConfigError(
                f"num_heads={self.num_heads} does not divide d_model={self.d_model}: change one, or give head_dim"
            )
        if self.source_vocab_size and self.architecture != "encoder_decoder":
            raise ConfigError(
                f"source_vocab_size={self.source_vocab_size} with architecture={self.architecture}: no source"
            )
        if self.N % self.K:
            raise ConfigError(f"num_kv_heads={self.K} does not divide num_heads={self.N}")
        if self.attention_implementation == "banded" and (self.mask != "window" or self.architecture == "encoder"):
            raise ConfigError(
                f"attention_implementation=banded with architecture={self.architecture}, mask={self.mask}: no "
                "self-attention has a window there; a decoder's has one with mask=window"
            )
        if self.packing and self.num_experts and self.expert_capacity:
            raise ConfigError(
                f"packing with expert_capacity={self.expert_capacity:g}: documents of a row would take each other's "
                "slots; expert_capacity=0 drops none"
            )
        if self.batch_size % self.accumulation:
            raise ConfigError(f"accumulation={self.accumulation} does not divide batch_size={self.batch_size}")
        if self.positions == "learned" and self.seq_len > self.P:
            raise ConfigError(f"seq_len={self.seq_len} is past the position table: max_positions={self.P}")
        if self.positions == "rope" and self.rope_fraction and not self.rotated:
            raise ConfigError(f"RoPE turns nothing: head_dim={self.H} x rope_fraction={self.rope_fraction} is below 1")
        if self.positions == "rope" and self.rotated % 2:
            raise ConfigError(
                f"RoPE turns pairs: head_dim={self.H} x rope_fraction={self.rope_fraction} = {self.rotated} is odd"
            )
        if self.positions == "sinusoidal" and self.d_model % 2:
            raise ConfigError(f"sinusoidal positions need an even d_model, not {self.d_model}")
        if self.positions == "t5" and self.relative_buckets % 2:
            raise ConfigError(f"relative_buckets={self.relative_buckets} is odd: half of them are exact distances")
        if self.positions == "t5" and self.relative_distance <= self.relative_buckets // 2:
            raise ConfigError(
                f"relative_distance={self.relative_distance} leaves nothing to the wide ones of "
                f"relative_buckets={self.relative_buckets}: it must be above half of them"
            )
        if 0 < self.num_experts < self.experts_per_token:
            raise ConfigError(f"experts_per_token={self.experts_per_token} of num_experts={self.num_experts}")
        if self.rope_scaling != "none" and self.positions != "rope":
            raise ConfigError(f"rope_scaling={self.rope_scaling} with positions={self.positions}: nothing to scale")
        if self.warmup_steps > self.steps and self.schedule != "constant":
            raise ConfigError(f"warmup_steps={self.warmup_steps} is past steps={self.steps}")
        if self.schedule == "wsd" and self.warmup_steps + self.decay > self.steps:
            raise ConfigError(f"warmup_steps={self.warmup_steps} + decay_steps={self.decay} is past steps={self.steps}")

    # The alphabet of shape letters (see the package docstring).
    @property
    def D(self) -> int:
        return self.d_model

    @property
    def N(self) -> int:
        return self.num_heads

    @property
    def K(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def H(self) -> int:
        return self.head_dim or self.d_model // self.num_heads

    @property
    def F(self) -> int:
        """Feed-forward width; matched gated kinds take 2/3 of it, as Shazeer 2020 does."""
        width = self.d_ff or 4 * self.d_model
        if self.match_ffn_parameters and self.ffn in GATED:
            return max(1, round(2 * width / 3))
        return width

    @property
    def V(self) -> int:
        if self.vocab_size < 1:
            raise ConfigError("vocab_size=0: give one, or let the task choose it (data.resolve)")
        return self.vocab_size

    @property
    def P(self) -> int:
        return self.max_positions

    @property
    def C(self) -> int:
        return self.relative_buckets

    @property
    def E(self) -> int:
        return self.num_experts

    @property
    def L(self) -> int:
        return self.num_layers

    @property
    def encoder_layers(self) -> int:
        return self.num_encoder_layers or self.num_layers

    @property
    def rotated(self) -> int:
        """Coordinates of a head that RoPE turns."""
        return math.floor(self.H * self.rope_fraction + 1e-9)

    @property
    def decay(self) -> int:
        """Updates of the final decay of the wsd schedule."""
        return self.decay_steps or max(1, self.steps // 5)

    def has(self, term: str) -> bool:
        """Whether an optional term is in the program."""
        return term in self.terms

    def replace(self, **changes: Any) -> "Config":
        """A copy with `changes`, checked anew."""
        return dataclasses.replace(self, **changes)


def _hyper(default: float, help: str, **limits: Any) -> Any:
    return struct.field(default=default, metadata=_meta(help, **limits))


@struct.dataclass
class Hyper:
    """Numbers inside the program; each may be a traced scalar or carry a runs axis R.

    attention scores = q.k * H**(-dk_exponent) / attention_temperature:
    0.5 divides by sqrt(d_k), 0 does not, 1 does so twice.
    """

    learning_rate: Any = _hyper(1e-3, "peak learning rate", low=0.0)
    attention_temperature: Any = _hyper(1.0, "temperature of the attention softmax", above=0.0)
    dk_exponent: Any = _hyper(0.5, "scores are multiplied by d_k to minus this: 0.5 on, 0 off", low=-2.0, high=2.0)
    attention_softcap: Any = _hyper(0.0, "scores become cap tanh(scores / cap); 0: as they are", low=0.0)
    final_softcap: Any = _hyper(0.0, "logits become cap tanh(logits / cap); 0: as they are", low=0.0)
    rope_base: Any = _hyper(10000.0, "base of the RoPE frequencies", above=0.0)
    rope_factor: Any = _hyper(1.0, "how many times longer rope_scaling makes the context", low=1.0)
    rope_slow: Any = _hyper(
        0.0, "turns in the original context below which a pair is scaled; 0: the kind's own", low=0.0
    )
    rope_fast: Any = _hyper(0.0, "turns in the original context above which a pair is kept; 0: the kind's own", low=0.0)
    rope_attention_factor: Any = _hyper(0.0, "what yarn multiplies queries and keys by; 0: 0.1 ln(factor) + 1", low=0.0)
    window: Any = _hyper(16, "keys that the window mask shows, the query's own included", low=1)
    prefix: Any = _hyper(8, "positions that the prefix mask shows to all", low=0)
    dropout_rate: Any = _hyper(0.0, "dropout of embeddings and sub-layer outputs", low=0.0, below=1.0)
    attention_dropout_rate: Any = _hyper(0.0, "dropout of attention weights", low=0.0, below=1.0)
    activation_dropout_rate: Any = _hyper(0.0, "dropout inside the feed-forward layer", low=0.0, below=1.0)
    label_smoothing: Any = _hyper(0.0, "mass moved from the target to all V classes", low=0.0, below=1.0)
    z_loss: Any = _hyper(0.0, "weight of the squared log partition", low=0.0)
    load_balance: Any = _hyper(0.01, "weight of the experts' load-balancing loss", low=0.0)
    router_z_loss: Any = _hyper(0.001, "weight of the router's squared log partition", low=0.0)
    clip_norm: Any = _hyper(0.0, "largest global gradient norm; 0: no clipping", low=0.0)
    ema_decay: Any = _hyper(
        0.0, "decay of an exponential moving average of the parameters; 0: none", low=0.0, below=1.0
    )
    weight_decay: Any = _hyper(0.01, "decoupled decay of adamw", low=0.0)
    b1: Any = _hyper(0.9, "Adam's first decay", low=0.0, below=1.0)
    b2: Any = _hyper(0.999, "Adam's second decay", low=0.0, below=1.0)
    adam_epsilon: Any = _hyper(1e-8, "Adam's epsilon", above=0.0)
    momentum: Any = _hyper(0.9, "decay of the momentum optimiser", low=0.0, below=1.0)


INTEGER_HYPER = ("window", "prefix")
NEUTRAL = 0.0  # the value at which each number in TERMS does nothing


def check_value(kind: str, field: dataclasses.Field, value: Any) -> None:
    """Raise ConfigError unless `value` is of the field's type and inside its range."""
    meta, name = field.metadata, field.name
    if "choices" in meta:
        if value not in meta["choices"]:
            raise unknown(f"{name}", str(value), meta["choices"])
        return
    if "parts" in meta:
        for part in value:
            if part not in meta["parts"]:
                raise unknown(name, str(part), meta["parts"])
        return
    if isinstance(field.default, bool | str):
        if not isinstance(value, type(field.default)):
            raise ConfigError(f"{name}={value!r}: {kind} wants a {type(field.default).__name__}")
        return
    whole = isinstance(field.default, int)
    if isinstance(value, bool) or not isinstance(value, int | float) or (whole and not isinstance(value, int)):
        raise ConfigError(f"{name}={value!r}: not {'a whole number' if whole else 'a number'}")
    bounds = {
        "low": (lambda v, b: v >= b, "at least"),
        "high": (lambda v, b: v <= b, "at most"),
        "above": (lambda v, b: v > b, "above"),
        "below": (lambda v, b: v < b, "below"),
    }
    wanted = " and ".join(f"{word} {meta[b]:.10g}" for b, (_, word) in bounds.items() if b in meta)
    if not math.isfinite(value) or any(b in meta and not ok(value, meta[b]) for b, (ok, _) in bounds.items()):
        raise ConfigError(f"{name}={value:.10g} is out of range: {wanted or 'finite'}")


def check_ranges(settings: Config | Hyper) -> None:
    """Raise ConfigError if a field of a Config, or of a Hyper of plain numbers, is out of range."""
    for field in dataclasses.fields(settings):
        check_value(type(settings).__name__, field, getattr(settings, field.name))


def with_terms(config: Config, hypers: Iterable[Hyper]) -> Config:
    """Config as the plain numbers of `hypers` need it: the terms that any uses, and the band of its windows.

    Raises ConfigError for a window that no row can hold, or that a given band does not.
    """
    hypers = list(hypers)
    used = tuple(
        term
        for term, names in TERMS.items()
        if term in config.terms or any(getattr(h, name) != NEUTRAL for h in hypers for name in names)
    )
    band = config.band
    if config.mask == "window" and hypers:
        widest = int(max(h.window for h in hypers))
        if widest > config.seq_len:
            raise ConfigError(f"window={widest} is wider than a row: seq_len={config.seq_len}")
        if config.attention_implementation == "banded":
            band = band or widest
            if band < widest:
                raise ConfigError(f"band={band} is narrower than window={widest}")
    return config.replace(terms=used, band=band)


def to_dict(settings: Config | Hyper) -> dict[str, Any]:
    """Field name -> plain value, for JSON."""
    return {
        f.name: list(v) if isinstance(v := getattr(settings, f.name), tuple) else v
        for f in dataclasses.fields(settings)
    }


def from_dict(kind: type, values: Mapping[str, Any]) -> Any:
    """A Config or Hyper from plain values; an unknown field is refused with its nearest name."""
    names = {f.name for f in dataclasses.fields(kind)}
    for name in values:
        if name not in names:
            raise unknown(f"{kind.__name__} field", name, names)
    made = kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
    check_ranges(made)
    return made
