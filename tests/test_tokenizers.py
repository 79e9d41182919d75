"""Tokenizers: what comes back, what is unknown, what is a mark and what is text."""

import json
import sys
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_jax.data.subwords import Bpe, File
from transformer_jax.data.tasks import END, PAD, START
from transformer_jax.data.tokenizers import FIRST, UNKNOWN, Bytes, Characters, Decomposed, Symbols, Tokenizer
from transformer_jax.data.vocabularies import Tokenizers, choose, fit, from_dict
from transformer_jax.errors import DataError

TEXT = "a\n\nb\t c\r\n  é e\u0301 漢字 😀👩‍👩‍👧 ﬁ\x00\u2028 </s><s><pad> <|endoftext|> "
ANY = st.text(st.characters(blacklist_categories=["Cs"]))


@pytest.fixture(scope="module")
def bpe() -> Bpe:
    pytest.importorskip("tokenizers")
    return Bpe.fit(["the cat sat on the mat", "die Katze saß auf der Matte 😀", TEXT] * 3, 320)


def wordpiece() -> str:
    """A lower-casing tokenizer.json with BERT's marks, a post-processor and truncation."""
    package = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "cat": 1, "[PAD]": 2, "the": 3, "[SEP]": 4, "##s": 5, "[CLS]": 6}
    model = package.Tokenizer(package.models.WordPiece(words, unk_token="[UNK]"))
    model.normalizer = package.normalizers.BertNormalizer(lowercase=True)
    model.pre_tokenizer = package.pre_tokenizers.BertPreTokenizer()
    model.post_processor = package.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 6), ("[SEP]", 4)]
    )
    model.decoder = package.decoders.WordPiece()
    model.add_special_tokens(["[UNK]", "[PAD]", "[SEP]", "[CLS]"])
    model.enable_truncation(2)
    model.enable_padding(length=9)
    return model.to_str()


@pytest.fixture(scope="module")
def every(bpe: Bpe) -> dict[str, Tokenizer]:
    made = [Bytes(), bpe, File(bpe.json), Characters.fit([TEXT]), Decomposed.fit([TEXT]), Symbols.fit([TEXT])]
    return {tokenizer.kind: tokenizer for tokenizer in made}


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    show = tokenizer.shower()
    return [*(show([i]) for i in ids), show([])]


@settings(deadline=None)
@given(text=ANY)
def test_o4_every_string_comes_back(bpe, text):
    for tokenizer in (Bytes(), bpe):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == "".join(streamed(tokenizer, ids)) == text
        assert all(UNKNOWN < i < tokenizer.size for i in ids) or tokenizer.kind == "bytes"
        assert not {PAD, START, END} & set(ids)
    assert Characters.fit([text]).decode(Characters.fit([text]).encode(text)) == text
    # Halves of surrogate pairs are no text, and no error.
    assert bpe.decode(bpe.encode(text + "\ud800")) == Bytes().decode(Bytes().encode(text + "\ud800")) == text + "?"


@pytest.mark.parametrize("kind", ["bytes", "bpe", "file", "chars"])
def test_o4_o5_hard_text_comes_back_and_streams(every, kind):
    tokenizer = every[kind]
    ids = tokenizer.encode(TEXT)
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids) == TEXT
    assert not {PAD, START, END} & set(ids)
    if kind in ("bytes", "bpe"):
        assert "" in pieces  # some character took two ids, and its first one showed nothing
    assert tokenizer.encode_all([TEXT, "", "cat"]) == [ids, [], tokenizer.encode("cat")]


@settings(deadline=None)
@given(text=ANY)
def test_decomposed_text_comes_back_composed(text):
    tokenizer = Decomposed.fit([text])
    ids = tokenizer.encode(text)
    assert len(ids) == len(unicodedata.normalize("NFD", text)) and UNKNOWN not in ids
    assert tokenizer.decode(ids) == "".join(streamed(tokenizer, ids)) == unicodedata.normalize("NFC", text)


def test_letters_are_shown_when_nothing_can_join_them():
    tokenizer = Decomposed.fit(["각éஔa"])
    ids = tokenizer.encode("각éஔa")
    assert [tokenizer.piece(i) for i in ids[:3]] == ["ᄀ", "ᅡ", "ᆨ"] and len(ids) == 8
    # A vowel, a tail, an accent, and a sign of Tamil that is no accent join what stands before them.
    assert streamed(tokenizer, ids) == ["", "", "", "각", "", "é", "", "ஔ", "a"]
    assert tokenizer.encode("가") == ids[:2] and tokenizer.encode("나") == [UNKNOWN, ids[1]]


