"""Lines of a stream as they come, and lines out: what a program in a pipe is made of."""

import codecs
import re
import select
from collections.abc import Iterator
from typing import Any, BinaryIO

from transformer_jax.errors import DataError

WINDOW = 4096  # lines that are taken at once where more are there
PIECE = 1 << 16  # bytes of one read
# What ends a line for some reader: those of str.splitlines, and the tab between cells.
PARTING = re.compile("\r\n|[\t\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029]")


def windows(stream: BinaryIO, name: str = "stdin") -> Iterator[list[str]]:
    """The lines of a UTF-8 stream in lists, each of what is there when it is asked for, at most WINDOW.

    A list comes as soon as one line is whole and no more bytes wait, so that a person or a program at the
    other end gets an answer before the stream ends. Lines end with \\n or \\r\\n, or in a stream without any \\n
    with \\r, which its end shows; the last one with nothing too. A byte order mark at the beginning is left out.
    Raises DataError, naming the line, for bytes that are not UTF-8; the lines before it come first.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    lines: list[str] = []
    count, rest, ended, parted = 0, "", False, False
    while not ended:
        piece = _read(stream)
        ended = not piece
        fault = None
        try:
            text = decoder.decode(piece, final=ended)
        except UnicodeDecodeError as error:
            text, fault = error.object[: error.start].decode("utf-8"), error
        *whole, rest = (rest + text).split("\n")
        parted = parted or bool(whole)
        if (ended or fault) and not parted:
            *whole, rest = rest.split("\r")
        lines += (line.removesuffix("\r") for line in whole)
        if ended and rest:
            lines.append(rest)
        while len(lines) >= WINDOW or (lines and (ended or fault or not _waits(stream))):
            yield lines[:WINDOW]
            count, lines = count + len(lines[:WINDOW]), lines[WINDOW:]
        if fault:
            raise DataError(f"line {count + 1} of {name} is not UTF-8: byte 0x{fault.object[fault.start]:02x}")


def _read(stream: BinaryIO) -> bytes:
    """What is there, at least a byte; none at the end. Nothing stays behind in the stream's own buffer."""
    read: Any = getattr(stream, "read1", stream.read)
    return read(PIECE)


def _waits(stream: BinaryIO) -> bool:
    """Whether a read would find something, or the end, at once; so does a stream that is no file of the system's."""
    try:
        return bool(select.select([stream.fileno()], [], [], 0)[0])
    except OSError:
        return True


def one_line(text: str) -> str:
    """Text as one cell of one line: a model of bytes may write tabs and line ends, which become spaces."""
    return PARTING.sub(" ", text)
