"""The tokenizers of both sides: chosen, fitted on training pairs, written down and read again."""

import dataclasses
import hashlib
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from transformer_jax.data.subwords import Bpe, File
from transformer_jax.data.tasks import END
from transformer_jax.data.tokenizers import Bytes, Characters, Decomposed, Symbols, Tokenizer
from transformer_jax.errors import DataError

LISTED = {made.kind: made for made in (Characters, Decomposed, Symbols)}
FEW_SYMBOLS = 256  # a side made of so few different ones is a sequence of symbols
WORDS_PART = 0.95  # a side of which so many lines have no space is words


def from_dict(values: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that `to_dict` described; DataError for what is none."""
    known: dict[Any, type[Tokenizer]] = {made.kind: made for made in (Bytes, *LISTED.values(), Bpe, File)}
    if values.get("kind") not in known:
        raise DataError(f"a tokenizer of kind {values.get('kind')!r}: this version knows {', '.join(known)}")
    made = known[values["kind"]]
    return made(**{key: tuple(x) if isinstance(x, list) else x for key, x in values.items() if key != "kind"})


@dataclasses.dataclass(frozen=True)
class Tokenizers:
    """Of both sides; one and the same where they share a vocabulary."""

    source: Tokenizer
    target: Tokenizer

    @property
    def shared(self) -> bool:
        return self.source == self.target

    @property
    def vocab_size(self) -> int:
        """V, of the target side."""
        return self.target.size

    @property
    def source_vocab_size(self) -> int:
        """As Config has it: 0 where the vocabulary is shared."""
        return 0 if self.shared else self.source.size

    @property
    def sha256(self) -> str:
        return hashlib.sha256(f"{self.source.sha256} {self.target.sha256}".encode()).hexdigest()

    def source_ids(self, text: str) -> list[int]:
        """What the encoder reads: the text and END."""
        return [*self.source.encode(text), END]

    def to_dict(self) -> dict[str, Any]:
        """For JSON; a shared one is written once."""
        return {"target": self.target.to_dict()} | ({} if self.shared else {"source": self.source.to_dict()})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Tokenizers":
        target = from_dict(values["target"])
        return cls(from_dict(values["source"]) if "source" in values else target, target)


def choose(texts: Sequence[str]) -> str:
    """The kind that suits a side: symbols, chars, nfd or bpe.

    symbols: at most 256 different ones, and two a line or more. chars: words, 95% of the lines
    without a space; nfd: such words of more than 256 composed characters whose parts are half as many or fewer:
    most syllables of Hangul are rare, and many of a new word's were never seen. bpe: all else.
    """
    found: set[str] = set()
    count = 0
    for text in texts:
        parts = text.split()
        count += len(parts)
        if len(found) <= FEW_SYMBOLS:
            found.update(parts)
    if len(found) <= FEW_SYMBOLS and count >= 2 * len(texts):
        return "symbols"
    words = sum(" " not in text for text in texts)
    if words < WORDS_PART * len(texts):
        return "bpe"
    whole = {letter for text in texts for letter in text}
    apart = {part for letter in whole for part in unicodedata.normalize("NFD", letter)}
    many = len(whole) > FEW_SYMBOLS and 2 * len(apart) <= len(whole)
    return "nfd" if many and all(unicodedata.is_normalized("NFC", text) for text in texts) else "chars"


def fit(
    sources: Sequence[str], targets: Sequence[str], source: str = "", target: str = "", bpe_size: int = 4000
) -> tuple[Tokenizers, str]:
    """Tokenizers of the training pairs, and a line that says what they are.

    source, target: a kind, a path, or "" for `choose`; an empty target follows a given source.
    Sides of one kind, or of one path, share a vocabulary that is fitted on both.
    """
    chosen = [name for name, kind in (("source", source), ("target", target or source)) if not kind]
    kinds = source or choose(sources), target or source or choose(targets)
    if kinds[0] == kinds[1]:
        both = _fit(kinds[0], [*sources, *targets], bpe_size, "--tokenizer")
        made = Tokenizers(both, both)
    else:
        made = Tokenizers(
            _fit(kinds[0], sources, bpe_size, "--tokenizer"), _fit(kinds[1], targets, bpe_size, "--target_tokenizer")
        )
    return made, described(made, kinds) + (f" ({' and '.join(chosen)}: chosen by the data)" if chosen else "")


def described(made: Tokenizers, kinds: Sequence[str] = ()) -> str:
    """A line that says what they are; kinds: what both sides are called, else by themselves."""
    source, target = kinds or (made.source.kind, made.target.kind)
    if made.shared:
        return f"tokenizers: {target} of both sides, {made.target.size:,} ids"
    first = f"{source} of the source, {made.source.size:,} ids"
    return f"tokenizers: {first}; {target} of the target, {made.target.size:,} ids"


def _fit(kind: str, texts: Sequence[str], bpe_size: int, option: str) -> Tokenizer:
    if kind == "bytes":
        return Bytes()
    if kind == "bpe":
        return Bpe.fit(texts, bpe_size)
    if kind in LISTED:
        return LISTED[kind].fit(texts)
    return File.read(kind, option)
