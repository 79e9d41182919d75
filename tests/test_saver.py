"""Which checkpoints stay, and parts of one restored by name."""

import math
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.test_checkpoint import LIKE, assert_same, biggest, flip, numbered
from transformer_jax import checkpoint
from transformer_jax.checkpoint import MismatchError, restore_parts
from transformer_jax.errors import CheckpointError
from transformer_jax.saver import UNMEASURED, Keep, Saver


def left(folder: Path) -> list[int]:
    assert all(path.name.isdigit() for path in folder.iterdir())
    return checkpoint.steps(folder)


def save(folder: Path, keep: Keep, losses: dict[int, float | None], resumed: int | None = None) -> None:
    with Saver(folder, keep=keep, resumed=resumed) as saver:
        for step, loss in losses.items():
            saver.save(step, numbered(step), {} if loss is None else {"metrics": {"loss": loss}})


def test_every_nth_and_the_last_stay(tmp_path: Path) -> None:
    save(tmp_path, Keep(last=1, every=4), dict.fromkeys((2, 4, 6, 8, 10), None))
    assert left(tmp_path) == [4, 8, 10]


def test_the_best_stays_and_a_better_one_takes_its_place(tmp_path: Path) -> None:
    keep = Keep(last=1, best="loss")
    save(tmp_path, keep, {1: 3.0, 2: 1.5, 3: 1.5, 4: None, 5: 2.0})
    assert left(tmp_path) == [2, 5]
    save(tmp_path, keep, {6: 1.6, 7: math.nan}, resumed=5)  # NaN is JSON to Python: it is nobody's best
    assert left(tmp_path) == [2, 7]
    with Saver(tmp_path, keep=keep, resumed=7) as saver:
        assert saver.best[0] == 1.5
        saver.save(8, numbered(8), {"metrics": {"loss": 1.0}})
        assert saver.best[0] == 1.0
    assert left(tmp_path) == [8]


def test_a_metric_that_is_to_be_high_is_named_with_a_minus(tmp_path: Path) -> None:
    with Saver(tmp_path, keep=Keep(last=1, best="-bleu")) as saver:
        for step, bleu in ((1, 10.0), (2, 31.5), (3, None), (4, 20.0)):
            saver.save(step, {"x": np.zeros(2)}, {"metrics": {"bleu": bleu}})
        assert saver.best[0] == -31.5
    assert checkpoint.steps(tmp_path) == [2, 4]


def test_a_best_that_is_not_this_run_s_is_no_rival(tmp_path: Path) -> None:
    save(tmp_path, Keep(last=3), {500: 0.1})
    with Saver(tmp_path, keep=Keep(last=1, best="loss")) as saver:
        assert saver.best == UNMEASURED
        saver.save(1, numbered(1), {"metrics": {"loss": 9.0}})
        saver.save(2, numbered(2), {})
    assert left(tmp_path) == [1, 2, 500]


def test_a_damaged_checkpoint_is_nobody_s_best(tmp_path: Path) -> None:
    keep = Keep(last=2, best="loss")
    save(tmp_path, keep, {1: 1.0, 2: 2.0})
    manifest = tmp_path / "1" / "manifest" / "manifest.json"
    flip(manifest, manifest.stat().st_size // 2)
    with Saver(tmp_path, keep=keep, resumed=2) as saver:
        assert saver.best[0] == 2.0


@pytest.mark.parametrize(("keep", "named"), [({"last": 0}, "keep=0"), ({"every": -1}, "keep_every=-1")])
def test_rules_out_of_range(keep: Any, named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        Keep(**keep)


# --- parts by name ------------------------------------------------------------


def test_i9_only_named_parts_are_taken_and_the_difference_is_told(tmp_path: Path) -> None:
    state = {"net": {"w": jnp.arange(6.0), "b": jnp.ones(2)}, "netto": jnp.ones(3), "old": jnp.ones(1)}
    with Saver(tmp_path) as saver:
        saver.save(3, state, {"about": "it"})
    like = {"net": {"w": jnp.zeros(6), "b": jnp.zeros(2)}, "netto": jnp.zeros(3), "head": jnp.full(4, 7.0)}
    got = restore_parts(tmp_path, 3, like, ["net"])
    assert_same(got.state, {"net": state["net"], "netto": jnp.zeros(3), "head": like["head"]})
    assert got.notes == [
        "taken from step 3: net/b [2]",
        "taken from step 3: net/w [6]",
        "as it was: head [4]",
        "as it was: netto [3]",
        "left in the checkpoint: old [1]",
    ]
    assert got.meta == {"about": "it"}
    assert_same(restore_parts(tmp_path, 3, like, ["net/b", "netto"]).state["net"]["w"], jnp.zeros(6))


def test_i9_parts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with Saver(tmp_path) as saver:
        saver.save(1, numbered(1), {})
    zeros = numbered(0)
    with pytest.raises(MismatchError, match=r"a: shape \[2\] wanted, \[40, 30\] saved"):
        restore_parts(tmp_path, 1, zeros | {"a": jnp.zeros(2)}, ["a"])
    with pytest.raises(MismatchError, match="c: missing from the checkpoint"):
        restore_parts(tmp_path, 1, zeros | {"c": jnp.zeros(2)}, ["c"])
    with pytest.raises(MismatchError, match="b: unexpected, in the checkpoint only"):
        restore_parts(tmp_path, 1, {"a": zeros["a"]}, ["b"])
    with pytest.raises(CheckpointError, match="unknown part 'aa'"):
        restore_parts(tmp_path, 1, zeros, ["aa"])
    with pytest.raises(CheckpointError, match="b is not named and has no values"):
        restore_parts(tmp_path, 1, LIKE, ["a"])
    flip(biggest(tmp_path / "1"), 3000)
    with pytest.raises(checkpoint.DamagedError):
        restore_parts(tmp_path, 1, zeros, ["a"])


def test_parts_come_back_in_the_kind_of_like(tmp_path: Path) -> None:
    with Saver(tmp_path) as saver:
        saver.save(1, numbered(1), {})
    got = restore_parts(tmp_path, 1, {"a": np.zeros((40, 30), np.float32), "b": jnp.arange(6)}, ["a", "b"])
    assert isinstance(got.state["a"], np.ndarray) and float(got.state["a"][3, 4]) == 1


# --- what a kill, a reader and an error leave -------------------------------------


def test_i2_a_kill_between_two_renames_loses_nothing(tmp_path: Path) -> None:
    """Step 3 saved again: both copies are complete, and neither is called 3."""
    save(tmp_path, Keep(), {2: None, 3: None})
    (tmp_path / "3").rename(tmp_path / "3.new")
    with Saver(tmp_path, keep=2, resumed=3):
        pass
    assert left(tmp_path) == [2, 3]
    assert_same(checkpoint.restore(tmp_path, 3, LIKE).state, numbered(3))


def test_a_step_that_is_deleted_while_it_is_read_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, Keep(), {1: None, 2: None})
    restore = checkpoint.restore

    def late(folder: Path, step: int, like: Any) -> checkpoint.Restored:
        if step == 2 and (tmp_path / "2").exists():
            shutil.rmtree(tmp_path / "2")
        return restore(folder, step, like)

    monkeypatch.setattr(checkpoint, "restore", late)
    found = checkpoint.restore_latest(tmp_path, LIKE)
    assert found.step == 1 and found.notes == ["step 2: deleted while it was read"]
