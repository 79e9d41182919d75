"""The host side of a sweep: groups one after the other, chunk by chunk, saved and resumable."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments import program as programs
from experiments.grid import Arm, Group, Run, group_runs, hyper_of
from experiments.interrupt import Stopper
from experiments.progress import Bar
from transformer_jax import checkpoint, sharding
from transformer_jax.config import Config, Hyper, to_dict
from transformer_jax.data import Task, make_task
from transformer_jax.saver import Saver

SAVE_SECONDS = 20.0  # between saves, unless --checkpoint_every asks for every chunk
CERTIFIED_STEPS = 100


def no_floor(config: Config) -> float:
    """For a primary loss that is shown as it is."""
    return 0.0


@dataclasses.dataclass(frozen=True)
class Question:
    """What a sweep asks. Arms are compared on `primary` (lower is better), each at its own best rate.

    comparisons: at most six pairs of arm names, fixed before the run. losses: name -> what is
    measured on both splits beside the loss, and may be `primary`. floor: what `primary` leaves out of an
    arm's loss; it is taken off the training losses that are drawn beside it. notes: lines for the results.
    """

    name: str
    title: str
    arms: tuple[Arm, ...]
    learning_rates: tuple[float, ...]
    comparisons: tuple[tuple[str, str], ...]
    observe: programs.Observe = programs.nothing_observed
    losses: Mapping[str, programs.Loss] = dataclasses.field(default_factory=dict)
    primary: str = "report_loss"
    selection: str = "selection_loss"
    floor: Callable[[Config], float] = no_floor
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class RunResult:
    """One run's numbers. loss, grad_norm [steps]; marks: the steps at which `measured` [M, …] was taken."""

    loss: np.ndarray
    grad_norm: np.ndarray
    marks: tuple[int, ...]
    measured: dict[str, np.ndarray]

    @property
    def diverged(self) -> int | None:
        """The first step whose loss is not finite; the last step if only the final measurement is not."""
        bad = np.flatnonzero(~np.isfinite(self.loss))
        if len(bad):
            return int(bad[0])
        ends = [self.measured[name][-1] for name in self.measured if name.endswith("_loss")]
        return None if all(np.isfinite(ends)) else len(self.loss)

    def final(self, name: str) -> float | None:
        """A scalar measurement at the end; None for a diverged run."""
        return None if self.diverged is not None else float(self.measured[name][-1])


@dataclasses.dataclass
class Outcome:
    """A sweep's results so far; `stopped` says why it is not complete ("" if it is)."""

    question: Question
    seeds: int
    results: dict[Run, RunResult] = dataclasses.field(default_factory=dict)
    certificate: programs.Certificate = dataclasses.field(default_factory=programs.Certificate)
    programs_compiled: int = 0
    wall_seconds: float = 0.0
    tokens_per_second: float = 0.0
    stopped: str = ""
    notes: list[str] = dataclasses.field(default_factory=list)

    def of(self, arm: int, rate: float) -> list[RunResult]:
        """The runs of an arm at a learning rate, by seed."""
        return [self.results[Run(arm, rate, seed)] for seed in range(self.seeds)]


@dataclasses.dataclass
class _Progress:
    """Where a group is: states and record with a leading R, and the marks measured so far."""

    states: Any
    record: dict[str, np.ndarray]
    marks: list[int]

    @property
    def step(self) -> int:
        return self.record["loss"].shape[1]


