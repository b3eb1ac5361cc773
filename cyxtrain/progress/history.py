"""The history that `fit` returns: the numbers of every epoch, the same on every rank."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from cyxtrain.checkpoint.remote_files import read_text_of, write_file
from cyxtrain.config.settings import names_checked, unknown_name
from cyxtrain.environment.regular_files import path_or_url
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

# Strict JSON has no such numbers: other readers refuse the NaN that Python writes without quotes.
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_NAMES_OF_NON_FINITE = {str(number): name for name, number in _NON_FINITE.items()}

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
    """Each validation: its "step" and "epoch", "val_loss" and others. The lists above have an epoch's last one."""

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
                read[name] = _validations(name, value)
            elif isinstance(empty[name], dict):
                read[name] = _lists_by_name(name, value)
            elif isinstance(empty[name], list):
                read[name] = _numbers(name, value)
            else:
                read[name] = _number(name, value)
        return cls(**read)

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the history as strict JSON, and write it to `path`, which may be a URL, if given.

        Finite numbers are restored bit for bit; the others are the strings "NaN", "Infinity", "-Infinity".
        """
        return _written(json.dumps(_json_values(self.to_dict()), allow_nan=False, indent=2) + "\n", path)

    @classmethod
    def from_json(cls, source: str | os.PathLike[str]) -> TrainingHistory:
        """Read the output of `to_json`.

        Args:
            source: The JSON, or the path or URL of a file with it (JSON begins with a brace).

        Raises:
            CheckpointError: A store does not answer.
            ConfigError: There is no such file, or it is not the JSON of a history.
        """
        is_json = isinstance(source, str) and source.lstrip().startswith("{")
        shown = "the string" if is_json else brief(str(source))
        try:
            content = str(source) if is_json else read_text_of(path_or_url("from_json.source", source))
            values = json.loads(content)
        except ConfigError:  # it is not a path, or its store needs a library
            raise
        except OSError as error:
            raise ConfigError(
                f"cannot read {shown}: {error.strerror or error}. Pass the output of to_json()."
            ) from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{shown} is not JSON: {brief(str(error))}. Pass the output of to_json().") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{shown} is not the JSON of a {cls.__name__}. Pass the output of to_json().")
        return cls.from_dict(values)

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return one line per epoch under a header, and write it to `path`, which may be a URL, if given.

        With validations within an epoch, all lines have a column "step", and each such validation has its own line
        before the epoch's. Finite numbers are restored bit for bit; a number that an epoch does not have is an empty
        cell.

        Raises:
            ConfigError: An entry of `validations` has no "step" or no "epoch".
        """
        self._check_validations()
        names = {name: _csv_name(name) for name in (*_KERAS_NAMES, *self.metrics)}
        validations = self._validations_by_epoch()
        has_steps = any(len(of_epoch) > 1 for of_epoch in validations.values())
        header: list[Any] = ["epoch", *names.values()]
        if has_steps:
            header.insert(1, "step")
        lines = [header]
        for row, epoch in enumerate(self._epoch_numbers()):
            *within, last = validations.get(epoch) or [{}]
            for validation in within:
                cells = {name: repr(float(value)) for name, value in validation.items()}
                lines.append([epoch, validation["step"], *(cells.get(name, "") for name in names.values())])
            cells = {name: repr(float(value)) for name, value in self._row(row).items()}
            lines.append([epoch, *(cells.get(name, "") for name in names)])
            if has_steps:
                lines[-1].insert(1, last.get("step", ""))
        table = io.StringIO()
        csv.writer(table, lineterminator="\n").writerows(lines)
        return _written(table.getvalue(), path)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Return a matplotlib figure of all curves, and write it to `path` or a URL if given (PNG, SVG, PDF).

        Validations within an epoch are drawn where they came, such as at 1.5 in the middle of epoch 2.

        Raises:
            ConfigError: matplotlib is not installed (`pip install 'cyxtrain[plot]'`), there is no epoch, or a
                validation within an epoch has no "step" or no "epoch".
        """
        epochs = self._epoch_numbers()
        curves: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
        for name, values in self.history.items():
            curves[name] = (epochs[: len(values)], values)
        ends = set(self.steps)
        if len(self.steps) == len(epochs):
            self._check_validations()
            if any(row["step"] not in ends for row in self.validations):
                for name in curves:
                    if name.startswith("val_"):
                        curves[name] = self._validation_curve(name, epochs)
        return plot_history(curves, path)

    def _check_validations(self) -> None:
        """Raise ConfigError unless each validation has its place, which one made by hand may not have."""
        for number, validation in enumerate(self.validations):
            missing = [repr(name) for name in ("step", "epoch") if name not in validation]
            if missing:
                raise ConfigError(
                    f"{TrainingHistory.__name__}.validations[{number}] has no {' and no '.join(missing)}: give each "
                    "validation its step and its epoch, as fit does."
                )

    def _validations_by_epoch(self) -> dict[float, list[dict[str, float]]]:
        found: dict[float, list[dict[str, float]]] = {}
        for validation in self.validations:
            found.setdefault(validation["epoch"], []).append(validation)
        return found

    def _validation_curve(self, name: str, epochs: list[int]) -> tuple[list[float], list[float]]:
        """Return the places, in epochs, and the values of a number that validations measured."""
        first_step = 0
        if epochs[0] != 1:  # after an earlier fit: assume that the first epoch has as many steps as the second
            first_step = 2 * self.steps[0] - max(self.steps[:2])
        rows = [row for row in self.validations if name in row]
        steps = [row["step"] for row in rows]
        places = np.interp(steps, [first_step, *self.steps], [epochs[0] - 1, *epochs])
        return places.tolist(), [row[name] for row in rows]

    def _repr_html_(self) -> str:
        return history_as_html(self.history, self._summary())

    def __repr__(self) -> str:
        rows = list(enumerate(self._epoch_numbers()))
        if not rows:
            return printable(self._summary())
        has_gap = len(rows) > _FIRST_ROWS + _LAST_ROWS + 1
        if has_gap:
            rows = rows[:_FIRST_ROWS] + rows[-_LAST_ROWS:]
        columns = list(self.history)
        table = [["epoch", *columns]]
        for row, epoch in rows:
            cells = {name: _shown(name, value) for name, value in self._row(row).items()}
            table.append([str(epoch), *(cells.get(name, "") for name in columns)])
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.rjust, line, widths)) for line in table]
        if has_gap:
            lines.insert(1 + _FIRST_ROWS, "...".rjust(widths[0]))
        return printable("\n".join([*lines, self._summary()]))

    def _summary(self) -> str:
        epochs = counted(len(self._epoch_numbers()), "epoch")
        return (
            f"{type(self).__name__}: {epochs} in {self.total_time_seconds:.1f} s, "
            f"{self.samples_per_second:,.0f} samples/s, effective batch size {self.effective_batch_size} "
            f"on {counted(self.world_size, 'rank')}"
        )

    def _row(self, row: int) -> dict[str, float]:
        """Return the numbers that an epoch has, under Keras's names."""
        return {name: values[row] for name, values in self.history.items() if row < len(values)}

    def _epoch_numbers(self) -> list[int]:
        """Return the epoch number of each row; a history without epoch numbers counts from 1."""
        count = max(map(len, self.history.values()), default=0)
        return [*self.epochs, *range(len(self.epochs) + 1, count + 1)]


