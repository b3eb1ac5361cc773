"""Tables and figures of `cyxtrain doctor` and `cyxtrain bench`, by rich; colours only in a terminal."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

_COLUMNS = 80
# Columns that the launcher puts before each line of several ranks.
_LABEL = len("[rank 0] ")
_COLOURS = {"ok": "green", "no": "yellow", "untested": "yellow", "BROKEN": "bold red"}


def print_report(parts: Iterable[RenderableType], *, is_labelled: bool = True) -> None:
    """Print tables and paragraphs, separated by empty lines, in at most 80 columns."""
    from rich.console import Console

    columns = shutil.get_terminal_size((_COLUMNS, 0)).columns
    width = min(max(columns, _COLUMNS // 2), _COLUMNS)
    if is_labelled:
        width -= _LABEL
    colours = sys.stdout.isatty()
    console = Console(file=io.StringIO(), width=width, force_terminal=colours, highlight=False, emoji=False)
    with console.capture() as captured:
        for number, part in enumerate(parts):
            if number > 0:
                console.print()
            console.print(part, markup=False)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()), flush=True)


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> RenderableType:
    """Return a table without lines; words such as "ok" and "BROKEN" are coloured."""
    from rich.table import Table
    from rich.text import Text

    rows = [*rows]
    found = Table(box=None, show_header=bool(titles), pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number, title in enumerate(titles or [""] * len(rows[0])):
        found.add_column(title, justify="right" if number in right else "left", overflow="fold")
    for row in rows:
        found.add_row(*(Text(cell, _COLOURS.get(cell, "")) for cell in row))
    return found


def duration(seconds: float) -> str:
    """Return seconds as "12.3 us", "8.02 ms" or "1.25 s"."""
    if seconds < 1e-3:
        return f"{_three_digits(seconds * 1e6)} us"
    if seconds < 1:
        return f"{_three_digits(seconds * 1e3)} ms"
    return f"{_three_digits(seconds)} s"


def size(count: int) -> str:
    """Return bytes as "4 B", "16 KiB" or "1.5 MiB"."""
    power = min(max(count.bit_length() - 1, 0) // 10, 4)
    unit = ("B", "KiB", "MiB", "GiB", "TiB")[power]
    return f"{round(count / 1024**power, 1):g} {unit}"


def rate(bytes_per_second: float) -> str:
    """Return bytes per second as "85.1 MB/s" or "1.20 GB/s", in powers of ten as for networks."""
    for factor, unit in ((1e9, "GB/s"), (1e6, "MB/s")):
        if bytes_per_second >= factor:
            return f"{_three_digits(bytes_per_second / factor)} {unit}"
    return f"{_three_digits(bytes_per_second / 1e3)} kB/s"


def _three_digits(number: float) -> str:
    if number >= 99.95:
        return f"{number:.0f}"
    if number >= 9.995:
        return f"{number:.1f}"
    return f"{number:.2f}"
