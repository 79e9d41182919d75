"""Checkpoints: their format, verified leaf by leaf when read; saver.py writes them while training goes on.

    <folder>/<step>/state      the arrays, written by Orbax: path in the tree -> array
    <folder>/<step>/manifest   meta; path, shape, dtype and SHA-256 of every leaf; a hash of all this

A folder named after its step is complete: Orbax writes under another name and renames at the end. Reading trusts
nothing all the same: Orbax can restore part of a tree without a word (google/orbax#2972) and does not notice most
flipped bits in its data files, so what was read is hashed and compared with the manifest. If the files are not what
was saved (`DamagedError`), `restore_latest` falls back to the checkpoint before; a sound checkpoint of another model
(`MismatchError`) is raised, for an older one would not help.

Arrays pass through the host whole, so a checkpoint does not depend on the mesh or the processes that wrote it.
"""

import asyncio
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax import hosts
from transformer_jax.errors import CheckpointError, unknown

STATE, MANIFEST, MANIFEST_FILE = "state", "manifest", "manifest.json"
MARKER = "commit_success.txt"  # the last file that Orbax writes before the rename
_STEP = re.compile(r"(0|[1-9][0-9]*)(\.orbax-checkpoint-tmp)?")
STRAY = re.compile(r"[0-9]+(\.(new|old)|(\.new)?\.orbax-checkpoint-tmp)")  # half-written or superseded


class DamagedError(CheckpointError):
    """The files of a checkpoint are not what was saved: cut off, truncated or changed."""


class MismatchError(CheckpointError):
    """A sound checkpoint whose tree, shapes or dtypes are not those asked for."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """A verified checkpoint. `notes`: a line for each newer checkpoint passed over and each leaf filled in."""

    state: Any
    meta: dict[str, Any]
    step: int
    notes: list[str]


def is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def leaves_of(tree: Any) -> dict[str, Any]:
    """Path -> leaf, such as "params/layers/wq_LDNH". CheckpointError: a leaf that could not come back as is."""
    found: dict[str, Any] = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        path = jax.tree_util.keystr(keys, simple=True, separator="/") or "root"
        if path in found:
            raise CheckpointError(f"two leaves are called {path!r}: rename one")
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise CheckpointError(f"leaf {path}: {type(leaf).__name__} is not an array; plain values belong in meta")
        number = jnp.issubdtype(leaf.dtype, np.number) or leaf.dtype == np.bool_
        if not (leaf.size if is_key(leaf) else number and leaf.dtype.isnative):
            raise CheckpointError(f"leaf {path}: cannot save {leaf.dtype}{list(leaf.shape)}")
        found[path] = leaf
    return found


def to_host(leaf: Any) -> np.ndarray:
    """A copy of all of a leaf on the host; of a typed key, its words. Collective if spread over processes."""
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        leaf = hosts.whole(leaf)
    return np.array(leaf, order="C")


def sha256_of(array: np.ndarray) -> str:
    """Hash of dtype, shape and bytes in C order. SHA-256 where BLAKE2b made half: 1.8 GB/s by SHA instructions."""
    made = hashlib.sha256(f"{array.dtype}{list(array.shape)}".encode())
    made.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return made.hexdigest()


def digest(tree: Any) -> dict[str, str]:
    """Path -> SHA-256 of the leaf's dtype, shape and bytes in C order (of a typed key: of its words)."""
    return {path: sha256_of(to_host(leaf)) for path, leaf in leaves_of(tree).items()}


def _place(value: Any, like: Any, impl: str | None) -> Any:
    """An array as the kind of leaf that `like` is: NumPy or JAX, weak type, typed key, sharding."""
    if isinstance(like, np.ndarray | np.generic):
        return value[()] if isinstance(like, np.generic) else value
    # An uncommitted array must come back uncommitted: jit compiles again for a committed one.
    sharding = like.sharding if getattr(like, "committed", True) else None
    if impl is not None:
        value = jax.random.wrap_key_data(jnp.asarray(value), impl=impl)
    elif like.weak_type:  # only Python scalars make weak arrays; indexed updates keep the type
        value = jnp.broadcast_to(jnp.asarray(value.dtype.type(0).item()), value.shape).at[...].set(value)
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def cause(error: BaseException) -> str:
    """Type and first line of an error, its middle left out: Orbax's run to pages and end with the reason.

    TensorStore's go on after it with pages of their own, such as [tensorstore_spec='…'] and [os_error_code='28'].
    """
    line = (str(error).strip().splitlines() or [""])[0]
    line = re.split(r" \[\w+='", line, maxsplit=1)[0]
    return f"{type(error).__name__}: {line if len(line) < 240 else line[:80] + ' ... ' + line[-140:]}"


