"""Compile the real training step for a TPU pod that is not there, and say whether it would fit.

    python launch.py --experiment=compile --topology=v5e:4x4 --preset=llama_1b --mesh=fsdp:16
    python launch.py --experiment=compile --topology=v5p:4x4x4 --preset=llama_8b --mesh=fsdp:64 --workdir=runs/pod
    python launch.py --experiment=compile --topology=v6e:8x8 --preset=tiny --mesh=sweep:64

Needs the extra [tpu] (libtpu, the compiler). Printed, for one chip: bytes of arguments (parameters, moments, batch)
and of what the step needs beside them, against the chip's memory; the step's FLOPs, counted from its jaxpr, and
how long they take at the chip's peak; the collectives of the compiled program; and every stacked parameter that is
gathered whole, which should be none: a layer's share is gathered where it is used. --mesh=sweep:N compiles a sweep's
program instead: arms over the pod, one a chip (--seeds: how many in all), with no collective. Exit code 1 if
it does not fit or gathers a whole parameter. Expected: llama_1b on v5e:4x4 as above fits.
"""

import dataclasses
import itertools
import math
import time
from typing import Any

import jax
import jax.numpy as jnp

from experiments import program
from experiments.flags import Settings
from experiments.report import duration, memory, short
from experiments.terminal import console_of, say, table
from experiments.workdir import open_workdir
from transformer_jax import collectives, meter, sharding, topology
from transformer_jax.batch import Batch
from transformer_jax.config import Config, Hyper, to_dict, with_terms
from transformer_jax.data import make_task, resolve
from transformer_jax.errors import ConfigError
from transformer_jax.train import TrainState, init_state, train_step

FLAGS = ("topology", "mesh", "preset", "workdir", "overwrite", "seeds")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What one chip holds and does. Bytes on one chip; flops of all chips together, `elementwise` not in them.

    arguments: parameters, moments, key and batch, which the step updates in place. temporary: everything else at
    the worst moment. gathered: stacked parameters that some chip holds whole at once.
    """

    chips: int
    parameters: int
    arguments: int
    temporary: int
    flops: int
    seconds: float
    found: list[collectives.Collective]
    gathered: list[str]

    @property
    def total(self) -> int:
        return self.arguments + self.temporary


def batch_shapes(config: Config) -> Batch:
    """Shapes of a training batch of the architecture: [B, T] ids, and as long a source where it has one."""
    B, T = config.batch_size, config.seq_len
    ids, weights = jax.ShapeDtypeStruct((B, T), jnp.int32), jax.ShapeDtypeStruct((B, T), jnp.float32)
    shapes: Any = (ids, ids, weights)
    batch: Any = Batch(*shapes)
    if config.architecture != "encoder_decoder":
        return batch
    return batch.replace(source_BS=ids, source_lengths_B=jax.ShapeDtypeStruct((B,), jnp.int32))


def compile_step(config: Config, hyper: Hyper, mesh: Any) -> Compiled:
    """train_step over `mesh`, its state placed by the letters of its names; nothing is allocated."""
    numbers = jax.tree.map(jnp.asarray, hyper)
    shapes = jax.eval_shape(lambda key: init_state(config, numbers, key), program.run_key(0))
    state = sharding.abstract(shapes, mesh)
    batch = sharding.abstract(batch_shapes(config), mesh, sharding.ACTIVATIONS)
    constrain = sharding.constrain(mesh)

    def step(state: TrainState, hyper: Hyper, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        return train_step(config, state, hyper, batch, constrain)

    placed = sharding.abstract(numbers, mesh)
    out = (jax.tree.map(lambda x: x.sharding, state), sharding.replicated(mesh))
    jitted = jax.jit(step, donate_argnums=0, out_shardings=out)
    begun = time.perf_counter()
    compiled = jitted.lower(state, placed, batch).compile()
    seconds = time.perf_counter() - begun
    cost = meter.measure(lambda s, b: train_step(config, s, numbers, b), shapes, batch_shapes(config))
    found = collectives.read(str(compiled.as_text()))
    return Compiled(
        mesh.size,
        sum(leaf.size for leaf in jax.tree.leaves(shapes.params)),
        *_bytes(compiled),
        cost.products,
        seconds,
        found,
        gathered_whole(shapes.params, mesh, found),
    )


def compile_sweep(config: Config, hyper: Hyper, runs: int, mesh: Any) -> Compiled:
    """A sweep's program of `runs` runs over `mesh`, for a chunk of 10 steps, with its measurements."""
    task = make_task(config)
    made = program.build(config, task, program.nothing_observed, chunk=10, mesh=mesh)
    shapes = jax.eval_shape(lambda key: program.keyless(init_state(config, hyper, key)), program.run_key(0))
    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((runs, *x.shape), x.dtype), shapes)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), runs))
    states, hypers, keys = sharding.abstract_runs((stacked, program.stack([hyper] * runs), keys), mesh)
    numbers = (jax.ShapeDtypeStruct((), "int32"),) * 2 + (jax.ShapeDtypeStruct((), "bool"),)
    begun = time.perf_counter()
    compiled = made.call.lower(states, hypers, keys, *numbers, sharding.abstract_shared(task.data, mesh)).compile()
    seconds = time.perf_counter() - begun
    full = jax.eval_shape(lambda key: init_state(config, hyper, key), program.run_key(0))
    step = meter.measure(lambda s, b: train_step(config, s, hyper, b), full, batch_shapes(config))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(full.params))
    found = collectives.read(str(compiled.as_text()))
    return Compiled(mesh.size, parameters, *_bytes(compiled), step.products * runs, seconds, found, [])


