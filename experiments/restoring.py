"""What the flags of a trained model mean: --restore=FOLDER, --restore_step, and fields that are changed."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from experiments import grid
from experiments.workdir import TOKENIZERS, WorkdirError, read_json
from transformer_jax import checkpoint
from transformer_jax.config import Config, Hyper, from_dict, with_terms
from transformer_jax.data import Tokenizers
from transformer_jax.data.pairs_task import PAIR_TASKS
from transformer_jax.errors import CheckpointError, ConfigError, UserError
from transformer_jax.saver import UNMEASURED, Keep, Value

TOKENIZER_FIELDS = ("tokenizer", "target_tokenizer", "bpe_size")
METRIC = "loss"  # what "best" is the lowest of, on the selection split, where a run names nothing else


def saved_identity(restore: str) -> dict[str, Any]:
    """config.json of a workdir. Raises ConfigError for no name, WorkdirError for a folder that is none."""
    if not restore:
        raise ConfigError("--restore=WORKDIR names the trained model")
    held = read_json(Path(restore) / "config.json")
    if held is None:
        raise WorkdirError(f"--restore={restore}: no config.json there")
    if not isinstance(held, dict) or "identity" not in held:
        raise WorkdirError(f"--restore={restore}: its config.json is not one of ours")
    return held


def saved_configuration(restore: str) -> tuple[Config, Hyper]:
    """The Config and Hyper that a workdir of `train` was made with."""
    held = saved_identity(restore)
    what = held["identity"]
    if what["experiment"] != "train":
        raise WorkdirError(f"--restore={restore} holds {what['experiment']}; a workdir of train is wanted")
    steps = held["free"]["steps"]
    return from_dict(Config, what["config"] | {"steps": steps}), from_dict(Hyper, what["hyper"])


def saved_task(restore: str) -> str:
    """The task that a workdir of `train`, or the first arm of one of a sweep, was made with."""
    arms = list(saved_identity(restore)["identity"].get("arms", {}).values())
    return arms[0]["config"]["task"] if arms else saved_configuration(restore)[0].task


def saved_tokenizers(restore: str) -> Tokenizers | None:
    """The tokenizers that a run on texts was trained with; None where it has none."""
    path = Path(restore) / TOKENIZERS
    held = read_json(path)
    if held is None:
        return None
    try:
        made = Tokenizers.from_dict(held)
        _ = made.vocab_size, made.source_vocab_size  # what the package reads, it reads when it is first used
    except UserError:
        raise
    except Exception as error:  # our classes and the package's raise what they will on a damaged description
        why = " ".join(str(error).split()) or type(error).__name__
        raise WorkdirError(f"{path} describes no tokenizers: {why}") from error
    return made


def inherited(restore: str, task: str) -> tuple[dict[str, Any], Tokenizers | None]:
    """What a run of `task` that goes on from a workdir of `train` reads with: fields of Config, and the tokenizers.

    Nothing where that has none, or was trained on a task of another kind: both on pairs, or both on text. Its folder
    of checkpoints will do.
    """
    if Path(restore).name == "checkpoints":
        restore = str(Path(restore).parent)
    held, tokenizers = read_json(Path(restore) / "config.json"), saved_tokenizers(restore)
    if held is None or tokenizers is None:
        return {}, None
    own = saved_configuration(restore)[0]
    if own.task != task and not {own.task, task} <= set(PAIR_TASKS):
        return {}, None
    return {name: getattr(own, name) for name in TOKENIZER_FIELDS}, tokenizers


def folders(restore: str) -> list[Path]:
    """The folders of checkpoints that a workdir holds (one a run or group), or the folder itself.

    Raises WorkdirError, one line, where there are none.
    """
    root = Path(restore)
    if not root.is_dir():
        raise WorkdirError(f"--restore={restore}: no such folder")
    places = [root, *sorted(path for path in root.glob("**/checkpoints/**") if path.is_dir())]
    found = [path for path in places if checkpoint.steps(path) or checkpoint.half_written(path)]
    if not found:
        raise WorkdirError(f"--restore={restore} holds no checkpoints")
    return found


def folder_of_train(restore: str) -> Path:
    """The one folder of checkpoints of a `train` workdir. Raises WorkdirError where there is not one."""
    found = folders(restore)
    if len(found) > 1:
        raise WorkdirError(f"--restore={restore} holds {len(found)} sets of checkpoints: name one, such as {found[0]}")
    return found[0]


def best_step(folder: Path) -> int:
    """The step that is best by what its run was judged by, among the sound checkpoints whose save measured it.

    Raises CheckpointError where none did.
    """
    measured = _measured(folder)
    if not measured:
        raise CheckpointError(
            f"--restore_step=best: no checkpoint in {folder} was measured (steps {checkpoint.steps(folder)})"
        )
    return min(measured, key=lambda step: measured[step])


def was_measured(folder: Path) -> bool:
    """Whether a sound checkpoint in the folder has a finite value of what its run was judged by."""
    return bool(_measured(folder))


def _measured(folder: Path) -> dict[int, Value]:
    values = {}
    for step in checkpoint.steps(folder):
        try:
            meta = checkpoint.read_meta(folder, step)
            values[step] = Keep(best=meta.get("judged_by", METRIC)).value(meta)
        except CheckpointError:
            continue
    return {step: value for step, value in values.items() if value < UNMEASURED}


def chosen_step(folder: Path, which: str) -> int:
    """The step that --restore_step names: "" or "newest", "best", or a number. Raises CheckpointError."""
    if which == "best":
        return best_step(folder)
    which = "" if which == "newest" else which
    if which and not which.isdecimal():
        raise CheckpointError(f"--restore_step={which}: best, newest, or a number of steps")
    there = checkpoint.steps(folder)
    if not there:
        raise CheckpointError(f"no finished checkpoint in {folder}")
    return int(which) if which else there[-1]


def usual_step(folder: Path) -> str:
    """What --restore_step means where it is not given: "best" of a run that is judged by what it writes, else newest.

    Such a run keeps its best checkpoint, and goes on past it.
    """
    for step in reversed(checkpoint.steps(folder)):
        try:
            judged = checkpoint.read_meta(folder, step).get("judged_by", METRIC) != METRIC
        except CheckpointError:
            continue
        return "best" if judged and was_measured(folder) else ""
    return ""


def sound_step(folder: Path, which: str) -> tuple[int, list[str]]:
    """As `chosen_step`, but of the newest, the newest that is read whole; and a line for each passed over."""
    if which not in ("", "newest"):
        return chosen_step(folder, which), []
    passed = []
    for step in reversed(checkpoint.steps(folder)):
        try:
            checkpoint.contents(folder, step)
        except checkpoint.DamagedError as error:
            passed.append(str(error))
        else:
            return step, passed
    raise CheckpointError(f"no good checkpoint in {folder}: " + ("; ".join(passed) or "it holds none"))


def changed(config: Config, hyper: Hyper, values: Mapping[str, Any]) -> tuple[Config, Hyper]:
    """A trained model's settings with the fields of `values`; the terms and the band follow the numbers.

    Raises ConfigError for what cannot be: an unknown field, a window wider than a row or a given band.
    """
    config, hyper = grid.changed(config, hyper, values)
    return with_terms(config.replace(band=values.get("band", 0)), [hyper]), hyper


def restore_state(folder: Path, like: Any, which: str = "") -> checkpoint.Restored:
    """The state that --restore_step names, as checkpoint.restore gives it; of the newest, the newest good one."""
    if which in ("", "newest"):
        return checkpoint.restore_latest(folder, like)
    return checkpoint.restore(folder, chosen_step(folder, which), like)


def restore_weights(folder: Path, like: Any, which: str = "", average: int = 0) -> checkpoint.Restored:
    """As `restore_state`, but the state is the parameters alone, as --restore_step or --average ask for them.

    Raises CheckpointError where both are given.
    """
    if average and which:
        raise CheckpointError(f"--average={average} takes the newest checkpoints: leave --restore_step={which} out")
    if average:
        return averaged(folder, like, average)
    restored = restore_state(folder, like, which or usual_step(folder))
    return dataclasses.replace(restored, state=restored.state.weights)


def averaged(folder: Path, like: Any, count: int) -> checkpoint.Restored:
    """The mean, in float32, of the parameters of the newest `count` good checkpoints; step and meta are the newest's.

    Vaswani et al. 2017 §6.1: of the parameters themselves, also where the run keeps an average (EMA) of its own.
    like: a state. The notes name the steps (the best may be far from the others: it is kept however old) and damaged
    checkpoints, which are passed over. Raises CheckpointError where fewer are there.
    """
    found: list[checkpoint.Restored] = []
    total, notes = None, []
    for step in reversed(checkpoint.steps(folder)):
        if len(found) == count:
            break
        try:
            restored = checkpoint.restore(folder, step, like)
        except checkpoint.DamagedError as error:
            notes.append(str(error))
            continue
        total = _added(total, restored.state.params)
        found.append(dataclasses.replace(restored, state=None))
    if len(found) < count:
        there = "; ".join([f"it holds {len(found)} good ones", *notes])
        more = f"train with --keep={count} and a --checkpoint_every"
        raise CheckpointError(f"--average={count} wants as many checkpoints in {folder}: {there} ({more})")
    mean = jax.jit(lambda sums: jax.tree.map(lambda x, p: (x / count).astype(p.dtype), sums, like.params))(total)
    steps = [one.step for one in reversed(found)]
    best = best_step(folder) if count > 1 and was_measured(folder) else -1
    notes.append(
        "the mean of steps " + ", ".join(f"{n} (the best, kept)" if n == best < steps[-1] else f"{n}" for n in steps)
    )
    return dataclasses.replace(found[0], state=mean, notes=notes)


@jax.jit
def _added(total: Any, params: Any) -> Any:
    """A running sum, begun where `total` is None."""
    params = jax.tree.map(lambda x: x.astype("float32"), params)
    return params if total is None else jax.tree.map(lambda a, b: a + b, total, params)
