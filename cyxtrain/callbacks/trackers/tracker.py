"""The base class of trackers: what is sent of a fit, when, and how a resumed fit continues it."""

from __future__ import annotations

import abc
import dataclasses
import importlib.util
import secrets
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from cyxtrain.callbacks.callback import Callback, Logs
from cyxtrain.callbacks.trackers.background_sender import BackgroundSender, Point, new_run, read_run, wait_for_late
from cyxtrain.callbacks.trackers.run_info import system_load
from cyxtrain.checkpoint.checkpoint_file import library_versions
from cyxtrain.checkpoint.folder import look_into
from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.config.settings import require, require_boolean, require_integer
from cyxtrain.environment.regular_files import local_path
from cyxtrain.errors import ConfigError, reason_of, warn
from cyxtrain.metrics import ConfusionMatrix

_LOAD_SECONDS = 10.0
# A change of these begins a new run; others decide how long a fit is, what it keeps, or are refused by `resume`.
_DECIDING = {
    *("accumulation_steps", "channels_last", "clip_adaptive", "clip_norm", "clip_value"),
    *("model", "optimizer", "precision", "samples_per_step", "seed", "sync_batchnorm"),
}


class Tracker(Callback, abc.ABC):
    """Send the numbers of a fit to a service, from rank 0: the base class of `MLflow`, `WandB` and `Trackio`.

    For another service, derive a class with four methods: `start`, `log`, `artifact` and `finish`. A background thread
    calls them one at a time, and again if they raise. Training does not wait for them, but a fit does: for the first
    one, if it imports a library, before a checkpoint, and before a fork, 5 s at most; at its end, 10 s at most. A
    resumed fit continues its run and sends each point once. See docs/trackers.md.

    Args:
        parameters: Your own settings, by name, shown with the fit's; if they change, a new run begins.
        log_every_n_steps: Also send rank 0's loss so far, its metrics and the learning rate every so many steps, as
            "step/loss" and others; 0: only epochs and validations.
        log_checkpoints: Upload checkpoints, too: each that is complete when the one before has been uploaded.
        log_plots: Upload plots of the history and of confusion matrices, too, when the fit is complete.
        folder: Local folder for a small file per run: its id, the last step sent of each curve, and points that wait.

    Raises:
        ConfigError: An argument is invalid.
    """

    runs_last = True
    _library: ClassVar[str] = ""
    """What the thread imports first; "": nothing."""

    def __init__(
        self,
        parameters: Mapping[str, Any] | None = None,
        *,
        log_every_n_steps: int = 10,
        log_checkpoints: bool = False,
        log_plots: bool = False,
        folder: str = "trackers",
    ) -> None:
        owner = type(self).__name__
        is_mapping = parameters is None or isinstance(parameters, Mapping)
        require(is_mapping, f"{owner}.parameters must be a dictionary, got {parameters!r}.")
        require_integer(owner, "log_every_n_steps", log_every_n_steps, 0)
        require_boolean(owner, "log_checkpoints", log_checkpoints)
        require_boolean(owner, "log_plots", log_plots)
        can_draw = not log_plots or importlib.util.find_spec("matplotlib") is not None
        require(can_draw, f"{owner}.log_plots needs matplotlib: pip install 'cyxtrain[plot]'.")
        local_path(f"{owner}.folder", folder)
        self.parameters = {str(name): str(value) for name, value in (parameters or {}).items()}
        self.log_every_n_steps = log_every_n_steps
        self.log_checkpoints = log_checkpoints
        self.log_plots = log_plots
        self.folder = folder
        self._sender: BackgroundSender | None = None
        self._known = new_run()
        # By name, the last step that is sent or queued.
        self._last: dict[str, int] = {}
        self._status = ""
        self._has_warned = False
        self._load_is_due = 0.0

    @abc.abstractmethod
    def start(self, run_id: str, settings: Mapping[str, str]) -> str:
        """Begin a run, or continue the run `run_id` unless it is "", and return its id; show `settings`, if any."""

    @abc.abstractmethod
    def log(self, points: list[Point]) -> None:
        """Send `points`: at most 1,000, each with a `name`, `step`, `value`, and its time in `seconds` since 1970."""

    @abc.abstractmethod
    def artifact(self, path: Path) -> None:
        """Upload the checkpoint at `path`, or the plot (.png)."""

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
        seconds_left = wait_for_late(self)
        if not seconds_left:
            warn(f"{type(self).__name__}: a call of an earlier fit has not returned; nothing of this fit is sent.")
            return
        self._status = "KILLED"
        self._has_warned = False
        active = self._active_run()
        run = self._run_to_begin(active, resumed=resumed)
        if not active:
            run["status"] = self._status
        self._last = run["sent"] | {name: step for name, step, *_ in run["waiting"]}
        self._sender = BackgroundSender(self, run, self._path(run["key"]))
        must_import = self._library != "" and self._library not in sys.modules
        self._sender.begin(seconds_left)
        if must_import:
            # The first step imports others, which two threads must not do at once.
            self._sender.wait_for_first_call()
        # The first mean begins here.
        system_load()
        self._load_is_due = time.time() + _LOAD_SECONDS

    def _run_to_begin(self, active: str, *, resumed: bool) -> dict[str, Any]:
        """Return the run that continues, or a new one; `active`: the id of the user's."""
        settings = self._settings()
        deciding = {name: settings[name] for name in settings if name in _DECIDING or name in self.parameters}
        run = {"settings": deciding, **self._known}
        if resumed or self.trainer.step:
            run |= read_run(self._path(run["key"]))
        newest = run["checkpoint_step"]
        if not resumed:
            # This object may have followed another trainer.
            newest = max([newest, *self._last.values()])
        if run["key"] and self._continues(run, deciding, active, newest):
            run["waiting"] = self._waiting_points(run)
        else:
            run = new_run(secrets.token_hex(8), active) | {"settings": deciding, "unseen": settings}
        return run | {name: str(vars(self).get(name) or "") for name in ("project", "name")} | {"status": ""}

    def _waiting_points(self, run: Mapping[str, Any]) -> list[Any]:
        """Return the points of the checkpoint and of the local file that have not been sent."""
        # The checkpoint may be newer than the file.
        waiting = {(each[0], each[1]): each for each in (*self._known["waiting"], *run["waiting"])}
        return [each for each in waiting.values() if each[1] > run["sent"].get(each[0], -1)]

    def _path(self, key: str) -> Path:
        return Path(local_path("folder", self.folder)).absolute() / f"{type(self).__name__}-{key}.json"

    def _continues(self, run: dict[str, Any], deciding: dict[str, str], active: str, newest: int) -> bool:
        """Return whether the fit continues a run, which has come to step `newest`; warn if not."""
        step = self.trainer.step
        changed = [name for name in deciding | run["settings"] if deciding.get(name) != run["settings"].get(name)]
        why = ""
        if not step:
            return False
        if changed:
            why = f"{', '.join(changed)} changed"
        elif step < newest:
            why = f"it starts at step {step:,}, and the run is at step {newest:,}"
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
        found["data_hash"] = self.params["data_hash"]
        found |= {f"version/{name}": version for name, version in library_versions().items()}
        return {name: str(value) for name, value in (found | self.parameters).items()}

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        every = self.log_every_n_steps
        if self._sender is not None and every and self.trainer.step % every == 0:
            self._add({f"step/{name}": value for name, value in (logs or {}).items()})

    def on_validation_end(self, epoch: int, logs: Logs | None = None) -> None:
        self._add(logs or {})

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        usage = {f"system/{name}": value for name, value in self.trainer.device_usage.items()}
        self._add({**(logs or {}), "samples_per_second": self.trainer.history.samples_per_second, **usage})

    def _add(self, numbers: Mapping[str, float]) -> None:
        """Queue numbers of the latest step, and the system's load now and then, except those that the run has."""
        if self._sender is not None:
            step = self.trainer.step
            now = time.time()
            if now >= self._load_is_due:
                numbers = {**numbers, **system_load()}
                self._load_is_due = now + _LOAD_SECONDS
            new = [name for name in numbers if step > self._last.get(name, -1)]
            self._last |= dict.fromkeys(new, step)
            self._sender.add([Point(name, step, float(numbers[name]), now) for name in new])
            self._warn_of_problem()

    def on_checkpoint(self, path: Path) -> None:
        if self._sender is not None:
            step = look_into(path).position.get("step", -1)
            self._sender.run["checkpoint_step"] = max(step, self._sender.run["checkpoint_step"])
            if self.log_checkpoints:
                self._sender.add_file("checkpoint", path)

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._status = "FINISHED"
        if self._sender is None or not self.log_plots:
            return
        metrics = self.trainer.metrics.items()
        figures = {name: each.figure for name, each in metrics if isinstance(each, ConfusionMatrix) and each.figure}
        try:
            for name, figure in {"history": self.trainer.history.plot(), **figures}.items():
                path = self._path(f"{self._sender.run['key']}-{name}").with_suffix(".png")
                figure.savefig(path, dpi=120)
                self._sender.add_file(name, path)
        except (ConfigError, OSError) as error:  # no epoch to plot; no space on the disk
            warn(f"{type(self).__name__}: no plots: {reason_of(error)}")

    def on_exception(self, exception: BaseException) -> None:
        if isinstance(exception, Exception):
            self._status = "FAILED"

    def close(self) -> None:
        if self._sender is None:
            return
        self._known = self._sender.close(self._status)
        self._warn_of_problem()
        num_dropped = self._sender.num_dropped
        self._sender = None
        num_waiting = len(self._known["waiting"])
        if num_waiting or num_dropped:
            owner = type(self).__name__
            warn(
                f"{owner}: {num_waiting + num_dropped:,} points were not sent: at most 10,000 wait for the service, "
                f"and for 10 s at the end. {num_waiting:,} of them are in {self._path(self._known['key'])}: the next "
                f"fit with {owner} in this folder sends them, or, if you began the run, one that continues it."
            )

    def _warn_of_problem(self) -> None:
        """Warn once of an error of the service."""
        if self._sender is not None and self._sender.problem and not self._has_warned:
            self._has_warned = True
            warn(f"{type(self).__name__}: {self._sender.problem}. Training continues; failed calls are repeated.")

    def state_dict(self) -> dict[str, Any]:
        if self._sender is None:
            return dict(self._known)
        # A checkpoint has the run's id.
        self._sender.wait_for_first_call()
        return self._sender.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._known = {**self._known, **state}
