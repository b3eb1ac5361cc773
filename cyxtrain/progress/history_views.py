"""Curves of a history: a matplotlib figure, and a small view in notebooks."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from cyxtrain.environment.regular_files import local_path
from cyxtrain.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT, _MARGIN = 220, 90, 6
_TRAIN, _VALIDATION = "#1f77b4", ("#7570b3", "#d95f02", "#1b9e77", "#e7298a", "#66a61e")
_T = TypeVar("_T")


def plot_history(curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], path: Any = None) -> Figure:
    """Return a figure of (epochs, values) by name, a panel for each number; write it to `path` if given."""
    try:
        from cyxtrain.environment.picture import Picture
    except ImportError as error:
        raise ConfigError("plot() needs matplotlib, which is not installed: pip install 'cyxtrain[plot]'.") from error
    panels = _panels({name: curve for name, curve in curves.items() if not _is_constant_rate(name, curve[1])})
    if not panels:
        raise ConfigError("there is nothing to plot: the history has no epoch.")
    columns_of_panels = len(panels) if len(panels) <= 3 else 2
    rows = -(-len(panels) // columns_of_panels)
    figure = Picture(figsize=(5.0 * columns_of_panels, 3.2 * rows), layout="constrained")
    grid: list[Any] = list(figure.subplots(rows, columns_of_panels, squeeze=False).flat)
    for axes, (name, drawn) in zip(grid, panels.items(), strict=False):
        for kind, (places, values), color in drawn:
            axes.plot(places, values, marker="." if len(values) < 30 else "", label=kind, color=color)
        axes.set(xlabel="epoch", title=name)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend()
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    if path is not None:
        figure.savefig(local_path("the path of a plot", path), dpi=120)
    return figure


def history_as_html(columns: Mapping[str, Sequence[float]], summary: str) -> str:
    """Return curves and last values for notebooks, without a script."""
    cells = []
    shown = {name: values for name, values in columns.items() if not _is_constant_rate(name, values)}
    for name, curves in _panels(shown).items():
        last = ", ".join(f"{kind} {values[-1]:.4f}" for kind, values, _ in curves if values)
        cells.append(
            f'<td style="text-align:left"><b>{html.escape(name)}</b><br/>{_svg(curves)}<br/>{html.escape(last)}</td>'
        )
    lines = ["".join(cells[first : first + 4]) for first in range(0, len(cells), 4)]
    table = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<div>{html.escape(summary)}<table>{table}</table></div>"


def _is_constant_rate(name: str, values: Sequence[float]) -> bool:
    return name.startswith("learning_rate") and len(set(values)) == 1


def _panels(columns: Mapping[str, _T]) -> dict[str, list[tuple[str, _T, str]]]:
    """Return (label, values, color) of each curve, by measured number; sets of validation share the panel of theirs."""
    found: dict[str, list[tuple[str, _T, str]]] = {}
    for name, values in columns.items():
        own = name.removeprefix("val_")
        panel = own
        if own != name and own not in found:
            panel = max((each for each in found if own.endswith(f"_{each}")), key=len, default=own)
        kind = "training" if own == name else own.removesuffix(panel).rstrip("_") or "validation"
        curves = found.setdefault(panel, [])
        curves.append((kind, values, _TRAIN if own == name else _VALIDATION[len(curves) % len(_VALIDATION)]))
    return found


def _svg(curves: Sequence[tuple[str, Sequence[float], str]]) -> str:
    finite = [value for _, values, _ in curves for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    longest = max(len(values) for _, values, _ in curves)

    def place(number: int, value: float) -> str:
        x = _MARGIN + (_WIDTH - 2 * _MARGIN) * (number / (longest - 1) if longest > 1 else 0.5)
        y = _HEIGHT - _MARGIN - (_HEIGHT - 2 * _MARGIN) * ((value - low) / (high - low) if high > low else 0.5)
        return f"{x:.1f},{y:.1f}"

    drawn = "".join(
        f'<polyline fill="none" stroke="{color}" stroke-width="1.5" '
        f'points="{" ".join(place(n, value) for n, value in enumerate(values) if math.isfinite(value))}"/>'
        for _, values, color in curves
    )
    return f'<svg width="{_WIDTH}" height="{_HEIGHT}" style="border:1px solid #ccc">{drawn}</svg>'
