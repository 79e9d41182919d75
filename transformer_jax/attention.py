"""Scaled dot-product attention: one function for self, cross, multi-, grouped- and multi-query.

    scores  = q.k * H**(-dk_exponent) / temperature + bias
    weights = softmax over the keys that the mask allows
    out     = weights . v

Vaswani et al. 2017 §3.2; articles S0 §3, S1 §2.2, S2 §4. The exponent 0.5 divides by
sqrt(d_k); at temperature d_k**-0.5 that is undone, and the scores are those of exponent 0.
"""

from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import struct
from jax.typing import ArrayLike

from transformer_jax import keys, rope
from transformer_jax.config import Config, Hyper
from transformer_jax.errors import ConfigError
from transformer_jax.masks import Mask
from transformer_jax.numerics import product, product_f32


def score_factor(H: int, dk_exponent: ArrayLike, temperature: ArrayLike) -> jax.Array:
    """H**(-dk_exponent) / temperature: a float32 scalar, what every dot product is multiplied by."""
    return jnp.power(jnp.float32(H), -jnp.asarray(dk_exponent, jnp.float32)) / jnp.asarray(temperature, jnp.float32)


def attention_scores(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    *,
    dk_exponent: ArrayLike = 0.5,
    temperature: ArrayLike = 1.0,
    bias: jax.Array | None = None,
    score_dtype: str = "float32",
) -> jax.Array:
    """Scores [B, N, T, S] in `score_dtype`, before any mask.

    bias: [B or 1, N or 1, T, S], added as it stands, infinities included: this is how the
    field's constants (-inf, -1e9, the type's minimum) are run, and their NaN shown.
    Raises ConfigError where N is not a multiple of K or the widths differ.
    """
    (_, T, N, H), (_, S, K, width) = q_BTNH.shape, k_BSKH.shape
    if N % K or H != width:
        raise ConfigError(
            f"queries have {N} heads of {H}, keys {K} of {width}: N must be a multiple of K, widths equal"
        )
    q = rearrange(q_BTNH, "b t (k g) h -> b t k g h", k=K)
    scores = rearrange(product_f32("btkgh,bskh->bkgts", q, k_BSKH), "b k g t s -> b (k g) t s")
    scores = (scores * score_factor(H, dk_exponent, temperature)).astype(score_dtype)
    if bias is not None:
        if bias.ndim != 4 or bias.shape[2:] != (T, S):
            raise ConfigError(f"bias has shape {bias.shape}: [B or 1, N or 1, {T}, {S}] is wanted")
        scores = scores + bias.astype(score_dtype)
    return scores


def masked_softmax(scores: jax.Array, allowed: jax.Array | None) -> jax.Array:
    """Softmax over the last axis, over the allowed entries only; a row that allows nothing gives 0.

    scores [..., T, S]; allowed: booleans that broadcast to it, or None. Masked entries are
    set to -inf before the exponential, so that their weight and their gradient are exactly
    0; a row without any allowed entry is divided by 1 instead of 0, so that it is 0 with
    gradient 0 in every type. Infinities that come with the scores themselves are not mended.
    """
    if allowed is not None:
        scores = jnp.where(allowed, scores, -jnp.inf)
        some = jnp.any(allowed, axis=-1, keepdims=True)
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    if allowed is not None:
        top = jnp.where(some, top, 0)
    powers = jnp.exp(scores - top)
    total = jnp.sum(powers, axis=-1, keepdims=True)
    if allowed is not None:
        total = jnp.where(some, total, 1)
    return powers / total


