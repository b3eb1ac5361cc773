"""Which checkpoints a fit keeps, when it writes them, and what they hold of each rank."""

from __future__ import annotations

import contextlib
import math
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cyxtrain.checkpoint.folder import BEST, ID_CHARACTERS, CheckpointFolder, Found, look_into, name_of
from cyxtrain.checkpoint.format.encoding import decode_tree, encode_tree
from cyxtrain.checkpoint.format.optimizer_state import optimizer_state_by_name
from cyxtrain.checkpoint.live_marker import LiveMarker
from cyxtrain.checkpoint.remote_files import copy_remote
from cyxtrain.checkpoint.transport import read_on_all
from cyxtrain.checkpoint.uploader import Uploader
from cyxtrain.checkpoint.weights import load_model_state
from cyxtrain.checkpoint.writer import Writer
from cyxtrain.data.rng import generators_as_json
from cyxtrain.errors import CheckpointError, ConfigError, counted, shortened, warn, warn_together
from cyxtrain.metrics.logged import LoggedNumbers
from cyxtrain.metrics.sums import MetricSums
from cyxtrain.parallel import DistributedDataParallel
from cyxtrain.progress.history import validation_of
from cyxtrain.training.inputs.plan import FitPlan
from cyxtrain.training.state import TrainingState
from cyxtrain.training.trained import load_extra_state
from cyxtrain.world.agreement import raise_together

# What is left of a stop's time when it no longer waits for a store.
_SECONDS_TO_RETURN = 1.0


