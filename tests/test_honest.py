"""The honest loss, who looks ahead, and what the constants of hidden scores do."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import mask_constants, masking, trained
from experiments.honest import asked, honest, prefixes, seen
from experiments.loop import device_hyper
from tests import reference
from tests.quick import jit
from transformer_jax import train
from transformer_jax.batch import Batch
from transformer_jax.config import Config, Hyper
from transformer_jax.data import make_task, resolve
from transformer_jax.dependencies import measured
from transformer_jax.encoder_decoder import Transformer, init_transformer

B, T, V = 2, 7, 11
SMALL = Config(vocab_size=V, d_model=6, num_heads=1, num_layers=2, d_ff=7, seq_len=T, block_size=2)
HYPER = Hyper(window=3, prefix=4)


def parameters(config: Config) -> Transformer:
    """Random in every leaf, so that no zero bias hides a fault."""
    leaves, tree = jax.tree.flatten(init_transformer(jax.random.key(0), config))
    rng = np.random.default_rng(0)
    return jax.tree.unflatten(tree, [x + jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype) for x in leaves])


def batch(lengths: list[int] | None = None) -> Batch:
    rng = np.random.default_rng(1)
    ids = jnp.asarray(rng.integers(0, V, (B, T + 1)), jnp.int32)
    weights = jnp.asarray(rng.random((B, T)) < 0.8, jnp.float32)
    made = None if lengths is None else jnp.asarray(lengths, jnp.int32)
    return Batch(ids[:, :-1], ids[:, 1:], weights, lengths_B=made)


# --- the honest loss ---------------------------------------------------------------


def loop(params: Transformer, config: Config, hyper: Hyper, data: Batch) -> tuple[float, float]:
    """Nats and tokens: a model run on every prefix, cut off, in float64."""
    nats = count = 0.0
    for b in range(B):
        for t in range(T):
            known = slice(b, b + 1), slice(0, t + 1)
            lengths = None if data.lengths_B is None else jnp.minimum(data.lengths_B[b : b + 1], t + 1)
            cut = Batch(data.tokens_BT[known], data.targets_BT[known], data.weights_BT[known], lengths)
            logits = reference.transformer(params, config, hyper, cut)
            row = logits[0, -1]
            target, weight = int(data.targets_BT[b, t]), float(data.weights_BT[b, t])
            nats += weight * (np.log(np.sum(np.exp(row - row.max()))) + row.max() - row[target])
            count += weight
    return nats, count


@pytest.mark.parametrize("mask", ["causal", "none", "inverted", "prefix", "window"])
def test_honest_loss_is_a_loop_over_prefixes(mask: str) -> None:
    config = SMALL.replace(mask=mask)
    params, data = parameters(config), batch([T, 5] if mask == "causal" else None)
    sums = jit(honest, static_argnums=(0, 5))(config, params, HYPER, data, 0, 1)
    nats, count = loop(params, config, HYPER, data)
    assert float(sums.count) == count > 5
    assert float(sums.nats) == pytest.approx(nats, abs=1e-4)


@pytest.mark.parametrize("mask", ["causal", "window", "block_sparse"])
def test_a_mask_that_does_not_cheat_is_honest(mask: str) -> None:
    config = SMALL.replace(mask=mask)
    params, data = parameters(config), batch()
    both = jit(lambda p, d: [f(config, p, HYPER, d, 3, 3) for f in (honest, seen)])
    for alone, forced in zip(*map(jax.tree.leaves, both(params, data)), strict=True):
        assert float(alone) == pytest.approx(float(forced), abs=1e-5)
    whole = jit(lambda p, d: honest(config, p, HYPER, d, 0, 1))(params, data)
    forced = jit(lambda p, d: train.eval_step(config, p, HYPER, d))(params, data)
    assert float(whole.loss) == pytest.approx(float(forced.loss), abs=1e-5)


@pytest.mark.parametrize(("rows", "length", "stride"), [(3, 7, 3), (2, 13, 5), (4, 5, 32)])
def test_every_position_is_asked_once_in_a_round_of_batches(rows: int, length: int, stride: int) -> None:
    counts = np.zeros((rows, length), int)
    for index in range(min(stride, length)):
        for b, places in enumerate(np.asarray(asked(rows, length, index, stride))):
            for place in places[places < length]:
                counts[b, place] += 1
    assert (counts == 1).all()


def test_nothing_after_the_asked_position_is_left() -> None:
    data = batch()
    made = prefixes(data, jnp.asarray([[0, 3], [6, 9]]))
    assert made.lengths_B is not None
    assert made.lengths_B.tolist() == [1, 4, 7, 7]  # 9 is past the row
    assert np.argwhere(np.asarray(made.weights_BT) > 0).tolist() == [
        [row, place] for row, place in enumerate([0, 3, 6]) if data.weights_BT[row // 2, place] > 0
    ]
    for row, length in enumerate(made.lengths_B.tolist()):
        np.testing.assert_array_equal(made.tokens_BT[row, :length], data.tokens_BT[row // 2, :length])
        assert not made.tokens_BT[row, length:].any()


def test_without_a_mask_the_loss_falls_below_what_can_be_known() -> None:
    """The next symbol of a Markov chain stands one place on, where it need only be read."""
    config = resolve(
        Config(d_model=16, num_heads=1, num_layers=1, seq_len=11, task="markov", vocab_size=5, mask="none", steps=200)
    )
    task, hyper = make_task(config), device_hyper(Hyper(learning_rate=1e-2))

    def both(data: Any) -> list[jax.Array]:
        state, _ = train.run(config, hyper, jax.random.key(0), lambda key: task.train_batch(data, key))
        shown = task.eval_batch(data, "report", 0)
        counted = shown.weights_BT.at[:, -1].set(0.0)  # nothing stands after the last
        shown = dataclasses.replace(shown, weights_BT=counted)
        return [f(config, state.params, hyper, shown, 0, 1).loss for f in (seen, honest)]

    under_the_mask, alone = map(float, jit(both)(task.data))
    assert task.floor is not None and task.floor > 0.5
    assert under_the_mask < 0.1
    assert alone > task.floor + 0.1


# --- leaks ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "pairs"),
    [("causal", 0), ("window", 0), ("block_sparse", 0), ("none", 21), ("inverted", 21), ("prefix", 6)],
)
def test_leaks_are_the_pairs_above_the_diagonal_that_a_mask_shows(
    mask: str, pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T (T-1) / 2 = 21 of them; in a prefix of 4, 6."""
    monkeypatch.setattr(masking, "_measured", jit(measured, static_argnums=1))
    config = SMALL.replace(task="markov", mask=mask, num_layers=1, d_model=4)
    slopes, row = masking.leak(trained.Model(config, HYPER, parameters(config), 0))
    assert row["pairs"] == pairs and row["of"] == 21
    assert row["largest"] == np.max(np.triu(slopes, 1))
    assert (row["largest"] > 1e-3) == (pairs > 0) and (row["largest"] == 0.0) == (pairs == 0)


