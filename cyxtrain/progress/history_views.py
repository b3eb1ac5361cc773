"""Curves of a history: a matplotlib figure, and a small view in notebooks."""

from __future__ import annotations

import html
import io
import itertools
import math
import posixpath
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from cyxtrain.checkpoint.remote_files import write_remote
from cyxtrain.environment.regular_files import path_or_url, url_of
from cyxtrain.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH = 220
_HEIGHT = 90
_MARGIN = 6
_TRAINING_COLOR = "#1f77b4"
_VALIDATION_COLORS = ("#7570b3", "#d95f02", "#1b9e77", "#e7298a", "#66a61e")
_T = TypeVar("_T")


def plot_history(curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], path: Any = None) -> Figure:
    """Return a figure of (epochs, values) by name, a panel for each number; write it to `path` if given."""
    try:
        from cyxtrain.environment.picture import Picture
    except ImportError as error:
        raise ConfigError("plot() needs matplotlib, which is not installed: pip install 'cyxtrain[plot]'.") from error
    shown = {name: (places, values) for name, (places, values) in curves.items() if not _is_constant_rate(name, values)}
    panels = _panels(shown)
    if not panels:
        raise ConfigError("there is nothing to plot: the history has no epoch.")
    columns = len(panels) if len(panels) <= 3 else 2
    rows = math.ceil(len(panels) / columns)
    figure = Picture(figsize=(5.0 * columns, 3.2 * rows), layout="constrained")
    grid: list[Any] = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, (name, drawn) in zip(grid, panels.items(), strict=False):
        for label, (places, values), color in drawn:
            marker = "." if len(values) < 30 else ""
            axes.plot(places, values, marker=marker, label=label, color=color)
        axes.set(xlabel="epoch", title=name)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend()
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    if path is not None:
        _save(figure, path_or_url("the path of a plot", path))
    return figure


def _save(figure: Figure, path: str) -> None:
    url = url_of(path)
    if not url:
        figure.savefig(path, dpi=120)
        return
    picture = io.BytesIO()
    _, suffix = posixpath.splitext(url)
    figure.savefig(picture, format=suffix[1:] or None, dpi=120)
    write_remote(url, picture.getvalue())


def history_as_html(columns: Mapping[str, Sequence[float]], summary: str) -> str:
    """Return curves and last values for notebooks, without a script."""
    cells = []
    shown = {name: values for name, values in columns.items() if not _is_constant_rate(name, values)}
    for name, curves in _panels(shown).items():
        last = ", ".join(f"{label} {values[-1]:.4f}" for label, values, _ in curves if values)
        cells.append(
            f'<td style="text-align:left"><b>{html.escape(name)}</b><br/>{_svg(curves)}<br/>{html.escape(last)}</td>'
        )
    lines = ["".join(cells[first : first + 4]) for first in range(0, len(cells), 4)]
    table = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<div>{html.escape(summary)}<table>{table}</table></div>"


def _is_constant_rate(name: str, values: Sequence[float]) -> bool:
    return name.startswith("learning_rate") and len(set(values)) == 1


def _panels(columns: Mapping[str, _T]) -> dict[str, list[tuple[str, _T, str]]]:
    """Return (label, values, color) of each curve, by panel: one for each measured number.

    The numbers of several validation sets, such as "val_test_loss", are in the panel of "loss".
    """
    found: dict[str, list[tuple[str, _T, str]]] = {}
    for name, values in columns.items():
        if not name.startswith("val_"):
            found.setdefault(name, []).append(("training", values, _TRAINING_COLOR))
            continue
        own = name.removeprefix("val_")
        panel = own
        if own not in found:
            panel = max((each for each in found if own.endswith(f"_{each}")), key=len, default=own)
        label = own.removesuffix(panel).rstrip("_") or "validation"
        curves = found.setdefault(panel, [])
        curves.append((label, values, _VALIDATION_COLORS[len(curves) % len(_VALIDATION_COLORS)]))
    return found


def _svg(curves: Sequence[tuple[str, Sequence[float], str]]) -> str:
    everything = itertools.chain.from_iterable(values for _, values, _ in curves)
    finite = list(filter(math.isfinite, everything))
    low = min(finite, default=0.0)
    high = max(finite, default=1.0)
    last = max(len(values) for _, values, _ in curves) - 1

    def point(number: int, value: float) -> str:
        x = _MARGIN + (_WIDTH - 2 * _MARGIN) * _fraction(number, 0, last)
        y = _HEIGHT - _MARGIN - (_HEIGHT - 2 * _MARGIN) * _fraction(value, low, high)
        return f"{x:.1f},{y:.1f}"

    lines = []
    for _, values, color in curves:
        points = " ".join(point(number, value) for number, value in enumerate(values) if math.isfinite(value))
        lines.append(f'<polyline fill="none" stroke="{color}" stroke-width="1.5" points="{points}"/>')
    drawn = "".join(lines)
    return f'<svg width="{_WIDTH}" height="{_HEIGHT}" style="border:1px solid #ccc">{drawn}</svg>'


def _fraction(value: float, low: float, high: float) -> float:
    """Return where a value is between two others, from 0 to 1; in the middle if they are equal."""
    return (value - low) / (high - low) if high > low else 0.5
