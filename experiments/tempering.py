"""What a temperature does to a model's predictions, and how text that it draws is judged.

    p = softmax(z / T)          T = 0: all on the largest logit z, of equal ones the first
    dH/dT = Var_p(z) / T^3      H = -sum p ln p, the entropy of p

Plain functions of logits and ids, in float64 on the host. H = ln Z - <z>/T with Z = sum exp(z/T),
so that dH/dT = -(1/T) d<z>/dT, and d<z>/dT = Var_p(z)/T^2: entropy never falls as T rises.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.data.markov import stationary

BINS = 15  # of confidence, equally wide (Guo et al. 2017)
STEP = 1e-5  # of the central difference, as a part of T


# --- distributions ------------------------------------------------------------------


def log_probabilities(logits: np.ndarray, temperature: float) -> np.ndarray:
    """ln softmax(z / T) over the last axis, float64, the shape of `logits`; -inf where T = 0 leaves nothing."""
    z = np.asarray(logits, np.float64)
    if temperature == 0:
        first = np.argmax(z, axis=-1, keepdims=True) == np.arange(z.shape[-1])
        return np.where(first, 0.0, -np.inf)
    z = (z - z.max(axis=-1, keepdims=True)) / temperature
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


def entropy(logp: np.ndarray) -> np.ndarray:
    """-sum p ln p over the last axis, nats; what has no probability has no share."""
    p = np.exp(logp)
    return -np.sum(p * np.where(p > 0, logp, 0.0), axis=-1)


@dataclasses.dataclass(frozen=True)
class Slopes:
    """dH/dT at each temperature, mean over positions, three ways; all [n], float64."""

    temperatures: np.ndarray
    formula: np.ndarray
    autodiff: np.ndarray
    differences: np.ndarray

    @property
    def largest_difference(self) -> float:
        """Between any two of the three, at any temperature."""
        three = np.stack([self.formula, self.autodiff, self.differences])
        return float(np.max(np.ptp(three, axis=0)))


def entropy_slopes(logits_PV: np.ndarray, temperatures: Sequence[float] | np.ndarray) -> Slopes:
    """dH/dT of P distributions: Var_p(z)/T^3, JAX's derivative of H, and (H(T+h) - H(T-h)) / 2h with h = T/100000.

    All in float64; every temperature must be above 0.
    """
    z_PV, Ts = np.asarray(logits_PV, np.float64), np.asarray(temperatures, np.float64)

    def formula(T: float) -> float:
        p_PV = np.exp(log_probabilities(z_PV, T))
        mean_P1 = np.sum(p_PV * z_PV, axis=1, keepdims=True)
        return float(np.mean(np.sum(p_PV * np.square(z_PV - mean_P1), axis=1))) / T**3

    def difference(T: float) -> float:
        above, below = (float(np.mean(entropy(log_probabilities(z_PV, x * T)))) for x in (1 + STEP, 1 - STEP))
        return (above - below) / (2 * STEP * T)

    def H(T: jax.Array, z_PV: jax.Array) -> jax.Array:
        logp_PV = jax.nn.log_softmax(z_PV / T, axis=1)
        return -jnp.mean(jnp.sum(jnp.exp(logp_PV) * logp_PV, axis=1))

    # Here alone: float32 would hide at 1e-7 what the formula is held to.
    with jax.enable_x64(True):
        slopes = np.asarray(jax.jit(jax.vmap(jax.grad(H), in_axes=(0, None)))(Ts, z_PV))
    return Slopes(Ts, np.array([formula(T) for T in Ts]), slopes, np.array([difference(T) for T in Ts]))


# --- text ---------------------------------------------------------------------------


def _ngrams(ids_BT: np.ndarray, n: int) -> np.ndarray:
    """[B, T - n + 1, n]: each run of n ids of each row."""
    return np.lib.stride_tricks.sliding_window_view(ids_BT, n, axis=1)


def distinct(ids_BT: np.ndarray, n: int) -> float:
    """Different n-grams of a row over all of its n-grams, mean over the rows.

    The distinct-n of Li et al. 2016, of each sample alone: over all samples of a small
    alphabet every n-gram occurs, and the number would only count the samples.
    """
    grams = _ngrams(ids_BT, n)
    return float(np.mean([len(np.unique(row, axis=0)) / len(row) for row in grams]))


def repetition(ids_BT: np.ndarray, n: int = 4) -> float:
    """Part of a row's n-grams that stood before in the same row, mean over rows: 1 - distinct (Welleck et al. 2020)."""
    return 1.0 - distinct(ids_BT, n)


