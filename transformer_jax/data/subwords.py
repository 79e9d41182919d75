"""Tokenizers of the package `tokenizers`, which is imported when one is used: bpe, and files of Hugging Face's."""

import dataclasses
import functools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from transformer_jax.data.tasks import END, PAD, START
from transformer_jax.data.tokenizers import (
    FIRST,
    KINDS,
    MARKS,
    REPLACEMENT,
    UNKNOWN,
    Shower,
    Tokenizer,
    before_end,
    shown,
    utf8_shower,
    whole,
)
from transformer_jax.errors import DataError


def _package() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(
            'bpe and tokenizer.json need the package tokenizers: pip install "transformer-jax[data]", '
            "or choose --tokenizer=bytes, chars, nfd or symbols"
        ) from error
    return tokenizers


@functools.cache
def _byte_letters() -> dict[str, int]:
    """The letter that stands for each byte in byte-level vocabularies (Radford et al. 2019).

    Printable bytes of Latin-1 stand for themselves, the others for U+0100 and on, in order.
    """
    printable = {b for b in range(256) if chr(b).isprintable() and not chr(b).isspace()}
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


@dataclasses.dataclass(frozen=True)
class Bpe(Tokenizer):
    """Byte-level BPE (Sennrich et al. 2016; bytes: Radford et al. 2019).

    json: the tokenizer.json without marks; its id i is ours less FIRST, so that no text becomes a mark.
    """

    kind: ClassVar[str] = "bpe"
    json: str

    @classmethod
    def fit(cls, texts: Iterable[str], size: int) -> "Bpe":
        """At most `size` ids, marks included; merges that occur once are not made."""
        package = _package()
        model = package.Tokenizer(package.models.BPE())
        model.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = package.decoders.ByteLevel()
        trainer = package.trainers.BpeTrainer(
            vocab_size=size - FIRST, min_frequency=2, show_progress=False, initial_alphabet=sorted(_byte_letters())
        )
        model.train_from_iterator(texts, trainer)
        return cls(model.to_str())

    @functools.cached_property
    def _model(self) -> Any:
        return _package().Tokenizer.from_str(self.json)

    @functools.cached_property
    def _bytes(self) -> list[bytes]:
        """The bytes of each of the model's own ids."""
        letters, count = _byte_letters(), self._model.get_vocab_size()
        return [bytes(letters[letter] for letter in self._model.id_to_token(i)) for i in range(count)]

    @property
    def size(self) -> int:
        return FIRST + len(self._bytes)

    def encode(self, text: str) -> list[int]:
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        made = self._model.encode_batch([whole(text) for text in texts])
        return [[FIRST + i for i in row.ids] for row in made]

    def _of(self, token: int) -> bytes:
        return self._bytes[token - FIRST] if FIRST <= token < self.size else b""

    def shower(self) -> Shower:
        return utf8_shower(self._of)

    def piece(self, token: int) -> str:
        if token in MARKS:
            return MARKS[token]
        text = self._of(token).decode("utf-8", "backslashreplace")
        return shown(text)

    def _fields(self) -> dict[str, Any]:
        return {"json": self.json}


# The usual names of marks in a tokenizer.json, the first one present is taken.
USUAL = {
    PAD: ("<pad>", "[PAD]", "<|pad|>", "<PAD>"),
    START: ("<s>", "[BOS]", "<bos>", "<|startoftext|>", "<|begin_of_text|>", "[CLS]", "<BOS>"),
    END: ("</s>", "[EOS]", "<eos>", "<|endoftext|>", "<|end_of_text|>", "[SEP]", "<EOS>"),
    UNKNOWN: ("<unk>", "[UNK]", "<|unk|>", "<UNK>"),
}


def _loaded(text: str) -> Any:
    model = _package().Tokenizer.from_str(text)
    model.no_truncation()
    model.no_padding()
    model.encode_special_tokens = True  # a mark that a text spells out is text
    return model


def _encoded(model: Any, texts: Sequence[str]) -> list[Any]:
    """The package's encodings. DataError for a text with a symbol that the vocabulary lacks and has no mark for."""
    try:
        return model.encode_batch([whole(text) for text in texts], add_special_tokens=False)
    except Exception as error:  # the package raises a bare Exception
        raise DataError(f"the tokenizer.json cannot encode every text: {error}") from error


