"""What `observe` measured, as parts of a report: attention before, after and over training."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.sections import Section

Arms = Sequence[dict[str, Any]]  # of results.json


def at_mark(arm: dict[str, Any], name: str, mark: int = 0, layer: int | None = None) -> float:
    """A measurement at a mark (0 first, -1 last), of a layer or the mean of the layers."""
    row = [np.nan if x is None else x for x in arm["observed"][name][mark]]
    return float(np.mean(row) if layer is None else row[layer])


def before_and_after(arms: Arms) -> Section:
    """Variance of the scores, entropy of attention and its largest weight, at the first and the last mark."""
    names = ("score_variance", "attention_entropy", "attention_max")
    rows = [[arm["name"], *(f"{at_mark(arm, name, m):.3g}" for name in names for m in (0, -1))] for arm in arms]
    return Section(
        "What attention looks like, before and after training",
        "Variance of the scores over visible pairs, entropy of the attention rows in nats, and the largest weight of a "
        "row; means over layers and seeds, each arm at its best learning rate.",
        ("arm", "var, first", "var, last", "entropy, first", "entropy, last", "largest, first", "largest, last"),
        rows,
    )


def over_training(arms: Arms, name: str, section: Section, log: bool = False) -> Section:
    """`section` with a picture of a measurement over the steps, a line for each arm and layer."""
    marks = arms[0]["observed"]["marks"]
    series = {
        f"{arm['name']}, layer {layer + 1}": [at_mark(arm, name, m, layer) for m in range(len(marks))]
        for arm in arms
        for layer in range(len(arm["observed"][name][0]))
    }

    def draw(path: Path) -> None:
        from experiments.plots import lines

        lines(path, marks, series, x_label="step", y_label=name.replace("_", " "), log_y=log)

    return dataclasses.replace(section, figure=(f"{name}.png", draw))
