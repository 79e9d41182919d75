"""The models of a finished sweep, read back from its folder."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
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
from transformer_jax.errors import ConfigError, unknown
from transformer_jax.train import init_state


@dataclasses.dataclass(frozen=True)
class Model:
    """One trained run: its settings as plain numbers, and its parameters on the host."""

    config: Config
    hyper: Hyper
    params: Transformer
    step: int


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
    return held is not None and "arms" in held["identity"]


def arms(folder: Path, answer: Mapping[str, Any] | None = None) -> list[TrainedArm]:
    """Every arm of the sweep in workdir `folder`. answer: its results.json, read from there where it is finished.

    Raises WorkdirError for any other folder.
    """
    answer = read_json(folder / "results.json") if answer is None else answer
    if answer is None or "arms" not in answer:
        raise WorkdirError(f"--restore={folder} holds no finished sweep: results.json with arms is wanted")
    found, out = models(folder), []
    for i, arm in enumerate(answer["arms"]):
        of = tuple(found[Run(i, arm["best_learning_rate"], seed)] for seed in range(answer["seeds"]))
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
    """The tokenizers that an arm of a sweep was trained with. Raises WorkdirError where there are none."""
    held = read_json(Path(restore) / TOKENIZERS)
    own = held["distinct"].get(held["of_arms"][arm.index]) if held else None
    if own is None:
        raise WorkdirError(f"--restore={restore}: no {TOKENIZERS} there for {arm.name}")
    return Tokenizers.from_dict(own)


def models(folder: Path) -> dict[Run, Model]:
    """Every model of the sweep in workdir `folder`, from the last checkpoint of each group.

    Raises WorkdirError where there is none or it is not of the last step, CheckpointError where none is good.
    """
    groups = sorted(folder.glob("checkpoints/group*"))
    if not groups:
        raise WorkdirError(f"{folder} holds no checkpoints of a sweep")
    return dict(itertools.chain.from_iterable(_group(group).items() for group in groups))


def _group(folder: Path) -> dict[Run, Model]:
    restored = checkpoint.restore_latest(folder, _like)
    config, meta = from_dict(Config, restored.meta["config"]), restored.meta
    if restored.notes or restored.step != config.steps:
        why = "".join(f" ({note})" for note in restored.notes)
        raise WorkdirError(f"{folder}: the newest good models are of step {restored.step} of {config.steps}{why}")
    out = {}
    for r, (run, hyper) in enumerate(zip(meta["runs"], meta["hypers"], strict=True)):
        params = jax.tree.map(lambda x, r=r: x[r], restored.state["states"].weights)
        out[Run(**run)] = Model(config, from_dict(Hyper, hyper), params, restored.step)
    return out


def _like(meta: Mapping[str, Any]) -> Any:
    """What a group saves (see sweep.py), as NumPy arrays: all its copies of the state, and its record."""
    if "record" not in meta:
        raise WorkdirError("a checkpoint that does not say what it holds: train the sweep again")
    config = from_dict(Config, meta["config"])
    one = jax.eval_shape(lambda key: keyless(init_state(config, Hyper(), key)), jax.random.key(0))
    states = jax.tree.map(lambda x: np.empty((meta["copies"], *x.shape), x.dtype), one)
    return {"states": states, "record": {name: np.empty(*about) for name, about in meta["record"].items()}}
