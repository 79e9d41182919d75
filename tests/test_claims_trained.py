"""The ledger's trained chapters: what is kept is of the same settings, and what is judged can fail."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments import stats
from experiments.claims import norms_trained, paired, positions_apart, softmax_trained, training
from experiments.claims.record import Number, Numbers, Words
from experiments.trained import Model
from transformer_jax.config import Config, Hyper
from transformer_jax.data import make_task, resolve
from transformer_jax.encoder_decoder import forward, init_transformer
from transformer_jax.losses import cross_entropy

LABEL = Words("a less b", "a 减 b")
LOW, HIGH = [1.0, 1.1, 0.9, 1.05, 1.0, 0.95], [2.0, 2.2, 1.7, 2.1, 2.0, 1.9]


def numbers(found: Numbers) -> dict[str, Number]:
    return {one.name: one for one in found if isinstance(one, Number)}


def results(a: list[float], b: list[float]) -> dict[str, Any]:
    """As much of results.json as a comparison of two arms needs."""
    return {"comparisons": [row.to_dict() for row in stats.compare({"a": a, "b": b}, [("a", "b")], "loss")]}


def test_an_arm_is_lower_in_whichever_order_it_was_compared() -> None:
    found = results(HIGH, LOW)
    right, wrong = (numbers(paired.lower_arm("x", LABEL, found, *pair)) for pair in (("b", "a"), ("a", "b")))
    assert right["x_upper"].holds and right["x_p"].holds
    assert right["x_lower"].measured < right["x_mean"].measured < right["x_upper"].measured < 0
    assert wrong["x_upper"].holds is False
    assert wrong["x_upper"].measured == -right["x_lower"].measured
    even = numbers(paired.lower_arm("x", LABEL, results(LOW, LOW[::-1]), "b", "a"))
    assert even["x_upper"].holds is False and even["x_p"].holds is False


def test_what_is_apart_is_shown_with_its_interval_and_judges_nothing() -> None:
    found = numbers(paired.apart("x", LABEL, results(HIGH, LOW)["comparisons"][0]))
    assert set(found) == {"x_mean", "x_low", "x_high", "x_p"} and all(one.holds is None for one in found.values())
    assert 0 < found["x_low"].measured < found["x_mean"].measured < found["x_high"].measured
    alone = numbers(paired.apart("x", LABEL, results([1.0], [2.0])["comparisons"][0]))
    assert np.isnan(alone["x_low"].measured)


def test_alike_is_of_both_ends() -> None:
    for gap, holds in ((0.01, True), (0.2, False), (-0.2, False)):
        row = results([x + gap for x in LOW], [x + 0.001 * i for i, x in enumerate(LOW)])["comparisons"][0]
        assert numbers(norms_trained.alike("x", LABEL, row))["x"].holds is holds


def test_what_was_made_is_kept_for_the_same_settings_alone(tmp_path: Path) -> None:
    made: list[int] = []

    def make() -> dict[str, Any]:
        made.append(len(made))
        return {"x": made[-1]}

    path = tmp_path / "new" / "x.json"
    assert [training.kept(path, {"rates": [1, 2]}, make)["x"] for _ in range(2)] == [0, 0]
    assert training.kept(path, {"rates": [1, 2, 3]}, make)["x"] == 1 and len(made) == 2
    assert training.kept(path, {"rates": [1, 2, 3]}, make)["x"] == 1


def test_rows_of_which_came_first_have_the_same_tokens_and_the_right_answer() -> None:
    batch = positions_apart.rows(jax.random.key(3))
    tokens, targets, weights = (np.asarray(x) for x in (batch.tokens_BT, batch.targets_BT, batch.weights_BT))
    assert (np.sort(tokens, axis=1) == np.arange(positions_apart.SYMBOLS + 1)).all()
    assert (tokens[:, -1] == positions_apart.SYMBOLS).all() and (weights == np.eye(tokens.shape[1])[-1]).all()
    for row, answer in zip(tokens.tolist(), targets[:, -1], strict=True):
        assert answer == (row.index(0) < row.index(1))
    assert 0 < targets[:, -1].mean() < 1


def test_plain_division_is_of_the_keys_that_a_row_sees() -> None:
    config = softmax_trained.RECALLING.replace(d_model=16, num_layers=1, d_ff=16)
    rows = softmax_trained.divided(Model(config, Hyper(), init_transformer(jax.random.key(0), config), 0))
    assert rows.shape == (config.batch_size * config.N * (config.seq_len - 1), config.seq_len)
    np.testing.assert_allclose(rows.sum(axis=1), 1, atol=1e-3)
    seen = np.tile(np.arange(2, config.seq_len + 1), config.batch_size * config.N)
    assert ((rows != 0).sum(axis=1) == seen).all() and (rows < 0).any()


@pytest.mark.parametrize("L", [1, 3])
def test_the_first_layers_gradient_over_the_last(L: int) -> None:
    config = Config(task="copy", d_model=8, num_heads=2, num_layers=L, d_ff=8, seq_len=9, batch_size=4)
    config, task = resolve(config), make_task(config)
    params, batch = init_transformer(jax.random.key(0), config), task.eval_batch(task.data, "report", 0)

    def loss(layers: list[Any]) -> jax.Array:
        assert params.decoder is not None
        stacked = jax.tree.map(lambda *leaves: jax.numpy.stack(leaves), *layers)
        whole = replace(params, decoder=replace(params.decoder, layers=stacked))
        return cross_entropy(forward(whole, config, Hyper(), batch)[0], batch.targets_BT, batch.weights_BT).loss

    assert params.decoder is not None
    layers = [jax.tree.map(lambda x, i=i: x[i], params.decoder.layers) for i in range(L)]
    grads = jax.grad(loss)(layers)
    first, last = (sum(float(np.sum(np.square(g))) for g in jax.tree.leaves(grads[i])) for i in (0, -1))
    ratio = norms_trained.first_over_last(config, params, Hyper())
    assert ratio == pytest.approx((first / last) ** 0.5, rel=1e-4) and (ratio == 1) == (L == 1)
