"""Tables of figures, on a terminal and in a file."""

from __future__ import annotations

import rich.box
import rich.console
import rich.table

_WIDTH_OF_FILES = 160


class Table:
    """Rows of text under headings; the first columns are names, the others figures."""

    def __init__(self, title: str, columns: list[str], names: int = 2) -> None:
        self._title = title
        self._table = rich.table.Table(box=rich.box.ASCII2)
        for number, column in enumerate(columns):
            self._table.add_column(column, justify="left" if number < names else "right")

    def add(self, cells: list[str]) -> None:
        """Adds a row."""
        self._table.add_row(*cells)

    def show(self) -> None:
        """Prints it; outside a terminal plainly, as wide as it is."""
        console = rich.console.Console()
        if not console.is_terminal:
            console = rich.console.Console(width=_WIDTH_OF_FILES)
        console.print(self._title, markup=False, highlight=False)
        console.print(self._table)