def run_sweep(
    question: Question,
    seeds: int,
    folder: Path,
    *,
    blocks: Sequence[tuple[int, int]],
    chunk: int = 0,
    checkpoint_every: int = 0,
    devices: int = 0,
    stop: Stopper,
) -> Outcome:
    """Train every arm at every rate with every seed; resume what `folder` holds.

    blocks: ranges of seeds that were added together, (0, 6) for a new sweep of six.
    chunk: steps a call (0: a sixth of the run, at most 50). checkpoint_every: steps
    between saves (0: by time). devices: the first so many (0: all). stop: asked at each chunk's
    end; the state is saved first.
    """
    start, outcome = time.monotonic(), Outcome(question, seeds, notes=list(question.notes))
    groups = [
        (f"group{g}_seeds{first}-{last - 1}", group)
        for first, last in blocks
        for g, group in enumerate(group_runs(question.arms, question.learning_rates, range(first, last)))
    ]
    total = sum(group.config.steps * len(group.runs) for _, group in groups)
    with Bar(question.name, total) as bar:
        done = 0
        for i, (name, group) in enumerate(groups):
            config = group.config
            steps_a_call = checkpoint_every or chunk or min(50, -(-config.steps // 6))
            job = _GroupJob(question, group, folder / "checkpoints" / name, min(steps_a_call, config.steps), devices)
            every = SAVE_SECONDS if not checkpoint_every else 0.0
            bar_title = f"{question.name} {i + 1}/{len(groups)}"
            finished = job.train(bar, bar_title, done, every, stop)
            outcome.notes += job.notes
            outcome.programs_compiled += job.compiled
            if not finished:
                outcome.stopped = stop.reason
                break
            done += config.steps * len(group.runs)
            outcome.results |= job.results()
            outcome.certificate.add(job.certify())
    outcome.results = at_common_marks(outcome.results)
    outcome.wall_seconds = time.monotonic() - start
    tokens = sum(g.config.steps * len(g.runs) * g.config.batch_size * g.config.seq_len for _, g in groups)
    outcome.tokens_per_second = tokens / outcome.wall_seconds
    return outcome


def at_common_marks(results: Mapping[Run, RunResult]) -> dict[Run, RunResult]:
    """What was measured at the steps that all runs share, the first and the last among them.

    Chunks end elsewhere where steps, seeds or --checkpoint_every have changed on the way, and means over seeds
    are of one step.
    """
    shared = set.intersection(*(set(run.marks) for run in results.values())) if results else set()

    def kept(run: RunResult) -> RunResult:
        places = [m for m, mark in enumerate(run.marks) if mark in shared]
        measured = {name: x[places] for name, x in run.measured.items()}
        return dataclasses.replace(run, marks=tuple(run.marks[m] for m in places), measured=measured)

    return {run: kept(result) for run, result in results.items()}


class _GroupJob:
    """One group's training: builds its program, restores, advances, saves."""

    def __init__(self, question: Question, group: Group, folder: Path, chunk: int, devices: int):
        self.question, self.group, self.folder, self.chunk = question, group, folder, chunk
        self.notes: list[str] = []
        self.task: Task = make_task(group.config)
        self.program = programs.build(
            group.config, self.task, question.observe, chunk, devices=devices, losses=question.losses
        )
        mesh = self.program.mesh
        # The last run is repeated to fill the devices; the copies are dropped at the end.
        runs = list(group.runs) + [group.runs[-1]] * (-len(group.runs) % mesh.size)
        hypers = programs.stack([hyper_of(question.arms, run) for run in runs])
        keys = jax.numpy.stack([programs.run_key(run.seed) for run in runs])
        self.hypers, self.keys = sharding.place_runs((hypers, keys), mesh)
        self.data = sharding.place_shared(self.task.data, mesh)
        self.R = len(runs)
        self._now: _Progress | None = None

    @property
    def now(self) -> _Progress:
        """Where the group is; only after `train`."""
        if self._now is None:
            raise RuntimeError("the group has not been trained")
        return self._now

    @property
    def compiled(self) -> int:
        return self.program.call._cache_size()

    def _empty_states(self) -> Any:
        one = self.program.empty(jax.tree.map(lambda x: x[0], self.hypers), self.keys[0])
        return jax.tree.map(lambda x: np.zeros((self.R, *x.shape), x.dtype), one)

    def _call(self, states: Any, start: int, stop: int) -> tuple[Any, tuple[dict, dict]]:
        final = np.bool_(stop == self.group.config.steps)
        return self.program.call(states, self.hypers, self.keys, np.int32(start), np.int32(stop), final, self.data)

    def _restore(self) -> _Progress | None:
        """The newest good checkpoint of this group, or None; whatever number of devices it was saved on."""
        if not self.folder.is_dir() or not checkpoint.steps(self.folder):
            return None
        states = sharding.abstract_runs(self._empty_states(), self.program.mesh)
        rows = jax.eval_shape(
            lambda *args: self.program.call(*args)[1],
            states, self.hypers, self.keys, np.int32(0), np.int32(0), np.bool_(False), self.data,
        )  # fmt: skip

        def like(meta: Mapping[str, Any]) -> Any:
            marks, R = meta["marks"], meta.get("copies", self.R)
            record = {name: np.zeros((R, marks[-1]), np.float32) for name in programs.RECORDED}
            for name, x in rows[1].items():
                record[name] = np.zeros((R, len(marks), *x.shape[1:]), x.dtype)
            if R == self.R:
                return {"states": states, "record": record}
            return {"states": jax.tree.map(lambda x: np.zeros((R, *x.shape[1:]), x.dtype), states), "record": record}

        restored = checkpoint.restore_latest(self.folder, like)
        self.notes += restored.notes
        held, marks = restored.state, list(restored.meta["marks"])
        if restored.meta.get("copies", self.R) != self.R:
            # As many runs, but others fill the devices up: the last one's copies, as in __init__.
            count = len(self.group.runs)
            places = np.minimum(np.arange(self.R), count - 1)
            held = jax.tree.map(lambda x: np.asarray(x)[places], held)
            held["states"] = sharding.place_runs(held["states"], self.program.mesh)
        return _Progress(held["states"], held["record"], marks)

    def train(self, bar: Bar, title: str, done: int, save_seconds: float, stop: Stopper) -> bool:
        """Advance to the last step; False if stopped before. Saved in both cases."""
        config, runs = self.group.config, len(self.group.runs)
        tokens_a_step = runs * config.batch_size * config.seq_len
        self._now = self._restore()
        with Saver(self.folder, keep=2, resumed=self._now.step if self._now else None) as saver:
            saved = self._now.step if self._now else -1
            last_save = time.monotonic()
            while self._now is None or self._now.step < config.steps:
                self._advance()
                step = self.now.step
                loss = self.now.record["loss"][:runs, -1] if step else self.now.record["selection_loss"][:runs, -1]
                shown = loss[np.isfinite(loss)]
                bar.update(
                    done + runs * step, title=title,
                    tokens=tokens_a_step * (min(self.chunk, step)),
                    loss=float(np.mean(shown)) if len(shown) else float("nan"),
                )  # fmt: skip
                reason = stop.reason
                if reason or step == config.steps or time.monotonic() - last_save >= save_seconds:
                    self._save(saver)
                    saved, last_save = step, time.monotonic()
                if reason and step < config.steps:
                    return False
            if saved < self.now.step:
                self._save(saver)
        return True

    def _advance(self) -> None:
        """One call of the program: the measurement before training, or a chunk of steps."""
        config = self.group.config
        if self._now is None:
            states = sharding.place_runs(self._empty_states(), self.program.mesh)
            states, (_, measured) = self._call(states, 0, 0)
            record = {name: np.zeros((self.R, 0), np.float32) for name in programs.RECORDED}
            record |= {name: np.asarray(x)[:, None] for name, x in measured.items()}
            self._now = _Progress(states, record, [0])
            return
        start = self.now.step
        stop = min(start + self.chunk, config.steps)
        states, (steps, measured) = self._call(self.now.states, start, stop)
        record = dict(self.now.record)
        for name, x in steps.items():
            record[name] = np.concatenate([record[name], np.asarray(x)[:, : stop - start]], axis=1)
        for name, x in measured.items():
            record[name] = np.concatenate([record[name], np.asarray(x)[:, None]], axis=1)
        self._now = _Progress(states, record, [*self.now.marks, stop])

    def _save(self, saver: Saver) -> None:
        # A run's key follows from its seed, and its batches from (key, step): the last mark is the data's position.
        meta = {
            "marks": self.now.marks,
            "config": to_dict(self.group.config),
            "runs": [dataclasses.asdict(run) for run in self.group.runs],
            "hypers": [to_dict(hyper_of(self.question.arms, run)) for run in self.group.runs],
            "data": self.task.sha256,
            "tokenizers": "" if self.task.text is None else self.task.text.tokenizers.sha256,
            # With these a reader needs no program to know what was saved (see trained.py).
            "copies": self.R,
            "record": {name: [list(x.shape), str(x.dtype)] for name, x in self.now.record.items()},
        }
        saver.save(self.now.step, {"states": self.now.states, "record": self.now.record}, meta)

    def results(self) -> dict[Run, RunResult]:
        """Each run's numbers, the filling copies dropped."""
        record, out = self.now.record, {}
        for r, run in enumerate(self.group.runs):
            measured = {name: x[r] for name, x in record.items() if name not in programs.RECORDED}
            out[run] = RunResult(record["loss"][r], record["grad_norm"][r], tuple(self.now.marks), measured)
        return out

    def certify(self) -> programs.Certificate:
        """One run of the group, from its middle, alone against itself inside."""
        r = len(self.group.runs) // 2
        run, steps = self.group.runs[r], min(CERTIFIED_STEPS, self.group.config.steps)
        hyper = hyper_of(self.question.arms, run)
        losses, mesh = self.now.record["loss"][r], self.program.mesh
        return programs.certify(self.group.config, self.task, hyper, run.seed, losses, steps, mesh)


def plan(question: Question, seeds: int) -> dict[str, Any]:
    """What the sweep would do, without doing it: groups, runs, parameters, seconds and bytes (estimates).

    Seconds come from timing a few steps of each group on all devices; compilation, evaluation
    and what the question measures come on top.
    """
    groups = group_runs(question.arms, question.learning_rates, range(seeds))
    return {
        "arms": [arm.name for arm in question.arms],
        "learning_rates": list(question.learning_rates),
        "seeds": seeds,
        "groups": [
            _plan_group(group.config, question.arms[group.runs[0].arm].hyper, len(group.runs)) for group in groups
        ],
    }


def _plan_group(config: Config, hyper: Hyper, runs: int) -> dict[str, Any]:
    from experiments.cost import seconds_per_run_step, step_cost
    from transformer_jax.encoder_decoder import count_parameters

    parameters = count_parameters(config)
    devices = len(jax.devices())
    cost = step_cost(config, hyper, make_task(config))
    copies = {"adam": 3, "adamw": 3, "momentum": 2, "sgd": 1}[config.optimizer]
    return {
        "runs": runs,
        "parameters": parameters,
        "steps": config.steps,
        "flops": float(cost.products) * config.steps * runs,
        "seconds": seconds_per_run_step(config, hyper) * config.steps * runs,
        "bytes": 4 * copies * parameters * runs + (cost.working_bytes + 4 * copies * parameters) * devices,
    }
