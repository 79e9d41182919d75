"""What a tokenizer.json lacks is counted, by whatever name and even where it leaves no trace."""

from typing import Any

import pytest

from experiments.translating import Translator, source_ids, translate
from transformer_jax.config import Config, Hyper
from transformer_jax.data import END, Tokenizers
from transformer_jax.data.pairs import Pairs
from transformer_jax.data.pairs_task import encode_pairs
from transformer_jax.data.subwords import Bpe, File
from transformer_jax.data.tokenizers import Bytes, Tokenizer
from transformer_jax.errors import DataError

package: Any = pytest.importorskip("tokenizers")
models = package.models
LETTERS = {"a": 0, "b": 1, "ab": 2}


def file_of(model: Any, cut: Any = None, normalizer: Any = None) -> File:
    made = package.Tokenizer(model)
    made.pre_tokenizer = cut or package.pre_tokenizers.WhitespaceSplit()
    if normalizer is not None:
        made.normalizer = normalizer
    return File(made.to_str())


def unknown(tokenizer: Tokenizer, *texts: str) -> list[int]:
    return tokenizer.unknown(texts, tokenizer.encode_all(texts))


OWN = {
    "WordLevel": lambda: models.WordLevel(LETTERS | {"[OOV]": 3}, unk_token="[OOV]"),
    "WordPiece": lambda: models.WordPiece(LETTERS | {"<what>": 3}, unk_token="<what>"),
    "BPE": lambda: models.BPE(LETTERS | {"<what>": 3}, [("a", "b")], unk_token="<what>"),
    "BPE beside a usual one": lambda: models.BPE(LETTERS | {"<unk>": 3, "?": 4}, [("a", "b")], unk_token="?"),
    "Unigram": lambda: models.Unigram([("a", -1.0), ("b", -2.0), ("rare", 0.0), ("ab", -1.0)], unk_id=2),
}


@pytest.mark.parametrize("kind", OWN)
def test_a_mark_of_any_name_is_counted(kind: str) -> None:
    assert unknown(file_of(OWN[kind]()), "ab a", "z ab z", "", "  ") == [0, 2, 0, 0]


def test_symbols_that_are_dropped_are_counted() -> None:
    """But not what the normaliser and the cutting into words take away."""
    strip = package.normalizers.Sequence([package.normalizers.NFD(), package.normalizers.StripAccents()])
    tokenizer = file_of(models.BPE(LETTERS, [("a", "b")]), normalizer=strip)
    assert tokenizer.encode("axb") == tokenizer.encode("ab")  # without a trace
    assert unknown(tokenizer, "ab  a\t b", "á a\u0301b", "axb", "xx", "漢字 a") == [0, 0, 1, 2, 2]
    # Marks that the file adds are no letters.
    made = package.Tokenizer.from_str(tokenizer.json)
    made.add_tokens(["<x>"])
    assert unknown(File(made.to_str()), "ab<x>a", "ab<y>a") == [0, 3]


def test_letters_whose_bytes_are_not_all_there_are_counted_once() -> None:
    """Byte-level BPE that was fitted without all 256 bytes: é and è share their first."""
    made = package.Tokenizer(models.BPE())
    made.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.train_from_iterator(["abba é"], package.trainers.BpeTrainer(vocab_size=50, show_progress=False))
    assert unknown(File(made.to_str()), "ba éa", "è", "漢 b", "zz") == [0, 1, 1, 2]


def test_all_bytes_lack_nothing() -> None:
    for tokenizer in (Bytes(), Bpe.fit(["ab"], 300), File(Bpe.fit(["ab"], 300).json)):
        assert unknown(tokenizer, "漢 \x00\x03 é") == [0]


def test_a_text_that_the_file_cannot_write_is_refused_in_one_line() -> None:
    tokenizer = file_of(models.WordLevel(LETTERS))
    with pytest.raises(DataError, match=r"the tokenizer.json cannot encode every text: .*UNK"):
        tokenizer.encode("z")


@pytest.mark.parametrize("architecture", ["encoder_decoder", "decoder"])
def test_strict_refuses_what_is_dropped_and_others_count_it(architecture: str) -> None:
    tokenizer = file_of(models.BPE(LETTERS, [("a", "b")]))
    config = Config(architecture=architecture, vocab_size=tokenizer.size, seq_len=8)
    both = Tokenizers(tokenizer, tokenizer)
    with pytest.raises(DataError, match=r"source 2, 'axb': 1 of its symbols are not in the vocabulary"):
        translate(Translator((), config, Hyper(), both), ["ab", "axb"], strict=True)
    pairs = Pairs("p", ["ab", "axb", "xx" + "a" * 9], ["b", "xb", "x"], [], "")
    assert encode_pairs(config, both, pairs)[2][1:] == [
        "p: 1 symbols of the source are not in its file vocabulary",
        "p: 1 symbols of the target are not in its file vocabulary",
    ]


def test_the_end_of_a_source_is_none_of_its_symbols() -> None:
    """Where a file's mark of the unknown is also its end, as CLIP's is."""
    tokenizer = file_of(models.BPE(LETTERS | {"<|endoftext|>": 3}, [("a", "b")], unk_token="<|endoftext|>"))
    config = Config(architecture="encoder_decoder", vocab_size=tokenizer.size, seq_len=8)
    both = Tokenizers(tokenizer, tokenizer)
    assert source_ids(config, both, "ab")[-1] == END and unknown(tokenizer, "ab", "axb") == [0, 1]
    assert encode_pairs(config, both, Pairs("p", ["ab"], ["b"], [], ""))[2] == []
    with pytest.raises(DataError, match=r"source 1, 'axb': 1 of its symbols"):
        translate(Translator((), config, Hyper(), both), ["axb"], strict=True)
