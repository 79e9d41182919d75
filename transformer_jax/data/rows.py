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
        kind = np.uint8 if size <= 1 << 8 else np.uint16 if size <= 1 << 16 else np.int32
        return cls(values.astype(kind), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """[N]"""
        return np.diff(self.offsets)

    def padded(self, rows: np.ndarray, width: int) -> np.ndarray:
        """[len(rows), width] of these rows, PAD after each; width must hold the longest."""
        place = np.arange(width)[None, :]
        inside = place < self.lengths[rows][:, None]
        at = np.where(inside, self.offsets[:-1][rows][:, None] + place, 0)
        return np.where(inside, self.values[at], np.zeros((), self.values.dtype))


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

    source: (ids [B, S], lengths [B]). target: (ids [B, Y], lengths [B]); the batch has T = Y + 1.
    real_B: False for rows that fill the batch up: they have length 0 and weigh nothing.
    """
    (source_BS, source_lengths_B), (target_BY, lengths_B) = source, target
    source_lengths_B = xp.where(real_B, source_lengths_B, 0).astype(np.int32)
    B, T = target_BY.shape[0], target_BY.shape[1] + 1
    place_1T = xp.arange(T)[None, :]
    length_B1 = lengths_B.astype(np.int32)[:, None]
    y_BT = xp.concatenate([target_BY.astype(np.int32), xp.full((B, 1), PAD, np.int32)], axis=1)
    targets_BT = xp.where(place_1T == length_B1, END, y_BT)
    tokens_BT = xp.concatenate([xp.full((B, 1), START, np.int32), targets_BT[:, :-1]], axis=1)
    weights_BT = ((place_1T <= length_B1) & real_B[:, None]).astype(np.float32)
    # Where a row has room for END among its inputs it stands there, and counts for nothing.
    inputs_B = xp.where(real_B, xp.minimum(lengths_B.astype(np.int32) + 2, T), 0)
    if config.architecture == "encoder_decoder":
        return Batch(
            tokens_BT, targets_BT, weights_BT, lengths_B=inputs_B, source_BS=source_BS.astype(np.int32),
            source_lengths_B=source_lengths_B,
        )  # fmt: skip
    source = source_BS.astype(np.int32), source_lengths_B
    return _one_row(xp, config, source, (tokens_BT, targets_BT, weights_BT), inputs_B)


def _one_row(xp: Any, config: Config, source: tuple[Any, Any], answer: tuple[Any, Any, Any], inputs_B: Any) -> Batch:
    """A decoder's rows: the source, then the answer's inputs, then PAD; no wider than seq_len, which holds them all."""
    (source_BS, lengths_B), (tokens_BT, targets_BT, weights_BT) = source, answer
    B, T = tokens_BT.shape
    W = min(source_BS.shape[1] + T, config.seq_len)
    at_BW = xp.arange(W)[None, :] - lengths_B[:, None]
    answers_BW = (at_BW >= 0) & (at_BW < T)
    padded_BW = xp.concatenate([source_BS, xp.full((B, T), PAD, np.int32)], axis=1)[:, :W]

    def beside(part_BT: Any, other_BW: Any) -> Any:
        return xp.where(answers_BW, xp.take_along_axis(part_BT, xp.clip(at_BW, 0, T - 1), axis=1), other_BW)

    row_BW = beside(tokens_BT, padded_BW)
    # Before the answer the targets are the row's next ids too, and count for nothing.
    next_BW = xp.concatenate([row_BW[:, 1:], xp.full((B, 1), PAD, np.int32)], axis=1)
    nothing_BW = xp.zeros((B, W), np.float32)
    lengths_B = xp.minimum(lengths_B + inputs_B, W)
    return Batch(row_BW, beside(targets_BT, next_BW), beside(weights_BT, nothing_BW), lengths_B=lengths_B)
