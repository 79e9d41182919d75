"""Intervals, tests and verdicts of paired sweeps: hand values, brute force, and the whole procedure's error rates."""

import itertools
import json
import math
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats as reference

from experiments import stats
from transformer_jax.errors import ConfigError

BASELINE = [("base", "x"), ("base", "y"), ("base", "z")]


# --- values over seeds ----------------------------------------------------------------------


@pytest.mark.parametrize("level", [0.8, 0.95])
def test_mean_interval_is_students(level: float) -> None:
    x = [2.31, 2.02, 2.9, 1.77, 2.45]
    want = reference.t.interval(level, len(x) - 1, loc=np.mean(x), scale=reference.sem(x))
    np.testing.assert_allclose(stats.mean_interval(x, level), (np.mean(x), *want), rtol=1e-12)


def test_diverged_seeds_leave_the_mean_but_are_counted() -> None:
    values = [1.0, None, 3.0, math.nan, math.inf]
    assert stats.mean_interval(values) == pytest.approx(stats.mean_interval([1.0, 3.0]))
    assert stats.diverged(values) == 3
    assert stats.diverged([1.0, 2.0]) == 0


def test_too_few_values_give_none_never_nan() -> None:
    assert stats.mean_interval([1.5]) == (1.5, None, None)
    assert stats.mean_interval([None, 1.5]) == (1.5, None, None)
    assert stats.mean_interval([None]) == stats.mean_interval([]) == (None, None, None)
    with pytest.raises(ConfigError, match="level=95"):
        stats.mean_interval([1.0, 2.0], level=95)


# --- tests ----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 5, 7, 11])
def test_sign_flip_equals_brute_force(n: int) -> None:
    # Whole numbers: sums are exact, and ties are many.
    d = np.random.default_rng(n).integers(-3, 6, size=n).tolist()
    sums = [abs(sum(s * x for s, x in zip(signs, d, strict=True))) for signs in itertools.product((1, -1), repeat=n)]
    assert stats.sign_flip_p(d) == sum(s >= abs(sum(d)) for s in sums) / 2**n


def test_sign_flip_counts_ties_that_rounding_parts() -> None:
    # Tenths have the ties of whole numbers, but their sums part in the last digit.
    rng = np.random.default_rng(0)
    for _ in range(50):
        whole = rng.integers(-9, 12, size=9)
        assert stats.sign_flip_p((whole / 10).tolist()) == stats.sign_flip_p(whole.tolist())
    # Equal differences, scaled: only the observed pattern and its mirror reach the full sum.
    assert stats.sign_flip_p([0.1] * 6) == stats.sign_flip_p([1e-200] * 6) == 2 / 64


@pytest.mark.parametrize("n", [1, 3, 6, 16, 17, 40])
def test_floor_is_reached_and_never_passed(n: int) -> None:
    d = np.linspace(1.0, 2.0, n).tolist()
    p = stats.sign_flip_p(d)
    assert stats.p_floor(n) <= p < 1.001 * stats.p_floor(n) + (n == 17) * 1e-4  # 17: sampled, may meet the mirror
    assert stats.p_floor(n) == 2.0 ** (1 - min(n, 17))


def test_sampled_sign_flip_is_near_the_exact_one_and_repeats() -> None:
    d = np.random.default_rng(3).normal(0.5, 1.0, size=18)
    bits = (np.arange(2**18)[:, None] >> np.arange(18)) & 1
    exact = float((np.abs((1 - 2 * bits) @ d) >= abs(d.sum()) - 1e-9).mean())
    p = stats.sign_flip_p(d.tolist())
    assert 0.02 < exact < 0.5
    assert abs(p - exact) < 5 * math.sqrt(exact * (1 - exact) / stats.SAMPLED_PATTERNS)
    assert p == stats.sign_flip_p(d.tolist())


@pytest.mark.parametrize("d", [[], [1.0, math.nan]])
def test_sign_flip_refuses_what_is_no_difference(d: list[float]) -> None:
    with pytest.raises(ConfigError, match="finite differences"):
        stats.sign_flip_p(d)


def test_holm_by_hand() -> None:
    # Sorted: .005 x4 = .02; .01 x3 = .03; .03 x2 = .06; .04 x1 = .04, raised to .06.
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert stats.holm([0.5, 0.9, 0.02]) == pytest.approx([1.0, 1.0, 0.06])
    assert stats.holm([0.03]) == [0.03]
    assert stats.holm([]) == []


# --- verdicts -------------------------------------------------------------------------------

NOISE = [0.31, -0.22, 0.05, 0.44, -0.37, 0.18, -0.09, 0.26]
SEEDS = [2.0, 2.6, 1.8, 3.1, 2.2, 2.9, 1.5, 2.4]
LOWER = [s - 1.0 + 0.2 * e for s, e in zip(SEEDS, NOISE, strict=True)]


