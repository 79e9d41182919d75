"""What a task is, and the tasks that are made from a key, each with its best possible loss.

Ids of the generated tasks: PAD, START, END, then symbols (a Markov chain has symbols only).
Rows are laid out by architecture. With a prompt x and an answer y:

    decoder           x START y END as one row of next-token prediction; only y and END count
                      (induction, recall, modular: answers stand beside their questions,
                      see each task)
    encoder_decoder   source x; inputs START y; targets y END: exactly one START
    encoder           tokens x; the targets stand at the positions that ask for them

The answer follows from what a counted position sees, so that the floor of all these is 0.
Training and evaluation draw their keys from different names: no evaluation batch is a
training batch. Tasks do not hold out parts of their space: what is measured is the rule
under fresh draws.
"""

import dataclasses
import itertools
import string
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from transformer_jax.batch import Batch
from transformer_jax.config import Config
from transformer_jax.errors import DataError, unknown
from transformer_jax.keys import named

if TYPE_CHECKING:
    from transformer_jax.data.pairs_task import Sides

PAD, START, END = 0, 1, 2
FIRST_SYMBOL = 3
EQUALS = FIRST_SYMBOL  # modular only: its numbers begin one later
SPLITS = ("selection", "report")
EVALUATION_SEED = 577215664
EVAL_BATCHES = 16  # of each split of a generated task

Index = int | jax.Array
Draw = Callable[[Any, jax.Array], Batch]


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """Batches as pure functions, for use inside jit, scan, lax.map and vmap.

    floor: best possible mean loss in nats per counted target; None if unknown.
    data: pytree of device arrays that is handed to both functions (may be ()).
    train_batch(data, key): B rows of seq_len. eval_batch(data, split, index): the
    index-th fixed batch of "selection" or "report"; split is static, index may be traced.
    eval_batches: number of these for each split. show: ids -> readable text.
    sha256: of the data, "" for a generated task. text: tokenizers and texts of a task on pairs.
    """

    name: str
    vocab_size: int
    floor: float | None
    data: Any
    train_batch: Callable[[Any, jax.Array], Batch]
    eval_batch: Callable[[Any, str, Index], Batch]
    eval_batches: Mapping[str, int]
    show: Callable[[Any], str]
    sha256: str
    text: "Sides | None" = None


# --- checks on the host --------------------------------------------------------


def check_ids(ids: Any, vocab_size: int) -> None:
    """Raise DataError unless all `ids` (any shape, on the host) are whole numbers in [0, vocab_size).

    The error names the first bad id, its place and the vocabulary's size. On a device
    such an id would give NaN, or another id's row, and no error.
    """
    array = np.asarray(ids)
    if array.size == 0:
        return
    if not np.issubdtype(array.dtype, np.integer):
        raise DataError(f"ids must be whole numbers, not {array.dtype}")
    bad = (array < 0) | (array >= vocab_size)
    if bad.any():
        place = tuple(int(i) for i in np.unravel_index(int(np.argmax(bad)), array.shape))
        where = f" at {place[0] if len(place) == 1 else place}" if place else ""
        raise DataError(
            f"id {int(array[place])}{where} is outside the vocabulary of {vocab_size} (0 to {vocab_size - 1})"
        )


def check_batch(eval_batches: Mapping[str, int], split: str, index: Index) -> None:
    """Raise for an unknown split (ConfigError) or, where it is a plain number, an index past it (DataError)."""
    if split not in eval_batches:
        raise unknown("split", split, eval_batches)
    if isinstance(index, int) and not 0 <= index < eval_batches[split]:
        raise DataError(f"evaluation batch {index} of {split}: it has {eval_batches[split]} (0 to one less)")


def need(config: Config, field: str, least: int) -> None:
    """Raise DataError if a size of `config` is below what its task can be made with."""
    if (value := getattr(config, field)) < least:
        raise DataError(
            f"task {config.task} with architecture={config.architecture} needs {field} of at least {least}, not {value}"
        )


# --- showing -------------------------------------------------------------------


