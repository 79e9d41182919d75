"""Train one configuration on one task.

    python launch.py --experiment=train --text=book.txt --d_model=256 --steps=2000 --workdir=runs/lm
    python launch.py --experiment=train --task=reverse --architecture=encoder_decoder --workdir=runs/reverse
    python launch.py --experiment=train --mesh=data:4,fsdp:2 --coordinator=host0:1234 --num_processes=2 --process_id=0
    python launch.py --experiment=train --text=mine.txt --restore=runs/lm --parts=embedding --workdir=runs/mine
    python launch.py --experiment=train --mesh=data:2,fsdp:4 --preset=mini_llama_40m --workdir=runs/llama

The same command again resumes, on the same mesh or another; --minutes stops cleanly in time.
--restore starts a new run from the parameters of another (--parts: only those named; what was
taken and what was not is printed). Evaluations show loss, accuracy and three samples written by
the model. Expected: 60 steps of the default (--steps=60)
end at 3.16 bits per byte on the reported split of Python 3.11's own text.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from experiments import processes, restoring
from experiments.flags import Settings
from experiments.interrupt import Stopper
from experiments.program import check
from experiments.workdir import TOKENIZERS, open_workdir
from transformer_jax import checkpoint, sharding
from transformer_jax.config import Config, Hyper, to_dict, with_terms
from transformer_jax.data import Task, make_task, resolve
from transformer_jax.data.pairs_task import PAIR_TASKS
from transformer_jax.errors import ConfigError
from transformer_jax.saver import Keep
from transformer_jax.train import TrainState

FLAGS = (
    "workdir", "minutes", "checkpoint_every", "eval_every", "seed", "overwrite", "preset", "profile", "mesh",
    "restore", "restore_step", "parts", "keep", "keep_every", "keep_best", "patience", "strict", *processes.FLAGS,
)  # fmt: skip
BASE = Config(
    d_model=128,
    num_layers=4,
    num_heads=4,
    seq_len=128,
    batch_size=16,
    steps=1000,
    optimizer="adamw",
    schedule="cosine",
    warmup_steps=50,
    scan_unroll=0,
)
HYPER = Hyper(learning_rate=2e-3, clip_norm=1.0)


def configuration(settings: Settings, mesh: sharding.Mesh | None = None) -> tuple[Config, Hyper, Task]:
    """What the flags ask for, with its vocabulary and terms; the data is read here."""
    base, hyper = BASE, HYPER
    if settings.overrides.get("task") in PAIR_TASKS:
        from experiments import training_pairs

        base, hyper = training_pairs.BASE.replace(task=settings.overrides["task"]), training_pairs.HYPER
    steps = settings.overrides.get("steps", base.steps)
    # A short run warms up for a tenth of it.
    base = base.replace(steps=steps, warmup_steps=min(base.warmup_steps, steps // 10))
    config, hyper = settings.configure(base, hyper)
    config = resolve(with_terms(config, [hyper]))
    task = make_task(config, strict=settings.strict) if settings.strict else make_task(config)
    check(config, hyper, task, sharding.constrain(mesh))
    return config, hyper, task


def identity(config: Config, hyper: Hyper, seed: int, task: Task) -> dict[str, Any]:
    """What the run is; steps are apart, as they may grow."""
    fields = to_dict(config)
    del fields["steps"]
    return {"experiment": "train", "config": fields, "hyper": to_dict(hyper), "seed": seed, "data": task.sha256}


def came_from(settings: Settings) -> dict[str, Any]:
    """The part of a run's identity that --restore adds."""
    taken = {"restore": settings.restore, "restore_step": settings.restore_step, "parts": settings.parts}
    return {"from": taken} if settings.restore else {}


def warmth(settings: Settings, like: TrainState) -> Callable[[TrainState], tuple[TrainState, list[str]]] | None:
    """What --restore and --parts ask for: fresh state -> the state with those parameters, and the difference.

    like: the shapes of the state; what does not fit is refused here, before a file is made.
    """
    if not settings.restore:
        if settings.parts or settings.restore_step:
            raise ConfigError("--parts and --restore_step say what to take from --restore=WORKDIR: give it too")
        return None
    names = [f"params/{part.strip()}" for part in settings.parts.split(",")] if settings.parts else ["params"]
    folder = restoring.folder_of_train(settings.restore)
    step, passed = restoring.sound_step(folder, settings.restore_step)
    checkpoint.check_parts(folder, step, like, names)

    def warm(state: TrainState) -> tuple[TrainState, list[str]]:
        restored = checkpoint.restore_parts(folder, step, state, names)
        return restored.state, passed + [note for note in restored.notes if " params/" in note]

    return warm