def attend(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    mask: Mask | None = None,
    *,
    bias: jax.Array | None = None,
    dk_exponent: ArrayLike = 0.5,
    temperature: ArrayLike = 1.0,
    dropout_rate: ArrayLike | None = None,
    key: jax.Array | None = None,
    score_dtype: str = "float32",
    weights: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention: [B, T, N, H] from queries, keys and values; with `weights`, also [B, N, T, S].

    K divides N: K = N is multi-head, K = 1 multi-query, between them grouped-query
    (query head n reads key/value head n // (N/K)). The widths of v and q may differ.
    mask: True may attend; a row that may attend to nothing gives output 0 and gradient 0.
    dk_exponent, temperature, dropout_rate: numbers, traced or not. key None: no dropout.
    Weights are returned before dropout; asking for them leaves the output as it is.
    A key that no query may see is set to 0 with its value, so that NaN in padding stays there.
    """
    T, (S, K) = q_BTNH.shape[1], k_BSKH.shape[1:3]
    allowed = None
    if not isinstance(mask, Mask | None):
        raise ConfigError(f"a mask of type {type(mask).__name__}: wrap an array with masks.dense()")
    if mask is not None and not mask.is_full:
        allowed = mask.dense(T, S)
        if mask.hides_keys:
            # Per batch row: a key is kept if any head's query may see it.
            seen = jnp.any(allowed, axis=(1, 2))[:, :, None, None]
            k_BSKH, v_BSKH = jnp.where(seen, k_BSKH, 0), jnp.where(seen, v_BSKH, 0)
    scores = attention_scores(
        q_BTNH, k_BSKH, dk_exponent=dk_exponent, temperature=temperature, bias=bias, score_dtype=score_dtype
    )
    weights_BNTS = masked_softmax(scores, allowed)
    used = weights_BNTS if dropout_rate is None else keys.dropout(weights_BNTS, dropout_rate, key, "attention")
    used = rearrange(used.astype(v_BSKH.dtype), "b (k g) t s -> b k g t s", k=K)
    out = rearrange(product("bkgts,bskh->btkgh", used, v_BSKH), "b t k g h -> b t (k g) h")
    return (out, weights_BNTS) if weights else out


@struct.dataclass
class Attention:
    """Projections: wq_DNH, wk_DKH, wv_DKH, wo_NHD; biases where the config has them."""

    wq_DNH: jax.Array
    wk_DKH: jax.Array
    wv_DKH: jax.Array
    wo_NHD: jax.Array
    bq_NH: jax.Array | None
    bk_KH: jax.Array | None
    bv_KH: jax.Array | None
    bo_D: jax.Array | None


@struct.dataclass
class Probe:
    """Zeros added to the projected q, k, v: gradients with respect to them are dL/dq, dL/dk, dL/dv."""

    q_BTNH: jax.Array
    k_BSKH: jax.Array
    v_BSKH: jax.Array


@struct.dataclass
class Trace:
    """What one attention did: weights and unmasked scores [B, N, T, S], and where it might look."""

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
    )


def attention(
    params: Attention,
    x_BTD: jax.Array,
    source_BSD: jax.Array,
    mask: Mask,
    config: Config,
    hyper: Hyper,
    *,
    turn: rope.Rotation | None = None,
    key: jax.Array | None = None,
    probe: Probe | None = None,
    trace: bool = False,
) -> tuple[jax.Array, Trace | None]:
    """Multi-head attention of x over source (x itself for self-attention): [B, T, D].

    turn: rotary angles, for self-attention only. key: for dropout of the weights.
    """
    q = _project("btd,dnh->btnh", x_BTD, params.wq_DNH, params.bq_NH)
    k = _project("bsd,dkh->bskh", source_BSD, params.wk_DKH, params.bk_KH)
    v = _project("bsd,dkh->bskh", source_BSD, params.wv_DKH, params.bv_KH)
    if probe is not None:
        q, k, v = q + probe.q_BTNH.astype(q.dtype), k + probe.k_BSKH.astype(k.dtype), v + probe.v_BSKH.astype(v.dtype)
    if turn is not None:
        q, k = rope.rotate(q, turn, config.rope_layout), rope.rotate(k, turn, config.rope_layout)
    numbers = {
        "dk_exponent": hyper.dk_exponent,
        "temperature": hyper.attention_temperature,
        "score_dtype": config.score_dtype,
    }
    rate = hyper.attention_dropout_rate if config.has("attention_dropout") else None
    out: Any = attend(q, k, v, mask, dropout_rate=rate, key=key, weights=trace, **numbers)
    seen = None
    if trace:
        out, weights = out
        scores = attention_scores(q, k, **numbers)
        seen = Trace(weights, scores, jnp.broadcast_to(mask.dense(q.shape[1], k.shape[1]), scores.shape))
    out = product("btnh,nhd->btd", out, params.wo_NHD)
    if params.bo_D is not None:
        out = out + params.bo_D.astype(out.dtype)[None, None, :]
    return out, seen


def _project(spec: str, x: jax.Array, w: jax.Array, b: jax.Array | None) -> jax.Array:
    x = product(spec, x, w)
    return x if b is None else x + b.astype(x.dtype)[None, None]