def one(a: list[stats.Value], b: list[stats.Value]) -> stats.Comparison:
    return stats.compare({"on": a, "off": b}, [("on", "off")], "loss")[0]


def test_a_clear_difference_is_decided_and_named() -> None:
    row = one(LOWER, SEEDS)
    assert (row.verdict, row.lower, row.seeds_needed) == ("on lower", "on", None)
    t = reference.ttest_rel(LOWER, SEEDS)
    assert row.difference == pytest.approx(np.mean(LOWER) - np.mean(SEEDS))
    assert row.ci95 == pytest.approx(tuple(t.confidence_interval(0.95)))
    assert row.p_t == pytest.approx(t.pvalue)
    assert row.p == row.p_floor == row.p_adjusted == 2.0**-7
    other = one(SEEDS, LOWER)
    assert (other.verdict, other.lower, other.difference) == ("off lower", "off", -row.difference)


def test_few_seeds_meet_the_floor_and_are_told_how_many_would_do() -> None:
    row = one(LOWER[:3], SEEDS[:3])
    assert row.p_t is not None and row.p_t < 0.05
    assert (row.p, row.lower, row.seeds_needed) == (0.25, None, 6)
    assert row.verdict == "undecided: needs about 6 seeds"
    for seeds, verdicts in ((5, ["undecided: needs about 6 seeds"] * 3), (6, ["x lower", "y lower", "z lower"])):
        family = {"base": SEEDS[:seeds], **{name: LOWER[:seeds] for name in "xyz"}}
        assert [r.verdict for r in stats.compare(family, BASELINE, "loss")] == verdicts


def test_an_interval_that_holds_zero_is_never_decided() -> None:
    # All on one side, so the sign-flip p is at its floor; one outlier makes the interval wide.
    row = one([1.1, 1.1, 1.2, 1.1, 1.2, 1.1, 1.2, 11.0], [1.0] * 8)
    assert row.p is not None and row.p < 0.05
    assert row.ci95 is not None and row.ci95[0] < 0 < row.ci95[1]
    assert row.lower is None and row.verdict.startswith("undecided: needs about")
    assert row.seeds_needed is not None and row.seeds_needed > 8


def test_more_seeds_are_asked_for_than_there_were() -> None:
    # Zeros tie, so that the sign-flip p stays above alpha; the t test alone would ask for these 7 seeds.
    d = [0.0, 2.0, 0.0, 2.1, 1.2, 1.0, 1.9]
    assert stats.seeds_needed(np.mean(d) / np.std(d, ddof=1)) == 7
    row = one(d, [0.0] * 7)
    assert (row.p, row.lower, row.seeds_needed) == (0.0625, None, 8)


def test_one_seed_and_hopelessly_small_differences() -> None:
    row = one([1.0], [2.0])
    assert (row.verdict, row.ci95, row.p, row.p_t) == ("undecided: needs at least 6 seeds", None, 1.0, None)
    row = one([1.0, 2.0, 3.0, 4.0], [2.0, 1.0, 4.0, 3.0])
    assert (row.verdict, row.seeds_needed) == ("undecided: needs more than 1000 seeds", None)


def test_constant_differences_divide_by_nothing() -> None:
    row = one(SEEDS, list(SEEDS))
    assert (row.verdict, row.difference, row.p, row.p_t, row.p_adjusted) == ("identical", 0.0, 1.0, 1.0, 1.0)
    assert row.ci95 == (0.0, 0.0) and row.lower is None
    row = one([1.0] * 6, [1.5] * 6)
    assert (row.verdict, row.difference, row.p, row.p_t, row.ci95) == ("on lower", -0.5, 2 / 64, 0.0, (-0.5, -0.5))
    assert one([1.0] * 4, [1.5] * 4).verdict == "undecided: needs about 6 seeds"


def test_divergence_is_counted_and_named() -> None:
    some = one([None, *LOWER[1:]], [*SEEDS[:6], math.nan, SEEDS[7]])
    assert (some.diverged_a, some.diverged_b, some.n_pairs, some.n_seeds) == (1, 1, 6, 8)
    assert some.verdict == "on lower; on diverged on 1 of 8 seeds; off diverged on 1 of 8 seeds"
    kept = [i for i in range(8) if i not in (0, 6)]
    assert some.difference == pytest.approx(np.mean([LOWER[i] - SEEDS[i] for i in kept]))
    assert one([1.0, 2.0, 3.0], [None, 2.5, 2.0]).verdict.endswith("seeds; off diverged on 1 of 3 seeds")
    every = one([1.0, 2.0, 3.0], [None] * 3)
    assert every.verdict == "undecided: off diverged on all 3 seeds"
    assert (every.difference, every.ci95, every.p, every.p_t, every.p_adjusted) == (None,) * 5
    assert one([1.0], [None]).verdict == "undecided: off diverged on the only seed"
    apart = one([1.0, None], [None, 1.0])
    assert apart.verdict == (
        "undecided: on diverged on 1 of 2 seeds, off diverged on 1 of 2 seeds, no seed is finite in both"
    )


