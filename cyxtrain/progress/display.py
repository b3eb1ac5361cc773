"""The output of rank 0: a header, a progress bar in a terminal or a notebook, and lines elsewhere."""

from __future__ import annotations

import contextlib
import datetime
import html
import math
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, ClassVar, Literal, cast

from typing_extensions import override

from cyxtrain.environment.process_env import bar_columns
from cyxtrain.environment.standard_streams import STDOUT, show
from cyxtrain.errors import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

REFRESH_SECONDS = 0.1
LINE_SECONDS = 30.0
"""Seconds without a printed line after which rank 0 prints one, if there is no bar."""
_BAR_CHARACTERS = 24
_FEWEST_BAR_CHARACTERS = 5
_CELL_COLUMNS = 120  # a longer line has a scroll bar
# Width of the names of header lines.
_INDENT = 11
_NO_BREAK = "\u00a0"
_ASCII = str.maketrans("━┄", "#-")

Clock = Callable[[], float]
Measured = Callable[[], Mapping[str, float]]
Verbosity = bool | int | Literal["auto"]
"""Keras's: 0 shows nothing, 1 and "auto" a bar, 2 only lines."""


class Display:
    """Shows nothing: on ranks other than 0, and on rank 0 without `verbose`."""

    def header(self, facts: Sequence[tuple[str, str]]) -> None:
        """Show one line per fact, of (name, description)."""

    def begin_epoch(self, epoch: int, last_epoch: int, steps: int | None, done: int = 0) -> None:
        """Start an epoch, or the rest of one after `done` steps.

        An unknown `last_epoch` is 0, and unknown `steps` are None.
        """
        name = f"epoch {epoch}/{last_epoch}" if last_epoch else f"epoch {epoch}"
        self.begin(name, steps, done)

    def begin(self, name: str, steps: int | None, done: int = 0) -> None:
        """Start a bar, as `begin_epoch`, with a name before it."""

    def step(self, global_rows: int, measured: Measured) -> None:
        """Count a step; `measured` returns this rank's numbers so far."""

    def phase(self, name: str, done: int = 0, total: int = 0, rows: int = 0, measured: Measured = dict) -> None:
        """Show what the fit does between steps, such as validating, and how many of its batches are done.

        `rows` is the number of samples of the latest batch; `measured` is as in `step`.
        """

    def draw(self, steps: int, text: str) -> None:
        """Draw the bar after so many steps of the epoch."""

    def line(self, text: str) -> None:
        """Print a line, or several."""

    def end_epoch(self, text: str) -> None:
        """Print the line of an epoch, after its validation."""

    def close(self) -> None:
        """Restore the terminal, also after an error."""


class LiveDisplay(Display):
    """A display that draws ten times a second: numbers and samples/s, or what the fit does between steps."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._epoch = ""
        self._last_step: int | None = None
        self._rows = 0
        self._steps = 0
        self._began = 0.0
        self._drawn = 0.0
        self._first_draw: tuple[int, float] | None = None

    @override
    def begin(self, name: str, steps: int | None, done: int = 0) -> None:
        self._epoch = name
        self._last_step = steps
        self._rows = 0
        self._steps = done
        self._began = self._clock()
        self._drawn = self._began
        self._first_draw = None
        self.draw(done, "")

    @override
    def step(self, global_rows: int, measured: Measured) -> None:
        self._rows += global_rows
        self._steps += 1
        now = self._clock()
        if now - self._drawn >= REFRESH_SECONDS:
            self._drawn = now
            rate = f"{self._rows / (now - self._began):,.0f} samples/s"
            self.draw(self._steps, _joined(numbers(measured()), rate))

    @override
    def phase(self, name: str, done: int = 0, total: int = 0, rows: int = 0, measured: Measured = dict) -> None:
        now = self._clock()
        # Its begin is drawn at once, because it may be a single call, but not in an epoch too short for a bar.
        if now - self._drawn >= REFRESH_SECONDS or (not done and self._drawn > self._began):
            self._drawn = now
            text = f"{name} {done}/{total}" if total else name
            self.draw(self._steps, text)

    def _labelled(self, text: str) -> str:
        return f"{self._epoch}  {text}".replace("\n", "\n  ")

    def _count(self, steps: int) -> str:
        return str(steps) if self._last_step is None else f"{steps}/{self._last_step}"

    def _time_left(self, steps: int) -> str:
        """Return the time for the other steps, by the pace since the first draw: before it, models compile."""
        now = self._clock()
        if self._first_draw is None and steps:
            self._first_draw = (steps, now)
        first_step, first_time = self._first_draw or (steps, now)
        if self._last_step is None or not first_step < steps < self._last_step:
            return ""
        return _hours((now - first_time) / (steps - first_step) * (self._last_step - steps))

    def _bar(self, steps: int, text: str, columns: int) -> str:
        """Return a line with a bar; numbers that do not fit are left out, the last ones first."""
        count = self._count(steps)
        time_left = self._time_left(steps)
        total = self._last_step

        def line(bar: str) -> str:
            return _joined(self._epoch, bar, count, text, time_left)

        shortest_bar = "━" * _FEWEST_BAR_CHARACTERS if total else ""
        while text and len(line(shortest_bar)) > columns:
            text = text.rpartition("  ")[0]
        if not total:
            return line("")
        length = max(0, min(_BAR_CHARACTERS, columns - len(line("")) - 2))
        done = min(length, length * steps // total)
        return line("━" * done + "┄" * (length - done))


class PlainDisplay(LiveDisplay):
    """Lines, for files and pipes: one per epoch, and one every `LINE_SECONDS`."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        super().__init__(clock)
        self._printed = 0.0

    def _columns(self) -> int:
        """Return how long a line may be; 0: any length."""
        return 0

    @override
    def header(self, facts: Sequence[tuple[str, str]]) -> None:
        for line in _lines(facts):
            show(_wrapped(line, self._columns(), _INDENT))

    @override
    def draw(self, steps: int, text: str) -> None:
        time_left = self._time_left(steps)
        if self._clock() - max(self._began, self._printed) >= LINE_SECONDS:
            if time_left:
                time_left = f"{time_left} left"
            self.line(_joined(f"batch {self._count(steps)}", text, time_left))

    @override
    def line(self, text: str) -> None:
        self._printed = self._clock()
        whole = re.sub(r"(?<! ) (?! )", _NO_BREAK, self._labelled(text))  # a name stays with its number
        self._print(_wrapped(whole, self._columns(), len(self._epoch) + 2).replace(_NO_BREAK, " "))

    def _print(self, lines: str) -> None:
        show(lines)

    @override
    def end_epoch(self, text: str) -> None:
        self.close()
        self.line(text)


