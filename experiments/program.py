"""The ablation compiler: all runs of a group as one XLA program.

A group is the runs that share a Config; they differ in Hyper and key. One call of the
program takes every run from step `start` to step `stop`, measures it there, and returns
its state: initialisation (start 0), training, probing and evaluation are all inside, with
the step numbers traced, so that a group compiles once whatever the chunks are.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax import sharding
from transformer_jax.batch import Batch
from transformer_jax.config import Config, Hyper
from transformer_jax.data import Task
from transformer_jax.layers import UNCONSTRAINED, Constrain
from transformer_jax.losses import Sums
from transformer_jax.train import TrainState, batch_key, eval_step, init_state, train_step

# What a question measures on a run between chunks: (config, hyper, params, batch) -> arrays.
Observe = Callable[[Config, Hyper, Any, Batch], dict[str, jax.Array]]
# Another loss of an evaluation batch: (config, params, hyper, batch, the batch's index) -> sums over its tokens.
Loss = Callable[[Config, Any, Hyper, Batch, jax.Array], Sums]

RECORDED = ("loss", "grad_norm")  # of each training step


def nothing_observed(config: Config, hyper: Hyper, params: Any, batch: Batch) -> dict[str, jax.Array]:
    """For a question that only asks for losses."""
    return {}


def check(config: Config, hyper: Hyper, task: Task, constrain: Constrain = UNCONSTRAINED) -> None:
    """Trace a training step without running it: what the program cannot do is refused before a file is made."""

    def step(key: jax.Array) -> Any:
        return train_step(config, init_state(config, hyper, key), hyper, task.train_batch(task.data, key), constrain)

    jax.eval_shape(step, jax.random.key(0))


def check_measured(
    config: Config, hyper: Hyper, task: Task, observe: Observe, losses: Mapping[str, Loss] = MappingProxyType({})
) -> None:
    """As `check`, for what is measured between the steps."""

    def step(key: jax.Array) -> Any:
        return measure(
            config, task, observe, init_state(config, hyper, key), hyper, jnp.bool_(True), 1, task.data, losses
        )

    jax.eval_shape(step, jax.random.key(0))


@dataclasses.dataclass(frozen=True)
class Program:
    """One group's program: `call(states, hypers, keys, start, stop, final, data)`.

    states: TrainState without its key, leading axis R. Returns (states, Rows).
    """

    call: Callable[..., Any]
    mesh: Any
    chunk: int
    empty: Callable[[Hyper, jax.Array], Any]


def keyless(state: TrainState) -> TrainState:
    """The state without its key, which runs of a group are given anew: typed keys need not be stacked or saved."""
    return dataclasses.replace(state, key=None)


def take_steps(
    config: Config,
    task: Task,
    state: TrainState,
    hyper: Hyper,
    stop: jax.Array,
    chunk: int,
    data: Any,
    recorded: Sequence[str] = RECORDED,
    constrain: Constrain = UNCONSTRAINED,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Train from state.step to `stop`, at most `chunk` updates; the recorded metrics [chunk], NaN where not reached."""
    start = state.step

    def body(i: jax.Array, carry: tuple[TrainState, dict[str, jax.Array]]) -> tuple[TrainState, dict[str, jax.Array]]:
        state, record = carry
        batch = task.train_batch(data, batch_key(state.key, state.step))
        state, metrics = train_step(config, state, hyper, batch, constrain)
        return state, {name: record[name].at[i - start].set(metrics[name]) for name in recorded}

    record = {name: jnp.full((chunk,), jnp.nan) for name in recorded}
    return jax.lax.fori_loop(start, stop, body, (state, record))


