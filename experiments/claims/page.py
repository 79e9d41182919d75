"""claims.html."""

from collections.abc import Sequence
from pathlib import Path

from experiments.claims.ledger import Checked
from experiments.claims.record import Chapter


def write(folder: Path, chapters: Sequence[Chapter], checked: Sequence[Checked], depth: str) -> None:
    """To come."""
