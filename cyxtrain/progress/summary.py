"""A table of a model's layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_HEADER = ("layer", "kind", "output", "parameters")


def summary_of(model: nn.Module, shapes: dict[str, str]) -> str:
    """Return a table with a line per layer, and the numbers of parameters."""
    lines, seen = [], set[int]()
    for name, layer, depth in _layers(model):
        own = [each for each in layer.parameters() if id(each) not in seen]
        # A layer in two places has its parameters in the first.
        count = sum(each.numel() for each in own if not isinstance(each, nn.parameter.UninitializedParameter))
        is_leaf = next(layer.children(), None) is None
        if is_leaf:
            seen.update(id(each) for each in own)
        shown, place = f"{count:,}" if count else "", "  " * depth + (name.rpartition(".")[2] or "model")
        lines.append((place, type(layer).__name__, shapes.get(name, ""), shown))
    widths = [max(len(line[column]) for line in [_HEADER, *lines]) for column in range(4)]
    text = [_line(_HEADER, widths), "-" * (sum(widths) + 6), *(_line(line, widths) for line in lines)]
    return "\n".join([*text, "", *_totals(model)])


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    for name, layer in model.named_modules(remove_duplicate=False):
        yield name, layer, name.count(".") + 1 if name else 0


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    *texts, number = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
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
    """Records the shape of each layer's output; attribute `shapes` by layer name, with n for rows."""

    def __init__(self, model: nn.Module) -> None:
        self.shapes: dict[str, str] = {}
        self._handles = [layer.register_forward_hook(self._hook(name)) for name, layer, _ in _layers(model)]

    def _hook(self, name: str) -> Any:
        def note(_: nn.Module, __: Any, output: Any) -> None:
            self.shapes[name] = _described(output)

        return note

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def _described(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"({', '.join(['n', *map(str, output.shape[1:])])})" if output.dim() else "a number"
    if isinstance(output, dict):
        return ", ".join(f"{name} {_described(part)}" for name, part in output.items())
    if isinstance(output, (tuple, list)) and all(isinstance(part, torch.Tensor) for part in output):
        return ", ".join(map(_described, output))
    return type(output).__name__
