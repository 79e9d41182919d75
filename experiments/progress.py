"""What a person sees while a run goes on: a bar on a terminal, a line now and then elsewhere."""

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from experiments import processes

QUIET_SECONDS = 15.0  # between lines where there is no terminal to redraw


class Bar:
    """`with Bar("training", total) as bar: bar.update(done, loss=2.1, tokens=n)`.

    total and done count the same unit of work; tokens are those of the work since the
    last update. Everything goes to stderr, so that stdout holds results alone.
    """

    def __init__(self, title: str, total: int, done: int = 0):
        self.console = Console(stderr=True)
        self._title, self._total, self._start_done = title, total, done
        self._done, self._tokens = done, 0.0
        self._start = self._last_line = time.monotonic()
        self._live = self.console.is_terminal and processes.first()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f}%  {task.fields[note]}"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not self._live,
        )
        self._task = self._progress.add_task(title, total=total, completed=done, note="compiling")

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._progress.stop()

    def update(self, done: int, *, tokens: float = 0.0, title: str | None = None, **shown: float) -> None:
        """Move to `done` units and show the given numbers and the speed."""
        self._done, self._tokens = done, self._tokens + tokens
        self._title = title or self._title
        elapsed = max(time.monotonic() - self._start, 1e-9)
        parts = [f"{name} {value:.4g}" for name, value in shown.items()]
        if self._tokens:
            parts.append(f"{_short(self._tokens / elapsed)} tokens/s")
        note = "  ".join(parts)
        self._progress.update(self._task, completed=done, description=self._title, note=note)
        if not self._live and time.monotonic() - self._last_line > QUIET_SECONDS:
            self._last_line = time.monotonic()
            left = elapsed / max(done - self._start_done, 1) * (self._total - done)
            self.say(f"{self._title}  {100 * done / self._total:.0f}%  {note}  {left:.0f} s left")

    def say(self, text: str) -> None:
        """A line above the bar; of several processes, the first one's."""
        if not processes.first():
            return
        console = self._progress.console if self._live else self.console
        console.print(text, highlight=False, markup=False, soft_wrap=True)


def _short(x: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if x >= limit:
            return f"{x / limit:.1f}{unit}"
    return f"{x:.0f}"
