"""The parts a question adds to its report."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading, a paragraph, and a table or a figure.

    figure: (file name, a function that draws it to the path it is given).
    """

    title: str
    text: str = ""
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    figure: tuple[str, Callable[[Path], None]] | None = None
