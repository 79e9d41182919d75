"""Statistics of paired sweeps: intervals over seeds, comparisons of arms, the best setting.

The arms of a sweep share their seeds, so that seed k of one arm pairs with seed k of another
and only differences are tested. A value is a float, or None where the run diverged (a NaN or
an infinity counts as None); such values leave the means, but are counted, and verdicts name them.

Intervals are t intervals at every number of seeds. A percentile bootstrap was measured: under
the null it excludes 0 in 25/16/13/10% of cases at 3/5/8/10 seeds, and still in 7/7/6% at 20/30/50.

Only numpy is imported here; scipy is loaded by the first function that needs it.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from transformer_jax.errors import ConfigError, unknown

Value = float | None

MAX_COMPARISONS = 6
MAX_ENUMERATED = 16  # pairs up to which all sign patterns are tried: 2^15 of them
SAMPLED_PATTERNS = 2**16 - 1  # above that; (k+1)/(m+1) then has the floor 2^-16 = 2^(1-17)
MAX_SEEDS = 1000  # a number of seeds above this is not worth printing


# --- values over seeds ----------------------------------------------------------------------


def _array(values: Sequence[Value]) -> np.ndarray:
    """values as float64 [n], NaN where the seed diverged."""
    x = np.array([math.nan if v is None else float(v) for v in values], dtype=np.float64)
    return np.where(np.isfinite(x), x, math.nan)


def _finite(values: Sequence[Value]) -> np.ndarray:
    x = _array(values)
    return x[~np.isnan(x)]


def diverged(values: Sequence[Value]) -> int:
    """How many of `values` are None, NaN or infinite."""
    return int(np.isnan(_array(values)).sum())


def mean_interval(values: Sequence[Value], level: float = 0.95) -> tuple[Value, Value, Value]:
    """(mean, low, high) of the mean over the seeds that did not diverge, in the values' unit.

    The interval is Student's: mean ± t_{n-1}((1+level)/2) s/√n, s with n-1 in its divisor.
    Bounds are None for one value, and all three for none: never NaN. The seeds that are left
    out are counted by `diverged(values)`; show that number beside the mean.
    Raises ConfigError if level is not between 0 and 1.
    """
    if not 0.0 < level < 1.0:
        raise ConfigError(f"level={level:g} is out of range: above 0 and below 1")
    from scipy import special

    x = _finite(values)
    if x.size == 0:
        return None, None, None
    mean = float(x.mean())
    if x.size == 1:
        return mean, None, None
    half = float(special.stdtrit(x.size - 1, (1.0 + level) / 2.0) * x.std(ddof=1) / math.sqrt(x.size))
    return mean, mean - half, mean + half


# --- tests ----------------------------------------------------------------------------------


def p_floor(n: int) -> float:
    """Smallest p that `sign_flip_p` can give for n pairs: 2^(1-n), and 2^-16 from 17 pairs on.

    The pattern that was seen and its mirror image always count: 2 of 2^n.
    """
    return min(1.0, 2.0 ** (1 - min(n, MAX_ENUMERATED + 1)))


@functools.lru_cache(maxsize=MAX_ENUMERATED)
def _sign_patterns(n: int) -> np.ndarray:
    """[2^(n-1), n] of ±1: every pattern whose last sign is +, the others being their mirrors."""
    bits = (np.arange(2 ** (n - 1))[:, None] >> np.arange(n)) & 1
    return 1.0 - 2.0 * bits


def sign_flip_p(differences: Sequence[float]) -> float:
    """Two-sided sign-flip permutation p of the mean of paired differences, [n] -> (0, 1].

    The share of sign patterns s for which |Σ s_i d_i| is at least |Σ d_i| (Fisher 1935, §21).
    Exact by enumeration for n <= 16; above that (k+1)/(m+1) over m = 2^16-1 patterns drawn
    with a fixed seed (Phipson & Smyth 2010), so that the same data give the same p.
    Valid wherever each difference is as likely to be d as -d: no normality is assumed.
    Raises ConfigError for no differences, or one that is not finite.
    """
    d = np.asarray(differences, dtype=np.float64)
    if d.ndim != 1 or d.size == 0 or not np.isfinite(d).all():
        raise ConfigError(f"a sign-flip test wants a list of finite differences, not {differences!r}")
    # Sums that are equal on paper differ by rounding; a tie must count as reached.
    reached = abs(d.sum()) - 1e-12 * np.abs(d).sum()
    if d.size <= MAX_ENUMERATED:
        return float((np.abs(_sign_patterns(d.size) @ d) >= reached).mean())
    rng = np.random.default_rng(0)
    count, left = 0, SAMPLED_PATTERNS
    while left:  # in blocks: memory stays small whatever n is
        rows = min(left, 4096)
        signs = 1.0 - 2.0 * rng.integers(2, size=(rows, d.size))
        count += int((np.abs(signs @ d) >= reached).sum())
        left -= rows
    return (count + 1) / (SAMPLED_PATTERNS + 1)


def _paired_t_p(d: np.ndarray) -> Value:
    """Two-sided p of the paired t test of differences [n]; None for fewer than two."""
    from scipy import special

    if d.size < 2:
        return None
    if not d.any():
        return 1.0
    error = float(d.std(ddof=1)) / math.sqrt(d.size)
    if error == 0.0:  # the same non-zero difference on every seed
        return 0.0
    return float(min(1.0, 2.0 * special.stdtr(d.size - 1, -abs(d.mean()) / error)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p, in the order given: the k-th smallest of m is multiplied by
    m-k+1, made no smaller than the one before it, and cut at 1 (Holm 1979)."""
    m = len(p_values)
    adjusted, largest = [1.0] * m, 0.0
    for rank, i in enumerate(sorted(range(m), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (m - rank) * float(p_values[i])))
        adjusted[i] = largest
    return adjusted


