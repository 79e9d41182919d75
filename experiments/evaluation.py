"""`evaluate` for a model of pairs: which pairs, their loss, what is written for them, and the files that say so."""

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import ensembles, evaluating, plots_pairs, report_pairs, restoring
from experiments.ensembles import Loaded
from experiments.evaluating import Evaluated, Item
from experiments.flags import Settings
from experiments.heads import heads_of, most_tokens
from experiments.report import duration, plural
from experiments.translating import cut
from experiments.workdir import open_workdir
from transformer_jax.config import Config, to_dict
from transformer_jax.data import SPLITS, Task, Tokenizers, evaluation_task, make_task
from transformer_jax.data.metrics import METRICS
from transformer_jax.data.pairs import files_of
from transformer_jax.data.pairs_task import PAIR_TASKS
from transformer_jax.errors import ConfigError

FLAGS = ("workdir", "show", *ensembles.FLAGS)
NAMES = {"selection": "dev", "report": "test"}  # the splits of a run, as its flags name them


def task_of(restore: str) -> str:
    """The task that the (first) model that --restore names was trained on."""
    return restoring.saved_task(ensembles.restores(restore)[0])


def of_pairs(restore: str) -> bool:
    """Whether the (first) model that --restore names was trained on pairs."""
    return task_of(restore) in PAIR_TASKS


