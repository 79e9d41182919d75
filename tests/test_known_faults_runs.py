"""Faults that others met in randomness, accumulation, checkpoints and resume, by their numbers."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import loop
from experiments.interrupt import Stopper
from experiments.program import run_key
from tests.quick import jit
from tests.test_sharding import T, make, rows, small
from transformer_jax import checkpoint, sharding
from transformer_jax.batch import Batch
from transformer_jax.config import Config, Hyper, with_terms
from transformer_jax.data import make_task, resolve
from transformer_jax.encoder_decoder import hidden, init_transformer
from transformer_jax.errors import ConfigError
from transformer_jax.saver import Saver
from transformer_jax.train import TrainState, averaged, batch_key, gradients, init_state, train_step

SAMPLE = Path(__file__).parent / "fixtures" / "checkpoint"
DROPS = Hyper(dropout_rate=0.5, attention_dropout_rate=0.3, activation_dropout_rate=0.2)


@pytest.mark.parametrize("unroll", [1, 4])
def test_e1_each_layer_of_a_scan_drops_others(unroll: int) -> None:
    """Layer l adds 4^l to every coordinate that its dropout keeps: the sum's digits are the layers' masks."""
    hyper = Hyper(dropout_rate=0.5)
    config = Config(
        vocab_size=5, d_model=64, num_layers=4, num_heads=2, d_ff=8, seq_len=7, positions="none",
        norm_placement="none", attention_bias=True, scan_unroll=unroll,
    )  # fmt: skip
    config = with_terms(config, [hyper])
    params = jax.tree.map(jnp.zeros_like, init_transformer(jax.random.key(0), config))
    assert params.decoder is not None
    layers = params.decoder.layers
    attention = dataclasses.replace(
        layers.attention, bo_D=jnp.broadcast_to(4.0 ** jnp.arange(4)[:, None], layers.attention.bo_D.shape)
    )
    params = dataclasses.replace(
        params, decoder=dataclasses.replace(params.decoder, layers=dataclasses.replace(layers, attention=attention))
    )
    tokens = jnp.zeros((3, 7), jnp.int32)
    batch = Batch(tokens, tokens, jnp.ones((3, 7)))
    x = np.asarray(jit(lambda p: hidden(p, config, hyper, batch, jax.random.key(1))[0])(params), np.int64) // 2
    masks = [(x // 4**layer) % 4 for layer in range(4)]
    for i, mask in enumerate(masks):
        assert set(np.unique(mask)) == {0, 1}
        assert abs(mask.mean() - 0.5) < 5 * 0.5 / mask.size**0.5
        for other in masks[:i]:
            assert abs((mask != other).mean() - 0.5) < 5 * 0.5 / mask.size**0.5


@pytest.mark.parametrize("mesh", ["data:2", "fsdp:4", "model:4", "data:2,fsdp:4", "data:2,fsdp:2,model:2"])
def test_e4_initial_values_do_not_depend_on_the_mesh(mesh: str) -> None:
    config = small(num_kv_heads=2)
    shapes = jax.eval_shape(lambda: init_transformer(jax.random.key(3), config))
    one, spread = (
        jax.jit(lambda: init_transformer(jax.random.key(3), config), out_shardings=places)()
        for places in (None, sharding.shardings(shapes, make(mesh)))
    )
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(spread), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("mesh", [None, "data:2,fsdp:2,model:2"])
def test_e5_what_is_computed_again_draws_the_same_dropout(mesh: str | None) -> None:
    laid = None if mesh is None else make(mesh)
    found = []
    for remat in (False, True):
        config = small(DROPS, remat=remat)
        batch, state = rows(config), jit(lambda c=config: init_transformer(jax.random.key(3), c))()
        constrain = sharding.constrain(laid)
        of = jit(lambda p, b, c=config, k=constrain: gradients(p, c, DROPS, b, jax.random.key(1), k)[0])
        if laid is not None:
            state = jax.device_put(state, sharding.shardings(state, laid))
            batch = sharding.place_rows(batch, laid)
        found.append(jax.block_until_ready(of(state, batch)))
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-6)
    assert max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(found[0])) > 1e-2


def test_h10_the_batch_is_the_batch_on_any_devices_in_any_parts() -> None:
    """32 rows whole, in 4 parts, and over 2 and 8 devices: the same five losses."""

    def losses(mesh: str | None, parts: int) -> list[float]:
        config, hyper = small(batch_size=32, accumulation=parts), Hyper(learning_rate=0.01, adam_epsilon=1e-3)
        laid = None if mesh is None else make(mesh)
        constrain = sharding.constrain(laid)
        step = jit(lambda s, b: train_step(config, s, hyper, b, constrain))
        state = jit(lambda: init_state(config, hyper, jax.random.key(3)))()
        if laid is not None:
            state = jax.device_put(state, sharding.shardings(state, laid))
        seen = []
        for seed in range(5):
            tokens = np.random.default_rng(seed).integers(0, config.V, (32, T)).astype(np.int32)
            weights = (np.arange(T)[None] <= np.arange(32)[:, None] % T).astype(np.float32)  # rows of unlike lengths
            arrays: Any = (tokens, tokens[:, ::-1].copy(), weights)
            batch: Any = Batch(*arrays)
            state, metrics = step(state, batch if laid is None else sharding.place_rows(batch, laid))
            seen.append(float(metrics["loss"]))
        return seen

    want = losses(None, 1)
    for mesh, parts in ((None, 4), ("data:2", 1), ("data:8", 4)):
        np.testing.assert_allclose(losses(mesh, parts), want, atol=1e-5)


# Row 6 of the embedding overflows when it is scaled: finite parameters, and no finite gradient where it is read.
PARTS = Config(
    vocab_size=11, d_model=8, num_heads=2, num_layers=1, tie_embeddings=False, seq_len=5, batch_size=4, accumulation=2,
    optimizer="sgd",
)  # fmt: skip
BAD = 6


def overflowing(state: TrainState) -> TrainState:
    embedding = state.params.embedding
    embedding = dataclasses.replace(embedding, embed_VD=embedding.embed_VD.at[BAD].set(3e38))
    return dataclasses.replace(state, params=dataclasses.replace(state.params, embedding=embedding))


@pytest.mark.parametrize("bad", [0, 1], ids=["the first part", "the last part"])
def test_f4_a_nan_in_one_part_is_applied_as_in_one_big_batch(bad: int) -> None:
    """No part is left out, whichever it is: what it makes NaN is NaN, the other's effect on the rest is whole."""
    draw = np.random.default_rng(0)
    sides = [draw.integers(1, BAD, (2, 5)), draw.integers(BAD + 1, 11, (2, 5))]
    sides[1][0, 2] = BAD
    tokens = np.concatenate(sides if bad else sides[::-1]).astype(np.int32)
    batch: Any = Batch(*map(jnp.asarray, (tokens, tokens[:, ::-1].copy(), np.ones((4, 5), np.float32))))
    state = overflowing(jit(init_state, static_argnums=0)(PARTS, Hyper(), jax.random.key(0)))
    step = jit(train_step, static_argnums=0)
    new, metrics = step(PARTS, state, Hyper(learning_rate=1.0), batch)
    whole, _ = step(PARTS.replace(accumulation=1), state, Hyper(learning_rate=1.0), batch)
    finite = jax.tree.map(lambda x: np.isfinite(np.asarray(x)), new.params)
    jax.tree.map(np.testing.assert_array_equal, finite, jax.tree.map(np.isfinite, whole.params))
    # Rows that the good part alone reads move by its own gradient, over the tokens of both.
    good = jax.tree.map(lambda x: x[2 - 2 * bad : 4 - 2 * bad], batch)
    alone, sums = jit(gradients, static_argnums=1)(state.params, PARTS.replace(accumulation=1), Hyper(), good)
    read = np.unique(sides[0])
    moved = np.asarray(state.params.embedding.embed_VD - new.params.embedding.embed_VD)[read]
    np.testing.assert_allclose(moved, np.asarray(alone.embedding.embed_VD)[read] / 2, atol=1e-6)
    assert float(sums.count) == 10 and float(metrics["tokens"]) == 20 and np.abs(moved).max() > 1e-3
    assert not finite.embedding.embed_VD[np.unique(sides[1])].any()
    assert not any(leaf.any() for leaf in jax.tree.leaves(finite.decoder))
    # The update says so, and so does every later one, of good batches alone.
    assert np.isnan(metrics["loss"]) and np.isnan(metrics["grad_norm"])
    clean = jax.tree.map(lambda x: jnp.concatenate([x, x]), good)
    later, metrics = step(PARTS, new, Hyper(learning_rate=1.0), clean)
    assert np.isnan(metrics["loss"]) and int(later.step) == 2