async def _each(method: Callable[..., Any], *columns: Any) -> list[Any]:
    """`method` on every leaf alone; raises once all have ended, for Orbax then closes the event loop under them."""
    calls = (method(*([cell] for cell in row)) for row in zip(*columns, strict=True))
    results = await asyncio.gather(*calls, return_exceptions=True)
    for error in (result for result in results if isinstance(result, BaseException)):
        raise error
    return results


def _orbax() -> tuple[Any, Any]:
    """(its module, a checkpointer for this process). OCDBT: ten files, not two a leaf. Weights hardly compress."""
    import orbax.checkpoint as ocp

    class Numpy(ocp.type_handlers.NumpyHandler):
        async def _background_serialize(self, values: Any, infos: Any, args: Any) -> None:
            await _each(super()._background_serialize, values, infos, args)

        async def deserialize(self, infos: Any, args: Any) -> list[np.ndarray]:
            return [array for (array,) in await _each(super().deserialize, infos, args)]

    me = jax.process_index()
    solo = ocp.options.MultiprocessingOptions(me, active_processes={me}, barrier_sync_key_prefix=f"process{me}")
    types = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, Numpy(deepcopy_host_arrays=False)),  # they are our copy already
        (jax.Array, ocp.type_handlers.ArrayHandler()),  # unused; without one Orbax warns
    )
    tree = ocp.PyTreeCheckpointHandler(use_compression=False, multiprocessing_options=solo, type_handler_registry=types)
    items = ocp.handlers.DefaultCheckpointHandlerRegistry()
    items.add(STATE, ocp.args.PyTreeSave, tree)
    items.add(STATE, ocp.args.PyTreeRestore, tree)
    items.add(MANIFEST, ocp.args.JsonSave, ocp.JsonCheckpointHandler(MANIFEST_FILE, multiprocessing_options=solo))
    options = ocp.CompositeOptions(multiprocessing_options=solo)
    handler = ocp.CompositeCheckpointHandler(handler_registry=items, composite_options=options)
    return ocp, ocp.Checkpointer(handler, multiprocessing_options=solo)


def write_items(path: Path, arrays: Mapping[str, np.ndarray], manifest: Mapping[str, Any]) -> None:
    """Write both items, and rename to `path` once all is there. Orbax refuses empty arrays: `arrays` has none."""
    ocp, checkpointer = _orbax()
    items = {MANIFEST: ocp.args.JsonSave(manifest)} | ({STATE: ocp.args.PyTreeSave(dict(arrays))} if arrays else {})
    with checkpointer:
        checkpointer.save(path, args=ocp.args.Composite(**items))


def _orbax_restore(path: Path) -> dict[str, np.ndarray]:
    """Path -> array, whatever the files hold: the caller compares it with the manifest."""
    ocp, checkpointer = _orbax()
    with checkpointer:
        return checkpointer.restore(path, args=ocp.args.Composite(**{STATE: ocp.args.PyTreeRestore()}))[STATE]


def _folder(folder: str | os.PathLike[str]) -> Path:
    path = Path(folder).absolute()
    if not path.is_dir():
        raise CheckpointError(f"no checkpoints: {path} is not a folder")
    return path


def seal(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest | {"sha256": None}, sort_keys=True).encode()).hexdigest()


