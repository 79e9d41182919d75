"""The tasks on pairs of texts: a source is read, a target is written.

    encoder_decoder   source x END; inputs START y END, targets y END, one id apart
    decoder           x START y END as one row of next-token prediction; only y and END count

The source ends with END, as in most translation toolkits: the encoder sees where it stops
whatever the position scheme, and no source is empty. Training rows are as wide as their
longest pair, those of both evaluation splits as the longest of either. Pairs that do not fit
seq_len are in no batch, counted, or refused where `strict`; what a model writes for them counts.
"""

import dataclasses
import functools
import hashlib
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.batch import Batch
from transformer_jax.config import Config
from transformer_jax.data.cmudict import cmudict_pairs
from transformer_jax.data.pairs import Pairs, files_of, outer_file, read_pairs
from transformer_jax.data.rows import Ragged, Rows, lay_out
from transformer_jax.data.tasks import END, SPLITS, Index, Task, check_batch
from transformer_jax.data.vocabularies import Tokenizers, described, fit
from transformer_jax.errors import DataError
from transformer_jax.keys import named

DEV_PART = 20  # without --dev, one source of so many is held out
PAIR_TASKS = ("pairs", "cmudict")
OPTIONS = {"train": "--pairs", "selection": "--dev", "report": "--test"}


@dataclasses.dataclass(frozen=True, eq=False)
class Sides:
    """What a task on pairs knows about its texts.

    pairs: of each split (source, its references) in order; rows: those that fit seq_len, encoded, a row a
    reference. notes: what was read, skipped, chosen, in lines for a person.
    """

    tokenizers: Tokenizers
    pairs: Mapping[str, list[tuple[str, list[str]]]]
    rows: Mapping[str, Rows]
    notes: tuple[str, ...]


# --- reading -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Corpus:
    """What the files hold. many: a source's pairs, side by side, are answers to one question."""

    splits: Mapping[str, Pairs]
    notes: tuple[str, ...]
    many: bool = False

    @property
    def sha256(self) -> str:
        return hashlib.sha256(" ".join(part.sha256 for part in self.splits.values()).encode()).hexdigest()


def place_of(source: str, parts: int) -> int:
    """A number below `parts` that follows from the source alone, alike on every machine."""
    return int.from_bytes(hashlib.blake2b(source.encode(), digest_size=8).digest(), "big") % parts


def hold_out(pairs: Pairs) -> tuple[Pairs, Pairs]:
    """(the rest, about a twentieth): by a hash of the source, so that no source stands in both.

    At least one source is held out; DataError where there is only one.
    """
    numbers = {source: place_of(source, DEV_PART) for source in pairs.sources}
    if len(numbers) < 2:
        raise DataError(f"{pairs.name} has one source: none is left to choose on; give --dev")
    held = {source for source, number in numbers.items() if number == 0}
    if not held or len(held) == len(numbers):
        held = {min(numbers, key=lambda source: (place_of(source, 1 << 60), source))}
    rows = {part: [i for i, s in enumerate(pairs.sources) if (s in held) == part] for part in (False, True)}
    return pairs.part(rows[False]), dataclasses.replace(pairs.part(rows[True]), name=f"{pairs.name}, held out")


def stamp(path: str) -> tuple[Any, ...]:
    """What changes when the files do; a file that is missing is found out when it is read."""
    found = []
    for file in files_of(path):
        try:
            stat = os.stat(outer_file(file))
            found.append((file, stat.st_mtime_ns, stat.st_size))
        except OSError:
            found.append((file, 0, 0))
    return tuple(found)


@functools.lru_cache(maxsize=2)
def _corpus(task: str, given: tuple[str, str, str], stamps: tuple[Any, ...], strict: bool) -> _Corpus:
    """All splits; `stamps` are there for the cache."""
    if task == "cmudict":
        splits, notes = cmudict_pairs(place_of)
        return _Corpus(splits, tuple(notes), many=True)
    if not given[0]:
        raise DataError("task pairs needs --pairs=FILE, or --pairs=SOURCE,TARGET")
    train = read_pairs(given[0], option=OPTIONS["train"], strict=strict)
    dev, test = (
        read_pairs(path, option=OPTIONS[split], strict=strict, languages=train.languages) if path else None
        for split, path in zip(SPLITS, given[1:], strict=True)
    )
    notes = [note for part in (train, dev, test) if part for note in part.notes]
    if dev is None:
        train, dev = hold_out(train)
        notes.append(f"no --dev: {len(dev):,} pairs are held out by a hash of their source, {len(train):,} are left")
    if test is None:
        notes.append("no --test: the report is on the pairs of dev")
    splits = {"train": train, "selection": dev, "report": dev if test is None else test}
    return _Corpus(splits, (*notes, *_overlap(splits)))


def _overlap(splits: Mapping[str, Pairs]) -> list[str]:
    seen, notes = set(splits["train"].sources), []
    for split in SPLITS:
        part = splits[split]
        if both := sum(source in seen for source in part.sources):
            note = f"{part.name}: {both:,} of {len(part):,} sources are in the training data too"
            notes += [note] if note not in notes else []
    return notes