@dataclasses.dataclass(frozen=True)
class Likelihood:
    """Of text under a chain. nats: per token, mean over those it can produce, NaN for none; impossible: part of all."""

    nats: float
    impossible: float


def under_chain(table: np.ndarray, ids_BT: np.ndarray) -> Likelihood:
    """-ln p(x_t | the `order` ids before it), over all t >= order. table: [states] * (order + 1).

    A token is impossible where it, or one that it follows, is no state of the chain, or its
    transition has probability 0. One such token would make the mean infinite and hide the rest: it is
    left out of the mean and counted apart.
    """
    states, order = len(table), table.ndim - 1
    grams = _ngrams(ids_BT, order + 1)
    known = np.all(grams < states, axis=-1)
    p = table[tuple(np.moveaxis(np.where(known[..., None], grams, 0), -1, 0))]
    possible = known & (p > 0)
    nats = -np.log(p[possible])
    return Likelihood(float(nats.mean()) if nats.size else np.nan, float(1.0 - possible.mean()))


def chain_loss(table: np.ndarray, rows_BW: np.ndarray) -> float:
    """Mean -ln p of all ids of rows but the first, under the chain in its stationary state: no model does better.

    Its expectation is `mean_floor`. Every id must be a state.
    """
    order, chance = table.ndim - 1, stationary(table)
    nats = -np.log(table[tuple(np.moveaxis(_ngrams(rows_BW, order + 1), -1, 0))]).sum()
    for k in range(1, order):  # the k-th id, of which only the k before it are known
        block = chance.sum(axis=tuple(range(k + 1, order)))
        known = block / block.sum(axis=-1, keepdims=True)
        nats -= np.log(known[tuple(rows_BW[:, : k + 1].T)]).sum()
    return float(nats / rows_BW[:, 1:].size)


# --- calibration --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Reliability:
    """Sums over the tokens of each bin of confidence, [BINS] each: they add over batches and models.

    confidence: the largest probability of a prediction. correct: its id was the target.
    """

    count: np.ndarray
    confidence: np.ndarray
    correct: np.ndarray

    def __add__(self, other: "Reliability") -> "Reliability":
        mine, theirs = (dataclasses.astuple(x) for x in (self, other))
        return Reliability(*(a + b for a, b in zip(mine, theirs, strict=True)))

    @property
    def error(self) -> float:
        """Expected calibration error: sum over bins of tokens / all |accuracy - confidence| (Guo et al. 2017)."""
        return float(np.sum(np.abs(self.correct - self.confidence)) / np.sum(self.count))


def reliability(logp: np.ndarray, targets: np.ndarray, bins: int = BINS) -> Reliability:
    """Bins (lo, hi] of the confidences of logp [..., V] against targets [...]; of equal probabilities the first id."""
    confidence = np.minimum(np.exp(logp.max(axis=-1)), 1.0).ravel()
    right = (logp.argmax(axis=-1) == targets).ravel()
    place = np.searchsorted(np.linspace(0, 1, bins + 1)[1:], confidence, side="left")
    count, total, correct = (np.bincount(place, weights, bins) for weights in (None, confidence, right))
    return Reliability(count.astype(np.float64), total, correct)
