"""Texts in, texts out: what a trained model of pairs, or several together, writes for each source.

    made = translate(Translator((params,), config, hyper, tokenizers, beam=5), ["chat", "", "chien"])
    made.outputs[0][0].text, made.outputs[0][0].score

Sources of about one length share a compiled program and are read in batches of a fixed number of
rows, which others fill up; a row's output follows from its own text.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from transformer_jax.beam import Penalty, beam_search
from transformer_jax.cache import most_positions
from transformer_jax.config import Config, Hyper
from transformer_jax.data import END, PAD, START, Tokenizers
from transformer_jax.decode import bucket
from transformer_jax.encoder_decoder import Transformer
from transformer_jax.errors import DataError

ROWS = 64
BY_LENGTH = Penalty("power", 1.0)  # the mean of ln p


@dataclasses.dataclass(frozen=True, eq=False)
class Translator:
    """Models that write together (one, or an ensemble whose probabilities are averaged), and how they search.

    config, hyper: of the first model, and of all of them unless `others` says otherwise, for those after it.
    beam: hypotheses kept, 1 for greedy. n_best: outputs of each source. rows: of a batch.
    """

    models: tuple[Transformer, ...]
    config: Config
    hyper: Hyper
    tokenizers: Tokenizers
    beam: int = 1
    n_best: int = 1
    penalty: Penalty = BY_LENGTH
    rows: int = ROWS
    others: tuple[tuple[Config, Hyper], ...] = ()

    @property
    def settings(self) -> list[tuple[Config, Hyper]]:
        """Config and Hyper of each model; of one that is not there yet, too."""
        own = self.config, self.hyper
        return [own, *(self.others or [own] * (len(self.models) - 1))]


class Output(NamedTuple):
    """A text and its ids with END, if it was reached, and the score that it was ranked by."""

    text: str
    score: float
    ids: tuple[int, ...]


def cut(ids: Sequence[int]) -> bool:
    """Whether an output of these ids ran into the longest that may be written, without END."""
    return bool(ids) and ids[-1] != END


@dataclasses.dataclass(frozen=True)
class Translations:
    """outputs: of each source the best first, none for blank and too long ones; these are counted.

    too_long: their numbers. unknown: symbols of the sources that the vocabulary lacks.
    """

    outputs: list[list[Output]]
    blank: int
    too_long: list[int]
    unknown: int

    def best(self) -> list[str]:
        """The text of the first output of each source; "" where there is none."""
        return [made[0].text if made else "" for made in self.outputs]


def translate(translator: Translator, sources: Sequence[str], strict: bool = False, before: int = 0) -> Translations:
    """The n best outputs of each source.

    A source without a letter gives none, and no model sees it. One that is longer than the model's
    rows is skipped, and symbols outside the vocabulary are counted; where `strict`, both are a
    DataError, which counts the sources from `before` + 1 on.
    """
    config, blank, unknown = translator.config, 0, 0
    longest, limit = longest_source(translator)
    ids: dict[int, list[int]] = {}
    too_long = []
    for i, text in enumerate(sources):
        if not text.strip():
            blank += 1
            continue
        row = source_ids(config, translator.tokenizers, text)
        strange = translator.tokenizers.source.unknown([text], [row[:-1]])[0]  # its last id is a mark
        if strict and (strange or len(row) > longest):
            long = f"{len(row)} tokens are longer than {limit}"
            why = f"{strange} of its symbols are not in the vocabulary" if strange else long
            raise DataError(f"source {before + i + 1}, {text[:40]!r}: {why}")
        if len(row) > longest:
            too_long.append(i)
            continue
        unknown += strange
        ids[i] = row
    outputs: list[list[Output]] = [[] for _ in sources]
    for numbers, rows in _batches(config, ids, translator.rows):
        for i, made in zip(numbers, _search(translator, rows), strict=False):  # what fills the batch up comes last
            outputs[i] = made
    return Translations(outputs, blank, too_long, unknown)


def source_ids(config: Config, tokenizers: Tokenizers, text: str) -> list[int]:
    """What the model is given of a source: the encoder the text and END, a decoder the text and START."""
    if config.architecture == "encoder_decoder":
        return tokenizers.source_ids(text)
    return [*tokenizers.source.encode(text), START]


def _batches(config: Config, ids: dict[int, list[int]], most: int) -> Iterator[tuple[list[int], list[list[int]]]]:
    """(numbers, rows) of sources that share a program: `most` rows, or one where a length has one source.

    Two sizes: to compile a program takes longer than to fill it up, but one line among 64 rows takes a hundred times
    the line alone (beam 5, 9 ids of the default model of pairs: 1.0 s against 8 ms on two cores), and a person waits
    for it. The rows that fill a batch up are the first one again: they end when that does.
    """
    groups: dict[int, list[int]] = {}
    for i in sorted(ids, key=lambda i: len(ids[i])):
        length = len(ids[i])
        # What a decoder may write is what its row leaves: sources of one length, though of one program for many.
        groups.setdefault(bucket(length) if config.architecture == "encoder_decoder" else length, []).append(i)
    for group in groups.values():
        size = 1 if len(group) == 1 else most
        for first in range(0, len(group), size):
            numbers = group[first : first + size]
            yield numbers, [ids[i] for i in numbers] + [ids[numbers[0]]] * (size - len(numbers))


def _room(translator: Translator, prompt: int) -> int:
    """Tokens that every model can write after so many: END, which is never read, may stand past seq_len."""

    def of(config: Config) -> int:
        most, room = most_positions(config), config.seq_len + 1 - prompt
        return room if most is None else min(room, most - prompt)

    return min(of(config) for config, _ in translator.settings)


def longest_source(translator: Translator) -> tuple[int, str]:
    """(the most ids that a source of all models may have, what says so): a decoder's leaves room for an id to write."""

    def of(config: Config) -> tuple[int, str]:
        most = most_positions(config)
        if config.architecture == "encoder_decoder" or most is None or most > config.seq_len:
            return config.seq_len, f"seq_len={config.seq_len}"
        name = "max_positions" if config.positions == "learned" else "rope_original_positions"
        return most - 1, f"{name}={most} less the one to write"

    return min(of(config) for config, _ in translator.settings)


def _search(translator: Translator, rows: list[list[int]]) -> list[list[Output]]:
    """The n best of each row."""
    both = translator.config.architecture == "encoder_decoder"
    configs, hypers = zip(*translator.settings, strict=True)
    made = beam_search(
        list(translator.models),
        configs,
        hypers,
        [[START]] * len(rows) if both else rows,
        sources=rows if both else None,
        beam=translator.beam,
        n_best=translator.n_best,
        max_new_tokens=_room(translator, 1 if both else len(rows[0])),
        stop_ids=(END,),
        penalty=translator.penalty,
        banned_ids=(PAD, START),
    )
    ids_BNT, lengths_BN, scores_BN = (np.asarray(x) for x in (made.ids_BWT, made.lengths_BW, made.scores_BW))
    decode = translator.tokenizers.target.decode
    out = []
    for b in range(len(rows)):
        # A narrow beam may find fewer: those that are not there have length 0.
        found = [ids_BNT[b, n, :length].tolist() for n, length in enumerate(lengths_BN[b]) if length]
        out.append([Output(decode(row), float(scores_BN[b, n]), tuple(row)) for n, row in enumerate(found)])
    return out
