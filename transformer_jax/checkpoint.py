"""Checkpoints: written while training goes on, verified leaf by leaf when read.

    <folder>/<step>/state      the arrays, written by Orbax: path in the tree -> array
    <folder>/<step>/manifest   meta; path, shape, dtype and SHA-256 of every leaf; a hash of all this

A folder named after its step is complete: Orbax writes under another name and renames at the end. Reading trusts
nothing all the same: Orbax can restore part of a tree without a word (google/orbax#2972) and does not notice most
flipped bits in its data files, so what was read is hashed and compared with the manifest. If the files are not what
was saved (`DamagedError`), `restore_latest` falls back to the checkpoint before; a sound checkpoint of another model
(`MismatchError`) is raised, for an older one would not help.

Arrays pass through the host whole, so a checkpoint does not depend on the mesh that wrote it. Of several processes,
process 0 writes; save, wait and close must be called by all.
"""

import asyncio
import atexit
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from transformer_jax.errors import CheckpointError

STATE, MANIFEST, MANIFEST_FILE = "state", "manifest", "manifest.json"
MARKER = "commit_success.txt"  # the last file that Orbax writes before the rename
_STEP = re.compile(r"(0|[1-9][0-9]*)(\.orbax-checkpoint-tmp)?")
_STRAY = re.compile(r"[0-9]+(\.(new|old)|(\.new)?\.orbax-checkpoint-tmp)")  # half-written or superseded


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


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _leaves(tree: Any) -> dict[str, Any]:
    """Path -> leaf, such as "params/layers/wq_LDNH". CheckpointError: a leaf that could not come back as is."""
    found: dict[str, Any] = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        path = jax.tree_util.keystr(keys, simple=True, separator="/") or "root"
        if path in found:
            raise CheckpointError(f"two leaves are called {path!r}: rename one")
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise CheckpointError(f"leaf {path}: {type(leaf).__name__} is not an array; plain values belong in meta")
        number = jnp.issubdtype(leaf.dtype, np.number) or leaf.dtype == np.bool_
        if not (leaf.size if _is_key(leaf) else number and leaf.dtype.isnative):
            raise CheckpointError(f"leaf {path}: cannot save {leaf.dtype}{list(leaf.shape)}")
        found[path] = leaf
    return found


def _host(leaf: Any) -> np.ndarray:
    """A copy of all of a leaf on the host; of a typed key, its words. Collective if spread over processes."""
    if _is_key(leaf):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        spread = not leaf.is_fully_replicated
        leaf = multihost_utils.process_allgather(leaf, tiled=True) if spread else leaf.addressable_data(0)
    return np.array(leaf, order="C")


def _sha256(array: np.ndarray) -> str:
    """Hash of dtype, shape and bytes in C order. SHA-256 where BLAKE2b made half: 1.8 GB/s by SHA instructions."""
    made = hashlib.sha256(f"{array.dtype}{list(array.shape)}".encode())
    made.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return made.hexdigest()


def digest(tree: Any) -> dict[str, str]:
    """Path -> SHA-256 of the leaf's dtype, shape and bytes in C order (of a typed key: of its words)."""
    return {path: _sha256(_host(leaf)) for path, leaf in _leaves(tree).items()}


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


def _cause(error: BaseException) -> str:
    """Type and first line of an error, its middle left out: Orbax's run to pages and end with the reason."""
    line = (str(error).strip().splitlines() or [""])[0]
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


def _orbax_save(path: Path, arrays: Mapping[str, np.ndarray], manifest: Mapping[str, Any]) -> None:
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


