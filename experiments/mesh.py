"""Where a mesh puts every array, and what its devices say to each other: read from the compiled training step.

    JAX_NUM_CPU_DEVICES=8 python launch.py --experiment=mesh --mesh=data:2,fsdp:2,model:2 --preset=mini_llama_40m
    python launch.py --experiment=mesh --mesh=fsdp:4,seq:2 --seq_len=8192 --workdir=runs/mesh

Nothing is trained and no parameter is made; the step is compiled for the devices that are there, which
on a CPU may be as many as JAX_NUM_CPU_DEVICES says. Expected, of the first: a quarter of the parameters
and of the moments on each device (39.9 of 160 MiB, 79.8 of 319), as data does not split them; weights
gathered over fsdp, activations of 2 rows summed over model, gradients summed over data and fsdp, in all
378 MiB a step. XLA's CPU backend has no reduce-scatter: gradients of what fsdp splits are summed whole
and then cut, which accelerators do in one.
"""

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import jax

from experiments.flags import Settings
from experiments.report import memory
from experiments.terminal import console_of, say, table
from experiments.train import configuration
from experiments.workdir import open_workdir
from transformer_jax import collectives, sharding
from transformer_jax.config import Config, Hyper, to_dict
from transformer_jax.data import Task
from transformer_jax.errors import ConfigError
from transformer_jax.train import TrainState, init_state, train_step

if TYPE_CHECKING:
    from rich.console import Console

FLAGS = ("mesh", "preset", "workdir", "overwrite")
# Named scopes of the model, in the order of the computation.
SCOPES = ("embedding", "self_attention", "cross_attention", "router", "experts", "ffn", "unembed", "loss")
SHOWN = 16  # rows of the table of collectives; all are in mesh.json


def compiled_step(config: Config, hyper: Hyper, task: Task, mesh: sharding.Mesh) -> tuple[Any, TrainState]:
    """The compiled training step on the mesh, and the abstract state that it takes."""
    constrain = sharding.constrain(mesh)
    key = jax.random.key(0)
    state = sharding.abstract(jax.eval_shape(lambda: init_state(config, hyper, key)), mesh)
    batch = jax.eval_shape(lambda data: task.train_batch(data, key), task.data)
    batch = sharding.abstract(batch, mesh, sharding.ACTIVATIONS)
    places = jax.tree.map(lambda x: x.sharding, state)

    def step(state: TrainState, hyper: Hyper, batch: Any) -> Any:
        return train_step(config, state, hyper, batch, constrain)

    step = jax.jit(step, donate_argnums=0, out_shardings=(places, sharding.replicated(mesh)))
    return step.lower(state, hyper, batch).compile(), state


def describe(config: Config, hyper: Hyper, task: Task, mesh: sharding.Mesh) -> dict[str, Any]:
    """All that mesh.json holds: bytes are those of one device."""
    compiled, state = compiled_step(config, hyper, task, mesh)
    parameters = sharding.placements(state.params, mesh)
    moments = sharding.placements(state.opt_state, mesh)
    activations = sharding.placements(sharding.activations(config), mesh, sharding.ACTIVATIONS)
    found, used = collectives.read(compiled.as_text()), compiled.memory_analysis()
    return {
        "experiment": "mesh",
        "mesh": dict(mesh.shape),
        "devices": mesh.size,
        "device_kind": mesh.devices.flat[0].device_kind,
        "parameters": [_row(p) for p in parameters],
        "activations": [_row(p) for p in activations],
        "dropped": sharding.dropped(config, state.params, mesh),
        "bytes": {
            "parameters": sum(p.bytes for p in parameters),
            "optimizer": sum(p.bytes for p in moments),
            "parameters_whole": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.params)),
            "optimizer_whole": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.opt_state)),
            "arguments": used.argument_size_in_bytes,
            "temporary": used.temp_size_in_bytes,
        },
        "collectives": [vars(c) | {"where": where(c.place)} for c in found],
        "totals": collectives.totals(found),
    }


