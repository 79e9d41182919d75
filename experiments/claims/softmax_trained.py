"""Chapter F's trainings: normalisers (F03), text at temperatures (F06), answers at temperatures (F07)."""

from pathlib import Path

from experiments.claims.record import Numbers


def normalisers(folder: Path) -> Numbers:
    """To come."""
    return []


def writing(folder: Path) -> Numbers:
    """To come."""
    return []


def answering(folder: Path) -> Numbers:
    """To come."""
    return []
