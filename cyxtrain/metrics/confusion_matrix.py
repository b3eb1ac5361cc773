"""A confusion matrix with a classification report, as a picture."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from typing_extensions import override

from cyxtrain.config.settings import require
from cyxtrain.environment.regular_files import local_path
from cyxtrain.errors import ConfigError, reason_of, warn
from cyxtrain.metrics.sums import predicted_classes
from cyxtrain.metrics.whole_set import WholeSet

if TYPE_CHECKING:
    from cyxtrain.metrics.loss import Loss

# Up to this many classes, the numbers are written into the picture.
_MOST_WITH_TEXT = 40


class ConfusionMatrix(WholeSet):
    """Draw the confusion matrix of each validation, with precision, recall and F1 of each class, on rank 0.

    `fit` draws it in each validation, and `evaluate` of its data; the callback `TensorBoard` adds it to its images.

    Args:
        path: Of the picture (PNG, SVG, PDF), which the next one replaces; None: no file. Several validation sets have
            a file each, with the set's name at the end of its stem.
        class_names: Of the classes, in their order; None: their numbers.

    Attributes:
        matrix: The latest counts, on rank 0: a row for each true class, a column for each predicted one.
        figure: The latest matplotlib figure, on rank 0.
        figures: The latest of each validation set, by its name; "" for a set without a name.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = "confusion_matrix.png", class_names: Sequence[Any] | None = None
    ) -> None:
        super().__init__(self._draw)
        has_matplotlib = importlib.util.find_spec("matplotlib") is not None
        require(has_matplotlib, "ConfusionMatrix needs matplotlib: pip install 'cyxtrain[plot]'.")
        self.__name__ = "confusion_matrix"
        self.path = None if path is None else Path(local_path("ConfusionMatrix.path", path)).absolute()
        self.class_names = None if class_names is None else [str(name) for name in class_names]
        self._has_warned = False
        self.matrix: Any = None
        self.figure: Any = None
        self.figures: dict[str, Any] = {}

    @override
    def _kept(self, output: Any, target: Any, loss: Loss) -> tuple[Any, Any]:
        found = predicted_classes(output, target, loss)
        if found is None:
            raise ConfigError("ConfusionMatrix is for classes, and this output and y have no accuracy.")
        predicted, classes, count = found
        given = len(self.class_names or range(count))
        require(given == count, f"ConfusionMatrix.class_names has {given} names, and there are {count} classes.")
        if loss.ignored is not None and not loss.is_binary:
            classes = classes.masked_fill(classes == loss.ignored, -1)
        return (predicted.long(), torch.full_like(predicted, count, dtype=torch.int32)), classes.long()

    @override
    def _names(self, name: str, results: Callable[[], dict[str, float]]) -> list[str]:
        return []  # without drawing: it adds no numbers to the history

    def _draw(self, outputs: Any, targets: Any) -> dict[str, float]:
        counts: list[Any] = []
        if isinstance(outputs, tuple):
            outputs, *counts = outputs
        predicted = _flat(outputs)
        classes = _flat(targets)
        size = _flat(counts[0]).max() if counts else 1 + max(predicted.max(), classes.max())
        names = self.class_names or [str(number) for number in range(size)]
        self.matrix = np.zeros((len(names), len(names)), np.int64)
        np.add.at(self.matrix, (classes[classes >= 0], predicted[classes >= 0]), 1)
        self.figure = self.figures[self._set] = _figure(self.matrix, names)
        if self.path is not None:
            self._write(self.path)
        return {}

    def _write(self, path: Path) -> None:
        if self._set:
            of_set = re.sub(r"[^\w.-]", "_", f"_{self._set}")
            path = path.with_stem(path.stem + of_set)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.figure.savefig(path, dpi=120)
        except OSError as error:
            if not self._has_warned:
                warn(f"ConfusionMatrix cannot write {self.path}: {reason_of(error)}. Training continues.")
            self._has_warned = True


def _flat(rows: Any) -> Any:
    """Return the elements of rows, an array or a list of arrays of different shapes, in one array."""
    return np.concatenate([*map(np.atleast_1d, rows)], None)


def _figure(matrix: Any, names: Sequence[str]) -> Any:
    """Return a figure: a row for each true class, colored by its share, with the class's numbers at its end."""
    from cyxtrain.environment.picture import Picture

    inches = 8.0
    if len(names) <= _MOST_WITH_TEXT:
        inches = len(names) * max(0.4, 0.08 * len(str(matrix.max())))
    inches += 0.08 * max(map(len, names))
    figure: Any = Picture(figsize=(inches + 4, inches + 1.5), layout="constrained")
    axes = figure.subplots()
    right = matrix.diagonal()
    predicted = matrix.sum(0)
    rows = matrix.sum(1)
    f1 = right / np.maximum((predicted + rows) / 2, 1)
    shares = matrix / np.maximum(rows[:, None], 1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.set(xlabel="predicted class", ylabel="true class")
    accuracy = right.sum() / max(rows.sum(), 1)
    mean_f1 = f1[predicted + rows > 0].mean()
    figure.suptitle(f"accuracy {accuracy:.4f} ({right.sum():,} of {rows.sum():,}), F1 {mean_f1:.4f}")
    if len(names) <= _MOST_WITH_TEXT:
        _write_counts(axes, matrix, shares, names)
        precision = right / np.maximum(predicted, 1)
        recall = right / np.maximum(rows, 1)
        _write_report(axes, zip(precision, recall, f1, rows, strict=True))
    return figure


def _write_counts(axes: Any, matrix: Any, shares: Any, names: Sequence[str]) -> None:
    rotation = 0 if max(map(len, names)) <= 3 else 90
    axes.set_xticks(range(len(names)), names, rotation=rotation)
    axes.set_yticks(range(len(names)), names)
    for row, column in np.argwhere(matrix):
        color = "white" if shares[row, column] > 0.5 else "black"
        axes.text(column, row, f"{matrix[row, column]}", ha="center", va="center", color=color, fontsize=8)


def _write_report(axes: Any, numbers: Iterable[tuple[float, float, float, int]]) -> None:
    """Write precision, recall, F1 and the number of samples of each class on the right."""
    lines = [f"{precision:9.3f}{recall:8.3f}{f1:7.3f}{rows:8,}" for precision, recall, f1, rows in numbers]
    small = {"fontsize": 8, "family": "monospace"}
    report = axes.secondary_yaxis("right")
    report.set_yticks(range(len(lines)), lines, **small)
    report.tick_params(length=0, pad=4)
    title = "precision  recall     F1 samples"
    axes.annotate(title, (1, 1), (4, 4), xycoords="axes fraction", textcoords="offset points", **small)