def test_symbols(every):
    phones = Symbols.fit(["ʃ a t", "k a t̪ a"])
    assert phones.symbols == ("a", "k", "t", "t̪", "ʃ") and phones.size == FIRST + 5
    assert phones.decode(phones.encode("  k  a\tt̪ ")) == "k a t̪"
    assert streamed(phones, [FIRST, PAD, FIRST + 4, END]) == ["a", "", " ʃ", "", ""]
    assert phones.encode("a x") == [FIRST, UNKNOWN] and phones.decode([FIRST, UNKNOWN]) == "a \ufffd"


def test_letters_that_differ_in_code_points_differ():
    letters = Characters.fit(["é e\u0301"])
    assert letters.symbols == (" ", "e", "é", "\u0301") and letters.encode("éE") == [FIRST + 2, UNKNOWN]


@pytest.mark.parametrize("kind", ["bytes", "bpe", "file", "chars", "nfd", "symbols"])
def test_marks_are_not_text(every, kind):
    """A real END is never padding; what a text spells out is no mark; ids past END are not shown."""
    tokenizer = every[kind]
    assert len({PAD, START, END, UNKNOWN}) == 4
    assert not {PAD, START, END} & set(tokenizer.encode("</s> <s> <pad> [PAD] <unk>"))
    ids = tokenizer.encode("</s>")
    assert tokenizer.decode([START, *ids, PAD, END, *ids]) == tokenizer.decode(ids)
    assert tokenizer.decode([END, *ids]) == "" == tokenizer.decode([])
    assert [tokenizer.piece(i) for i in (PAD, START, END)] == ["<pad>", "<s>", "</s>"]
    names = [tokenizer.piece(i) for i in range(tokenizer.size)]
    assert all(name and name.isprintable() and " " not in name for name in names)
    assert len(set(names)) == tokenizer.size


def test_pieces_can_be_read(bpe):
    assert Bytes().piece(3 + 0x41) == "A" and Bytes().piece(3 + 10) == "\\n" and Bytes().piece(3 + 0xE9) == "\\xe9"
    assert "␣the" in [bpe.piece(i) for i in range(bpe.size)]
    assert Characters(("\u0301", " ")).piece(FIRST + 1) == "␣"


@pytest.mark.parametrize("kind", ["bytes", "bpe", "file", "chars", "nfd", "symbols"])
def test_written_down_and_read(every, kind):
    tokenizer = every[kind]
    again = from_dict(json.loads(json.dumps(tokenizer.to_dict())))
    assert again == tokenizer and again.sha256 == tokenizer.sha256 and again.size == tokenizer.size
    assert again.encode(TEXT) == tokenizer.encode(TEXT)
    assert len({t.sha256 for t in every.values()}) == len(every)
    both = Tokenizers(every["chars"], tokenizer)
    assert Tokenizers.from_dict(json.loads(json.dumps(both.to_dict()))) == both
    assert both.shared == (kind == "chars") and both.source_vocab_size == (0 if both.shared else every["chars"].size)
    assert both.source_ids("a")[-1] == END and both.source_ids("")[:-1] == []


def test_a_kind_of_a_later_version():
    with pytest.raises(DataError, match="kind 'unigram': this version knows bytes, chars, nfd, symbols, bpe, file"):
        from_dict({"kind": "unigram"})


# --- bpe and files -------------------------------------------------------------------


def test_bpe_is_fitted_alike_and_no_larger_than_asked(bpe):
    texts = ["the cat sat on the mat", "die Katze saß auf der Matte 😀", TEXT] * 3
    assert Bpe.fit(texts, 320) == bpe and bpe.size == 320
    assert Bpe.fit(texts, 260).size == 260 and Bpe.fit(["ab"], 4000).size == 260
    assert len(bpe.encode("the mat")) < len("the mat")


def test_byte_letters_are_the_package_s_own():
    package = pytest.importorskip("tokenizers")
    from transformer_jax.data.subwords import _byte_letters

    assert set(_byte_letters()) == set(package.pre_tokenizers.ByteLevel.alphabet())
    assert sorted(_byte_letters().values()) == list(range(256))


def test_marks_of_a_file_take_our_ids(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(wordpiece(), encoding="utf-8")
    tokenizer = File.read(str(path))
    path.unlink()
    # Its own order behind the marks: cat, the, ##s.
    assert tokenizer.size == 7 and tokenizer.encode("The CATS") == [5, 4, 6]
    assert tokenizer.encode("cat " * 5) == [4] * 5  # neither cut nor filled up, and no marks of its own
    assert tokenizer.encode("the dog") == [5, UNKNOWN]
    assert set(tokenizer.encode("[SEP] [CLS][PAD]")) == {UNKNOWN}  # the file calls them marks; in a text they are text
    assert tokenizer.decode([START, 5, 4, 6, END, 4, PAD]) == "the cats"
    assert "".join(streamed(tokenizer, [5, 4, 6, 5])) == "the cats the"


VOCABULARY = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "a": 4, "b": 5}