class TerminalDisplay(PlainDisplay):
    """A bar that rich keeps below what the program prints."""

    def __init__(self, console: Console, clock: Clock = time.perf_counter) -> None:
        super().__init__(clock)
        self._console = console
        self._live: Live | None = None

    @override
    def draw(self, steps: int, text: str) -> None:
        from rich.live import Live
        from rich.text import Text

        bar = _encodable(self._bar(steps, text, self._console.width), self._console.encoding)
        shown = Text(bar, no_wrap=True, overflow="crop")
        shown.highlight_regex("━+", "bar.complete")
        if self._live is None:
            # No thread: the loop refreshes.
            self._live = Live(console=self._console, transient=True, auto_refresh=False)
            self._live.start()
        self._live.update(shown, refresh=True)

    @override
    def _columns(self) -> int:
        return self._console.width

    @override
    def _print(self, lines: str) -> None:
        self._console.print(lines, highlight=False, markup=False, soft_wrap=True)

    @override
    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


class LauncherDisplay(PlainDisplay):
    """A bar that `cyxtrain launch` keeps below the lines of all ranks; it ends with a carriage return."""

    def __init__(self, columns: int, clock: Clock = time.perf_counter) -> None:
        super().__init__(clock)
        self._bar_columns = columns
        self._is_drawn = False

    @override
    def _columns(self) -> int:
        return max(1, self._bar_columns - len("[rank 0] "))  # which the launcher puts before each line

    @override
    def draw(self, steps: int, text: str) -> None:
        self._is_drawn = True
        bar = _encodable(self._bar(steps, text, self._bar_columns), sys.stdout.encoding)
        show(f"{bar}\r", "")  # in one piece: workers of a loader may print too

    @override
    def close(self) -> None:
        if self._is_drawn:
            self._is_drawn = False
            show(" \r", "")


class CellDisplay(LiveDisplay):
    """One output of a notebook cell, rewritten in place: no widgets, and a saved notebook shows the end."""

    _printed: ClassVar[dict[int, Sequence[tuple[str, str]]]] = {}  # by cell: the latest header, which is not repeated

    def __init__(self, handle: Any, cell: int = 0) -> None:
        super().__init__()
        self._handle = handle
        self._cell = cell
        self._before = CellDisplay._printed.get(cell, ())
        self._header: list[tuple[str, str]] = []
        self._lines: list[str] = []
        self._bars: list[str] = []

    @override
    def header(self, facts: Sequence[tuple[str, str]]) -> None:
        # A loop of fits in one cell would repeat the same lines for each.
        shown_before: list[tuple[str, str]] = []
        if not self._epoch:  # nothing has been trained
            shown_before = [fact for fact in facts if fact in self._before]
            self._header += facts
            CellDisplay._printed = {self._cell: self._header}
        self._lines += _lines([fact for fact in facts if fact not in shown_before])
        if shown_before:
            names = dict.fromkeys(name for name, _ in shown_before)
            self._lines += _lines([("as above", ", ".join(names))])
        self._rewrite()

    @override
    def draw(self, steps: int, text: str) -> None:
        self._bars = [self._bar(steps, text, _CELL_COLUMNS)]
        self._rewrite()

    @override
    def line(self, text: str) -> None:
        self._lines.append(self._labelled(text))
        self._rewrite()

    @override
    def end_epoch(self, text: str) -> None:
        self._bars = []
        self.line(text)

    @override
    def close(self) -> None:
        if self._bars:
            self._bars = []
            self._rewrite()

    def _rewrite(self) -> None:
        self._handle.update(CellText("\n".join(self._lines + self._bars)))


