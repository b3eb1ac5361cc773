"""What rank 0 shows: a header that explains the run, a progress bar in a terminal, a line per epoch elsewhere."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

REFRESH_SECONDS = 0.1
"""Seconds between two states of a bar."""


class Display:
    """Shows nothing: every rank but 0, and rank 0 where it shall be quiet."""

    def header(self, facts: Sequence[tuple[str, str]]) -> None:
        """Explains the run: one line a fact, of (what, how)."""

    def begin_epoch(self, epoch: int, last_epoch: int, steps: int | None) -> None:
        """An epoch of `steps` steps begins; None: nobody knows."""

    def step(self, joined_rows: int, measured: Callable[[], Mapping[str, float]]) -> None:
        """A step is done; `measured` gives the numbers so far on this rank."""

    def draw(self, steps: int, text: str) -> None:
        """So many steps of the epoch are done, with these numbers."""

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
        for line in lines_of(facts):
            print(line, flush=True)

    def begin_epoch(self, epoch: int, last_epoch: int, steps: int | None) -> None:
        """Remembers the numbers for the line."""
        self._epoch = f"epoch {epoch}/{last_epoch}"

    def line(self, text: str) -> None:
        """Prints a line."""
        print(f"{self._epoch}  {text}", flush=True)

    def end_epoch(self, text: str) -> None:
        """Prints the epoch's line."""
        self.line(text)


class LiveDisplay(PlainDisplay):
    """What draws a bar, ten times a second, with the numbers of this rank so far and samples/s."""

    def __init__(self) -> None:
        super().__init__()
        self._rows = self._steps = 0
        self._began = self._shown = 0.0

    def begin_epoch(self, epoch: int, last_epoch: int, steps: int | None) -> None:
        """Begins to count."""
        super().begin_epoch(epoch, last_epoch, steps)
        self._rows = self._steps = 0
        self._began = self._shown = time.perf_counter()

    def step(self, joined_rows: int, measured: Callable[[], Mapping[str, float]]) -> None:
        """Counts, and draws where it is time to."""
        self._rows += joined_rows
        self._steps += 1
        now = time.perf_counter()
        if now - self._shown >= REFRESH_SECONDS:
            self._shown = now
            rate = f"{self._rows / (now - self._began):,.0f} samples/s"
            self.draw(self._steps, "  ".join(filter(None, (numbers(measured()), rate))))


_makers: list[Callable[[bool], Display]] = []


@contextlib.contextmanager
def displays_by(make: Callable[[bool], Display]) -> Iterator[None]:
    """Within, displays are made by this function, which is told whether they shall show anything."""
    _makers.append(make)
    try:
        yield
    finally:
        _makers.pop()


def make_display(shows: bool) -> Display:
    """Returns what fits the place: nothing, a bar in a terminal or notebook, lines elsewhere."""
    if _makers:
        return _makers[-1](shows)
    if not shows:
        return Display()
    from cyxtrain.progress.bars import live_display  # rich takes a third of the time of `import cyxtrain`

    return live_display() or PlainDisplay()


def lines_of(facts: Sequence[tuple[str, str]]) -> list[str]:
    """Returns a line per fact, of (what, how)."""
    return [f"{what:<11}{how}" for what, how in facts]


def numbers(measured: Mapping[str, float], prefix: str = "") -> str:
    """Returns what was measured, for people; what there is none of is left out."""
    return "  ".join(
        f"{prefix}{name} {value:.4f}" for name, value in measured.items() if name == "loss" or not math.isnan(value)
    )