def _read(config: Config, strict: bool) -> _Corpus:
    given = config.pairs, config.dev, config.test
    if config.task == "cmudict":
        if any(given):
            raise DataError("task cmudict brings its own pairs: for --pairs, --dev and --test give --task=pairs")
        return _corpus("cmudict", given, (), False)
    return _corpus(config.task, given, tuple(stamp(path) for path in given if path), strict)


@functools.lru_cache(maxsize=2)
def _fitted(corpus: _Corpus, source: str, target: str, bpe_size: int) -> tuple[Tokenizers, str]:
    train = corpus.splits["train"]
    return fit(train.sources, train.targets, source, target, bpe_size)


def pair_sizes(config: Config, strict: bool = False) -> dict[str, int]:
    """vocab_size and source_vocab_size of the tokenizers; the files are read and the tokenizers fitted."""
    check_architecture(config)
    made, _ = _fitted(_read(config, strict), config.tokenizer, config.target_tokenizer, config.bpe_size)
    check_architecture(config, made)
    return {"vocab_size": made.vocab_size, "source_vocab_size": made.source_vocab_size}


def check_architecture(config: Config, tokenizers: Tokenizers | None = None) -> None:
    if config.architecture not in ("encoder_decoder", "decoder"):
        raise DataError(
            f"task {config.task} writes its answers: it needs architecture=encoder_decoder or decoder, "
            f"not {config.architecture}"
        )
    if tokenizers and config.architecture == "decoder" and not tokenizers.shared:
        raise DataError(
            f"architecture=decoder reads both sides with one vocabulary, not {tokenizers.source.kind} and "
            f"{tokenizers.target.kind}: give --tokenizer=bytes, or another that suits both"
        )


def check_sizes(config: Config, tokenizers: Tokenizers) -> None:
    """Raise DataError unless the model's vocabularies are the tokenizers' own.

    A wider one could write ids that no text has; another one means another tokenizer.
    """
    check_architecture(config, tokenizers)
    have = config.V, config.source_vocab_size
    want = tokenizers.vocab_size, tokenizers.source_vocab_size
    if have != want:
        raise DataError(
            f"vocab_size={have[0]}, source_vocab_size={have[1]}, but the tokenizers have {want[0]} and {want[1]}: "
            "leave them 0, or use the tokenizers that the model was trained with"
        )


# --- the task ------------------------------------------------------------------


def encode_pairs(
    config: Config, tokenizers: Tokenizers, pairs: Pairs, many: bool = False, strict: bool = False
) -> tuple[list[tuple[str, list[str]]], Rows, list[str]]:
    """(all sources with their references, rows of the pairs that fit seq_len, notes) of one split, in order.

    many: equal sources, which stand together, are one question with several answers. Raises
    DataError where nothing fits, or, where `strict`, if anything does not.
    """
    both = config.architecture == "encoder_decoder"
    texts, targets = tokenizers.source.encode_all(pairs.sources), tokenizers.target.encode_all(pairs.targets)
    sources = [[*ids, END] for ids in texts] if both else texts
    S, T = (np.array([len(ids) for ids in side]) for side in (sources, targets))
    fits = (config.seq_len >= S) & (config.seq_len >= T + 1) if both else S + T + 1 <= config.seq_len
    notes = []
    if long := int((~fits).sum()):
        first = int(np.argmin(fits))
        what = f"{pairs.name}: {long:,} of {len(pairs):,} pairs do not fit seq_len={config.seq_len}"
        longest = f"{int(S.max())} and {int(T.max()) + 1}"
        if strict or long == len(pairs):
            raise DataError(f"{what}: the first is {pairs.sources[first][:40]!r}; the longest sides take {longest}")
        notes.append(f"{what} and are in no batch (the longest sides take {longest})")
    kept = np.flatnonzero(fits)
    rows = Rows(
        Ragged.of([sources[i] for i in kept], tokenizers.source.size),
        Ragged.of([targets[i] for i in kept], tokenizers.target.size),
    )
    for side, given, ids in (("source", pairs.sources, texts), ("target", pairs.targets, targets)):
        tokenizer = getattr(tokenizers, side)
        if unknown := sum(tokenizer.unknown([given[i] for i in kept], [ids[i] for i in kept])):
            notes.append(f"{pairs.name}: {unknown:,} symbols of the {side} are not in its {tokenizer.kind} vocabulary")
    asked: list[tuple[str, list[str]]] = []
    for source, target in zip(pairs.sources, pairs.targets, strict=True):
        if many and asked and asked[-1][0] == source:
            asked[-1][1].append(target)
        else:
            asked.append((source, [target]))
    return asked, rows, notes


