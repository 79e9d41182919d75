"""Claims that only training can tell: a sweep with the project's own statistics, in the ledger's folder."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import ask, results
from experiments.interrupt import Stopper
from experiments.sweep import Outcome, Question, run_sweep
from experiments.workdir import open_workdir, write_json


def trained(question: Question, seeds: int, folder: Path) -> tuple[dict[str, Any], Outcome]:
    """(results.json of the sweep, its runs). What `folder` holds of it is kept: the same command goes on.

    Raises KeyboardInterrupt where the sweep is interrupted, after saving; WorkdirError if the folder holds another.
    """
    question = ask.resolved(question)
    steps = question.arms[0].config.steps
    free = {"seeds": seeds, "steps": steps}
    open_workdir(str(folder), ask.identity(question), free, grows=ask.growth(question, seeds))
    with Stopper() as stop:
        outcome = run_sweep(question, seeds, folder, blocks=[(0, seeds)], stop=stop)
    if outcome.stopped:
        raise KeyboardInterrupt(outcome.stopped)
    found = results.build(outcome)
    for arm in found["arms"]:
        if arm["warning"]:
            print(f"{question.name}, {arm['name']}: {arm['warning']}", file=sys.stderr)
    write_json(folder / "results.json", found)
    return found, outcome


def arms(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The arms of results.json by their names."""
    return {arm["name"]: arm for arm in found["arms"]}


def mean(arm: Mapping[str, Any], metric: str) -> float:
    """An arm's mean of a metric over seeds, at its own best rate; NaN where all of them diverged."""
    value = arm["metrics"][metric]["mean"]
    return float("nan") if value is None else float(value)


def compared(found: Mapping[str, Any], a: str, b: str) -> dict[str, Any]:
    """The comparison a - b: difference, ci95, p, p_adjusted and verdict, as experiments.stats says."""
    return next(row for row in found["comparisons"] if (row["a"], row["b"]) == (a, b))
