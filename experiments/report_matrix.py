"""What the matrix shows: its picture, its page, its table."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import plots, terminal
from experiments.report import DIVERGED, context_of_run, environment, fixed, image
from experiments.workdir import write_text

if TYPE_CHECKING:
    from rich.console import Console

PICTURE = "matrix.png"
DIGITS = 3


def table(found: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(header, rows): a row for each setting, the loss of each arm as trained, and how far the others are from it."""
    arms = found["arms"]
    rows = []
    for i, setting in enumerate(found["settings"]):
        cells = [arm["metrics"][setting["name"]] for arm in arms]
        means = [(cell if i == 0 else cell["difference"])["mean"] for cell in cells]
        shown = [DIVERGED if mean is None else fixed(mean, DIGITS, sign=i > 0) for mean in means]
        rows.append([setting["name"].replace("_", " "), *shown])
    return ["setting", *(arm["name"] for arm in arms)], rows


def steps(found: Mapping[str, Any]) -> str:
    """The steps that the models were trained for, in words."""
    return "step " + ", ".join(f"{step}" for step in sorted({arm["step"] for arm in found["arms"]}))


def differences(found: Mapping[str, Any]) -> np.ndarray:
    """[settings, arms], the first setting (as trained) left out; NaN where there is none."""
    cells = [
        [arm["metrics"][setting["name"]]["difference"]["mean"] for arm in found["arms"]]
        for setting in found["settings"][1:]
    ]
    return np.array([[np.nan if x is None else x for x in row] for row in cells], np.float64)


def draw(path: Path, found: Mapping[str, Any]) -> None:
    """An annotated heat map: red is worse than as trained, blue better; the colour is full from 1 nat on."""
    values = differences(found)
    settings, arms = values.shape
    names = [setting["name"].replace("_", " ") for setting in found["settings"][1:]]
    with plots.drawing(path, 1.1 + 0.24 * settings) as figure:
        axes = figure.add_subplot()
        # A square root: what is small can be told from 0, what is large still differs.
        axes.imshow(np.sign(values) * np.sqrt(np.abs(values)), cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto")
        size = 8 if arms <= 8 else 6
        for i, j in np.ndindex(values.shape):
            strong = abs(values[i, j]) > 0.4
            text = fixed(float(values[i, j]), 2, sign=True)
            axes.text(j, i, text, ha="center", va="center", fontsize=size, color="white" if strong else "#222222")
        # Lines between the fields that are changed.
        first = [name.rsplit(" ", 1)[0] if not name.startswith("mask") else "mask" for name in names]
        for i in range(1, settings):
            if first[i] != first[i - 1]:
                axes.axhline(i - 0.5, color="white", linewidth=3)
        axes.grid(visible=False)
        axes.tick_params(length=0)
        axes.set_yticks(range(settings), names)
        axes.set_xticks(range(arms), [arm["name"] for arm in found["arms"]], rotation=40, ha="left")
        axes.xaxis.tick_top()
        for spine in axes.spines.values():
            spine.set_visible(False)


def write(folder: Path, found: Mapping[str, Any]) -> Path:
    """matrix.png and report.html, which holds a copy of it; the page's path."""
    draw(folder / PICTURE, found)
    header, rows = table(found)
    shown = {
        "results": found,
        "header": header,
        "rows": rows,
        "steps": steps(found),
        "picture": image(folder / PICTURE),
    }
    page = environment().get_template("matrix.html").render(shown | context_of_run(folder))
    return write_text(folder / "report.html", page)


def show(found: Mapping[str, Any], folder: Path, console: "Console | None" = None) -> None:
    """The table, and where the page is."""
    from rich.text import Text

    console = terminal.console_of(console)
    terminal.say(console)
    terminal.say(console, found["title"], "bold")
    of = f"{found['restored']}, {steps(found)}"
    terminal.say(console, f"{of}, mean over {found['seeds']} seeds, {found['unit']}", "dim")
    for note in found["notes"]:
        console.print(Text(note), soft_wrap=True)
    terminal.say(console)
    terminal.table(console, *table(found))
    terminal.say(console)
    console.print(Text(f"Report: {folder / 'report.html'}"), soft_wrap=True)