def make_pairs_task(config: Config, tokenizers: Tokenizers | None = None, strict: bool = False) -> Task:
    """Pairs of config.pairs, dev and test, or the CMU dictionary; the task's `text` holds a `Sides`.

    data: {split: {"source" [N, S], "source_lengths", "target" [N, Y], "lengths"}} in the smallest
    integer types. train_batch: B pairs, uniform, with replacement. eval_batch: pairs in order;
    rows past the end have length and weight 0. tokenizers: those of a trained model; None: fitted.
    Raises DataError as `read_pairs` does, for vocabulary sizes that are not the tokenizers', an
    architecture without an answer, and where no pair fits seq_len.
    """
    corpus = _read(config, strict)
    if tokenizers is None:
        tokenizers, note = _fitted(corpus, config.tokenizer, config.target_tokenizer, config.bpe_size)
    else:
        note = f"{described(tokenizers)} (those of the trained model)"
    check_sizes(config, tokenizers)
    # Only what the rows depend on: the arms of a sweep share them.
    same = Config(architecture=config.architecture, seq_len=config.seq_len)
    sides = _encoded(same, tokenizers, corpus, note, strict)
    digest = hashlib.sha256(f"{corpus.sha256} {tokenizers.sha256}".encode()).hexdigest()
    return _task(config, sides, digest)


def evaluation_task(
    config: Config, tokenizers: Tokenizers, pairs: str, *, option: str = "--pairs", strict: bool = False
) -> Task:
    """A task with the split "report" alone, of the file `pairs`: what a trained model is measured on.

    The training data are not read. Raises DataError as `make_pairs_task` does; `option` is its name for the file.
    """
    check_sizes(config, tokenizers)
    given = read_pairs(pairs, option=option, strict=strict)
    sides = _encode(config, tokenizers, _Corpus({"report": given}, tuple(given.notes)), "", strict)
    return _task(config, sides, given.sha256)


def _encode(config: Config, tokenizers: Tokenizers, corpus: _Corpus, note: str, strict: bool) -> Sides:
    made: dict[int, Any] = {}  # without --test, two splits are one
    for part in corpus.splits.values():
        if id(part) not in made:
            made[id(part)] = encode_pairs(config, tokenizers, part, corpus.many, strict)
    said = [*corpus.notes, *([note] if note else []), *(line for _, _, more in made.values() for line in more)]
    pairs = {split: made[id(part)][0] for split, part in corpus.splits.items()}
    rows = {split: made[id(part)][1] for split, part in corpus.splits.items()}
    return Sides(tokenizers, pairs, rows, tuple(said))


_encoded = functools.lru_cache(maxsize=2)(_encode)


def _on_device(rows: Rows, widths: tuple[int, int]) -> dict[str, jax.Array]:
    every, (S, T) = np.arange(len(rows)), widths
    arrays = {
        "source": rows.source.padded(every, S),
        "source_lengths": rows.source.lengths.astype(np.int32),
        "target": rows.target.padded(every, T - 1),
        "lengths": rows.target.lengths.astype(np.int32),
    }
    return {name: jnp.asarray(array) for name, array in arrays.items()}


def _task(config: Config, sides: Sides, sha256: str) -> Task:
    B = config.batch_size
    # Batches of both evaluation splits have one shape: a sweep measures them in one loop.
    measured = [rows.widths for split, rows in sides.rows.items() if split in SPLITS]
    S, T = (max(sizes) for sizes in zip(*measured, strict=True))
    placed: dict[int, dict[str, jax.Array]] = {}
    for split, rows in sides.rows.items():
        if id(rows) not in placed:
            placed[id(rows)] = _on_device(rows, (S, T) if split in SPLITS else rows.widths)
    data = {split: placed[id(rows)] for split, rows in sides.rows.items()}
    eval_batches = {split: -(-len(sides.rows[split]) // B) for split in SPLITS if split in sides.rows}

    def batch_of(part: dict[str, jax.Array], rows_B: jax.Array, real_B: jax.Array) -> Batch:
        picked = {name: array[rows_B] for name, array in part.items()}
        source, target = (picked["source"], picked["source_lengths"]), (picked["target"], picked["lengths"])
        return lay_out(jnp, config, source, target, real_B)

    def train_batch(data: dict[str, dict[str, jax.Array]], key: jax.Array) -> Batch:
        if "train" not in data:
            raise DataError("this task is there to measure a trained model: it has no training pairs")
        part = data["train"]
        rows_B = jax.random.randint(named(key, "pairs"), (B,), 0, part["lengths"].size)
        return batch_of(part, rows_B, jnp.ones(B, bool))

    def eval_batch(data: dict[str, dict[str, jax.Array]], split: str, index: Index) -> Batch:
        check_batch(eval_batches, split, index)
        part = data[split]
        rows_B = jnp.asarray(index, jnp.int32) * B + jnp.arange(B)
        count = part["lengths"].size
        return batch_of(part, jnp.minimum(rows_B, count - 1), rows_B < count)

    return Task(
        name=config.task,
        vocab_size=config.V,
        floor=None,
        data=data,
        train_batch=train_batch,
        eval_batch=eval_batch,
        eval_batches=eval_batches,
        show=lambda ids: sides.tokenizers.target.decode(np.asarray(ids).reshape(-1).tolist()),
        sha256=sha256,
        text=sides,
    )
