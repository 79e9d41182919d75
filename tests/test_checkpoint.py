"""Checkpoints: bit-for-bit, atomic, verified; damage is named and passed over, another model is refused."""

import re
import shutil
import threading
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
from transformer_jax.checkpoint import DamagedError, MismatchError, restore, restore_latest
from transformer_jax.errors import CheckpointError
from transformer_jax.saver import Saver

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


def test_i8_the_next_step_does_not_compile_again(tmp_path: Path) -> None:
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
    go, save = threading.Event(), checkpoint.write_items

    def slow(*args: Any) -> None:
        assert go.wait(10)
        save(*args)

    monkeypatch.setattr(checkpoint, "write_items", slow)
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


def test_i1_a_mesh_of_8_a_single_device_and_another_mesh(tmp_path: Path) -> None:
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


def test_i3_a_copy_in_another_place_opens(tmp_path: Path) -> None:
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


def test_i10_missing_leaves_are_filled_only_on_request_and_listed(tmp_path: Path) -> None:
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


def test_like_may_follow_from_the_meta(tmp_path: Path) -> None:
    with Saver(tmp_path) as saver:
        saver.save(1, {"history": np.arange(3.0)}, {"length": 3})
    restored = restore_latest(tmp_path, lambda meta: {"history": np.zeros(meta["length"])})
    assert restored.state["history"].tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(MismatchError, match="history: shape"):
        restore_latest(tmp_path, lambda meta: {"history": np.zeros(meta["length"] + 1)})