def test_a_diverged_arm_stays_in_the_family() -> None:
    noisy = [0.1, 1.9, 0.2, 1.7, 0.4, 2.2, 0.6, 1.1]  # all on one side: the t test is the stricter one
    arms = {"base": noisy, "x": [0.0] * 8, "y": [None] * 8, "z": [None] * 8}
    row = stats.compare(arms, BASELINE, "loss")[0]
    assert row.p_t is not None and row.p == 2.0**-7 < 3 * row.p_t
    assert row.p_adjusted == pytest.approx(3 * row.p_t) and row.verdict == "x lower"


def test_rows_are_strict_json() -> None:
    arms = {"base": [1.0, None, 2.0], "x": [None] * 3, "y": [math.inf, 1.0, 1.5], "z": [1.0, 3.0, 2.5]}
    for row in stats.compare(arms, [*BASELINE, ("y", "z")], "loss"):
        again = json.loads(json.dumps(row.to_dict(), allow_nan=False))
        assert again == row.to_dict()
        assert {"a", "b", "metric", "difference", "ci95", "p", "p_floor", "p_adjusted", "verdict"} <= set(again)


def test_the_family_is_checked() -> None:
    arms = {str(i): SEEDS for i in range(5)}
    pairs = list(itertools.combinations(arms, 2))
    assert len(stats.compare(arms, pairs[:6], "loss")) == 6
    assert stats.compare(arms, [], "loss") == []
    with pytest.raises(ConfigError, match="7 comparisons: at most 6"):
        stats.compare(arms, pairs[:7], "loss")
    with pytest.raises(ConfigError, match="unknown arm 'bose': did you mean base"):
        stats.compare({"base": SEEDS, "x": SEEDS}, [("bose", "x")], "loss")
    with pytest.raises(ConfigError, match="twice"):
        stats.compare(arms, [("0", "1"), ("1", "0")], "loss")
    with pytest.raises(ConfigError, match="itself"):
        stats.compare(arms, [("0", "0")], "loss")
    with pytest.raises(ConfigError, match="'a' has 1 seeds and 'b' has 2"):
        stats.compare({"a": [1.0], "b": [1.0, 2.0]}, [("a", "b")], "loss")
    with pytest.raises(ConfigError, match="no seeds"):
        stats.compare({"a": [], "b": []}, [("a", "b")], "loss")
    with pytest.raises(ConfigError, match="alpha=5"):
        stats.compare(arms, pairs[:1], "loss", alpha=5)


# --- error rates of the whole procedure -----------------------------------------------------

Noise = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
NOISES: dict[str, Noise] = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "heavy": lambda rng, shape: rng.standard_t(2, size=shape),
    # A run learns the skill or does not: where the t test alone finds too much at 3 seeds.
    "bimodal": lambda rng, shape: rng.integers(2, size=shape) + 0.02 * rng.normal(size=shape),
}


def decided(rng: np.random.Generator, noise: Noise, seeds: int, rates: int, shift: float = 0.0) -> list[bool]:
    """One sweep of four arms on null data (x is `shift` above the rest): which comparisons were decided.

    A seed's effect is shared by all arms; a run's own noise by its selection and report splits.
    """
    shape = (4, rates, seeds)
    run = rng.normal(0.0, 3.0, size=seeds) + noise(rng, shape)
    scale = 0.5 if noise is not NOISES["bimodal"] else 0.01
    selection, report = (run + scale * rng.normal(size=shape) for _ in range(2))
    arms: dict[str, list[stats.Value]] = {}
    for i, name in enumerate(("base", "x", "y", "z")):
        best = stats.best_setting({float(k): selection[i, k].tolist() for k in range(rates)})
        arms[name] = (report[i, int(best.value)] + (shift if name == "x" else 0.0)).tolist()
    return [row.lower is not None for row in stats.compare(arms, BASELINE, "loss")]


@pytest.mark.parametrize(
    ("noise", "seeds", "rates", "sweeps"),
    [
        ("normal", 3, 3, 300),
        ("normal", 5, 3, 300),
        ("normal", 8, 3, 1000),
        ("heavy", 8, 3, 1000),
        ("bimodal", 3, 1, 500),
        ("normal", 8, 1, 2000),
        ("normal", 6, 1, 2000),
        ("bimodal", 6, 1, 2000),
        ("bimodal", 8, 1, 1000),
    ],
)
def test_family_wise_false_positives(noise: str, seeds: int, rates: int, sweeps: int) -> None:
    rng = np.random.default_rng(7)
    rate = np.mean([any(decided(rng, NOISES[noise], seeds, rates)) for _ in range(sweeps)])
    assert rate <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / sweeps)


