"""A model of pairs judged by what it writes: each output beside its references, and all metrics."""

import collections
import dataclasses
import math
import unicodedata
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from experiments.translating import Translator, translate
from transformer_jax.cache import check_cacheable
from transformer_jax.data import metrics
from transformer_jax.data.metrics import Score
from transformer_jax.errors import ConfigError, NotFiniteError

BINS = 8
Pairs = Sequence[tuple[str, Sequence[str]]]  # a source, and every answer that is right


@dataclasses.dataclass(frozen=True)
class Item:
    """One source and what became of it. closest: the reference with the fewest edits; edits: of `parts`."""

    source: str
    references: Sequence[str]
    output: str
    score: float
    ids: tuple[int, ...]
    length: int
    closest: str
    edits: int

    @property
    def correct(self) -> bool:
        """Whether the output is one of the references, to the letter."""
        return metrics.is_correct(self.output, self.references)


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """items in the order of the pairs; scores by the metrics' names, the one to choose by first."""

    items: list[Item]
    scores: dict[str, Score]


def metrics_of(translator: Translator) -> tuple[str, ...]:
    """The names of the metrics: those of config.metrics, or else those that suit the target side.

    Raises ConfigError for an unknown one, DataError where a package is missing that one needs: now, not after hours.
    """
    names = metrics.chosen(translator.config.metrics, translator.tokenizers.target.kind)
    for name in names:
        metrics.score(name, ["a"], [["a"]])
    return names


def unit_of(translator: Translator) -> str:
    """What edits are counted in: characters, symbols or words."""
    kind = translator.tokenizers.target.kind
    return metrics.unit_of(metrics.chosen(translator.config.metrics, kind), kind)


def parts(unit: str) -> Callable[[str], list[str]]:
    """Text -> the parts that edits of this unit are counted in."""
    return list if unit == "characters" else metrics.symbols


def _sides(translator: Translator, pairs: Pairs) -> tuple[list[str], Sequence[Sequence[str]]]:
    """(sources, references), these as outputs are: symbols with one space between them, letters of nfd composed."""
    references = [several for _, several in pairs]
    kind = translator.tokenizers.target.kind
    if kind == "symbols":
        references = [[" ".join(text.split()) for text in several] for several in references]
    elif kind == "nfd":
        references = [[unicodedata.normalize("NFC", text) for text in several] for several in references]
    return [source for source, _ in pairs], references


def evaluate_pairs(translator: Translator, pairs: Pairs, strict: bool = False) -> Evaluated:
    """Translate every source and score the outputs; a source that is too long has an empty output, which is wrong."""
    sources, references = _sides(translator, pairs)
    made = translate(translator, sources, strict)
    split = parts(unit_of(translator))
    items = []
    for source, several, found in zip(sources, references, made.outputs, strict=True):
        output, score, ids = found[0] if found else ("", -math.inf, ())
        closest, edits = metrics.closest(output, several, split)
        length = len(translator.tokenizers.source.encode(source))
        items.append(Item(source, several, output, score, ids, length, closest, edits))
    return Evaluated(items, scores_of(translator, made.best(), references))


def scores_of(translator: Translator, outputs: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, Score]:
    """The metrics of `metrics_of`."""
    return {name: metrics.score(name, outputs, references) for name in metrics_of(translator)}


def judge(translator: Translator, pairs: Pairs) -> Callable[..., dict[str, float | None]]:
    """Parameters (of several models: an ensemble) -> the metrics on `pairs`; None each where a model diverged.

    translator: how to search; its models are left out. Nothing is compiled after the first call. Raises
    ConfigError, before any, for a model that cannot be cached, and as `metrics_of` does.
    """
    check_cacheable(translator.config)
    names = metrics_of(translator)
    sources, references = _sides(translator, pairs)

    def score(*models: Any) -> dict[str, float | None]:
        try:
            made = translate(dataclasses.replace(translator, models=models), sources)
        except NotFiniteError:  # nothing finite to choose from
            return dict.fromkeys(names)
        return {name: found.value for name, found in scores_of(translator, made.best(), references).items()}

    return score


# --- what the report shows ----------------------------------------------------------


def worst(items: Sequence[Item], most: int) -> list[Item]:
    """The wrong ones with the most edits; of equals the shortest source first."""
    wrong = [item for item in items if not item.correct]
    return sorted(wrong, key=lambda item: (-item.edits, item.length))[:most]


def confusions(items: Sequence[Item], unit: str, most: int) -> list[tuple[str, str, int]]:
    """(wanted, written, how often) over all items' shortest edits, the most common first; "" for nothing."""
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    for item in items:
        if not item.correct:
            counts.update(metrics.confusions(item.output, item.closest, parts(unit)))
    ordered = sorted(counts.items(), key=lambda found: (-found[1], found[0]))
    return [(wanted, written, count) for (wanted, written), count in ordered[:most]]


def by_length(items: Sequence[Item], name: str) -> list[tuple[str, int, float]]:
    """(lengths of the source, items, the metric on them): a group a length, or BINS at most of about equal size."""
    lengths = np.array([item.length for item in items])
    edges = np.unique(lengths)
    if len(edges) > BINS:
        edges = np.unique(np.quantile(lengths, np.arange(1, BINS + 1) / BINS, method="higher"))
    rows, low = [], int(lengths.min())
    for high in edges.tolist():
        inside = [item for item in items if low <= item.length <= high]
        if inside:
            found = metrics.score(name, [item.output for item in inside], [item.references for item in inside])
            rows.append((f"{low}" if low == high else f"{low}–{high}", len(inside), found.value))
        low = high + 1
    return rows


def named(show: str, sources: Collection[str]) -> list[str]:
    """The sources that --show names, parted by |, each once.

    From left to right the longest piece that is a source is taken, as it stands: one that holds a | or begins or
    ends with a space can be named too. Where none is, the text up to the next | without the spaces at its ends.
    Raises ConfigError, with the nearest source, for what is in none of them.
    """
    there, found = set(sources), []
    parts = show.split("|") if show else []
    while parts:
        sizes = (n for n in range(len(parts), 0, -1) if "|".join(parts[:n]) in there)
        taken = next(sizes, 1)
        whole = "|".join(parts[:taken])
        source = whole if whole in there else whole.strip()
        if source not in there:
            nearest, _ = metrics.closest(source, list(dict.fromkeys(sources)), list)
            raise ConfigError(f"--show={source!r}: no such source is to be evaluated; the nearest one: {nearest!r}")
        found.append(source)
        parts = parts[taken:]
    return list(dict.fromkeys(found))


def of_sources(items: Sequence[Item], sources: Sequence[str]) -> list[Item]:
    """The first item of each of these sources that is there."""
    there = {item.source: item for item in reversed(items)}
    return [there[source] for source in sources if source in there]


def telling(items: Sequence[Item], most: int = 3, longest: int = 24) -> list[Item]:
    """Some wrong and right items whose attention is drawn; those of up to `longest` tokens a side are preferred."""
    written = [item for item in items if item.ids]
    fit = [item for item in written if max(item.length, len(item.ids)) <= longest]
    written = fit or sorted(written, key=lambda item: item.length)[:most]
    wrong = worst(written, most - 1)
    right = sorted((item for item in written if item.correct), key=lambda item: -item.length)
    return (wrong + right[: most - len(wrong)])[:most]