def measure(
    config: Config,
    task: Task,
    observe: Observe,
    state: TrainState,
    hyper: Hyper,
    final: jax.Array,
    quick: int,
    data: Any,
    losses: Mapping[str, Loss],
) -> dict[str, jax.Array]:
    """What the question observes, and on both splits loss, accuracy and curve.

    curve: the loss on about `quick` batches spread over the split, the same ones each time,
    so that it can be drawn over steps. loss, accuracy: on all batches if `final`, else on those.
    losses: name -> another loss, whose numbers are SPLIT_NAME_loss and so on.
    """
    out = dict(observe(config, hyper, state.weights, task.eval_batch(data, "selection", jnp.zeros((), jnp.int32))))
    # One loop over the batches of both splits: the forward pass is compiled once.
    splits, totals = list(task.eval_batches), np.asarray(list(task.eval_batches.values()))
    sparse = jnp.asarray(np.maximum(1, totals // quick))
    stride = jnp.where(final, 1, sparse)
    counts = -(-totals // stride)

    def plain(config: Config, params: Any, hyper: Hyper, batch: Batch, index: jax.Array) -> Sums:
        return eval_step(config, params, hyper, batch)

    asked: dict[str, Loss] = {"": plain} | {f"{name}_": loss for name, loss in losses.items()}

    def add(i: jax.Array, carry: tuple[dict[str, Sums], dict[str, Sums]]) -> tuple[dict[str, Sums], dict[str, Sums]]:
        which = (i >= counts[0]).astype(jnp.int32)
        index = (i - which * counts[0]) * stride[which]
        branches = [lambda j, s=split: task.eval_batch(data, s, j) for split in splits]
        batch = jax.lax.switch(which, branches, index)
        sums = {name: loss(config, state.weights, hyper, batch, index) for name, loss in asked.items()}
        on_curve = (index % sparse[which] == 0).astype(jnp.float32)
        every, curve = carry
        every = jax.tree.map(lambda total, x: total.at[which].add(x), every, sums)
        return every, jax.tree.map(lambda total, x: total.at[which].add(on_curve * x), curve, sums)

    zero = {name: jax.tree.map(lambda x: jnp.zeros((len(splits),)), Sums.zero(config.E > 0)) for name in asked}
    every, curve = jax.lax.fori_loop(0, counts[0] + counts[1], add, (zero, zero))
    for i, split in enumerate(splits):
        for name in asked:
            out[f"{split}_{name}loss"], out[f"{split}_{name}accuracy"] = every[name].loss[i], every[name].accuracy[i]
            out[f"{split}_{name}curve"] = curve[name].loss[i]
    return out


def build(
    config: Config,
    task: Task,
    observe: Observe,
    chunk: int,
    quick: int = 4,
    devices: int = 0,
    one_by_one: bool | None = None,
    mesh: Any = None,
    losses: Mapping[str, Loss] = MappingProxyType({}),
) -> Program:
    """The program of a group; it compiles at its first call, once for a number of runs.

    chunk: most steps of a call. quick: about how many evaluation batches of a split
    make its curve. devices, one_by_one: how the runs are laid out (see sharding.over_runs); the numbers do not change.
    mesh: of one axis, sharding.RUNS, in the place of this machine's devices. losses: measured beside the loss
    (see `measure`).
    """
    mesh = sharding.runs_mesh(devices) if mesh is None else mesh

    def one(
        state: TrainState, hyper: Hyper, key: jax.Array, start: jax.Array, stop: jax.Array, final: jax.Array, data: Any
    ) -> tuple[TrainState, tuple[dict, dict]]:
        def fresh() -> TrainState:
            return keyless(init_state(config, hyper, key))

        state = dataclasses.replace(jax.lax.cond(start == 0, fresh, lambda: state), key=key)
        state, record = take_steps(config, task, state, hyper, stop, chunk, data)
        measured = measure(config, task, observe, state, hyper, final, quick, data, losses)
        return keyless(state), (record, measured)

    def empty(hyper: Hyper, key: jax.Array) -> Any:
        shapes = jax.eval_shape(lambda h, k: keyless(init_state(config, h, k)), hyper, key)
        return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)

    return Program(sharding.over_runs(one, mesh, shared=4, one_by_one=one_by_one), mesh, chunk, empty)


def stack(hypers: Sequence[Hyper]) -> Hyper:
    """Hypers of plain numbers -> one Hyper of arrays [R]: float32, whole numbers int32."""

    def column(*values: Any) -> np.ndarray:
        return np.asarray(values, np.int32 if isinstance(values[0], int) else np.float32)

    return jax.tree.map(column, *hypers)


def run_key(seed: int) -> jax.Array:
    """The key of a seed: arms that share a seed share initial weights, batches and dropout."""
    return jax.random.key(seed)


@dataclasses.dataclass
class Certificate:
    """The proof that an arm inside the group is the arm alone."""

    arms_checked: int = 0
    steps: int = 0
    max_abs_difference: float = 0.0

    def add(self, other: "Certificate") -> None:
        self.arms_checked += other.arms_checked
        self.steps = max(self.steps, other.steps)
        self.max_abs_difference = max(self.max_abs_difference, other.max_abs_difference)


def certify(
    config: Config, task: Task, hyper: Hyper, seed: int, losses: np.ndarray, steps: int, mesh: Any
) -> Certificate:
    """Re-run one arm alone, without its group, and compare its first `steps` losses with `losses`.

    Every device of the group's mesh runs a copy of the one arm: how XLA's CPU backend splits
    a sum depends on the number of devices (4.8e-7 after 40 steps between one and two), and on
    nothing else that a group changes. Nothing is measured in between.
    """

    def alone(hyper: Hyper, key: jax.Array, stop: jax.Array, data: Any) -> jax.Array:
        _, record = take_steps(config, task, init_state(config, hyper, key), hyper, stop, steps, data)
        return record["loss"]

    program = sharding.over_runs(alone, mesh, shared=2, donate=False)
    hypers, keys = stack([hyper] * mesh.size), jnp.stack([run_key(seed)] * mesh.size)
    args = (*sharding.place_runs((hypers, keys), mesh), np.int32(steps), sharding.place_shared(task.data, mesh))
    solo, losses = np.asarray(program(*args))[0], losses[:steps]
    if not np.array_equal(np.isfinite(solo), np.isfinite(losses)):
        return Certificate(1, steps, float("inf"))
    return Certificate(1, steps, float(np.max(np.abs(solo - losses), where=np.isfinite(losses), initial=0.0)))
