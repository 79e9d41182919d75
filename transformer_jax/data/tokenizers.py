"""Text to ids and back: what all tokenizers do, and those that need no package.

In every kind 0 is PAD, 1 START, 2 END, and 3 UNKNOWN where there can be one.

    bytes          3 + byte of the UTF-8 text: gives back every string
    bpe            byte-level byte-pair encoding, trained on the training side: gives back every string
    chars          the code points of the training side as they stand (é in one code point and in
                   two are different texts)
    nfd            the code points of the canonical decomposition (NFD): a syllable of Hangul is its letters, é is e and
                   an accent. Gives back the composed form (NFC) of a text
    symbols        what stands between white space: phones, words. Runs of white space come back as one
                   space, and none at the ends
    PATH           a Hugging Face tokenizer.json. What its normaliser drops (case, accents, line
                   breaks) does not come back; its own marks of padding, beginning, end and the unknown
                   take the ids above, by their usual names, and the other tokens keep their order. What
                   it lacks is counted, whatever its own mark of it is called, and if it drops it too

A vocabulary is fitted on the training side alone. What it lacks is UNKNOWN, never an error.
Text that looks like a mark ("</s>") is text; to a tokenizer.json that takes it for its mark, UNKNOWN.
"""

import abc
import codecs
import dataclasses
import functools
import hashlib
import json
import sys
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from transformer_jax.data.tasks import END, PAD, START

UNKNOWN = 3
MARKS = {PAD: "<pad>", START: "<s>", END: "</s>", UNKNOWN: "<unk>"}
KINDS = ("bytes", "chars", "nfd", "symbols", "bpe")
FIRST_BYTE, FIRST = 3, 4  # first ids that are no marks: of bytes, of the other kinds
REPLACEMENT = "\ufffd"

Shower = Callable[[Sequence[int]], str]


class Tokenizer(abc.ABC):
    """What all kinds can do; ids are plain whole numbers without START and END.

    kind: one of KINDS, or "file". size: V, marks included.
    """

    kind: ClassVar[str]

    @property
    @abc.abstractmethod
    def size(self) -> int: ...

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of a text, no marks among them but UNKNOWN."""

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each."""
        return [self.encode(text) for text in texts]

    def unknown(self, texts: Sequence[str], rows: Sequence[Sequence[int]]) -> list[int]:
        """How many symbols of each text the vocabulary lacks. rows: the texts' ids, as `encode_all` gives them."""
        return [list(row).count(UNKNOWN) for row in rows]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids up to the first END; PAD and START show as nothing."""
        shower = self.shower()
        return shower(before_end(ids)) + shower([])

    @abc.abstractmethod
    def shower(self) -> Shower:
        """A function that is given ids as they come, none at the end, and gives what can be shown: never a part of
        a character. What it gave, joined, is `decode` of all ids."""

    @abc.abstractmethod
    def piece(self, token: int) -> str:
        """A short name of an id, for tables and pictures; spaces are shown."""

    def _fields(self) -> dict[str, Any]:
        """What `from_dict` needs beside the kind."""
        return {}

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {"kind": self.kind, **self._fields()}

    @functools.cached_property
    def sha256(self) -> str:
        """Of `to_dict`: equal hashes give equal ids."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()


def before_end(ids: Iterable[int]) -> list[int]:
    """Ids up to the first END, without it."""
    kept = []
    for i in ids:
        if int(i) == END:
            break
        kept.append(int(i))
    return kept


