"""What the models of a sweep on pairs write: error rates by seed, of an arm's seeds together, and compared."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import evaluating, report, results, stats, terminal, trained
from experiments.grid import Arm
from experiments.sections import Section
from experiments.translating import Translator
from transformer_jax.data import Task
from transformer_jax.data.metrics import METRICS

if TYPE_CHECKING:
    from rich.console import Console

SHORT = 2  # metrics that fit a terminal of 80 columns


def writer(arm: Arm, task: Task) -> tuple[Translator, evaluating.Pairs]:
    """(how the models of a resolved arm write, what they are asked).

    Raises DataError where a metric's package is missing, ConfigError for an unknown metric.
    """
    assert task.text is not None
    translator = Translator((), arm.config, arm.hyper, task.text.tokenizers)
    evaluating.metrics_of(translator)
    return translator, task.text.pairs["report"]


def judge(
    arms: Sequence[Arm],
    tasks: Sequence[Task],
    pairs: Sequence[tuple[str, str]],
    found: Mapping[str, Any],
    folder: Path,
) -> dict[str, Any]:
    """The part `written` of results.json: each arm's metrics by seed and of its seeds as an ensemble; and what differs.

    The metric to choose by is compared, arm against arm, in one family: the pairs that were named before the run.
    """
    rows = []
    for arm, task, of in zip(arms, tasks, trained.arms(folder, found), strict=True):
        translator, asked = writer(arm, task)
        print(
            f"{arm.name}: {report.plural(len(of.sound), 'model')} to write {report.plural(len(asked), 'source')}",
            file=sys.stderr,
        )
        score = evaluating.judge(translator, asked)
        by_seed = [score(of.sound[seed].params) if seed in of.sound else None for seed in range(len(of.models))]
        together = score(*(model.params for model in of.sound.values())) if len(of.sound) > 1 else {}
        metrics = {
            name: results.summarise([None if one is None else one[name] for one in by_seed])
            | {"ensemble": together.get(name)}
            for name in evaluating.metrics_of(translator)
        }
        rows.append({"name": arm.name, "items": len(asked), "models": len(of.sound), "metrics": metrics})
    shared = [name for name in rows[0]["metrics"] if all(name in row["metrics"] for row in rows)]
    compared = []
    if pairs and shared:
        values = {row["name"]: row["metrics"][shared[0]]["per_seed"] for row in rows}
        compared = [_judged(row, shared[0]) for row in stats.compare(values, pairs, shared[0])]
    return {"arms": rows, "metrics": shared, "comparisons": compared}


def _judged(row: stats.Comparison, metric: str) -> dict[str, Any]:
    """A comparison whose verdict says which is better, whatever way the metric points."""
    out = row.to_dict() | {"better": None}
    if row.lower is not None:
        out["better"] = row.lower if METRICS[metric].lower else next(x for x in (row.a, row.b) if x != row.lower)
        out["verdict"] = row.verdict.replace(f"{row.lower} lower", f"{out['better']} better")
    return out


def table(found: Mapping[str, Any], most: int | None = None) -> tuple[tuple[str, ...], list[list[str]]]:
    """(header, rows): mean and half its 95% interval of the first `most` metrics, and the ensemble's first."""
    names, rows = found["metrics"][:most], []
    for arm in found["arms"]:
        cells = []
        for name in names:
            of = arm["metrics"][name]
            half = report.half_width(of["ci95"])
            cells.append(report.fixed(of["mean"], 2) + ("" if half is None else f" ± {report.fixed(half, 2)}"))
        together = (report.fixed(arm["metrics"][name]["ensemble"], 2) for name in names[:1])
        rows.append([arm["name"], f"{arm['items']:,}", *cells, *together, f"{arm['models']:,}"])
    labels = [METRICS[name].label for name in names]
    labels = [label.split(" (")[0] for label in labels] if most else labels
    return ("arm", "sources", *labels, *(["ensemble"] if names else []), "of"), rows


def comparisons(found: Mapping[str, Any]) -> tuple[tuple[str, ...], list[list[str]]]:
    """(header, rows) of the comparisons of the first metric."""
    rows = [
        [
            f"{row['a']} − {row['b']}",
            report.fixed(row["difference"], 2, sign=True),
            report.interval(row["ci95"], 2, sign=True),
            report.probability(row["p_adjusted"]),
            row["verdict"],
        ]
        for row in found["comparisons"]
    ]
    return ("comparison", "difference", "95% interval", "adjusted p", "verdict"), rows


def sections(found: Mapping[str, Any]) -> list[Section]:
    """The parts of the report. found: what `judge` gave."""
    text = (
        "Each model at its arm's best rate (by loss) wrote the sources of the reported split, greedily. Mean over "
        "seeds with half its 95% interval, which is of seeds alone: other sources would differ too. The ensemble is of "
        "so many seeds of the arm as did not diverge; the next id's probability is the mean of theirs."
    )
    parts = [Section("What they write", text, *table(found))]
    if found["comparisons"]:
        label = METRICS[found["metrics"][0]].label
        text = "Paired by seed; a family of its own beside that of the losses."
        parts.append(Section(f"What they write, compared: {label}", text, *comparisons(found)))
    return parts


def show(found: Mapping[str, Any], console: "Console | None" = None) -> None:
    """Print what `judge` gave."""
    console = terminal.console_of(console)
    terminal.say(console)
    terminal.table(console, *table(found, SHORT))
    if found["comparisons"]:
        terminal.say(console)
        terminal.table(console, *comparisons(found))
