"""From queries and keys to weights: scores, and the normalisers that turn them into weights.

    score  = cap tanh(q.k H**(-dk_exponent) / temperature / cap) + bias       (without cap: the argument)
    weight = normaliser over the keys that the mask allows

Vaswani et al. 2017 §3.2.1; the cap as in Gemma 2 (2024): on the scaled score, before any
bias or mask. The exponent 0.5 divides by sqrt(d_k); at temperature d_k**-0.5 that is undone.
"""

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import struct
from jax.typing import ArrayLike

from transformer_jax.config import NORMALISERS
from transformer_jax.errors import ConfigError, unknown
from transformer_jax.numerics import product_f32


@struct.dataclass
class Scoring:
    """Everything that stands between a dot product and a weight. None: not in the program.

    dk_exponent, temperature, softcap: numbers, traced or not. sink_N: a logit a head that
    takes part in the normaliser and has no value.
    """

    dk_exponent: ArrayLike = 0.5
    temperature: ArrayLike = 1.0
    softcap: ArrayLike | None = None
    sink_N: jax.Array | None = None
    normaliser: str = struct.field(pytree_node=False, default="softmax")
    score_dtype: str = struct.field(pytree_node=False, default="float32")


PLAIN = Scoring()


def score_factor(H: int, dk_exponent: ArrayLike, temperature: ArrayLike) -> jax.Array:
    """H**(-dk_exponent) / temperature: a float32 scalar, what every dot product is multiplied by."""
    return jnp.power(jnp.float32(H), -jnp.asarray(dk_exponent, jnp.float32)) / jnp.asarray(temperature, jnp.float32)


def softcap(scores: jax.Array, cap: ArrayLike) -> jax.Array:
    """cap tanh(scores / cap), which stays inside (-cap, cap); cap 0: as they are. cap may be traced."""
    cap = jnp.asarray(cap, scores.dtype)
    safe = jnp.where(cap > 0, cap, 1)
    return jnp.where(cap > 0, safe * jnp.tanh(scores / safe), scores)


def check_heads(q_BTNH: jax.Array, k_BSKH: jax.Array) -> None:
    """Raise ConfigError where N is not a multiple of K or the widths differ."""
    (N, H), (K, width) = q_BTNH.shape[2:], k_BSKH.shape[2:]
    if N % K or H != width:
        raise ConfigError(
            f"queries have {N} heads of {H}, keys {K} of {width}: N must be a multiple of K, widths equal"
        )


def check_values(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array) -> None:
    """Raise ConfigError where queries, keys and values differ in rows, or keys and values in length or heads."""
    rows, (kept, slots, K), values = q_BTNH.shape[0], k_BSKH.shape[:3], v_BSKH.shape[:3]
    if rows != kept or values != (kept, slots, K):
        raise ConfigError(
            f"queries of {rows} rows, keys of {kept} rows, {slots} slots and {K} heads, "
            f"values of {values[0]}, {values[1]} and {values[2]}: they must agree"
        )


def attention_scores(
    q_BTNH: jax.Array, k_BSKH: jax.Array, scoring: Scoring, bias: jax.Array | None = None
) -> jax.Array:
    """Scores [B, N, T, S] in the score type, before any mask.

    bias: [B or 1, N or 1, T, S], added as it stands, infinities included: this is how the
    field's constants (-inf, -1e9, the type's minimum) are run, and their NaN shown.
    """
    check_heads(q_BTNH, k_BSKH)
    H, K = k_BSKH.shape[-1], k_BSKH.shape[-2]
    q = rearrange(q_BTNH, "b t (k g) h -> b t k g h", k=K)
    scores = rearrange(product_f32("btkgh,bskh->bkgts", q, k_BSKH), "b k g t s -> b (k g) t s")
    scores = scores * score_factor(H, scoring.dk_exponent, scoring.temperature)
    if scoring.softcap is not None:
        scores = softcap(scores, scoring.softcap)
    scores = scores.astype(scoring.score_dtype)
    return scores if bias is None else scores + bias.astype(scoring.score_dtype)


# --- normalisers -----------------------------------------------------------------
#
# Each takes scores [..., T, S] and booleans that broadcast to them (None: all), and gives
# weights of the same shape and type. A masked entry has weight 0 and gradient 0 exactly; a
# row that allows nothing is 0 with gradient 0, in every type.


def masked_softmax(scores: jax.Array, allowed: jax.Array | None, sink: jax.Array | None = None) -> jax.Array:
    """exp(s_j) / sum exp(s); with a sink [..., T or 1, 1], exp(sink) is added to the sum.

    Masked entries are set to -inf before the exponential; a row without any allowed entry is
    divided by 1 instead of 0, unless its sink, however low, is all that it has. A sink of -inf is none.
    Infinities that come with the scores themselves are not mended.
    """
    some = None
    if allowed is not None:
        scores = jnp.where(allowed, scores, -jnp.inf)
        some = jnp.any(allowed, axis=-1, keepdims=True)
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    if sink is not None:
        top = jnp.maximum(top, jax.lax.stop_gradient(sink))
    if some is not None:
        top = jnp.where(some | (top > -jnp.inf), top, 0)
    powers = jnp.exp(scores - top)
    total = jnp.sum(powers, axis=-1, keepdims=True)
    if sink is not None:
        total = total + jnp.exp(sink - top)
    if some is not None:
        total = jnp.where(some | (total > 0), total, 1)
    return powers / total