def symbol_names(count: int) -> list[str]:
    """Letters for up to 52 symbols, else s0, s1, …"""
    return list(string.ascii_letters[:count]) if count <= 52 else [f"s{i}" for i in range(count)]


def _named_ids(*symbols: str) -> list[str]:
    return ["_", ">", ".", *symbols]  # PAD, START, END, the rest


def prompt_and_reference(config: Config, task: Task, batch: Batch, row: int = 0) -> tuple[str, str]:
    """(what the model is given, what it should answer) of one row, as text.

    encoder_decoder: source and counted targets. encoder: tokens and counted targets.
    decoder: the reference is the last unbroken run of counted targets, the prompt is
    what stands before it; where all targets count, the row is cut in the middle.
    Called on the host with a concrete batch.
    """

    def part(array: jax.Array | None, lengths: jax.Array | None) -> np.ndarray:
        values = np.asarray(array)[row]
        return values if lengths is None else values[: int(lengths[row])]

    targets, counted = np.asarray(batch.targets_BT)[row], np.flatnonzero(np.asarray(batch.weights_BT)[row] > 0)
    if config.architecture == "encoder_decoder":
        source = part(batch.source_BS, batch.source_lengths_B)
        read = task.text.tokenizers.source.decode(source.tolist()) if task.text else task.show(source)
        return read, task.show(targets[counted])
    tokens = part(batch.tokens_BT, batch.lengths_B)
    if config.architecture == "encoder" or counted.size == 0:
        return task.show(tokens), task.show(targets[counted])
    end = int(counted[-1]) + 1
    gaps = np.flatnonzero(np.diff(counted) > 1)
    begin = int(counted[gaps[-1] + 1] if gaps.size else counted[0])
    if begin == 0:
        begin = end // 2
    return task.show(tokens[: begin + 1]), task.show(targets[begin:end])


# --- laying out rows -----------------------------------------------------------


def next_token(row_BW: jax.Array, counted_BW: jax.Array, lengths_B: jax.Array | None = None) -> Batch:
    """A batch of next-token prediction from rows of W = T + 1 ids.

    counted_BW: whether an id counts as a target (the first never is one).
    lengths_B: ids of a row that are not padding; None where no row has any.
    """
    T = row_BW.shape[1] - 1
    weights_BT = counted_BW[:, 1:].astype(jnp.float32)
    # A row that fills all W ids has T of them among the inputs.
    real_B = None if lengths_B is None else jnp.minimum(lengths_B, T).astype(jnp.int32)
    return Batch(row_BW[:, :-1], row_BW[:, 1:], weights_BT, lengths_B=real_B)


def join(width: int, *parts: tuple[jax.Array, ArrayLike]) -> tuple[jax.Array, list[jax.Array]]:
    """Parts of varying length, one after the other, then PAD up to `width`.

    parts: (values [B, X], lengths [B] or a number <= X). Returns the rows [B, width] and, for
    each part, a boolean [B, width] that is True on its places. Lengths must sum to <= width.
    """
    B = parts[0][0].shape[0]
    place_BW = jnp.broadcast_to(jnp.arange(width)[None, :], (B, width))
    row_BW, inside = jnp.full((B, width), PAD, jnp.int32), []
    offset_B = jnp.zeros((B,), jnp.int32)
    for values_BX, lengths in parts:
        length_B = jnp.broadcast_to(jnp.asarray(lengths, jnp.int32), (B,))
        if values_BX.shape[1] == 0:
            inside.append(jnp.zeros((B, width), bool))
            continue
        own_BW = place_BW - offset_B[:, None]
        inside_BW = (own_BW >= 0) & (own_BW < length_B[:, None])
        picked_BW = jnp.take_along_axis(values_BX, jnp.clip(own_BW, 0, values_BX.shape[1] - 1), axis=1)
        row_BW = jnp.where(inside_BW, picked_BW, row_BW)
        inside.append(inside_BW)
        offset_B = offset_B + length_B
    return row_BW, inside


