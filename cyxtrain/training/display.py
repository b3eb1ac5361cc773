"""What rank 0 shows: a header that explains the run, a progress bar in a terminal, a line per epoch elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

_REFRESH_SECONDS = 0.1


class Display:
    """Shows nothing: every rank but 0, and rank 0 where it shall be quiet."""

    def header(self, facts: Sequence[tuple[str, str]]) -> None:
        """Explains the run: one line a fact, of (what, how)."""

    def begin_epoch(self, epoch: int, last_epoch: int, steps: int) -> None:
        """An epoch of `steps` steps begins."""

    def step(self, joined_rows: int, sums: Callable[[], tuple[float, float]]) -> None:
        """A step is done; `sums` gives (loss, accuracy) so far on this rank, at the cost of asking the device."""

    def line(self, text: str) -> None:
        """Shows a line."""

    def end_epoch(self, text: str) -> None:
        """An epoch is over, with validation."""

    def close(self) -> None:
        """Leaves the terminal as it was, also after an error."""


class PlainDisplay(Display):
    """Plain lines, for files and pipes."""

    def __init__(self) -> None:
        self._epoch = ""

    def header(self, facts: Sequence[tuple[str, str]]) -> None:
        """Prints a line per fact."""
        for what, how in facts:
            print(f"{what:<11}{how}", flush=True)

    def begin_epoch(self, epoch: int, last_epoch: int, steps: int) -> None:
        """Remembers the numbers for the line."""
        self._epoch = f"epoch {epoch}/{last_epoch}"

    def line(self, text: str) -> None:
        """Prints a line."""
        print(f"{self._epoch}  {text}", flush=True)

    def end_epoch(self, text: str) -> None:
        """Prints the epoch's line."""
        self.line(text)


class TerminalDisplay(PlainDisplay):
    """A progress bar per epoch, with loss and accuracy of this rank so far, samples/s and the time that is left."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._rows = 0
        self._steps = 0
        self._began = self._shown = 0.0

    def begin_epoch(self, epoch: int, last_epoch: int, steps: int) -> None:
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

    def step(self, joined_rows: int, sums: Callable[[], tuple[float, float]]) -> None:
        """Moves the bar; it is drawn ten times a second."""
        self._rows += joined_rows
        self._steps += 1
        now = time.perf_counter()
        if self._progress is None or now - self._shown < _REFRESH_SECONDS:
            return
        self._shown = now
        loss, accuracy = sums()
        rate = f"{self._rows / (now - self._began):,.0f} samples/s"
        self._progress.update(self._task, completed=self._steps, numbers=f"{numbers(loss, accuracy)}  {rate}")
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


def make_display(shows: bool) -> Display:
    """Returns what fits the place: nothing, a bar in a terminal or notebook, lines elsewhere."""
    if not shows:
        return Display()
    console = Console()
    return TerminalDisplay(console) if console.is_terminal or console.is_jupyter else PlainDisplay()


def numbers(loss: float, accuracy: float, prefix: str = "") -> str:
    """Returns loss and accuracy for people; no accuracy where there is none."""
    text = f"{prefix}loss {loss:.4f}"
    return text if math.isnan(accuracy) else f"{text}  {prefix}accuracy {accuracy:.4f}"
