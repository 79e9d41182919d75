"""Two arms with the same seeds, judged: which one is lower, and how sure that is."""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments import stats
from experiments.claims.record import Numbers, Words, at_most, shown
from experiments.claims.training import compared

ALPHA = 0.05
NAN = float("nan")


def per_seed(arm: Mapping[str, Any], metric: str) -> list[float | None]:
    """An arm's values of a metric by seed, at its own best rate; None where it diverged."""
    return list(arm["metrics"][metric]["per_seed"])


def lower(name: str, label: Words, a: Sequence[float | None], b: Sequence[float | None]) -> Numbers:
    """a is below b: values by seed, judged as `lower_arm` judges those of a sweep.

    Seeds of which one diverged are left out; with none left nothing holds.
    """
    return _judged(name, label, stats.compare({"a": a, "b": b}, [("a", "b")], name)[0].to_dict())


def lower_arm(name: str, label: Words, found: Mapping[str, Any], a: str, b: str) -> Numbers:
    """Arm a ends below arm b in a sweep's results.json, which compares them.

    The upper end of the 95% interval of a - b is below 0, and so is the adjusted p below 0.05 (see experiments.stats).
    """
    return _judged(name, label, compared(found, a, b))


def _judged(name: str, label: Words, row: Mapping[str, Any]) -> Numbers:
    if row["p_floor"] is not None and row["p_floor"] > ALPHA:
        raise ValueError(f"{label.en}: no p of so few pairs is below {ALPHA}: at least {row['p_floor']}")
    end = Words(f"{label.en}, upper end of the 95% interval", f"{label.zh}，95% 置信区间上端")
    yield at_most(f"{name}_upper", end, NAN if row["ci95"] is None else row["ci95"][1], 0.0, "float32")
    p = Words(f"{label.en}, p", f"{label.zh}，p 值")
    yield at_most(f"{name}_p", p, NAN if row["p_adjusted"] is None else row["p_adjusted"], ALPHA, "float32")
    yield shown(f"{name}_mean", label, NAN if row["difference"] is None else row["difference"], "float32")
