"""Pairs of a source and a target text, read from files.

What is read: a TSV file (source, tab, target), two line-aligned files "SOURCE,TARGET", a JSONL
file (objects with "source" and "target", "src" and "tgt", or "translation" with two texts by language:
from the first language of the training file's first line to the other, in every line and file), or a
file of SCAN's lines (IN: source OUT: target). Each may be gzipped, or a member of a zip archive:
"archive.zip" if one member holds data, else "archive.zip:member".

Files are UTF-8, with or without a byte order mark; a line ends with \\n or \\r\\n, or in a file without
any \\n with \\r, and the last one need not end. The text between is taken as it stands: nothing is normalised
or stripped. Lines that hold no pair are skipped, and counted in the notes; so are lines that hold a \\r.
"""

import dataclasses
import gzip
import hashlib
import io
import json
import lzma
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from transformer_jax.errors import DataError

MAX_BYTES = 1 << 30  # of a file, unpacked
ENCRYPTED = 1  # a bit of a zip member's flags
# Damage as gzip, zipfile and what they unpack with report it. zipfile says NotImplementedError of a compression that it
# lacks, such as that of another archiver; no list of those that it has is public.
UNPACKING = (gzip.BadGzipFile, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError)
JSON_ENDINGS = (".jsonl", ".ndjson", ".json")
JSON_KEYS = (("source", "target"), ("src", "tgt"))
BLANK, ONE_SIDED, MANY_TABS = "blank line", "one-sided line", "line of more than two columns"
NO_PAIR = "line that is no JSON pair"


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Texts side by side, none of them blank. notes: what was read and what was skipped, in lines for a person.

    sha256: of the files' contents, unpacked. languages: (source's, target's) where the file names them, else ().
    """

    name: str
    sources: list[str]
    targets: list[str]
    notes: list[str]
    sha256: str
    languages: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.sources)

    def part(self, rows: Sequence[int]) -> "Pairs":
        """The pairs of these numbers."""
        sources, targets = ([texts[i] for i in rows] for texts in (self.sources, self.targets))
        return dataclasses.replace(self, sources=sources, targets=targets, notes=[])


def read_pairs(path: str, *, option: str = "--pairs", strict: bool = False, languages: Sequence[str] = ()) -> Pairs:
    """The pairs of a file, or of two files "SOURCE,TARGET"; `languages`: those of the training file, if it names them.

    Blank lines are skipped and counted; so are lines with one side only, of more than two columns,
    or that are no JSON pair, unless `strict`: then the first such line is an error. In line-aligned
    files a line that is blank in one of them loses its pair.
    Raises DataError, naming `option`, for a file that is missing, unreadable, damaged, empty or not
    UTF-8 (with line and offset), for files of unequal length, and where no pair is left.
    """
    given = f"{option}={path!r}"
    files = files_of(path)
    if not all(files):
        raise DataError(f"{given}: a file is wanted on both sides of the comma")
    unpacked = [_content(file, option) for file in files]
    contents = [content for content, _ in unpacked]
    texts = [_text(content, f"{option}={file!r}") for file, content in zip(files, contents, strict=True)]
    lines = [split_lines(text) for text in texts]
    if len(lines) == 2 and len(lines[0]) != len(lines[1]):
        counts = " and ".join(f"{len(part):,} lines in {file!r}" for part, file in zip(lines, files, strict=True))
        raise DataError(f"{option}: the files are not line by line: {counts}")
    name = " + ".join(Path(file).name for file in files)
    read = _Reader(given, name, strict)
    languages = list(languages)
    columns = _columns(unpacked[0][1], lines, languages)
    for number, row in enumerate(columns, 1):
        read.line(number, row)
    if not read.sources:
        raise DataError(f"{given} holds no pair: {read.skipped() or 'it is blank'}")
    summary = "; skipped ".join(part for part in (f"{name}: {len(read.sources):,} pairs", read.skipped()) if part)
    inside = sum("\r" in source or "\r" in target for source, target in zip(read.sources, read.targets, strict=True))
    if inside:
        summary += f"; a carriage return is text in {inside:,} of them, as it ends no line where \\n does"
    if languages:
        summary += f"; {languages[0]} is the source, {languages[1]} the target"
    digest = hashlib.sha256(b"".join(hashlib.sha256(content).digest() for content in contents))
    return Pairs(name, read.sources, read.targets, [summary], digest.hexdigest(), tuple(languages))


class _Reader:
    """Takes rows of columns, keeps those that are pairs, and counts the others."""

    def __init__(self, given: str, name: str, strict: bool):
        self.given, self.name, self.strict = given, name, strict
        self.sources: list[str] = []
        self.targets: list[str] = []
        self.blank = 0
        self.faults: dict[str, list[int]] = {}

    def line(self, number: int, row: "list[str] | str") -> None:
        """One line: its columns, or what is wrong with it."""
        if isinstance(row, str):
            return self._fault(number, row)
        empty = [not column.strip() for column in row]
        if all(empty):
            self.blank += 1
        elif len(row) > 2:
            self._fault(number, MANY_TABS)
        elif len(row) < 2 or any(empty):
            self._fault(number, ONE_SIDED)
        else:
            self.sources.append(row[0])
            self.targets.append(row[1])

    def _fault(self, number: int, kind: str) -> None:
        if self.strict:
            raise DataError(f"{self.given}, line {number}: a {kind}; without --strict it is skipped and counted")
        self.faults.setdefault(kind, []).append(number)

    def skipped(self) -> str:
        """What was skipped, in words; "" if nothing was."""
        blank = [_count(self.blank, BLANK)] if self.blank else []
        faults = [f"{_count(len(lines), kind)} (first: line {lines[0]})" for kind, lines in self.faults.items()]
        return ", ".join(blank + faults)


def _count(number: int, kind: str) -> str:
    return f"{number:,} {kind if number == 1 else kind.replace('line', 'lines').replace(' is ', ' are ')}"


def _columns(name: str, lines: list[list[str]], languages: list[str]) -> Iterator["list[str] | str"]:
    """Each line as its columns, or as the kind of its fault; `languages` as _json_pair has them."""
    if len(lines) == 2:
        return (list(row) for row in zip(*lines, strict=True))
    first = next((line for line in lines[0] if line.strip()), "")
    if name.lower().removesuffix(".gz").endswith(JSON_ENDINGS) or isinstance(_json_pair(first, []), list):
        return (_json_pair(line, languages) for line in lines[0])
    if first.startswith("IN: ") and " OUT: " in first and "\t" not in first:
        return (line.removeprefix("IN: ").split(" OUT: ") for line in lines[0])
    return (line.split("\t") for line in lines[0])


def _json_pair(line: str, languages: list[str]) -> "list[str] | str":
    """The two sides of a line; of a "translation" in the order of `languages`, or of the first, which it remembers."""
    if not line.strip():
        return [""]
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError):  # the latter: brackets in brackets, a thousand deep
        return NO_PAIR
    row = row if isinstance(row, dict) else {}
    if isinstance(row.get("translation"), dict):
        found = row["translation"]
        languages[:] = languages or (found if len(found) == 2 else [])
        sides = [found[name] for name in languages] if set(found) == set(languages) else []
    else:
        sides = next(([row.get(key) for key in keys] for keys in JSON_KEYS if set(keys) & set(row)), [])
    if len(sides) != 2 or not all(side is None or isinstance(side, str) for side in sides):
        return NO_PAIR
    sides = [side or "" for side in sides]
    # JSON can spell half of a surrogate pair, which is no text.
    if any("\ud800" <= letter <= "\udfff" for side in sides for letter in side):
        return NO_PAIR
    return sides if any(side.strip() for side in sides) else ONE_SIDED


def split_lines(text: str) -> list[str]:
    """Lines without their endings; a last line break ends a line and begins none.

    Where there is a \\n at all, a \\r alone is text: a stray one in one of two line-aligned files would shift all
    that follows. Not str.splitlines, which also parts at characters that are text: U+2028, U+0085, \\v, \\f.
    """
    lines = text.replace("\r\n", "\n").split("\n") if "\n" in text else text.split("\r")
    return lines[:-1] if not lines[-1] else lines


# --- files ---------------------------------------------------------------------


def files_of(path: str) -> list[str]:
    """The one or two files that `path` names; a comma in a file's own name is no border.

    Raises DataError for an empty path.
    """
    if not path:
        raise DataError("no file of pairs is given: --pairs=FILE, or --pairs=SOURCE,TARGET")
    both = [(path[:i], path[i + 1 :]) for i, letter in enumerate(path) if letter == ","]
    if not both or _there(path):
        return [path]
    return list(next((two for two in both if all(_there(outer_file(part)) for part in two)), both[0]))


def _there(file: str) -> bool:
    try:
        return Path(file).exists()
    except OSError:  # a name that is too long: reading it says so
        return False


def outer_file(file: str) -> str:
    """The file on disk: what stands before the member's name of a zip archive."""
    before, colon, _ = file.partition(".zip:")
    return f"{before}.zip" if colon else file


