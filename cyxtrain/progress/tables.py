"""Tables in plain lines, and figures as people write them: they look the same in a terminal, a log and a file."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 90
"""Characters of a line, but for what must not be broken: with the launcher's "[rank 0] " it fits into 100 columns."""
_GAP = "  "
_SMALLER = {" us": 1e-6, " ms": 1e-3, " s": 1.0}
_LARGER = {" KiB": 2**10, " MiB": 2**20, " GiB": 2**30, " TiB": 2**40}


def aligned(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> list[str]:
    """Returns rows of cells as lines, each column as wide as its widest cell.

    Args:
        rows: All of one length.
        right: Numbers of the columns whose cells end at one place, as figures do.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        _GAP.join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def wrapped(text: str, indent: str = "") -> list[str]:
    """Returns a sentence as lines; those after the first are set in.

    Args:
        text: Of any length.
        indent: Before the lines after the first.
    """
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def truncated(text: str, length: int) -> str:
    """Returns a text of at most so many characters; what is left out shows."""
    return text if len(text) <= length else f"{text[: length - 2]}.."


def duration(seconds: float) -> str:
    """Returns seconds as "12.3 us", "8.02 ms" or "1.25 s": three digits that mean something."""
    unit = " us" if seconds < 1e-3 else " ms" if seconds < 1 else " s"
    return _figure(seconds / _SMALLER[unit]) + unit


def size(count: int) -> str:
    """Returns a number of bytes as "4 B", "16 KiB", "1.5 MiB"."""
    unit = next((unit for unit, factor in reversed(_LARGER.items()) if count >= factor), None)
    return f"{count} B" if unit is None else f"{round(count / _LARGER[unit], 1):g}{unit}"


def rate(bytes_per_second: float) -> str:
    """Returns bytes per second as "85.1 MB/s" or "1.20 GB/s", in powers of ten as networks have them."""
    steps = ((1e9, "GB/s"), (1e6, "MB/s"))
    factor, unit = next((step for step in steps if bytes_per_second >= step[0]), (1e3, "kB/s"))
    return f"{_figure(bytes_per_second / factor)} {unit}"


def _figure(number: float) -> str:
    """Returns a number with three digits that mean something; hundreds whole."""
    return f"{number:.0f}" if number >= 99.95 else f"{number:.1f}" if number >= 9.995 else f"{number:.2f}"
