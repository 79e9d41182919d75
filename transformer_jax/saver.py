"""Writing checkpoints in the background, and which of them to keep; the format is checkpoint.py's.

Of several processes, process 0 writes; save, wait and close must be called by all.
"""

import atexit
import contextlib
import dataclasses
import itertools
import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from transformer_jax import checkpoint, hosts
from transformer_jax.errors import CheckpointError

Value = tuple[float, float]  # what checkpoints are compared by
UNMEASURED: Value = (math.inf, math.inf)


@dataclasses.dataclass(frozen=True)
class Keep:
    """Which checkpoints of a run stay: the union of three rules; the rest is deleted as new ones come.

    last: the newest so many, at least 1. every: each step that it divides; 0: no such rule.
    best: the one with the lowest meta["metrics"][best], of equals the one with the lowest loss, then the first;
    "-NAME": with the highest; "": no such rule.
    Raises CheckpointError for last < 1 or every < 0.
    """

    last: int = 2
    every: int = 0
    best: str = ""

    def __post_init__(self) -> None:
        if self.last < 1:
            raise CheckpointError(f"keep={self.last}: a run must keep at least 1 checkpoint")
        if self.every < 0:
            raise CheckpointError(f"keep_every={self.every}: at least 0")

    def value(self, meta: Mapping[str, Any]) -> Value:
        """What `best` keeps the lowest of: (the metric, minus a high one; the loss). UNMEASURED where it is not finite.

        The loss tells apart what a metric of whole outputs does not, as all of the first evaluations of a run.
        """
        metrics = meta.get("metrics") or {}
        found, loss = metrics.get(self.best.removeprefix("-")), metrics.get("loss")
        if not isinstance(found, int | float) or not math.isfinite(found):
            return UNMEASURED
        metric = -float(found) if self.best.startswith("-") else float(found)
        return metric, float(loss) if isinstance(loss, int | float) and math.isfinite(loss) else math.inf

    def kept(self, written: Sequence[int], values: Mapping[int, Value]) -> set[int]:
        """Of the steps `written`, oldest first, with their `value`: those that stay."""
        measured = [step for step in written if values.get(step, UNMEASURED) < UNMEASURED]
        best = {min(measured, key=lambda step: values[step])} if self.best and measured else set()
        return set(written[-self.last :]) | {s for s in written if self.every and s % self.every == 0} | best


