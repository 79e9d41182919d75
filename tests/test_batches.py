"""Host batches of pairs: each pair once an epoch, a few shapes, resumed anywhere."""

import itertools
import json
import sys
import tracemalloc
from collections import Counter

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_jax.batch import Batch
from transformer_jax.config import Config
from transformer_jax.data.batches import PairBatches, bucket_edges
from transformer_jax.data.rows import Ragged, Rows
from transformer_jax.data.tasks import END, PAD, START
from transformer_jax.errors import DataError

V = 1000
FIRST = 4


def rows_of(lengths: list[tuple[int, int]]) -> Rows:
    """Pair i of these lengths (END and START not counted): all its ids are FIRST + i."""
    sources, targets = ([[FIRST + i] * n for i, n in enumerate(side)] for side in zip(*lengths, strict=True))
    return Rows(Ragged.of([[*ids, END] for ids in sources], V), Ragged.of(targets, V))


def some_rows(count: int, seed: int = 0) -> Rows:
    draw = np.random.RandomState(seed)
    return rows_of([(int(n), int(max(0, n + draw.randint(-2, 3)))) for n in draw.geometric(0.15, count).clip(1, 40)])


def config(**changes) -> Config:
    return Config(**{"architecture": "encoder_decoder", "vocab_size": V, "seq_len": 64, "batch_size": 4} | changes)


def pairs_in(batch: Batch) -> list[int]:
    """Which pairs the real rows of a batch are."""
    assert batch.source_BS is not None and batch.lengths_B is not None
    return [int(ids[0]) - FIRST for ids, length in zip(batch.source_BS, batch.lengths_B, strict=True) if length]


def epoch(batches: PairBatches, number: int) -> list[Batch]:
    return [batches[number * len(batches) + k] for k in range(len(batches))]


def check_equal(got: Batch, want: Batch) -> None:
    jax.tree.map(np.testing.assert_array_equal, got, want)


# --- what an epoch is ----------------------------------------------------------------