def _manifest(folder: Path, step: int) -> dict[str, Any]:
    """The manifest of a step. Raises DamagedError if it is not what was saved, CheckpointError if there is none."""
    path = folder / str(step)
    if not path.is_dir():
        raise CheckpointError(f"no checkpoint of step {step} in {folder}; there: {steps(folder) or 'none'}")
    if not (path / MARKER).is_file():
        raise DamagedError(f"step {step}: the save did not finish ({MARKER} is missing)")
    try:
        manifest = json.loads((path / MANIFEST / MANIFEST_FILE).read_bytes())
        sound, holds = manifest["sha256"] == seal(manifest), manifest["step"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedError(f"step {step}: unreadable manifest ({cause(error)})") from error
    if not sound or holds != step:
        raise DamagedError(f"step {step}: the manifest, or the folder's name, has changed since it was saved")
    return manifest


def _arrays(path: Path, saved: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Path -> verified array; raises DamagedError with every leaf that is not as the manifest has it."""
    arrays = {p: np.empty(spec["shape"], spec["dtype"]) for p, spec in saved.items() if 0 in spec["shape"]}
    if len(arrays) < len(saved):
        try:
            arrays |= {p: np.asarray(a) for p, a in _orbax_restore(path).items()}
        except Exception as error:  # damaged files fail in many ways
            raise DamagedError(f"step {path.name}: unreadable arrays ({cause(error)})") from error
    wrong = [f"{p}: unexpected" for p in arrays.keys() - saved.keys()]
    wrong += [f"{p}: missing" for p in saved.keys() - arrays.keys()]
    wrong += [f"{p}: changed (digest)" for p, a in arrays.items() if p in saved and sha256_of(a) != saved[p]["sha256"]]
    if wrong:
        raise DamagedError(f"step {path.name}: damaged leaves: " + "; ".join(sorted(wrong)))
    return arrays


def _newest(folder: Path, attempt: Callable[[int], Any]) -> tuple[Any, list[str]]:
    """(the first `attempt(step)`, newest step first, without a DamagedError; a note on each that had one)."""
    names, notes = [_STEP.fullmatch(path.name) for path in folder.iterdir() if path.is_dir()], []
    for step, renamed in sorted(((int(name[1]), not name[2]) for name in names if name), reverse=True):
        try:
            if not renamed:
                raise DamagedError(f"step {step}: half-written, the save was cut off")
            return attempt(step), notes
        except DamagedError as error:
            notes.append(str(error))
        except CheckpointError:
            if (folder / str(step)).is_dir():
                raise
            notes.append(f"step {step}: deleted while it was read")  # by the run that writes here
    raise CheckpointError(f"no good checkpoint in {folder}: " + ("; ".join(notes) or "it holds none"))


def steps(folder: str | os.PathLike[str]) -> list[int]:
    """Steps of the finished checkpoints, ascending, not verified. Raises CheckpointError: there is no folder."""
    names = [_STEP.fullmatch(path.name) for path in _folder(folder).iterdir() if (path / MARKER).is_file()]
    return sorted(int(name[1]) for name in names if name and not name[2])


def read_meta(folder: str | os.PathLike[str], step: int | None = None) -> dict[str, Any]:
    """The `meta` of a step, or of the newest with a sound manifest. Raises CheckpointError if there is none."""
    path = _folder(folder)
    manifest = _newest(path, lambda s: _manifest(path, s))[0] if step is None else _manifest(path, step)
    return manifest["meta"]


def half_written(folder: str | os.PathLike[str]) -> list[int]:
    """Steps whose save was cut off, ascending. Raises CheckpointError: there is no folder."""
    names = [_STEP.fullmatch(path.name) for path in _folder(folder).iterdir() if path.is_dir()]
    return sorted(int(name[1]) for name in names if name and name[2])


def contents(folder: str | os.PathLike[str], step: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(meta, path -> verified array) of a checkpoint whose tree is not known; a typed key comes as its words.

    Raises DamagedError with every leaf that is not what was saved; CheckpointError if there is no such step.
    """
    path = _folder(folder)
    manifest = _manifest(path, step)
    return manifest["meta"], {p: a for p, a in sorted(_arrays(path / str(step), manifest["leaves"]).items())}


def restore(folder: str | os.PathLike[str], step: int, like: Any, fill_missing: bool = False) -> Restored:
    """The checkpoint of `step`, verified, in the structure of `like`.

    like: a tree of jax.ShapeDtypeStruct, JAX or NumPy arrays (values are not read). Leaves come back of the same kind
      (JAX for ShapeDtypeStruct), dtype, weak type and sharding; uncommitted where `like` has none or is uncommitted.
      Or a function of the checkpoint's `meta` that gives such a tree, for arrays that grow.
    fill_missing: leaves that the checkpoint lacks keep the arrays of `like`, and are listed in `notes`.

    Raises MismatchError with every leaf whose path, shape or dtype differs; DamagedError with every leaf that is
      not what was saved; CheckpointError if there is no such checkpoint.
    """
    path = _folder(folder)
    manifest = _manifest(path, step)
    like = like(manifest["meta"]) if callable(like) else like
    saved, wanted = manifest["leaves"], leaves_of(like)
    lacks = [p for p, leaf in wanted.items() if p not in saved and not isinstance(leaf, jax.ShapeDtypeStruct)]
    filled = lacks if fill_missing else []
    notes = [f"step {step} lacks {p}: the value of `like` is kept" for p in filled]
    if wrong := _mismatches(saved, {p: leaf for p, leaf in wanted.items() if p not in filled}):
        raise MismatchError(f"step {step} in {path} is of another configuration: " + "; ".join(sorted(wrong)))
    arrays = _arrays(path / str(step), saved)
    leaves = [_place(arrays[p], leaf, saved[p]["impl"]) if p in saved else leaf for p, leaf in wanted.items()]
    for (p, leaf), made in zip(wanted.items(), leaves, strict=True):
        if made.dtype != leaf.dtype:  # 64 bits without jax_enable_x64 are cut without a word
            raise MismatchError(f"step {step}: {p}: {leaf.dtype} becomes {made.dtype} on the device")
    return Restored(jax.tree.unflatten(jax.tree.structure(like), leaves), manifest["meta"], step, notes)


def restore_parts(folder: str | os.PathLike[str], step: int, like: Any, names: Sequence[str]) -> Restored:
    """Only what `names` name, verified, from the checkpoint of `step`; the rest keeps the arrays of `like`.

    names: paths of leaves or of whole branches, such as "params/embedding". `notes` is the difference between the
    two trees, a line each: what was taken, what `like` has besides, what the checkpoint has besides.
    Raises as `check_parts`, and CheckpointError for a leaf of `like` that is not named and has no values.
    """
    manifest = check_parts(folder, step, like, names)
    wanted, saved = leaves_of(like), manifest["leaves"]
    if empty := [p for p, leaf in wanted.items() if not _under(p, names) and isinstance(leaf, jax.ShapeDtypeStruct)]:
        raise CheckpointError(f"{empty[0]} is not named and has no values: give arrays for what is not restored")
    arrays = _arrays(_folder(folder) / str(step), saved)
    leaves = [_place(arrays[p], leaf, saved[p]["impl"]) if _under(p, names) else leaf for p, leaf in wanted.items()]
    notes = [f"taken from step {step}: {p} {saved[p]['shape']}" for p in wanted if _under(p, names)]
    notes += [f"as it was: {p} {list(leaf.shape)}" for p, leaf in wanted.items() if not _under(p, names)]
    notes += [f"left in the checkpoint: {p} {saved[p]['shape']}" for p in saved if p not in wanted]
    return Restored(jax.tree.unflatten(jax.tree.structure(like), leaves), manifest["meta"], step, notes)


def check_parts(folder: str | os.PathLike[str], step: int, like: Any, names: Sequence[str]) -> dict[str, Any]:
    """The manifest of `step`, if `restore_parts` can take `names` from it; no array is read.

    Raises CheckpointError for a name that is in neither tree (with the nearest); MismatchError where a named
    leaf is missing on one side or has another shape or dtype; else as `restore`.
    """
    path = _folder(folder)
    manifest, wanted = _manifest(path, step), leaves_of(like)
    saved = manifest["leaves"]
    branches = {"/".join(p.split("/")[: n + 1]) for p in {*saved, *wanted} for n in range(p.count("/") + 1)}
    for name in names:
        if name not in branches:
            raise CheckpointError(str(unknown("part", name, branches)))
    both = ({p: leaf for p, leaf in side.items() if _under(p, names)} for side in (saved, wanted))
    if wrong := _mismatches(*both):
        raise MismatchError(f"step {step} in {path}: the named parts differ: " + "; ".join(sorted(wrong)))
    return manifest


def _under(path: str, names: Sequence[str]) -> bool:
    return any(path == name or path.startswith(name + "/") for name in names)


def _mismatches(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """A line for each leaf that only one side has, or whose shape or dtype differs."""
    wrong = [f"{p}: unexpected, in the checkpoint only" for p in saved.keys() - wanted.keys()]
    wrong += [f"{p}: missing from the checkpoint" for p in wanted.keys() - saved.keys()]
    for p in saved.keys() & wanted.keys():
        for what, want in (("shape", list(wanted[p].shape)), ("dtype", str(wanted[p].dtype))):
            if want != (have := saved[p][what]):
                wrong.append(f"{p}: {what} {want} wanted, {have} saved")
    return wrong


def restore_latest(folder: str | os.PathLike[str], like: Any) -> Restored:
    """The newest good checkpoint, as `restore` gives it; `notes` names each newer one that is damaged, and why.

    Raises MismatchError if the newest sound one is of another configuration; CheckpointError if none is good.
    """
    restored, notes = _newest(_folder(folder), lambda step: restore(folder, step, like))
    return dataclasses.replace(restored, notes=notes)
