"""Pairs from files: what is read, what is skipped and said, what is refused."""

import gzip
import json
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transformer_jax.data.cmudict import cmudict_pairs, without_stress
from transformer_jax.data.pairs import read_pairs, split_lines
from transformer_jax.data.pairs_task import hold_out, place_of
from transformer_jax.errors import DataError

WORDS = [
    ("Ärger", "ɛ ʁ ɡ ɐ"),
    ("null", "nan"),
    ("NA", " keeps  its spaces "),
    ("漢\u2028字\x0b", "\x85 e\u0301 \x0c😀"),
]
TSV = "".join(f"{a}\t{b}\n" for a, b in WORDS)


def pairs_of(path: Path | str, **options) -> list[tuple[str, str]]:
    read = read_pairs(str(path), **options)
    return list(zip(read.sources, read.targets, strict=True))


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def zipped(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


# --- what is read ----------------------------------------------------------------


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("last", [True, False], ids=["ended", "open"])
@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "bom"])
def test_line_endings_and_marks(tmp_path, end, last, mark):
    text = mark + TSV.replace("\n", end)
    assert pairs_of(written(tmp_path, "a.tsv", text if last else text.removesuffix(end))) == WORDS
    sides = [mark + end.join(side) + end * last for side in zip(*WORDS, strict=True)]
    for name, side in zip("st", sides, strict=True):
        written(tmp_path, name, side)
    assert pairs_of(f"{tmp_path / 's'},{tmp_path / 't'}") == WORDS


@given(st.lists(st.text(st.characters(blacklist_characters="\r\n", blacklist_categories=["Cs"])), min_size=1))
def test_lines_are_what_stands_between_line_breaks(lines):
    for end in ("\n", "\r\n", "\r"):
        assert split_lines("".join(line + end for line in lines)) == lines
        if lines[-1] and (end == "\r" or len(lines) > 1):
            assert split_lines(end.join(lines)) == lines


def test_a_carriage_return_in_a_line_shifts_no_pair(tmp_path):
    """Where \\n ends lines, \\r is text: as many of them in both files would otherwise move all pairs between."""
    written(tmp_path, "s", "a\rx\nb\nc\r\n")
    written(tmp_path, "t", "A\nB\nC\ry\n")
    read = read_pairs(f"{tmp_path / 's'},{tmp_path / 't'}")
    assert list(zip(read.sources, read.targets, strict=True)) == [("a\rx", "A"), ("b", "B"), ("c", "C\ry")]
    (note,) = read.notes
    assert note.startswith("s + t: 3 pairs; a carriage return is text in 2 of them")


def test_json_lines(tmp_path):
    a, b = "a\tb\n\u2028", "c"
    rows = [{"source": a, "target": b}, {"tgt": b, "src": a}, {"id": 7, "translation": {"de": a, "en": b}}]
    path = written(tmp_path, "a.jsonl", "\n".join(json.dumps(row) for row in rows))
    assert pairs_of(path) == [(a, b)] * 3
    assert pairs_of(zipped(tmp_path / "a.zip", {"x/a.jsonl.gz": gzip.compress(path.read_bytes())})) == [(a, b)] * 3
    bad = ["{", "[1, 2]", '{"source": "a"}', '{"source": 1, "target": 2}', '{"text": "x"}', "", '"ab"']
    bad += ['{"source": "\\ud800", "target": "b"}', '{"translation": {"a": "x"}}', '{"source": "", "target": ""}']
    read = read_pairs(str(written(tmp_path, "b.json", "\n".join([*bad, json.dumps(rows[0])]))))
    assert (read.sources, read.targets) == ([a], [b])
    assert read.notes == [
        "b.json: 1 pairs; skipped 1 blank line, 7 lines that are no JSON pair (first: line 1), "
        "2 one-sided lines (first: line 3)"
    ]