def _column(B: int, token: int) -> tuple[jax.Array, int]:
    return jnp.full((B, 1), token, jnp.int32), 1


def _interleave(*columns_BX: jax.Array) -> jax.Array:
    """[B, X] each -> [B, X * number of columns]: first of each, second of each, …"""
    return jnp.stack(columns_BX, axis=2).reshape(columns_BX[0].shape[0], -1)


def _translation(config: Config, source: tuple[jax.Array, ArrayLike], answer: tuple[jax.Array, ArrayLike]) -> Batch:
    """encoder_decoder: the source, and START answer END one id apart as inputs and targets."""
    B, T = config.batch_size, config.seq_len
    source_BS, _ = join(T, source)
    row_BW, (_, in_answer_BW, at_end_BW) = join(T + 1, _column(B, START), answer, _column(B, END))
    batch = next_token(row_BW, in_answer_BW | at_end_BW, jnp.broadcast_to(answer[1], (B,)) + 2)
    lengths_B = jnp.broadcast_to(jnp.asarray(source[1], jnp.int32), (B,))
    return dataclasses.replace(batch, source_BS=source_BS, source_lengths_B=lengths_B)


def _questions(config: Config, context_BC: jax.Array, question_BQX: jax.Array, answer_BQ: jax.Array) -> Batch:
    """A context, then Q questions of X ids with an answer each, in the layout of the architecture.

    decoder: each answer follows its question, and the question's last id must predict it;
    Q must be as many as fit.
    encoder: questions only; the target of a question's last id is its answer.
    encoder_decoder: the source is context and questions, the answer is all answers.
    """
    T, (B, Q, X), C = config.seq_len, question_BQX.shape, context_BC.shape[1]
    asked_BY = question_BQX.reshape(B, Q * X)
    if config.architecture == "encoder_decoder":
        source_BS = jnp.concatenate([context_BC, asked_BY], axis=1)
        return _translation(config, (source_BS, C + Q * X), (answer_BQ, Q))
    if config.architecture == "encoder":
        tokens_BT, _ = join(T, (context_BC, C), (asked_BY, Q * X))
        quiet_BQX = jnp.zeros_like(question_BQX)
        aligned_BQX = quiet_BQX.at[:, :, -1].set(answer_BQ)
        targets_BT, _ = join(T, (jnp.zeros_like(context_BC), C), (aligned_BQX.reshape(B, Q * X), Q * X))
        lengths_B = None if C + Q * X == T else jnp.full((B,), C + Q * X, jnp.int32)
        # No answer is PAD, so that a target counts where it is not.
        return Batch(tokens_BT, targets_BT, (targets_BT != PAD).astype(jnp.float32), lengths_B=lengths_B)
    unit_BQY = jnp.concatenate([question_BQX, answer_BQ[:, :, None]], axis=2)
    length = C + Q * (X + 1)
    row_BW, _ = join(T + 1, (context_BC, C), (unit_BQY.reshape(B, -1), Q * (X + 1)))
    place = np.arange(T + 1) - C
    counted = (place >= 0) & (place % (X + 1) == X)  # padding is shorter than a unit: no answer's place
    lengths_B = None if length >= T else jnp.full((B,), length, jnp.int32)
    return next_token(row_BW, jnp.broadcast_to(jnp.asarray(counted)[None, :], row_BW.shape), lengths_B)


def _distinct(key: jax.Array, rows: int, count: int, symbols: int) -> jax.Array:
    """[rows, count] different numbers below `symbols` in random order, each row on its own."""
    return jax.lax.top_k(jax.random.uniform(key, (rows, symbols)), count)[1].astype(jnp.int32)


