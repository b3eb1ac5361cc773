"""Tables and figures of `cyxtrain doctor` and `cyxtrain bench`: by rich, plain where there is no terminal."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

_COLUMNS = 80
_LABEL = len("[rank 0] ")
"""Columns that the launcher puts before each line of several ranks."""
_COLOURS = {"ok": "green", "no": "yellow", "untested": "yellow", "BROKEN": "bold red"}


def print_report(parts: Iterable[RenderableType], *, is_labelled: bool = True) -> None:
    """Print tables and paragraphs, separated by empty lines, in at most 80 columns."""
    from rich.console import Console

    width = min(_COLUMNS, max(_COLUMNS // 2, shutil.get_terminal_size((_COLUMNS, 0)).columns)) - _LABEL * is_labelled
    colours = sys.stdout.isatty()
    console = Console(file=io.StringIO(), width=width, force_terminal=colours, highlight=False, emoji=False)
    with console.capture() as captured:
        for number, part in enumerate(parts):
            console.print(*([""] if number else []), part, sep="\n", markup=False)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()), flush=True)


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> RenderableType:
    """Return a table without lines; words such as "ok" and "BROKEN" are coloured."""
    from rich.table import Table
    from rich.text import Text

    rows = [*rows]
    found = Table(box=None, show_header=bool(titles), pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number in range(len(titles or rows[0])):
        title = titles[number] if titles else ""
        found.add_column(title, justify="right" if number in right else "left", overflow="fold")
    for row in rows:
        found.add_row(*(Text(cell, _COLOURS.get(cell, "")) for cell in row))
    return found


def duration(seconds: float) -> str:
    """Return seconds as "12.3 us", "8.02 ms" or "1.25 s"."""
    factor, unit = (1e6, "us") if seconds < 1e-3 else (1e3, "ms") if seconds < 1 else (1, "s")
    return f"{_three_digits(seconds * factor)} {unit}"


def size(count: int) -> str:
    """Return bytes as "4 B", "16 KiB" or "1.5 MiB"."""
    power = min(max(count.bit_length() - 1, 0) // 10, 4)
    return f"{round(count / 1024**power, 1):g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def rate(bytes_per_second: float) -> str:
    """Return bytes per second as "85.1 MB/s" or "1.20 GB/s", in powers of ten as for networks."""
    factor, unit = next(
        ((factor, unit) for factor, unit in ((1e9, "GB/s"), (1e6, "MB/s")) if bytes_per_second >= factor), (1e3, "kB/s")
    )
    return f"{_three_digits(bytes_per_second / factor)} {unit}"


def _three_digits(number: float) -> str:
    return f"{number:.0f}" if number >= 99.95 else f"{number:.1f}" if number >= 9.995 else f"{number:.2f}"
