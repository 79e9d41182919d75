"""The host's loop for one long run: chunks of steps, evaluation, checkpoints, resume.

A run is saved by time, by --checkpoint_every, when it is interrupted and at its end; the
same command goes on from there, and ends with the same bits as if it had not been stopped.
"""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments import processes, restoring
from experiments.feeds import Feed, OnDevice, Record
from experiments.interrupt import Stopper
from experiments.program import run_key
from experiments.progress import Bar
from experiments.samples import samples
from experiments.workdir import commit, versions, write_text
from transformer_jax import checkpoint, sharding
from transformer_jax.config import Config, Hyper, to_dict
from transformer_jax.data import Task
from transformer_jax.losses import Sums
from transformer_jax.saver import UNMEASURED, Keep, Saver, Value
from transformer_jax.train import TrainState, evaluate, evaluate_mixture, init_state

CHUNK_SECONDS = 1.0  # about how long one call to the device is
SAVE_SECONDS = 60.0
KEPT = Keep()


@dataclasses.dataclass(frozen=True)
class Judge:
    """How a run is judged at its evaluations, on the selection split.

    metric: the number that says which checkpoint is best; "-NAME": one that is to be high.
    score: parameters -> numbers beside those of `describe`. patience: evaluations in a row without a
    better one that end the run; 0: none do.
    """

    metric: str = restoring.METRIC
    score: Callable[[Any], dict[str, float | None]] | None = None
    patience: int = 0

    def shown(self, last: Value, best: Value) -> dict[str, Any]:
        """For the bar, beside the loss of the last step: the metric at the last evaluation and at the best one."""
        name = "dev loss" if self.metric == restoring.METRIC else self.metric.removeprefix("-")
        return {name: abs(value[0]) for name, value in ((name, last), ("best", best)) if value < UNMEASURED}


PLAIN = Judge()


def abstract_state(config: Config, hyper: Hyper, mesh: sharding.Mesh | None = None) -> TrainState:
    """Shapes, types and, on a mesh, places of the state, for restoring into; nothing is allocated."""
    shapes = jax.eval_shape(lambda: init_state(config, hyper, run_key(0)))
    return shapes if mesh is None else sharding.abstract(shapes, mesh)