def test_translations_go_one_way(tmp_path):
    """From the first line's first language, whatever the order in other lines; in another file as in training."""
    lines = ['{"translation": {"de": "A", "en": "a"}}', '{"translation": {"en": "b", "de": "B"}}']
    train = read_pairs(str(written(tmp_path, "train.jsonl", "\n".join(lines))))
    assert (train.sources, train.targets, train.languages) == (["A", "B"], ["a", "b"], ("de", "en"))
    assert train.notes == ["train.jsonl: 2 pairs; de is the source, en the target"]
    path = str(written(tmp_path, "dev.jsonl", "\n".join(reversed(lines))))
    assert read_pairs(path).sources == ["b", "a"]
    assert read_pairs(path, languages=train.languages).sources == ["B", "A"]
    other = str(written(tmp_path, "other.jsonl", '{"translation": {"fr": "A", "en": "a"}}'))
    with pytest.raises(DataError, match="holds no pair: 1 line that is no JSON pair"):
        read_pairs(other, languages=train.languages)


def test_json_lines_under_another_name(tmp_path):
    assert pairs_of(written(tmp_path, "a.txt", '{"source": "a", "target": "b"}\n')) == [("a", "b")]
    assert pairs_of(written(tmp_path, "b.tsv", '{"a": 1}\tb\n')) == [('{"a": 1}', "b")]


def test_brackets_without_an_end_are_no_pair(tmp_path):
    path = written(tmp_path, "a.jsonl", "[" * 100_000 + '\n{"source": "a", "target": "b"}\n')
    assert read_pairs(str(path)).notes == ["a.jsonl: 1 pairs; skipped 1 line that is no JSON pair (first: line 1)"]


def test_scan_lines(tmp_path):
    path = written(tmp_path, "scan.txt", "IN: jump twice OUT: I_JUMP I_JUMP\nIN: run OUT: I_RUN\nIN: walk OUT: \n")
    read = read_pairs(str(path))
    assert (read.sources, read.targets) == (["jump twice", "run"], ["I_JUMP I_JUMP", "I_RUN"])
    assert read.notes == ["scan.txt: 2 pairs; skipped 1 one-sided line (first: line 3)"]


def test_packed_files(tmp_path):
    plain = written(tmp_path, "a.tsv", TSV)
    packed = gzip.compress(TSV.encode())
    assert pairs_of(written(tmp_path, "a.tsv.gz", packed)) == pairs_of(plain) == WORDS
    members = {"b/a.tsv": TSV.encode(), "_about.txt": b"x", "__MACOSX/a.tsv": b"x", "c/": b""}
    archive = zipped(tmp_path / "a.zip", members)
    assert pairs_of(archive) == pairs_of(f"{archive}:b/a.tsv") == WORDS
    sides = {name: "\n".join(side).encode() for name, side in zip("st", zip(*WORDS, strict=True), strict=True)}
    two = zipped(tmp_path / "two.zip", sides)
    assert pairs_of(f"{two}:s,{two}:t") == WORDS
    # The contents are what counts, not how they are packed.
    assert len({read_pairs(str(path)).sha256 for path in (plain, tmp_path / "a.tsv.gz", archive)}) == 1
    assert read_pairs(f"{two}:s,{two}:t").sha256 != read_pairs(f"{two}:t,{two}:s").sha256


def test_a_comma_in_a_name(tmp_path):
    assert pairs_of(written(tmp_path, "a,b.tsv", TSV)) == WORDS
    written(tmp_path, "c,d", "x\n")
    written(tmp_path, "e", "y\n")
    assert pairs_of(f"{tmp_path / 'c,d'},{tmp_path / 'e'}") == [("x", "y")]


# --- what is skipped --------------------------------------------------------------


def test_o2_lines_that_are_no_pairs_are_skipped_and_counted(tmp_path):
    lines = ["a\tb", "", "c\td\te", "alone", "\tright", "left\t", " \t ", "f\tg", "\t\t", "h\ti\tj\tk"]
    path = written(tmp_path, "a.tsv", "\n".join(lines) + "\n\n")
    read = read_pairs(str(path))
    assert (read.sources, read.targets) == (["a", "f"], ["b", "g"])
    assert read.notes == [
        "a.tsv: 2 pairs; skipped 4 blank lines, 2 lines of more than two columns (first: line 3), "
        "3 one-sided lines (first: line 4)"
    ]
    with pytest.raises(DataError, match=r"--dev='.*a.tsv', line 3: a line of more than two columns; without --strict"):
        read_pairs(str(path), option="--dev", strict=True)
    blank = written(tmp_path, "blank.tsv", "a\tb\n\n\nc\td\n")
    assert len(read_pairs(str(blank), strict=True)) == 2  # a blank line hides nothing


