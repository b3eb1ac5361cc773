"""A table of a model's layers."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

_HEADER = ("layer", "kind", "output", "parameters")
_SMALLEST = (12, 10, 12)
"""Characters to which a column is shortened at most, if the table is wider than the terminal."""
_MOST_OUTPUTS = 4
"""Parts of one layer's output that are shown, one a line."""


class Summary(str):
    """A printed table: prompts and notebooks do not show it a second time."""

    def __repr__(self) -> str:
        return ""

    def _ipython_display_(self) -> None:
        pass


def summary_of(model: nn.Module, shapes: dict[str, list[str]], depth: int | None = None) -> Summary:
    """Return a table with a line per layer, down to a depth, and the numbers of parameters."""
    lines, seen = [], set[int]()
    for name, layer, level in _layers(model):
        own = [each for each in layer.parameters() if id(each) not in seen]
        # A layer in two places has its parameters in the first.
        count = sum(each.numel() for each in own if not isinstance(each, nn.parameter.UninitializedParameter))
        seen.update(id(each) for each in layer.parameters(recurse=False))
        if depth is not None and level > depth:
            continue
        shown, place = f"{count:,}" if count else "", "  " * level + (name.rpartition(".")[2] or "model")
        first, *others = shapes.get(name) or [""]
        lines.append((place, type(layer).__name__, first, shown))
        lines += [("", "", other, "") for other in others]
    widths = [max(len(line[column]) for line in [_HEADER, *lines]) for column in range(4)]
    for column in (1, 0, 2):
        excess = sum(widths) + 6 - max(shutil.get_terminal_size().columns, 80)
        widths[column] = min(widths[column], max(widths[column] - excess, _SMALLEST[column]))
    text = [_line(_HEADER, widths), "-" * (sum(widths) + 6), *(_line(line, widths) for line in lines)]
    return Summary("\n".join([*text, "", *_totals(model)]))


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    for name, layer in model.named_modules(remove_duplicate=False):
        yield name, layer, name.count(".") + 1 if name else 0


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    cut = [cell if len(cell) <= width else cell[: width - 3] + "..." for cell, width in zip(cells, widths, strict=True)]
    *texts, number = (cell.ljust(width) for cell, width in zip(cut, widths, strict=True))
    return "  ".join([*texts, number.strip().rjust(widths[-1])]).rstrip()


def _totals(model: nn.Module) -> list[str]:
    parameters = [each for each in model.parameters() if not isinstance(each, nn.parameter.UninitializedParameter)]
    trained = sum(each.numel() for each in parameters if each.requires_grad)
    size = sum(each.numel() * each.element_size() for each in parameters)
    buffers = sum(each.numel() for each in model.buffers())
    every = sum(each.numel() for each in parameters)
    lines = [f"parameters: {every:,} ({size / 2**20:,.1f} MiB), trained: {trained:,}, frozen: {every - trained:,}"]
    return lines + ([f"numbers in buffers: {buffers:,}"] if buffers else [])


class OutputShapes:
    """Records each layer's first output; attribute `shapes` by layer name: a text for each part of it."""

    def __init__(self, model: nn.Module) -> None:
        self.shapes: dict[str, list[str]] = {}
        self._handles = [layer.register_forward_hook(partial(self._note, name)) for name, layer, _ in _layers(model)]

    def _note(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        parts = [*_described(output, "")]
        more = len(parts) - _MOST_OUTPUTS
        shown = parts if more <= 0 else [*parts[:_MOST_OUTPUTS], f"and {more} more"]
        self.shapes.setdefault(name, shown)  # the dry run may try a single row afterwards

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def _described(output: Any, name: str) -> Iterator[str]:
    """Yield the shape of each tensor in an output, as a tuple, with its name."""
    fields = vars(output) if dataclasses.is_dataclass(output) and not isinstance(output, dict) else output
    if isinstance(fields, dict):
        for key, part in fields.items():
            yield from _described(part, f"{name}{key} ")
    elif isinstance(fields, (tuple, list)):
        for part in fields:
            yield from _described(part, name)
    elif output is not None:
        yield name + (str(tuple(output.shape)) if isinstance(output, Tensor) else type(output).__name__)