def _bytes(compiled: Any) -> tuple[int, int]:
    """Of arguments, and of what comes on top of them, on one device."""
    held = compiled.memory_analysis()
    beside = held.temp_size_in_bytes + held.output_size_in_bytes - held.alias_size_in_bytes
    return held.argument_size_in_bytes, beside + held.generated_code_size_in_bytes


def gathered_whole(params: Any, mesh: Any, found: list[collectives.Collective]) -> list[str]:
    """Stacked parameters (with a leading L) of which one collective gathers every layer at once.

    Told by the shape: all the numbers, or their share where other axes stay split, in an array that
    has L among its sides (one layer of another parameter may hold as many, but has no such side).
    """
    axes = {row.path: [axis for axis in row.spec if axis] for row in sharding.placements(params, mesh)}
    shapes = [dims for row in found if row.kind == "all-gather" for dims in collectives.shapes(row.shape)]
    whole = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if "layers" not in name or leaf.ndim < 3 or leaf.shape[0] == 1:
            continue
        split = [mesh.shape[axis] for axis in axes[name]]
        kept = {math.prod(part) for n in range(len(split)) for part in itertools.combinations(split, n)}
        if any(math.prod(dims) * n == leaf.size and leaf.shape[0] in dims for dims in shapes for n in kept | {1}):
            whole.append(name)
    return whole


def run(settings: Settings) -> int:
    """Compile, print, write compile.json; 0 if it fits and gathers no parameter whole."""
    if not settings.topology or not settings.mesh:
        raise ConfigError("--topology and --mesh are wanted: --topology=v5e:4x4 --mesh=fsdp:16 names a pod and its use")
    config, hyper = settings.configure(Config())
    config = resolve(with_terms(config, [hyper]))
    axes = sharding.parse_mesh(settings.mesh, (*sharding.AXES, sharding.RUNS))
    if sharding.RUNS in axes and len(axes) > 1:
        raise ConfigError(f"--mesh={settings.mesh}: {sharding.RUNS} stands alone, an arm is on one chip")
    devices, chip = topology.slice_of(settings.topology)
    mesh = sharding.make_mesh(axes, devices)
    identity = {"experiment": "compile", "config": to_dict(config), "topology": settings.topology, "mesh": axes}
    workdir = None
    if settings.workdir:
        workdir = open_workdir(settings.workdir, identity, {}, overwrite=settings.overwrite)
    if sharding.RUNS in axes:
        runs = settings.seeds or mesh.size
        if runs % mesh.size:
            raise ConfigError(f"--seeds={runs} arms over {mesh.size} chips: a multiple of them is wanted")
        made = compile_sweep(config, hyper, runs, mesh)
    else:
        made = compile_step(config, hyper, mesh)
        for line in sharding.dropped(config, _params(config), mesh):
            say(console_of(None), line, "yellow")
    _print(made, settings, chip)
    if workdir:
        found = [dataclasses.asdict(row) for row in made.found]
        workdir.write("compile.json", dataclasses.asdict(made) | {"found": found, "memory": chip.memory})
    return 0 if made.total <= chip.memory and not made.gathered else 1


def _params(config: Config) -> Any:
    return jax.eval_shape(lambda key: init_state(config, Hyper(), key), program.run_key(0)).params


def _print(made: Compiled, settings: Settings, chip: topology.Chip) -> None:
    console = console_of(None)
    what = f"{made.parameters:,} parameters on {settings.topology}, {made.chips} chips as {settings.mesh}"
    say(console, f"{settings.preset or 'the configuration'}: {what}; compiled in {duration(made.seconds)}", "bold")
    share = made.total / chip.memory
    rows = [
        ("arguments: parameters, moments, batch", memory(made.arguments)),
        ("beside them, at the worst moment", memory(made.temporary)),
        ("in all", f"{memory(made.total)}, {share:.0%} of {memory(chip.memory)}"),
    ]
    table(console, ("a chip", ""), rows)
    ideal = made.flops / made.chips / chip.flops
    say(console, f"a step: {short(made.flops)} FLOPs of products; {duration(ideal)} at the chips' bfloat16 peak")
    say(console)
    totals = collectives.totals(made.found)
    if totals:
        rows = [(kind, f"{count:,}", memory(size)) for kind, (count, size) in totals.items()]
        table(console, ("collective", "times a step", "bytes a chip"), rows)
    else:
        say(console, "no collective")
    for name in made.gathered:
        say(console, f"gathered whole, all layers at once: {name}", "yellow")
    if not made.gathered:
        say(console, "no stacked parameter is gathered outside its layer")
    if made.total > chip.memory:
        say(console, f"does not fit: {memory(made.total)} of {memory(chip.memory)} a chip", "yellow")