DistributedTrainingHistory = TrainingHistory


def _csv_name(name: str) -> str:
    return name if name.startswith(("val_", "learning_rate")) else f"train_{name}"


def _shown(name: str, value: float) -> str:
    return f"{value:.4g}" if name.startswith("learning_rate") else f"{value:.4f}"


def _json_values(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _json_values(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_json_values(item) for item in value]
    return value if math.isfinite(value) else _NAMES_OF_NON_FINITE[str(float(value))]


def _validations(name: str, rows: object) -> list[dict[str, Any]]:
    if not isinstance(rows, (list, tuple)) or not all(isinstance(row, Mapping) for row in rows):
        raise ConfigError(f"{TrainingHistory.__name__}.{name} must be numbers by name, got {brief(rows)}.")
    return [{key: _number(key, number) for key, number in row.items()} for row in rows]


def _lists_by_name(name: str, lists: object) -> dict[str, list[Any]]:
    if not isinstance(lists, Mapping):
        raise ConfigError(f"{TrainingHistory.__name__}.{name} must be lists of numbers by name, got {brief(lists)}.")
    return {key: _numbers(key, values) for key, values in lists.items()}


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
        # As bytes: the same on every system.
        write_file("the path of a history", path, text.encode())
    return text


def record_validation(history: TrainingHistory, step: int, epoch: int, measured: Mapping[str, float]) -> None:
    """Append a validation after a step, in an epoch from 1; `measured` has names without "val_"."""
    validated = {f"val_{name}": value for name, value in measured.items()}
    history.validations.append({"step": step, "epoch": epoch, **validated})


def validation_of(history: TrainingHistory, *, step: int = 0, epoch: int = 0) -> dict[str, float]:
    """Return the numbers of the latest validation if it came after this step or in this epoch."""
    if not history.validations:
        return {}
    latest = history.validations[-1]
    if latest["step"] != step and latest["epoch"] != epoch:
        return {}
    return {name: value for name, value in latest.items() if name.startswith("val_")}


def record_epoch(history: TrainingHistory, epoch: int, step: int, measured: Mapping[str, float]) -> None:
    """Append the numbers of an epoch that ended with a step, under Keras's names, to a history.

    A NaN accuracy is left out unless other epochs have one: then no sample of this epoch counted.
    """
    history.epochs.append(epoch)
    history.steps.append(step)
    record_numbers(history, measured)


def record_numbers(history: TrainingHistory, measured: Mapping[str, float]) -> None:
    """Add numbers to the last epoch of a history, or replace those that it has."""
    epochs_before = len(history.epochs) - 1
    for name, value in measured.items():
        values = _values_of(history, name)
        is_absent = math.isnan(value) and name.endswith("accuracy")
        if values or not is_absent:
            values += [math.nan] * (epochs_before - len(values))
            values[epochs_before:] = [value]


def _values_of(history: TrainingHistory, name: str) -> list[float]:
    """Return the list of a number in a history, to change it; a new metric gets an empty one."""
    if name in _KERAS_NAMES:
        values: list[float] = getattr(history, _KERAS_NAMES[name])
        return values
    return history.metrics.setdefault(name, [])
