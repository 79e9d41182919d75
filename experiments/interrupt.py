"""Ctrl-C, SIGTERM and the time budget: stop at the next safe place, saved."""

import signal
import time
from types import FrameType
from typing import Any


class Stopper:
    """`with Stopper(minutes) as stop:` then ask `stop.reason` between chunks of work.

    The first SIGINT or SIGTERM is only noted; a second one acts as it would without us.
    `reason` is "" to go on, else why to stop; `exit_code` is 0 for the budget, 128 + the
    signal's number for a signal.
    """

    def __init__(self, minutes: float = 0.0):
        self._deadline = time.monotonic() + 60.0 * minutes if minutes > 0 else None
        self._minutes = minutes
        self._signal, self._other = 0, -1
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Stopper":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self._signal = number
        signal.signal(number, self._previous[number])

    @property
    def reason(self) -> str:
        if self._signal:
            return f"{signal.Signals(self._signal).name} received"
        if self._deadline is not None and time.monotonic() > self._deadline:
            return f"the budget of {self._minutes:g} minutes is spent"
        if self._other >= 0:
            return "another process was told to stop"
        return ""

    def told(self, code: int) -> None:
        """What another process of the run was told: its exit code, 0 for the budget, -1 for nothing."""
        self._other = max(self._other, code)

    @property
    def exit_code(self) -> int:
        return 128 + self._signal if self._signal else max(self._other, 0)
