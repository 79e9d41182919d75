"""The models of a finished sweep, read back from its folder."""

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.grid import Run
from experiments.program import keyless
from experiments.workdir import WorkdirError
from transformer_jax import checkpoint
from transformer_jax.config import Config, Hyper, from_dict
from transformer_jax.encoder_decoder import Transformer
from transformer_jax.train import init_state


@dataclasses.dataclass(frozen=True)
class Model:
    """One trained run: its settings as plain numbers, and its parameters on the host."""

    config: Config
    hyper: Hyper
    params: Transformer
    step: int


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
