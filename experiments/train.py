"""Train one configuration on one task.

    python launch.py --experiment=train --text=book.txt --d_model=256 --steps=2000 --workdir=runs/lm
    python launch.py --experiment=train --task=reverse --architecture=encoder_decoder --workdir=runs/reverse
    python launch.py --experiment=train --mesh=data:4,fsdp:2 --coordinator=host0:1234 --num_processes=2 --process_id=0
    python launch.py --experiment=train --text=mine.txt --restore=runs/lm --parts=embedding --workdir=runs/mine
    python launch.py --experiment=train --task=pairs --pairs=train.tsv --dev=dev.tsv --patience=5 --workdir=runs/g2p
    python launch.py --experiment=train --task=pairs --pairs=mine.tsv --restore=runs/g2p --workdir=runs/tuned
    python launch.py --experiment=train --task=pairs --pairs=a.en,a.de --dev=b.en,b.de --tokenizer=bpe --strict
    python launch.py --experiment=train --mesh=data:2,fsdp:4 --preset=mini_llama_40m --workdir=runs/llama

The same command again resumes, on the same mesh or another; --minutes stops cleanly in time.
--restore starts a new run from the parameters of another (--parts: only those named; what was
taken and what was not is printed), in the ids of its tokenizers unless flags name others.
Evaluations show loss, accuracy and three samples written by the model. A model of pairs is judged by
what it writes for dev; its best checkpoint is kept and reported, and with --patience training ends
when nothing gets better. Expected: 60 steps of the default (--steps=60) end at 3.16 bits per byte on
the reported split of Python 3.11's own text.
"""

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from experiments import processes, restoring, trained
from experiments.flags import Settings
from experiments.interrupt import Stopper
from experiments.program import check
from experiments.workdir import TOKENIZERS, open_workdir, read_json
from transformer_jax import checkpoint, sharding
from transformer_jax.config import Config, Hyper, to_dict, with_terms
from transformer_jax.data import Task, make_task, resolve
from transformer_jax.data.pairs_task import PAIR_TASKS
from transformer_jax.errors import CheckpointError, ConfigError
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
# A small corpus's model: what held on the development parts of several (see BUILD_NOTES.md). Norms after the sums, for
# over three seeds on French words they made 8.2% of the dev words wrong, norms before the sub-layers 8.6%.
PAIRS_BASE = Config(
    architecture="encoder_decoder",
    d_model=128,
    num_layers=3,
    num_heads=4,
    ffn="relu",
    norm_placement="post",
    positions="rope",
    batch_size=64,
    steps=10_000,
    optimizer="adam",
    schedule="inverse_sqrt",
    warmup_steps=1000,
    scan_unroll=0,
)
PLACES = ("embedding/position_PD",)
PAIRS_HYPER = Hyper(learning_rate=1e-3, dropout_rate=0.3, label_smoothing=0.1, b2=0.98, clip_norm=1.0, ema_decay=0.999)


