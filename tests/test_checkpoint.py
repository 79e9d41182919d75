"""Checkpoints: bit-for-bit, atomic, verified; damage is named and passed over, another model is refused."""

import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from transformer_jax import checkpoint
from transformer_jax.checkpoint import DamagedError, MismatchError, Saver, restore, restore_latest
from transformer_jax.errors import CheckpointError

ROOT = Path(__file__).parent.parent


@struct.dataclass
class State:
    params: Any
    opt: Any
    step: Any
    key: Any


TX = optax.adam(1e-2)


@jax.jit
def init() -> State:
    params = {"w_DF": jax.random.normal(jax.random.key(1), (5, 7)), "b_F": jnp.zeros(7)}
    return State(params, TX.init(params), jnp.int32(0), jax.random.key(2))


def loss(params: Any) -> jax.Array:
    return jnp.sum(jnp.square(jnp.tanh(params["w_DF"]) + params["b_F"][None] - 0.5))


def update(state: State) -> State:
    updates, opt = TX.update(jax.grad(loss)(state.params), state.opt)
    return State(optax.apply_updates(state.params, updates), opt, state.step + 1, jax.random.split(state.key)[0])


def odd_leaves() -> dict[str, Any]:
    """Every kind of leaf, with the bit patterns that copies by value would lose."""
    nans = np.array([0x7FC00001, 0x80000000, 0xFFC12345, 1], np.uint32).view(np.float32)
    return {
        "nan payloads and -0": jnp.asarray(nans),
        "-0 everywhere": jnp.full((3, 4), -0.0),
        "bfloat16": jnp.arange(11, dtype=jnp.bfloat16) / 3,
        "float16": jnp.float16(1 / 3),
        "int8": jnp.arange(-3, 4, dtype=jnp.int8),
        "bool": jnp.array([True, False]),
        "complex": jnp.array([1 + 2j]),
        "weak": jnp.asarray(2.5),
        "weak row": jnp.broadcast_to(jnp.asarray(3), (2,)),
        "empty": jnp.zeros((0, 3)),
        "numpy": np.asfortranarray(np.arange(6, dtype=np.float64).reshape(2, 3)),
        "numpy 0-d": np.array(7, np.int64),
        "numpy scalar": np.float64(1 / 3),
        "keys": jax.random.split(jax.random.key(3), (2, 2)),
        "rbg": jax.random.key(4, impl="rbg"),
        "nested/odd name": [jnp.ones(2), (jnp.zeros(()), None), optax.EmptyState()],
    }


def bits(leaf: Any) -> tuple[Any, ...]:
    kind = np.ndarray if type(leaf) is np.ndarray else np.generic if isinstance(leaf, np.generic) else jax.Array
    array = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    weak = getattr(leaf, "weak_type", None)
    return kind, leaf.shape, str(leaf.dtype), weak, np.ascontiguousarray(np.asarray(array)).tobytes()


def assert_same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for path, (x, y) in zip(
        checkpoint.digest(a), zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True), strict=True
    ):
        assert bits(x) == bits(y), path


def numbered(step: int) -> dict[str, jax.Array]:
    return {"a": jnp.full((40, 30), step, jnp.float32), "b": jnp.arange(6) + step}


LIKE = jax.eval_shape(lambda: numbered(0))


def save_all(folder: Path, *steps: int, keep: int = 9) -> None:
    with Saver(folder, keep=keep) as saver:
        for step in steps:
            saver.save(step, numbered(step), {"position": 10 * step})


def files(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file())


def biggest(path: Path) -> Path:
    return max(files(path / "state"), key=lambda p: p.stat().st_size)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << (at % 8)
    path.write_bytes(data)


# --- what is saved comes back ------------------------------------------------