def seeds_needed(effect: float, alpha: float = 0.05, family: int = 1, power: float = 0.8) -> int | None:
    """Seeds at which `compare` would decide with about this power; None above MAX_SEEDS.

    effect is |mean| / standard deviation of the paired differences (no unit). The answer is the
    smallest n that meets the t test at level alpha/family, Holm's first and strictest step,
    by the noncentral t with n-1 degrees and noncentrality effect·√n (Cohen 1988, ch. 2), and
    the sign-flip test at alpha: 2^(1-n) <= alpha. At that floor the sign-flip test needs
    all n differences on one side, which for normal ones has probability Φ(effect)^n.
    An effect estimated from few seeds is rough, and so is this number.
    """
    from scipy import special

    level = alpha / family
    floor = math.ceil(1.0 - math.log2(alpha))

    def enough(n: int) -> bool:
        critical, shift = special.stdtrit(n - 1, 1.0 - level / 2.0), abs(effect) * math.sqrt(n)
        if n == floor and special.ndtr(abs(effect)) ** n < power:
            return False
        # Far out the power is 1, and the tail function no longer dependable.
        return shift > critical + 10.0 or 1.0 - special.nctdtr(n - 1, shift, critical) >= power

    low, high = max(floor, 2), MAX_SEEDS
    if not enough(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return low


# --- comparisons ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two arms on one metric; `to_dict` is a row of `comparisons` in results.json.

    difference: mean of a - b over the seeds where both are finite, in the metric's unit; None
        if there is no such seed.
    ci95: its paired 95% t interval, not adjusted for the family; None below two pairs.
    p, p_floor: the sign-flip p, and the smallest that n_pairs could have given.
    p_t: p of the paired t test. p_adjusted: the larger of p and p_t adjusted by Holm.
    verdict: a phrase for the reader. lower: the arm that it calls lower, None if neither.
    seeds_needed: about how many pairs would decide; None if decided, identical, or too many.
    diverged_a, diverged_b: seeds on which each arm diverged, of n_seeds.
    """

    a: str
    b: str
    metric: str
    difference: Value
    ci95: tuple[float, float] | None
    p: Value
    p_floor: float
    p_t: Value
    p_adjusted: Value
    verdict: str
    lower: str | None
    seeds_needed: int | None
    n_pairs: int
    n_seeds: int
    diverged_a: int
    diverged_b: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values for strict JSON: None where there is no number, never NaN or infinity."""
        row = dataclasses.asdict(self)
        row["ci95"] = None if self.ci95 is None else list(self.ci95)
        return row


def _check_family(arms: Mapping[str, Sequence[Value]], pairs: Sequence[tuple[str, str]], alpha: float) -> None:
    if len(pairs) > MAX_COMPARISONS:
        raise ConfigError(f"{len(pairs)} comparisons: at most {MAX_COMPARISONS}; name the ones that matter")
    if not 0.001 <= alpha <= 0.5:  # below that, Holm over six would pass under the sampled floor
        raise ConfigError(f"alpha={alpha:g} is out of range: at least 0.001 and at most 0.5")
    seen = set()
    for a, b in pairs:
        for name in (a, b):
            if name not in arms:
                raise unknown("arm", name, arms)
        if a == b:
            raise ConfigError(f"arm {a!r} is compared with itself")
        if frozenset((a, b)) in seen:
            raise ConfigError(f"arms {a!r} and {b!r} are compared twice")
        seen.add(frozenset((a, b)))
        if len(arms[a]) != len(arms[b]):
            raise ConfigError(f"arm {a!r} has {len(arms[a])} seeds and {b!r} has {len(arms[b])}: they cannot be paired")
        if len(arms[a]) == 0:
            raise ConfigError(f"arms {a!r} and {b!r} have no seeds")


def _divergence(name: str, count: int, seeds: int) -> str:
    if count == seeds:
        return f"{name} diverged on all {seeds} seeds" if seeds > 1 else f"{name} diverged on the only seed"
    return f"{name} diverged on {count} of {seeds} seeds"


def _judge(row: Comparison, d: np.ndarray, alpha: float, family: int) -> Comparison:
    """`row` with lower, seeds_needed and verdict, from its p_adjusted and differences [n_pairs]."""
    counts = ((row.a, row.diverged_a), (row.b, row.diverged_b))
    notes = [_divergence(name, count, row.n_seeds) for name, count in counts if count]
    lower = needed = None
    if d.size == 0:
        if row.n_seeds not in (row.diverged_a, row.diverged_b):
            notes.append("no seed is finite in both")
        return dataclasses.replace(row, verdict="undecided: " + ", ".join(notes))
    if not d.any():
        verdict = "identical"
    elif row.p_adjusted is not None and row.p_adjusted <= alpha:
        lower = row.a if d.mean() < 0.0 else row.b
        verdict = f"{lower} lower"
    elif d.size == 1:  # nothing is known of the spread: the floor is all that can be said
        needed = seeds_needed(math.inf, alpha, family)
        verdict = f"undecided: needs at least {needed} seeds"
    else:
        spread = float(d.std(ddof=1))
        needed = seeds_needed(abs(d.mean()) / spread if spread else math.inf, alpha, family)
        # These seeds did not decide, whatever the effect estimated from them promises.
        needed = None if needed is None else max(needed, d.size + 1)
        verdict = f"undecided: needs {f'more than {MAX_SEEDS}' if needed is None else f'about {needed}'} seeds"
    return dataclasses.replace(row, lower=lower, seeds_needed=needed, verdict="; ".join([verdict, *notes]))


def first_pairs(pairs: Sequence[tuple[str, str]]) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """The pairs that are compared, the first six, and a note that names the others."""
    kept, others = tuple(pairs[:MAX_COMPARISONS]), pairs[MAX_COMPARISONS:]
    named = ", ".join(f"{a} against {b}" for a, b in others)
    return kept, (f"not compared, as a family is at most {MAX_COMPARISONS}: {named}",) if others else ()


def compare(
    arms: Mapping[str, Sequence[Value]], pairs: Sequence[tuple[str, str]], metric: str, alpha: float = 0.05
) -> list[Comparison]:
    """Compare named pairs of arms, each arm a sequence of values over the same seeds, [n] each.

    Name all pairs (at most six) before the run, and pass them in one call: they are the family.

    The rule: an arm is called lower if Holm's adjusted p of the paired t test is at most alpha
    and the sign-flip p is too; p_adjusted is the larger of the two. Otherwise the verdict is
    "undecided: needs about n seeds". Both must agree because each has a case that it gets wrong
    alone: the t test leans on normal differences (where runs end in one of two modes it finds
    a difference between like arms in 8.8% of families of three at 3 seeds), and the sign-flip p
    may fall under alpha while the printed t interval holds 0. The sign-flip p is a guard, not a
    second family: adjusting it too would ask for 8 seeds before four comparisons could speak.
    Its floor asks for 6.

    Measured family-wise rate of false positives, alpha 0.05, 20,000 families of four, one
    baseline, normal / bimodal / lognormal noise: at 3 and 5 seeds 0; at 6 seeds 4.2 / 1.3 / 1.4%;
    at 8 seeds 4.4 / 4.9 / 1.7%; the largest seen over families of 1 to 6 and 6 to 10 seeds is 5.4%.
    The null is "the arms' labels do not matter". Arms of equal mean but unlike shape are another
    matter: if every difference is exponential around 0, no test of the mean is safe with few
    seeds (12.8% at 8 where both tests were adjusted, 17.5% by the t test alone).

    A pair of seeds of which one diverged is left out of the difference, counted, and named in the
    verdict; it stays in the family. Differences that are all 0 are "identical", with p = 1.
    Raises ConfigError for more than six pairs, an unknown arm, a pair of one arm or named twice,
    arms of unlike numbers of seeds or none, or alpha outside 0.001 ... 0.5.
    """
    _check_family(arms, pairs, alpha)
    rows, differences, governing = [], [], []
    for a, b in pairs:
        d = _array(arms[a]) - _array(arms[b])
        d = d[np.isfinite(d)]
        mean, low, high = mean_interval(d.tolist())
        p, p_t = sign_flip_p(d.tolist()) if d.size else None, _paired_t_p(d)
        governing.append(1.0 if p_t is None else p_t)
        differences.append(d)
        rows.append(
            Comparison(
                a=a,
                b=b,
                metric=metric,
                difference=mean,
                ci95=None if low is None or high is None else (low, high),
                p=p,
                p_floor=p_floor(d.size),
                p_t=p_t,
                p_adjusted=None,
                verdict="",
                lower=None,
                seeds_needed=None,
                n_pairs=int(d.size),
                n_seeds=len(arms[a]),
                diverged_a=diverged(arms[a]),
                diverged_b=diverged(arms[b]),
            )
        )
    judged = []
    for row, d, adjusted in zip(rows, differences, holm(governing), strict=True):
        row = dataclasses.replace(row, p_adjusted=None if row.p is None else max(adjusted, row.p))
        judged.append(_judge(row, d, alpha, len(pairs)))
    return judged


# --- the best setting of an arm -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Best:
    """An arm's chosen setting: its value, mean selection loss (None if every seed diverged),
    seeds that diverged at it, whether it is an end of the range, and a warning for the reader."""

    value: float
    mean: Value
    diverged: int
    at_edge: bool
    warning: str | None


def best_setting(selection: Mapping[float, Sequence[Value]], name: str = "learning_rate") -> Best:
    """The value of `selection` (value -> losses over seeds, [n] each) with the lowest mean loss.

    Use losses of a selection split, and report another one: the winner's own loss is biased low.
    Fewer diverged seeds come before a lower mean, which only the seeds that survived make up: a
    value with any is chosen only if all values have some. Ties go to the smaller value.
    A best at an end of the range may not be the best there is; a single value was not compared.
    Raises ConfigError if there is no value, or one without seeds.
    """
    if not selection or not all(len(losses) for losses in selection.values()):
        raise ConfigError(f"{name}: no selection losses to choose from")
    values = sorted(selection)
    scores = []
    for value in values:
        mean = mean_interval(selection[value])[0]
        scores.append((diverged(selection[value]), math.inf if mean is None else mean))
    i = min(range(len(values)), key=lambda i: scores[i])
    lost, mean = scores[i]
    warnings = []
    at_edge = len(values) > 1 and i in (0, len(values) - 1)
    if len(values) == 1:
        warnings.append(f"{name}={values[i]:g} is the only value tried: the comparison may measure it")
    elif at_edge:
        end, way = ("smallest", "down") if i == 0 else ("largest", "up")
        warnings.append(f"the best {name}={values[i]:g} is the {end} tried: extend the range {way}wards")
    if lost:
        warnings.append(_divergence(f"{name}={values[i]:g}", lost, len(selection[values[i]])))
    return Best(values[i], mean if math.isfinite(mean) else None, lost, at_edge, "; ".join(warnings) or None)
