"""Trackers for MLflow, Weights & Biases and Trackio; their libraries are imported in the background thread."""

from __future__ import annotations

import abc
import importlib.util
import itertools
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cyxtrain.callbacks.trackers.background_sender import Point
from cyxtrain.callbacks.trackers.tracker import Tracker
from cyxtrain.config.settings import require
from cyxtrain.environment.process_env import ENVIRON

_EXIT_CODES = {"FINISHED": 0, "FAILED": 1, "KILLED": 255}
# Of a value in a table of settings; MLflow shows no more.
_LONGEST_VALUE = 500


def _require_library(owner: str, name: str) -> None:
    is_installed = name in sys.modules or importlib.util.find_spec(name) is not None
    require(is_installed, f"{owner} needs the library {name}: pip install 'cyxtrain[{name}]'.")


class MLflow(Tracker):
    """Send a fit to MLflow; MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and others apply.

    A run that is active (`with mlflow.start_run():`), or named by MLFLOW_RUN_ID, is used and left open.

    Args:
        experiment: Name of the experiment, which is created if it is new; None: MLflow's.
        run_name: Name of the run; None: MLflow chooses one.
        **options: Arguments of `Tracker`.

    Raises:
        ConfigError: An argument is invalid, or MLflow is not installed.
    """

    def __init__(self, experiment: str | None = None, run_name: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        _require_library("MLflow", "mlflow")
        self.experiment = experiment
        self.run_name = run_name
        self._run_id = ""

    def _active_run(self) -> str:
        # MLflow's active run belongs to the thread that asks.
        library = sys.modules.get("mlflow")
        active = library and library.active_run()
        self._run_id = active.info.run_id if active else ENVIRON.get("MLFLOW_RUN_ID", "")
        return self._run_id

    def start(self, run_id: str, settings: Mapping[str, str]) -> str:
        import mlflow

        client = mlflow.MlflowClient()
        if run_id != self._run_id or not run_id:
            experiment_id = None
            if self.experiment is not None:
                found = client.get_experiment_by_name(self.experiment)
                experiment_id = found.experiment_id if found else client.create_experiment(self.experiment)
            # It is active if this failed below.
            run = mlflow.active_run() or mlflow.start_run(run_id or None, experiment_id, self.run_name)
            run_id = run.info.run_id
        params = [mlflow.entities.Param(name, value[:_LONGEST_VALUE]) for name, value in settings.items()]
        client.log_batch(run_id, params=params)
        self._run_id = run_id
        return run_id

    def log(self, points: list[Point]) -> None:
        import mlflow

        metrics = [
            # MLflow refuses other characters.
            mlflow.entities.Metric(re.sub(r"[^\w\-./ :]", "_", name), value, round(1000 * seconds), step)
            for name, step, value, seconds in points
        ]
        mlflow.MlflowClient().log_batch(self._run_id, metrics=metrics)

    def artifact(self, path: Path) -> None:
        import mlflow

        mlflow.MlflowClient().log_artifact(self._run_id, str(path), "checkpoints")

    def finish(self, status: str) -> None:
        import mlflow

        mlflow.end_run(status)


class _WithRun(Tracker):
    """A tracker whose library has an object for a run."""

    def __init__(self, library: str, project: str | None, name: str | None, options: dict[str, Any]) -> None:
        super().__init__(**options)
        _require_library(type(self).__name__, library)
        self.project = project
        self.name = name
        self._run: Any = None

    def log(self, points: list[Point]) -> None:
        for step, group in itertools.groupby(points, lambda point: point.step):
            self._log(step, {point.name: point.value for point in group})

    @abc.abstractmethod
    def _log(self, step: int, numbers: dict[str, float]) -> None: ...

    def artifact(self, path: Path) -> None:
        self._run.log_artifact(str(path), type="model")


class WandB(_WithRun):
    """Send a fit to Weights & Biases; WANDB_PROJECT, WANDB_MODE, WANDB_RUN_ID and others apply.

    A run that is active (`wandb.init()`) is used and left open.

    Args:
        project: Name of the project; None: W&B's.
        name: Name of the run; None: W&B chooses one.
        **options: Arguments of `Tracker`.

    Raises:
        ConfigError: An argument is invalid, or wandb is not installed.
    """

    def __init__(self, project: str | None = None, name: str | None = None, **options: Any) -> None:
        super().__init__("wandb", project, name, options)

    def _active_run(self) -> str:
        library = sys.modules.get("wandb")
        self._run = library and library.run
        return str(self._run.id) if self._run else ""

    def start(self, run_id: str, settings: Mapping[str, str]) -> str:
        import wandb

        if self._run is None:
            self._run = wandb.init(project=self.project, name=self.name, id=run_id or None, resume="allow")
        self._run.config.update(dict(settings), allow_val_change=True)
        # W&B's own step only rises: it drops numbers of one step that are sent apart.
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def _log(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log({**numbers, "step": step})

    def finish(self, status: str) -> None:
        self._run.finish(exit_code=_EXIT_CODES[status])
        self._run = None


class Trackio(_WithRun):
    """Send a fit to Trackio, which has no status of runs; TRACKIO_SPACE_ID, TRACKIO_DIR and others apply.

    A run that is active (`trackio.init()`) is used and left open.

    Args:
        project: Name of the project.
        name: Name of the run, unique in its project; None: Trackio chooses one.
        **options: Arguments of `Tracker`.

    Raises:
        ConfigError: An argument is invalid, or trackio is not installed.
    """

    def __init__(self, project: str, name: str | None = None, **options: Any) -> None:
        super().__init__("trackio", project, name, options)

    def _active_run(self) -> str:
        # Trackio's active run belongs to the thread that asks.
        library = sys.modules.get("trackio")
        self._run = library and library.context_vars.current_run.get()
        return str(self._run.name) if self._run else ""

    def start(self, run_id: str, settings: Mapping[str, str]) -> str:
        import trackio

        if self._run is None:
            own = {"resume": "allow", "embed": False, "auto_log_cpu": False}
            self._run = trackio.init(self.project, run_id or self.name, config=dict(settings), **own)
        return str(self._run.name)

    def _log(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log(numbers, step=step)

    def finish(self, status: str) -> None:
        self._run.finish()
        self._run = None
