"""Claims that only training can tell: what is trained for them is kept in the ledger's folder."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from experiments import ask, results
from experiments.claims.record import Caveat, Words
from experiments.interrupt import Stopper
from experiments.stats import Value, best_setting
from experiments.sweep import Outcome, Question, run_sweep
from experiments.workdir import open_workdir, read_json, write_json


def trained(
    question: Question,
    seeds: int,
    folder: Path,
    *,
    chooses: bool = True,
    names: Mapping[str, Words] = MappingProxyType({}),
) -> tuple[dict[str, Any], Outcome]:
    """(results.json of the sweep, its runs). What `folder` holds of it is kept: the same command goes on.

    names: what a reader is told of an arm, where its own name will not do in both languages.
    Warns with a Caveat for each arm whose best rate is an end of the range, or diverged with some seeds, unless no
    arm's best rate is asked for (`chooses`).
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
    if chooses and len(question.learning_rates) > 1:
        for arm in found["arms"]:
            losses = {row["learning_rate"]: row["selection"]["per_seed"] for row in arm["learning_rates"]}
            best_rate(names.get(arm["name"], arm["name"]), losses)
    write_json(folder / "results.json", found)
    return found, outcome


def best_rate(name: str | Words, selection: Mapping[float, Sequence[Value]]) -> float:
    """The rate of `selection` (rate -> losses over seeds) as stats.best_setting chooses; warns with its Caveat."""
    best = best_setting(selection)
    if best.warning:
        who = Words(name, name) if isinstance(name, str) else name
        zh = [f"最佳学习率 {best.value:g} 是所试范围的端点，范围外或许更好"] if best.at_edge else []
        zh += [f"在最佳学习率 {best.value:g} 下有 {best.diverged} 个种子发散"] if best.diverged else []
        warnings.warn(Caveat(Words(f"{who.en}: {best.warning}", f"{who.zh}：{'；'.join(zh)}")), stacklevel=2)
    return best.value


def kept(path: Path, of: Mapping[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `make` gives, a JSON object, kept in the file `path`; read from there if it was made of the same settings.

    of: everything that decides what is made, which the file says under "of".
    """
    held = read_json(path)
    if not held or held["of"] != of:
        path.parent.mkdir(parents=True, exist_ok=True)
        held = {"of": of, **make()}
        write_json(path, held)
    return held


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
