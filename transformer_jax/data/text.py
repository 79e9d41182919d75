"""The text task: next-byte prediction on a UTF-8 file, or on the text that ships with Python.

The bytes stand as they are: no normalisation, no change of line endings. The last tenth
is held out, contiguous: its first half is the split "selection", its second "report".
"""

import hashlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.batch import Batch
from transformer_jax.config import Config
from transformer_jax.data.tasks import SPLITS, Index, Task, check_batch
from transformer_jax.errors import DataError
from transformer_jax.keys import named

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


def split_bytes(content: bytes) -> dict[str, bytes]:
    """train: the first nine tenths; selection and report: the halves of the last tenth.

    The tenth is rounded down, and so is its half for selection: the splits joined are
    `content` again, whatever its length.
    """
    held_out = len(content) // 10
    border, middle = len(content) - held_out, len(content) - held_out + held_out // 2
    return {"train": content[:border], "selection": content[border:middle], "report": content[middle:]}


def text_task(config: Config) -> Task:
    """Next-byte prediction; config.text is the file, V >= 256 or above every byte of the text.

    data: dict of uint8 arrays, "train", "selection" and "report". A window is seq_len + 1
    bytes of one split: inputs are all but the last, targets all but the first.
    train_batch: B starts, uniform over all windows of the training split. eval_batch: windows
    side by side, so that each byte of the split but its first (which has nothing before it)
    is a target once; places past the end are byte 0 with weight 0.
    Raises DataError as `read_text` does, and for a split shorter than one window, a byte
    that vocab_size excludes, or an architecture other than "decoder".
    """
    T, B = config.seq_len, config.batch_size
    if config.architecture != "decoder":
        raise DataError(f"task text is next-byte prediction: it needs architecture=decoder, not {config.architecture}")
    name, content = read_text(config.text)
    parts = {split: np.frombuffer(part, np.uint8) for split, part in split_bytes(content).items()}
    for split, part in parts.items():
        if part.size < T + 1:
            raise DataError(
                f"{name} has {len(content)} bytes, so its {split} split has {part.size}: "
                f"fewer than one window of seq_len={T} and the byte after it; "
                "give a longer file with --text, or a smaller --seq_len"
            )
    whole = np.frombuffer(content, np.uint8)
    if config.V <= int(whole.max()):
        place = int(np.argmax(whole >= config.V))
        raise DataError(
            f"{name} has byte {int(whole[place])} at offset {place}, outside vocab_size={config.V}: "
            "give --vocab_size=256 (or 0), or another --text"
        )

    def train_batch(data: dict[str, jax.Array], key: jax.Array) -> Batch:
        bytes_N = data["train"]
        # Starts 0 … N-T-1: the last window ends at the last byte. A gather past the end
        # would not fail but repeat that byte, so the bound matters.
        starts_B = jax.random.randint(named(key, "starts"), (B,), 0, bytes_N.size - T)
        window_BW = bytes_N[starts_B[:, None] + jnp.arange(T + 1)[None, :]].astype(jnp.int32)
        return Batch(window_BW[:, :-1], window_BW[:, 1:], jnp.ones((B, T), jnp.float32))

    def eval_batch(data: dict[str, jax.Array], split: str, index: Index) -> Batch:
        check_batch(eval_batches, split, index)
        bytes_N = data[split]
        rows_B = jnp.asarray(index, jnp.int32) * B + jnp.arange(B)
        place_BW = rows_B[:, None] * T + jnp.arange(T + 1)[None, :]
        inside_BW = place_BW < bytes_N.size
        window_BW = bytes_N[jnp.minimum(place_BW, bytes_N.size - 1)].astype(jnp.int32)
        window_BW = jnp.where(inside_BW, window_BW, 0)
        return Batch(window_BW[:, :-1], window_BW[:, 1:], inside_BW[:, 1:].astype(jnp.float32))

    # A split of N bytes has N-1 targets: ceil(ceil((N-1)/T)/B) batches hold them all.
    eval_batches = {split: -(-(parts[split].size - 1) // (T * B)) for split in SPLITS}
    return Task(
        name="text",
        vocab_size=config.V,
        floor=None,
        data={split: jnp.asarray(part) for split, part in parts.items()},
        train_batch=train_batch,
        eval_batch=eval_batch,
        eval_batches=eval_batches,
        show=show_bytes,
        sha256=hashlib.sha256(content).hexdigest(),
    )


def show_bytes(ids: object) -> str:
    """Ids as UTF-8; a byte that is no part of a character, and an id above 255, is U+FFFD."""
    flat = np.asarray(ids).reshape(-1).tolist()
    # 0xFF never occurs in UTF-8, so that it is always shown as a replacement.
    return bytes(i if 0 <= i < 256 else 0xFF for i in flat).decode("utf-8", errors="replace")