def _row(p: sharding.Placement) -> dict[str, Any]:
    spec = [list(axes) if isinstance(axes, tuple) else [axes] if axes else [] for axes in p.spec]
    spec += [[]] * (len(p.shape) - len(spec))
    return {"path": p.path, "shape": list(p.shape), "letters": p.letters, "spec": spec, "bytes": p.bytes}


def where(place: str) -> str:
    """The part of the step that an operation belongs to, from XLA's name of it."""
    scopes = [scope for scope in SCOPES if re.search(rf"\b{scope}\b", place)]
    if not scopes:
        return "norms, clipping, update"
    return f"{'backward' if 'transpose(' in place else 'forward'}, {' + '.join(scopes)}"


def print_mesh(found: dict[str, Any], console: "Console | None" = None) -> None:
    """The tables of `describe`."""
    console = console_of(console)
    named = ", ".join(f"{axis} {size}" for axis, size in found["mesh"].items())
    say(console, f"{found['devices']} devices ({found['device_kind']}): {named}", "bold")
    for title, rows in (("parameters", found["parameters"]), ("activations", found["activations"])):
        say(console)
        cells = [
            (row["path"].replace("layers/", ""), "x".join(map(str, row["shape"])), _split(row), memory(row["bytes"]))
            for row in rows
        ]
        table(console, (title, "shape", "split by", "a device"), cells)
    for line in found["dropped"]:
        say(console, line, "yellow")
    size = found["bytes"]
    say(console)
    for name in ("parameters", "optimizer"):
        say(console, f"{name}: {memory(size[name])} a device, of {memory(size[f'{name}_whole'])}")
    say(console, f"temporary, by XLA's account: {memory(size['temporary'])} a device")
    say(console)
    times, total = Counter(), Counter()
    for c in found["collectives"]:
        times[c["kind"], c["where"]] += c["count"]
        total[c["kind"], c["where"]] += c["count"] * c["bytes"]
    ordered = sorted(total, key=lambda key: -total[key])
    cells = [(f"{kind}: {place}", f"{times[kind, place]:,}", memory(total[kind, place])) for kind, place in ordered]
    table(console, ("collectives of a step", "times", "bytes a device"), cells[:SHOWN])
    if len(cells) > SHOWN:
        say(console, f"and {len(cells) - SHOWN} more", "dim")
    sums = ", ".join(f"{count:,} {kind} of {memory(b)}" for kind, (count, b) in found["totals"].items())
    whole = sum(b for _, b in found["totals"].values())
    say(console, f"in all {memory(whole)} a device and step: {sums or 'none'}")
    if not all(c["bounded"] for c in found["collectives"]):
        say(console, "some are in loops whose length XLA does not know: counted once", "yellow")


def _split(row: dict[str, Any]) -> str:
    """ "D fsdp, N model": the letters that are split."""
    letters = row["letters"].rjust(len(row["shape"]))
    return ", ".join(f"{x} {'+'.join(axes)}" for x, axes in zip(letters, row["spec"], strict=True) if axes) or "whole"


def run(settings: Settings) -> int:
    """Print the tables; with --workdir write mesh.json."""
    mesh = sharding.from_text(settings.mesh)
    if mesh is None:
        raise ConfigError("--mesh names the axes and their sizes, as in --mesh=data:2,fsdp:2,model:2")
    config, hyper, task = configuration(settings, mesh)
    workdir = None
    if settings.workdir:
        identity = {"experiment": "mesh", "config": to_dict(config), "hyper": to_dict(hyper), "mesh": settings.mesh}
        workdir = open_workdir(settings.workdir, identity, {}, overwrite=settings.overwrite)
    found = describe(config, hyper, task, mesh)
    if workdir:
        workdir.write("mesh.json", found)
    print_mesh(found)
    return 0
