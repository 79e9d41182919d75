"""Markov chains: the floor against exact probabilities, eigenvectors and simulations."""

import math

import jax
import numpy as np
import pytest

from tests.test_data import many, small
from transformer_jax.data import make_task
from transformer_jax.data.markov import entropy_rate, markov_task, mean_floor, stationary, transition_table
from transformer_jax.errors import DataError


def losses(rows_RW: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Loss of each prediction of each row under the exact conditional probabilities."""
    chance, order = stationary(table), table.ndim - 1
    out = []
    for j in range(1, rows_RW.shape[1]):
        if j < order:  # the second symbol, of which only one predecessor is seen
            given = chance / chance.sum(1, keepdims=True)
            out.append(-np.log(given[rows_RW[:, 0], rows_RW[:, 1]]))
        else:
            out.append(-np.log(table[tuple(rows_RW[:, j - order + k] for k in range(order + 1))]))
    return np.stack(out, axis=1)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("seq_len", [1, 5, 23])
def test_markov_oracle_attains_the_floor(order, seq_len):
    config = small("markov", seq_len=seq_len, batch_size=20)
    task = markov_task(config, order)
    table = transition_table(16, order)
    batch = many(task)
    sampled = np.concatenate([batch.tokens_BT, batch.targets_BT[..., -1:]], -1).reshape(-1, seq_len + 1)
    per_row = losses(sampled, table).mean(1)
    error = per_row.std() / math.sqrt(len(per_row))
    assert abs(per_row.mean() - task.floor) < 4 * error
    assert math.log(16) - task.floor > 20 * error  # a uniform predictor is far off
    if order == 2:
        # The bare entropy rate, which ignores the first prediction, is not the floor.
        assert task.floor - entropy_rate(table) > 8 * error
        assert (batch.weights_BT == 1).all()
    else:
        assert task.floor == pytest.approx(entropy_rate(table), abs=1e-12)


def test_markov_entropy_rate():
    """Against a two-state chain by hand, an eigenvector, and a long simulation in NumPy."""
    p, q = 0.3, 0.1
    two = np.array([[1 - p, p], [q, 1 - q]])
    h = lambda x: -x * math.log(x) - (1 - x) * math.log(1 - x)  # noqa: E731
    np.testing.assert_allclose(stationary(two), [q / (p + q), p / (p + q)], atol=1e-14)
    assert entropy_rate(two) == pytest.approx((q * h(p) + p * h(q)) / (p + q), abs=1e-13)
    assert mean_floor(two, 7) == pytest.approx(entropy_rate(two), abs=1e-13)

    table = transition_table(5, 2)
    step = np.zeros((25, 25))  # from context (a, b) to context (b, c)
    for a, b, c in np.ndindex(5, 5, 5):
        step[5 * a + b, 5 * b + c] = table[a, b, c]
    value, vector = np.linalg.eig(step.T)
    chance = np.real(vector[:, np.argmax(np.real(value))])
    np.testing.assert_allclose(stationary(table).ravel(), chance / chance.sum(), atol=1e-13)

    draw, cumulative = np.random.default_rng(3), table.cumsum(-1)
    a, b, total = np.zeros(2000, int), np.zeros(2000, int), []
    for step_number in range(300):
        c = np.minimum((cumulative[a, b] < draw.random((2000, 1))).sum(1), 4)
        if step_number >= 50:
            total.append(-np.log(table[a, b, c]))
        a, b = b, c
    per_chain = np.mean(total, axis=0)
    assert abs(per_chain.mean() - entropy_rate(table)) < 4 * per_chain.std() / math.sqrt(2000)


def test_markov_first_prediction():
    """With one target the floor of order 2 is H(pair) - H(symbol); with many it falls to the entropy rate."""
    table = transition_table(6, 2)
    pair = stationary(table)
    entropy = lambda x: -(x * np.log(x)).sum()  # noqa: E731
    assert mean_floor(table, 1) == pytest.approx(entropy(pair) - entropy(pair.sum(1)), abs=1e-12)
    np.testing.assert_allclose(pair.sum(0), pair.sum(1), atol=1e-14)
    assert 100 * mean_floor(table, 100) == pytest.approx(mean_floor(table, 1) + 99 * entropy_rate(table), abs=1e-9)


@pytest.mark.parametrize("order", [1, 2])
def test_markov_samples_follow_the_table(order):
    """Chi-square of the sampled transitions, and of the first context, against the exact chances."""
    config = small("markov", vocab_size=4, seq_len=29)
    table = transition_table(4, order)
    batch = many(markov_task(config, order))
    row = np.concatenate([batch.tokens_BT, batch.targets_BT[..., -1:]], -1).reshape(-1, 30)
    counts = np.zeros(table.shape)
    windows = np.lib.stride_tricks.sliding_window_view(row, order + 1, axis=1).reshape(-1, order + 1)
    np.add.at(counts, tuple(windows.T), 1)
    want = counts.sum(-1, keepdims=True) * table
    chi2 = ((counts - want) ** 2 / want)[want > 5].sum()
    assert chi2 < (want > 5).sum() + 4 * math.sqrt(2 * want.size)
    starts = np.zeros(table.shape[:-1])
    np.add.at(starts, tuple(row[:, :order].T), 1)
    want = starts.sum() * stationary(table)
    assert ((starts - want) ** 2 / want)[want > 5].sum() < starts.size + 4 * math.sqrt(2 * starts.size)


def test_markov_table_is_fixed_and_bounded():
    table = transition_table(16, 2)
    np.testing.assert_array_equal(table, transition_table(16, 2))
    np.testing.assert_allclose(table.sum(-1), 1.0, atol=1e-12)
    assert (table > 0).all() and 0.5 < entropy_rate(table) < 0.8 * math.log(16)
    big = make_task(small("markov", vocab_size=6400, batch_size=2))
    assert big.vocab_size == 6400 and many(big).tokens_BT.max() == 63
    assert sum(x.nbytes for x in jax.tree.leaves(big.data)) < 2**21


def test_markov_order_is_checked():
    with pytest.raises(DataError, match="order 3"):
        markov_task(small("markov"), 3)
