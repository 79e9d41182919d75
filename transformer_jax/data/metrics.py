"""Numbers for what a model wrote: lists of outputs against lists of references.

    score("word_error_rate", ["k a t", "d o g"], [["k a t", "k æ t"], ["d ɔ g"]]).value   # 50.0

An item may have several references; the best of them counts. All numbers are percent, as papers
print them. Strings are compared as they stand: no case folding, no Unicode normalisation (NFC and NFD
of a letter differ).

Two numbers share the name "word error rate" in the literature:
- `word_error_rate`, of grapheme to phoneme and other tasks of one word a line: the part of the words
  whose whole output differs from every reference (the WER of SIGMORPHON 2020-2021);
- `word_edit_rate`, of sentences: edits of words over words of the references (the WER of speech).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from transformer_jax.errors import ConfigError, DataError, unknown

References = Sequence[Sequence[str]]
Split = Callable[[str], list[str]]


class Score(NamedTuple):
    """A number, and for sacrebleu's the signature that a paper should print with it."""

    value: float
    signature: str = ""


class Metric(NamedTuple):
    """of: (outputs, references) -> Score. lower: lower is better. label: for tables. kinds: target tokenizers.

    unit: what its edits are counted in; "" where it counts none.
    """

    of: Callable[[Sequence[str], References], Score]
    lower: bool
    label: str
    kinds: tuple[str, ...]
    unit: str = ""


# --- whole outputs --------------------------------------------------------------


def is_correct(output: str, references: Sequence[str]) -> bool:
    """Whether the output is one of the references."""
    return output in references


def exact_match(outputs: Sequence[str], references: References) -> Score:
    """Percent of the items whose output is one of the references."""
    _check(outputs, references)
    return Score(100.0 * sum(map(is_correct, outputs, references)) / len(outputs))


def word_error_rate(outputs: Sequence[str], references: References) -> Score:
    """Percent of the items (words) whose whole output differs from every reference: 100 less `exact_match`.

    Gorman et al. 2020 (SIGMORPHON task 1). Not the edit distance over words: that is `word_edit_rate`.
    """
    return Score(100.0 - exact_match(outputs, references).value)


# --- edits ----------------------------------------------------------------------


def symbols(text: str) -> list[str]:
    """What white space parts: phones, or words."""
    return text.split()


def phone_error_rate(outputs: Sequence[str], references: References) -> Score:
    """Edits of symbols over symbols of the references, in percent; symbols are what white space parts."""
    return _edit_rate(outputs, references, symbols)


def character_error_rate(outputs: Sequence[str], references: References) -> Score:
    """Edits of characters (Unicode code points, spaces among them) over characters of the references, in percent."""
    return _edit_rate(outputs, references, list)


def word_edit_rate(outputs: Sequence[str], references: References) -> Score:
    """Edits of words over words of the references, in percent: what speech recognition calls word error rate.

    It may pass 100. For one word a line use `word_error_rate`, which is another number.
    """
    return _edit_rate(outputs, references, symbols)


def closest(output: str, references: Sequence[str], split: Split = symbols) -> tuple[str, int]:
    """(the reference with the fewest edits from the output, how many); of equally close ones the first."""
    distance = _rapidfuzz().distance
    parts = split(output)
    found = [(distance(parts, split(reference)), i) for i, reference in enumerate(references)]
    edits, i = min(found)
    return references[i], edits


def confusions(output: str, reference: str, split: Split = symbols) -> list[tuple[str, str]]:
    """(wanted, written) for each edit of one shortest way from reference to output; "" for what one side lacks."""
    wanted, written = split(reference), split(output)
    edits = _rapidfuzz().editops(wanted, written)
    return [
        (wanted[e.src_pos] if e.tag != "insert" else "", written[e.dest_pos] if e.tag != "delete" else "")
        for e in edits
    ]


def _edit_rate(outputs: Sequence[str], references: References, split: Split) -> Score:
    """Sums over all items of edits and of the closest references' lengths, divided once."""
    _check(outputs, references)
    edits = length = 0
    for output, several in zip(outputs, references, strict=True):
        reference, distance = closest(output, several, split)
        edits, length = edits + distance, length + len(split(reference))
    if not length:
        raise DataError(f"the references of all {len(outputs)} items are empty: no rate of edits")
    return Score(100.0 * edits / length)


def _rapidfuzz() -> Any:
    try:
        from rapidfuzz.distance import Levenshtein
    except ImportError as error:
        raise DataError("edit distances need rapidfuzz: pip install 'transformer-jax[data]'") from error
    return Levenshtein