# --- constants -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def tried() -> dict[tuple[str, ...], mask_constants.Found]:
    rows = mask_constants.try_out()
    return {(row.case, row.constant, row.score_dtype, row.placement): row for row in rows}


TYPES = ("float32", "bfloat16", "float16")


def test_a_row_without_keys_is_nan_where_the_constant_is_infinite(tried: dict) -> None:
    for dtype in TYPES:
        for placement in mask_constants.PLACEMENTS:
            nan = {c: tried["no key", c, dtype, placement].nan_outputs for c in mask_constants.CONSTANTS}
            # Three rows of two heads of four: all of them; -1e9 does not fit in float16.
            over = 24 if dtype == "float16" else 0
            assert nan == {"-inf": 24, "-1e4": 0, "-1e9": over, "minimum": 0}
            twice = {c: tried["no key, twice", c, dtype, placement].nan_outputs for c in mask_constants.CONSTANTS}
            assert twice == {"-inf": 8, "-1e4": 0, "-1e9": 8 if over else 0, "minimum": 8}
    for row in tried.values():  # a row that does not count poisons the slopes of those that do
        assert (row.nan_gradients > 0) == (row.nan_outputs > 0)


def test_the_minimum_twice_is_infinite(tried: dict) -> None:
    for dtype in TYPES:
        # In the row of three real keys, pairs that both masks hide: 5 + 5 + 5 + 4 + 3 + 2 + 1, two heads.
        assert tried["causal + padding", "minimum", dtype, "after"].infinite == 50
        assert tried["causal", "minimum", dtype, "after"].infinite == 0
        # T (T-1) / 2 of two rows and two heads.
        assert tried["causal", "-inf", dtype, "after"].infinite == 112


def test_finite_constants_give_weight_to_hidden_keys(tried: dict) -> None:
    for dtype in TYPES:
        # The scores are absorbed: a row without keys is the mean over all eight.
        assert tried["no key", "minimum", dtype, "after"].hidden_weight == pytest.approx(1 / 8, abs=1e-3)
        # An allowed score of -20000 loses to seven hidden ones at -10000, and wins over those at -1e9.
        low = {c: tried["low score", c, dtype, "after"].hidden_weight for c in mask_constants.CONSTANTS}
        assert low == {"-inf": 0, "-1e4": pytest.approx(1 / 7, abs=1e-3), "-1e9": 0, "minimum": 0}
    assert tried["no key", "-1e9", "bfloat16", "after"].hidden_weight == pytest.approx(1 / 8, abs=1e-3)
    # float32 keeps the scores beside -1e4: the row attends as if nothing were hidden.
    q, k, _, allowed = mask_constants.case("no key")
    shown = np.logical_and(*allowed)[1, 0]
    scores = np.einsum("tnh,snh->nts", q[1], k[1]) / 2 + np.where(shown, 0, -1e4)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    found = tried["no key", "-1e4", "float32", "after"].hidden_weight
    assert found == pytest.approx(np.max(np.where(shown, 0, weights)), abs=2e-3)


def test_where_each_row_sees_a_key_all_are_equal(tried: dict) -> None:
    for (name, *_), row in tried.items():
        if name in ("causal", "causal + padding"):
            assert row.words == "equal", row
        else:
            assert (row.words == "equal") == (name == "low score" and row.constant != "-1e4"), row
