"""What is inside a workdir's checkpoints: by which code and configuration, counts and norms.

    python launch.py --experiment=inspect --restore=runs/lm
    python launch.py --experiment=inspect --restore=runs/lm --restore_step=1000

Every checkpoint is read and verified; of one of them (the newest sound one) each array is listed. Expected:
a row for each step, "sound" or what is wrong with it, and exit code 1 if any is damaged.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments.flags import Settings
from experiments.restoring import METRIC, folders
from experiments.terminal import console_of, say, table
from experiments.workdir import read_json
from transformer_jax import checkpoint
from transformer_jax.config import Config, Hyper
from transformer_jax.errors import CheckpointError, ConfigError

FLAGS = ("restore", "restore_step")


@dataclasses.dataclass(frozen=True)
class Saved:
    """One checkpoint, read whole. `problem`: why it cannot be used, "" if it is sound."""

    step: int
    meta: dict[str, Any]
    arrays: dict[str, np.ndarray]
    problem: str


def survey(folder: Path) -> list[Saved]:
    """Every checkpoint of a folder, ascending by step, verified; arrays are kept of the last sound one only."""
    found: list[Saved] = [
        Saved(step, {}, {}, f"step {step}: half-written, the save was cut off")
        for step in checkpoint.half_written(folder)
    ]
    for step in checkpoint.steps(folder):
        try:
            sound = Saved(step, *checkpoint.contents(folder, step), "")
        except CheckpointError as error:
            found.append(Saved(step, {}, {}, str(error)))
        else:
            found = [*(dataclasses.replace(saved, arrays={}) for saved in found), sound]
    return sorted(found, key=lambda saved: saved.step)


def run(settings: Settings) -> int:
    """Print what --restore holds; 0 if all of it is sound, else 1."""
    if not settings.restore:
        raise ConfigError("--restore=FOLDER names the workdir or the folder of checkpoints to inspect")
    if settings.overrides:
        raise ConfigError(f"--{min(settings.overrides)} has no effect in --experiment=inspect: leave it out")
    if settings.restore_step and not settings.restore_step.isdecimal():
        raise ConfigError(f"--restore_step={settings.restore_step}: a number of steps here")
    console, sound = console_of(None), True
    places = folders(settings.restore)
    held = read_json(Path(settings.restore) / "config.json") or {}
    if held:
        made = held.get("versions", {})
        say(console, f"{settings.restore}: {held.get('identity', {}).get('experiment', 'unknown')}", "bold")
        say(console, f"started {held.get('started')} by commit {held.get('commit')}")
        say(console, ", ".join(f"{name} {version}" for name, version in made.items()))
        say(console, f"command: {held.get('command')}")
    for folder in places:
        found = survey(folder)
        sound &= not any(saved.problem for saved in found)
        say(console)
        say(console, str(folder), "bold")
        _print_steps(console, found)
        wanted = [saved for saved in found if saved.arrays]
        if settings.restore_step:
            step = int(settings.restore_step)
            wanted = [Saved(step, *checkpoint.contents(folder, step), "")]
        if wanted:
            _print_contents(console, wanted[-1])
    return 0 if sound else 1


def _print_steps(console: Any, found: list[Saved]) -> None:
    rows = []
    for saved in found:
        value = (saved.meta.get("metrics") or {}).get(METRIC)
        rows.append((f"{saved.step}", "" if value is None else f"{value:.4f}", "damaged" if saved.problem else "sound"))
    table(console, ("step", "selection loss", "state"), rows)
    for saved in found:
        if saved.problem:
            say(console, saved.problem, "yellow")


def _print_contents(console: Any, saved: Saved) -> None:
    say(console)
    for kind, name in ((Config, "config"), (Hyper, "hyper")):
        if name in saved.meta:
            say(console, f"{name}: {_beyond_defaults(kind, saved.meta[name])}")
    rest = {name: value for name, value in saved.meta.items() if name not in ("config", "hyper", "metrics", "made")}
    say(console, "meta: " + "  ".join(f"{name} {_short(value)}" for name, value in rest.items()))
    if "made" in saved.meta:
        say(console, "saved by " + ", ".join(f"{name} {value}" for name, value in saved.meta["made"].items()))
    say(console)
    say(console, f"step {saved.step}: {_total(saved.arrays)}", "bold")
    branches: dict[str, dict[str, np.ndarray]] = {}
    for path, array in saved.arrays.items():
        parts = path.split("/")
        # Parameters are listed one by one, under what they belong to; moments and the rest by branch.
        at = parts.index("params") + 1 if "params" in parts[:-1] else len(parts[:3])
        branches.setdefault("/".join(parts[:at]), {})["/".join(parts[at:])] = array
    for branch, inside in branches.items():
        say(console)
        say(console, f"{branch}: {_total(inside)}{_norm(inside)}")
        if branch.split("/")[-1] == "params":
            table(console, ("array", "shape", "norm", "largest"), [_row(*item) for item in inside.items()])


def _finite(array: np.ndarray) -> np.ndarray | None:
    """The finite values, float64; None for what is not made of floating-point numbers."""
    if array.dtype.kind not in "fV":  # V: bfloat16 and its kin are void to NumPy
        return None
    values = array.astype(np.float32).astype(np.float64)
    return values[np.isfinite(values)]


def _row(name: str, array: np.ndarray) -> tuple[str, str, str, str]:
    real = _finite(array)
    norm, largest = ("", "") if real is None else (f"{np.linalg.norm(real):.4g}", f"{np.abs(real).max(initial=0):.4g}")
    return name, "×".join(map(str, array.shape)) or "scalar", norm, largest


def _norm(arrays: Mapping[str, np.ndarray]) -> str:
    found = [(array.size, real) for array in arrays.values() if (real := _finite(array)) is not None]
    if not found:
        return ""
    odd = sum(size - real.size for size, real in found)
    norm = f", norm {np.sqrt(sum(np.sum(real**2) for _, real in found)):.4g}"
    return norm + (f", {odd:,} NOT FINITE" if odd else "")


def _total(arrays: Mapping[str, np.ndarray]) -> str:
    count, size = sum(a.size for a in arrays.values()), sum(a.nbytes for a in arrays.values())
    types = ", ".join(sorted({str(a.dtype) for a in arrays.values()}))
    where = f" in {len(arrays)} arrays" if len(arrays) > 1 else ""
    return f"{count:,} numbers{where}, {size / 2**20:.2f} MiB, {types}"


def _beyond_defaults(kind: type, values: Mapping[str, Any]) -> str:
    """name=value of the fields that are not at their default."""
    default = {field.name: field.default for field in dataclasses.fields(kind)}
    shown = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    return "  ".join(f"{name}={v}" for name, v in shown.items() if v != default.get(name)) or "all defaults"


def _short(value: Any) -> str:
    text = f"{value}"
    return text if len(text) <= 60 else text[:57] + "..."
