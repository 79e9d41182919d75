"""From a question to an answer: plan, workdir, sweep, statistics, files, table."""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments import trained
from experiments.flags import Settings
from experiments.interrupt import Stopper
from experiments.program import check, check_measured
from experiments.sections import Section
from experiments.sweep import Outcome, Question, plan, run_sweep
from experiments.workdir import Workdir, WorkdirError, open_workdir, read_json, write_text
from transformer_jax.config import to_dict
from transformer_jax.data import make_task, resolve
from transformer_jax.errors import ConfigError

FLAGS = ("seeds", "workdir", "minutes", "checkpoint_every", "overwrite", "plan", "sweep", "preset", "depth", "mesh")
MAX_SEEDS = 1000

Sections = Callable[[Outcome, dict[str, Any]], list[Section]]
# What is measured once, on the trained models of a finished sweep: (outcome, results, workdir) -> more of results.json.
Afterwards = Callable[[Outcome, dict[str, Any], Path], dict[str, Any]]


def no_sections(outcome: Outcome, results: dict[str, Any]) -> list[Section]:
    """For a question whose report needs no parts of its own."""
    return []


def nothing_more(outcome: Outcome, results: dict[str, Any], folder: Path) -> dict[str, Any]:
    """For a question whose models need no look after training."""
    return {}


def run(
    settings: Settings,
    question: Question,
    default_seeds: int,
    sections: Sections = no_sections,
    afterwards: Afterwards = nothing_more,
) -> int:
    """Ask `question` as `settings` say; the exit code. A finished run reprints its result."""
    from transformer_jax import sharding

    seeds = settings.seeds or default_seeds
    if seeds > MAX_SEEDS:
        raise WorkdirError(f"--seeds={seeds}: at most {MAX_SEEDS}")
    sharding.use_cpu_cores()
    devices = _devices(settings.mesh)
    question = resolved(question)
    if settings.plan:
        from experiments.terminal import print_plan

        print_plan(plan(question, seeds))
        return 0
    workdir = open_workdir(
        settings.workdir or f"runs/{question.name}",
        identity(question),
        {"seeds": seeds, "steps": question.arms[0].config.steps, "checkpoint_every": settings.checkpoint_every},
        overwrite=settings.overwrite,
        grows=growth(question, seeds),
    )
    texts = {config: make_task(config).text for config in {arm.config for arm in question.arms}}
    of_arms = [texts[arm.config] for arm in question.arms]
    trained.keep_tokenizers(workdir, [None if text is None else text.tokenizers for text in of_arms])
    return _answer(settings, question, seeds, workdir, devices, sections, afterwards)


def _devices(text: str) -> int:
    """Of --mesh=sweep:N, which spreads the arms over the first N devices: N; 0 for "", all of them."""
    from transformer_jax import sharding

    if not text:
        return 0
    sizes = sharding.parse_mesh(text, (sharding.RUNS,))
    return sharding.make_mesh(sizes).size


def _answer(
    settings: Settings,
    question: Question,
    seeds: int,
    workdir: Workdir,
    devices: int,
    sections: Sections,
    afterwards: Afterwards,
) -> int:
    from experiments.terminal import print_results

    blocks = _blocks(workdir, seeds)
    done = workdir.finished()
    if done and done["seeds"] == seeds and done["steps"] == question.arms[0].config.steps:
        print_results(done, workdir.path)
        return 0
    with Stopper(settings.minutes) as stop:
        outcome = run_sweep(
            question,
            seeds,
            workdir.path,
            blocks=blocks,
            checkpoint_every=settings.checkpoint_every,
            devices=devices,
            stop=stop,
        )
    for note in outcome.notes:
        print(note, file=sys.stderr)
    if outcome.stopped:
        print(f"stopped: {outcome.stopped}; saved, the same command goes on from here", file=sys.stderr)
        return stop.exit_code
    from experiments import report, results

    found = results.build(outcome)
    found |= afterwards(outcome, found, workdir.path)
    rows = "".join(json.dumps(row) + "\n" for row in results.metrics_rows(outcome))
    write_text(workdir.path / "metrics.jsonl", rows)
    report.write(workdir.path, outcome, found, sections(outcome, found))
    workdir.write("results.json", found)  # last: it says that the run is finished
    print_results(found, workdir.path)
    return 0


def resolved(question: Question) -> Question:
    """Every arm with its vocabulary, and all it runs traced once: what is bad fails before anything is made."""
    arms = tuple(dataclasses.replace(arm, config=resolve(arm.config)) for arm in question.arms)
    if len({arm.config.steps for arm in arms}) > 1:
        raise ConfigError("--sweep=steps=…: arms of one sweep train alike; use --steps")
    for config, hyper in {arm.config: arm.hyper for arm in arms}.items():
        task = make_task(config)
        check(config, hyper, task)
        check_measured(config, hyper, task, question.observe, question.losses)
    return dataclasses.replace(question, arms=arms)


def identity(question: Question) -> dict[str, Any]:
    """What the run is. steps and seeds are apart: they may grow."""
    digests = {config: make_task(config).sha256 for config in {arm.config for arm in question.arms}}
    data = {arm.name: digests[arm.config] for arm in question.arms}
    arms = []
    for arm in question.arms:
        config = to_dict(arm.config)
        del config["steps"]
        arms.append({"name": arm.name, "config": config, "hyper": to_dict(arm.hyper)})
    return {
        "experiment": question.name,
        "arms": {arm.pop("name"): arm for arm in arms},
        "learning_rates": list(question.learning_rates),
        "comparisons": [list(pair) for pair in question.comparisons],
        "data": data[question.arms[0].name],
        **({"data_of_arms": data} if len(set(data.values())) > 1 else {}),
    }


def growth(question: Question, seeds: int) -> dict[str, tuple[int, str]]:
    """What may grow on resume: name -> (value, why it may not, "" if it may)."""
    from transformer_jax.optim import NEEDS_STEPS

    config = question.arms[0].config
    fixed = f"the schedule {config.schedule} depends on it" if config.schedule in NEEDS_STEPS else ""
    return {"seeds": (seeds, ""), "steps": (config.steps, fixed)}


def _blocks(workdir: Workdir, seeds: int) -> list[tuple[int, int]]:
    """The ranges of seeds that were added together: each block's groups keep their own checkpoints."""
    blocks = [tuple(block) for block in read_json(workdir.path / "blocks.json") or []]
    last = blocks[-1][1] if blocks else 0
    if seeds > last:
        blocks.append((last, seeds))
        workdir.write("blocks.json", blocks)
    return blocks