def run(settings: Settings) -> int:
    """Train; exit code 0, or that of the signal that stopped it."""
    from experiments import loop
    from transformer_jax.optim import NEEDS_STEPS

    mesh = sharding.from_text(settings.mesh)
    config, hyper, task = configuration(settings, mesh)
    saves = Path(settings.workdir or "runs/train") / "checkpoints"
    begun = saves.is_dir() and bool(checkpoint.steps(saves)) and not settings.overwrite
    # What has begun goes on from its own checkpoints: the source may be gone.
    warm = None if begun else warmth(settings, loop.abstract_state(config, hyper))
    fixed = f"the schedule {config.schedule} depends on it" if config.schedule in NEEDS_STEPS else ""
    workdir = open_workdir(
        settings.workdir or "runs/train",
        identity(config, hyper, settings.seed, task) | came_from(settings),
        {"steps": config.steps, "checkpoint_every": settings.checkpoint_every, "mesh": settings.mesh},
        overwrite=settings.overwrite,
        grows={"steps": (config.steps, fixed)},
    )
    done = workdir.finished()
    if done and done["steps"] == config.steps:
        print(summary(done, str(workdir.path)))
        return 0
    more: dict[str, Any] = {}
    notes: list[str] = []
    if task.text is not None:
        workdir.write(TOKENIZERS, task.text.tokenizers.to_dict())
        more["about"] = {"tokenizers": task.text.tokenizers.sha256}
    if config.task not in PAIR_TASKS:
        judge, scores = loop.Judge(patience=settings.patience), lambda params: {}
    else:
        from experiments import training_pairs

        judge = training_pairs.judge_of(config, hyper, task, settings.patience)
        scores = training_pairs.score_of(config, hyper, task, "report")
        more["feed_of"], notes = training_pairs.feed_of(config, task, settings.seed, mesh)
        task = training_pairs.on_device(task)
    if task.text is not None and processes.first():
        print("\n".join([*task.text.notes, *notes]), file=sys.stderr)
    best = settings.keep_best or settings.patience or config.task in PAIR_TASKS
    task = loop.place_task(task, mesh)
    with Stopper(settings.minutes) as stop:
        state, finished = loop.train(
            config,
            hyper,
            settings.seed,
            task,
            workdir.path,
            stop=stop,
            checkpoint_every=settings.checkpoint_every,
            eval_every=settings.eval_every,
            keep=Keep(settings.keep, settings.keep_every, judge.metric if best else ""),
            judge=judge,
            warm=warm,
            profile=settings.profile,
            mesh=mesh,
            **more,
        )
        if not finished:
            return stop.exit_code
    numbers, reached = loop.device_hyper(hyper, mesh), int(state.step)
    if best and restoring.was_measured(saves):
        state = restoring.restore_state(saves, loop.abstract_state(config, hyper, mesh), "best").state
    sums = loop.measure(config, task, "report", mesh)(state.weights, numbers, task.data)
    found = {
        "experiment": "train",
        "steps": config.steps,
        "reached": reached,
        "measured_at": int(state.step),
        "parameters": sum(x.size for x in jax.tree.leaves(state.params)),
        "task": config.task,
        "floor": task.floor,
        "report": loop.describe(sums, task) | scores(state.weights),
        "samples": loop.samples(config, state.weights, numbers, task),
    }
    workdir.write("results.json", found)
    print(summary(found, str(workdir.path)))
    return 0


def summary(found: dict[str, Any], folder: str) -> str:
    """A finished run in a few lines."""
    from experiments.loop import in_words

    numbers = in_words(found["report"])
    title = f"{found['task']}, {found['parameters']:,} parameters, {found['steps']} steps: {numbers}"
    return "\n".join(
        [title, *found["samples"], f"    {folder}: config.json, metrics.jsonl, checkpoints/, results.json"]
    )
