"""What rank 0 shows: a header that explains the run, a progress bar in a terminal, a line per epoch elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence


class Display:
    """Shows nothing: every rank but 0, and rank 0 where it shall be quiet."""

    def header(self, facts: Sequence[tuple[str, str]]) -> None:
        """Explains the run: one line a fact, of (what, how)."""

    def begin_epoch(self, epoch: int, last_epoch: int, steps: int | None) -> None:
        """An epoch of `steps` steps begins; None: nobody knows."""

    def step(self, joined_rows: int, measured: Callable[[], Mapping[str, float]]) -> None:
        """A step is done; `measured` gives the numbers so far on this rank, at the cost of asking the device."""

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

    def begin_epoch(self, epoch: int, last_epoch: int, steps: int | None) -> None:
        """Remembers the numbers for the line."""
        self._epoch = f"epoch {epoch}/{last_epoch}"

    def line(self, text: str) -> None:
        """Prints a line."""
        print(f"{self._epoch}  {text}", flush=True)

    def end_epoch(self, text: str) -> None:
        """Prints the epoch's line."""
        self.line(text)


def make_display(shows: bool) -> Display:
    """Returns what fits the place: nothing, a bar in a terminal or notebook, lines elsewhere."""
    if not shows:
        return Display()
    from cyxtrain.training.bars import terminal_display  # rich takes a third of the time of `import cyxtrain`

    return terminal_display() or PlainDisplay()


def numbers(measured: Mapping[str, float], prefix: str = "") -> str:
    """Returns what was measured, for people; what there is none of is left out."""
    return "  ".join(
        f"{prefix}{name} {value:.4f}" for name, value in measured.items() if name == "loss" or not math.isnan(value)
    )
