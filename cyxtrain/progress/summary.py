"""A table of a model's layers."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

_HEADER = ("layer", "kind", "output", "parameters")
# Characters between the columns.
_GAPS = 6
# Characters to which a column is shortened at most, if the table is wider than the terminal.
_SMALLEST = (12, 10, 12)
# Parts of one layer's output that are shown, one a line.
_MOST_OUTPUTS = 4


class Summary(str):
    """A printed table: prompts and notebooks do not show it a second time."""

    def __repr__(self) -> str:
        return ""

    def _ipython_display_(self) -> None:
        pass


def summary_of(model: nn.Module, shapes: dict[str, list[str]], depth: int | None = None) -> Summary:
    """Return a table with a line per layer, down to a depth, and the numbers of parameters."""
    rows = []
    seen: set[int] = set()
    for name, layer, level in _layers(model):
        count = _unseen_parameters(layer, seen)
        if depth is not None and level > depth:
            continue
        place = "  " * level + (name.rpartition(".")[2] or "model")
        first, *others = shapes.get(name) or [""]
        shown_count = f"{count:,}" if count else ""
        rows.append((place, type(layer).__name__, first, shown_count))
        rows += [("", "", other, "") for other in others]
    widths = _widths([_HEADER, *rows])
    lines = [_line(_HEADER, widths), "-" * (sum(widths) + _GAPS), *(_line(row, widths) for row in rows)]
    return Summary("\n".join([*lines, "", *_totals(model)]))


def _unseen_parameters(layer: nn.Module, seen: set[int]) -> int:
    """Return how many numbers a layer and its parts have that no earlier layer has."""
    own = [each for each in layer.parameters() if id(each) not in seen]
    seen.update(id(each) for each in layer.parameters(recurse=False))
    return _count(own)


def _count(parameters: Iterable[nn.Parameter]) -> int:
    """Return how many numbers parameters have; a lazy layer's have none yet."""
    return sum(each.numel() for each in parameters if not isinstance(each, nn.parameter.UninitializedParameter))


def _widths(rows: Sequence[tuple[str, ...]]) -> list[int]:
    """Return the columns' widths, shortened as far as possible if the terminal is narrower."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    available = max(shutil.get_terminal_size().columns, 80)
    for column in (1, 0, 2):
        excess = sum(widths) + _GAPS - available
        shortened = max(widths[column] - excess, _SMALLEST[column])
        widths[column] = min(widths[column], shortened)
    return widths


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """Yield (name, layer, level) of each layer; a layer in two places comes twice."""
    for name, layer in model.named_modules(remove_duplicate=False):
        level = name.count(".") + 1 if name else 0
        yield name, layer, level


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    padded = [_shortened(cell, width).ljust(width) for cell, width in zip(cells, widths, strict=True)]
    padded[-1] = padded[-1].strip().rjust(widths[-1])  # numbers are aligned on the right
    return "  ".join(padded).rstrip()


def _shortened(cell: str, width: int) -> str:
    return cell if len(cell) <= width else cell[: width - 3] + "..."


def _totals(model: nn.Module) -> list[str]:
    parameters = [each for each in model.parameters() if not isinstance(each, nn.parameter.UninitializedParameter)]
    size_bytes = sum(each.numel() * each.element_size() for each in parameters)
    count = _count(parameters)
    trained = _count(each for each in parameters if each.requires_grad)
    lines = [
        f"parameters: {count:,} ({size_bytes / 2**20:,.1f} MiB), trained: {trained:,}, frozen: {count - trained:,}"
    ]
    buffers = sum(each.numel() for each in model.buffers())
    if buffers:
        lines.append(f"numbers in buffers: {buffers:,}")
    return lines


class OutputShapes:
    """Hooks that record each layer's first output in `shapes`: by layer name, a string for each part."""

    def __init__(self, model: nn.Module) -> None:
        self.shapes: dict[str, list[str]] = {}
        self._handles = [layer.register_forward_hook(partial(self._note, name)) for name, layer, _ in _layers(model)]

    def _note(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        parts = list(_described(output, ""))
        more = len(parts) - _MOST_OUTPUTS
        if more > 0:
            parts = [*parts[:_MOST_OUTPUTS], f"and {more} more"]
        self.shapes.setdefault(name, parts)  # the dry run may try a single sample afterwards

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def _described(output: Any, name: str) -> Iterator[str]:
    """Yield the shape of each tensor in an output, as a tuple, with its name."""
    parts = output
    if dataclasses.is_dataclass(output) and not isinstance(output, dict):
        parts = vars(output)
    if isinstance(parts, dict):
        for key, part in parts.items():
            yield from _described(part, f"{name}{key} ")
    elif isinstance(parts, (tuple, list)):
        for part in parts:
            yield from _described(part, name)
    elif isinstance(output, Tensor):
        yield f"{name}{tuple(output.shape)}"
    elif output is not None:
        yield f"{name}{type(output).__name__}"
