"""`--average`: the mean of a run's newest checkpoints."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments import loop, restoring
from tests.pairs_run import BASE, loaded, make_run, words, write_pairs
from transformer_jax import checkpoint
from transformer_jax.errors import CheckpointError


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("averaged")
    files = {name: str(write_pairs(folder / f"{name}.tsv", words(40, 0))) for name in ("pairs", "dev")}
    return make_run(folder / "run", BASE.replace(**files), saves=(1, 2, 3))


def test_the_mean_of_the_newest_checkpoints(run: Path) -> None:
    config, hyper = restoring.saved_configuration(str(run))
    like, saves = loop.abstract_state(config, hyper), run / "checkpoints"
    states = [checkpoint.restore(saves, step, like).state.params for step in (2, 3)]
    made = restoring.averaged(saves, like, 2)
    jax.tree.map(
        lambda mean, a, b: np.testing.assert_allclose(mean, (np.float64(a) + np.float64(b)) / 2, atol=1e-6),
        made.state,
        *states,
    )
    assert made.step == 3 and made.notes == ["the mean of steps 2, 3"]
    mean = loaded(f"--restore={run}", "--average=2").translator.models[0]
    jax.tree.map(np.testing.assert_array_equal, mean, made.state)
    wants = r"--average=4 wants as many checkpoints .* 3 good ones \(train with --keep=4 and a --checkpoint_every\)"
    with pytest.raises(CheckpointError, match=wants):
        loaded(f"--restore={run}", "--average=4")
    with pytest.raises(CheckpointError, match="leave --restore_step=best out"):
        loaded(f"--restore={run}", "--average=2", "--restore_step=best")


def test_a_mean_is_of_the_parameters_and_names_the_best(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of their EMA; and the best checkpoint, kept though others of its age are gone, is named if it takes part."""
    config, hyper = restoring.saved_configuration(str(run))
    like, saves, restore = loop.abstract_state(config, hyper), run / "checkpoints", checkpoint.restore

    def with_average(*args: Any) -> checkpoint.Restored:
        found = restore(*args)
        zeros = jax.tree.map(np.zeros_like, found.state.params)
        return dataclasses.replace(found, state=dataclasses.replace(found.state, ema=zeros))

    monkeypatch.setattr(checkpoint, "restore", with_average)
    made = restoring.averaged(saves, like, 1)
    jax.tree.map(np.testing.assert_array_equal, made.state, restore(saves, 3, like).state.params)
    monkeypatch.setattr(restoring, "was_measured", lambda folder: True)
    monkeypatch.setattr(restoring, "best_step", lambda folder: 1)
    assert restoring.averaged(saves, like, 3).notes == ["the mean of steps 1 (the best, kept), 2, 3"]


def test_a_damaged_checkpoint_has_no_part_in_the_mean(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    shutil.copytree(run, folder)
    (folder / "checkpoints" / "2" / checkpoint.MARKER).unlink()
    (folder / "checkpoints" / "3" / checkpoint.MANIFEST / checkpoint.MANIFEST_FILE).write_text("{}")
    config, hyper = restoring.saved_configuration(str(folder))
    like = loop.abstract_state(config, hyper)
    made = restoring.averaged(folder / "checkpoints", like, 1)
    assert made.step == 1 and "step 3: unreadable manifest" in made.notes[0]
    with pytest.raises(CheckpointError, match="it holds 1 good ones; step 3: unreadable"):
        restoring.averaged(folder / "checkpoints", like, 2)
