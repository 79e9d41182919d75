"""A run's folder: what it holds, whose it is, and what may change when it goes on.

config.json says everything that was resolved, with versions and commit. The same command
again resumes; a folder that holds another configuration is refused by naming the values.
"""

import dataclasses
import datetime
import hashlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from experiments import processes
from transformer_jax.config import Config, Hyper, to_dict
from transformer_jax.errors import UserError

TOKENIZERS = "tokenizers.json"  # of a run on texts, beside config.json
DEFAULTS = {"config": to_dict(Config()), "hyper": to_dict(Hyper())}
PLACES = ("pairs", "dev", "test", "text")  # where the data are: what they are, their digest says
TOKENIZER_FILES = ("tokenizer", "target_tokenizer")
LOCK = ".lock"  # held by the process that writes there
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
_claimed: dict[Path, int] = {}  # folder -> the open file of its lock


class WorkdirError(UserError):
    """A folder that cannot be used for this run."""


@dataclasses.dataclass(frozen=True)
class Workdir:
    """An opened folder. `resumed`: it held this configuration already."""

    path: Path
    resumed: bool
    held: dict[str, Any]  # the config.json found in it, {} when new

    def finished(self) -> dict[str, Any] | None:
        """results.json of a run that ended, or None."""
        return read_json(self.path / "results.json")

    def write(self, name: str, value: Any) -> Path:
        """Write JSON atomically; NaN and infinity are refused."""
        return write_json(self.path / name, value)


def write_json(path: Path, value: Any) -> Path:
    """Write JSON so that a reader sees the old file or the new one; ValueError for NaN and infinity."""
    text = json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False)
    return write_text(path, text + "\n")


def write_text(path: Path, text: str) -> Path:
    """Write a file so that a reader sees the old one or the new one, whole. Of several processes, the first writes."""
    if not processes.first():
        return path
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise WorkdirError(f"cannot write {path}: {error.strerror}") from error
    return path


def read_json(path: Path) -> Any | None:
    """The JSON of a file; None if there is no such file. A broken file is an error that names it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise WorkdirError(f"cannot read {path}: {error}") from error


def differences(held: Mapping[str, Any], wanted: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Lines "name is X there, Y here" for each leaf in which two nested dicts differ."""
    lines = []
    for name in sorted({*held, *wanted}):
        a, b = held.get(name), wanted.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            lines += differences(a, b, f"{prefix}{name}.")
        elif a != b:
            lines.append(f"{prefix}{name} is {a!r} there, {b!r} here")
    return lines


