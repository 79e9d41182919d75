"""What training costs, by count and by a step on this machine: for --plan."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.program import run_key, stack, take_steps
from transformer_jax import sharding
from transformer_jax.config import Config, Hyper
from transformer_jax.data import Task, make_task
from transformer_jax.meter import Cost, measure
from transformer_jax.train import init_state, train_step


def step_cost(config: Config, hyper: Hyper, task: Task) -> Cost:
    """Products (FLOPs) and live bytes of one training step, counted from its jaxpr: nothing is run."""
    key = jax.random.key(0)
    state = jax.eval_shape(lambda: init_state(config, hyper, key))
    batch = jax.eval_shape(lambda: task.train_batch(task.data, key))
    return measure(lambda state, batch: train_step(config, state, hyper, batch), state, batch)


def seconds_per_run_step(config: Config, hyper: Hyper, steps: int = 10) -> float:
    """Seconds that a run's step takes in a sweep: every device trains a copy for a few steps, as a group does."""
    task, mesh = make_task(config), sharding.runs_mesh()

    def train(hyper: Hyper, key: jax.Array, stop: jax.Array, data: Any) -> jax.Array:
        return take_steps(config, task, init_state(config, hyper, key), hyper, stop, steps + 1, data)[1]["loss"]

    program = sharding.over_runs(train, mesh, shared=2, donate=False)
    runs = sharding.place_runs((stack([hyper] * mesh.size), jnp.stack([run_key(0)] * mesh.size)), mesh)
    data = sharding.place_shared(task.data, mesh)

    def seconds(stop: int) -> float:
        begun = time.perf_counter()
        jax.block_until_ready(program(*runs, np.int32(stop), data))
        return time.perf_counter() - begun

    seconds(1)  # compiles
    few, more = (min(seconds(stop) for _ in range(3)) for stop in (1, steps + 1))
    return max(more - few, 1e-9) / steps / mesh.size
