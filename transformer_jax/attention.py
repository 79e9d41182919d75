"""Scaled dot-product attention: one function for self, cross, multi-, grouped- and multi-query.

    scores  = q.k * H**(-dk_exponent) / temperature + bias
    weights = softmax over the keys that the mask allows
    out     = weights . v

Vaswani et al. 2017 §3.2; articles S0 §3, S1 §2.2, S2 §4. `attend` is computed in one of four
ways: dense, blockwise and banded are the same function at different costs; linear is another
function. What each can do is a table, CAPABILITIES; what it cannot is refused by name.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import ArrayLike

from transformer_jax import keys, masks, relative, rope
from transformer_jax.banded import banded
from transformer_jax.blockwise import Dropout, blockwise
from transformer_jax.config import Config, Hyper
from transformer_jax.dense import dense_block
from transformer_jax.errors import ConfigError, unknown
from transformer_jax.linear_attention import linear_attention
from transformer_jax.masks import Mask
from transformer_jax.norms import rms
from transformer_jax.numerics import product
from transformer_jax.relative import Bias
from transformer_jax.scores import (
    PLAIN,
    Scoring,
    attention_scores,
    check_heads,
    check_normaliser,
    check_sink,
    check_values,
)

_MASKS = frozenset(
    f"a {part.__name__} mask"
    for part in (
        masks.Causal, masks.Inverted, masks.Window, masks.PrefixLM, masks.Padding, masks.Segments,
        masks.BlockSparse, masks.Dense,
    )
)  # fmt: skip
_SCORES = frozenset({"a bias", "a soft-cap", "a sink", "dropout", "normaliser sigmoid", "normaliser relu"})

# Implementation -> what it does beyond plain softmax over everything. "other lengths": T and S differ.
CAPABILITIES: dict[str, frozenset[str]] = {
    "dense": _MASKS
    | _SCORES
    | {"normaliser entmax15", "half-precision scores", "weights", "positions", "other lengths"},
    "blockwise": _MASKS | _SCORES | {"positions", "other lengths"},
    "banded": _MASKS | _SCORES | {"normaliser entmax15", "half-precision scores"},
    "linear": frozenset({"a Causal mask", "a Padding mask", "other lengths"}),
}


def asked(
    mask: Mask, scoring: Scoring, bias: Bias | None, dropout: Dropout | None, weights: bool, T: int, S: int
) -> dict[str, str]:
    """What a call uses, in the words of CAPABILITIES -> the values at hand, for the message."""
    uses = {
        "a bias": bias is not None,
        "a soft-cap": scoring.softcap is not None,
        "a sink": scoring.sink_N is not None,
        "dropout": dropout is not None,
        "half-precision scores": scoring.score_dtype != "float32",
        "weights": weights,
        "positions": mask.q_positions_BT is not None or mask.k_positions_BS is not None,
        "other lengths": T != S,
        f"normaliser {scoring.normaliser}": scoring.normaliser != "softmax",
    }
    details = {"half-precision scores": f" ({scoring.score_dtype})", "other lengths": f" (T={T}, S={S})"}
    used = [f"a {type(part).__name__} mask" for part in mask.parts] + [name for name, used in uses.items() if used]
    return {name: details.get(name, "") for name in used}


def check_capabilities(implementation: str, asked: dict[str, str]) -> None:
    """Raise ConfigError if `implementation` is unknown, or naming who can do what it cannot.

    asked: feature -> the values at hand, for the message.
    """
    if implementation not in CAPABILITIES:
        raise unknown("attention_implementation", implementation, CAPABILITIES)
    for feature, detail in asked.items():
        if feature not in CAPABILITIES[implementation]:
            able = ", ".join(name for name, can in CAPABILITIES.items() if feature in can)
            raise ConfigError(f"{implementation} attention cannot do {feature}{detail}: {able or 'none'} can")


def attend(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    mask: Mask | None = None,
    *,
    scoring: Scoring = PLAIN,
    bias: Bias | jax.Array | np.ndarray | None = None,
    dropout_rate: ArrayLike | None = None,
    key: jax.Array | None = None,
    weights: bool = False,
    implementation: str = "dense",
    block: int = 0,
    band: int = 0,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention: [B, T, N, H] from queries, keys and values; with `weights`, also [B, N, T, S].

    K divides N: K = N is multi-head, K = 1 multi-query, between them grouped-query
    (query head n reads key/value head n // (N/K)). The widths of v and q may differ.
    mask: True may attend; a row that may attend to nothing gives output 0 and gradient 0.
    scoring: exponent, temperature, soft-cap, sink and normaliser (scores.Scoring).
    bias: relative.Bias, or an array [B or 1, N or 1, T, S], added as it stands.
    dropout_rate: traced or not; key None: no dropout. The same entries are dropped in every
    implementation. Weights are returned before dropout; asking leaves the output as it is.
    implementation: see CAPABILITIES; block and band are those of blockwise, banded and linear
    attention, 0 for their own choice.
    A key that no query may see is set to 0 with its value, so that NaN in padding stays there; only keys that
    a position of their own (Mask.at) puts past all queries are multiplied by their weight of 0.
    Raises ConfigError for shapes at odds, and for what the implementation cannot do.
    """
    (B, T, N), S = q_BTNH.shape[:3], k_BSKH.shape[1]
    check_heads(q_BTNH, k_BSKH)
    check_values(q_BTNH, k_BSKH, v_BSKH)
    if not isinstance(mask, Mask | None):
        raise ConfigError(f"a mask of type {type(mask).__name__}: wrap an array with masks.dense()")
    mask = masks.full() if mask is None else mask
    bias = bias if isinstance(bias, Bias | None) else relative.dense(bias)
    dropout = None if dropout_rate is None or key is None else Dropout(key, dropout_rate)
    check_normaliser(scoring)
    check_capabilities(implementation, asked(mask, scoring, bias, dropout, weights, T, S))
    check_sink(scoring, N)
    for part in (mask, bias):
        if part is not None:
            part.check(T, S, B, N)
    if implementation == "linear":
        return linear_attention(q_BTNH, k_BSKH, v_BSKH, mask, scoring, block=block)
    rest: Any = {"bias": bias, "dropout": dropout, "block": block}
    if implementation == "blockwise":
        return blockwise(q_BTNH, k_BSKH, v_BSKH, mask, scoring, **rest)
    if implementation == "banded":
        return banded(q_BTNH, k_BSKH, v_BSKH, mask, scoring, band=band, **rest)
    out, weights_BNTS = dense_block(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        None if mask.is_full else mask.dense(T, S),
        scoring,
        bias=None if bias is None else bias.dense(T, S),
        drop=None if dropout is None else partial(dropout, q_slots_T=jnp.arange(T), k_slots_S=jnp.arange(S), T=T),
        hides_keys=mask.hides(T, S),
    )
    return (out, weights_BNTS) if weights else out


