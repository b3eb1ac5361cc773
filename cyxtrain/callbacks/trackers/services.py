"""Trackers for MLflow, Weights & Biases and Trackio; their libraries are imported in the background thread."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import operator
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from cyxtrain.callbacks.trackers.background_sender import Point
from cyxtrain.callbacks.trackers.tracker import Tracker
from cyxtrain.checkpoint.files import temporary_file, try_folder
from cyxtrain.config.settings import require
from cyxtrain.environment.process_env import ENVIRON

_EXIT_CODES = {"FINISHED": 0, "FAILED": 1, "KILLED": 255}
_KINDS = {".png": "plot"}
# Of a value in a table of settings; MLflow shows no more.
_LONGEST_VALUE = 500


class _Installed(Tracker):
    """A tracker whose library must be installed."""

    _active: ClassVar[Any]
    """A function of the library that returns the active run, if there is one."""
    _id_name: ClassVar[str]

    def __init__(self, project: str | None = None, name: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        owner = type(self).__name__
        library = self._library
        is_installed = library in sys.modules or importlib.util.find_spec(library) is not None
        require(is_installed, f"{owner} needs the library {library}: pip install 'cyxtrain[{library}]'.")
        self.project = project
        self.name = name
        self._run: Any = None

    def _active_run(self) -> str:
        # An active run may belong to the thread that asks: here, the user's.
        library = sys.modules.get(self._library)
        self._run = None
        # While another thread imports the library, it has no such function, and no run.
        with contextlib.suppress(AttributeError):
            self._run = library and type(self)._active(library)
        return self._id() if self._run else ""

    def _id(self) -> str:
        return str(operator.attrgetter(self._id_name)(self._run))

    def log(self, points: list[Point]) -> None:
        for step, group in itertools.groupby(points, lambda point: point.step):
            self._log(step, {point.name: point.value for point in group})

    def _log(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log(numbers, step=step)

    def artifact(self, path: Path) -> None:
        self._run.log_artifact(str(path), type=_KINDS.get(path.suffix, "model"))


class MLflow(_Installed):
    """Send a fit to MLflow; MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and others apply.

    A run that is active (`with mlflow.start_run():`), or named by MLFLOW_RUN_ID, is used and left open. `project` is an
    experiment, made if it is new, and `name` the run's; None: MLflow's choice. Other arguments: see `Tracker`.
    """

    _library = "mlflow"
    _active = operator.methodcaller("active_run")
    _id_name = "info.run_id"

    def _active_run(self) -> str:
        return super()._active_run() or ENVIRON.get("MLFLOW_RUN_ID", "")

    def start(self, run_id: str, settings: Mapping[str, str]) -> str:
        import mlflow

        _make_sqlite_store(mlflow.get_tracking_uri())
        client = mlflow.MlflowClient()
        if self._run is None and run_id and run_id == ENVIRON.get("MLFLOW_RUN_ID"):
            self._run = client.get_run(run_id)
        if self._run is None:
            experiment_id = None
            if self.project is not None:
                found = client.get_experiment_by_name(self.project)
                experiment_id = found.experiment_id if found else client.create_experiment(self.project)
            # An earlier run keeps its name.
            name = None if run_id else self.name
            self._run = mlflow.start_run(run_id or None, experiment_id, name)
        shown = {_accepted_name(name): value[:_LONGEST_VALUE] for name, value in settings.items()}
        # MLflow refuses to change those that a run has.
        new = shown.keys() - client.get_run(self._id()).data.params
        client.log_batch(self._id(), params=[mlflow.entities.Param(name, shown[name]) for name in new])
        return self._id()

    def log(self, points: list[Point]) -> None:
        import mlflow

        metrics = [
            mlflow.entities.Metric(_accepted_name(name), value, round(1000 * seconds), step)
            for name, step, value, seconds in points
        ]
        mlflow.MlflowClient().log_batch(self._id(), metrics=metrics)

    def artifact(self, path: Path) -> None:
        import mlflow

        mlflow.MlflowClient().log_artifact(self._id(), str(path), f"{_KINDS.get(path.suffix, 'checkpoint')}s")

    def finish(self, status: str) -> None:
        import mlflow

        mlflow.end_run(status)
        self._run = None


def _accepted_name(name: str) -> str:
    """Return a name without the characters that MLflow refuses."""
    return re.sub(r"[^\w\-./ :]", "_", name)


def _make_sqlite_store(uri: str) -> None:
    """Make a new SQLite file of MLflow's elsewhere, and put it in place when it is complete.

    MLflow makes its tables in some seventy steps, which takes ten seconds and more, and can use no file that a killed
    process has left in the middle of them.
    """
    import mlflow

    store = Path(uri.removeprefix("sqlite:///"))
    # Only a URI that is plainly a path: others are quoted, have options, or are in memory.
    is_file = uri.startswith("sqlite:///") and not any(each in uri for each in ("%", "?", ":memory:"))
    if not is_file or store.exists():
        return
    try_folder(store.parent, store.name, "MLflow's store")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        made = Path(folder, store.name)
        mlflow.MlflowClient(f"sqlite:///{made.as_posix()}").search_experiments()
        with temporary_file(store, f"MLflow's store {store}") as (file, temporary):
            file.write(made.read_bytes())
            file.flush()
            # Another process has made it meanwhile; or the disk knows no links, and MLflow makes the tables there.
            with contextlib.suppress(OSError):
                os.link(temporary, store)


class WandB(_Installed):
    """Send a fit to Weights & Biases; WANDB_PROJECT, WANDB_MODE, WANDB_RUN_ID and others apply.

    A run that is active (`wandb.init()`) is used and left open. `project` and `name` are the run's; None: W&B's choice.
    Other arguments: see `Tracker`.
    """

    _library = "wandb"
    _active = operator.attrgetter("run")
    _id_name = "id"

    def start(self, run_id: str, settings: Mapping[str, str]) -> str:
        import wandb

        if self._run is None:
            name = None if run_id else self.name
            self._run = wandb.init(project=self.project, name=name, id=run_id or None, resume="allow")
        self._run.config.update(dict(settings), allow_val_change=True)
        # W&B's own step only rises: it drops numbers of one step that are sent apart.
        self._run.define_metric("*", step_metric="step")
        return self._id()

    def _log(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log({**numbers, "step": step})

    def finish(self, status: str) -> None:
        self._run.finish(exit_code=_EXIT_CODES[status])
        self._run = None


class Trackio(_Installed):
    """Send a fit to Trackio, which has no status of runs; TRACKIO_SPACE_ID, TRACKIO_DIR and others apply.

    A run that is active (`trackio.init()`) is used and left open. `project` is "cyxtrain" by default, and `name` the
    run's, unique in it; None: Trackio's choice. Other arguments: see `Tracker`.
    """

    _library = "trackio"
    _active = staticmethod(lambda library: library.context_vars.current_run.get())
    _id_name = "name"

    def start(self, run_id: str, settings: Mapping[str, str]) -> str:
        import trackio

        if self._run is None:
            own = {"resume": "allow", "embed": False, "auto_log_cpu": False}
            project = self.project or "cyxtrain"
            self._run = trackio.init(project, run_id or self.name, config=dict(settings), **own)
        return self._id()

    def finish(self, status: str) -> None:
        self._run.finish()
        self._run = None