def test_parts_share_what_has_one_row_for_all() -> None:
    """Positions [1, T], as [B, T] of the same; once they were cut into parts of no row."""
    state = jit(init_state, static_argnums=0)(PARTS, Hyper(), jax.random.key(0))
    ids = jax.random.randint(jax.random.key(1), (4, 5), 0, 11)
    row = jnp.array([[0, 2, 3, 7, 8]])
    of = jit(gradients, static_argnums=1)
    one, every = (
        Batch(ids, ids[:, ::-1], jnp.ones((4, 5)), positions_BT=positions) for positions in (row, jnp.tile(row, (4, 1)))
    )
    jax.tree.map(
        np.testing.assert_array_equal, of(state.params, PARTS, Hyper(), one), of(state.params, PARTS, Hyper(), every)
    )


@pytest.mark.parametrize("parts", [1, 2])
def test_a_batch_without_counted_tokens_moves_nothing(parts: int) -> None:
    """Routers have losses of tokens that do not count: their sum was divided by nearly nothing."""
    config = PARTS.replace(num_experts=2, accumulation=parts)
    state = jit(init_state, static_argnums=0)(config, Hyper(), jax.random.key(0))
    ids = jax.random.randint(jax.random.key(1), (4, 5), 0, 11)
    new, metrics = jit(train_step, static_argnums=0)(config, state, Hyper(), Batch(ids, ids, jnp.zeros((4, 5))))
    jax.tree.map(np.testing.assert_array_equal, new.params, state.params)
    assert metrics["grad_norm"] == metrics["objective"] == metrics["loss"] == 0 < metrics["load_balance"]


