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


def mean_top(n: int, sigma: float, power: int = 1) -> float:
    """The mean of the largest of n weights, or of its square (power 2), to 1e-4 at σ = 8.

    It is 1/(1 + S), S the sum of exp(s_j − s) over the others, each below the largest: the integral over the largest.
    (1 + S)⁻² is ∫ t exp(−t (1 + S)) dt.
    """
    z, p = _normal(801)
    t, dt = _positive(-40.0, 5.0, 300)
    total = 0.0
    for i in range(1, len(z)):
        below = p[: i + 1].copy()
        below[-1] /= 2  # the end of the trapezoidal rule
        others = np.exp(-np.outer(t, np.exp(sigma * (z[: i + 1] - z[i])))) @ below
        total += n * p[i] * float(np.sum(t ** (power - 1) * np.exp(-t) * others ** (n - 1) * dt))
    return total


def of_top(n: int, sigma: float) -> tuple[float, float]:
    """(mean, standard deviation) of the largest of n weights."""
    mean = mean_top(n, sigma)
    return mean, math.sqrt(mean_top(n, sigma, 2) - mean**2)


def gap_above(n: int, gap: float) -> float:
    """P(the largest of n normals leads the second by more than gap): n ∫ φ(x) Φ(x − gap)ⁿ⁻¹ dx."""
    z, p = _normal(2001)
    below = np.array([0.5 * math.erfc((gap - one) / math.sqrt(2)) for one in z])
    return float(np.sum(n * p * below ** (n - 1)))


def tail(n: int, sigma: float, rest: float) -> tuple[float, float]:
    """Bounds of the chance that all but the largest of n weights are below `rest` together.

    At most that of the second alone. At least, by Markov's inequality: that of a lead of g, times 1 − E[S | lead g]/S₀
    for S₀ = rest/(1 − rest), at the best g.
    """
    z, p = _normal(801)
    best, most = 0.0, rest / (1 - rest)
    for g in -math.log(most) / sigma + np.linspace(0, 1, 21):
        total = 0.0
        for one, chance in zip(z, p, strict=True):
            below = 0.5 * math.erfc((g - one) / math.sqrt(2))
            if below > 0:
                # ∫ φ(y) exp(σ (y − z)) dy up to z − g, of each other score.
                shifted = 0.5 * math.erfc((g - one + sigma) / math.sqrt(2))
                lead = (n - 1) * math.exp(sigma**2 / 2 - sigma * one) * shifted / below
                total += n * chance * below ** (n - 1) * (1 - lead / most)
        best = max(best, total)
    return best, gap_above(n, -math.log(most) / sigma)


def mean_entropy(n: int, sigma: float) -> float:
    """The mean entropy of n weights, nats, to 1e-4 up to σ = 8: that of ln Z − Σ p s."""
    z, p = _normal(801)
    s, (t, dt) = sigma * z, _positive(-REACH * sigma - 40.0, REACH * sigma + 6.0, 2000)
    decay = np.exp(-np.outer(t, np.exp(s)))
    one = decay @ p
    log_sum = float(np.sum((np.exp(-t) - one**n) / t * dt))
    weighted = n * float(np.sum((decay @ (p * s * np.exp(s))) * one ** (n - 1) * dt))
    return log_sum - weighted
