"""Two arms with the same seeds, judged: which one is lower, and how sure that is."""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments import stats
from experiments.claims.record import Numbers, Words, at_most, shown

ALPHA = 0.05


def per_seed(arm: Mapping[str, Any], metric: str) -> list[float | None]:
    """An arm's values of a metric by seed, at its own best rate; None where it diverged."""
    return list(arm["metrics"][metric]["per_seed"])


def lower(
    name: str, label: Words, a: Sequence[float | None], b: Sequence[float | None], dtype: str = "float32"
) -> Numbers:
    """a is below b: the upper end of the 95% interval of a - b is below 0, and so is p below 0.05 (see stats.compare).

    a, b: values by seed. Seeds of which one diverged are left out; with none left nothing holds.
    """
    row = stats.compare({"a": a, "b": b}, [("a", "b")], name)[0]
    nan = float("nan")
    yield shown(f"{name}_difference", label, nan if row.difference is None else row.difference, dtype)
    end = Words(f"{label.en}, upper end of the 95% interval", f"{label.zh}，95% 置信区间上端")
    yield at_most(f"{name}_upper", end, nan if row.ci95 is None else row.ci95[1], 0.0, dtype)
    p = Words(f"{label.en}, p", f"{label.zh}，p 值")
    yield at_most(f"{name}_p", p, nan if row.p_adjusted is None else row.p_adjusted, ALPHA, dtype)