@pytest.mark.parametrize("parts", [1, 2])
def test_a4_float16_gradients_of_many_tokens_do_not_overflow(parts: int) -> None:
    """All are of one id and target, so that nothing cancels: the sum over 200,000 of them is past 65,504."""
    config = PARTS.replace(seq_len=4, batch_size=50_000, accumulation=parts)
    params, ids = init_transformer(jax.random.key(0), config), jnp.full((50_000, 4), 3, jnp.int32)
    of, batch = jit(gradients, static_argnums=1), Batch(ids, ids + 1, jnp.ones((50_000, 4)))
    half, sums = of(params, config.replace(compute_dtype="float16"), Hyper(), batch)
    want, whole = of(params, config, Hyper(), batch)
    largest = max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(want))
    assert largest * 200_000 / parts > 65_504
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=0.01 * largest), half, want)
    np.testing.assert_allclose(sums.objective, whole.objective, rtol=1e-2)


@pytest.mark.parametrize("B", [1, 3])
def test_rows_that_accumulation_does_not_divide_are_refused(B: int) -> None:
    params, ids = init_transformer(jax.random.key(0), PARTS), jnp.zeros((B, 5), jnp.int32)
    with pytest.raises(ConfigError, match=f"accumulation=2 does not divide a batch of {B} rows"):
        gradients(params, PARTS, Hyper(), Batch(ids, ids, jnp.ones((B, 5))))


def test_f4_a_run_says_at_which_step_it_diverged(tmp_path: Path, capfd: Any) -> None:
    config = resolve(PARTS.replace(task="copy", vocab_size=0, steps=8))
    task = make_task(config)
    reads = [np.any(task.train_batch(task.data, batch_key(run_key(0), n)).tokens_BT == BAD) for n in range(8)]
    with Stopper(0) as stop:
        loop.train(
            config, Hyper(), 0, task, tmp_path, stop=stop, eval_every=8, warm=lambda state: (overflowing(state), [])
        )
    made = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in made] == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    first = reads.index(True)
    assert [row["loss"] is None for row in made] == [n >= first for n in range(9)] and 0 < first < 7
    assert "step 8  loss diverged" in capfd.readouterr().err


# --- checkpoints ---------------------------------------------------------------


def sample_state() -> dict[str, Any]:
    """What tests/fixtures/checkpoint holds; `write_sample` made it."""
    return {
        "params": {"w_DF": jnp.arange(6.0).reshape(2, 3), "half_F": jnp.arange(3, dtype="bfloat16")},
        "step": jnp.int32(7),
        "key": jax.random.key(5),
    }


def write_sample(folder: Path) -> None:
    """Called once for a format, by hand: write_sample(SAMPLE)."""
    with Saver(folder) as saver:
        saver.save(7, sample_state(), {"config": {"d_model": 2}, "note": "kept to be opened by later releases"})


def test_i11_a_checkpoint_of_an_earlier_release_opens(tmp_path: Path) -> None:
    """From a copy: nothing is ever written beside what is read."""
    shutil.copytree(SAMPLE, tmp_path / "kept")
    restored = checkpoint.restore_latest(tmp_path / "kept", jax.eval_shape(sample_state))
    want = sample_state()
    assert restored.step == 7 and restored.meta["note"].startswith("kept") and restored.notes == []
    assert checkpoint.digest(restored.state) == checkpoint.digest(want)


