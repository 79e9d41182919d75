"""Errors that are the user's to mend: one line that names the values, no traceback.

`launch.py` prints a `UserError` as it stands and exits with 2; anything else is
a fault of ours and keeps its traceback.
"""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in what was asked for: a setting, a file, a folder."""


class ConfigError(UserError):
    """A setting that is out of range, unknown, or at odds with another."""


class NotFiniteError(ConfigError):
    """A model whose logits are not finite: nothing to draw from, nothing to rank."""


class DataError(UserError):
    """A text or task that cannot give the batches that were asked for."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, or of another shape."""


def unknown(kind: str, name: str, known: Iterable[str]) -> ConfigError:
    """An error for a name that is not in `known`; it offers the nearest ones."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"choose from {', '.join(known)}"
    return ConfigError(f"unknown {kind} {name!r}: {hint}")