def shown(text: str) -> str:
    """A piece of text in which spaces and what cannot be printed are visible."""
    return "".join("␣" if c == " " else c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def whole(text: str) -> str:
    """Text without halves of surrogate pairs, which UTF-8 cannot write: each becomes a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")


# --- bytes ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Bytes(Tokenizer):
    """The bytes of the UTF-8 text."""

    kind: ClassVar[str] = "bytes"

    @property
    def size(self) -> int:
        return FIRST_BYTE + 256

    def encode(self, text: str) -> list[int]:
        return [FIRST_BYTE + byte for byte in text.encode("utf-8", "replace")]

    def unknown(self, texts: Sequence[str], rows: Sequence[Sequence[int]]) -> list[int]:
        return [0] * len(texts)

    def shower(self) -> Shower:
        return utf8_shower(lambda i: bytes([i - FIRST_BYTE]) if FIRST_BYTE <= i < self.size else b"")

    def piece(self, token: int) -> str:
        if token < FIRST_BYTE:
            return MARKS[token]
        byte = token - FIRST_BYTE
        return shown(chr(byte)) if byte < 128 else f"\\x{byte:02x}"


def utf8_shower(bytes_of: Callable[[int], bytes]) -> Shower:
    """A character is shown when its last byte is there; bytes that are none are U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return lambda ids: decoder.decode(b"".join(bytes_of(int(i)) for i in ids), final=not len(ids))


# --- listed symbols --------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Listed(Tokenizer):
    """A vocabulary that is written down: symbols in order of their code points."""

    symbols: tuple[str, ...]
    joint: ClassVar[str]

    @classmethod
    def fit(cls, texts: Iterable[str]) -> "Listed":
        """All symbols of `texts`."""
        return cls(tuple(sorted({symbol for text in texts for symbol in cls.parts(text)})))

    @staticmethod
    @abc.abstractmethod
    def parts(text: str) -> Iterable[str]: ...

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        return {symbol: i for i, symbol in enumerate(self.symbols, FIRST)}

    @property
    def size(self) -> int:
        return FIRST + len(self.symbols)

    def encode(self, text: str) -> list[int]:
        return [self._ids.get(symbol, UNKNOWN) for symbol in self.parts(text)]

    def _symbol(self, token: int) -> str:
        return self.symbols[token - FIRST] if FIRST <= token < self.size else REPLACEMENT

    def shower(self) -> Shower:
        begun = False

        def show(ids: Sequence[int]) -> str:
            nonlocal begun
            symbols = [self._symbol(int(i)) for i in ids if int(i) not in (PAD, START, END)]
            text = self.joint.join([""] * begun + symbols) if symbols else ""
            begun = begun or bool(symbols)
            return text

        return show

    def piece(self, token: int) -> str:
        return MARKS[token] if token in MARKS else shown(self._symbol(token))

    def _fields(self) -> dict[str, Any]:
        return {"symbols": list(self.symbols)}


@dataclasses.dataclass(frozen=True)
class Characters(Listed):
    """Code points."""

    kind: ClassVar[str] = "chars"
    joint: ClassVar[str] = ""

    @staticmethod
    def parts(text: str) -> Iterable[str]:
        return text


@dataclasses.dataclass(frozen=True)
class Decomposed(Characters):
    """Code points of the canonical decomposition, NFD (Unicode Standard Annex 15)."""

    kind: ClassVar[str] = "nfd"

    @staticmethod
    def parts(text: str) -> Iterable[str]:
        return unicodedata.normalize("NFD", text)

    def shower(self) -> Shower:
        plain, held = super().shower(), ""

        def show(ids: Sequence[int]) -> str:
            nonlocal held
            held += plain(ids)
            # What comes next may still join the last letter; what stands before a letter that joins nothing is whole.
            end = len(held) if not len(ids) else max((i for i, c in enumerate(held) if _begins(c)), default=0)
            whole, held = held[:end], held[end:]
            return unicodedata.normalize("NFC", whole)

        return show


def _begins(letter: str) -> bool:
    """Whether a code point never joins the one before it: what is before it can be composed without it."""
    return not unicodedata.combining(letter) and letter not in _seconds()


@functools.cache
def _seconds() -> frozenset[str]:
    """Code points that are the second of a pair which canonical composition makes one; Hangul by its own rule."""
    pairs = (unicodedata.decomposition(chr(code)).split() for code in range(sys.maxunicode + 1))
    found = {chr(int(pair[1], 16)) for pair in pairs if len(pair) == 2 and not pair[0].startswith("<")}
    vowels_and_tails = {chr(code) for code in (*range(0x1161, 0x1176), *range(0x11A8, 0x11C3))}
    return frozenset(found | vowels_and_tails)


@dataclasses.dataclass(frozen=True)
class Symbols(Listed):
    """What stands between white space."""

    kind: ClassVar[str] = "symbols"
    joint: ClassVar[str] = " "

    @staticmethod
    def parts(text: str) -> Iterable[str]:
        return text.split()
