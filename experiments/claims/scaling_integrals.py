"""What softmax makes of normal scores, on average: integrals in float64, for chapter B.

The n scores are independent, s = σz, but their softmax ties them together by its sum Z. It comes apart under
1/Z = ∫ exp(−tZ) dt and ln Z = ∫ (exp(−t) − exp(−tZ)) dt/t over t > 0: the mean of exp(−tZ) is that of one score's
exp(−t exp s) to the power n. Grids are even in z and in ln t.
"""

import math

import numpy as np

REACH = 6.0  # standard deviations: beyond it lies 2e-9


def _normal(points: int) -> tuple[np.ndarray, np.ndarray]:
    """A grid of z, and the probability at each point."""
    z, step = np.linspace(-REACH, REACH, points, retstep=True)
    return z, np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) * step


def _positive(low: float, high: float, points: int) -> tuple[np.ndarray, np.ndarray]:
    """A grid of t from exp(low) to exp(high), even in its logarithm, and dt at each point."""
    u, step = np.linspace(low, high, points, retstep=True)
    return np.exp(u), np.exp(u) * step


def mean_top(n: int, sigma: float) -> float:
    """The mean of the largest of n weights, to 1e-4 at σ = 8.

    It is 1/(1 + S), S the sum of exp(s_j − s) over the others, each below the largest: the integral over the largest.
    """
    z, p = _normal(801)
    t, dt = _positive(-40.0, 5.0, 300)
    total = 0.0
    for i in range(1, len(z)):
        below = p[: i + 1].copy()
        below[-1] /= 2  # the end of the trapezoidal rule
        others = np.exp(-np.outer(t, np.exp(sigma * (z[: i + 1] - z[i])))) @ below
        total += n * p[i] * float(np.sum(np.exp(-t) * others ** (n - 1) * dt))
    return total


def mean_entropy(n: int, sigma: float) -> float:
    """The mean entropy of n weights, nats, to 1e-4 up to σ = 8: that of ln Z − Σ p s."""
    z, p = _normal(801)
    s, (t, dt) = sigma * z, _positive(-REACH * sigma - 40.0, REACH * sigma + 6.0, 2000)
    decay = np.exp(-np.outer(t, np.exp(s)))
    one = decay @ p
    log_sum = float(np.sum((np.exp(-t) - one**n) / t * dt))
    weighted = n * float(np.sum((decay @ (p * s * np.exp(s))) * one ** (n - 1) * dt))
    return log_sum - weighted