# --- sacrebleu ------------------------------------------------------------------


def bleu(outputs: Sequence[str], references: References, tokenize: str = "13a") -> Score:
    """Corpus BLEU of sacrebleu (Post 2018), with its signature; not a mean over sentences.

    tokenize: "13a" cuts words and punctuation itself and is what to compare by; "none" takes the words as
    they stand, for papers that score text that is tokenised already ("tokenised BLEU").
    """
    return _corpus(_sacrebleu().BLEU(tokenize=tokenize, force=True), outputs, references)


def tokenised_bleu(outputs: Sequence[str], references: References) -> Score:
    """BLEU on words as white space parts them: to be compared with papers whose text was tokenised."""
    return bleu(outputs, references, "none")


def chrf(outputs: Sequence[str], references: References) -> Score:
    """chrF2 of sacrebleu (Popović 2015): F score of character 1- to 6-grams, recall counted twice."""
    return _corpus(_sacrebleu().CHRF(), outputs, references)


def _corpus(metric: Any, outputs: Sequence[str], references: References) -> Score:
    _check(outputs, references)
    # sacrebleu wants the first references of all items, then the second ones; None where an item has no more.
    most = max(map(len, references))
    columns = [[several[i] if i < len(several) else None for several in references] for i in range(most)]
    value = metric.corpus_score(list(outputs), columns).score
    return Score(float(value), str(metric.get_signature()))


def _sacrebleu() -> Any:
    try:
        from sacrebleu import metrics
    except ImportError as error:
        raise DataError("BLEU and chrF need sacrebleu: pip install 'transformer-jax[data]'") from error
    return metrics


# --- which to use ---------------------------------------------------------------

WORDS, TEXTS = ("symbols", "chars", "nfd"), ("bpe", "bytes", "file")
METRICS: dict[str, Metric] = {
    "word_error_rate": Metric(word_error_rate, True, "word error rate (whole outputs)", WORDS),
    "phone_error_rate": Metric(phone_error_rate, True, "phone error rate (symbol edits)", ("symbols",), "symbols"),
    "character_error_rate": Metric(
        character_error_rate, True, "character error rate (edits)", ("chars", "nfd"), "characters"
    ),
    "bleu": Metric(bleu, False, "BLEU (13a)", TEXTS),
    "tokenised_bleu": Metric(tokenised_bleu, False, "BLEU (words as they stand)", TEXTS),
    "chrf": Metric(chrf, False, "chrF2", TEXTS),
    "word_edit_rate": Metric(word_edit_rate, True, "word edit rate (word edits)", TEXTS, "words"),
    "exact_match": Metric(exact_match, False, "exact match", (*WORDS, *TEXTS)),
}


def for_target(kind: str) -> tuple[str, ...]:
    """The names of METRICS that suit a target side of this kind of tokenizer; the first is the one to choose by."""
    return tuple(name for name, metric in METRICS.items() if kind in metric.kinds)


def chosen(names: str, kind: str) -> tuple[str, ...]:
    """The metrics that a comma list names, or where it is empty those of `for_target`; the first is to choose by.

    Raises ConfigError for an unknown name, with the nearest, and for one that is named twice.
    """
    if not names:
        return for_target(kind)
    found = tuple(name.strip() for name in names.split(","))
    for name in found:
        if name not in METRICS:
            raise unknown("metric", name, METRICS)
    if len(set(found)) < len(found):
        raise ConfigError(f"metrics={names!r} names one twice")
    return found


def unit_of(names: Sequence[str], kind: str) -> str:
    """What edits are counted in: the unit of the first of these metrics that has one, or of the target side's own."""
    return next(METRICS[name].unit for name in (*names, *for_target(kind)) if METRICS[name].unit)


def score(name: str, outputs: Sequence[str], references: References) -> Score:
    """The metric of that name. Raises ConfigError for an unknown one, DataError for items that it cannot score."""
    if name not in METRICS:
        raise unknown("metric", name, METRICS)
    return METRICS[name].of(outputs, references)


def _check(outputs: Sequence[str], references: References) -> None:
    if len(outputs) != len(references):
        raise DataError(f"{len(outputs)} outputs for the references of {len(references)} items")
    if not outputs:
        raise DataError("no outputs to score")
    for i, several in enumerate(references):
        if isinstance(several, str):
            raise DataError(f"item {i} has a string for its references: give a list of strings")
        if not several:
            raise DataError(f"item {i} has no reference")
