"""Pictures of the temperature question: samples against T, reliability curves, dH/dT three ways."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import plots

FAINT = 0.005  # of all tokens: a bin with fewer is left out of a curve
GREY = "#444444"


def _band(axes: Any, x: np.ndarray, found: Sequence[Mapping[str, Any]], i: int, label: str = "") -> None:
    """A line with its 95% intervals; found: {"mean", "ci95"} at each x, a mean of None is a gap."""
    mean = np.array([np.nan if row["mean"] is None else row["mean"] for row in found])
    ends = np.array([row["ci95"] or (m, m) for row, m in zip(found, mean, strict=True)])
    axes.plot(x, mean, color=plots.colour(i), marker=plots.marker(i), markersize=3.2, label=label)
    axes.fill_between(x, ends[:, 0], ends[:, 1], color=plots.colour(i), alpha=0.2, linewidth=0)


def sampling(path: Path, temperatures: Sequence[float], rows: Sequence[Mapping[str, Any]], floor: float) -> None:
    """Entropy, diversity, repetition and likelihood against T. rows: metrics by name at each temperature."""
    x = np.asarray(temperatures)

    def column(name: str) -> list[Mapping[str, Any]]:
        return [row[name] for row in rows]

    with plots.drawing(path, 5.0) as figure:
        ((first, second), (third, fourth)) = figure.subplots(2, 2)
        _band(first, x, column("entropy"), 0)
        first.set_ylabel("entropy, nats")
        for i, n in enumerate((1, 2, 3)):
            _band(second, x, column(f"distinct_{n}"), i, f"n = {n}")
        second.set_ylabel("distinct n-grams of a sample")
        second.legend(loc="upper left", fontsize=8)
        _band(third, x, column("repetition_4"), 0)
        third.set_ylabel("4-grams that stood before")
        _band(fourth, x, column("generator_nats"), 0)
        fourth.set_ylabel("−ln p of the chain, nats/token")
        for axes in (first, fourth):
            axes.axhline(floor, color=GREY, linestyle="--", linewidth=1, label="entropy rate of the chain")
            axes.legend(loc="upper left", fontsize=8)
        for axes in (first, second, third, fourth):
            low, high = axes.get_ylim()
            axes.set_ylim(min(low, 0.0) if low < 0.3 * high else low, high + 0.12 * (high - low))
        for axes in (third, fourth):
            axes.set_xlabel("sampling temperature")


def calibration(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Reliability curves, one for each temperature, above the expected calibration error against T.

    rows: {"temperature", "ece", "bins": [{"count", "confidence", "accuracy"}]}; marks are as large as their bins.
    """
    names = [f"T = {row['temperature']:g}" for row in rows]
    with plots.drawing(path, 6.6) as figure:
        curves, below = figure.subplots(2, 1, height_ratios=(2.4, 1))
        curves.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1)
        for i, row in enumerate(rows):
            total = sum(b["count"] for b in row["bins"])
            shown = [b for b in row["bins"] if b["count"] > FAINT * total]
            x, y = ([b[name] for b in shown] for name in ("confidence", "accuracy"))
            curves.plot(x, y, color=plots.colour(i), linewidth=2.2 if row["temperature"] == 1 else 1.0)
            curves.scatter(x, y, [4 + 60 * b["count"] / total for b in shown], color=plots.colour(i), zorder=3)
        curves.set_xlim(0, 1.03)
        curves.set_ylim(0, 1.03)
        curves.set_xlabel("confidence: the largest probability")
        curves.set_ylabel("accuracy")
        _band(below, np.array([row["temperature"] for row in rows]), [row["ece"] for row in rows], 0)
        below.set_ylim(bottom=0)
        below.set_xlabel("temperature")
        below.set_ylabel("calibration error")
        handles = [plots.line(color=plots.colour(i), marker="o", markersize=4) for i in range(len(rows))]
        plots.legend(figure, handles, names, "upper center")


def slopes(path: Path, found: Mapping[str, Any]) -> None:
    """dH/dT by the formula, by JAX and by differences, one upon the other; below, how far the others lie from it."""
    T = np.asarray(found["temperatures"])
    formula, autodiff, differences = (np.asarray(found[name]) for name in ("formula", "autodiff", "differences"))
    with plots.drawing(path, 4.6) as figure:
        above, below = figure.subplots(2, 1, height_ratios=(1.7, 1), sharex=True)
        above.plot(T, formula, color="#9ecae1", linewidth=6, label="Var(z)/T³", solid_capstyle="round")
        above.plot(T, autodiff, color=plots.colour(1), linewidth=1.5, label="automatic derivative")
        above.plot(T, differences, "k.", markersize=4, label="central differences")
        above.set_ylabel("dH/dT, nats per unit of T")
        above.set_ylim(bottom=0)
        above.legend(loc="upper right")
        for other, style in ((autodiff, {"color": plots.colour(1)}), (differences, {"color": "black"})):
            gap = np.abs(other - formula)
            below.plot(T, np.where(gap > 0, gap, np.nan), ".", markersize=4, **style)  # 0 has no place on a log axis
        below.set_yscale("log")
        below.set_ylabel("distance to it")
        below.set_xlabel("temperature T")