def _filled(held: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """`held` with the fields of a Config or Hyper that its version lacked: they had what are the defaults now."""
    out = dict(held)
    for name, value in wanted.items():
        if isinstance(value, dict) and isinstance(out.get(name), dict):
            defaults = DEFAULTS.get(name, {})
            out[name] = {field: defaults[field] for field in value if field in defaults} | out[name]
            out[name] = _filled(out[name], value)
    return out


def open_workdir(
    path: str,
    identity: Mapping[str, Any],
    free: Mapping[str, Any],
    *,
    overwrite: bool = False,
    grows: Mapping[str, tuple[int, str]] | None = None,
) -> Workdir:
    """Make or re-open a folder for the run `identity` describes.

    identity: what the run is; must equal what the folder holds. free: settings that may
    change on resume; recorded only. grows: settings that may only grow: name -> (value, why
    it may not change at all, "" if it may). overwrite: an existing folder is moved aside first,
    to PATH.old-1, .old-2, …: nothing is deleted. Raises WorkdirError for a folder with
    another configuration, with files but no config.json, or that cannot be written. Of several
    processes, the first makes it, before the others look.
    """
    if processes.count() > 1:
        said = json.dumps([identity, free], sort_keys=True, default=str).encode()
        processes.same("their settings, by a hash of them", int.from_bytes(hashlib.sha256(said).digest()[:3]))
    made = processes.by_first(lambda: _open(path, identity, free, overwrite, grows or {}))
    return made or Workdir(Path(path), False, {})


def _open(
    path: str,
    identity: Mapping[str, Any],
    free: Mapping[str, Any],
    overwrite: bool,
    grows: Mapping[str, tuple[int, str]],
) -> Workdir:
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise WorkdirError(f"--workdir={path} is a file")
    held = read_json(folder / "config.json")
    if folder.exists() and overwrite and any(folder.iterdir()):
        if held is not None:
            claim(folder)
        move_aside(folder)
        held = None
    if held is None and folder.exists() and any(folder.iterdir()):
        raise WorkdirError(
            f"--workdir={path} holds files but no config.json: choose another, or --overwrite moves it aside"
        )
    wanted = json.loads(json.dumps(identity))
    if held is not None:
        lines = _unlike(_filled(held.get("identity", {}), wanted), wanted) + _shrunk(held.get("free", {}), grows)
        if lines:
            shown = "; ".join(lines[:4]) + (f"; and {len(lines) - 4} more" if len(lines) > 4 else "")
            raise WorkdirError(f"--workdir={path} holds another configuration: {shown} (--overwrite moves it aside)")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WorkdirError(f"cannot make --workdir={path}: {error.strerror}") from error
    claim(folder)
    record = {
        "identity": wanted,
        "free": dict(free),
        "command": shlex.join(sys.argv),
        "started": (held or {}).get("started", now()),
        "versions": versions(),
        "commit": commit(),
    }
    write_json(folder / "config.json", record)
    return Workdir(folder, held is not None, held or {})


def _unlike(held: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """`differences`, but for the paths of files whose digest is one: they may have moved, or the folder has.

    Whether a file is given still counts: dev may be held out of the training file, or be the same file whole.
    """
    if wanted.get("data") and held.get("data") == wanted["data"]:
        there, here = held.get("config", {}), wanted.get("config", {})
        moved = {name for name in PLACES if there.get(name) and here.get(name)}
        # A tokenizer's digest is in that of the data; its name counts where it is a kind, not a file.
        moved |= {name for name in TOKENIZER_FILES if _is_file(there.get(name)) and _is_file(here.get(name))}
        held, wanted = (
            {**one, "config": {name: value for name, value in config.items() if name not in moved}}
            for one, config in ((held, there), (wanted, here))
        )
    there, here = list(held.get("arms") or {}), list(wanted.get("arms") or {})
    if there != here and sorted(there) == sorted(here):  # what is saved stands in the order of the arms
        return [f"the arms stand there as {', '.join(there)}, here as {', '.join(here)}", *differences(held, wanted)]
    return differences(held, wanted)


def _is_file(tokenizer: str | None) -> bool:
    return (tokenizer or "").endswith(".json")


def _shrunk(held: Mapping[str, Any], grows: Mapping[str, tuple[int, str]]) -> list[str]:
    """Lines for settings that shrank, or that changed though they may not."""
    lines = []
    for name, (value, fixed) in grows.items():
        before = held.get(name, value)
        if value < before:
            lines.append(f"{name} is {before} there, {value} here: it may only grow")
        elif value > before and fixed:
            lines.append(f"{name} is {before} there, {value} here: {fixed}")
    return lines


def claim(folder: Path) -> None:
    """Keep every other process out of a workdir until `release`, or until this one ends, however it ends.

    Two would undo each other's files: a job that was queued anew while the old one still runs, a command typed twice.
    Raises WorkdirError where another process is in it. Where the file system has no locks nobody is kept out.
    """
    path, mine = folder / LOCK, _claimed.get(folder.resolve())
    try:
        if mine is not None and os.path.samestat(os.fstat(mine), path.stat()):
            return
    except FileNotFoundError:  # moved aside, or removed: what stands there now is another folder
        pass
    lock = -1
    try:
        import fcntl

        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise WorkdirError(
            f"--workdir={folder} is in use by another process: wait for it, or choose another"
        ) from error
    except (ImportError, OSError):
        if lock >= 0:
            os.close(lock)
        return
    _claimed[folder.resolve()] = lock


def release() -> None:
    """Let others into what `claim` holds: a program that runs several commands goes on after each."""
    while _claimed:
        os.close(_claimed.popitem()[1])


def move_aside(folder: Path) -> Path:
    """Rename a folder to the first free FOLDER.old-N."""
    for n in range(1, 10_000):
        aside = folder.with_name(f"{folder.name}.old-{n}")
        if not aside.exists():
            folder.rename(aside)
            return aside
    raise WorkdirError(f"{folder} has too many .old copies")


def now() -> str:
    """The local time, to the second."""
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Python and the libraries that numbers depend on."""
    return {"python": sys.version.split()[0], **{name: metadata.version(name) for name in PACKAGES}}


def commit() -> str:
    """The source's commit, "-dirty" where files differ from it, "unknown" outside a checkout."""
    root = Path(__file__).resolve().parent.parent
    try:
        out = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=root, capture_output=True, text=True, timeout=10, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return out.stdout.strip() or "unknown"