def _content(file: str, option: str) -> tuple[bytes, str]:
    """The bytes of a file, unpacked, and its name, or that of the archive's member."""
    given, path, name = f"{option}={file!r}", Path(outer_file(file)), file

    def refuse(why: str) -> NoReturn:
        raise DataError(f"{given}{why}")

    try:
        if path.is_dir():
            refuse(" is a directory: give a file of pairs")
        if not path.exists():
            refuse(f": no such file as {str(path)!r}")
        if not path.is_file():
            refuse(" is not a regular file")
        with path.open("rb") as stream:
            content = _limited(stream, refuse)
        if content.startswith((b"PK\x03\x04", b"PK\x05\x06")):  # the latter: an archive of nothing
            name, content = _member(content, file, refuse)
        elif outer_file(file) != file:
            refuse(" is no zip archive")
        if content.startswith(b"\x1f\x8b"):
            with gzip.open(io.BytesIO(content)) as stream:
                content = _limited(stream, refuse)
    except UNPACKING as error:
        raise DataError(f"{given} is damaged or cannot be unpacked: {error}") from error
    except OSError as error:
        raise DataError(f"{given} cannot be read: {error.strerror or error}") from error
    if not content:
        refuse(" is empty")
    return content, name


def _limited(stream: Any, refuse: Callable[[str], NoReturn]) -> bytes:
    content = stream.read(MAX_BYTES + 1)
    return content if len(content) <= MAX_BYTES else refuse(f" has more than {MAX_BYTES} bytes")


