"""`evaluate` for a model of pairs: which pairs, their loss, what is written for them, and the files that say so."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import ensembles, evaluating, report_pairs, restoring
from experiments.ensembles import Loaded
from experiments.evaluating import Evaluated
from experiments.flags import Settings
from experiments.heads import heads_of
from experiments.report import duration, plural
from experiments.workdir import open_workdir
from transformer_jax.config import Config
from transformer_jax.data import SPLITS, Task, Tokenizers, evaluation_task, make_task
from transformer_jax.data.metrics import METRICS
from transformer_jax.data.pairs_task import PAIR_TASKS
from transformer_jax.errors import ConfigError

FLAGS = ("workdir", "show", *ensembles.FLAGS)
NAMES = {"selection": "dev", "report": "test"}  # the splits of a run, as its flags name them


def task_of(restore: str) -> str:
    """The task that the (first) model that --restore names was trained on."""
    return restoring.saved_configuration(ensembles.restores(restore)[0])[0].task


def of_pairs(restore: str) -> bool:
    """Whether the (first) model that --restore names was trained on pairs."""
    return task_of(restore) in PAIR_TASKS


def splits_of(
    config: Config, tokenizers: Tokenizers, given: Mapping[str, str], strict: bool
) -> dict[str, tuple[Task, str]]:
    """name -> (a task, its split): the files of --pairs, --dev and --test, or without them the run's own dev and test.

    The training side is read only where dev is a part of it.
    """
    files = dict(given)
    if not files and config.task == "pairs" and config.dev:
        files = {name: path for name, path in (("dev", config.dev), ("test", config.test)) if path}
    if files:
        tasks = {
            name: evaluation_task(config, tokenizers, path, option=f"--{name}", strict=strict)
            for name, path in files.items()
        }
        return {Path(files[name]).name if name == "pairs" else name: (task, "report") for name, task in tasks.items()}
    task = make_task(config, tokenizers, strict)
    assert task.text is not None
    same = task.text.pairs["selection"] is task.text.pairs["report"]  # no --test: dev alone
    return {NAMES[split]: (task, split) for split in (SPLITS[:1] if same else SPLITS)}


def run(settings: Settings) -> int:
    """Evaluate, print the table, and write outputs.tsv, results.json and report.html."""
    if settings.mesh:
        raise ConfigError("--mesh has no effect on the evaluation of pairs: leave it out")
    own = task_of(settings.restore)
    if settings.overrides.get("task", own) != own:
        raise ConfigError(
            f"--task={settings.overrides['task']}: {settings.restore} is a model of task {own}; give it other pairs by "
            "--pairs, --dev or --test"
        )
    begun = time.monotonic()
    loaded = ensembles.load(settings)
    translator = loaded.translator
    evaluating.metrics_of(translator)
    given = {name: settings.overrides[name] for name in ("pairs", "dev", "test") if settings.overrides.get(name)}
    splits = splits_of(translator.config, translator.tokenizers, given, settings.strict)
    workdir = open_workdir(
        settings.workdir or str(Path(loaded.names[0]) / folder_name(settings, loaded, given)),
        {"experiment": "evaluate"},
        {"restore": settings.restore, "steps": loaded.steps, **given},
    )
    notes, measured = [*loaded.notes], {}
    evaluated: dict[str, Evaluated] = {}
    for name, (task, split) in splits.items():
        assert task.text is not None
        notes += [note for note in task.text.notes if note not in notes]
        evaluated[name] = evaluating.evaluate_pairs(translator, task.text.pairs[split], settings.strict)
        measured[name] = _numbers(loaded, task, split, evaluated[name])
    pieces = _pieces(loaded, evaluated, settings.show)
    results = {
        "experiment": "evaluate",
        "title": f"{settings.restore}: what it writes",
        "models": loaded.names,
        "steps": loaded.steps,
        "search": {
            "beam": translator.beam, "penalty": translator.penalty.kind, "length_penalty": translator.penalty.alpha,
            "average": settings.average,
        },
        "facts": _facts(loaded, settings, time.monotonic() - begun),
        "notes": notes,
        "splits": measured,
        "wall_seconds": time.monotonic() - begun,
    }  # fmt: skip
    report_pairs.write_outputs(workdir.path / "outputs.tsv", evaluated)
    report_pairs.write(workdir.path, results, evaluated, evaluating.unit_of(translator), pieces)
    workdir.write("results.json", results)
    report_pairs.show(results, workdir.path)
    return 0


def folder_name(settings: Settings, loaded: Loaded, given: Mapping[str, str]) -> str:
    """The name of the evaluation's own folder: another file, search or step does not write over it."""
    penalty = loaded.translator.penalty
    said = {"beam": loaded.translator.beam, "average": settings.average, "step": settings.restore_step}
    said |= {"penalty": f"{penalty.kind}-{penalty.alpha:g}"}
    usual = {"beam": 1, "average": 0, "step": "", "penalty": "power-1"}
    words = [Path(part).name.split(".")[0] for path in given.values() for part in path.split(",")[:1]]
    words += [f"{name}-{value}" for name, value in said.items() if value != usual[name]]
    words += [f"of-{len(loaded.names)}"] if len(loaded.names) > 1 else []
    return "-".join(["evaluation", *words])


def _numbers(loaded: Loaded, task: Task, split: str, found: Evaluated) -> dict[str, Any]:
    """A split's part of results.json. An ensemble has no loss of its own: its probabilities are no one model's."""
    from experiments import loop

    loss: dict[str, Any] = {"loss": None, "perplexity": None, "tokens": None}
    if len(loaded.names) == 1:
        translator = loaded.translator
        hyper = loop.device_hyper(translator.hyper)
        sums = loop.measure(translator.config, task, split)(translator.models[0], hyper, task.data)
        about = loop.describe(sums, task)
        loss = {"loss": about["loss"], "perplexity": about["perplexity"], "tokens": int(sums.count)}
    scores = {
        name: {"value": score.value, "signature": score.signature, "lower_is_better": METRICS[name].lower}
        for name, score in found.scores.items()
    }
    return {"items": len(found.items), **loss, "metrics": scores, "data": task.sha256}


def _pieces(loaded: Loaded, evaluated: Mapping[str, Evaluated], show: str) -> dict[str, Any]:
    """The pairs of the last split, with their heads."""
    name = list(evaluated)[-1]
    items = evaluating.chosen(evaluated[name].items, show)
    return {name: list(zip(items, heads_of(loaded.translator, items), strict=True))}


def _facts(loaded: Loaded, settings: Settings, seconds: float) -> list[str]:
    translator = loaded.translator
    search = f"beam {translator.beam}" if translator.beam > 1 else "greedy"
    if translator.beam > 1:
        search += f", {translator.penalty.kind} length penalty {translator.penalty.alpha:g}"
    return [
        plural(len(loaded.names), "model"),
        "step " + ", ".join(map(str, loaded.steps)),
        *([f"mean of {settings.average} checkpoints"] if settings.average else []),
        search,
        duration(seconds),
    ]