def base_of(settings: Settings, begun: str = "") -> tuple[Config, Hyper]:
    """What the flags start from: the defaults of the task, a short run's warm-up a part of it.

    begun: the workdir of a run that goes on: its warm-up, a part of fewer steps then, stays as short.
    """
    base, hyper, part = BASE, HYPER, 10
    if settings.overrides.get("task") in PAIR_TASKS:
        base, hyper, part = PAIRS_BASE.replace(task=settings.overrides["task"]), PAIRS_HYPER, 2
    steps = settings.overrides.get("steps", base.steps)
    held = (read_json(Path(begun) / "config.json") or {}) if begun else {}
    of_run = held.get("identity", {})
    config = of_run.get("config") or next(iter(of_run.get("arms", {}).values()), {}).get("config", {})
    before = config.get("warmup_steps", base.warmup_steps)
    return base.replace(steps=steps, warmup_steps=min(base.warmup_steps, steps // part, before)), hyper


def configuration(
    settings: Settings, mesh: sharding.Mesh | None = None, source: str = "", begun: str = ""
) -> tuple[Config, Hyper, Task]:
    """What the flags ask for, with its vocabulary and terms; the data is read here.

    source: a workdir whose tokenizers are taken, as restoring.inherited says; "": they are fitted to the data.
    begun: as base_of has it.
    """
    config, hyper = settings.configure(*base_of(settings, begun))
    fields, tokenizers = restoring.inherited(source, config.task) if source else ({}, None)
    config = resolve(with_terms(config.replace(**fields), [hyper]), settings.strict, tokenizers)
    task = make_task(config, tokenizers, settings.strict)
    check(config, hyper, task, sharding.constrain(mesh))
    return config, hyper, task


def identity(config: Config, hyper: Hyper, seed: int, task: Task) -> dict[str, Any]:
    """What the run is; steps are apart, as they may grow."""
    fields = to_dict(config)
    del fields["steps"]
    return {"experiment": "train", "config": fields, "hyper": to_dict(hyper), "seed": seed, "data": task.sha256}


def reads_as(settings: Settings, begun: str) -> str:
    """The workdir whose tokenizers a run with --restore takes: the source's, of which nothing else knows the ids.

    begun: its own workdir, once it has checkpoints (the source may be gone by then), else "". "" where there is
    no source, or flags name a tokenizer, or the part that stands for ids is not taken.
    """
    asked = any(settings.overrides.get(name) for name in (*restoring.TOKENIZER_FIELDS, "vocab_size"))
    if not settings.restore or asked or not _takes_ids(settings):
        return ""
    return begun or ("" if trained.is_sweep(settings.restore) else settings.restore)


def _takes_ids(settings: Settings) -> bool:
    """Whether parameters that stand for ids are among --parts; those that stand for places are not."""
    return any(part == "" or (part.split("/")[0] == "embedding" and part not in PLACES) for part in _parts(settings))


def _parts(settings: Settings) -> list[str]:
    return [part.strip() for part in settings.parts.split(",")]


def folder_of(settings: Settings) -> str:
    """The run's workdir."""
    return settings.workdir or "runs/train"


def came_from(settings: Settings) -> dict[str, Any]:
    """The part of a run's identity that --restore adds."""
    place = os.path.normpath(settings.restore) if settings.restore else ""
    taken = {"restore": place, "restore_step": settings.restore_step, "parts": settings.parts}
    return {"from": taken} if settings.restore else {}


def warmth(
    settings: Settings, like: TrainState, task: Task
) -> Callable[[TrainState], tuple[TrainState, list[str]]] | None:
    """What --restore and --parts ask for: fresh state -> the state with those parameters, and the difference.

    like: the shapes of the state; what does not fit is refused here, before a file is made. The weights that
    the source is used with are taken: of its best step where it is judged by what it writes, averaged where it
    keeps an average. Raises CheckpointError where they stand for ids of other tokenizers.
    """
    if not settings.restore:
        if settings.parts or settings.restore_step:
            raise ConfigError("--parts and --restore_step say what to take from --restore=WORKDIR: give it too")
        return None
    if trained.is_sweep(settings.restore):
        raise ConfigError(f"--restore={settings.restore} is a sweep: a run starts from a workdir of train")
    if settings.overwrite and Path(settings.restore).resolve().is_relative_to(Path(folder_of(settings)).resolve()):
        raise ConfigError(f"--overwrite would move --restore={settings.restore} aside: give another --workdir")
    folder = restoring.folder_of_train(settings.restore)
    step, passed = restoring.sound_step(folder, settings.restore_step or restoring.usual_step(folder))
    processes.same("the step that --restore takes", step)
    meta = checkpoint.read_meta(folder, step)
    ids = "" if task.text is None else task.text.tokenizers.sha256
    if meta.get("tokenizers", "") != ids and _takes_ids(settings):
        if reads_as(settings, "") and restoring.inherited(settings.restore, task.name)[1] is not None:
            raise CheckpointError(
                f"--restore={settings.restore} was trained with other tokenizers than its {TOKENIZERS}"
            )
        raise CheckpointError(
            f"--restore={settings.restore} was trained with other tokenizers: its embedding stands for other ids; "
            "name no tokenizer, to go on with its own, or take the rest by --parts=encoder,decoder"
        )
    averaged = meta.get("hyper", {}).get("ema_decay", 0.0) > 0
    tree = "ema" if averaged else "params"
    names = [f"{tree}/{part}".rstrip("/") for part in _parts(settings)]

    def holder(state: TrainState) -> TrainState:
        return dataclasses.replace(state, ema=state.params) if averaged else state

    checkpoint.check_parts(folder, step, holder(like), names)

    def warm(state: TrainState) -> tuple[TrainState, list[str]]:
        restored = checkpoint.restore_parts(folder, step, holder(state), names)
        notes = passed + [note for note in restored.notes if f" {tree}/" in note]
        return dataclasses.replace(state, params=restored.state.weights if averaged else restored.state.params), notes

    return warm


def run(settings: Settings) -> int:
    """Train; exit code 0, or that of the signal that stopped it."""
    from experiments import loop, plans
    from transformer_jax.optim import NEEDS_STEPS

    mesh, folder = sharding.from_text(settings.mesh), folder_of(settings)
    saves = Path(folder) / "checkpoints"
    begun = saves.is_dir() and bool(checkpoint.steps(saves)) and not settings.overwrite
    processes.same("whether the run has begun: do all see the same workdir?", int(begun))
    own = folder if begun else ""
    source = reads_as(settings, own)
    config, hyper, task = configuration(settings, mesh, source, own)
    plan = plans.plan_of(config, hyper, task, settings, mesh)
    # What has begun goes on from its own checkpoints: the source may be gone.
    warm = None if begun else warmth(settings, loop.abstract_state(config, hyper), task)
    fixed = f"the schedule {config.schedule} depends on it" if config.schedule in NEEDS_STEPS else ""
    workdir = open_workdir(
        folder,
        identity(config, hyper, settings.seed, task) | came_from(settings),
        {"steps": config.steps, "checkpoint_every": settings.checkpoint_every, "mesh": settings.mesh},
        overwrite=settings.overwrite,
        grows={"steps": (config.steps, fixed)},
    )
    done = workdir.finished()
    over = done is not None and ended(done, config.steps, settings.patience)
    processes.same("whether the run has finished: do all see the same workdir?", int(over))
    if done is not None and over:
        print(summary(done, str(workdir.path)))
        return 0
    about = {}
    if task.text is not None:
        workdir.write(TOKENIZERS, task.text.tokenizers.to_dict())
        about = {"tokenizers": task.text.tokenizers.sha256}
        if processes.first():
            print("\n".join([*task.text.notes, *plan.notes]), file=sys.stderr)
    task = loop.place_task(task if plan.feed_of is None else plans.measured_alone(task), mesh)
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
            keep=Keep(settings.keep, settings.keep_every, plan.judge.metric if plan.keeps_best else ""),
            judge=plan.judge,
            feed_of=plan.feed_of,
            about=about,
            warm=warm,
            profile=settings.profile,
            mesh=mesh,
        )
        if not finished:
            return stop.exit_code
    numbers, reached = loop.device_hyper(hyper, mesh), int(state.step)
    best = restoring.best_step(saves) if plan.keeps_best and restoring.was_measured(saves) else -1
    processes.same("the best step: do all see the same workdir?", best)
    if best >= 0:
        state = restoring.restore_state(saves, loop.abstract_state(config, hyper, mesh), str(best)).state
    sums = loop.measure(config, task, "report", mesh)(state.weights, numbers, task.data)
    found = {
        "experiment": "train",
        "steps": config.steps,
        "reached": reached,
        "measured_at": int(state.step),
        "patience": settings.patience,
        "parameters": sum(x.size for x in jax.tree.leaves(state.params)),
        "task": config.task,
        "floor": task.floor,
        "report": loop.describe(sums, task) | plan.scores(state.weights),
        "samples": loop.samples(config, state.weights, numbers, task),
    }
    workdir.write("results.json", found)
    print(summary(found, str(workdir.path)))
    return 0


def ended(found: Mapping[str, Any], steps: int, patience: int) -> bool:
    """Whether results.json is of all that is asked for: all steps, or as many as that patience allows."""
    if found["steps"] != steps:
        return False
    return found["reached"] == steps or 0 < patience <= found["patience"]


def summary(found: Mapping[str, Any], folder: str) -> str:
    """A finished run in a few lines."""
    from experiments.loop import in_words

    steps = f"{found['steps']} steps"
    if found["reached"] < found["steps"]:
        steps = f"ended after {found['reached']} of {steps}"
    if found["measured_at"] < found["reached"]:
        steps += f", best at {found['measured_at']}"
    title = f"{found['task']}, {found['parameters']:,} parameters, {steps}: {in_words(found['report'])}"
    return "\n".join(
        [title, *found["samples"], f"    {folder}: config.json, metrics.jsonl, checkpoints/, results.json"]
    )
