"""Numbers of outputs: by hand, against naive loops, and at the edges."""

import builtins
import random
import unicodedata
from typing import Any

import pytest

from transformer_jax.data import metrics
from transformer_jax.data.metrics import score
from transformer_jax.errors import DataError, UserError


def naive_distance(a: list[str], b: list[str]) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row = row, [i]
        for j, y in enumerate(b, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (x != y)))
    return row[-1]


OUTPUTS = ["k a t", "d o g", "", "s u n"]
REFERENCES = [["k a t"], ["d ɔ g"], ["a b"], ["s ʌ n", "s u n"]]


def test_words_are_right_or_wrong_as_a_whole() -> None:
    assert score("word_error_rate", OUTPUTS, REFERENCES).value == 50.0
    assert score("exact_match", OUTPUTS, REFERENCES).value == 50.0
    # One phone of many or all of them: one word.
    assert score("word_error_rate", ["a b c d", "x"], [["a b c e"], ["y z"]]).value == 100.0
    assert score("word_error_rate", ["a", "b", "c"], [["a"], ["b"], ["x"]]).value == pytest.approx(100 / 3)


def test_edits_are_summed_and_divided_once() -> None:
    # Edits 0 + 1 + 2 + 0; symbols 3 + 3 + 2 + 3. A mean of the items' rates would be 33.3.
    assert score("phone_error_rate", OUTPUTS, REFERENCES).value == pytest.approx(100 * 3 / 11)
    assert score("phone_error_rate", ["a b c d"], [["a"]]).value == 300.0
    # "kitten" to "sitting": 3 of 7 characters.
    assert score("character_error_rate", ["kitten"], [["sitting"]]).value == pytest.approx(300 / 7)
    assert score("character_error_rate", ["ab"], [["a b"]]).value == pytest.approx(100 / 3)


def test_the_two_word_error_rates_are_two_numbers() -> None:
    output, reference = ["the cat sat on mat"], [["the cat sat on the mat"]]
    assert score("word_error_rate", output, reference).value == 100.0
    assert score("word_edit_rate", output, reference).value == pytest.approx(100 / 6)
    assert "word_edit_rate" in metrics.for_target("bpe") and "word_error_rate" not in metrics.for_target("bpe")


def test_the_closest_reference_counts_whatever_the_order() -> None:
    several = ["a b c d e f", "a b x"]
    for order in (several, several[::-1]):
        assert metrics.closest("a b c", order) == ("a b x", 1)
        assert score("phone_error_rate", ["a b c"], [order]).value == pytest.approx(100 / 3)
    assert metrics.closest("a", ["b", "c"]) == ("b", 1)


def test_edits_equal_a_naive_loop() -> None:
    rng = random.Random(0)
    words = [[rng.choice("abc") for _ in range(rng.randrange(7))] for _ in range(60)]
    outputs, references = [" ".join(w) for w in words[::2]], [[" ".join(w)] for w in words[1::2]]
    edits = sum(naive_distance(a, b) for a, b in zip(words[::2], words[1::2], strict=True))
    rate = 100 * edits / sum(map(len, words[1::2]))
    assert score("phone_error_rate", outputs, references).value == pytest.approx(rate)


def test_confusions_lead_from_the_reference_to_the_output() -> None:
    assert metrics.confusions("a x c", "a b c") == [("b", "x")]
    assert metrics.confusions("a c", "a b c") == [("b", "")]
    assert metrics.confusions("a b b c", "a b c") == [("", "b")]
    assert metrics.confusions("a b", "a b") == []
    assert len(metrics.confusions("", "a b c")) == 3


def test_strings_are_compared_as_they_stand() -> None:
    composed = "é ñ"
    apart = unicodedata.normalize("NFD", composed)
    assert score("exact_match", [composed], [[apart]]).value == 0.0
    assert score("phone_error_rate", [composed], [[apart]]).value == 100.0
    assert score("character_error_rate", [apart], [[apart]]).value == 0.0
    assert score("exact_match", ["a"], [["A"]]).value == 0.0


