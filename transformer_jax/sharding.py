"""The doorway to meshes: runs of a sweep spread over devices.

The only module (with the kernels) that imports jax.sharding.
"""

import contextlib
import os
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

RUNS = "sweep"


def use_cpu_cores() -> None:
    """One CPU device a core, so that the runs of a sweep use them all; call before the first array.

    Measured on 2 cores (benchmarks/sweep.py): 11.0 ms per run and step with the runs over two
    devices against 14.3 on one. Without effect on GPU and TPU, and where arrays
    were made before: the devices that are there are used then.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(RuntimeError):  # a backend is up already
        jax.config.update("jax_num_cpu_devices", cores)


def runs_mesh(devices: int = 0) -> jax.sharding.Mesh:
    """A mesh of one axis over the first `devices` devices (0: all)."""
    count = devices or len(jax.devices())
    return jax.make_mesh((count,), (RUNS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])


def over_runs(
    f: Callable[..., Any],
    mesh: jax.sharding.Mesh,
    shared: int,
    *,
    one_by_one: bool | None = None,
    donate: bool = True,
) -> Callable[..., Any]:
    """f mapped over a leading runs axis R of its arguments, R spread over the mesh; jitted.

    The last `shared` arguments are the same for all runs. donate: the first argument is.
    Inside a device the runs are taken one by one (lax.map) or together (vmap); None: one by
    one on CPU, where a core has no use for batched small products, together on accelerators. R must be a multiple of
    the mesh's size. No run sees another: the program has no collective.
    """
    if one_by_one is None:
        one_by_one = mesh.devices.flat[0].platform == "cpu"

    def local(*args: Any) -> Any:
        runs, rest = args[: len(args) - shared], args[len(args) - shared :]
        if one_by_one:
            return jax.lax.map(lambda xs: f(*xs, *rest), runs)
        return jax.vmap(lambda *xs: f(*xs, *rest))(*runs)

    def spread(*args: Any) -> Any:
        specs = (PartitionSpec(RUNS),) * (len(args) - shared) + (PartitionSpec(),) * shared
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(RUNS), check_vma=False)(*args)

    return jax.jit(spread, donate_argnums=0 if donate else ())


def place_runs(tree: Any, mesh: jax.sharding.Mesh) -> Any:
    """Arrays with a leading R, laid over the mesh."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec(RUNS)))


def place_shared(tree: Any, mesh: jax.sharding.Mesh) -> Any:
    """Arrays that every device holds whole."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def abstract_runs(tree: Any, mesh: jax.sharding.Mesh) -> Any:
    """Shapes with the placement of `place_runs`, for restoring into."""
    spread = NamedSharding(mesh, PartitionSpec(RUNS))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=spread), tree)