@dataclasses.dataclass(frozen=True)
class File(Tokenizer):
    """A tokenizer.json; json: its contents, so that the file may go."""

    kind: ClassVar[str] = "file"
    json: str

    @classmethod
    def read(cls, path: str, option: str = "--tokenizer") -> "File":
        """DataError for a file that is missing or no tokenizer.json."""
        package, file = _package(), Path(path)
        if not file.is_file():
            raise DataError(f"{option}={path!r}: no such file; give one, or {', '.join(KINDS)}")
        try:
            text = file.read_text(encoding="utf-8")
            package.Tokenizer.from_str(text)
        except Exception as error:  # the package raises a bare Exception
            raise DataError(f"{option}={path!r} is no tokenizer.json: {error}") from error
        return cls(text)

    @functools.cached_property
    def _model(self) -> Any:
        return _loaded(self.json)

    @functools.cached_property
    def _theirs(self) -> tuple[int | None, ...]:
        """The file's id of each of ours; None for a mark that it lacks."""
        vocabulary = self._model.get_vocab()
        marks = [next((vocabulary[name] for name in USUAL[mark] if name in vocabulary), None) for mark in MARKS]
        return (*marks, *sorted(set(vocabulary.values()) - set(marks)))

    @functools.cached_property
    def _ours(self) -> dict[int, int]:
        """Our id of each of the file's in a text. A text may spell out what the file has as a mark, and several of
        its kinds of model give the mark's id for it: to us it is a symbol that the vocabulary lacks."""
        ours = {theirs: i for i, theirs in enumerate(self._theirs) if theirs is not None}
        return {theirs: UNKNOWN if i in (PAD, START, END) else i for theirs, i in ours.items()}

    @property
    def size(self) -> int:
        return len(self._theirs)

    def encode(self, text: str) -> list[int]:
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        return [[self._ours[i] for i in row.ids] for row in _encoded(self._model, texts)]

    @functools.cached_property
    def _lacking(self) -> tuple[Any, int | None]:
        """(None, our id of what the model writes for what it lacks; None: nothing), or where it writes nothing and
        drops it without a trace, as BPE may: (the same tokenizer with an id for it, that id)."""
        made = json.loads(self._model.to_str())
        model = made["model"]
        if model["type"] == "Unigram":
            return None, self._ours.get(model["unk_id"])
        if model["type"] != "BPE" or model["unk_token"] is not None:
            return None, self._ours.get(model["vocab"].get(model["unk_token"]))
        name = "\U000f0000"
        while name in model["vocab"]:
            name += name
        model["vocab"][name] = 1 + max(model["vocab"].values(), default=0)
        model["unk_token"] = name
        shows = _loaded(json.dumps(made))
        return shows, shows.token_to_id(name)

    def unknown(self, texts: Sequence[str], rows: Sequence[Sequence[int]]) -> list[int]:
        shows, lacking = self._lacking
        if shows is None:
            return [sum(i in (UNKNOWN, lacking) for i in row) for row in rows]
        # A letter may be several bytes, all at one place of the text.
        return [
            list(row).count(UNKNOWN)
            + len({place for i, place in zip(made.ids, made.offsets, strict=True) if i == lacking})
            for row, made in zip(rows, _encoded(shows, texts), strict=True)
        ]

    def decode(self, ids: Iterable[int]) -> str:
        theirs = [self._theirs[i] for i in before_end(ids) if i not in (PAD, START) and i < self.size]
        return self._model.decode([i for i in theirs if i is not None], skip_special_tokens=False)

    def shower(self) -> Shower:
        seen: list[int] = []
        given = ""

        def show(ids: Sequence[int]) -> str:
            nonlocal given
            seen.extend(int(i) for i in ids)
            text = self.decode(seen)
            # What ends in U+FFFD may be a part of a character; a change of what was given waits for the end.
            if len(ids) and (text.endswith(REPLACEMENT) or not text.startswith(given)):
                return ""
            more = text[len(given) :]
            given = text
            return more

        return show

    def piece(self, token: int) -> str:
        if token in MARKS:
            return MARKS[token]
        theirs = self._theirs[token]
        return shown(self._model.id_to_token(theirs)) if theirs is not None else REPLACEMENT

    def _fields(self) -> dict[str, Any]:
        return {"json": self.json}