def test_every_kind_of_leaf_returns_bit_for_bit(tmp_path: Path) -> None:
    state = {"odd": odd_leaves(), "run": update(init())}
    with Saver(tmp_path) as saver:
        saver.save(3, state, {"lr": 1e-3, "position": [1, 2], "name": "ü"})
    restored = restore(tmp_path, 3, state)
    assert_same(restored.state, state)
    assert (restored.step, restored.meta, restored.notes) == (3, {"lr": 1e-3, "position": [1, 2], "name": "ü"}, [])
    assert isinstance(restored.state["run"], State)
    assert type(restored.state["run"].opt[0]) is optax.ScaleByAdamState
    assert checkpoint.digest(restored.state) == checkpoint.digest(state)


def test_an_abstract_tree_is_enough(tmp_path: Path) -> None:
    state = update(init())
    with Saver(tmp_path) as saver:
        saver.save(1, state, {})
    assert_same(restore_latest(tmp_path, jax.eval_shape(init)).state, state)


def test_the_next_step_does_not_compile_again(tmp_path: Path) -> None:
    step = jax.jit(update, donate_argnums=0)
    state = step(step(init()))
    with Saver(tmp_path) as saver:
        saver.save(2, state, {})
    like = jax.eval_shape(init)
    straight = step(step(state))
    resumed = step(step(restore(tmp_path, 2, like).state))
    assert step._cache_size() == 1
    assert_same(resumed, straight)
    assert step(restore(tmp_path, 2, straight).state).step == 3
    assert step._cache_size() == 1


def test_save_returns_while_writing_and_the_state_may_be_donated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, save = threading.Event(), checkpoint._orbax_save

    def slow(*args: Any) -> None:
        assert go.wait(10)
        save(*args)

    monkeypatch.setattr(checkpoint, "_orbax_save", slow)
    state = {"run": init(), "numpy": np.arange(5.0)}
    expected = {"run": init(), "numpy": np.arange(5.0)}
    with Saver(tmp_path) as saver:
        saver.save(1, state, {})
        jax.block_until_ready(jax.jit(update, donate_argnums=0)(state["run"]))
        state["numpy"][:] = -1
        assert checkpoint.steps(tmp_path) == []
        go.set()
        saver.wait()
        assert checkpoint.steps(tmp_path) == [1]
    assert_same(restore(tmp_path, 1, expected).state, expected)


def mesh(*shape: int) -> jax.sharding.Mesh:
    names = ("x", "y")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))


def test_a_mesh_of_8_a_single_device_and_another_mesh(tmp_path: Path) -> None:
    plain = {"w": jnp.arange(64.0).reshape(16, 4), "k": jax.random.split(jax.random.key(0), 8), "s": jnp.int32(5)}
    eight = NamedSharding(mesh(8), PartitionSpec("x"))
    other = NamedSharding(mesh(2, 4), PartitionSpec("y"))
    whole = NamedSharding(mesh(2, 4), PartitionSpec())
    layouts = [
        plain,
        {k: jax.device_put(v, eight) if v.ndim else v for k, v in plain.items()},
        {k: jax.device_put(v, other if v.ndim else whole) for k, v in plain.items()},
    ]
    for i, source in enumerate(layouts):
        with Saver(tmp_path / str(i)) as saver:
            saver.save(0, source, {})
        assert checkpoint.steps(tmp_path / str(i)) == [0]
        for target in layouts:
            abstract = {k: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=v.sharding) for k, v in target.items()}
            for like in (target, abstract):
                state = restore(tmp_path / str(i), 0, like).state
                assert_same(state, plain)
                assert all(state[k].sharding.is_equivalent_to(v.sharding, v.ndim) for k, v in target.items())
                assert like is abstract or all(state[k].committed == v.committed for k, v in target.items())


def test_a_copy_in_another_place_opens(tmp_path: Path) -> None:
    save_all(tmp_path / "a", 1)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    save_all(tmp_path / "b", 2)
    assert_same(restore(tmp_path / "b", 1, LIKE).state, numbered(1))