@struct.dataclass
class Attention:
    """Projections: wq_DNH, wk_DKH, wv_DKH, wo_NHD; biases, norm scales and sinks where the config has them."""

    wq_DNH: jax.Array
    wk_DKH: jax.Array
    wv_DKH: jax.Array
    wo_NHD: jax.Array
    bq_NH: jax.Array | None
    bk_KH: jax.Array | None
    bv_KH: jax.Array | None
    bo_D: jax.Array | None
    q_scale_H: jax.Array | None = None
    k_scale_H: jax.Array | None = None
    sink_N: jax.Array | None = None


@struct.dataclass
class KeysValues:
    """Projected keys and values, normed and rotated: what attention reads, and what a cache keeps of it."""

    k_BSKH: jax.Array
    v_BSKH: jax.Array

    def written(self, new: "KeysValues", slots_BT: jax.Array) -> "KeysValues":
        """With `new` [..., B, T, K, H] at these slots of each row; a slot past the end takes nothing."""
        where = (..., jnp.arange(slots_BT.shape[0])[:, None], slots_BT, slice(None), slice(None))
        return jax.tree.map(lambda old, x: old.at[where].set(x.astype(old.dtype), mode="drop"), self, new)


@struct.dataclass
class Probe:
    """Zeros added to the projected q, k, v: gradients with respect to them are dL/dq, dL/dk, dL/dv."""

    q_BTNH: jax.Array
    k_BSKH: jax.Array
    v_BSKH: jax.Array


@struct.dataclass
class Trace:
    """What one attention did: weights, scores before cap, bias and mask [B, N, T, S], and where it might look."""

    weights_BNTS: jax.Array
    scores_BNTS: jax.Array
    allowed_BNTS: jax.Array