def generated(config: Config, floor: float, draw: Draw, names: Sequence[str], data: Any = ()) -> Task:
    """A task from `draw(data, key)`; evaluation keys are fixed and no training key's."""
    eval_batches = {split: EVAL_BATCHES for split in SPLITS}

    def train_batch(data: Any, key: jax.Array) -> Batch:
        return draw(data, named(key, "training batch"))

    def eval_batch(data: Any, split: str, index: Index) -> Batch:
        check_batch(eval_batches, split, index)
        # The generator is named, so that the batches do not follow jax's default.
        key = jax.random.key(EVALUATION_SEED, impl="threefry2x32")
        return draw(data, jax.random.fold_in(named(key, f"evaluation batch of {split}"), index))

    def show(ids: Any) -> str:
        flat: list[int] = np.asarray(ids).reshape(-1).tolist()
        return " ".join(names[i] if 0 <= i < len(names) else f"<{i}>" for i in flat)

    return Task(config.task, config.V, floor, data, train_batch, eval_batch, eval_batches, show, sha256="")


# --- the tasks -----------------------------------------------------------------


def copy_task(config: Config) -> Task:
    """copy: y = x. reverse: y = x backwards. n uniform symbols, n uniform between half the room and all.

    Room: 2n + 2 <= T + 1 for a decoder, n + 1 <= T for an encoder_decoder, n <= T for an
    encoder (whose copy is the identity: a test of plumbing). n is visible before the
    first counted target, END included: floor 0.
    Raises DataError for vocab_size < 5, or seq_len without room for one symbol.
    """
    B, T, backwards = config.batch_size, config.seq_len, config.task == "reverse"
    need(config, "vocab_size", FIRST_SYMBOL + 2)
    need(config, "seq_len", {"decoder": 3, "encoder_decoder": 2, "encoder": 1}[config.architecture])
    most = {"decoder": (T - 1) // 2, "encoder_decoder": T - 1, "encoder": T}[config.architecture]

    def draw(data: Any, key: jax.Array) -> Batch:
        n_B = jax.random.randint(named(key, "lengths"), (B,), (most + 1) // 2, most + 1)
        x_BX = jax.random.randint(named(key, "symbols"), (B, most), FIRST_SYMBOL, config.V)
        back_BX = jnp.clip(n_B[:, None] - 1 - jnp.arange(most)[None, :], 0, most - 1)
        y_BX = jnp.take_along_axis(x_BX, back_BX, axis=1) if backwards else x_BX
        if config.architecture == "encoder_decoder":
            return _translation(config, (x_BX, n_B), (y_BX, n_B))
        if config.architecture == "encoder":
            tokens_BT, (inside_BT,) = join(T, (x_BX, n_B))
            return Batch(tokens_BT, join(T, (y_BX, n_B))[0], inside_BT.astype(jnp.float32), lengths_B=n_B)
        parts = (x_BX, n_B), _column(B, START), (y_BX, n_B), _column(B, END)
        row_BW, (_, _, in_answer_BW, at_end_BW) = join(T + 1, *parts)
        return next_token(row_BW, in_answer_BW | at_end_BW, 2 * n_B + 2)

    return generated(config, 0.0, draw, _named_ids(*symbol_names(config.V - FIRST_SYMBOL)))


def induction_task(config: Config) -> Task:
    """What followed this symbol before? (the "induction heads" of Olsson et al. 2022)

    decoder: a block of m different symbols, repeated to the end of the row; m is uniform
    between half the largest and the largest, min(symbols, T // 2), so that no fixed distance
    is the answer. Targets count from the second symbol of the first repetition on.
    Other architectures: a block of that largest size, then questions, each a symbol of
    the block but its last; the answer is the symbol after it in the block.
    Symbols of a block differ, so that there is one answer: floor 0.
    Raises DataError for vocab_size < 5 or seq_len < 4.
    """
    B, T, symbols = config.batch_size, config.seq_len, config.V - FIRST_SYMBOL
    need(config, "vocab_size", FIRST_SYMBOL + 2)
    need(config, "seq_len", 4)
    most = min(symbols, T // 2)

    def draw(data: Any, key: jax.Array) -> Batch:
        block_BM = FIRST_SYMBOL + _distinct(named(key, "block"), B, most, symbols)
        if config.architecture == "decoder":
            m_B = jax.random.randint(named(key, "lengths"), (B,), max(2, most // 2), most + 1)
            place_BW = jnp.broadcast_to(jnp.arange(T + 1)[None, :], (B, T + 1))
            row_BW = jnp.take_along_axis(block_BM, place_BW % m_B[:, None], axis=1)
            return next_token(row_BW, place_BW > m_B[:, None])
        asked_BQ = jax.random.randint(named(key, "questions"), (B, T - most), 0, most - 1)
        question_BQ = jnp.take_along_axis(block_BM, asked_BQ, axis=1)
        answer_BQ = jnp.take_along_axis(block_BM, asked_BQ + 1, axis=1)
        return _questions(config, block_BM, question_BQ[:, :, None], answer_BQ)

    return generated(config, 0.0, draw, _named_ids(*symbol_names(symbols)))


def recall_task(config: Config) -> Task:
    """Associative recall: n pairs of a key and a value, then questions, each one of the keys.

    Multi-query form (Arora et al. 2023, "Zoology"): the first half of the symbols are keys,
    different within a row; the second half are values, uniform. decoder: k v … k v, then
    question and answer by turns. About half of a row is questions: n = min(keys, (T+1) // 4),
    elsewhere min(keys, T // 3). Floor 0.
    Raises DataError for vocab_size < 7, or seq_len without room for two pairs and a question.
    """
    B, T, symbols = config.batch_size, config.seq_len, config.V - FIRST_SYMBOL
    need(config, "vocab_size", FIRST_SYMBOL + 4)
    need(config, "seq_len", 7 if config.architecture == "decoder" else 6)
    keys = (symbols + 1) // 2
    n = min(keys, (T + 1) // 4 if config.architecture == "decoder" else T // 3)
    asked = (T + 1 - 2 * n) // 2 if config.architecture == "decoder" else T - 2 * n

    def draw(data: Any, key: jax.Array) -> Batch:
        key_BN = FIRST_SYMBOL + _distinct(named(key, "keys"), B, n, keys)
        value_BN = jax.random.randint(named(key, "values"), (B, n), FIRST_SYMBOL + keys, config.V)
        asked_BQ = jax.random.randint(named(key, "questions"), (B, asked), 0, n)
        question_BQ = jnp.take_along_axis(key_BN, asked_BQ, axis=1)
        answer_BQ = jnp.take_along_axis(value_BN, asked_BQ, axis=1)
        return _questions(config, _interleave(key_BN, value_BN), question_BQ[:, :, None], answer_BQ)

    values = map(str, range(symbols - keys))
    return generated(config, 0.0, draw, _named_ids(*symbol_names(keys), *values))


def largest_prime(limit: int) -> int:
    """The largest prime <= limit; limit >= 2."""
    return next(p for p in itertools.count(limit, -1) if all(p % d for d in range(2, int(p**0.5) + 1)))


def modular_task(config: Config) -> Task:
    """a + b = c mod p (Power et al. 2022, "Grokking"), p the largest prime <= vocab_size - 4.

    Ids: PAD, START, END, =, then 0 … p-1. A question is `a b =`; a decoder's row is
    `a b = c a b = c …`, padded. a and b are uniform over all p² pairs. Floor 0.
    Raises DataError for vocab_size < 6, or seq_len < 3 (no room for one sum).
    """
    B, T = config.batch_size, config.seq_len
    need(config, "vocab_size", EQUALS + 3)
    need(config, "seq_len", 3)
    sums = (T + 1) // 4 if config.architecture == "decoder" else T // 3
    p, zero = largest_prime(config.V - EQUALS - 1), EQUALS + 1

    def draw(data: Any, key: jax.Array) -> Batch:
        a_BQ, b_BQ = jax.random.randint(named(key, "terms"), (2, B, sums), 0, p)
        question_BQX = jnp.stack([zero + a_BQ, zero + b_BQ, jnp.full_like(a_BQ, EQUALS)], axis=2)
        return _questions(config, jnp.zeros((B, 0), jnp.int32), question_BQX, zero + (a_BQ + b_BQ) % p)

    return generated(config, 0.0, draw, _named_ids("=", *map(str, range(p))))
