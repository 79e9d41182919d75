"""The models of a finished sweep, read back from its folder."""

import contextlib
import dataclasses
import itertools
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.grid import Run
from experiments.program import keyless
from experiments.workdir import TOKENIZERS, Workdir, WorkdirError, read_json
from transformer_jax import checkpoint
from transformer_jax.config import Config, Hyper, from_dict
from transformer_jax.data import Tokenizers
from transformer_jax.encoder_decoder import Transformer
from transformer_jax.errors import CheckpointError, ConfigError, unknown
from transformer_jax.train import init_state


@dataclasses.dataclass(frozen=True)
class Model:
    """One trained run: its settings as plain numbers, and its parameters on the host.

    tokenizers: the digest of those it was trained with; "" where there were none.
    """

    config: Config
    hyper: Hyper
    params: Transformer
    step: int
    tokenizers: str = ""


@dataclasses.dataclass(frozen=True)
class TrainedArm:
    """An arm of a finished sweep at its own best rate: its place among the arms, and the model of each seed.

    diverged: the seeds whose models are not finite.
    """

    index: int
    name: str
    models: tuple[Model, ...]
    diverged: frozenset[int]

    @property
    def sound(self) -> dict[int, Model]:
        """Seed -> model, of those that did not diverge."""
        return {seed: model for seed, model in enumerate(self.models) if seed not in self.diverged}


def is_sweep(restore: str) -> bool:
    """Whether --restore names the workdir of a sweep, finished or not."""
    held = read_json(Path(restore) / "config.json")
    return isinstance(held, dict) and "arms" in held.get("identity", {})


def arms(folder: Path, answer: Mapping[str, Any] | None = None) -> list[TrainedArm]:
    """Every arm of the sweep in workdir `folder`. answer: its results.json, read from there where it is finished.

    Raises WorkdirError for any other folder.
    """
    answer = read_json(folder / "results.json") if answer is None else answer
    if answer is None or "arms" not in answer:
        raise WorkdirError(f"--restore={folder} holds no finished sweep: results.json with arms is wanted")
    wanted = [
        [Run(i, arm["best_learning_rate"], seed) for seed in range(answer["seeds"])]
        for i, arm in enumerate(answer["arms"])
    ]
    found, out = models(folder, {run for runs in wanted for run in runs}), []
    if others := {found[run].step for runs in wanted for run in runs} - {answer["steps"]}:
        raise WorkdirError(
            f"{folder} has gone on to step {max(others)} after the answer at step {answer['steps']}: "
            "run the sweep's command to its end"
        )
    for i, (arm, runs) in enumerate(zip(answer["arms"], wanted, strict=True)):
        of = tuple(found[run] for run in runs)
        losses = arm["metrics"][answer["primary_metric"]]["per_seed"]
        lost = frozenset(seed for seed, loss in enumerate(losses) if loss is None)
        out.append(TrainedArm(i, arm["name"], of, lost))
    return out


def arm_named(restore: str, name: str) -> TrainedArm:
    """The arm `name` of a finished sweep; "": its only one. Raises ConfigError for none or another, naming them."""
    found = {arm.name: arm for arm in arms(Path(restore))}
    if not name and len(found) > 1:
        raise ConfigError(
            f"--restore={restore} holds {len(found)} arms: name one by --arm, one of {', '.join(map(repr, found))}"
        )
    if name and name not in found:
        raise unknown("arm", name, found)
    return found[name] if name else next(iter(found.values()))


def keep_tokenizers(workdir: Workdir, of_arms: Sequence[Tokenizers | None]) -> None:
    """Write the tokenizers of a sweep's arms to its workdir, each once; nothing where no arm has any."""
    digests = [None if one is None else one.sha256 for one in of_arms]
    distinct = {one.sha256: one.to_dict() for one in of_arms if one is not None}
    if distinct:
        workdir.write(TOKENIZERS, {"of_arms": digests, "distinct": distinct})


def tokenizers_of(restore: str, arm: TrainedArm) -> Tokenizers:
    """The tokenizers that an arm of a sweep was trained with.

    Raises WorkdirError where there are none, CheckpointError where they are others than its models' own.
    """
    held = read_json(Path(restore) / TOKENIZERS)
    own = held["distinct"].get(held["of_arms"][arm.index]) if held else None
    if own is None:
        raise WorkdirError(
            f"--restore={restore}: no {TOKENIZERS} there for {arm.name}; the sweep's own command writes it again"
        )
    made, trained_with = Tokenizers.from_dict(own), arm.models[0].tokenizers
    if trained_with not in ("", made.sha256):
        raise CheckpointError(
            f"--restore={restore}: {arm.name} was trained with other tokenizers than its {TOKENIZERS}: "
            f"SHA-256 {trained_with[:12]}… and {made.sha256[:12]}…"
        )
    return made


def models(folder: Path, wanted: Set[Run] | None = None) -> dict[Run, Model]:
    """The models of the sweep in workdir `folder`, from the last checkpoint of each group: all, or of groups with runs
    that are `wanted`.

    Raises WorkdirError where there is none or it is not of the last step, CheckpointError where none is good.
    """
    groups = sorted(folder.glob("checkpoints/group*"))
    if not groups:
        raise WorkdirError(f"{folder} holds no checkpoints of a sweep")
    groups = [group for group in groups if wanted is None or wanted & _runs(group)]
    found = dict(itertools.chain.from_iterable(_group(group).items() for group in groups))
    if lost := (wanted or set()) - found.keys():
        raise WorkdirError(f"{folder} holds no model of {next(iter(lost))}")
    return found


def _runs(folder: Path) -> set[Run]:
    """The runs of a group, as its newest checkpoint that can be read names them."""
    for step in reversed(checkpoint.steps(folder)):
        with contextlib.suppress(CheckpointError):
            return {Run(**run) for run in checkpoint.read_meta(folder, step)["runs"]}
    return set()


def _group(folder: Path) -> dict[Run, Model]:
    restored = checkpoint.restore_latest(folder, _like)
    config, meta = from_dict(Config, restored.meta["config"]), restored.meta
    if restored.notes or restored.step != config.steps:
        why = "".join(f" ({note})" for note in restored.notes)
        raise WorkdirError(f"{folder}: the newest good models are of step {restored.step} of {config.steps}{why}")
    out = {}
    for r, (run, hyper) in enumerate(zip(meta["runs"], meta["hypers"], strict=True)):
        params = jax.tree.map(lambda x, r=r: x[r], restored.state["states"].weights)
        digest = meta.get("tokenizers", "")
        out[Run(**run)] = Model(config, from_dict(Hyper, hyper), params, restored.step, digest)
    return out


def _like(meta: Mapping[str, Any]) -> Any:
    """What a group saves (see sweep.py), as NumPy arrays: all its copies of the state, and its record."""
    if "record" not in meta:
        raise WorkdirError("a checkpoint that does not say what it holds: train the sweep again")
    config = from_dict(Config, meta["config"])
    one = jax.eval_shape(lambda key: keyless(init_state(config, Hyper(), key)), jax.random.key(0))
    states = jax.tree.map(lambda x: np.empty((meta["copies"], *x.shape), x.dtype), one)
    return {"states": states, "record": {name: np.empty(*about) for name, about in meta["record"].items()}}
