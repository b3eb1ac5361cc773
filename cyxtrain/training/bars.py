"""A progress bar, where people look on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from cyxtrain.training.display import PlainDisplay, numbers

_REFRESH_SECONDS = 0.1


class TerminalDisplay(PlainDisplay):
    """A progress bar per epoch, with the numbers of this rank so far, samples/s and the time that is left."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._rows = 0
        self._steps = 0
        self._began = self._shown = 0.0

    def begin_epoch(self, epoch: int, last_epoch: int, steps: int | None) -> None:
        """Starts a bar."""
        super().begin_epoch(epoch, last_epoch, steps)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            auto_refresh=False,  # no thread: the loop refreshes
        )
        self._task = self._progress.add_task(self._epoch, total=steps, numbers="")
        self._rows = self._steps = 0
        self._began = self._shown = time.perf_counter()
        self._progress.start()

    def step(self, joined_rows: int, measured: Callable[[], Mapping[str, float]]) -> None:
        """Moves the bar; it is drawn ten times a second."""
        self._rows += joined_rows
        self._steps += 1
        now = time.perf_counter()
        if self._progress is None or now - self._shown < _REFRESH_SECONDS:
            return
        self._shown = now
        rate = f"{self._rows / (now - self._began):,.0f} samples/s"
        self._progress.update(self._task, completed=self._steps, numbers=f"{numbers(measured())}  {rate}")
        self._progress.refresh()

    def line(self, text: str) -> None:
        """Prints a line above the bar."""
        self._console.print(f"{self._epoch}  {text}", highlight=False, markup=False)

    def end_epoch(self, text: str) -> None:
        """Replaces the bar by the epoch's line."""
        self.close()
        self.line(text)

    def close(self) -> None:
        """Takes the bar away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def terminal_display() -> TerminalDisplay | None:
    """Returns a display for a terminal or a notebook; None: there is none."""
    console = Console()
    return TerminalDisplay(console) if console.is_terminal or console.is_jupyter else None
