"""Several short texts in one row, each blind to the others: less padding.

A segment is numbered from 1 in its row (0: padding), and its positions start at 0: attention, cross-attention
included, stays inside it, and no target crosses a border. Pieces go, in order, into the first
row that has room (first fit; Johnson 1973: at most 1.7 times the rows of the best packing).
"""

import re
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any

import numpy as np

from transformer_jax.batch import Batch
from transformer_jax.data.rows import Rows
from transformer_jax.data.tasks import END, PAD, START
from transformer_jax.errors import DataError

# One line break or more behind the one that ends a line. Atomic: the halves of \r\n are not two.
_EMPTY_LINES = re.compile(r"(?>\r\n|\n|\r)(?>\r\n|\n|\r)+")


def documents(text: str) -> list[str]:
    """The parts of a text between empty lines, none of them empty; line breaks inside them stay."""
    return [part for part in _EMPTY_LINES.split(text) if part.strip("\r\n")]


def first_fit(lengths: Sequence[int], room: int) -> tuple[np.ndarray, np.ndarray]:
    """(row of each piece, where it begins there), int64 [N] each. Raises DataError for a piece longer than `room`."""
    rows, starts = np.empty(len(lengths), np.int64), np.empty(len(lengths), np.int64)
    none = np.iinfo(np.int64).max
    first = np.full(room + 1, none)  # the first row of each free room
    waiting: list[list[int]] = [[] for _ in range(room + 1)]  # all of them
    count = 0
    for i, length in enumerate(lengths):
        if length > room:
            raise DataError(f"piece {i} has {length} tokens, and a row holds {room}")
        free = length + int(first[length:].argmin())
        if first[free] == none:
            row, free, count = count, room, count + 1
        else:
            row = heappop(waiting[free])
            first[free] = waiting[free][0] if waiting[free] else none
        rows[i], starts[i] = row, room - free
        heappush(waiting[free - length], row)
        first[free - length] = waiting[free - length][0]
    return rows, starts


def _segments(rows: np.ndarray, starts: np.ndarray, lengths: np.ndarray, shape: tuple[int, int]) -> Any:
    """((rows, columns) of all tokens, segments [R, W], positions [R, W]); pieces are numbered by where they begin."""
    order = np.lexsort((starts, rows))
    begins = np.concatenate([[0], np.flatnonzero(np.diff(rows[order])) + 1])
    number = np.empty(len(rows), np.int32)
    number[order] = np.arange(len(rows)) - np.repeat(begins, np.diff(np.append(begins, len(rows)))) + 1
    at_rows = np.repeat(rows, lengths)
    within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    at_columns = np.repeat(starts, lengths) + within
    segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    segments[at_rows, at_columns] = np.repeat(number, lengths)
    positions[at_rows, at_columns] = within
    return (at_rows, at_columns), segments, positions


def _placed(values: np.ndarray, at: tuple[np.ndarray, np.ndarray], shape: tuple[int, int]) -> Any:
    row = np.full(shape, PAD, np.int32)
    row[at] = values
    return row


def pack_documents(ids: Sequence[Sequence[int] | np.ndarray], seq_len: int) -> Batch:
    """All documents in rows of T = seq_len, [R, T] numpy arrays; every id but a document's first is a target once.

    A document that is longer is cut; the next piece begins with the last target of the one before,
    which it does not see otherwise. Documents of one id have no target, and are left out.
    """
    pieces = [doc[i : i + seq_len + 1] for doc in ids for i in range(0, max(len(doc) - 1, 0), seq_len)]
    lengths = np.array([len(piece) - 1 for piece in pieces], np.int64)
    rows, starts = first_fit(lengths.tolist(), seq_len)
    shape = int(rows.max(initial=-1)) + 1, seq_len
    at, segments_RT, positions_RT = _segments(rows, starts, lengths, shape)
    inputs, targets = (_joined([piece[side] for piece in pieces]) for side in (slice(-1), slice(1, None)))
    return Batch(
        _placed(inputs, at, shape), _placed(targets, at, shape), (segments_RT > 0).astype(np.float32),
        lengths_B=_used(segments_RT), positions_BT=positions_RT, segments_BT=segments_RT,
    )  # fmt: skip


def _joined(parts: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int32), *(np.asarray(part, np.int32) for part in parts)])


def _used(segments: np.ndarray) -> Any:
    return (segments > 0).sum(axis=1, dtype=np.int32)


def pack_pairs(rows: Rows, source_room: int, target_room: int) -> Batch:
    """All pairs in rows of S = source_room and T = target_room, for an encoder-decoder: [R, S], [R, T] numpy arrays.

    Segment i of the targets reads segment i of the sources alone, and begins with START of its own.
    Each pair goes into the first row with room on both sides. Raises DataError for one that no row holds.
    """
    S, T = rows.source.lengths, rows.target.lengths + 1
    if (bad := np.flatnonzero((source_room < S) | (target_room < T))).size:
        i = int(bad[0])
        raise DataError(f"pair {i} takes {S[i]} and {T[i]} tokens, and a row holds {source_room} and {target_room}")
    used, count = np.zeros((2, len(rows)), np.int64), 0
    row_of, starts = np.empty(len(rows), np.int64), np.empty((2, len(rows)), np.int64)
    for i in range(len(rows)):
        fits = (used[0, :count] + S[i] <= source_room) & (used[1, :count] + T[i] <= target_room)
        row = int(fits.argmax()) if fits.any() else count
        count = max(count, row + 1)
        row_of[i], starts[:, i] = row, used[:, row]
        used[:, row] += S[i], T[i]
    source_shape, shape = (count, source_room), (count, target_room)
    at_source, source_segments, source_positions = _segments(row_of, starts[0], S, source_shape)
    at, segments, positions = _segments(row_of, starts[1], T, shape)
    parts = np.split(rows.target.values.astype(np.int32), rows.target.offsets[1:-1])
    inputs = _joined([part for y in parts for part in ([START], y)])
    targets = _joined([part for y in parts for part in (y, [END])])
    return Batch(
        _placed(inputs, at, shape), _placed(targets, at, shape), (segments > 0).astype(np.float32),
        lengths_B=_used(segments), positions_BT=positions, segments_BT=segments,
        source_BS=_placed(rows.source.values, at_source, source_shape), source_lengths_B=_used(source_segments),
        source_positions_BS=source_positions, source_segments_BS=source_segments,
    )  # fmt: skip
