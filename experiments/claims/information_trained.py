"""Chapter E's training: students of one teacher by three divergences (E15)."""

from pathlib import Path

from experiments.claims.record import Numbers


def directions(folder: Path) -> Numbers:
    """To come."""
    return []
