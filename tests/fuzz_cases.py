"""What the fuzz draws: a Case, legal by the table of capabilities or just not, and how it is written as a call."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from hypothesis import strategies as st

from transformer_jax import config as kinds
from transformer_jax.attention import CAPABILITIES
from transformer_jax.config import Config

VOCAB = 5
# Functions with a corner: where two ways round differently, one may take another side of it, and its
# derivative jumps. In float32 that is one draw in ten thousand; in the half types it is most of them.
CORNERS = ("relu", "reglu", "entmax15")


@dataclasses.dataclass(frozen=True)
class Case:
    """Fields of Config by their names, what the batch has, and the seed of all traced values.

    The defaults are the simplest of each, where shrinking ends.
    """

    architecture: str = "decoder"
    num_layers: int = 1
    num_encoder_layers: int = 0
    num_heads: int = 1
    num_kv_heads: int = 1
    head_dim: int = 2
    ffn: str = "gelu"
    match_ffn_parameters: bool = False
    num_experts: int = 0
    experts_per_token: int = 1
    expert_capacity: float = 0.0
    norm: str = "rmsnorm"
    norm_placement: str = "none"
    positions: str = "none"
    rope_layout: str = "half"
    rope_fraction: float = 1.0
    rope_scaling: str = "none"
    relative_buckets: int = 4
    relative_distance: int = 3
    tie_embeddings: bool = True
    scale_embeddings: bool = False
    scale_logits: bool = False
    output_bias: bool = False
    attention_bias: bool = False
    ffn_bias: bool = False
    qk_norm: bool = False
    attention_sink: bool = False
    normaliser: str = "softmax"
    attention_implementation: str = "dense"
    attention_block: int = 0
    band: int = 0
    mask: str = "none"
    block_size: int = 1
    compute_dtype: str = "float32"
    score_dtype: str = "float32"
    scan_unroll: int = 1
    remat: bool = False
    loss_chunks: int = 1
    terms: tuple[str, ...] = ()
    source_vocab_size: int = 0
    # The batch: rows, tokens of a row, of a source; what it carries; draws by vmap or by lax.map.
    rows: int = 1
    length: int = 1
    source: int = 1
    lengths: bool = False
    segments: bool = False
    places: bool = False
    mapped: bool = False
    # Derivatives that are compared: none, the gradient, the gradient and a Hessian-vector product.
    order: int = 0
    traced: int = 0

    @functools.cached_property
    def config(self) -> Config:
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name in _CONFIG}
        return Config(
            **own, vocab_size=VOCAB, d_model=6, d_ff=5, max_positions=16, rope_original_positions=4,
            seq_len=self.length, matmul_precision="highest",
        )  # fmt: skip

    @property
    def half(self) -> bool:
        return self.epsilon > 1e-6

    @property
    def epsilon(self) -> float:
        """The coarsest rounding in the case."""
        return max(float(jnp.finfo(t).eps) for t in (self.compute_dtype, self.score_dtype))

    def __repr__(self) -> str:
        """A call that makes this case: the fields that are not at their defaults."""
        told = [f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        return f"Case({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in told)})"

    @property
    def call(self) -> str:
        """Lines to paste into Python."""
        return f"from tests.fuzz import Case, check; check({self!r})"


_CONFIG = {f.name for f in dataclasses.fields(Config)}


# --- what is drawn ----------------------------------------------------------------


def _first(simplest: Any, choices: tuple) -> st.SearchStrategy:
    """One of the choices; shrinking goes to the simplest."""
    return st.sampled_from((simplest, *(c for c in choices if c != simplest)))


@st.composite
def cases(draw: Callable, implementation: str | None = None) -> Case:
    """Legal cases, by what CAPABILITIES says of the implementation that is drawn first."""
    # First, as the second example of a search always parts from the first, simplest one at its first draw.
    seed = draw(st.integers(0, 2**16))
    name = implementation or draw(_first("dense", kinds.IMPLEMENTATIONS))
    can = CAPABILITIES[name]
    flag = st.booleans()

    def able(feature: str, strategy: st.SearchStrategy, otherwise: Any) -> Any:
        return draw(strategy) if feature in can else otherwise

    # An encoder has no window for banded attention.
    architecture = draw(_first("decoder", kinds.ARCHITECTURES if name != "banded" else ("encoder_decoder",)))
    shown = {"causal": "Causal", "inverted": "Inverted", "window": "Window", "prefix": "PrefixLM",
             "block_sparse": "BlockSparse", "none": "Causal"}  # fmt: skip
    seen = [m for m in kinds.MASKS if f"a {shown[m]} mask" in can]
    mask = "none" if architecture == "encoder" else draw(_first("none", tuple(seen)))
    mask = "window" if name == "banded" else mask
    rows, length = draw(st.integers(1, 3)), draw(st.integers(1, 7))
    types = st.sampled_from(("float32", "float32", "float32", *kinds.FLOATS))
    compute, score = draw(types), able("half-precision scores", types, "float32")
    half = compute != "float32" or score != "float32"

    placed = tuple(p for p in kinds.POSITIONS if p not in ("alibi", "t5") or "a bias" in can)
    positions = draw(_first("none", placed))
    rope = positions == "rope"
    buckets = draw(st.sampled_from((4, 8))) if positions == "t5" else 4
    normaliser = draw(_first("softmax", tuple(n for n in kinds.NORMALISERS if f"normaliser {n}" in can)))
    both = architecture == "encoder_decoder"
    experts = draw(st.integers(0, 3))
    segments = able("a Segments mask", flag, False)
    # In the half types a token near two experts' border goes to either: all are asked, and none is full.
    chosen = draw(st.integers(1, experts)) if experts and not half else max(experts, 1)
    needs = {"attention_softcap": "a soft-cap", "attention_dropout": "dropout"}
    terms = [t for t in kinds.TERMS if t != "clip" and (t not in needs or needs[t] in can)]
    width = draw(st.sampled_from((2, 4) if rope else (2, 3, 4)))
    heads, ffn = draw(st.integers(1, 4)), draw(_first("gelu", kinds.FFN_KINDS))
    # What the derivative jumps at, no two roundings agree on.
    cornered = half and (ffn in CORNERS or normaliser in CORNERS)
    slots = (0.0,) if segments else (0.0, 1.0) if half else (0.0, 1.0, 0.5)
    return Case(
        architecture=architecture,
        # Costs: twice the layers are twice the program, and there are two stacks.
        num_layers=1 if both else draw(st.integers(1, 2)),
        num_encoder_layers=draw(st.sampled_from((0, 0, 2))) if both else 0,
        num_heads=heads,
        num_kv_heads=draw(st.sampled_from([k for k in range(1, heads + 1) if heads % k == 0])),
        head_dim=width,
        ffn=ffn,
        match_ffn_parameters=draw(flag),
        num_experts=experts,
        experts_per_token=chosen,
        expert_capacity=draw(st.sampled_from(slots)) if experts else 0.0,
        norm=draw(_first("rmsnorm", kinds.NORMS)),
        norm_placement=draw(_first("none", kinds.PLACEMENTS)),
        positions=positions,
        rope_layout=draw(_first("half", kinds.ROPE_LAYOUTS)) if rope else "half",
        rope_fraction=draw(st.sampled_from((1.0, 0.0, 0.5)[: width - 1])) if rope else 1.0,
        rope_scaling=draw(_first("none", kinds.ROPE_SCALINGS)) if rope else "none",
        relative_buckets=buckets,
        relative_distance=draw(st.integers(buckets // 2 + 1, buckets // 2 + 3)) if positions == "t5" else 3,
        tie_embeddings=not draw(flag),
        scale_embeddings=draw(flag),
        scale_logits=draw(flag),
        output_bias=draw(flag),
        attention_bias=draw(flag),
        ffn_bias=draw(flag),
        qk_norm=draw(flag),
        attention_sink=normaliser == "softmax" and able("a sink", flag, False),
        normaliser=normaliser,
        attention_implementation=name,
        attention_block=0 if name == "dense" else draw(st.integers(0, 3)),
        band=draw(st.integers(1, length)) if name == "banded" else 0,
        mask=mask,
        block_size=draw(st.integers(1, 3)) if mask == "block_sparse" else 1,
        compute_dtype=compute,
        score_dtype=score,
        scan_unroll=draw(st.sampled_from((1, 0))),
        remat=draw(flag),
        loss_chunks=draw(st.integers(1, 3)),
        terms=tuple(sorted(draw(st.sets(st.sampled_from(terms), max_size=3)))),
        rows=rows,
        length=length,
        source_vocab_size=draw(st.sampled_from((0, VOCAB))) if both else 0,
        source=draw(st.integers(1, 7)) if both else 1,
        lengths=draw(flag),
        segments=segments,
        places=able("positions", flag, False),
        mapped=draw(flag),
        order=0 if cornered else 2,
        traced=seed,
    )


# --- what is refused --------------------------------------------------------------

SETTINGS = {
    "a bias": {"positions": "alibi", "rope_scaling": "none"},
    "a soft-cap": {"terms": ("attention_softcap",)},
    "a sink": {"attention_sink": True},
    "dropout": {"terms": ("attention_dropout",)},
    "half-precision scores": {"score_dtype": "bfloat16"},
    "positions": {"places": True},
    "a Inverted mask": {"mask": "inverted"},
    "a Window mask": {"mask": "window"},
    "a PrefixLM mask": {"mask": "prefix"},
    "a BlockSparse mask": {"mask": "block_sparse"},
    "a Segments mask": {"segments": True},
    **{f"normaliser {name}": {"normaliser": name} for name in kinds.NORMALISERS if name != "softmax"},
}


@st.composite
def refused(draw: Callable) -> tuple[Case, str]:
    """A case that is legal but for one feature, and that feature: a cell of the table that is empty."""
    name = draw(st.sampled_from(sorted(n for n, can in CAPABILITIES.items() if set(SETTINGS) - can)))
    feature = draw(st.sampled_from([f for f in SETTINGS if f not in CAPABILITIES[name]]))
    case = draw(cases(name))
    decoder = {"architecture": "decoder"} if case.architecture == "encoder" else {}
    return dataclasses.replace(case, **decoder, **SETTINGS[feature]), feature