@pytest.mark.parametrize("kind", ["WordLevel", "WordPiece", "Unigram", "BPE with marks as plain tokens"])
def test_a_mark_that_a_text_spells_out_is_unknown_where_the_file_takes_it_for_one(kind, tmp_path):
    """Such files give the mark's own id for it, special tokens or not: END in a text would end it there."""
    package = pytest.importorskip("tokenizers")
    models = package.models
    text = "a </s> b <pad> <s> a"
    if kind == "Unigram":
        pieces = [(name, 0.0 if name.startswith("<") else -3.0) for name in VOCABULARY] + [("\u2581", -4.0)]
        model = package.Tokenizer(models.Unigram(pieces, unk_id=3))
        model.pre_tokenizer = package.pre_tokenizers.Metaspace()
    elif kind.startswith("BPE"):
        model = package.Tokenizer(models.BPE({"a": 0, "b": 1}, []))
        model.add_tokens(["<pad>", "<s>", "</s>"])
        text = "a</s>b<pad><s>a"
    else:
        model = package.Tokenizer(getattr(models, kind)(VOCABULARY, unk_token="<unk>"))
        model.pre_tokenizer = package.pre_tokenizers.WhitespaceSplit()
    if not kind.startswith("BPE"):
        model.add_special_tokens(["<pad>", "<s>", "</s>", "<unk>"])
    model.save(str(tmp_path / "tokenizer.json"))
    tokenizer = File.read(str(tmp_path / "tokenizer.json"))
    rows = tokenizer.encode_all([text, "a"])
    assert not {PAD, START, END} & {i for row in rows for i in row}
    assert rows[0].count(UNKNOWN) == 3 and tokenizer.unknown([text, "a"], rows) == [3, 0]
    assert "b" in tokenizer.decode(rows[0])


def test_a_file_without_marks_gets_them(bpe):
    tokenizer = File(bpe.json)
    assert tokenizer.size == bpe.size and tokenizer.encode(TEXT) == bpe.encode(TEXT)


def test_files_that_are_none(tmp_path):
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    with pytest.raises(
        DataError, match=r"--tokenizer='bites': no such file; give one, or bytes, chars, nfd, symbols, bpe"
    ):
        fit(["a"], ["b"], source="bites")
    for content in (b"{}", b"\xff", b""):
        path.write_bytes(content)
        with pytest.raises(DataError, match="is no tokenizer.json") as caught:
            File.read(str(path))
        assert "\n" not in str(caught.value)


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r'pip install "transformer-jax\[data\]"'):
        fit(["a b c"], ["d"], source="bpe")
    assert fit(["abc"], ["d e"])[0].source.kind == "chars"  # the others do not need it


# --- the choice ------------------------------------------------------------------------


def test_choice_by_the_data():
    words = ["abandon", "abbé", "c'est", "rendez-vous"]
    phones = ["a b ɑ̃ d ɔ̃", "a b e", "s ɛ", "ʁ ɑ̃ d e v u"]
    sentences = [f"word{i} stands in sentence {i}" for i in range(300)]
    assert [choose(side) for side in (words, phones, sentences)] == ["chars", "symbols", "bpe"]
    assert choose([*words * 24, "two words", "two words", "two words", "two words"]) == "chars"  # 96% of 100
    assert choose([*words * 24, *["two words"] * 6]) == "bpe"
    assert choose([f"{i} {i + 1}" for i in range(255)]) == "symbols" != choose([f"{i} {i + 1}" for i in range(256)])
    assert choose(["a b", "a"]) != "symbols"
    syllables = [chr(0xAC00 + 37 * i) for i in range(257)]
    assert choose(syllables) == "nfd" and choose(syllables[:256]) == "chars"
    assert choose([chr(0x4E00 + i) for i in range(300)]) == "chars"  # nothing to take apart
    assert choose([*syllables, "e\u0301"]) == "chars"  # it would not come back as it was


def test_sides_of_one_kind_share_a_vocabulary():
    made, note = fit(["ab"], ["b c"])
    assert (made.source.kind, made.target.kind) == ("chars", "symbols")
    assert (made.vocab_size, made.source_vocab_size) == (FIRST + 2, FIRST + 2) and not made.shared
    assert note.startswith("tokenizers: chars of the source, 6 ids; symbols of the target, 6 ids")
    assert note.endswith("(source and target: chosen by the data)")
    made, note = fit(["ab"], ["b c"], source="chars")
    assert made.shared and made.source is made.target and made.source_vocab_size == 0
    assert made.vocab_size == FIRST + 4 and note == "tokenizers: chars of both sides, 8 ids"
    made, _ = fit(["ab"], ["b c"], source="chars", target="bytes")
    assert (made.source.kind, made.target.kind, made.vocab_size) == ("chars", "bytes", 259)
    made, note = fit(["ab"], ["b c"], target="bytes")
    assert (made.source.kind, made.target.kind) == ("chars", "bytes") and note.endswith("(source: chosen by the data)")
