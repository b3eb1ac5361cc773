"""A progress bar, where people look on: in a terminal, or below a notebook's cell."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from cyxtrain.progress.display import LiveDisplay, lines_of

_BAR_CHARACTERS = 24


class TerminalDisplay(LiveDisplay):
    """A progress bar per epoch, with numbers and the time that is left."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._progress: Progress | None = None
        self._task = TaskID(0)

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
        self._progress.start()

    def draw(self, steps: int, text: str) -> None:
        """Moves the bar."""
        if self._progress is not None:
            self._progress.update(self._task, completed=steps, numbers=text)
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


class CellDisplay(LiveDisplay):
    """All that is shown of a fit as one output of a notebook's cell, which is rewritten as the fit goes on.

    It needs no widgets: every front end knows how to rewrite an output, and a saved notebook has its last state.

    Args:
        handle: What rewrites it, as IPython's `display(display_id=True)` gives.
    """

    def __init__(self, handle: Any) -> None:
        super().__init__()
        self._handle = handle
        self._lines: list[str] = []
        self._last_step: int | None = None
        self._bar: tuple[int, str] | None = None

    def header(self, facts: Sequence[tuple[str, str]]) -> None:
        """Adds a line per fact."""
        self._lines += lines_of(facts)
        self._rewrite()

    def begin_epoch(self, epoch: int, last_epoch: int, steps: int | None) -> None:
        """Begins a bar."""
        super().begin_epoch(epoch, last_epoch, steps)
        self._last_step = steps
        self.draw(0, "")

    def draw(self, steps: int, text: str) -> None:
        """Moves the bar."""
        self._bar = steps, text
        self._rewrite()

    def line(self, text: str) -> None:
        """Adds a line above the bar."""
        self._lines.append(f"{self._epoch}  {text}")
        self._rewrite()

    def end_epoch(self, text: str) -> None:
        """Replaces the bar by the epoch's line."""
        self._bar = None
        self.line(text)

    def close(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar = None
            self._rewrite()

    def _rewrite(self) -> None:
        lines = list(self._lines)
        if self._bar is not None:
            steps, text = self._bar
            of = "" if self._last_step is None else f"/{self._last_step}"
            lines.append(f"{self._epoch}  {_bar(steps, self._last_step)}  {steps}{of}  {text}")
        self._handle.update(CellText("\n".join(lines)))


class CellText:
    """Lines of text as a notebook shows them: in one width of letters, and as they are where there is no HTML."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text

    def _repr_html_(self) -> str:
        return f'<pre style="white-space:pre;line-height:normal">{html.escape(self._text)}</pre>'


def _bar(steps: int, last: int | None) -> str:
    """Returns how much is done, drawn in characters; where nobody knows, nothing."""
    done = 0 if not last else min(_BAR_CHARACTERS, _BAR_CHARACTERS * steps // last)
    return "" if last is None else "━" * done + "┄" * (_BAR_CHARACTERS - done)


def live_display() -> LiveDisplay | None:
    """Returns a display for a terminal or a notebook; None: there is neither."""
    console = Console()
    if console.is_jupyter:
        from IPython.display import display  # whoever runs a notebook has it

        handle: Any = display(CellText(""), display_id=True)  # type: ignore[no-untyped-call]
        return CellDisplay(handle)
    return TerminalDisplay(console) if console.is_terminal else None
