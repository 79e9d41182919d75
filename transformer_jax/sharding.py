"""The doorway to meshes: what a shape letter is split by; and runs of a sweep spread over devices.

A mesh has the axes that `--mesh=data:2,fsdp:2,model:2` names:

    data    rows of the batch; parameters are whole
    fsdp    rows of the batch, and D of the parameters (and moments), gathered where they are used
    model   N, K, F and V: heads, feed-forward units and the vocabulary
    seq     T and S: rows in pieces, their attention in a ring (ring.py)

The last letters of a parameter's name are its shape, and so its placement: wq_DNH is split by
fsdp, model and nothing. Adam's moments follow, as their paths end in the same names; axes before
the letters (L, R), E and parameters of one letter stay whole. Letters are read from left to right,
and each mesh axis is used once an array, by the first letter that claims it; no array of the model
has two letters of one axis, so that the order decides nothing yet. Where an axis does not divide
a dimension it is not used for it, and `dropped` says so.
"""

import contextlib
import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from transformer_jax import ring
from transformer_jax.config import Config
from transformer_jax.errors import ConfigError, unknown
from transformer_jax.layers import UNCONSTRAINED, Constrain
from transformer_jax.numerics import rows_apart

AXES = ("data", "fsdp", "model", "seq")
RUNS = "sweep"
Table = Mapping[str, tuple[str, ...]]
_HEADS: Table = {letter: ("model",) for letter in "NKFV"}
PARAMETERS: Table = {"D": ("fsdp",), **_HEADS}
ACTIVATIONS: Table = {"B": ("data", "fsdp"), "T": ("seq",), "S": ("seq",), **_HEADS}


# --- meshes ----------------------------------------------------------------------


def use_cpu_cores() -> None:
    """One CPU device a core, unless JAX_NUM_CPU_DEVICES or XLA_FLAGS says how many; before the first array.

    Measured on 2 cores (benchmarks/sweep.py): 11.0 ms per run and step with the runs over two
    devices against 14.3 on one. Without effect on GPU and TPU, and where arrays
    were made before: the devices that are there are used then.
    """
    config: Any = jax.config
    if config.jax_num_cpu_devices > 0 or "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(RuntimeError):  # a backend is up already
        jax.config.update("jax_num_cpu_devices", cores)