def test_a_real_difference_is_found_after_selection() -> None:
    rng = np.random.default_rng(8)
    found = np.array([decided(rng, NOISES["normal"], 8, 3, shift=4.0) for _ in range(300)])
    assert found[:, 0].mean() > 0.9
    assert found[:, 1:].any(1).mean() <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 300)


@pytest.mark.parametrize(("effect", "family"), [(2.0, 1), (1.0, 1), (1.0, 3), (1.7, 6)])
def test_seeds_needed_gives_the_power_it_promises(effect: float, family: int) -> None:
    n = stats.seeds_needed(effect, family=family)
    assert n is not None

    def power(n: int) -> float:
        rng, names = np.random.default_rng(9), [f"arm{i}" for i in range(family)]
        found = 0
        for _ in range(800):
            # Null arms that never stand out keep the tested one on Holm's first step.
            arms = {name: [1.0, -1.0] * (n // 2) + [0.0] * (n % 2) for name in names}
            arms |= {"base": [0.0] * n, names[0]: rng.normal(effect, 1.0, size=n).tolist()}
            found += stats.compare(arms, [("base", name) for name in names], "loss")[0].lower == "base"
        return found / 800

    assert power(n) > 0.8 - 0.045
    assert effect > 1.5 or power(n) < 0.8 + 0.045  # a large effect has more: the floor sets n
    assert power(n - 2) < 0.8


def test_seeds_needed_at_the_ends() -> None:
    assert [stats.seeds_needed(100.0, family=m) for m in (1, 2, 3, 4, 6)] == [6, 6, 6, 6, 6]
    assert [stats.seeds_needed(2.0, family=m) for m in (1, 6)] == [6, 7]
    assert stats.seeds_needed(0.0) is None and stats.seeds_needed(0.01) is None
    # The numbers of pairs that G*Power gives for a paired t test, two-sided 0.05, power 0.8.
    assert (stats.seeds_needed(0.5), stats.seeds_needed(0.2)) == (34, 199)


# --- the best setting -----------------------------------------------------------------------


def test_the_lowest_mean_is_chosen_inside_the_range() -> None:
    best = stats.best_setting({3e-3: [2.0, 2.2], 1e-3: [2.5, 2.6], 1e-2: [2.4, 2.3]})
    assert best == stats.Best(3e-3, pytest.approx(2.1), 0, False, None)


@pytest.mark.parametrize(("losses", "way"), [((1.0, 2.0, 3.0), "down"), ((3.0, 2.0, 1.0), "up")])
def test_an_edge_warns_and_says_which_way(losses: tuple[float, ...], way: str) -> None:
    # Given out of order: an edge is one of the sorted values.
    rates = dict(zip((1e-3, 3e-3, 1e-2), ([loss] for loss in losses), strict=True))
    best = stats.best_setting({k: rates[k] for k in (3e-3, 1e-3, 1e-2)})
    end, value = ("smallest", "0.001") if way == "down" else ("largest", "0.01")
    assert best.at_edge
    assert best.warning == f"the best learning_rate={value} is the {end} tried: extend the range {way}wards"


def test_divergence_comes_before_the_mean() -> None:
    assert stats.best_setting({1.0: [3.0, 3.0], 2.0: [2.9, 2.8], 3.0: [None, 0.1]}).value == 2.0
    best = stats.best_setting({1.0: [None, None, 0.1], 2.0: [None, 5.0, 5.0], 3.0: [None, None, None]})
    assert (best.value, best.mean, best.diverged, best.at_edge) == (2.0, 5.0, 1, False)
    assert best.warning == "learning_rate=2 diverged on 1 of 3 seeds"
    none = stats.best_setting({1.0: [None], 2.0: [math.nan]}, name="rope_base")
    assert (none.value, none.mean, none.at_edge) == (1.0, None, True)
    assert none.warning is not None and none.warning.endswith("rope_base=1 diverged on the only seed")


def test_a_single_value_is_no_comparison() -> None:
    best = stats.best_setting({1e-3: [1.0]})
    assert not best.at_edge and best.warning is not None and "only value tried" in best.warning
    for nothing in ({}, {1e-3: []}):
        with pytest.raises(ConfigError, match="no selection losses"):
            stats.best_setting(nothing)


def test_import_is_quick() -> None:
    code = "import sys, experiments.stats; sys.exit('jax' in sys.modules or 'scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
