"""Losses as sums over tokens with their counts; only the outermost caller divides.

A mean of means is not the mean: sums and counts add over micro-batches, devices and
evaluation batches, so that any split gives the number of one big batch.

    nats = -log softmax(logits)[target]                 articles S0 §5.2, S1 §3.2
    smoothed over all V classes: (1 - a) nats + a mean_v(-log p_v)   Szegedy et al. 2016
    z-loss: c log(Z)^2                                   (as in PaLM, Chowdhery et al. 2022)
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import ArrayLike

from transformer_jax.errors import unknown
from transformer_jax.moe import MoELosses


@struct.dataclass
class Sums:
    """Sums over counted tokens, float32 scalars. `objective` is what is differentiated.

    nats: plain cross-entropy. z: the z-loss part. correct: argmax hits. count: weights.
    experts: what the routers of a mixture of experts did; None without one.
    """

    objective: jax.Array
    nats: jax.Array
    z: jax.Array
    correct: jax.Array
    count: jax.Array
    experts: MoELosses | None = None

    def __add__(self, other: "Sums") -> "Sums":
        return jax.tree.map(jnp.add, self, other)

    @classmethod
    def zero(cls, experts: bool = False) -> "Sums":
        return cls(*(jnp.zeros(()) for _ in range(5)), experts=MoELosses.zero() if experts else None)

    @property
    def divisor(self) -> jax.Array:
        """What makes a mean of a sum: the count; where nothing counts infinity, and the mean is 0."""
        return jnp.where(self.count > 0, jnp.maximum(self.count, 1e-9), jnp.inf)

    @property
    def loss(self) -> jax.Array:
        """Mean cross-entropy in nats per counted token; 0 where nothing counts."""
        return self.nats / jnp.maximum(self.count, 1e-9)

    @property
    def accuracy(self) -> jax.Array:
        """Part of the counted tokens whose target is the most probable."""
        return self.correct / jnp.maximum(self.count, 1e-9)


def cross_entropy(
    logits_BTV: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    *,
    label_smoothing: ArrayLike | None = None,
    z_loss: ArrayLike | None = None,
) -> Sums:
    """Weighted sums of the token losses. None: the term is not in the program.

    Positions of weight 0 contribute exactly 0 with gradient 0 whatever their target and
    logits (their targets may be -100). A target outside [0, V) that counts gives NaN;
    hosts check ids before. A logit of -inf on a class without target mass is no harm,
    smoothing included: the mass is then spread over the finite logits.
    """
    logits = logits_BTV.astype(jnp.float32)
    V = logits.shape[-1]
    counted = weights_BT > 0
    weights = weights_BT.astype(jnp.float32)
    # Dead positions are given harmless inputs, so that 0 * inf cannot arise behind the weight.
    logits = jnp.where(counted[..., None], logits, 0.0)
    targets = jnp.where(counted, targets_BT, 0)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    valid = (targets >= 0) & (targets < V)
    picked = jnp.take_along_axis(logits, jnp.clip(targets, 0, V - 1)[..., None], axis=-1)[..., 0]
    nats = jnp.where(valid, log_z - picked, jnp.nan)
    objective: jax.Array = nats
    if label_smoothing is not None:
        finite = jnp.isfinite(logits)
        mean = jnp.sum(jnp.where(finite, logits, 0.0), axis=-1) / jnp.sum(finite, axis=-1)
        smoothing = jnp.asarray(label_smoothing)
        objective = (1.0 - smoothing) * nats + smoothing * (log_z - mean)
    z = jnp.zeros_like(nats) if z_loss is None else jnp.asarray(z_loss) * jnp.square(log_z)

    def total(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(counted, x * weights, 0.0))

    hits = (jnp.argmax(logits, axis=-1) == targets).astype(jnp.float32)
    return Sums(total(objective + z), total(nats), total(z), total(hits), jnp.sum(weights))


def entropy(logits: jax.Array) -> jax.Array:
    """H(softmax(logits)) over the last axis, nats; -inf logits have no share."""
    logp = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    p = jnp.exp(logp)
    return -jnp.sum(jnp.where(p > 0, p * jnp.where(p > 0, logp, 0.0), 0.0), axis=-1)


def perplexity(nats_per_token: ArrayLike) -> jax.Array:
    """exp of the mean cross-entropy: average over tokens first, then the exponential."""
    return jnp.exp(jnp.asarray(nats_per_token))


def bits_per_byte(nats: ArrayLike, num_bytes: ArrayLike) -> jax.Array:
    """A sum of nats over a text, in bits for each of its bytes."""
    return jnp.asarray(nats) / (jnp.asarray(num_bytes) * np.log(2.0))


def kl_divergence(
    p_logits: jax.Array, q_logits: jax.Array, weights: jax.Array | None = None, temperature: ArrayLike = 1.0
) -> tuple[jax.Array, jax.Array]:
    """(sum, count) of T^2 KL(p || q) in nats, both softened by `temperature` T.

    logits [..., V]; weights [...], where 0 contributes 0 with gradient 0 whatever the logits.
    Summed over classes, never averaged over them. T^2 keeps the gradient's size as T grows
    (Hinton et al. 2015).
    """
    logp, logq = _log_softmax(p_logits, weights, temperature), _log_softmax(q_logits, weights, temperature)
    return _weighted(_kl(logp, logq), weights, temperature)


def _log_softmax(logits: jax.Array, weights: jax.Array | None, temperature: ArrayLike) -> jax.Array:
    logits = logits.astype(jnp.float32) / temperature
    if weights is not None:
        # Dead positions are given harmless inputs: their NaN reaches neither value nor gradient.
        logits = jnp.where(weights[..., None] > 0, logits, 0.0)
    return jax.nn.log_softmax(logits, axis=-1)


def _kl(logp: jax.Array, logq: jax.Array) -> jax.Array:
    p = jnp.exp(logp)
    # A class without mass under p adds nothing, even where q has none either.
    gap = jnp.where(p > 0, logp, 0.0) - jnp.where(p > 0, logq, 0.0)
    return jnp.sum(p * gap, axis=-1)


def _weighted(x: jax.Array, weights: jax.Array | None, temperature: ArrayLike) -> tuple[jax.Array, jax.Array]:
    w = jnp.ones_like(x) if weights is None else weights.astype(jnp.float32)
    return jnp.square(jnp.asarray(temperature, jnp.float32)) * jnp.sum(jnp.where(w > 0, x * w, 0.0)), jnp.sum(w)


DISTILLATIONS = ("forward", "reverse", "jensen_shannon")


def distillation(
    student_logits: jax.Array,
    teacher_logits: jax.Array,
    weights: jax.Array | None = None,
    *,
    temperature: ArrayLike = 1.0,
    direction: str = "forward",
) -> tuple[jax.Array, jax.Array]:
    """(sum, count) of the divergence between teacher and student; the teacher gets no gradient.

    forward: KL(teacher || student), covers the teacher's modes (what Hinton et al. describe;
    article S1 §5.3 writes the reverse). reverse: KL(student || teacher), seeks one mode.
    jensen_shannon: the mean of both to the half-way mixture, at most ln 2 (times T^2).
    """
    teacher_logits = jax.lax.stop_gradient(teacher_logits)
    if direction == "forward":
        return kl_divergence(teacher_logits, student_logits, weights, temperature)
    if direction == "reverse":
        return kl_divergence(student_logits, teacher_logits, weights, temperature)
    if direction != "jensen_shannon":
        raise unknown("direction", direction, DISTILLATIONS)
    logp, logq = _log_softmax(student_logits, weights, temperature), _log_softmax(teacher_logits, weights, temperature)
    # A class that neither gives mass: the gradient of logaddexp(-inf, -inf) would be NaN.
    neither = jnp.isneginf(logp) & jnp.isneginf(logq)
    logm = jnp.logaddexp(jnp.where(neither, 0.0, logp), jnp.where(neither, 0.0, logq)) - np.log(2.0)
    return _weighted(0.5 * (_kl(logp, logm) + _kl(logq, logm)), weights, temperature)