def test_meta_is_read_without_the_arrays(tmp_path: Path) -> None:
    save_all(tmp_path, 1, 2)
    shutil.rmtree(tmp_path / "2" / "state")
    assert checkpoint.read_meta(tmp_path) == {"position": 20}
    assert checkpoint.read_meta(tmp_path, 1) == {"position": 10}
    (tmp_path / "2" / "manifest" / "manifest.json").write_text("{")
    assert checkpoint.read_meta(tmp_path) == {"position": 10}
    with pytest.raises(DamagedError, match="step 2: unreadable manifest"):
        checkpoint.read_meta(tmp_path, 2)


def test_digest_is_of_dtype_shape_and_bytes() -> None:
    a = np.zeros((2, 3), np.float32)
    same = checkpoint.digest({"x": a, "y": jnp.asarray(a), "z": np.asfortranarray(a)})
    assert len(set(same.values())) == 1 and list(same) == ["x", "y", "z"]
    others = [a.view(np.int32), a.reshape(3, 2), -a]
    assert len({checkpoint.digest(x)["root"] for x in [a, *others]}) == 4


# --- another configuration is refused ----------------------------------------


def test_a_mismatch_names_every_leaf_and_never_falls_back(tmp_path: Path) -> None:
    save_all(tmp_path, 1)
    with Saver(tmp_path) as saver:
        saver.save(2, numbered(2) | {"c": jnp.ones(2), "d": jnp.ones(2), "only saved": jnp.ones(1)}, {})
    like = LIKE | {"c": jnp.ones(3), "d": jnp.ones(2, jnp.bfloat16), "only wanted": jnp.ones(1)}
    for attempt in (lambda: restore(tmp_path, 2, like), lambda: restore_latest(tmp_path, like)):
        with pytest.raises(MismatchError, match=r"step 2 .* another configuration") as caught:
            attempt()
        assert re.sub(".*configuration: ", "", str(caught.value)).split("; ") == [
            "c: shape [3] wanted, [2] saved",
            "d: dtype bfloat16 wanted, float32 saved",
            "only saved: unexpected, in the checkpoint only",
            "only wanted: missing from the checkpoint",
        ]
    with pytest.raises(MismatchError, match="only saved"):  # although step 1 would fit
        restore_latest(tmp_path, LIKE)


def test_a_key_of_another_kind_is_a_mismatch(tmp_path: Path) -> None:
    with Saver(tmp_path) as saver:
        saver.save(0, {"k": jax.random.key(0)}, {})
    with pytest.raises(MismatchError, match=r"k: dtype key<rbg> wanted, key<fry> saved"):
        restore(tmp_path, 0, {"k": jax.random.key(0, impl="rbg")})


def test_missing_leaves_are_filled_only_on_request_and_listed(tmp_path: Path) -> None:
    save_all(tmp_path, 1)
    like = numbered(0) | {"ema": jnp.full(3, 9.0)}
    restored = restore(tmp_path, 1, like, fill_missing=True)
    assert_same(restored.state, numbered(1) | {"ema": jnp.full(3, 9.0)})
    assert restored.notes == ["step 1 lacks ema: the value of `like` is kept"]
    with pytest.raises(MismatchError, match="ema: missing"):
        restore(tmp_path, 1, jax.eval_shape(lambda: like), fill_missing=True)  # no value to keep


def test_64_bits_are_not_cut_silently(tmp_path: Path) -> None:
    with Saver(tmp_path) as saver:
        saver.save(0, {"x": np.ones(3)}, {})
    with pytest.raises(MismatchError, match="x: float64 becomes float32"):
        restore(tmp_path, 0, {"x": jax.ShapeDtypeStruct((3,), np.float64)})


