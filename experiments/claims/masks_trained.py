"""Chapter D's training: what the mask as it is printed learns (D07)."""

from pathlib import Path

from experiments.claims.record import Numbers


def cheating(folder: Path) -> Numbers:
    """To come."""
    return []
