"""The text task: next-token prediction on a UTF-8 file, or on the text that ships with Python.

Without config.tokenizer the tokens are bytes and stand as they are: no normalisation, no change of
line endings. The last tenth is held out, contiguous: its first half is the split "selection", its
second "report"; a tokenizer is fitted on the rest. Windows of the text, or with config.packing
the documents between its empty lines, several in a row (packing.py).
"""

import functools
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.batch import Batch
from transformer_jax.config import Config
from transformer_jax.data.packing import documents, pack_documents
from transformer_jax.data.pairs_task import Sides, stamp
from transformer_jax.data.rows import smallest
from transformer_jax.data.tasks import END, SPLITS, Index, Task, check_batch
from transformer_jax.data.vocabularies import Tokenizers, fit
from transformer_jax.errors import DataError
from transformer_jax.keys import named

Text = TypeVar("Text", bytes, str)
MAX_BYTES = 1 << 30  # places of bytes, and of the padding after them, must fit in int32


def read_text(path: str) -> tuple[str, bytes]:
    """(name for messages, bytes) of a UTF-8 file; of `pydoc_data.topics` where `path` is empty.

    Raises DataError for a file that is missing, not a regular file, unreadable, empty,
    too large, or not UTF-8 (it names the offset of the first bad byte).
    """
    if not path:
        return "pydoc_data.topics", _shipped_text()
    name, file = f"--text={path!r}", Path(path)
    try:
        if file.is_dir():
            raise DataError(f"{name} is a directory: give a UTF-8 file")
        if not file.exists():
            raise DataError(f"{name}: no such file")
        if not file.is_file():
            raise DataError(f"{name} is not a regular file")
        if (size := file.stat().st_size) > MAX_BYTES:
            raise DataError(f"{name} has {size} bytes, more than the {MAX_BYTES} that a task holds on the device")
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror or error}") from error
    if not content:
        raise DataError(f"{name} is empty")
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{name} is not UTF-8: byte 0x{content[error.start]:02x} at offset {error.start}") from error
    return name, content