def _places(config: Config, hyper: Hyper, mesh: sharding.Mesh | None) -> TrainState:
    """The sharding of each leaf of the state, for jit; None without a mesh."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, hyper, mesh))


def device_hyper(hyper: Hyper, mesh: sharding.Mesh | None = None) -> Hyper:
    """Plain numbers -> device scalars, so that their values are not compiled in."""
    numbers = jax.tree.map(lambda x: jnp.asarray(x, jnp.int32 if isinstance(x, int) else jnp.float32), hyper)
    return numbers if mesh is None else sharding.place_shared(numbers, mesh)


def place_task(task: Task, mesh: sharding.Mesh | None) -> Task:
    """The task with its data whole on every device of the mesh: batches are made where they are used."""
    return task if mesh is None else dataclasses.replace(task, data=sharding.place_shared(task.data, mesh))


def measure(
    config: Config, task: Task, split: str, mesh: sharding.Mesh | None = None
) -> Callable[[Any, Hyper, Any], Sums]:
    """A compiled function of (params, hyper, data): the sums over the whole split; every device is done with it."""
    count, constrain = task.eval_batches[split], sharding.constrain(mesh)

    @jax.jit
    def sums(params: Any, hyper: Hyper, data: Any) -> Sums:
        return evaluate(config, params, hyper, lambda i: task.eval_batch(data, split, i), count, constrain)

    return lambda params, hyper, data: jax.block_until_ready(sums(params, hyper, data))


def measure_mixture(settings: Sequence[tuple[Config, Hyper]], models: Sequence[Any], task: Task, split: str) -> Sums:
    """The sums over the whole split of an ensemble: models of these settings, whose probabilities are averaged."""
    configs = [config for config, _ in settings]

    @jax.jit
    def sums(models: Any, hypers: Any, data: Any) -> Sums:
        members = list(zip(configs, hypers, models, strict=True))
        return evaluate_mixture(members, lambda i: task.eval_batch(data, split, i), task.eval_batches[split])

    return sums(list(models), [device_hyper(hyper) for _, hyper in settings], task.data)


def describe(sums: Sums, task: Task) -> dict[str, float | None]:
    """The split's numbers: loss (nats per token), perplexity, accuracy; bits per byte for text,
    nats above the floor for tasks that have one. None each where the loss is not finite: diverged."""
    loss = float(sums.loss)
    if not math.isfinite(loss):
        return dict.fromkeys(("loss", "perplexity", "accuracy"))
    out: dict[str, float | None] = {
        "loss": loss, "perplexity": math.exp(min(loss, 700.0)), "accuracy": float(sums.accuracy)
    }  # fmt: skip
    if task.floor is not None:
        out["above_floor"] = loss - task.floor
    elif task.name == "text" and task.text is None:  # bytes as they are
        out["bits_per_byte"] = loss / math.log(2.0)
    return out


def in_words(found: Mapping[str, float | None], digits: str = ".4g") -> str:
    """What `describe` found, in a line."""
    return "  ".join(f"{name} {'diverged' if x is None else format(x, digits)}" for name, x in found.items())


def train(
    config: Config,
    hyper: Hyper,
    seed: int,
    task: Task,
    folder: Path,
    *,
    stop: Stopper,
    checkpoint_every: int = 0,
    eval_every: int = 0,
    keep: Keep = KEPT,
    judge: Judge = PLAIN,
    feed_of: Callable[..., Feed] | None = None,
    about: Mapping[str, Any] | None = None,
    warm: Callable[[TrainState], tuple[TrainState, list[str]]] | None = None,
    profile: bool = False,
    mesh: sharding.Mesh | None = None,
) -> tuple[TrainState, bool]:
    """Train to config.steps, or until `stop`; (state, whether it is finished). Resumes what `folder` holds.

    keep: which checkpoints stay; with keep.best each evaluation that is the best so far is saved.
    judge: what is measured beside the loss, and when the run ends before its last step.
    feed_of: (hyper on the device, cursor, the state's places) -> where batches come from; None: the task makes
    them on the device. about: what each checkpoint says beside its settings.
    warm: given the fresh state, the one to start from, and lines that say what it took; not called on resume.
    Writes folder/checkpoints and folder/metrics.jsonl: a row a step {"step", "loss", …}, and a
    row an evaluation {"step", "split", "loss", …}. mesh: what the state and the batches are split
    over; it is no part of what the run is, and may be another one when the run goes on.
    """
    numbers, saves = device_hyper(hyper, mesh), folder / "checkpoints"
    describes: dict[str, Any] = {"config": to_dict(config), "hyper": to_dict(hyper), "seed": seed, "data": task.sha256}
    describes |= {"made": {"commit": commit(), **versions()}, "judged_by": judge.metric, **(about or {})}
    begun = _start(config, hyper, seed, saves, mesh, warm)
    state, eval_every = begun.state, eval_every or max(1, config.steps // 10)
    processes.same("the step that they start from: do all see the same workdir?", int(state.step))
    places = _places(config, hyper, mesh)
    if feed_of is None:
        feed: Feed = OnDevice(config, numbers, task, min(eval_every, config.steps), places, mesh)
    else:
        feed = feed_of(numbers, begun.meta.get("cursor"), places)
    with Bar(f"{config.task}", config.steps, int(state.step)) as bar:
        for note in begun.notes:
            bar.say(note)
        log = _Log(folder / "metrics.jsonl", int(state.step))
        if int(state.step):
            bar.say(f"resumed at step {int(state.step)}")
        evaluation, judged = measure(config, task, "selection", mesh), Keep(best=judge.metric)
        metric, loss = begun.meta.get("best") or UNMEASURED
        best: Value = (metric, loss)
        stale: int = begun.meta.get("stale", 0)
        shown = judge.shown(judged.value(begun.meta), best)
        with Saver(saves, keep=keep, resumed=int(state.step) or None) as saver:
            chunk, last_save = 1, time.monotonic()
            while (start := int(state.step)) < config.steps:
                if judge.patience and stale >= judge.patience:
                    bar.say(f"stopped at step {start}: {stale} evaluations without a better {judge.metric}")
                    break
                ends = [start + chunk, config.steps, _next(start, eval_every)]
                if checkpoint_every:
                    ends.append(_next(start, checkpoint_every))
                done, clock = min(ends), time.monotonic()
                with _trace(folder / "trace", profile and start > 0 and processes.first()):
                    state, record = feed.advance(state, done)
                profile = profile and start == 0
                seconds = time.monotonic() - clock
                if start:  # the first call compiles
                    chunk = max(1, min(eval_every, int(chunk * CHUNK_SECONDS / max(seconds, 1e-3)) or 1))
                log.steps(start, record)
                measured: dict[str, float | None] = {}
                bar.update(done, tokens=float(record["tokens"].sum()), loss=float(record["loss"][-1]), **shown)
                if done % eval_every == 0 or done == config.steps:
                    measured = describe(evaluation(state.weights, numbers, task.data), task)
                    if judge.score is not None:
                        measured |= judge.score(state.weights)
                    log.rows([{"step": done, "split": "selection", **measured}])
                    value = judged.value({"metrics": measured})
                    best, stale = (value, 0) if value < best else (best, stale + 1)
                    shown = judge.shown(value, best)
                    bar.say(f"step {done}  {in_words(measured)}")
                    for line in samples(config, state.weights, numbers, task):
                        bar.say(line)
                # A clock, a signal and a float's last bits are one process's own: the first one's time and judgement
                # hold, and anyone's wish to stop.
                late = time.monotonic() - last_save > SAVE_SECONDS
                better = keep.value({"metrics": measured}) < saver.best
                due = better or bool(checkpoint_every and done % checkpoint_every == 0)
                said = processes.agree(chunk, late, due, stale, stop.exit_code if stop.reason else -1)
                (chunk, late, due, stale, _), wish = said[0], max(row[-1] for row in said)
                stop.told(wish)
                # A signal since then was told to no one yet: heeded now, it would leave the others stepping alone.
                reason = stop.reason if wish >= 0 else ""
                meta = describes | {"step": done, "metrics": measured, "stale": stale}
                meta["best"] = best if best < UNMEASURED else None
                ended = bool(judge.patience) and stale >= judge.patience
                if reason or due or done == config.steps or late or ended:
                    saver.save(done, state, meta | {"cursor": feed.cursor()})
                    last_save = time.monotonic()
                if reason and done < config.steps and not ended:
                    bar.say(f"stopped at step {done}: {reason}; saved, the same command goes on from here")
                    return state, False
    return state, True


def _next(step: int, every: int) -> int:
    return (step // every + 1) * every


@dataclasses.dataclass(frozen=True)
class _Begun:
    """What a run starts from: meta of the checkpoint, {} for a fresh state; lines to show."""

    state: TrainState
    meta: Mapping[str, Any]
    notes: list[str]


def _start(
    config: Config,
    hyper: Hyper,
    seed: int,
    saves: Path,
    mesh: sharding.Mesh | None,
    warm: Callable[[TrainState], tuple[TrainState, list[str]]] | None,
) -> _Begun:
    """The newest good checkpoint, or a fresh state (made in place: no device holds all of it), warmed; and notes."""
    like = abstract_state(config, hyper, mesh)
    notes = [] if mesh is None else sharding.dropped(config, like.params, mesh)
    if saves.is_dir() and checkpoint.steps(saves):
        restored = checkpoint.restore_latest(saves, like)
        return _Begun(restored.state, restored.meta, notes + restored.notes)
    fresh = jax.jit(lambda h, key: init_state(config, h, key), out_shardings=_places(config, hyper, mesh))
    state, taken = jax.block_until_ready(fresh(device_hyper(hyper, mesh), run_key(seed))), []
    if warm is not None:
        state, taken = warm(state)
        if state.ema is not None:
            state = dataclasses.replace(state, ema=jax.tree.map(jnp.copy, state.params))
    return _Begun(state, {}, notes + taken)


class _Log:
    """metrics.jsonl. On resume, rows past the checkpoint are dropped: they will be made again."""

    def __init__(self, path: Path, step: int):
        self.path = path
        kept = []
        if step and processes.first() and path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    row = json.loads(line)
                except ValueError:  # cut off by a kill
                    break
                # A step's row is of the update that leads from `step` to `step + 1`.
                if row["step"] < step or (row["step"] == step and "split" in row):
                    kept.append(line + "\n")
        write_text(path, "".join(kept))

    def rows(self, rows: Iterable[dict[str, Any]]) -> None:
        """Append rows; a number that is not finite is null. Of several processes, the first writes."""
        if not processes.first():
            return
        with self.path.open("a", encoding="utf-8") as file:
            for row in rows:
                finite = {k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in row.items()}
                file.write(json.dumps(finite) + "\n")

    def steps(self, start: int, record: Record) -> None:
        """A row for each update from `start` on."""
        count = len(record["loss"])
        self.rows({"step": start + i, **{name: float(x[i]) for name, x in record.items()}} for i in range(count))


def _trace(folder: Path, on: bool) -> Any:
    """A profiler trace of the block if `on`."""
    import contextlib

    return jax.profiler.trace(str(folder)) if on else contextlib.nullcontext()