def init_attention(key: jax.Array, config: Config) -> Attention:
    """Weights N(0, 1/fan-in), biases 0: with unit inputs q and k have unit coordinates (article S0 §3.2)."""
    D, N, K, H = config.D, config.N, config.K, config.H
    bias = config.attention_bias
    return Attention(
        wq_DNH=keys.normal(key, "wq_DNH", (D, N, H), D**-0.5),
        wk_DKH=keys.normal(key, "wk_DKH", (D, K, H), D**-0.5),
        wv_DKH=keys.normal(key, "wv_DKH", (D, K, H), D**-0.5),
        wo_NHD=keys.normal(key, "wo_NHD", (N, H, D), (N * H) ** -0.5),
        bq_NH=jnp.zeros((N, H)) if bias else None,
        bk_KH=jnp.zeros((K, H)) if bias else None,
        bv_KH=jnp.zeros((K, H)) if bias else None,
        bo_D=jnp.zeros(D) if bias else None,
        q_scale_H=jnp.ones(H) if config.qk_norm else None,
        k_scale_H=jnp.ones(H) if config.qk_norm else None,
        # At 0 a sink weighs as much as a key of score 0.
        sink_N=jnp.zeros(N) if config.attention_sink else None,
    )


def keys_values(
    params: Attention,
    source_BSD: jax.Array,
    config: Config,
    *,
    turn: rope.Rotation | None = None,
    probe: Probe | None = None,
) -> KeysValues:
    """Keys and values of a source, [B, S, K, H] each; qk_norm stands before the rotation by `turn`."""
    k = _project("bsd,dkh->bskh", source_BSD, params.wk_DKH, params.bk_KH)
    v = _project("bsd,dkh->bskh", source_BSD, params.wv_DKH, params.bv_KH)
    if probe is not None:
        k, v = k + probe.k_BSKH.astype(k.dtype), v + probe.v_BSKH.astype(v.dtype)
    return KeysValues(_placed(k, params.k_scale_H, config, turn), v)


def _placed(x: jax.Array, scale_H: jax.Array | None, config: Config, turn: rope.Rotation | None) -> jax.Array:
    """Queries or keys with their norm and rotation, where they have them."""
    x = x if scale_H is None else rms(x, scale_H, config.norm_epsilon)
    return x if turn is None else rope.rotate(x, turn, config.rope_layout)


def attention(
    params: Attention,
    x_BTD: jax.Array,
    source: jax.Array | KeysValues,
    mask: Mask,
    config: Config,
    hyper: Hyper,
    *,
    turn: rope.Rotation | None = None,
    bias: Bias | None = None,
    implementation: str | None = None,
    key: jax.Array | None = None,
    probe: Probe | None = None,
    trace: bool = False,
    attend: Callable[..., Any] = attend,
) -> tuple[jax.Array, Trace | None]:
    """Multi-head attention of x over source [B, S, D] (x itself for self-attention): [B, T, D].

    source: or its keys and values, projected already. turn: rotary angles, bias: of positions; both
    for self-attention only. key: for dropout of the weights. implementation: None takes the config's.
    attend: what computes it, `attend` or a mesh's own (see layers.Constrain).
    """
    q = _project("btd,dnh->btnh", x_BTD, params.wq_DNH, params.bq_NH)
    q = q if probe is None else q + probe.q_BTNH.astype(q.dtype)
    q = _placed(q, params.q_scale_H, config, turn)
    if not isinstance(source, KeysValues):
        source = keys_values(params, source, config, turn=turn, probe=probe)
    k, v = source.k_BSKH, source.v_BSKH
    scoring = Scoring(
        dk_exponent=hyper.dk_exponent,
        temperature=hyper.attention_temperature,
        softcap=hyper.attention_softcap if config.has("attention_softcap") else None,
        sink_N=params.sink_N,
        normaliser=config.normaliser,
        score_dtype=config.score_dtype,
    )
    rate = hyper.attention_dropout_rate if config.has("attention_dropout") else None
    out: Any = attend(
        q,
        k,
        v,
        mask,
        scoring=scoring,
        bias=bias,
        dropout_rate=rate,
        key=key,
        weights=trace,
        implementation=implementation or config.attention_implementation,
        block=config.attention_block,
        band=config.band,
    )
    seen = None
    if trace:
        out, weights = out
        T, S = q.shape[1], k.shape[1]
        scores = attention_scores(q, k, dataclasses.replace(scoring, softcap=None))
        seen = Trace(weights, scores, jnp.broadcast_to(mask.dense(T, S), scores.shape))
    out = product("btnh,nhd->btd", out, params.wo_NHD)
    if params.bo_D is not None:
        out = out + params.bo_D.astype(out.dtype)[None, None, :]
    return out, seen


def _project(spec: str, x: jax.Array, w: jax.Array, b: jax.Array | None) -> jax.Array:
    x = product(spec, x, w)
    return x if b is None else x + b.astype(x.dtype)[None, None]