def count_allowed(scores: jax.Array, allowed: jax.Array | None) -> jax.Array:
    """Keys that a row may attend to, [..., T, 1], at least 1, in the scores' type."""
    if allowed is None:
        return jnp.full((1,) * scores.ndim, scores.shape[-1], scores.dtype)
    count = jnp.sum(jnp.broadcast_to(allowed, (*allowed.shape[:-1], scores.shape[-1])), axis=-1, keepdims=True)
    return jnp.maximum(count, 1).astype(scores.dtype)


def masked_sigmoid(scores: jax.Array, allowed: jax.Array | None) -> jax.Array:
    """sigmoid(s_j - ln n), n the keys that the row may attend to: no key knows of another.

    Ramapuram et al. 2024 subtract the log of the row's length, so that a row of zeros sums to
    about 1; counting only the allowed keys keeps padding without effect.
    """
    count = count_allowed(scores, allowed)
    if allowed is None:
        return jax.nn.sigmoid(scores - jnp.log(count))
    # Masked before and after: the derivative at a NaN would be NaN, whatever multiplies it.
    return jnp.where(allowed, jax.nn.sigmoid(jnp.where(allowed, scores, 0) - jnp.log(count)), 0)


def masked_relu(scores: jax.Array, allowed: jax.Array | None) -> jax.Array:
    """max(s_j, 0) / sum max(s, 0): the linear normaliser, kept from negative weights.

    A row without a positive score is 0 (with gradient 0): the plain s_j / sum s has no answer there.
    """
    positive = jax.nn.relu(scores)
    positive = positive if allowed is None else jnp.where(allowed, positive, 0)
    total = jnp.sum(positive, axis=-1, keepdims=True)
    return positive / jnp.where(total > 0, total, 1)


def entmax15(scores: jax.Array) -> jax.Array:
    """argmax_p p.s + H_1.5(p) over the last axis: max(s/2 - tau, 0)^2, sparse (Peters et al. 2019).

    Exact, by sorting: tau is the one of the k for which the k largest scores form the support.
    Scores more than 2 below the largest have no weight, so that -inf may be given for them.
    Differentiable to any order wherever the support does not change.
    """
    z = scores.astype(jnp.float32) / 2
    z = z - jax.lax.stop_gradient(jnp.max(z, axis=-1, keepdims=True))
    inside = z > jax.lax.stop_gradient(_threshold(z))
    # tau again, from the support alone: sum (z - tau)^2 = 1 over it. The root is the mean of z - tau, at
    # least 1/k, so that its derivatives exist; those through the sort's candidates need not. (A custom
    # rule is no help: jax 0.10 drops it at the second derivative of a scan; 0.12 keeps it.)
    k = jnp.sum(inside, axis=-1, keepdims=True, dtype=jnp.float32)
    mean = jnp.sum(jnp.where(inside, z, 0), axis=-1, keepdims=True) / k
    apart = jnp.where(inside, z - mean, 0)
    spread = jnp.sum(jnp.square(apart), axis=-1, keepdims=True)
    return jnp.square(jnp.where(inside, apart + jnp.sqrt((1 - spread) / k), 0)).astype(scores.dtype)


def _threshold(z: jax.Array) -> jax.Array:
    """tau, for which max(z - tau, 0)^2 sum to 1, of float32 rows whose largest entry is 0: [..., 1]."""
    # Clipping changes nothing: what is more than 1 below the top is outside.
    ordered = -jnp.sort(-jnp.maximum(z, -2.0), axis=-1)
    k = jnp.arange(1, z.shape[-1] + 1, dtype=jnp.float32).reshape((1,) * (z.ndim - 1) + (-1,))
    mean = jnp.cumsum(ordered, axis=-1) / k
    spread = jnp.cumsum(jnp.square(ordered), axis=-1) - k * jnp.square(mean)
    tau = mean - jnp.sqrt(jnp.maximum((1 - spread) / k, 0))
    support = jnp.sum(tau <= ordered, axis=-1, keepdims=True)
    return jnp.take_along_axis(tau, support - 1, axis=-1)


def masked_entmax15(scores: jax.Array, allowed: jax.Array | None) -> jax.Array:
    """`entmax15` over the allowed entries."""
    if allowed is None:
        return entmax15(scores)
    some = jnp.any(allowed, axis=-1, keepdims=True)
    # A row that allows nothing is normalised over harmless zeros, and then dropped.
    weights = entmax15(jnp.where(allowed, scores, jnp.where(some, -jnp.inf, 0).astype(scores.dtype)))
    return jnp.where(allowed, weights, 0)


def check_normaliser(scoring: Scoring) -> None:
    """Raise ConfigError for an unknown normaliser."""
    if scoring.normaliser not in NORMALISERS:
        raise unknown("normaliser", scoring.normaliser, NORMALISERS)


def check_sink(scoring: Scoring, N: int) -> None:
    """Raise ConfigError for a sink in a normaliser that has none, or for another number of heads than N."""
    if scoring.sink_N is None:
        return
    if scoring.normaliser != "softmax":
        raise ConfigError(f"a sink with normaliser {scoring.normaliser}: only softmax has one")
    if scoring.sink_N.shape != (N,):
        raise ConfigError(f"a sink of shape {scoring.sink_N.shape} in an attention of {N} heads: one logit a head")


def weights_of(scores: jax.Array, allowed: jax.Array | None, scoring: Scoring) -> jax.Array:
    """Weights [B, N, T, S] by the normaliser that scoring names."""
    if scoring.sink_N is not None:
        return masked_softmax(scores, allowed, scoring.sink_N.astype(scores.dtype)[None, :, None, None])
    made = {"softmax": masked_softmax, "sigmoid": masked_sigmoid, "relu": masked_relu, "entmax15": masked_entmax15}
    return made[scoring.normaliser](scores, allowed)