def test_bleu_by_hand() -> None:
    # 1- to 4-grams 5/6, 3/5, 2/4, 1/3; as long as the reference.
    found = score("tokenised_bleu", ["a b c d x e"], [["a b c d y e"]])
    assert found.value == pytest.approx(100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25)
    assert score("bleu", ["one two three four five"] * 3, [["one two three four five"]] * 3).value == pytest.approx(100)
    assert score("chrf", ["abcdefg"], [["abcdefg"]]).value == pytest.approx(100)
    # Too short by one word of six: only the penalty, e^(1 - 6/5).
    short = score("bleu", ["a b c d e"], [["a b c d e f"]]).value
    assert short == pytest.approx(100 * 2.718281828 ** (1 - 6 / 5))


def test_the_two_bleus_cut_words_differently() -> None:
    outputs, references = ["A man , sitting there, reads."], [["A man, sitting there, reads ."]]
    assert score("bleu", outputs, references).value == pytest.approx(100)
    assert score("tokenised_bleu", outputs, references).value < 50
    assert "tok:13a" in score("bleu", outputs, references).signature
    assert "tok:none" in score("tokenised_bleu", outputs, references).signature
    assert "nc:6" in score("chrf", outputs, references).signature


def test_bleu_of_a_corpus_is_no_mean() -> None:
    outputs = ["a b c d e", "a b c d e f g h i q r s"]
    references = [["a b c d e"], ["a b c d e f g h i j k l"]]
    alone = [score("bleu", [o], [r]).value for o, r in zip(outputs, references, strict=True)]
    assert abs(score("bleu", outputs, references).value - sum(alone) / 2) > 3


def test_items_may_have_different_numbers_of_references() -> None:
    outputs = ["a b c d e", "p q r s t"]
    references = [["x x x x x", "a b c d e"], ["p q r s t"]]
    for name in ("bleu", "chrf"):
        found = score(name, outputs, references)
        assert found.value == pytest.approx(100) and "nrefs:var" in found.signature
    assert score("bleu", outputs, [r[:1] for r in references]).value < 60


def test_an_empty_output_is_wrong_and_no_fault() -> None:
    for name, metric in metrics.METRICS.items():
        found = score(name, ["", ""], [["a b c d"], ["e f g h"]]).value
        assert found == (100.0 if metric.lower else 0.0), name


def test_what_cannot_be_scored_is_said() -> None:
    for name in metrics.METRICS:
        with pytest.raises(DataError, match="no outputs"):
            score(name, [], [])
        with pytest.raises(DataError, match="2 outputs for the references of 1 items"):
            score(name, ["a", "b"], [["a"]])
        with pytest.raises(DataError, match="item 1 has no reference"):
            score(name, ["a", "b"], [["a"], []])
        with pytest.raises(DataError, match="item 0 has a string"):
            score(name, ["a"], ["a"])
    with pytest.raises(DataError, match="all 1 items are empty"):
        score("phone_error_rate", ["a"], [[""]])
    with pytest.raises(UserError, match="did you mean bleu"):
        score("blue", ["a"], [["a"]])


def test_each_kind_of_target_has_its_metrics() -> None:
    chosen = {kind: metrics.for_target(kind) for kind in ("symbols", "chars", "bpe", "bytes")}
    assert chosen["symbols"] == ("word_error_rate", "phone_error_rate", "exact_match")
    assert chosen["chars"] == ("word_error_rate", "character_error_rate", "exact_match")
    assert chosen["bpe"] == chosen["bytes"] and chosen["bpe"][:3] == ("bleu", "tokenised_bleu", "chrf")
    better = {name: metric.lower for name, metric in metrics.METRICS.items()}
    assert [name for name, lower in better.items() if not lower] == ["bleu", "tokenised_bleu", "chrf", "exact_match"]


@pytest.mark.parametrize(("package", "name"), [("rapidfuzz", "phone_error_rate"), ("sacrebleu", "bleu")])
def test_a_package_that_is_not_there_is_named(package: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(wanted: str, *args: Any, **options: Any) -> Any:
        if wanted.split(".")[0] == package:
            raise ImportError(wanted)
        return real(wanted, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match=rf"{package}: pip install 'transformer-jax\[data\]'"):
        score(name, ["a"], [["a"]])