def parse_mesh(text: str, axes: Sequence[str] = AXES) -> dict[str, int]:
    """Axes and sizes of a text such as data:2,model:4, in its order: neighbouring devices differ in the last axis.

    Raises ConfigError, naming the values, for an axis that is unknown or named twice, and for a
    size that is no whole number of at least 1.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, colon, size = (piece.strip() for piece in part.partition(":"))
        if not colon:
            raise ConfigError(f"--mesh={text}: {part.strip()!r} is not AXIS:SIZE, as in data:2,model:4")
        if axis not in axes:
            raise unknown("mesh axis", axis, axes)
        if axis in sizes:
            raise ConfigError(f"--mesh={text} names {axis} twice")
        if not (size.isascii() and size.isdecimal()) or int(size) < 1:
            raise ConfigError(f"--mesh={text}: {axis} is {size!r}, not a whole number of at least 1")
        sizes[axis] = int(size)
    return sizes


def make_mesh(sizes: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over the first of `devices` (None: this machine's).

    Raises ConfigError, with both numbers, for more devices than there are.
    """
    devices = jax.devices() if devices is None else devices
    wanted, there = math.prod(sizes.values()), len(devices)
    if wanted > there:
        named = ",".join(f"{axis}:{size}" for axis, size in sizes.items())
        kind = devices[0].platform
        hint = " (JAX_NUM_CPU_DEVICES makes more of one CPU, to try a mesh out)" if kind == "cpu" else ""
        raise ConfigError(f"--mesh={named} is {wanted} devices, there are {there} of kind {kind}{hint}")
    # Not jax.make_mesh, which on most TPUs refuses an axis that is no product of the torus's own sides (16 of 8x8).
    laid = mesh_utils.create_device_mesh(tuple(sizes.values()), list(devices[:wanted]), allow_split_physical_axes=True)
    return Mesh(laid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def from_text(text: str) -> Mesh | None:
    """The mesh that --mesh names; before the first array, as `use_cpu_cores`.

    "": None for one process; several split the rows over all their devices. Raises ConfigError, as
    `make_mesh`, and where several processes have devices that the mesh leaves out.
    """
    sizes = parse_mesh(text) if text else {}
    if text or jax.process_count() > 1:
        use_cpu_cores()
    if jax.process_count() == 1:
        return make_mesh(sizes) if text else None
    mesh = make_mesh(sizes or {"data": len(jax.devices())})
    if mesh.size < len(jax.devices()):
        raise ConfigError(
            f"--mesh={text} is {mesh.size} devices, {jax.process_count()} processes have {len(jax.devices())}: "
            "every one must be in it"
        )
    return mesh


# --- letters ---------------------------------------------------------------------


def letters_of(path: tuple[Any, ...]) -> str:
    """The shape letters that the last name of a key path ends in: "DNH" of (…, wq_DNH); "" where there are none."""
    name = str(getattr(path[-1], "name", getattr(path[-1], "key", ""))) if path else ""
    suffix = name.rpartition("_")[2] if "_" in name else ""
    return suffix if suffix.isupper() and suffix.isalpha() else ""


def spec_of(
    shape: tuple[int, ...], letters: str, sizes: Mapping[str, int], table: Table = PARAMETERS
) -> tuple[PartitionSpec, list[str]]:
    """How an array is split by a mesh of `sizes`, its last dimensions being `letters`; and each axis that is dropped.

    One letter of a parameter: whole. A letter may take several axes, one after the other.
    """
    whole = (None,) * (len(shape) - len(letters))
    if not letters or (table is PARAMETERS and len(letters) == 1):
        return PartitionSpec(), []
    free, split, dropped = dict(sizes), [], []
    for letter, size in zip(letters, shape[len(whole) :], strict=True):
        taken: list[str] = []
        for axis in table.get(letter, ()):
            if free.get(axis, 1) == 1:
                continue
            if size % (math.prod(sizes[a] for a in taken) * sizes[axis]):
                dropped.append(f"{letter}={size} is no multiple of {axis}:{sizes[axis]}")
                continue
            taken.append(axis)
            del free[axis]
        split.append(tuple(taken) if len(taken) > 1 else taken[0] if taken else None)
    return PartitionSpec(*whole, *split), dropped


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where one array is. spec: mesh axes of each dimension. bytes: on one device."""

    path: str
    shape: tuple[int, ...]
    letters: str
    spec: PartitionSpec
    bytes: int
    dropped: tuple[str, ...]


def placements(tree: Any, mesh: Mesh, table: Table = PARAMETERS) -> list[Placement]:
    """Of each leaf (arrays or shapes), by the letters of its name."""
    made = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        letters = letters_of(path)
        spec, dropped = spec_of(leaf.shape, letters, mesh.shape, table)
        part = NamedSharding(mesh, spec).shard_shape(leaf.shape)
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        size = math.prod(part) * leaf.dtype.itemsize
        made.append(Placement(name, leaf.shape, letters, spec, size, tuple(dropped)))
    return made


def activations(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays that `constrain` lays out, and what the heads make of them: their letters, for `placements`."""
    B, T = config.batch_size // config.accumulation, config.seq_len
    sizes = {"tokens_BT": (B, T), "x_BTD": (B, T, config.D), "q_BTNH": (B, T, config.N, config.H)}
    sizes |= {"k_BTKH": (B, T, config.K, config.H), "hidden_BTF": (B, T, config.F), "logits_BTV": (B, T, config.V)}
    types = {"tokens_BT": "int32", "logits_BTV": "float32"}
    return {name: jax.ShapeDtypeStruct(shape, types.get(name, config.compute_dtype)) for name, shape in sizes.items()}


def dropped(config: Config, params: Any, mesh: Mesh) -> list[str]:
    """A line for each array and axis that does not fit: what the mesh cannot split stays whole there."""
    rows = placements(params, mesh) + placements(activations(config), mesh, ACTIVATIONS)
    return [f"{row.path}: {line}, and stays whole" for row in rows for line in row.dropped]


def shardings(tree: Any, mesh: Mesh, table: Table = PARAMETERS) -> Any:
    """A NamedSharding for each leaf, by the letters of its name: of parameters, of a whole TrainState."""

    def of(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, spec_of(leaf.shape, letters_of(path), mesh.shape, table)[0])

    return jax.tree_util.tree_map_with_path(of, tree)


def abstract(tree: Any, mesh: Mesh, table: Table = PARAMETERS) -> Any:
    """Shapes and types with their shardings, for restoring into and for compiling without arrays."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        tree,
        shardings(tree, mesh, table),
    )


def constrain(mesh: Mesh | None) -> Constrain:
    """What the model calls at its borders: activations by their letters, and self-attention in a ring over seq.

    Without it a mesh that splits rows and D keeps activations whole in B over fsdp, and D split.
    None: nothing.
    """
    if mesh is None:
        return UNCONSTRAINED

    def lay(x: jax.Array, letters: str) -> jax.Array:
        spec, _ = spec_of(x.shape, letters, mesh.shape, ACTIVATIONS)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    if mesh.shape.get("seq", 1) == 1:
        return Constrain(lay)
    return Constrain(lay, partial(ring.attend, mesh=mesh), rows_apart)


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds all of it."""
    return NamedSharding(mesh, PartitionSpec())


def row_share(mesh: Mesh, rows: int) -> tuple[int, int]:
    """(which part, of how many equal ones) of a batch's rows the devices of this process hold.

    Processes whose devices hold the same rows, as where the mesh splits the model alone, have one part.
    Raises ConfigError where this process's rows are no such part.
    """
    over = NamedSharding(mesh, spec_of((rows,), "B", dict(mesh.shape), ACTIVATIONS)[0])
    places = over.addressable_devices_indices_map((rows,)).values()
    held = sorted({part[0].indices(rows)[:2] for part in places if part is not None})
    first, last = held[0][0], held[-1][1]
    together = all(a[1] == b[0] for a, b in itertools.pairwise(held))
    if not together or rows % (last - first) or first % (last - first):
        raise ConfigError(
            f"process {jax.process_index()} of {jax.process_count()} holds rows {held} of a batch of {rows}: "
            "give a mesh whose data and fsdp axes go from process to process"
        )
    return first // (last - first), rows // (last - first)


def place_rows(batch: Any, mesh: Mesh, parts: int = 1) -> Any:
    """A batch laid over data, fsdp and seq from the rows that this process has: one of `parts`, see `row_share`.

    batch: NumPy arrays, named by their letters.
    """
    whole = jax.tree.map(lambda x: jax.ShapeDtypeStruct((x.shape[0] * parts, *x.shape[1:]), x.dtype), batch)
    return jax.tree.map(
        lambda sharding, x, all_rows: jax.make_array_from_process_local_data(sharding, x, all_rows.shape),
        shardings(whole, mesh, ACTIVATIONS), batch, whole,
    )  # fmt: skip


# --- runs of a sweep -------------------------------------------------------------


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

    # Said, as on one device the placement of what comes out is another name for the same, and would compile anew.
    laid = NamedSharding(mesh, PartitionSpec(RUNS))
    return jax.jit(spread, donate_argnums=0 if donate else (), out_shardings=laid)


def place_runs(tree: Any, mesh: jax.sharding.Mesh) -> Any:
    """Arrays with a leading R, laid over the mesh."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec(RUNS)))


def place_shared(tree: Any, mesh: jax.sharding.Mesh) -> Any:
    """Arrays that every device holds whole; every process must give the same ones."""
    whole = replicated(mesh)
    if whole.is_fully_addressable:
        return jax.device_put(tree, whole)
    # device_put would compare each leaf between the processes, by a program with collectives of its own.
    return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, whole, lambda index: x[index]), tree)


def abstract_shared(tree: Any, mesh: jax.sharding.Mesh) -> Any:
    """Shapes with the placement of `place_shared`."""
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), tree)


def abstract_runs(tree: Any, mesh: jax.sharding.Mesh) -> Any:
    """Shapes with the placement of `place_runs`, for restoring into."""
    spread = NamedSharding(mesh, PartitionSpec(RUNS))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=spread), tree)
