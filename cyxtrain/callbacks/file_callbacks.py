"""Callbacks that write numbers down, or do what small functions say."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cyxtrain.callbacks.callback import Callback, Logs
from cyxtrain.config.settings import require, require_boolean, unknown_name
from cyxtrain.environment.regular_files import read_text, regular_opener
from cyxtrain.errors import ConfigError
from cyxtrain.world import runtime


class CSVLogger(Callback):
    """Writes a line per epoch into a file, on rank 0; Keras's arguments.

    A fit that goes on from a checkpoint goes on with the file: lines of epochs after the checkpoint are taken out.

    Args:
        filename: Of the file; its folder is made.
        separator: Between the cells.
        append: Whether what another fit has written stays, and lines are added.

    Raises:
        ConfigError: An argument cannot be.
    """

    def __init__(self, filename: str | os.PathLike[str], separator: str = ",", append: bool = False) -> None:
        owner = "CSVLogger"
        require(isinstance(filename, (str, os.PathLike)), f"{owner}.filename must be a path, got {filename!r}.")
        right = isinstance(separator, str) and len(separator) == 1
        require(right, f"{owner}.separator must be one character, got {separator!r}.")
        require_boolean(owner, "append", append)
        self.filename = os.fspath(filename)
        self.separator = separator
        self.append = append
        self._there: list[list[str]] = []
        self._lines: list[list[str]] = []

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Looks at what is there; nothing is written before the first epoch is complete.

        Raises:
            ConfigError: What is there is no file, or no CSV.
        """
        if not runtime.is_master():
            return
        Path(self.filename).parent.mkdir(parents=True, exist_ok=True)
        self._there = []
        try:
            text = io.StringIO(read_text(self.filename), newline="")
            self._there = [line for line in csv.reader(text, delimiter=self.separator) if line]
        except FileNotFoundError:
            pass
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            raise ConfigError(f"CSVLogger cannot read {self.filename}: {reason}. Give it another file.") from error
        self._lines = list(self._there) if self.append else []

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on after the lines that were there when the checkpoint was made."""
        self._lines = self._there[: state["lines"]]

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Writes the epoch's line; columns are the numbers of the first epoch, with room for a validation's.

        A number that has no column, such as a metric that a later fit adds, gets one: in the lines before it is empty.
        """
        if not runtime.is_master():
            return
        logs = logs or {}
        if not self._lines:
            names = [name for name in self.params["metrics"] if name in logs or name.startswith("val_")]
            self._lines = [["epoch", *names]]
        header = self._lines[0]
        new_names = [name for name in logs if name not in header]
        if new_names:
            width = len(header)
            lines = ([*line, *[""] * (width - len(line) + len(new_names))] for line in self._lines[1:])
            self._lines = [[*header, *new_names], *lines]
        self._lines.append([str(epoch), *(repr(float(logs[n])) if n in logs else "" for n in self._lines[0][1:])])
        new = f"{self.filename}.new"  # whoever reads meanwhile sees the lines before, or all
        with open(new, "w", newline="", encoding="utf-8", opener=regular_opener) as file:
            csv.writer(file, delimiter=self.separator, lineterminator="\n").writerows(self._lines)
        os.replace(new, self.filename)

    def state_dict(self) -> dict[str, Any]:
        """Returns how many lines there are."""
        return {"lines": len(self._lines)}


class LambdaCallback(Callback):
    """Does what small functions say; Keras's arguments.

    Args:
        **hooks: A function for each hook, by its name, with the arguments of the hook.

    Raises:
        ConfigError: There is no such hook, or something is no function.
    """

    def __init__(self, **hooks: Callable[..., Any]) -> None:
        known = [name for name in dir(Callback) if name.startswith("on_")]
        for name, function in hooks.items():
            if name not in known:
                raise unknown_name("LambdaCallback", name, known, "hook that anybody calls:")
            if not callable(function):
                raise ConfigError(f"LambdaCallback.{name} must be a function, got {function!r}.")
            setattr(self, name, function)
