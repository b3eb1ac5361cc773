"""The output of rank 0: a header, a progress bar in a terminal or a notebook, and a line per epoch elsewhere."""

from __future__ import annotations

import contextlib
import html
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import override

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

REFRESH_SECONDS = 0.1
_BAR_CHARACTERS = 24


class Display:
    """Shows nothing: on ranks other than 0, and on rank 0 without `verbose`."""

    def header(self, facts: Sequence[tuple[str, str]]) -> None:
        """Show one line per fact, of (name, description)."""

    def begin_epoch(self, epoch: int, last_epoch: int, steps: int | None) -> None:
        """Start an epoch; the number of steps may be unknown."""

    def step(self, global_rows: int, measured: Callable[[], Mapping[str, float]]) -> None:
        """Count a step; `measured` returns this rank's numbers so far."""

    def draw(self, steps: int, text: str) -> None:
        """Draw the bar after so many steps of the epoch."""

    def line(self, text: str) -> None:
        """Print a line."""

    def end_epoch(self, text: str) -> None:
        """Print the line of an epoch, after its validation."""

    def close(self) -> None:
        """Restore the terminal, also after an error."""


class _PlainDisplay(Display):
    """Plain lines, for files and pipes."""

    def __init__(self) -> None:
        self._epoch = ""

    def header(self, facts: Sequence[tuple[str, str]]) -> None:
        for line in _lines(facts):
            print(line, flush=True)

    def begin_epoch(self, epoch: int, last_epoch: int, steps: int | None) -> None:
        self._epoch = f"epoch {epoch}/{last_epoch}"

    def line(self, text: str) -> None:
        print(f"{self._epoch}  {text}", flush=True)

    def end_epoch(self, text: str) -> None:
        self.line(text)


class LiveDisplay(_PlainDisplay):
    """Draws a bar ten times a second, with this rank's numbers so far and samples/s."""

    def __init__(self) -> None:
        super().__init__()
        self._rows = self._steps = 0
        self._began = self._drawn = 0.0

    @override
    def begin_epoch(self, epoch: int, last_epoch: int, steps: int | None) -> None:
        super().begin_epoch(epoch, last_epoch, steps)
        self._rows = self._steps = 0
        self._began = self._drawn = time.perf_counter()

    @override
    def step(self, global_rows: int, measured: Callable[[], Mapping[str, float]]) -> None:
        self._rows += global_rows
        self._steps += 1
        now = time.perf_counter()
        if now - self._drawn >= REFRESH_SECONDS:
            self._drawn = now
            rate = f"{self._rows / (now - self._began):,.0f} samples/s"
            self.draw(self._steps, "  ".join(filter(None, (numbers(measured()), rate))))


class _TerminalDisplay(LiveDisplay):
    """A progress bar of rich per epoch, with numbers and the remaining time."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._progress: Progress | None = None

    def begin_epoch(self, epoch: int, last_epoch: int, steps: int | None) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

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
        self._progress.start()

    def draw(self, steps: int, text: str) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=steps, numbers=text)
            self._progress.refresh()

    def line(self, text: str) -> None:
        self._console.print(f"{self._epoch}  {text}", highlight=False, markup=False)

    def end_epoch(self, text: str) -> None:
        self.close()
        self.line(text)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class CellDisplay(LiveDisplay):
    """One output of a notebook cell, rewritten in place: without widgets, and a saved notebook has its last state."""

    def __init__(self, handle: Any) -> None:
        super().__init__()
        self._handle = handle
        self._lines: list[str] = []
        self._last_step: int | None = None
        self._bar: list[str] = []

    @override
    def header(self, facts: Sequence[tuple[str, str]]) -> None:
        self._lines += _lines(facts)
        self._rewrite()

    @override
    def begin_epoch(self, epoch: int, last_epoch: int, steps: int | None) -> None:
        super().begin_epoch(epoch, last_epoch, steps)
        self._last_step = steps
        self.draw(0, "")

    @override
    def draw(self, steps: int, text: str) -> None:
        bar, of = "", ""
        if self._last_step is not None:
            done = min(_BAR_CHARACTERS, _BAR_CHARACTERS * steps // self._last_step) if self._last_step else 0
            bar, of = "━" * done + "┄" * (_BAR_CHARACTERS - done), f"/{self._last_step}"
        self._bar = [f"{self._epoch}  {bar}  {steps}{of}  {text}"]
        self._rewrite()

    @override
    def line(self, text: str) -> None:
        self._lines.append(f"{self._epoch}  {text}")
        self._rewrite()

    @override
    def end_epoch(self, text: str) -> None:
        self._bar = []
        self.line(text)

    @override
    def close(self) -> None:
        if self._bar:
            self._bar = []
            self._rewrite()

    def _rewrite(self) -> None:
        self._handle.update(CellText("\n".join(self._lines + self._bar)))


class CellText:
    """Text in a fixed-width font in notebooks, and plain text elsewhere."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text

    def _repr_html_(self) -> str:
        return f'<pre style="white-space:pre;line-height:normal">{html.escape(self._text)}</pre>'


_makers: list[Callable[[bool], Display]] = []


@contextlib.contextmanager
def displays_by(make: Callable[[bool], Display]) -> Iterator[None]:
    """Make displays by a function of whether they show anything."""
    _makers.append(make)
    try:
        yield
    finally:
        _makers.pop()


def make_display(shows: bool) -> Display:
    """Return a display that fits the environment: none, a bar in a terminal or notebook, or plain lines."""
    if _makers:
        return _makers[-1](shows)
    if not shows:
        return Display()
    from rich.console import Console  # takes a third of the time of `import cyxtrain`

    console = Console()
    if console.is_jupyter:
        from IPython.display import display  # installed where notebooks run

        return CellDisplay(display(CellText(""), display_id=True))  # type: ignore[no-untyped-call]
    return _TerminalDisplay(console) if console.is_terminal else _PlainDisplay()


def _lines(facts: Sequence[tuple[str, str]]) -> list[str]:
    return [f"{name:<11}{description}" for name, description in facts]


def numbers(measured: Mapping[str, float], prefix: str = "") -> str:
    """Return measured numbers as text, without those that are NaN, the loss excepted."""
    return "  ".join(
        f"{prefix}{name} {value:.4f}" for name, value in measured.items() if name == "loss" or not math.isnan(value)
    )