def test_i12_batches_go_on_where_they_stopped(tmp_path: Path) -> None:
    """Ids of the batches of ten steps: five, saved, restored, five more; none twice, none left out."""
    config = resolve(Config(task="text", seq_len=16, batch_size=4, d_model=8, num_heads=2, num_layers=1))
    task, hyper = make_task(config), Hyper()
    draw = jit(lambda state, data: task.train_batch(data, batch_key(state.key, state.step)).tokens_BT)

    def ids(state: TrainState, steps: int) -> tuple[TrainState, list[bytes]]:
        seen = []
        for _ in range(steps):
            seen.append(np.asarray(draw(state, task.data)).tobytes())
            state = dataclasses.replace(state, step=state.step + 1)
        return state, seen

    fresh = jit(lambda: init_state(config, hyper, run_key(3)))()
    _, straight = ids(fresh, 10)
    middle, first = ids(fresh, 5)
    with Saver(tmp_path) as saver:
        saver.save(5, middle, {})
    restored = checkpoint.restore_latest(tmp_path, jax.eval_shape(lambda: fresh)).state
    assert first + ids(restored, 5)[1] == straight and len(set(straight)) == 10


def test_h8_an_average_of_a_constant_is_that_constant() -> None:
    """Where the first parameters are 0 and the rest 10, no bias is left to correct: young averages forget."""
    hyper, ema = Hyper(ema_decay=0.9), jnp.float32(10.0)
    for n in (1, 2, 3):
        ema = averaged(ema, jnp.float32(10.0), hyper, jnp.int32(n))
        assert float(ema) == 10.0
    # From elsewhere: 2/11 of it is left after one update, 2/11 3/12 after two; never more than by the decay itself.
    left = averaged(jnp.float32(0.0), jnp.float32(1.0), hyper, jnp.int32(1))
    np.testing.assert_allclose(1 - left, 2 / 11, rtol=1e-6)
    left = averaged(left, jnp.float32(1.0), hyper, jnp.int32(2))
    np.testing.assert_allclose(1 - left, 2 / 11 * 3 / 12, rtol=1e-6)


def test_h9_the_average_follows_is_kept_and_leaves_the_parameters_alone(tmp_path: Path) -> None:
    old = averaged(jnp.float32(0.0), jnp.float32(1.0), Hyper(ema_decay=0.9999), jnp.int32(1000))
    np.testing.assert_allclose(1 - old, 1001 / 1010, rtol=1e-6)
    old = averaged(jnp.float32(0.0), jnp.float32(1.0), Hyper(ema_decay=0.9), jnp.int32(1000))
    np.testing.assert_allclose(1 - old, 0.9, rtol=1e-6)
    hyper = Hyper(ema_decay=0.9, learning_rate=0.1)
    config = resolve(with_terms(Config(task="copy", d_model=8, num_heads=2, num_layers=1, seq_len=9), [hyper]))
    task = make_task(config)
    step = jit(lambda s: train_step(config, s, hyper, task.train_batch(task.data, batch_key(s.key, s.step)))[0])
    without = jit(
        lambda s: train_step(config.replace(terms=()), s, hyper, task.train_batch(task.data, batch_key(s.key, s.step)))[
            0
        ]
    )
    state = jit(lambda: init_state(config, hyper, run_key(0)))()
    plain, wanted = dataclasses.replace(state, ema=None), np.asarray(state.params.embedding.embed_VD, np.float64)
    for n in (1, 2, 3):
        state, plain = step(state), without(plain)
        decay = min(0.9, (1 + n) / (10 + n))
        wanted = decay * wanted + (1 - decay) * np.asarray(state.params.embedding.embed_VD, np.float64)
    np.testing.assert_allclose(state.params.embedding.embed_VD, plain.params.embedding.embed_VD, atol=2e-6)
    assert state.weights is state.ema and plain.weights is plain.params
    np.testing.assert_allclose(state.weights.embedding.embed_VD, wanted, atol=1e-6)
    assert np.abs(wanted - np.asarray(state.params.embedding.embed_VD)).max() > 1e-3
    with Saver(tmp_path) as saver:
        saver.save(3, state, {})
    restored = checkpoint.restore_latest(tmp_path, state).state
    np.testing.assert_array_equal(restored.ema.embedding.embed_VD, state.ema.embedding.embed_VD)
