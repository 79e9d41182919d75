"""Two arms with the same seeds, judged: which one is lower, and how sure that is."""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments import stats
from experiments.claims.record import Numbers, Words, at_most, shown
from experiments.claims.training import compared

ALPHA = 0.05
NAN = float("nan")
LOWER = Words("lower end of the 95% interval", "95% 置信区间下端")
UPPER = Words("upper end of the 95% interval", "95% 置信区间上端")


def per_seed(arm: Mapping[str, Any], metric: str) -> list[float | None]:
    """An arm's values of a metric by seed, at its own best rate; None where it diverged."""
    return list(arm["metrics"][metric]["per_seed"])


def lower(name: str, label: Words, a: Sequence[float | None], b: Sequence[float | None]) -> Numbers:
    """a is below b: values by seed, judged as `lower_arm` judges those of a sweep.

    Seeds of which one diverged are left out; with none left nothing holds.
    """
    return _judged(name, label, stats.compare({"a": a, "b": b}, [("a", "b")], name)[0].to_dict())


def lower_arm(name: str, label: Words, found: Mapping[str, Any], a: str, b: str) -> Numbers:
    """Arm a ends below arm b in a sweep's results.json, which compares them, in either order.

    The upper end of the 95% interval of a - b is below 0, and so is the adjusted p below 0.05 (see experiments.stats).
    """
    return _judged(name, label, paired(found, a, b))


def apart(name: str, label: Words, row: Mapping[str, Any]) -> Numbers:
    """A comparison that is not judged: its mean, the ends of its 95% interval and its adjusted p."""
    low, high = row["ci95"] or (NAN, NAN)
    p = NAN if row["p_adjusted"] is None else row["p_adjusted"]
    mean = NAN if row["difference"] is None else row["difference"]
    yield shown(f"{name}_mean", label, mean, "float32")
    for end, value, text in (("low", low, LOWER), ("high", high, UPPER)):
        yield shown(f"{name}_{end}", Words(f"{label.en}, {text.en}", f"{label.zh}，{text.zh}"), value, "float32")
    yield shown(f"{name}_p", Words(f"{label.en}, p", f"{label.zh}，p 值"), p, "float32")


def paired(found: Mapping[str, Any], a: str, b: str) -> dict[str, Any]:
    """The comparison a - b of results.json; that of b - a turned round where it is the one that was asked for."""
    if any((row["a"], row["b"]) == (a, b) for row in found["comparisons"]):
        return compared(found, a, b)
    row = compared(found, b, a)
    turned = {"difference": None if row["difference"] is None else -row["difference"]}
    turned["ci95"] = None if row["ci95"] is None else [-end for end in reversed(row["ci95"])]
    return row | turned | {"a": a, "b": b, "diverged_a": row["diverged_b"], "diverged_b": row["diverged_a"]}


def _judged(name: str, label: Words, row: Mapping[str, Any]) -> Numbers:
    if row["p_floor"] is not None and row["p_floor"] > ALPHA:
        raise ValueError(f"{label.en}: no p of so few pairs is below {ALPHA}: at least {row['p_floor']}")
    low, high = row["ci95"] or (NAN, NAN)
    end = Words(f"{label.en}, {UPPER.en}", f"{label.zh}，{UPPER.zh}")
    yield at_most(f"{name}_upper", end, high, 0.0, "float32")
    p = Words(f"{label.en}, p", f"{label.zh}，p 值")
    yield at_most(f"{name}_p", p, NAN if row["p_adjusted"] is None else row["p_adjusted"], ALPHA, "float32")
    yield shown(f"{name}_mean", label, NAN if row["difference"] is None else row["difference"], "float32")
    yield shown(f"{name}_lower", Words(f"{label.en}, {LOWER.en}", f"{label.zh}，{LOWER.zh}"), low, "float32")