def _seal(manifest: dict[str, Any]) -> str:
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
        sound, holds = manifest["sha256"] == _seal(manifest), manifest["step"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedError(f"step {step}: unreadable manifest ({_cause(error)})") from error
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
            raise DamagedError(f"step {path.name}: unreadable arrays ({_cause(error)})") from error
    wrong = [f"{p}: unexpected" for p in arrays.keys() - saved.keys()]
    wrong += [f"{p}: missing" for p in saved.keys() - arrays.keys()]
    wrong += [f"{p}: changed (digest)" for p, a in arrays.items() if p in saved and _sha256(a) != saved[p]["sha256"]]
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
    saved, wanted, notes = manifest["leaves"], _leaves(like), []
    wrong = [f"{p}: unexpected, in the checkpoint only" for p in saved.keys() - wanted.keys()]
    for p, leaf in wanted.items():
        if p not in saved and fill_missing and not isinstance(leaf, jax.ShapeDtypeStruct):
            notes.append(f"step {step} lacks {p}: the value of `like` is kept")
        elif p not in saved:
            wrong.append(f"{p}: missing from the checkpoint")
        else:
            for what, want in (("shape", list(leaf.shape)), ("dtype", str(leaf.dtype))):
                if want != (have := saved[p][what]):
                    wrong.append(f"{p}: {what} {want} wanted, {have} saved")
    if wrong:
        raise MismatchError(f"step {step} in {path} is of another configuration: " + "; ".join(sorted(wrong)))
    arrays = _arrays(path / str(step), saved)
    leaves = [_place(arrays[p], leaf, saved[p]["impl"]) if p in saved else leaf for p, leaf in wanted.items()]
    for (p, leaf), made in zip(wanted.items(), leaves, strict=True):
        if made.dtype != leaf.dtype:  # 64 bits without jax_enable_x64 are cut without a word
            raise MismatchError(f"step {step}: {p}: {leaf.dtype} becomes {made.dtype} on the device")
    return Restored(jax.tree.unflatten(jax.tree.structure(like), leaves), manifest["meta"], step, notes)


def restore_latest(folder: str | os.PathLike[str], like: Any) -> Restored:
    """The newest good checkpoint, as `restore` gives it; `notes` names each newer one that is damaged, and why.

    Raises MismatchError if the newest sound one is of another configuration; CheckpointError if none is good.
    """
    restored, notes = _newest(_folder(folder), lambda step: restore(folder, step, like))
    return dataclasses.replace(restored, notes=notes)


class Saver(contextlib.AbstractContextManager):
    """Writes checkpoints into a folder in the background and keeps the last `keep` of this run.

    A context manager: only `close`, or `wait`, makes the last save durable or raises its error. One Saver a folder.
    Raises CheckpointError if the folder cannot be made, or keep < 1.

    This run's checkpoints are those that this Saver wrote and, with `resumed`, those at or below the step that the
    run was restored from. No others are ever deleted, whatever their numbers: a run that starts anew beside steps
    500 to 700 keeps them and its own step 100 (`restore_latest` still means 700). A step that exists is written
    beside the old folder and then takes its place; an old one that is not of this run becomes `<step>.aside-<n>`.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2, resumed: int | None = None) -> None:
        if keep < 1:
            raise CheckpointError(f"keep={keep}: a run must keep at least 1 checkpoint")
        self.folder, self.keep = Path(folder).absolute(), keep
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot make the folder {self.folder}: {_cause(error)}") from error
        # In order of writing, not of number: a lower step is not an older one.
        self._mine = [s for s in steps(self.folder) if resumed is not None and s <= resumed]
        self._open, self._thread = True, ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: tuple[int, Future[None]] | None = None
        atexit.register(self.close)  # too late to finish a save, but in time to say that it was lost

    def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> None:
        """Copy `state` to the host and return; hashing and writing go on behind. `state` may then be donated.

        state: a tree of JAX or NumPy arrays, typed keys included. meta: a dict that JSON can hold. Waits for the save
        before. Raises CheckpointError: that one failed; a leaf or meta that cannot be saved.
        """
        if not self._open or step < 0:
            raise CheckpointError(f"cannot save step {step}: negative, or the saver is closed")
        self.wait()
        try:
            meta = json.loads(json.dumps(meta))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"meta of step {step} is not JSON: {error}") from error
        leaves, saved = _leaves(state), {}
        for path, leaf in leaves.items():
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise CheckpointError(f"leaf {path}: a ShapeDtypeStruct has no values to save")
            if isinstance(leaf, jax.Array):
                leaf.copy_to_host_async()
            impl = str(jax.random.key_impl(leaf)) if _is_key(leaf) else None
            saved[path] = {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "impl": impl}
        arrays = {path: _host(leaf) for path, leaf in leaves.items()}
        manifest = {"format": 1, "step": int(step), "meta": meta, "leaves": saved}
        self._pending = (step, self._thread.submit(self._write, int(step), arrays, manifest))

    def wait(self) -> None:
        """Block until the last save is durable. Raises CheckpointError with its cause if it failed."""
        if self._pending is None:
            return
        step, future = self._pending
        error = future.exception()  # Ctrl-C here leaves the save pending, for close() to wait on
        self._pending, what = None, f"save of step {step} in {self.folder} failed"
        if multihost_utils.broadcast_one_to_all(np.int32(error is not None)) and error is None:
            raise CheckpointError(f"{what} on process 0")
        if error is not None:
            raise CheckpointError(f"{what}: {_cause(error)}") from error

    def close(self) -> None:
        """`wait`, then end the background thread. Safe to call twice."""
        atexit.unregister(self.close)
        self._open = False
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _write(self, step: int, arrays: dict[str, np.ndarray], manifest: dict[str, Any]) -> None:
        """In the background, on process 0: hash, write, take the final name, delete this run's oldest."""
        if jax.process_index() != 0:
            return
        for path, array in arrays.items():
            manifest["leaves"][path]["sha256"] = _sha256(array)
        manifest["sha256"] = _seal(manifest)
        self._remove_strays()
        final = self.folder / str(step)
        target = self.folder / f"{step}.new" if final.exists() else final
        try:
            _orbax_save(target, {path: a for path, a in arrays.items() if a.size}, manifest)
            if not (target / MARKER).is_file():
                raise CheckpointError(f"this version of Orbax writes no {MARKER}")
        except BaseException:
            self._remove_strays()  # a full disk needs the room
            raise
        if target != final:
            # Under a name that nobody deletes until the new one stands: a kill in between loses nothing.
            aside = next(p for n in itertools.count(1) if not (p := self.folder / f"{step}.aside-{n}").exists())
            final.rename(aside)
            target.rename(final)
            if step in self._mine:
                shutil.rmtree(aside)
        self._mine = [s for s in self._mine if s != step] + [step]
        for old in self._mine[: -self.keep]:
            # Renamed first: a kill half-way leaves no checkpoint with files missing.
            if (path := self.folder / str(old)).exists():
                path.rename(self.folder / f"{old}.old")
        self._mine = self._mine[-self.keep :]
        self._remove_strays()

    def _remove_strays(self) -> None:
        for path in self.folder.iterdir():
            if _STRAY.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