class CheckpointManager:
    """Writes the checkpoints of one fit and keeps some, as configured. All ranks make the same calls.

    Cost of a checkpoint: a copy of the state on the rank that writes, and two all_gathers of some 20 KB; the disk is
    written in the background. With compression="powersgd" the error feedback of all ranks is gathered too.
    """

    def __init__(
        self,
        state: TrainingState,
        plan: FitPlan,
        ddp: DistributedDataParallel,
        logged: LoggedNumbers,
        *,
        is_resumed: bool,
    ) -> None:
        self._state = state
        self._is_resumed = is_resumed
        self._plan = plan
        self._ddp = ddp
        self._logged = logged
        self._config = plan.config
        self._world = plan.world
        self._is_on = self._config.makes_checkpoints
        # Nothing is new to save before the first step.
        self._saved = self._name()
        self._problem: Exception | None = None
        self._failing: object = None
        self._missing = 0
        self._has_warned_of_data = False
        # The writing thread adds the files that are complete.
        self._complete: queue.SimpleQueue[Path] = queue.SimpleQueue()
        all_write = not self._config.save_on_master_only
        self._folder = CheckpointFolder(self._config.checkpoint_dir, self._world.rank if all_write else None)
        # The folder that it is when the fit begins; if the current folder is gone, writing reports it.
        with contextlib.suppress(FileNotFoundError):
            self._folder.path = self._folder.path.absolute()
        # The checkpoints in the folder when this fit began.
        self._before: list[Found] = []
        self._writer: Writer | None = None
        self._uploader: Uploader | None = None
        if self._is_on and (all_write or self._world.is_first):
            self._writer = Writer(self._folder)
            if self._folder.url:
                self._uploader = Uploader(self._folder, state.run, self._config.keep_last, self._is_newcomer)
            self._enter_folder()

    def _restore_best(self) -> None:
        """Mark the latest checkpoint if it is the best one: a fit that was killed may not have done so."""
        latest = self._resumed_from()
        if latest is not None and self._is_best():
            bests = [found for found in self._before if found.path == self._folder.file(BEST)]
            is_marked = any(found.url and found.order == latest.order for found in bests)
            # The best one of a later fit stays.
            is_own = all(not found.position or found.run.get("id") == self._state.run.get("id") for found in bests)
            if is_own and not is_marked:
                self._mark_best(latest)

    def _mark_best(self, latest: Found) -> None:
        best = self._folder.file(BEST)
        if latest.url:
            copy_remote(latest.url, f"{self._folder.url}/{best.name}")
            return
        self._folder.mark_best(latest.path)
        if self._uploader is not None:
            self._uploader.add(best)

    def _continue_uploads(self, uploader: Uploader) -> None:
        """Upload what a killed process of this run has left, and delete what the store has, or newer ones of it."""
        own = [found for found in self._before if found.run.get("id") == self._state.run.get("id")]
        there = [found for found in own if found.url]
        for found in [each for each in reversed(self._before) if not each.url]:
            if found.problem or (found in own and _has_as_new(there, found)):
                self._before.remove(found)
                with contextlib.suppress(OSError):
                    found.remove()
            elif found in own:
                uploader.add(found.path)

    def _resumed_from(self) -> Found | None:
        """Return the checkpoint in the folder that has the state when the fit begins; None: there is none."""
        position = self._state.position
        for found in self._before:
            # Another training may have left one of the same name.
            is_own = found.run.get("id") in self._state.runs
            if is_own and found.order[1:] == (position.step, position.epoch):
                return found
        return None

    def _enter_folder(self) -> None:
        """Warn about other runs in the folder; those that are alive keep their files."""
        run = self._state.run
        if self._world.is_first and run["id"] not in self._folder.live_runs():
            self._folder.claim(run, self._state.claim)
        self._folder.remove_leftovers()
        self._before = self._folder.newest_first()
        live = [name for each, name in self._folder.live_runs().items() if each != run["id"]]
        live = live or self._live_elsewhere()
        if live:
            self._step_aside(shortened(live))
            return
        replaced = [each for each in self._before if self._replaces(each)]
        if replaced:
            owners = dict.fromkeys(name_of(each.run) for each in replaced)
            warn_together(
                f"{self._config.checkpoint_dir} holds {counted(len(replaced), 'checkpoint')} of another training, "
                f"{shortened(owners)}: {name_of(run)} replaces those with the names of its own. Use another folder "
                "for each training (checkpoint_dir)."
            )

    def _live_elsewhere(self) -> list[str]:
        """Return the name of a run on another machine that writes to the store; without one, rank 0 marks its own."""
        if self._uploader is None:
            return []
        marker = LiveMarker(self._folder.url, self._state.run, self._uploader.notes.append)
        if not self._world.is_first:
            return marker.others()
        self._state.claim.callback(marker.close)
        return marker.claim()

    def _replaces(self, found: Found) -> bool:
        """Return whether this fit may replace a checkpoint of another training by one of the same name."""
        state = self._state
        if found.origin in (None, *state.runs, state.run.get("origin")):
            return False
        place = (state.position.step, state.position.epoch)
        is_ahead = found.order[1:] > place
        # A fit that resumes from another folder may save here what it resumed from.
        if self._is_resumed and self._resumed_from() is None:
            is_ahead = found.order[1:] >= place
        is_best = bool(self._config.keep_best) and found.path == self._folder.file(BEST)
        return is_ahead or is_best

    def _step_aside(self, others: str) -> None:
        """Add this run's id to the names of its files, because other runs are writing to the folder."""
        run = self._state.run
        self._folder.infix = f"-{run['id'][:ID_CHARACTERS]}"
        warn_together(
            f"{others} is writing to {self._config.checkpoint_dir}, too: the checkpoints of {name_of(run)} have "
            f"{self._folder.infix} in their names. Use another folder for each training (checkpoint_dir)."
        )

    def check(self) -> None:
        """Raise on all ranks if the first checkpoint would fail. All ranks call it, before the first step.

        If the fit resumed from a checkpoint elsewhere, its own folder gets one even if no step follows.
        """
        problem: Exception | None = None
        if self._writer is not None:
            problem = self._problem_of_first()
        raise_together(self._world, problem)
        if self._is_on and self._is_resumed:
            is_there = self._writer is None or self._resumed_from() is not None
            if not all(self._world.gather_json(is_there)):
                self._saved = ""

    def _problem_of_first(self) -> Exception | None:
        """Return why the first checkpoint would fail, if that is an error by `on_save_error`."""
        problem: Exception | None = None
        try:
            for optimizer in self._state.optimizers.values():
                optimizer_state_by_name(optimizer, self._state.trained)
        except CheckpointError as error:
            problem = error
        try:
            encode_tree(self._state.callbacks.state_dict(), "callbacks", {})
        except CheckpointError as error:
            problem = ConfigError(f"the state of a callback cannot be kept: {error}")
        try:
            self._folder.check()
            if self._uploader is not None:
                self._continue_uploads(self._uploader)
            self._restore_best()
        except CheckpointError as error:
            if self._config.on_save_error == "raise":
                return problem or error
            self._failing = _reason(error)
            warn(f'{error} Training continues without; on_save_error="raise" makes this an error.')
        return problem

    def is_due(self) -> bool:
        """Return whether a checkpoint is due after the latest step."""
        every = self._config.checkpoint_every_n_steps
        return bool(every) and self._state.position.step % every == 0

    def save_step(self, totals: MetricSums | None) -> None:
        """Write a checkpoint of this step, in the middle of an epoch, unless there is one."""
        if self._is_on and self._saved != self._name():
            self._save(totals)

    def take_complete(self) -> Iterator[Path]:
        """Yield the files that this rank has completed since the last call."""
        while not self._complete.empty():
            yield self._complete.get()

    def gather(self, totals: MetricSums | None) -> None:
        """Average buffers; gather compression state and, within an epoch, what each rank has. All ranks call it."""
        own: dict[str, Any] = {"sums": []}
        if totals is not None:
            own = {
                "generators": generators_as_json(self._plan.data.placement.device),
                "sums": totals.table().tolist(),
                "names": totals.shown,
                "metrics": totals.metrics.state(),
                "logged": self._logged.state(),
                "stop": self._state.stop_training,
            }
        feed = self._plan.feed
        if totals is not None or (feed.has_rank_states and feed.position[1]):
            own["data"] = self._state_of_data()
            ranks = self._world.gather_json(encode_tree(own, "rank"))
            self._state.set(ranks=[decode_tree(each) for each in ranks])
        self._ddp.sync_buffers()
        compression = self._ddp.compression_state()
        if self._writer is None and not self._world.is_first:
            # Only a rank that may write a checkpoint needs it.
            compression = {}
        self._state.set(compression=compression)

    def _state_of_data(self) -> Any:
        """Return this rank's state of the data as JSON; warn once and return {} if no checkpoint can hold it."""
        try:
            return encode_tree(self._plan.feed.rank_state(), "the state_dict of X")
        except CheckpointError as error:
            if not self._has_warned_of_data:
                warn(f"{error} A fit that resumes reads the data again.")
            self._has_warned_of_data = True
            return {}

    def after_epoch(self) -> None:
        """Save a completed epoch, with its validation and its entry in the history, if that is due."""
        every = self._config.checkpoint_every_n_epochs
        is_best = self._is_best()
        if is_best or (every and self._state.position.epoch % every == 0):
            self._save(None, is_best=is_best)

    def after_validation(self, totals: MetricSums | None) -> None:
        """Save the latest step if its validation, in the middle of an epoch, is the best one."""
        if self._is_best():
            self._save(totals, is_best=True)

    def finish(self, totals: MetricSums | None, seconds_left: Callable[[], float]) -> None:
        """Save the last state, and wait for the disk and the store.

        `totals`: of the epoch in which the fit stops, or None; `seconds_left`: until this process has to end.
        """
        if self._is_on and self._saved != self._name():
            self._save(totals)
        else:
            # Also for a program that calls save_checkpoint afterwards.
            self.gather(totals)
        if self._is_on:
            self._plan.display.phase("saving")
            if self._uploader is not None:
                self._finish_uploads(self._uploader, seconds_left)
            # No rank returns before all is on the disk: its exit could end the rank that writes.
            self._settle(together=True)

    def _finish_uploads(self, uploader: Uploader, seconds_left: Callable[[], float]) -> None:
        self._problem = self._take_problem()
        display = self._plan.display
        is_complete = uploader.finish(
            lambda words: display.header([("upload", words)]), lambda: seconds_left() - _SECONDS_TO_RETURN
        )
        if not is_complete and self._config.on_save_error == "raise":
            self._problem = self._problem or CheckpointError(
                f"The last checkpoint did not get to {self._folder.url}. A local copy is in {self._folder.path}."
            )

    def close(self) -> None:
        """Stop the writing thread, after an error too; it completes the file that it has begun."""
        if self._writer is not None:
            self._warn_of(self._take_problem())
            if self._missing > 1:
                warn(f"{self._missing} checkpoints could not be written to {self._config.checkpoint_dir}.")
            self._writer.close()
        uploader = self._uploader
        # They refer to each other.
        self._uploader = None
        if uploader is not None:
            for words in uploader.close():
                warn(words)

    @property
    def is_failing(self) -> bool:
        """Whether this rank could not write or upload its latest checkpoint."""
        return self._failing is not None or (self._uploader is not None and self._uploader.is_failing)

    def _is_best(self) -> bool:
        monitor = self._config.keep_best
        if monitor is None:
            return False
        values = self._monitored(monitor)
        logged = self._logged.larger_is_better.get(monitor)
        larger_is_better = self._plan.larger_is_better.get(monitor.removeprefix("val_"), logged)
        if larger_is_better is None or not values:
            return False
        if larger_is_better:
            values = [-value for value in values]
        # A first NaN is the best so far; a later one compares as false.
        *before, last = values
        best_before = min((value for value in before if not math.isnan(value)), default=math.inf)
        return not before or last < best_before

    def _monitored(self, monitor: str) -> list[float]:
        """Return the numbers of that name up to the latest step; empty if that has none, or not yet."""
        history = self._state.history
        position = self._state.position
        validated = [row[monitor] for row in history.validations if monitor in row]
        if validated:
            was_validated = monitor in validation_of(history, step=position.step)
            return validated if was_validated else []
        values = history.history.get(monitor, [])
        # In the middle of an epoch, or after one that has not logged it.
        if position.samples or len(values) < len(history.epochs):
            return []
        return values

    def _save(self, totals: MetricSums | None, *, is_best: bool = False) -> None:
        self.gather(totals)
        self._plan.display.phase("saving")
        self._settle()  # one file is written at a time
        self._saved = name = self._name()
        if self._writer is None:
            return
        self._avoid_newcomers(name, is_best=is_best)
        folder = self._folder
        uploader = self._uploader
        run = self._state.run.get("id")
        keep_last = self._config.keep_last

        def afterwards() -> None:
            self._failing = None
            if is_best:
                folder.mark_best(folder.file(name))
            if uploader is not None:
                uploader.add(folder.file(name))
                if is_best:
                    uploader.add(folder.file(BEST))
            elif keep_last:
                folder.prune(run, keep_last, folder.file(name))
            self._complete.put(folder.file(name))

        def make_room() -> bool:
            if uploader is not None:
                return uploader.make_room()
            # Delete now what would be deleted afterwards, except one.
            return bool(keep_last) and folder.prune(run, max(2, keep_last), folder.file(name)) > 0

        try:
            self._writer.write(name, self._state.to_checkpoint(self._world), afterwards, make_room)
        except (CheckpointError, ConfigError) as error:
            # Reported with those that come later.
            self._problem = error

    def _avoid_newcomers(self, name: str, *, is_best: bool) -> None:
        """Do not replace files of a run that has begun later: locks may not have told about it."""
        names = [name, BEST] if is_best else [name]
        for each in names:
            found = look_into(self._folder.file(each))
            if self._is_newcomer(found):
                self._step_aside(name_of(found.run))
                return

    def _is_newcomer(self, found: Found) -> bool:
        """Return whether a checkpoint is of another run that has written it since this fit began."""
        return bool(found.run) and found.run.get("id") not in self._state.runs and found not in self._before

    def _settle(self, *, together: bool = False) -> None:
        """Wait for the previous checkpoint, on all ranks if `together`; report its error."""
        problem = self._take_problem()
        if self._config.on_save_error == "raise":
            raise_together(self._world, problem)
        elif together:
            raise_together(self._world, None)
        self._warn_of(problem)
        while self._uploader is not None and self._uploader.notes:
            warn(self._uploader.notes.popleft())

    def _take_problem(self) -> Exception | None:
        problem = self._problem
        self._problem = None
        if problem is None and self._writer is not None:
            return self._writer.wait()
        return problem

    def _name(self) -> str:
        position = self._state.position
        if position.samples:
            return f"step-{position.step:08d}"
        return f"epoch-{position.epoch:04d}"

    def load_best(self) -> str:
        """Load the weights of the best checkpoint of this fit; return which one it is. All ranks call it."""
        if not self._config.load_best:
            return ""

        def read() -> tuple[bytes, str]:
            try:
                best = self._folder.best(self._state.run.get("id"))
            except CheckpointError as error:  # the store has died since
                warn(str(error))
                best = None
            if best is None:
                return b"", ""
            return best.read(), best.where

        found = read_on_all(self._world, read)
        if found is None:
            missing = self._folder.file(BEST)
            warn_together(f"load_best: this fit has no {missing}, so the model keeps its last weights. See keep_best.")
            return ""
        state, source = found
        load_model_state(self._state.model, state.model, source)
        load_extra_state(self._state.trained, state.others, source)
        self._state.callbacks.load_best(state.others.get("callbacks", {}), source)
        return f"the weights of step {state.position['step']:,}, from {source}"

    def _warn_of(self, problem: Exception | None) -> None:
        """Warn that a checkpoint is missing; if an error repeats, only the first time."""
        if problem is None:
            return
        self._missing += 1
        if _reason(problem) != self._failing:
            warn(f"{problem} Training continues without this checkpoint.")
            self._failing = _reason(problem)


def _has_as_new(files: list[Found], wanted: Found) -> bool:
    return any(each.order >= wanted.order and each.is_best == wanted.is_best for each in files)


def _reason(problem: Exception) -> tuple[type, object]:
    cause = problem.__cause__
    if isinstance(cause, OSError):
        return type(problem), cause.errno
    return type(problem), str(problem)
