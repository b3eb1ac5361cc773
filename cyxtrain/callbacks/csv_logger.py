"""CSVLogger."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path
from typing import Any

from cyxtrain.callbacks.callback import Callback, Logs
from cyxtrain.checkpoint.background_file import BackgroundFile
from cyxtrain.checkpoint.files import replacing
from cyxtrain.checkpoint.remote_files import read_text_of, require_reachable
from cyxtrain.config.settings import require, require_boolean
from cyxtrain.environment.regular_files import path_or_url, url_of
from cyxtrain.errors import CheckpointError, ConfigError, reason_of


class CSVLogger(Callback):
    """Write a line per epoch to a CSV file, on rank 0; Keras's arguments.

    A resumed fit continues the file: lines of epochs after the checkpoint are removed. A file in a store is uploaded
    whole after each line, in the background. If the store does not answer, one warning says so, and training continues;
    the end of the fit tries again, and waits 10 seconds at most.

    Args:
        filename: Path of the file, whose folder is created, or its URL.
        separator: The character between cells.
        append: Keep the lines of an earlier fit and append to them.

    Raises:
        ConfigError: An argument is invalid.
    """

    runs_last = True
    writes_to = "filename"

    def __init__(self, filename: str | os.PathLike[str], separator: str = ",", append: bool = False) -> None:
        owner = "CSVLogger"
        url = url_of(path_or_url(f"{owner}.filename", filename))
        is_valid = isinstance(separator, str) and len(separator) == 1
        require(is_valid, f"{owner}.separator must be one character, got {separator!r}.")
        require_boolean(owner, "append", append)
        self.filename = url or os.fspath(filename)
        self.separator = separator
        self.append = append
        self._path = Path()
        self._remote: BackgroundFile | None = None
        self._existing: list[list[str]] = []
        self._lines: list[list[str]] = []

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Read the existing file; nothing is written before the first epoch is complete.

        Raises:
            ConfigError: The file is not a regular file or not CSV, or its store does not answer within 5 seconds.
        """
        if not self.trainer.is_master():
            return
        path = path_or_url("CSVLogger.filename", self.filename)
        url = url_of(path)
        if url:
            self._remote = BackgroundFile(url)
        else:
            self._path = Path(path).absolute()
            self._path.parent.mkdir(parents=True, exist_ok=True)
        self._existing = []
        try:
            if url:
                require_reachable(url, writes=False)
            table = io.StringIO(read_text_of(path), newline="")
            self._existing = [line for line in csv.reader(table, delimiter=self.separator) if line]
        except FileNotFoundError:
            pass  # a new file
        except CheckpointError as error:  # otherwise a warning, and lines that are there would be replaced
            raise ConfigError(f"CSVLogger: {error}") from None
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise ConfigError(
                f"CSVLogger cannot read {self.filename}: {reason_of(error)}. Use another filename."
            ) from error
        self._lines = list(self._existing) if self.append else []

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the lines that existed when the checkpoint was saved."""
        self._lines = self._existing[: state["lines"]]

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Write the epoch's line; columns are the metrics of the first epoch and of the validation.

        A new metric of a later fit gets a new column, empty in earlier lines.
        """
        if not self.trainer.is_master():
            return
        logs = logs or {}
        if not self._lines:
            names = [name for name in self.params["metrics"] if name in logs or name.startswith("val_")]
            self._lines = [["epoch", *names]]
        if "step" in self._lines[0]:
            logs = {"step": self.trainer.step, **logs}
            if self._ends_with_validation(epoch, logs["step"]):
                self._lines.pop()  # the epoch's line has its metrics
        self._write(epoch, logs)

    def _ends_with_validation(self, epoch: int, step: float) -> bool:
        """Return whether the last line is a validation after a step, without a training loss."""
        last = dict(zip(self._lines[0], self._lines[-1], strict=False))
        return last["epoch"] == str(epoch) and last["step"] == str(step) and last.get("loss") == ""

    def on_validation_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Write a line for a validation within an epoch, with its step."""
        is_within_epoch = epoch == self.trainer.epoch
        if self.trainer.is_master() and is_within_epoch:
            if not self._lines:
                self._lines = [["epoch", "step", *self.params["metrics"]]]
            self._write(epoch, {"step": self.trainer.step, **(logs or {})})

    def _write(self, epoch: int, logs: Logs) -> None:
        """Write a line, and new columns that it needs."""
        header = self._lines[0]
        new_names = [name for name in logs if name not in header]
        if new_names:
            header = [*header, *new_names]
            padded = [line + [""] * (len(header) - len(line)) for line in self._lines[1:]]
            self._lines = [header, *padded]
        cells = {name: _cell(value) for name, value in logs.items()}
        self._lines.append([str(epoch), *(cells.get(name, "") for name in header[1:])])
        table = io.StringIO()
        csv.writer(table, delimiter=self.separator, lineterminator="\n").writerows(self._lines)
        content = table.getvalue().encode()
        if self._remote is not None:
            self._remote.write(content)
            return
        # Readers never see half of it. Training does not wait for the disk: a log need not survive a power cut.
        with replacing(self._path, "CSV file", synchronizes=False) as file:
            file.write(content)

    def close(self) -> None:
        """Wait for the store, 10 seconds at most."""
        remote = self._remote
        self._remote = None
        if remote is not None:
            remote.finish()

    def state_dict(self) -> dict[str, Any]:
        return {"lines": len(self._lines)}


def _cell(value: float) -> str:
    """Return a step, or a metric that may be a tensor, so that it can be read back exactly."""
    number = value if isinstance(value, int) else float(value)
    return repr(number)