def _shipped_text() -> bytes:
    """All topics of Python's own help in sorted order, a blank line between them."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError("this Python ships without pydoc_data.topics: give a UTF-8 file with --text") from error
    return "\n".join(topics[name] for name in sorted(topics)).encode("utf-8")


def split_bytes(content: Text) -> dict[str, Text]:
    """train: the first nine tenths; selection and report: the halves of the last tenth.

    The tenth is rounded down, and so is its half for selection: the splits joined are
    `content` again, whatever its length.
    """
    held_out = len(content) // 10
    border, middle = len(content) - held_out, len(content) - held_out + held_out // 2
    return {"train": content[:border], "selection": content[border:middle], "report": content[middle:]}


@functools.lru_cache(maxsize=2)
def _fitted(path: str, tokenizer: str, bpe_size: int, _: Any) -> Tokenizers:
    """Fitted on the training split; `_` says when the file has changed."""
    train = split_bytes(read_text(path)[1].decode("utf-8"))["train"]
    return fit([train], [], tokenizer, bpe_size=bpe_size)[0]


def text_tokenizers(config: Config) -> Tokenizers | None:
    """What config.tokenizer asks for; None: bytes as they are, 256 ids and no marks."""
    if config.target_tokenizer:
        raise DataError(f"target_tokenizer={config.target_tokenizer} with task text: a text has one side")
    if not config.tokenizer:
        return None
    return _fitted(config.text, config.tokenizer, config.bpe_size, stamp(config.text) if config.text else ())


def text_task(config: Config, tokenizers: Tokenizers | None = None) -> Task:
    """Next-token prediction; config.text is the file.

    Without a tokenizer V >= 256, or above every byte of the text; with one, V is its size, and the task's
    `text` holds it. tokenizers: those of a trained model; None: as config says.
    data: dict of arrays in the smallest type, "train", "selection" and "report" (packed: rows of each). A
    window is seq_len + 1 tokens of one split: inputs are all but the last, targets all but the first.
    train_batch: B starts, uniform over all windows of the training split (packed: B rows, uniform).
    eval_batch: windows side by side, so that each token of the split but its first (which has
    nothing before it) is a target once; places past the end are 0 with weight 0.
    Raises DataError as `read_text` does, and for a split shorter than one window, a byte
    that vocab_size excludes, or an architecture other than "decoder".
    """
    if config.architecture != "decoder":
        raise DataError(f"task text is next-byte prediction: it needs architecture=decoder, not {config.architecture}")
    name, content = read_text(config.text)
    tokenizers = tokenizers or text_tokenizers(config)
    digest = hashlib.sha256(content)
    if tokenizers is None:
        _check_bytes(config, name, content)
        # Latin-1 writes each byte as one letter.
        parts = {split: part.decode("latin-1") for split, part in split_bytes(content).items()}
        encode, show, sides = _latin, show_bytes, None
    else:
        tokenizer = tokenizers.target
        if config.V != tokenizer.size:
            raise DataError(f"vocab_size={config.V}, but the tokenizer has {tokenizer.size}: leave it 0")
        parts = split_bytes(content.decode("utf-8"))
        last = [END] * config.packing  # a document's end is learned, where it has a mark

        def encode(text: str) -> np.ndarray:
            return np.array([*tokenizer.encode(text), *last], np.int32).astype(smallest(config.V))

        def show(ids: object) -> str:
            return tokenizer.decode(np.asarray(ids).reshape(-1).tolist())

        sides = Sides(tokenizers, {}, {}, (f"tokenizer: {tokenizer.kind}, {tokenizer.size:,} ids",))
        digest.update(tokenizers.sha256.encode())
    make = _packed if config.packing else _windows
    data, train_batch, eval_batch, eval_batches = make(config, name, len(content), parts, encode)
    return Task(
        name="text",
        vocab_size=config.V,
        floor=None,
        data=jax.tree.map(jnp.asarray, data),
        train_batch=train_batch,
        eval_batch=eval_batch,
        eval_batches=eval_batches,
        show=show,
        sha256=digest.hexdigest(),
        text=sides,
    )


def _latin(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("latin-1"), np.uint8)


def _check_bytes(config: Config, name: str, content: bytes) -> None:
    whole = np.frombuffer(content, np.uint8)
    if config.V <= int(whole.max()):
        place = int(np.argmax(whole >= config.V))
        raise DataError(
            f"{name} has byte {int(whole[place])} at offset {place}, outside vocab_size={config.V}: "
            "give --vocab_size=256 (or 0), or another --text"
        )


Encode = Callable[[str], np.ndarray]
Made = tuple[dict[str, Any], Callable[..., Batch], Callable[..., Batch], dict[str, int]]


def _windows(config: Config, name: str, size: int, texts: Mapping[str, str], encode: Encode) -> Made:
    """(data, train_batch, eval_batch, eval_batches) of windows of the splits."""
    T, B = config.seq_len, config.batch_size
    parts = {split: encode(text) for split, text in texts.items()}
    for split, part in parts.items():
        if part.size < T + 1:
            tokens = "" if not config.tokenizer else " tokens"
            raise DataError(
                f"{name} has {size} bytes, so its {split} split has {part.size}{tokens}: "
                f"fewer than one window of seq_len={T} and the one after it; "
                "give a longer file with --text, or a smaller --seq_len"
            )

    def train_batch(data: dict[str, jax.Array], key: jax.Array) -> Batch:
        ids_N = data["train"]
        # Starts 0 … N-T-1: the last window ends at the last byte. A gather past the end
        # would not fail but repeat that token, so the bound matters.
        starts_B = jax.random.randint(named(key, "starts"), (B,), 0, ids_N.size - T)
        window_BW = ids_N[starts_B[:, None] + jnp.arange(T + 1)[None, :]].astype(jnp.int32)
        return Batch(window_BW[:, :-1], window_BW[:, 1:], jnp.ones((B, T), jnp.float32))

    def eval_batch(data: dict[str, jax.Array], split: str, index: Index) -> Batch:
        check_batch(eval_batches, split, index)
        ids_N = data[split]
        rows_B = jnp.asarray(index, jnp.int32) * B + jnp.arange(B)
        place_BW = rows_B[:, None] * T + jnp.arange(T + 1)[None, :]
        inside_BW = place_BW < ids_N.size
        window_BW = ids_N[jnp.minimum(place_BW, ids_N.size - 1)].astype(jnp.int32)
        window_BW = jnp.where(inside_BW, window_BW, 0)
        return Batch(window_BW[:, :-1], window_BW[:, 1:], inside_BW[:, 1:].astype(jnp.float32))

    # A split of N bytes has N-1 targets: ceil(ceil((N-1)/T)/B) batches hold them all.
    eval_batches = {split: -(-(parts[split].size - 1) // (T * B)) for split in SPLITS}
    return parts, train_batch, eval_batch, eval_batches


def _packed(config: Config, name: str, size: int, texts: Mapping[str, str], encode: Encode) -> Made:
    """The same of packed documents: rows of `pack_documents`."""
    T, B = config.seq_len, config.batch_size
    parts = {}
    for split, text in texts.items():
        rows = pack_documents([encode(document) for document in documents(text)], T)
        if not len(rows.tokens_BT):
            raise DataError(f"{name} has {size} bytes, and its {split} split no document of two tokens")
        places = {"segments": rows.segments_BT, "positions": rows.positions_BT}
        ids = {"tokens": rows.tokens_BT, "targets": rows.targets_BT}
        parts[split] = {key: x.astype(smallest(config.V)) for key, x in ids.items()}
        parts[split] |= {key: x.astype(smallest(T + 1)) for key, x in places.items() if x is not None}
    eval_batches = {split: -(-len(parts[split]["tokens"]) // B) for split in SPLITS}

    def batch_of(part: dict[str, jax.Array], rows_B: jax.Array, real_B: jax.Array) -> Batch:
        row = {key: x[rows_B].astype(jnp.int32) for key, x in part.items()}
        segments_BT = jnp.where(real_B[:, None], row["segments"], 0)
        inside_BT = segments_BT > 0
        return Batch(
            row["tokens"], row["targets"], inside_BT.astype(jnp.float32), positions_BT=row["positions"],
            segments_BT=segments_BT, lengths_B=inside_BT.sum(axis=1, dtype=jnp.int32),
        )  # fmt: skip

    def train_batch(data: dict[str, Any], key: jax.Array) -> Batch:
        rows_B = jax.random.randint(named(key, "rows"), (B,), 0, data["train"]["tokens"].shape[0])
        return batch_of(data["train"], rows_B, jnp.ones(B, bool))

    def eval_batch(data: dict[str, Any], split: str, index: Index) -> Batch:
        check_batch(eval_batches, split, index)
        rows_B, count = jnp.asarray(index, jnp.int32) * B + jnp.arange(B), data[split]["tokens"].shape[0]
        return batch_of(data[split], jnp.minimum(rows_B, count - 1), rows_B < count)

    return parts, train_batch, eval_batch, eval_batches


def show_bytes(ids: object) -> str:
    """Ids as UTF-8; a byte that is no part of a character, and an id above 255, is U+FFFD."""
    flat = np.asarray(ids).reshape(-1).tolist()
    # 0xFF never occurs in UTF-8, so that it is always shown as a replacement.
    return bytes(i if 0 <= i < 256 else 0xFF for i in flat).decode("utf-8", errors="replace")