def splits_of(
    config: Config, tokenizers: Tokenizers, given: Mapping[str, str], strict: bool
) -> dict[str, tuple[Task, str]]:
    """name -> (a task, its split): the files of --pairs, --dev and --test, or without them the run's own dev and test.

    A file of --pairs goes by its own name, or where that is dev or test by "pairs". The training side is read only
    where dev is a part of it.
    """
    files = dict(given)
    if not files and config.task == "pairs" and config.dev:
        files = {name: path for name, path in (("dev", config.dev), ("test", config.test)) if path}
    if files:
        tasks = {
            name: evaluation_task(config, tokenizers, path, option=f"--{name}", strict=strict)
            for name, path in files.items()
        }
        called = {name: name for name in files}
        if "pairs" in files and (own := Path(files["pairs"]).name) not in NAMES.values():
            called["pairs"] = own
        return {called[name]: (task, "report") for name, task in tasks.items()}
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
    # The loss is of the pairs that fit the rows of every model, as what is written is.
    rows = translator.config.replace(seq_len=min(config.seq_len for config, _ in translator.settings))
    splits = splits_of(rows, translator.tokenizers, given, settings.strict)
    asked = evaluating.named(settings.show, [source for part in splits.values() for source, _ in _pairs(*part)])
    workdir = open_workdir(
        settings.workdir or str(Path(loaded.folder) / folder_name(settings, loaded, given)),
        {"experiment": "evaluate"},
        {"restore": settings.restore, "arm": settings.arm, "steps": loaded.steps, **given},
    )
    notes, measured = [*loaded.notes], {}
    evaluated: dict[str, Evaluated] = {}
    for name, (task, split) in splits.items():
        assert task.text is not None
        notes += [note for note in task.text.notes if note not in notes]
        evaluated[name] = evaluating.evaluate_pairs(translator, _pairs(task, split), settings.strict)
        measured[name] = _numbers(loaded, task, split, evaluated[name])
        if unended := sum(cut(item.ids) for item in evaluated[name].items):
            notes.append(f"{name}: {unended:,} of {len(evaluated[name].items):,} outputs were cut off without an end")
    shown, said = _shown(loaded, evaluated, asked)
    notes += said
    results = {
        "experiment": "evaluate",
        "title": f"{settings.restore}{f', {settings.arm}' if settings.arm else ''}: what it writes",
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
    # What took long is written before anything is drawn.
    report_pairs.write_outputs(workdir.path / "outputs.tsv", evaluated)
    workdir.write("results.json", results)
    pieces = {name: list(zip(items, heads_of(translator, items), strict=True)) for name, items in shown.items()}
    report_pairs.write(workdir.path, results, evaluated, evaluating.unit_of(translator), pieces)
    report_pairs.show(results, workdir.path)
    return 0


def folder_name(settings: Settings, loaded: Loaded, given: Mapping[str, str]) -> str:
    """The name of the evaluation's own folder: nothing else that is asked for writes over it.

    Words say the search and the step. Files, further models and changed settings have no short name that is
    theirs alone: a digest of them ends the name.
    """
    penalty, names = loaded.translator.penalty, loaded.names
    alpha = f"{penalty.alpha:g}" if float(f"{penalty.alpha:g}") == penalty.alpha else repr(penalty.alpha)
    said = {"beam": loaded.translator.beam, "average": settings.average, "step": settings.restore_step}
    said |= {"penalty": f"{penalty.kind}-{alpha}"}
    usual = {"beam": 1, "average": 0, "step": "", "penalty": "power-1"}
    words = [Path(part).name.split(".")[0] for path in given.values() for part in path.split(",")[:1]]
    words += [f"{name}-{value}" for name, value in said.items() if value != usual[name]]
    words += [f"of-{len(names)}"] if len(names) > 1 else []
    own = {name: value for part in loaded.saved for name, value in to_dict(part).items()}
    changed = {name: value for name, value in settings.overrides.items() if name not in ensembles.DATA}
    more: dict[str, Any] = {name: value for name, value in changed.items() if value != own[name]}
    more |= {name: [os.path.abspath(file) for file in files_of(path)] for name, path in given.items()}
    whole = len(names) == 1 and names[0] == loaded.folder
    more |= {} if whole else {"models": [os.path.abspath(name) for name in names]}
    if more:
        words.append(hashlib.sha256(json.dumps(more, sort_keys=True).encode()).hexdigest()[:8])
    return "-".join(["evaluation", *words])


def _numbers(loaded: Loaded, task: Task, split: str, found: Evaluated) -> dict[str, Any]:
    """A split's part of results.json."""
    from experiments import loop

    translator = loaded.translator
    if len(translator.models) == 1:
        hyper = loop.device_hyper(translator.hyper)
        sums = loop.measure(translator.config, task, split)(translator.models[0], hyper, task.data)
    else:
        sums = loop.measure_mixture(translator.settings, translator.models, task, split)
    about = loop.describe(sums, task)
    loss = {"loss": about["loss"], "perplexity": about["perplexity"], "tokens": int(sums.count)}
    scores = {
        name: {"value": score.value, "signature": score.signature, "lower_is_better": METRICS[name].lower}
        for name, score in found.scores.items()
    }
    return {"items": len(found.items), **loss, "metrics": scores, "data": task.sha256}


def _pairs(task: Task, split: str) -> list[tuple[str, list[str]]]:
    assert task.text is not None
    return task.text.pairs[split]


def _shown(
    loaded: Loaded, evaluated: Mapping[str, Evaluated], asked: Sequence[str]
) -> tuple[dict[str, list[Item]], list[str]]:
    """(the pairs of each split whose attention is drawn, lines for those that cannot be).

    asked: the sources that are wanted, each drawn where it is; none: some of the last split.
    """
    config, notes = loaded.translator.config, []

    def fits(item: Item) -> bool:
        layers = max(config.L, config.encoder_layers)
        return plots_pairs.can_draw(layers, config.N, most_tokens(config, item))

    if not asked:
        name = list(evaluated)[-1]
        return {name: evaluating.telling([item for item in evaluated[name].items if fits(item)])}, notes
    found = {name: evaluating.of_sources(part.items, asked) for name, part in evaluated.items()}
    for item in (item for items in found.values() for item in items):
        why = "" if fits(item) else "too many for a picture of its attention"
        why = why if item.ids else "nothing was written for it, and there is no attention to draw"
        notes += [f"--show={item.source[:40]!r}, {plural(item.length, 'token')}: {why}"] if why else []
    return {name: [item for item in items if item.ids and fits(item)] for name, items in found.items()}, notes


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