@pytest.mark.parametrize("count,batch_size", [(10, 5), (37, 4), (19, 8), (97, 7), (8, 1)])
def test_j2_o6_an_epoch_holds_each_pair_once(count, batch_size):
    """Over 200 batches: no pair twice in an epoch, another order in each, at most one batch filled up."""
    batches = PairBatches(config(batch_size=batch_size), some_rows(count), seed=3)
    assert len(batches) == -(-count // batch_size)
    orders = set()
    for number in range(max(3, 200 // len(batches))):
        made = epoch(batches, number)
        seen = [pair for batch in made for pair in pairs_in(batch)]
        assert sorted(seen) == list(range(count))
        assert sum(len(pairs_in(batch)) < batch_size for batch in made) == (count % batch_size > 0)
        orders.add(tuple(seen))
    assert len(orders) > 0.9 * number  # 10 pairs in 4 buckets have few orders


def test_batches_are_the_pairs_in_one_of_a_few_shapes():
    rows = some_rows(97)
    batches = PairBatches(config(length_buckets=3), rows, seed=0)
    shapes = Counter()
    for batch in epoch(batches, 0):
        assert isinstance(batch.tokens_BT, np.ndarray) and batch.source_BS is not None
        S, T = batch.source_BS.shape[1], batch.tokens_BT.shape[1]
        shapes[S, T] += 1
        for i, pair in enumerate(pairs_in(batch)):
            n, m = int(rows.source.lengths[pair]) - 1, int(rows.target.lengths[pair])
            x, y = [FIRST + pair] * n, [FIRST + pair] * m
            assert batch.source_BS[i].tolist() == [*x, END] + [0] * (S - n - 1)
            assert batch.targets_BT[i].tolist() == [*y, END] + [0] * (T - m - 1)
            assert batch.tokens_BT[i].tolist() == ([START, *y, END] + [0] * T)[:T]
            assert batch.weights_BT[i].tolist() == [1.0] * (m + 1) + [0.0] * (T - m - 1)
            assert batch.source_lengths_B is not None and batch.source_lengths_B[i] == n + 1
    assert set(shapes) <= set(batches.shapes) and len(batches.shapes) == 3
    # Every epoch has as many batches of each shape: a run compiles in its first one all that it needs.
    for number in (1, 7):
        assert Counter((b.source_BS.shape[1], b.tokens_BT.shape[1]) for b in epoch(batches, number)) == shapes
    sizes = [S + T for S, T in batches.shapes]
    made = [b.source_BS.shape[1] for b in epoch(batches, 0)]
    assert sizes == sorted(sizes) and made != sorted(made)  # short ones do not come first


def test_o3_fewer_pairs_than_a_batch():
    batches = PairBatches(config(batch_size=8), rows_of([(2, 1), (1, 2), (3, 3)]), seed=0)
    assert len(batches) == 1
    for k in range(3):
        assert sorted(pairs_in(batches[k])) == [0, 1, 2]
        assert batches[k].weights_BT.sum() == 2 + 3 + 4 and batches[k].tokens_BT.shape[0] == 8


def test_a_batch_follows_from_seed_and_number():
    rows = some_rows(37)
    first, again = (PairBatches(config(), rows, seed=5) for _ in range(2))
    for k in (25, 3, 0, 99, 12):  # in any order
        check_equal(again[k], first[k])
    other = PairBatches(config(), rows, seed=6)
    assert [pairs_in(other[k]) for k in range(5)] != [pairs_in(first[k]) for k in range(5)]
    assert PairBatches(config(), rows, seed=-1)[0].tokens_BT.shape[0] == 4
    # Fixed for good: a run that goes on after an update sees what it would have seen.
    fixed = PairBatches(config(batch_size=3), rows_of([(1, 1)] * 7), seed=0)
    assert [pairs_in(fixed[k]) for k in range(3)] == [[6], [5, 4, 3], [0, 2, 1]]


# --- buckets ----------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12), st.integers(1, 4), st.data())
def test_buckets_are_the_best(lengths, count, data):
    """No other borders in the order of length waste less; every pair fits its bucket and the larger ones."""
    rows = rows_of(lengths)
    bucket, shapes = bucket_edges(rows, count)
    sizes = np.stack([rows.source.lengths, rows.target.lengths + 1])
    assert len(shapes) <= count and (np.diff(np.array(shapes), axis=0) >= 0).all()
    assert all((sizes[:, i] <= shapes[b]).all() for i, b in enumerate(bucket))
    assert shapes[-1] == tuple(sizes.max(axis=1))
    measure = (sizes / sizes.mean(axis=1, keepdims=True)).max(axis=0)
    values = np.unique(measure)

    def cost(borders: tuple[float, ...]) -> int:
        total, S, T = 0, 0, 0
        for low, high in itertools.pairwise([-1.0, *borders, values[-1]]):
            inside = (measure > low) & (measure <= high)
            if inside.any():
                S, T = np.maximum((S, T), sizes[:, inside].max(axis=1))
                total += inside.sum() * (S + T)
        return int(total)

    best = min(cost(c) for n in range(count) for c in itertools.combinations(values[:-1], n))
    assert sum(sum(shapes[b]) for b in bucket) == best


def test_more_buckets_waste_less_and_it_is_said():
    rows = some_rows(900)
    wasted = []
    for count in (1, 2, 4, 8):
        batches = PairBatches(config(length_buckets=count), rows, seed=0)
        (note,) = batches.notes()
        made = sum(b.source_BS.size + b.tokens_BT.size for b in epoch(batches, 0))
        real = int(rows.source.lengths.sum() + rows.target.lengths.sum()) + 900
        assert note.startswith("batches: 225 an epoch, source x target ") and f"; {1 - real / made:.0%} of" in note
        assert note.count("x") == 1 + count
        wasted.append(1 - real / made)
    assert wasted == sorted(wasted, reverse=True) and wasted[0] > 0.5 and wasted[-1] < 0.2


# --- processes ---------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [2, 4])
def test_j5_processes_share_each_batch(processes):
    """At every step all have the same shape and other rows; together they are the batch of one process."""
    rows = some_rows(19)
    alone = PairBatches(config(batch_size=8), rows, seed=1)
    parts = [PairBatches(config(batch_size=8), rows, 1, index, processes) for index in range(processes)]
    assert {len(part) for part in parts} == {3}
    for k in range(9):  # behind the first epoch too: nobody runs out
        check_equal(jax.tree.map(lambda *x: np.concatenate(x), *(part[k] for part in parts)), alone[k])
        assert len({part[k].tokens_BT.shape for part in parts}) == 1
    for index, count in ((0, 3), (2, 2), (-1, 2)):
        with pytest.raises(DataError, match=f"batch_size=8 rows for process {index} of {count}"):
            PairBatches(config(batch_size=8), rows, 1, index, count)


# --- the cursor ----------------------------------------------------------------------------


def test_i14_resumed_in_the_second_epoch_and_again():
    """10 pairs in twos: stopped after batch 7 and again after 12, the rest is that of the straight run."""
    pytest.importorskip("grain")

    def fresh():
        return PairBatches(config(batch_size=2), some_rows(10), seed=0).iterator()

    straight = fresh()
    wanted = [next(straight) for _ in range(23)]
    states = {}
    for start, stop in ((0, 7), (7, 12), (12, 23)):
        iterator = fresh()
        if start:
            iterator.set_state(json.loads(states[start]))
        for k in range(start, stop):
            check_equal(next(iterator), wanted[k])
        states[stop] = json.dumps(iterator.get_state())  # read ahead, but counted by what was taken
        iterator.close()
    assert len({tuple(pair for batch in wanted[e : e + 5] for pair in pairs_in(batch)) for e in (0, 5, 10, 15)}) == 4
    straight.set_state(json.loads(states[7]))  # and backwards
    check_equal(next(straight), wanted[7])
    straight.close()


def test_without_grain(monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    batches = PairBatches(config(), some_rows(9), seed=0)
    with pytest.raises(DataError, match=r'pip install "transformer-jax\[data\]"'):
        batches.iterator()
    assert len(pairs_in(batches[0])) > 0


def test_one_long_pair_costs_its_cells_and_no_more():
    """A row past all others makes the padded array wide: ids of one byte stay so while it is made."""
    rows, width = Ragged.of([[3, 4, 5]] * 20_000 + [[3] * 1000], 9), 1000
    tracemalloc.start()
    made = rows.padded(np.arange(len(rows)), width)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert made.dtype == np.uint8 and made[:2, :4].tolist() == [[3, 4, 5, PAD]] * 2 and (made[-1] == 3).all()
    assert peak < 3.5 * made.size, f"{peak / made.size:.1f} bytes a cell"
    assert rows.padded(np.array([20_000, 0]), width)[1, :4].tolist() == [3, 4, 5, PAD]
    assert rows.padded(np.array([], int), 4).shape == (0, 4)
