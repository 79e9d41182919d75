"""Training batches of pairs made on the host, in a few static shapes.

    batches = PairBatches(config, task.text.rows["train"], seed)
    iterator = batches.iterator()
    batch = next(iterator)                     numpy leaves; shapes repeat, see batches.shapes
    state = iterator.get_state()               the cursor, for a checkpoint
    iterator.set_state(state)

Batch k is a pure function of (rows, config, seed, k). Epoch k // len(batches) is a fresh permutation
of all pairs; sorted by bucket in that order, they are cut into batches: what a bucket's last batch
leaves over goes into the next larger bucket, so that an epoch holds each pair once and only its
largest batch may be filled up. The order of an epoch's batches is drawn anew too.
"""

import functools
import sys
from typing import Any

import numpy as np

from transformer_jax.batch import Batch
from transformer_jax.config import Config
from transformer_jax.data.rows import Rows, lay_out
from transformer_jax.errors import DataError

CUTS = 256  # places at which a border between buckets may stand
THREADS, AHEAD = 2, 8  # batches are cheap: a few threads keep a few ready


def bucket_edges(rows: Rows, count: int) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """(bucket of each row [N], shapes (S, T)): at most `count` of them, of least padding.

    Pairs are ordered by their longer side, each in units of that side's mean; borders are the best
    of CUTS places (a dynamic programme over them). A shape holds all pairs of its own bucket and of the
    smaller ones, so that it is no smaller than theirs.
    """
    lengths = np.stack([rows.source.lengths, rows.target.lengths + 1])
    means = np.maximum(lengths.mean(axis=1, keepdims=True), 1.0)
    measure = (lengths / means).max(axis=0)
    order = np.argsort(measure, kind="stable")
    widest = np.maximum.accumulate(lengths[:, order], axis=1)
    N = len(order)
    # Equal pairs belong together: a border stands behind the last of them.
    ends = np.flatnonzero(np.append(np.diff(measure[order]) > 0, True)) + 1
    ends = np.unique(ends[np.linspace(0, len(ends) - 1, min(CUTS, len(ends))).round().astype(int)])
    cost = widest.sum(axis=0)[ends - 1]
    starts = np.concatenate([[0], ends[:-1]])
    best, choices = np.full(len(ends), np.inf), []
    for number in range(min(count, len(ends))):
        before = np.concatenate([[0.0], best[:-1]]) if number else np.where(starts == 0, 0.0, np.inf)
        # [end, start]: rows start … end-1 in one bucket, behind the best of one bucket less.
        total = before[None, :] + np.maximum(ends[:, None] - starts[None, :], 0) * cost[:, None]
        total = np.where(starts[None, :] < ends[:, None], total, np.inf)
        choices.append(total.argmin(axis=1))
        best = total.min(axis=1)
    borders, at = [], len(ends) - 1
    for choice in reversed(choices):
        borders.append(int(ends[at]))
        start = int(starts[choice[at]])
        if start == 0:
            break
        at = int(np.searchsorted(ends, start))
    borders.reverse()
    bucket = np.empty(N, np.int64)
    bucket[order] = np.searchsorted(borders, np.arange(N), side="right")
    return bucket, [(int(widest[0, end - 1]), int(widest[1, end - 1])) for end in borders]


class PairBatches:
    """Endless batches of config.batch_size pairs, by number; `len` is how many an epoch has.

    With several processes, each gives its own config.batch_size / process_count rows of the same
    batch: same shape everywhere, no pair twice, and all of them are endless. Raises DataError if the
    count does not divide the batch.
    """

    def __init__(self, config: Config, rows: Rows, seed: int, process_index: int = 0, process_count: int = 1):
        if config.batch_size % process_count or not 0 <= process_index < process_count:
            raise DataError(
                f"batch_size={config.batch_size} rows for process {process_index} of {process_count}: "
                "every process must get as many"
            )
        self.config, self.rows, self.seed = config, rows, seed
        self.mine = slice(*(config.batch_size // process_count * i for i in (process_index, process_index + 1)))
        self._bucket, self.shapes = bucket_edges(rows, config.length_buckets)
        self._epoch = functools.lru_cache(maxsize=2)(self._plan)

    def __len__(self) -> int:
        return -(-len(self.rows) // self.config.batch_size)

    def _plan(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(pairs of each batch [len, B], -1 where there is none; bucket of each batch [len]) in the epoch's order."""
        B, count = self.config.batch_size, len(self)
        # Raw bits of a counter-based generator: NumPy keeps these streams, not those of its draws.
        key = np.array([self.seed % (1 << 64), epoch], np.uint64)
        bits = np.random.Philox(key=key).random_raw(len(self.rows) + count)
        drawn = np.argsort(bits[: len(self.rows)], kind="stable")
        pairs = np.full(count * B, -1)
        pairs[: len(drawn)] = drawn[np.argsort(self._bucket[drawn], kind="stable")]
        order = np.argsort(bits[len(self.rows) :], kind="stable")
        last = np.minimum(np.arange(1, count + 1) * B, len(drawn)) - 1
        buckets = self._bucket[pairs[last]]
        return pairs.reshape(count, B)[order], buckets[order]

    def __getitem__(self, k: int) -> Batch:
        """Batch k, of numpy arrays."""
        pairs, buckets = self._epoch(k // len(self))
        at = k % len(self)
        S, T = self.shapes[buckets[at]]
        rows_B = pairs[at][self.mine]
        real_B = rows_B >= 0
        rows_B = np.where(real_B, rows_B, 0)
        source, target = self.rows.source, self.rows.target
        return lay_out(
            np,
            self.config,
            (source.padded(rows_B, S), source.lengths[rows_B]),
            (target.padded(rows_B, T - 1), target.lengths[rows_B]),
            real_B,
        )

    def notes(self) -> list[str]:
        """The shapes and how much of them is padding, in a line."""
        shapes = ", ".join(f"{S}x{T}" for S, T in self.shapes)
        full = sum(int(side.lengths.sum()) for side in (self.rows.source, self.rows.target)) + len(self.rows)
        _, buckets = self._epoch(0)
        made = self.config.batch_size * sum(sum(self.shapes[bucket]) for bucket in buckets)
        waste = 1 - full / made
        return [f"batches: {len(self):,} an epoch, source x target {shapes}; {waste:.0%} of their tokens are padding"]

    def iterator(self) -> Any:
        """A grain iterator from batch 0 on, read ahead in threads: `get_state` gives the cursor, `set_state` takes it.

        Raises DataError where grain is not installed.
        """
        try:
            import grain
        except ImportError as error:
            raise DataError('batches of pairs need the package grain: pip install "transformer-jax[data]"') from error
        options = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=AHEAD)
        return iter(grain.MapDataset.source(_Endless(self)).to_iter_dataset(options))


class _Endless:
    """Batches as a source of grain's: no element comes twice, so that grain need not know of epochs."""

    def __init__(self, batches: PairBatches):
        self.batches = batches

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: Any) -> Any:
        return self.batches[int(index)]