def test_o2_a_blank_line_loses_its_pair_and_shifts_none(tmp_path):
    written(tmp_path, "s", "a\n\nb\nc\n \n")
    written(tmp_path, "t", "A\nX\nB\n\n\n")
    both = f"{tmp_path / 's'},{tmp_path / 't'}"
    read = read_pairs(both)
    assert (read.sources, read.targets) == (["a", "b"], ["A", "B"])
    assert read.notes == ["s + t: 2 pairs; skipped 1 blank line, 2 one-sided lines (first: line 2)"]
    with pytest.raises(DataError, match="line 2: a one-sided line"):
        read_pairs(both, strict=True)


# --- what is refused ---------------------------------------------------------------


def test_unequal_files(tmp_path):
    written(tmp_path, "s", "a\nb\n\n")
    written(tmp_path, "t", "A\nB\n")
    with pytest.raises(DataError, match=r"3 lines in '.*s' and 2 lines in '.*t'"):
        read_pairs(f"{tmp_path / 's'},{tmp_path / 't'}")


@pytest.mark.parametrize(
    "name,content,words",
    [
        ("a.tsv", b"", ["is empty"]),
        ("a.tsv.gz", gzip.compress(b"", mtime=0), ["is empty"]),
        ("a.tsv", b"\n \n\t\n", ["holds no pair", "3 blank lines"]),
        ("a.tsv", b"\xef\xbb\xbf", ["holds no pair", "blank"]),
        ("a.tsv", b"a b\nc d\n", ["holds no pair", "2 one-sided lines (first: line 1)"]),
        ("a.tsv", b"a\tb\tc\n" * 7, ["holds no pair", "7 lines of more than two columns"]),
        ("a.tsv", b"a\tb\r\nc\r\xff\n", ["not UTF-8", "0xff", "line 2", "offset 7"]),
        ("a.tsv", b"a\tb\rc\r\xff\r", ["not UTF-8", "0xff", "line 3", "offset 6"]),
        ("a.tsv", b"\xef\xbb\xbfa\tb\nc\xc3\td", ["not UTF-8", "0xc3", "line 2", "offset 8"]),
        ("a.tsv", "a\tb\n".encode("utf-16"), ["not UTF-8", "0xff", "line 1", "offset 0"]),
        ("a.tsv.gz", gzip.compress(TSV.encode(), mtime=0)[:-9], ["damaged"]),
        ("a.tsv.gz", b"\x1f\x8b" + b"x" * 40, ["damaged"]),
        ("a.zip", b"PK\x03\x04" + b"x" * 40, ["damaged"]),
        ("a.zip", TSV.encode(), None),
    ],
)
def test_damaged_files(tmp_path, name, content, words):
    path = written(tmp_path, name, content)
    if words is None:  # the name does not matter
        assert pairs_of(path) == WORDS
        return
    with pytest.raises(DataError) as caught:
        read_pairs(str(path))
    message = str(caught.value)
    assert all(word in message for word in [*words, str(path), "--pairs"]) and "\n" not in message, message


@pytest.mark.parametrize(
    "way,words",
    [("encrypted", "its member a.tsv is encrypted"), ("unknown", "cannot be unpacked"), ("lzma", "is damaged")],
)
def test_archives_that_cannot_be_unpacked(tmp_path, way, words):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA if way == "lzma" else zipfile.ZIP_STORED) as archive:
        archive.writestr("a.tsv", TSV)
    content = bytearray(path.read_bytes())
    here, there = content.index(b"PK\x03\x04"), content.index(b"PK\x01\x02")
    if way == "encrypted":  # the flags in the member's own header and in the directory's
        content[here + 6] = content[there + 8] = 1
    elif way == "unknown":  # and the compression
        content[here + 8] = content[there + 10] = 99
    else:  # the properties that its stream begins with
        content[here + 30 + len("a.tsv") + 4] = 255
    path.write_bytes(content)
    with pytest.raises(DataError, match=words):
        read_pairs(str(path))