def _member(content: bytes, file: str, refuse: Callable[[str], NoReturn]) -> tuple[str, bytes]:
    """(name, bytes) of the member of a zip archive that is asked for, or the only one that looks like data."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        names = [info.filename for info in archive.infolist() if not info.is_dir()]
        wanted = file.partition(".zip:")[2]
        if not wanted:
            data = [name for name in names if not name.rpartition("/")[2].startswith(("_", ".")) and name[0] != "_"]
            if len(data) != 1:
                refuse(f" holds {len(data)} files of data: say which, as archive.zip:MEMBER ({_some(names)})")
            wanted = data[0]
        elif wanted not in names:
            refuse(f": no such member; it holds {_some(names)}")
        if archive.getinfo(wanted).flag_bits & ENCRYPTED:
            refuse(f": its member {wanted} is encrypted")
        with archive.open(wanted) as stream:
            return wanted, _limited(stream, refuse)


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")


def _text(content: bytes, given: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # With a byte order mark, the codec counts from behind it.
        place = error.start + (3 if content.startswith(b"\xef\xbb\xbf") and len(error.object) < len(content) else 0)
        end = b"\n" if b"\n" in content else b"\r"
        line = content[:place].count(end) + 1
        raise DataError(
            f"{given} is not UTF-8: byte 0x{content[place]:02x} in line {line}, at offset {place}"
        ) from error
