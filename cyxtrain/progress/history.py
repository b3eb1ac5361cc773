"""The history that `fit` returns: the numbers of every epoch, the same on every rank."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from cyxtrain.config.settings import names_checked, unknown_name
from cyxtrain.environment.regular_files import local_path, read_text
from cyxtrain.errors import ConfigError, brief, counted, printable
from cyxtrain.progress.history_views import history_as_html, plot_history

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Keras's names, in the order of the columns; CSV puts "train_" before the first two.
_KERAS_NAMES = {
    "loss": "train_losses",
    "accuracy": "train_accuracies",
    "val_loss": "val_losses",
    "val_accuracy": "val_accuracies",
}

# Strict JSON has no such numbers; other readers refuse Python's NaN without quotes.
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

_FIRST_ROWS = 5
_LAST_ROWS = 4


@names_checked
@dataclass(repr=False)
class TrainingHistory:
    """The numbers of one call of `fit`: each list has one entry per epoch, or is empty."""

    train_losses: list[float] = field(default_factory=list)
    """Mean loss over all training samples of the epoch, of all ranks, while the parameters change."""
    train_accuracies: list[float] = field(default_factory=list)
    """Fraction of right predictions on them, 0 to 1; empty if targets are not classes."""
    val_losses: list[float] = field(default_factory=list)
    """Mean loss over all validation samples after the epoch; empty without validation data."""
    val_accuracies: list[float] = field(default_factory=list)
    """Fraction of right predictions on them, 0 to 1."""
    total_time_seconds: float = 0.0
    """Duration of `fit` in seconds, including validation and checkpoints."""
    samples_per_second: float = 0.0
    """Training samples per second over all ranks."""
    effective_batch_size: int = 0
    """Samples per step over all ranks: batch_size x accumulation_steps x world_size."""
    world_size: int = 1
    """Number of ranks."""
    epochs: list[int] = field(default_factory=list)
    """The epoch numbers as shown, from 1; a second `fit` continues counting."""
    steps: list[int] = field(default_factory=list)
    """The number of steps at the end of each epoch, earlier fits of the trainer included."""
    metrics: dict[str, list[float]] = field(default_factory=dict)
    """Other measured numbers by name, such as "f1" and "val_f1"."""
    validations: list[dict[str, float]] = field(default_factory=list)
    """Each validation: the "step" and "epoch" in which it came, "val_loss" and others; an epoch has the last one's."""

    @property
    def history(self) -> dict[str, list[float]]:
        """The non-empty lists under Keras's names (loss, accuracy, val_loss, val_accuracy), and of metrics."""
        columns = {name: getattr(self, own) for name, own in _KERAS_NAMES.items()} | self.metrics
        return {name: values for name, values in columns.items() if values}

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as a new dictionary; NaN and infinities stay as they are."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainingHistory:
        """Rebuild a history from `to_dict`, or from its JSON object; absent fields are empty.

        Args:
            values: Fields by name.

        Raises:
            ConfigError: An unknown field, or a value that is not a number.
        """
        empty = cls().to_dict()
        read: dict[str, Any] = {}
        for name, value in values.items():
            if name not in empty:
                raise unknown_name(cls.__name__, name, list(empty))
            if name == "validations":
                if not isinstance(value, (list, tuple)) or not all(isinstance(row, Mapping) for row in value):
                    raise ConfigError(f"{cls.__name__}.{name} must be numbers by name, got {brief(value)}.")
                read[name] = [{each: _number(each, number) for each, number in row.items()} for row in value]
            elif isinstance(empty[name], dict):
                if not isinstance(value, Mapping):
                    raise ConfigError(f"{cls.__name__}.{name} must be lists of numbers by name, got {brief(value)}.")
                read[name] = {each: _numbers(each, items) for each, items in value.items()}
            elif isinstance(empty[name], list):
                read[name] = _numbers(name, value)
            else:
                read[name] = _number(name, value)
        return cls(**read)

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the history as strict JSON, and write it to `path` if given.

        Finite numbers are restored bit for bit; the others are the strings "NaN", "Infinity", "-Infinity".
        """
        return _written(json.dumps(_json_values(self.to_dict()), allow_nan=False, indent=2) + "\n", path)

    @classmethod
    def from_json(cls, source: str | os.PathLike[str]) -> TrainingHistory:
        """Read the output of `to_json`.

        Args:
            source: The text, or the path of a file with it (a text begins with a brace).

        Raises:
            ConfigError: There is no such file, or it is not the JSON of a history.
        """
        is_text = isinstance(source, str) and source.lstrip().startswith("{")
        where = "the text" if is_text else brief(str(source))
        try:
            values = json.loads(str(source) if is_text else read_text(local_path("from_json.source", source)))
        except OSError as error:
            raise ConfigError(
                f"cannot read {where}: {error.strerror or error}. Pass the output of to_json()."
            ) from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where} is not JSON: {brief(str(error))}. Pass the output of to_json().") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{where} is not the JSON of a {cls.__name__}. Pass the output of to_json().")
        return cls.from_dict(values)

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return one line per epoch under a header, and write it to `path` if given.

        Validations within an epoch have separate lines before the epoch's, and all a column "step".
        Finite numbers are restored bit for bit; a number that an epoch does not have is an empty cell.
        """
        table = io.StringIO()
        writer = csv.writer(table, lineterminator="\n")
        plain = ("val_", "learning_rate")
        names = [name if name.startswith(plain) else f"train_{name}" for name in (*_KERAS_NAMES, *self.metrics)]
        columns = [*(getattr(self, own) for own in _KERAS_NAMES.values()), *self.metrics.values()]
        by_epoch: dict[float, list[dict[str, float]]] = {}
        for found in self.validations:
            by_epoch.setdefault(found["epoch"], []).append(found)
        has_steps = any(len(rows) > 1 for rows in by_epoch.values())
        writer.writerow(["epoch", *(["step"] if has_steps else []), *names])
        for row, epoch in enumerate(self._epoch_numbers()):
            *before, last = by_epoch.get(epoch) or [{}]
            for found in before:
                writer.writerow([epoch, found["step"], *(repr(found[name]) if name in found else "" for name in names)])
            step = [last.get("step", "")] if has_steps else []
            numbers = (repr(float(values[row])) if row < len(values) else "" for values in columns)
            writer.writerow([epoch, *step, *numbers])
        return _written(table.getvalue(), path)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Return a matplotlib figure of all curves, and write it to `path` if given (PNG, SVG, PDF).

        Validations within an epoch are drawn where they came, such as at 1.5 in the middle of epoch 2.

        Raises:
            ConfigError: matplotlib is not installed (`pip install 'cyxtrain[plot]'`), or there is no epoch.
        """
        epochs = self._epoch_numbers()
        curves = {name: (epochs[: len(values)], values) for name, values in self.history.items()}
        if len(self.steps) == len(epochs) and {row["step"] for row in self.validations} - {*self.steps}:
            begins = 0 if epochs[0] == 1 else 2 * self.steps[0] - max(self.steps[:2])  # of another fit: about there
            for name in [name for name in curves if name.startswith("val_")]:
                rows = [row for row in self.validations if name in row]
                places = np.interp([row["step"] for row in rows], [begins, *self.steps], [epochs[0] - 1, *epochs])
                curves[name] = (places.tolist(), [row[name] for row in rows])
        return plot_history(curves, path)

    def _repr_html_(self) -> str:
        return history_as_html(self.history, self._summary())

    def __repr__(self) -> str:
        rows = list(enumerate(self._epoch_numbers()))
        gap = len(rows) > _FIRST_ROWS + _LAST_ROWS + 1
        shown = rows[:_FIRST_ROWS] + rows[-_LAST_ROWS:] if gap else rows
        columns = self.history
        lines = [["epoch", *columns]]
        for row, epoch in shown:
            cells = [_cell(name, values[row]) if row < len(values) else "" for name, values in columns.items()]
            lines.append([str(epoch), *cells])
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        if gap:
            text.insert(1 + _FIRST_ROWS, "...".rjust(widths[0]))
        return printable("\n".join([*(text if rows else []), self._summary()]))

    def _summary(self) -> str:
        epochs = counted(len(self._epoch_numbers()), "epoch")
        return (
            f"{type(self).__name__}: {epochs} in {self.total_time_seconds:.1f} s, "
            f"{self.samples_per_second:,.0f} samples/s, effective batch size {self.effective_batch_size} "
            f"on {counted(self.world_size, 'rank')}"
        )

    def _epoch_numbers(self) -> list[int]:
        """Return the epoch number of each row; a history without epoch numbers counts from 1."""
        count = max(len(getattr(self, own)) for own in _KERAS_NAMES.values())
        return [*self.epochs, *range(len(self.epochs) + 1, count + 1)]


DistributedTrainingHistory = TrainingHistory


def _cell(name: str, value: float) -> str:
    return f"{value:.4g}" if name.startswith("learning_rate") else f"{value:.4f}"


def _json_values(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _json_values(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_json_values(item) for item in value]
    names = {str(number): name for name, number in _NON_FINITE.items()}
    return value if math.isfinite(value) else names[str(float(value))]


def _numbers(name: str, values: object) -> list[Any]:
    if not isinstance(values, (list, tuple)):
        raise ConfigError(f"{TrainingHistory.__name__}.{name} must be a list of numbers, got {brief(values)}.")
    return [_number(name, item) for item in values]


def _number(name: str, value: object) -> float:
    if isinstance(value, str) and value in _NON_FINITE:
        return _NON_FINITE[value]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{TrainingHistory.__name__}.{name} must hold numbers, got {brief(value)}.")
    return value


def _written(text: str, path: str | os.PathLike[str] | None) -> str:
    if path is not None:
        # newline="": the same bytes on every system.
        with open(local_path("the path of a history", path), "w", encoding="utf-8", newline="") as file:
            file.write(text)
    return text


def record_validation(history: TrainingHistory, step: int, epoch: int, measured: Mapping[str, float]) -> None:
    """Append a validation after a step, in an epoch from 1, to a history; `measured` has names without val_."""
    history.validations.append({"step": step, "epoch": epoch, **{f"val_{name}": n for name, n in measured.items()}})


def validation_of(history: TrainingHistory, *, step: int = 0, epoch: int = 0) -> dict[str, float]:
    """Return the numbers of the latest validation if it came after this step or in this epoch, otherwise none."""
    row = history.validations[-1] if history.validations else {}
    is_meant = bool(row) and (row["step"] == step or row["epoch"] == epoch)
    return {name: value for name, value in row.items() if name.startswith("val_")} if is_meant else {}


def record_epoch(history: TrainingHistory, epoch: int, step: int, measured: Mapping[str, float]) -> None:
    """Append the numbers of an epoch that ended with a step, under Keras's names, to a history.

    A NaN accuracy is left out unless other epochs have one: then no row of this epoch counted.
    """
    history.epochs.append(epoch)
    history.steps.append(step)
    record_numbers(history, measured)


def record_numbers(history: TrainingHistory, measured: Mapping[str, float]) -> None:
    """Add numbers to the last epoch of a history, or replace those that it has."""
    before = len(history.epochs) - 1
    for name, value in measured.items():
        own = _KERAS_NAMES.get(name)
        values: list[float] = history.metrics.setdefault(name, []) if own is None else getattr(history, own)
        if values or not (math.isnan(value) and name.endswith("accuracy")):
            values += [math.nan] * (before - len(values))
            values[before:] = [value]
