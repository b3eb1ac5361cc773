"""The base class of trackers: what is sent of a fit, when, and how a resumed fit continues it."""

from __future__ import annotations

import abc
import dataclasses
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cyxtrain.callbacks.callback import Callback, Logs
from cyxtrain.callbacks.trackers.background_sender import BackgroundSender, Point, new_run, read_run
from cyxtrain.checkpoint.checkpoint_file import library_versions
from cyxtrain.checkpoint.folder import look_into
from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.config.settings import require, require_boolean, require_integer
from cyxtrain.environment.regular_files import local_path
from cyxtrain.errors import warn

# A change of these begins a new run; others decide how long a fit is, what it keeps, or are refused by `resume`.
_DECIDING = {
    *("accumulation_steps", "channels_last", "clip_adaptive", "clip_norm", "clip_value"),
    *("model", "optimizer", "precision", "samples_per_step", "seed", "sync_batchnorm"),
}


class Tracker(Callback, abc.ABC):
    """Send the numbers of a fit to a service, from rank 0: the base class of `MLflow`, `WandB` and `Trackio`.

    For another service, derive a class with four methods: `start`, `log`, `artifact` and `finish`. A background thread
    calls them one at a time, and again if they raise. Training does not wait for them, but a fit does: 5 s at most at
    its start, and 10 s at its end. A resumed fit continues its run and sends each point once. See docs/trackers.md.

    Args:
        parameters: Your own settings, by name, shown with the fit's; if they change, a new run begins.
        log_every_n_steps: Also send rank 0's loss so far, its metrics and the learning rate every so many steps, as
            "step/loss" and others; 0: only epochs and validations.
        log_checkpoints: Upload checkpoints, too: each that is complete when the one before has been uploaded.
        folder: Local folder for a small file per run: its id, and the last step sent of each curve.

    Raises:
        ConfigError: An argument is invalid.
    """

    runs_last = True

    def __init__(
        self,
        parameters: Mapping[str, Any] | None = None,
        *,
        log_every_n_steps: int = 10,
        log_checkpoints: bool = False,
        folder: str = "trackers",
    ) -> None:
        owner = type(self).__name__
        is_mapping = parameters is None or isinstance(parameters, Mapping)
        require(is_mapping, f"{owner}.parameters must be a dictionary, got {parameters!r}.")
        require_integer(owner, "log_every_n_steps", log_every_n_steps, 0)
        require_boolean(owner, "log_checkpoints", log_checkpoints)
        local_path(f"{owner}.folder", folder)
        self.parameters = {str(name): str(value) for name, value in (parameters or {}).items()}
        self.log_every_n_steps = log_every_n_steps
        self.log_checkpoints = log_checkpoints
        self.folder = folder
        self._sender: BackgroundSender | None = None
        self._known = new_run()
        # By name, the last step that is sent or queued.
        self._last: dict[str, int] = {}
        self._status = ""
        self._has_warned = False

    @abc.abstractmethod
    def start(self, run_id: str, settings: Mapping[str, str]) -> str:
        """Begin a run, or continue the run `run_id` unless it is "", and return its id; show `settings`, if any."""

    @abc.abstractmethod
    def log(self, points: list[Point]) -> None:
        """Send `points`: at most 1,000, each with a `name`, `step`, `value`, and its time in `seconds` since 1970."""

    @abc.abstractmethod
    def artifact(self, path: Path) -> None:
        """Upload the checkpoint at `path`."""

    @abc.abstractmethod
    def finish(self, status: str) -> None:
        """End the run; `status` is "FINISHED", "FAILED" (an error), or "KILLED" (a signal, Ctrl-C or a time limit)."""

    def _active_run(self) -> str:
        """Return the id of a run that the user began, which is used and left open; "": there is none."""
        return ""

    def on_fit_start(self, resumed: bool) -> None:
        """Continue the run of the checkpoint, or of the trainer's fit before; otherwise begin one."""
        if not self.trainer.is_master():
            return
        self._status = "KILLED"
        self._has_warned = False
        settings = self._settings()
        deciding = {name: settings[name] for name in settings if name in _DECIDING or name in self.parameters}
        active = self._active_run()
        run = {"settings": deciding, **self._known}
        if resumed or self.trainer.step:
            run |= read_run(self._path(run["key"]))
        if run["key"] and self._continues(run, deciding, active):
            settings = {}
            run["waiting"] = [each for each in run["waiting"] if each[1] > run["sent"].get(each[0], -1)]
        else:
            run = new_run(secrets.token_hex(8), active)
            run["settings"] = deciding
        self._last = run["sent"] | {name: step for name, step, *_ in run["waiting"]}
        self._sender = BackgroundSender(self, run, self._path(run["key"]), settings, owns_run=not active)
        self._warn_of_problem()

    def _path(self, key: str) -> Path:
        return Path(local_path("folder", self.folder)).absolute() / f"{type(self).__name__}-{key}.json"

    def _continues(self, run: dict[str, Any], deciding: dict[str, str], active: str) -> bool:
        """Return whether the fit continues a run; warn if not."""
        step = self.trainer.step
        changed = [name for name in deciding | run["settings"] if deciding.get(name) != run["settings"].get(name)]
        why = ""
        if not step:
            return False
        if changed:
            why = f"{', '.join(changed)} changed"
        elif step < run["checkpoint_step"]:
            why = f"it resumes from step {step:,}, and the run has a checkpoint of step {run['checkpoint_step']:,}"
        elif active not in ("", run["run_id"]):
            why = f"the run {active} is active"
        if why:
            warn(f"{type(self).__name__}: the fit does not continue the run {run['run_id']}, but another one: {why}.")
        return not why

    def _settings(self) -> dict[str, str]:
        """Return the settings that differ from their defaults, what is trained with what, and the user's own."""
        defaults = dataclasses.asdict(DistributedTrainingConfig())
        found = dataclasses.asdict(self.trainer.config)
        found = {name: value for name, value in found.items() if value != defaults[name]}
        found["model"] = type(self.model).__name__
        found["optimizer"] = ", ".join(type(each).__name__ for each in self.trainer.optimizers.values())
        found["samples_per_step"] = self.params["samples_per_step"]
        found["world_size"] = self.trainer.get_world_size()
        found |= {f"version/{name}": version for name, version in library_versions().items()}
        return {name: str(value) for name, value in (found | self.parameters).items()}

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        every = self.log_every_n_steps
        if self._sender is not None and every and self.trainer.step % every == 0:
            self._add({f"step/{name}": value for name, value in (logs or {}).items()})

    def on_validation_end(self, epoch: int, logs: Logs | None = None) -> None:
        self._add(logs or {})

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self._add({**(logs or {}), "samples_per_second": self.trainer.history.samples_per_second})
        self._warn_of_problem()

    def _add(self, numbers: Mapping[str, float]) -> None:
        """Queue the numbers of the latest step, except those that the run has."""
        if self._sender is not None:
            step = self.trainer.step
            new = [name for name in numbers if step > self._last.get(name, -1)]
            self._last |= dict.fromkeys(new, step)
            now = time.time()
            self._sender.add([Point(name, step, float(numbers[name]), now) for name in new])

    def on_checkpoint(self, path: Path) -> None:
        if self._sender is not None:
            step = look_into(path).position.get("step", -1)
            self._sender.run["checkpoint_step"] = max(step, self._sender.run["checkpoint_step"])
            if self.log_checkpoints:
                self._sender.add_file(path)

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._status = "FINISHED"

    def on_exception(self, exception: BaseException) -> None:
        if isinstance(exception, Exception):
            self._status = "FAILED"

    def close(self) -> None:
        if self._sender is None:
            return
        num_lost = self._sender.close(self._status)
        self._warn_of_problem()
        self._known = self._sender.state()
        self._sender = None
        if num_lost:
            warn(
                f"{type(self).__name__}: {num_lost:,} points were not sent: at most 10,000 wait for the service, and "
                "for 10 s at the end. A fit that resumes sends those that waited when its checkpoint was saved."
            )

    def _warn_of_problem(self) -> None:
        """Warn once of an error of the service."""
        if self._sender is not None and self._sender.problem and not self._has_warned:
            self._has_warned = True
            warn(f"{type(self).__name__}: {self._sender.problem}. Training continues; failed calls are repeated.")

    def state_dict(self) -> dict[str, Any]:
        return dict(self._known) if self._sender is None else self._sender.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._known = {**self._known, **state}
