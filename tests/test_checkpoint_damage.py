"""Checkpoints that were cut off, damaged, pruned, or written where there is no room; and other processes."""

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.test_checkpoint import LIKE, assert_same, biggest, files, flip, numbered, save_all
from transformer_jax import checkpoint
from transformer_jax.checkpoint import DamagedError, restore, restore_latest
from transformer_jax.errors import CheckpointError
from transformer_jax.saver import Saver

ROOT = Path(__file__).parent.parent


# --- damage ------------------------------------------------------------------


def test_a_flipped_bit_in_any_file_is_found_or_harmless(tmp_path: Path) -> None:
    save_all(tmp_path, 1)
    original, found = numbered(1), {}
    for path in files(tmp_path / "1"):
        data = path.read_bytes()
        for at in sorted({0, len(data) // 3, len(data) // 2, 4 * len(data) // 5, len(data) - 1}):
            flip(path, at)
            try:
                restored = restore_latest(tmp_path, LIKE)
            except CheckpointError as error:
                assert "no good checkpoint" in str(error) and "step 1" in str(error)
                found[path, at] = str(error)
            else:
                assert_same(restored.state, original)
                assert restored.meta == {"position": 10}
            path.write_bytes(data)
    assert any("a: changed (digest)" in message for message in found.values())
    assert {biggest(tmp_path / "1"), tmp_path / "1" / "manifest" / "manifest.json"} <= {path for path, _ in found}
    assert_same(restore(tmp_path, 1, LIKE).state, original)


def test_a_changed_manifest_is_found(tmp_path: Path) -> None:
    save_all(tmp_path, 1, 2)
    manifest = tmp_path / "2" / "manifest" / "manifest.json"
    text = manifest.read_text()
    for before, after in (('"position": 20', '"position": 30'), ('"shape": [6]', '"shape": [5]'), ("sha256", "sha257")):
        assert before in text
        manifest.write_text(text.replace(before, after))
        restored = restore_latest(tmp_path, LIKE)
        assert restored.step == 1 and "manifest" in restored.notes[0]
        assert checkpoint.read_meta(tmp_path) == {"position": 10}


@pytest.mark.parametrize("damage", ["truncate", "empty", "delete"])
def test_a_truncated_or_deleted_file_is_found_or_harmless(tmp_path: Path, damage: str) -> None:
    save_all(tmp_path, 1, 2)
    found = set()
    for path in files(tmp_path / "2"):
        data = path.read_bytes()
        path.write_bytes(data[: 0 if damage == "empty" else len(data) // 2])
        if damage == "delete":
            path.unlink()
        restored = restore_latest(tmp_path, LIKE)
        assert_same(restored.state, numbered(restored.step))
        if restored.step == 1:
            found.add(path)
            assert len(restored.notes) == 1 and restored.notes[0].startswith("step 2: ")
        path.write_bytes(data)
    assert {biggest(tmp_path / "2"), tmp_path / "2" / "manifest" / "manifest.json"} <= found
    assert (tmp_path / "2" / "commit_success.txt" in found) == (damage == "delete")
    assert restore_latest(tmp_path, LIKE).step == 2


def test_a_leaf_lost_from_the_data_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_all(tmp_path, 1)
    save = checkpoint.write_items
    monkeypatch.setattr(
        checkpoint,
        "write_items",
        lambda path, arrays, manifest: save(path, {"a": arrays["a"] + 1, "z": arrays["a"]}, manifest),
    )
    save_all(tmp_path, 2)
    with pytest.raises(DamagedError, match=r"step 2: .*: a: changed \(digest\); b: missing; z: unexpected"):
        restore(tmp_path, 2, LIKE)
    assert restore_latest(tmp_path, LIKE).step == 1


def test_i2_a_half_written_newest_is_named_and_the_next_save_works(tmp_path: Path) -> None:
    save_all(tmp_path, 1, 2, 3)
    (tmp_path / "3" / "commit_success.txt").unlink()
    shutil.copytree(tmp_path / "2", tmp_path / "4.orbax-checkpoint-tmp")
    (tmp_path / "3.new").mkdir()
    restored = restore_latest(tmp_path, LIKE)
    assert restored.step == 2 and [note[:6] for note in restored.notes] == ["step 4", "step 3"]
    assert "half-written" in restored.notes[0] and "commit_success.txt is missing" in restored.notes[1]
    assert checkpoint.steps(tmp_path) == [1, 2]
    with Saver(tmp_path, keep=2, resumed=2) as saver:
        saver.save(3, numbered(3), {})
        saver.save(4, numbered(4), {})
    assert checkpoint.steps(tmp_path) == [3, 4]
    assert_same(restore_latest(tmp_path, LIKE).state, numbered(4))
    assert_same(restore(tmp_path, 3, LIKE).state, numbered(3))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["3", "3.aside-1", "4"]


def test_none_good_names_each_and_why(tmp_path: Path) -> None:
    save_all(tmp_path, 1, 2)
    (tmp_path / "1" / "commit_success.txt").unlink()
    flip(biggest(tmp_path / "2"), biggest(tmp_path / "2").stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"step 2: damaged leaves: a: changed.*; step 1: .*missing"):
        restore_latest(tmp_path, LIKE)
    (tmp_path / "empty").mkdir()
    for folder, message in (("empty", "it holds none"), ("absent", "is not a folder")):
        with pytest.raises(CheckpointError, match=message):
            restore_latest(tmp_path / folder, LIKE)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 7 .*\[2\]"):
        restore(tmp_path, 7, LIKE)
    (tmp_path / "2").rename(tmp_path / "8")
    with pytest.raises(DamagedError, match="the folder's name"):
        restore(tmp_path, 8, LIKE)


# --- which are kept ----------------------------------------------------------


def test_the_last_n_are_kept(tmp_path: Path) -> None:
    save_all(tmp_path, 1, 2, 3, 4, 5, keep=3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["3", "4", "5"]
    with Saver(tmp_path, keep=3, resumed=4) as saver:  # 5 is ahead of this run: not its own
        saver.save(6, numbered(6), {})
        saver.save(7, numbered(7), {})
    assert checkpoint.steps(tmp_path) == [4, 5, 6, 7]
    with pytest.raises(CheckpointError, match="keep=0"):
        Saver(tmp_path, keep=0)


def test_i7_a_new_run_beside_higher_steps_deletes_none(tmp_path: Path) -> None:
    save_all(tmp_path, 500, 600, 700)
    with Saver(tmp_path, keep=1) as saver:
        for step in (100, 200, 50):
            saver.save(step, numbered(step), {})
            saver.wait()
            assert checkpoint.steps(tmp_path) == [step, 500, 600, 700]


def test_a_step_saved_again_replaces_its_own_and_spares_others(tmp_path: Path) -> None:
    save_all(tmp_path, 1)
    with Saver(tmp_path) as saver:
        saver.save(1, numbered(10), {})
        saver.save(1, numbered(11), {})
    assert_same(restore(tmp_path, 1, LIKE).state, numbered(11))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "1.aside-1"]
    (tmp_path / "1").rename(tmp_path / "ours")
    (tmp_path / "1.aside-1").rename(tmp_path / "1")
    assert_same(restore(tmp_path, 1, LIKE).state, numbered(1))


# --- failures ----------------------------------------------------------------


def test_i5_a_full_disk_is_raised_with_its_cause_and_what_was_there_stays(tmp_path: Path) -> None:
    save_all(tmp_path, 1)
    big = {"a": np.random.default_rng(0).standard_normal((500, 500)), "b": np.arange(6)}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Saver(tmp_path, keep=1, resumed=1) as saver:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        try:
            saver.save(2, big, {})
            with pytest.raises(CheckpointError, match=r"save of step 2 in .* failed: .*[Ff]ile too large"):
                saver.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert [p.name for p in tmp_path.iterdir()] == ["1"]
        saver.save(2, big, {})
    assert checkpoint.steps(tmp_path) == [2]
    assert_same(restore(tmp_path, 2, big).state, big)


@pytest.mark.parametrize("surface", ["wait", "save", "close"])
def test_a_background_error_is_raised_once_wherever_it_is_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, surface: str
) -> None:
    save_all(tmp_path, 1)

    def fail(path: Path, arrays: Any, manifest: Any) -> None:
        Path(f"{path}.orbax-checkpoint-tmp").mkdir()
        raise OSError(28, "No space left on device")

    saver = Saver(tmp_path, keep=1, resumed=1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_items", fail)
        saver.save(2, numbered(2), {})
        with pytest.raises(CheckpointError, match=r"save of step 2 .* No space left") as caught:
            {"wait": saver.wait, "save": lambda: saver.save(3, numbered(3), {}), "close": saver.close}[surface]()
        assert isinstance(caught.value.__cause__, OSError)
    assert [p.name for p in tmp_path.iterdir()] == ["1"]
    saver.close()


def test_i5_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot make the folder .*file/ckpt: NotADirectory"):
        Saver(tmp_path / "file" / "ckpt")
    with Saver(tmp_path / "gone") as saver:
        (tmp_path / "gone").rmdir()
        (tmp_path / "gone").touch()
        saver.save(1, numbered(1), {})
        with pytest.raises(CheckpointError, match=r"save of step 1 .*gone failed: NotADirectory"):
            saver.wait()


# --- other processes ---------------------------------------------------------


def start(code: str, *args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *map(str, args)],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_i4_exit_right_after_the_last_save(tmp_path: Path) -> None:
    code = """
        import sys
        import numpy as np
        from transformer_jax import checkpoint
        from transformer_jax.saver import Saver
        assert not any("orbax" in name for name in sys.modules), "imported too early"
        saver = Saver(sys.argv[1])
        for step in range(1, 4):
            saver.save(step, {"a": np.full((1000, 1000), step, np.float32)}, {"step": step})
        if sys.argv[2] == "close":
            saver.close()
            checkpoint.restore_latest(sys.argv[1], {"a": np.zeros((1000, 1000), np.float32)})
    """
    closed, left = start(code, tmp_path / "a", "close"), start(code, tmp_path / "b", "forget")
    out, err = closed.communicate(timeout=60)
    assert (closed.returncode, out, err) == (0, "", ""), "a normal save and restore print nothing"
    restored = restore_latest(tmp_path / "a", {"a": np.zeros((1000, 1000), np.float32)})
    assert restored.step == 3 and (restored.state["a"] == 3).all() and restored.notes == []
    _, err = left.communicate(timeout=60)
    assert 3 in checkpoint.steps(tmp_path / "b") or "save of step 3 in" in err, "a save must not be lost in silence"


def test_i2_kill_9_during_a_save(tmp_path: Path) -> None:
    code = """
        import sys
        import numpy as np
        from transformer_jax import checkpoint
        from transformer_jax.saver import Saver
        with Saver(sys.argv[1]) as saver:
            for step in range(1, 10_000):
                saver.save(step, {"a": np.full((3000, 1000), step, np.float32)}, {"step": step})
    """
    child, deadline = start(code, tmp_path), time.monotonic() + 60
    stray: list[Path] = []
    try:
        while not stray or len(checkpoint.steps(tmp_path)) < 2:
            assert time.monotonic() < deadline and child.poll() is None
            stray = [p for p in tmp_path.glob("*.orbax-checkpoint-tmp") if (p / "state.orbax-checkpoint-tmp").exists()]
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    like = {"a": np.zeros((3000, 1000), np.float32)}
    left = [int(p.name.split(".")[0]) for p in tmp_path.glob("*.orbax-checkpoint-tmp")]
    restored = restore_latest(tmp_path, like)
    assert (restored.state["a"] == restored.step).all() and restored.meta == {"step": restored.step}
    assert [int(note.split()[1].rstrip(":")) for note in restored.notes] == [s for s in left if s > restored.step]
    with Saver(tmp_path, keep=1, resumed=restored.step) as saver:
        saver.save(restored.step + 1, like, {})
    assert [p.name for p in tmp_path.iterdir()] == [str(restored.step + 1)]
    assert_same(restore_latest(tmp_path, like).state, like)


def test_j4_two_processes(tmp_path: Path) -> None:
    code = """
        import sys
        import jax
        import numpy as np
        from jax.sharding import AxisType, NamedSharding, PartitionSpec
        rank, port, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
        jax.config.update("jax_num_cpu_devices", 2)
        jax.distributed.initialize(f"localhost:{port}", 2, rank)
        from transformer_jax import checkpoint
        from transformer_jax.saver import Saver
        mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
        rows, whole = (NamedSharding(mesh, PartitionSpec(*p)) for p in (("x",), ()))
        w = np.arange(40, dtype=np.float32).reshape(8, 5)
        state = {"w": jax.make_array_from_callback(w.shape, rows, lambda i: w[i]),
                 "k": jax.jit(lambda: jax.random.key(3), out_shardings=whole)()}
        with Saver(folder, keep=1) as saver:
            saver.save(1, state, {})
            saver.save(2, state, {"n": 2})
        restored = checkpoint.restore_latest(folder, state)
        assert restored.step == 2 and restored.meta == {"n": 2}
        for shard in restored.state["w"].addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), w[shard.index])
        f = jax.jit(lambda s: (s["w"].sum(), jax.random.bits(s["k"])))
        assert [int(x) for x in f(state)] == [int(x) for x in f(restored.state)] and f._cache_size() == 1
        if rank == 0:
            def fail(*args):
                raise OSError(28, "No space left on device")
            checkpoint.write_items = fail
        try:
            with Saver(folder) as saver:
                saver.save(3, state, {})
        except checkpoint.CheckpointError as error:
            print(error)
    """
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    children = [start(code, rank, port, tmp_path) for rank in range(2)]
    results = [child.communicate(timeout=90) for child in children]
    assert [child.returncode for child in children] == [0, 0], results
    assert "step 3" in results[0][0] and "No space left" in results[0][0]
    assert "step 3" in results[1][0] and "failed on process 0" in results[1][0]
    like = {"w": np.zeros((8, 5), np.float32), "k": jax.random.key(0)}
    np.testing.assert_array_equal(restore_latest(tmp_path, like).state["w"], np.arange(40.0).reshape(8, 5))


def test_the_cause_is_what_stands_before_tensorstore_s_own_pages() -> None:
    path, spec = "/there/" * 30, '{\\"driver\\":\\"zarr\\"}' * 30
    for pages in ("", " [os_error_code='28']", f" [tensorstore_spec='{spec}'] [os_error_code='28']"):
        said = checkpoint.cause(ValueError(f'OUT_OF_RANGE: Failed writing: "{path}": No space left on device{pages}'))
        assert said.startswith("ValueError: OUT_OF_RANGE") and said.endswith("No space left on device")
        assert len(said) < 260
