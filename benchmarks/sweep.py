"""Milliseconds per arm and step of a sweep, by how its runs are laid over the machine.

    make bench BENCH=sweep
    make bench BENCH=sweep ARGS="--rounds 5"

36 runs (12 arms x 3 seeds) of D64 N4 L2 T64 B16 on real text; the layouts take turns, so
that a change of the machine's speed meets them all: only ratios within one run mean anything.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

from experiments import program
from experiments.cost import step_cost
from transformer_jax import sharding
from transformer_jax.config import Config, Hyper
from transformer_jax.data import make_task, resolve
from transformer_jax.encoder_decoder import count_parameters

CONFIG = Config(num_heads=4, num_layers=2, d_model=64, seq_len=64, batch_size=16, steps=1000, scan_unroll=0)
ARMS = [Hyper(learning_rate=rate, dk_exponent=e) for rate in (1e-3, 3e-3, 1e-2, 3e-2) for e in (0.0, 0.5, 1.0)]
SEEDS = 3
STEPS = 10


def main() -> None:
    """Print a row for each layout: median milliseconds per arm and step, compile seconds, programs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    sharding.use_cpu_cores()
    config = resolve(CONFIG)
    task = make_task(config)
    runs = [(hyper, seed) for hyper in ARMS for seed in range(SEEDS)]
    hypers = program.stack([hyper for hyper, _ in runs])
    keys = jnp.stack([program.run_key(seed) for _, seed in runs])
    layouts = {}
    for devices in sorted({1, len(jax.devices())}):
        for name, one_by_one in (("one by one", True), ("together", False)):
            layouts[f"{name}, {devices} devices"] = program.build(
                config, task, program.nothing_observed, STEPS, devices=devices, one_by_one=one_by_one
            )
    states, placed, compile_seconds, times = {}, {}, {}, {name: [] for name in layouts}
    for name, made in layouts.items():
        one = made.empty(jax.tree.map(lambda x: x[0], hypers), keys[0])
        state = jax.tree.map(lambda x: np.zeros((len(runs), *x.shape), x.dtype), one)
        state, placed[name] = sharding.place_runs((state, (hypers, keys)), made.mesh)
        begun = time.perf_counter()
        states[name] = _call(made, state, placed[name], 0, 0, task)
        compile_seconds[name] = time.perf_counter() - begun
    for r in range(rounds):
        for name, made in layouts.items():
            begun = time.perf_counter()
            states[name] = _call(made, states[name], placed[name], r * STEPS, (r + 1) * STEPS, task)
            times[name].append(time.perf_counter() - begun)
    print(f"{len(runs)} runs of {count_parameters(config):,} parameters, {rounds} rounds of {STEPS} steps")
    gflops = step_cost(config, ARMS[0], task).products / 1e9
    for name, made in layouts.items():
        ms = 1e3 * np.asarray(times[name]) / len(runs) / STEPS
        compiled = f"compiled {made.call._cache_size()} in {compile_seconds[name]:.1f} s"
        print(
            f"{name:24} {np.median(ms):6.2f} ms per arm and step (least {ms.min():.2f}), "
            f"{gflops / np.median(ms) * 1e3:.0f} GFLOP/s  {compiled}"
        )


def _call(made, state, placed, start, stop, task):
    data = sharding.place_shared(task.data, made.mesh)
    state, rows = made.call(state, *placed, np.int32(start), np.int32(stop), np.bool_(False), data)
    jax.block_until_ready((state, rows))
    return state


if __name__ == "__main__":
    main()