class CellText:
    """Text in a fixed-width font in notebooks, and plain text elsewhere."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text

    def _repr_html_(self) -> str:
        return f'<pre style="white-space:pre;line-height:normal;font-family:monospace">{html.escape(self._text)}</pre>'


_makers: list[Callable[[bool], Display]] = []


@contextlib.contextmanager
def displays_by(make: Callable[[bool], Display]) -> Iterator[None]:
    """Make displays by a function within a `with` block; its argument is whether they show anything."""
    _makers.append(make)
    try:
        yield
    finally:
        _makers.pop()


def make_display(shows: bool) -> Display:
    """Return a display that fits the environment: none, a bar in a terminal or notebook, or lines."""
    if _makers:
        return _makers[-1](shows)
    if not shows:
        return Display()
    columns = bar_columns()
    if columns and sys.stdout is sys.__stdout__:  # a program that redirects it gets lines
        return LauncherDisplay(columns)
    from rich.console import Console  # takes a third of the time of `import cyxtrain`

    # A closed terminal or a full disk must not end the fit: STDOUT does not raise.
    console = Console(file=cast("IO[str]", STDOUT))
    if console.is_jupyter:
        from IPython import display, get_ipython  # installed where notebooks run

        handle = display.display(CellText(""), display_id=True)  # type: ignore[no-untyped-call]
        return CellDisplay(handle, getattr(get_ipython(), "execution_count", 0))
    return TerminalDisplay(console) if console.is_terminal else PlainDisplay()


def _lines(facts: Sequence[tuple[str, str]]) -> list[str]:
    return [printable(f"{name:<{_INDENT}}{description}") for name, description in facts]


def _wrapped(text: str, columns: int, indent: int) -> str:
    """Return text with long lines broken to fit into columns; with 0 columns, as it is.

    The rest of a line is indented; if the line itself is indented, the rest goes below its second word.
    """
    if not columns:
        return text
    wrapper = textwrap.TextWrapper(columns, break_long_words=False, break_on_hyphens=False)
    found = []
    for line in text.split("\n"):
        first_word = re.match(r" +\S+ +", line)
        hanging = first_word.end() if first_word else indent
        wrapper.subsequent_indent = " " * hanging
        found.append(wrapper.fill(line))
    return "\n".join(found)


def numbers(measured: Mapping[str, float]) -> str:
    """Return measured numbers for a line, except numbers of single classes, and NaN unless it is a loss."""
    found = []
    for name, value in measured.items():
        is_absent = math.isnan(value) and not name.endswith("loss")
        if not is_absent and "_class_" not in name:
            found.append(f"{printable(name)} {value:.4f}")
    return "  ".join(found)


def around_validation(before: str, validated: Mapping[str, float], sets: Sequence[str], after: str = "") -> str:
    """Return a line with the numbers of a validation in it; with several sets, a line for each below it.

    The first set's numbers also have plain names, which are left out there.
    """
    by_set: dict[str, dict[str, float]] = {name: {} for name in sets if name}
    if not by_set or not validated:
        return _joined(before, numbers(validated), after)
    first = sets[0]
    for name, value in validated.items():
        owners = [each for each in by_set if name.startswith(f"val_{each}_")]
        if owners:
            owner = max(owners, key=len)
            by_set[owner][name.removeprefix(f"val_{owner}_")] = value
        elif name.replace("val_", f"val_{first}_", 1) not in validated:
            by_set[first][name.removeprefix("val_")] = value
    width = max(map(len, by_set))
    below = [f"val_{name:<{width}}  {numbers(measured)}" for name, measured in by_set.items()]
    return "\n".join([_joined(before, after), *below])


def pace(seconds: float, steps: int, rows: int) -> str:
    """Return how fast the steps of an epoch were, such as "12 s, 3.4 ms/step, 18,800 samples/s"."""
    if seconds >= 120:
        duration = _hours(seconds)
    elif seconds >= 10:
        duration = f"{seconds:.0f} s"
    else:
        duration = f"{seconds:.2g} s"
    return f"{duration}, {1000 * seconds / max(steps, 1):,.1f} ms/step, {rows / seconds:,.0f} samples/s"


def _hours(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))


def _joined(*parts: str) -> str:
    return "  ".join(filter(None, parts))


def _encodable(bar: str, encoding: str | None) -> str:
    """Return a bar in characters that the encoding has."""
    if (encoding or "").lower().startswith("utf"):
        return bar
    return bar.translate(_ASCII)