@pytest.mark.parametrize(
    "leaf, message",
    [
        ({"n": 3}, "leaf n: int is not an array"),
        ({"a": {"b": np.ones(1)}, "a/b": np.ones(1)}, "two leaves are called 'a/b'"),
        ({"s": np.array(["x"])}, "leaf s: cannot save"),
        ({"s": np.ones(2, ">f4")}, "leaf s: cannot save >f4"),
        (LIKE, "leaf a: a ShapeDtypeStruct has no values"),
    ],
)
def test_leaves_that_cannot_be_saved_are_named(tmp_path: Path, leaf: Any, message: str) -> None:
    with Saver(tmp_path) as saver:
        with pytest.raises(CheckpointError, match=message):
            saver.save(0, leaf, {})
        with pytest.raises(CheckpointError, match="meta of step 0 is not JSON"):
            saver.save(0, numbered(0), {"x": object()})
    with pytest.raises(CheckpointError, match="closed"):
        saver.save(0, numbered(0), {})


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
    save = checkpoint._orbax_save
    monkeypatch.setattr(
        checkpoint,
        "_orbax_save",
        lambda path, arrays, manifest: save(path, {"a": arrays["a"] + 1, "z": arrays["a"]}, manifest),
    )
    save_all(tmp_path, 2)
    with pytest.raises(DamagedError, match=r"step 2: .*: a: changed \(digest\); b: missing; z: unexpected"):
        restore(tmp_path, 2, LIKE)
    assert restore_latest(tmp_path, LIKE).step == 1


def test_a_half_written_newest_is_named_and_the_next_save_works(tmp_path: Path) -> None:
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


def test_a_new_run_beside_higher_steps_deletes_none(tmp_path: Path) -> None:
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


def test_a_full_disk_is_raised_with_its_cause_and_what_was_there_stays(tmp_path: Path) -> None:
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
        patch.setattr(checkpoint, "_orbax_save", fail)
        saver.save(2, numbered(2), {})
        with pytest.raises(CheckpointError, match=r"save of step 2 .* No space left") as caught:
            {"wait": saver.wait, "save": lambda: saver.save(3, numbered(3), {}), "close": saver.close}[surface]()
        assert isinstance(caught.value.__cause__, OSError)
    assert [p.name for p in tmp_path.iterdir()] == ["1"]
    saver.close()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
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


def test_exit_right_after_the_last_save(tmp_path: Path) -> None:
    code = """
        import sys
        import numpy as np
        from transformer_jax import checkpoint
        assert not any("orbax" in name for name in sys.modules), "imported too early"
        saver = checkpoint.Saver(sys.argv[1])
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


def test_kill_9_during_a_save(tmp_path: Path) -> None:
    code = """
        import sys
        import numpy as np
        from transformer_jax import checkpoint
        with checkpoint.Saver(sys.argv[1]) as saver:
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


def test_two_processes(tmp_path: Path) -> None:
    code = """
        import sys
        import jax
        import numpy as np
        from jax.sharding import AxisType, NamedSharding, PartitionSpec
        rank, port, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
        jax.config.update("jax_num_cpu_devices", 2)
        jax.distributed.initialize(f"localhost:{port}", 2, rank)
        from transformer_jax import checkpoint
        mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
        rows, whole = (NamedSharding(mesh, PartitionSpec(*p)) for p in (("x",), ()))
        w = np.arange(40, dtype=np.float32).reshape(8, 5)
        state = {"w": jax.make_array_from_callback(w.shape, rows, lambda i: w[i]),
                 "k": jax.jit(lambda: jax.random.key(3), out_shardings=whole)()}
        with checkpoint.Saver(folder, keep=1) as saver:
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
            checkpoint._orbax_save = fail
        try:
            with checkpoint.Saver(folder) as saver:
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


def test_like_may_follow_from_the_meta(tmp_path: Path) -> None:
    with Saver(tmp_path) as saver:
        saver.save(1, {"history": np.arange(3.0)}, {"length": 3})
    restored = restore_latest(tmp_path, lambda meta: {"history": np.zeros(meta["length"])})
    assert restored.state["history"].tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(MismatchError, match="history: shape"):
        restore_latest(tmp_path, lambda meta: {"history": np.zeros(meta["length"] + 1)})
