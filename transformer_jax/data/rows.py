"""Rows of ids of many lengths, and how a batch of pairs is laid out from them.

The same functions serve the host (numpy) and the device (jax.numpy).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from transformer_jax.batch import Batch
from transformer_jax.config import Config
from transformer_jax.data.tasks import END, PAD, START, check_ids


def smallest(size: int) -> Any:
    """The smallest integer type that holds 0 … size - 1."""
    return np.uint8 if size <= 1 << 8 else np.uint16 if size <= 1 << 16 else np.int32


@dataclasses.dataclass(frozen=True, eq=False)
class Ragged:
    """N rows of ids, one after the other. values: ids of all rows; offsets: [N + 1], where each begins."""

    values: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], size: int) -> "Ragged":
        """In the smallest type that holds `size` ids; DataError for an id past them."""
        offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows], dtype=np.int64)])
        values = np.fromiter((i for row in rows for i in row), np.int64, int(offsets[-1]))
        check_ids(values, size)
        return cls(values.astype(smallest(size)), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """[N]"""
        return np.diff(self.offsets)

    def padded(self, rows: np.ndarray, width: int) -> np.ndarray:
        """[len(rows), width] of these rows, PAD after each; width must hold the longest.

        Takes two bytes more than the result's own for each of its cells at most, and eight for each id that is real.
        """
        lengths = self.lengths[rows]
        ends = np.cumsum(lengths)
        at = np.arange(int(lengths.sum())) + np.repeat(self.offsets[:-1][rows] - (ends - lengths), lengths)
        out = np.full((len(rows), width), PAD, self.values.dtype)
        out[np.arange(width) < lengths[:, None]] = self.values[at]
        return out


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """Encoded pairs. source: x END (a decoder's: x); target: y, without marks."""

    source: Ragged
    target: Ragged

    def __len__(self) -> int:
        return len(self.source)

    @property
    def widths(self) -> tuple[int, int]:
        """(S, T) that hold every row: the longest source, the longest target and its END."""
        return int(self.source.lengths.max(initial=1)), int(self.target.lengths.max(initial=0)) + 1


def lay_out(xp: Any, config: Config, source: tuple[Any, Any], target: tuple[Any, Any], real_B: Any) -> Batch:
    """A batch from padded ids, with xp numpy or jax.numpy.

    source: (ids [B, S], lengths [B]). target: (ids [B, Y], lengths [B]) without marks; T is Y + 1, a
    decoder's S + Y + 1, but no more than seq_len, which holds every pair. real_B: False for rows that
    fill the batch up: they have length 0 and weigh nothing.
    """
    (source_BS, source_lengths_B), (target_BY, target_lengths_B) = source, target
    B, T = target_BY.shape[0], target_BY.shape[1] + 1
    x_lengths_B, y_lengths_B = (lengths.astype(np.int32) for lengths in (source_lengths_B, target_lengths_B))
    # START y END, then PAD: one id wider than the batch, as inputs and targets are one id apart.
    y_BT = xp.concatenate([target_BY.astype(np.int32), xp.full((B, 1), PAD, np.int32)], axis=1)
    y_end_BT = xp.where(xp.arange(T)[None, :] == y_lengths_B[:, None], END, y_BT)
    row_BW = xp.concatenate([xp.full((B, 1), START, np.int32), y_end_BT], axis=1)
    # Where the answer's START stands in each row.
    starts_B = xp.zeros_like(x_lengths_B)
    if config.architecture == "decoder":
        row_BW, starts_B = _behind(xp, source_BS, x_lengths_B, row_BW), x_lengths_B
        row_BW = row_BW[:, : config.seq_len + 1]
        T = row_BW.shape[1] - 1
    at_BT = xp.arange(T)[None, :] - starts_B[:, None]
    counted_BT = (at_BT >= 0) & (at_BT <= y_lengths_B[:, None]) & real_B[:, None]
    batch = Batch(
        row_BW[:, :-1],
        row_BW[:, 1:],
        counted_BT.astype(np.float32),
        # END is an input too where there is room for it, and nothing is asked there.
        lengths_B=xp.where(real_B, xp.minimum(starts_B + y_lengths_B + 2, T), 0),
    )
    if config.architecture == "decoder":
        return batch
    return dataclasses.replace(
        batch, source_BS=source_BS.astype(np.int32), source_lengths_B=xp.where(real_B, x_lengths_B, 0)
    )


def _behind(xp: Any, source_BS: Any, lengths_B: Any, answer_BU: Any) -> Any:
    """[B, S + U]: each source, its answer right behind it, then PAD."""
    (B, S), U = source_BS.shape, answer_BU.shape[1]
    at_BW = xp.arange(S + U)[None, :] - lengths_B[:, None]
    answers_BW = xp.take_along_axis(answer_BU, xp.clip(at_BW, 0, U - 1), axis=1)
    sources_BW = xp.concatenate([source_BS.astype(np.int32), xp.full((B, U), PAD, np.int32)], axis=1)
    return xp.where((at_BW >= 0) & (at_BW < U), answers_BW, sources_BW)