class Saver(contextlib.AbstractContextManager):
    """Writes checkpoints into a folder in the background; of this run's, those stay that `keep` says (2: the last two).

    A context manager: only `close`, or `wait`, makes the last save durable or raises its error. One Saver a folder.
    Raises CheckpointError if the folder cannot be made, or `keep` is less than 1.

    This run's checkpoints are those that this Saver wrote and, with `resumed`, those at or below the step that the
    run was restored from. No others are ever deleted, whatever their numbers: a run that starts anew beside steps
    500 to 700 keeps them and its own step 100 (`restore_latest` still means 700). A step that exists is written
    beside the old folder and then takes its place; an old one that is not of this run becomes `<step>.aside-<n>`.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int | Keep = 2, resumed: int | None = None) -> None:
        self.folder, self.keep = Path(folder).absolute(), Keep(keep) if isinstance(keep, int) else keep
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot make the folder {self.folder}: {checkpoint.cause(error)}") from error
        if jax.process_index() == 0:
            self._finish_renames()
        # In order of writing, not of number: a lower step is not an older one.
        self._mine = [s for s in checkpoint.steps(self.folder) if resumed is not None and s <= resumed]
        self._values = {step: self._saved_value(step) for step in self._mine} if self.keep.best else {}
        self._open, self._thread = True, ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: tuple[int, Future[None]] | None = None
        atexit.register(self._end)  # too late to finish a save, but in time to say that it was lost

    def _saved_value(self, step: int) -> Value:
        try:
            return self.keep.value(checkpoint.read_meta(self.folder, step))
        except CheckpointError:  # damaged: it stays as long as others do, and is nobody's best
            return UNMEASURED

    @property
    def best(self) -> Value:
        """The lowest value of this run's checkpoints that are kept or being saved; UNMEASURED where there is none."""
        return min((self._values.get(step, UNMEASURED) for step in [*self._mine, *self._values]), default=UNMEASURED)

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
        leaves, saved = checkpoint.leaves_of(state), {}
        for path, leaf in leaves.items():
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise CheckpointError(f"leaf {path}: a ShapeDtypeStruct has no values to save")
            if isinstance(leaf, jax.Array):
                leaf.copy_to_host_async()
            impl = str(jax.random.key_impl(leaf)) if checkpoint.is_key(leaf) else None
            saved[path] = {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "impl": impl}
        arrays = {path: checkpoint.to_host(leaf) for path, leaf in leaves.items()}
        self._values[int(step)] = self.keep.value(meta)
        manifest = {"format": 1, "step": int(step), "meta": meta, "leaves": saved}
        self._pending = (step, self._thread.submit(self._write, int(step), arrays, manifest))

    def wait(self) -> None:
        """Block until the last save is durable. Raises CheckpointError with its cause if it failed."""
        if self._pending is None:
            return
        step, future = self._pending
        error = future.exception()  # Ctrl-C here leaves the save pending, for close() to wait on
        self._pending, what = None, f"save of step {step} in {self.folder} failed"
        if hosts.gather(np.int32(error is not None))[0] and error is None:
            raise CheckpointError(f"{what} on process 0")
        if error is not None:
            raise CheckpointError(f"{what}: {checkpoint.cause(error)}") from error

    def close(self) -> None:
        """`wait`, then end the background thread. Safe to call twice."""
        atexit.unregister(self._end)
        self._open = False
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def _end(self) -> None:
        """`close` after an error. Of several processes the others may never come to say how it went: not asked."""
        if jax.process_count() == 1:
            return self.close()
        atexit.unregister(self._end)
        self._open, pending, self._pending = False, self._pending, None
        error = None if pending is None else pending[1].exception()
        self._thread.shutdown()
        if pending is not None and error is not None:
            raise CheckpointError(f"save of step {pending[0]} in {self.folder} failed: {checkpoint.cause(error)}")

    def __exit__(self, kind: object, *exception: object) -> None:
        self.close() if kind is None else self._end()

    def _write(self, step: int, arrays: dict[str, np.ndarray], manifest: dict[str, Any]) -> None:
        """In the background, on process 0: hash, write, take the final name, delete this run's oldest."""
        if jax.process_index() != 0:
            return
        for path, array in arrays.items():
            manifest["leaves"][path]["sha256"] = checkpoint.sha256_of(array)
        manifest["sha256"] = checkpoint.seal(manifest)
        self._remove_strays()
        final = self.folder / str(step)
        target = self.folder / f"{step}.new" if final.exists() else final
        try:
            checkpoint.write_items(target, {path: a for path, a in arrays.items() if a.size}, manifest)
            if not (target / checkpoint.MARKER).is_file():
                raise CheckpointError(f"this version of Orbax writes no {checkpoint.MARKER}")
        except BaseException:
            self._remove_strays()  # a full disk needs the room
            raise
        if target != final:
            # A kill in between leaves both, complete, and no N: the next Saver ends the renaming.
            aside = next(p for n in itertools.count(1) if not (p := self.folder / f"{step}.aside-{n}").exists())
            final.rename(aside)
            target.rename(final)
            if step in self._mine:
                shutil.rmtree(aside)
        self._mine = [s for s in self._mine if s != step] + [step]
        kept = self.keep.kept(self._mine, self._values)
        for old in [s for s in self._mine if s not in kept]:
            # Renamed first: a kill half-way leaves no checkpoint with files missing.
            if (path := self.folder / str(old)).exists():
                path.rename(self.folder / f"{old}.old")
        self._mine = [s for s in self._mine if s in kept]
        self._remove_strays()

    def _finish_renames(self) -> None:
        for path in self.folder.glob("*.new"):
            final = path.with_suffix("")
            if (path / checkpoint.MARKER).is_file() and checkpoint.STRAY.fullmatch(path.name) and not final.exists():
                path.rename(final)

    def _remove_strays(self) -> None:
        for path in self.folder.iterdir():
            if checkpoint.STRAY.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