def test_files_that_are_not_there(tmp_path):
    archive = zipped(tmp_path / "a.zip", {"a": b"x\ty", "b": b"x\ty", "_c": b""})
    plain = written(tmp_path, "b.zip", b"x\ty")
    for path, words in [
        (str(tmp_path / "no"), "no such file"),
        (f"{tmp_path / 'no'},{tmp_path / 'never'}", "no such file as '.*no'"),
        (str(tmp_path), "is a directory"),
        (f"{plain},", "a file is wanted on both sides of the comma"),
        (str(zipped(tmp_path / "nothing.zip", {})), "holds 0 files of data"),
        (str(archive), r"holds 2 files of data: say which, as archive.zip:MEMBER \(a, b, _c\)"),
        (f"{archive}:c", "no such member; it holds a, b, _c"),
        (f"{plain}:c", "is no zip archive"),
        ("x" * 5000, "cannot be read: File name too long"),
    ]:
        with pytest.raises(DataError, match=words):
            read_pairs(path)


# --- what is held out ---------------------------------------------------------------


def test_hold_out_follows_the_source_alone(tmp_path):
    lines = [f"word{i % 400}\tanswer {i}" for i in range(600)]
    pairs = read_pairs(str(written(tmp_path, "a.tsv", "\n".join(lines))))
    train, dev = hold_out(pairs)
    assert not set(train.sources) & set(dev.sources)
    both = list(zip(train.sources + dev.sources, train.targets + dev.targets, strict=True))
    assert sorted(both) == sorted(zip(pairs.sources, pairs.targets, strict=True))
    assert 10 <= len(set(dev.sources)) <= 32  # 20 of 400 are expected, with a deviation of 4.4
    order = read_pairs(str(written(tmp_path, "b.tsv", "\n".join([*reversed(lines), "another\tx"]))))
    assert set(hold_out(order)[1].sources) - {"another"} == set(dev.sources)
    assert [place_of("word", 20), place_of("Ärger", 20)] == [9, 7]  # alike on every machine


def test_o3_hold_out_of_few_pairs(tmp_path):
    for count in range(2, 30):
        pairs = read_pairs(str(written(tmp_path, "a.tsv", "".join(f"{i}\tx\n" for i in range(count)))))
        train, dev = hold_out(pairs)
        assert len(train) and len(dev) and len(train) + len(dev) == count
    with pytest.raises(DataError, match="one source: none is left to choose on; give --dev"):
        hold_out(read_pairs(str(written(tmp_path, "a.tsv", "a\tb\na\tc\n"))))


# --- the dictionary -----------------------------------------------------------------


def test_cmudict_parts_are_words_and_phones():
    pytest.importorskip("eng_to_ipa")
    splits, notes = cmudict_pairs(place_of)
    words = {split: set(part.sources) for split, part in splits.items()}
    assert sum(map(len, words.values())) == len(set.union(*words.values())) == 124_999  # none in two parts
    assert 0.02 < len(words["selection"]) / 124_999 < 0.03 and 0.09 < len(words["report"]) / 124_999 < 0.11
    phones = {phone for part in splits.values() for target in part.targets for phone in target.split()}
    assert len(phones) == 39 and all(phone.isalpha() for phone in phones)
    every = [pair for part in splits.values() for pair in zip(part.sources, part.targets, strict=True)]
    assert len(every) == len(set(every))
    assert {target for source, target in every if source == "a"} == {"ah", "ey"}
    assert without_stress("k er1 k b iy0") == "k er k b iy"
    assert len(notes) == 1 and "skipped 1 words" in notes[0]


def test_cmudict_needs_its_package(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match=r'pip install "transformer-jax\[data\]"'):
        cmudict_pairs(place_of)


def test_a_member_of_an_unknown_compression_is_refused_by_name(tmp_path):
    """97 is WavPack's: zipfile reads the archive's list, and then says that it is not implemented."""
    raw = zipped(tmp_path / "a.zip", {"a.tsv": TSV.encode()}).read_bytes()
    for header, at in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        place = raw.index(header) + at
        raw = raw[:place] + (97).to_bytes(2, "little") + raw[place + 2 :]
    path = written(tmp_path, "b.zip", raw)
    with pytest.raises(DataError, match=r"b.zip' is damaged or cannot be unpacked: .*compression"):
        read_pairs(str(path))
