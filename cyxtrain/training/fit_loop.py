"""One call of `fit`: running the steps of each epoch, and recording their metrics.

What happens from the call to the first step, in this order:

1. `DistributedTrainer._plan_fit`: the ranks join, check their input, and agree on the plan. `start_or_resume` begins a
   new fit, or finds a checkpoint and loads it (`Resumption.load`). Then rank 0 sends its parameters to all ranks.
2. `DistributedTrainer.fit` shows the header, and makes the loop; rank 0 enters the folder of checkpoints.
3. `FitLoop._begin_training`: `set_params` and `on_train_begin`; `Resumption.restore` loads the checkpoint again; the
   first checkpoint is tried. From here on the state is the one that training continues from: `on_fit_start`.
4. `FitLoop._begin_epoch`: `on_epoch_begin`, except in the middle of an epoch. The generators are seeded, and
   `Resumption.restore_epoch` restores the sums of the epoch. If the validation of its last step is missing, it follows.
5. `FitLoop._train_one_step`, for each share of the data.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from cyxtrain.checkpoint.checkpoint_file import CheckpointState
from cyxtrain.data.batches.batch import Share
from cyxtrain.data.feed import DataInterruptedError
from cyxtrain.data.rng import generators_kept, seed_generators, use_own_numpy
from cyxtrain.environment.accelerator import reset_peak_memory
from cyxtrain.environment.allocator import freed_memory_kept
from cyxtrain.errors import ConfigError, is_on_all_ranks, on_all_ranks, shortened, warn_together
from cyxtrain.metrics.logged import GRAD_NORM, LoggedNumbers
from cyxtrain.optim.learning_rates import LEARNING_RATE, rates_by_name, rates_of, set_rates
from cyxtrain.optim.optimizers import fuse
from cyxtrain.parallel import DistributedDataParallel
from cyxtrain.progress.display import around_validation, numbers, pace
from cyxtrain.progress.flops import explain_usage, usage_of
from cyxtrain.progress.history import TrainingHistory, record_epoch, record_numbers, record_validation, validation_of
from cyxtrain.progress.step_timer import Profile, StepTimer
from cyxtrain.training.checkpoint_manager import CheckpointManager
from cyxtrain.training.evaluation import evaluate_rows
from cyxtrain.training.inputs.facts import trained_facts
from cyxtrain.training.inputs.plan import FitPlan
from cyxtrain.training.model.compile import marked_steps
from cyxtrain.training.model.out_of_memory import memory_explained
from cyxtrain.training.model.snapshot import put_into_training
from cyxtrain.training.resume.resumption import Resumption
from cyxtrain.training.state import TrainingState
from cyxtrain.training.step.hash_log import make_hash_log
from cyxtrain.training.step.session import Session
from cyxtrain.training.step.training_step import TrainingStep
from cyxtrain.training.stopping import (
    StoppedError,
    StopRequest,
    StopSignals,
    describe_place,
    explain_stop,
    stop_if_requested,
)
from cyxtrain.training.trained import warn_of_params_without_optimizer
from cyxtrain.world.agreement import agree, ending_group_on_error

# How many times the loss before training, or 1 if that is more, a loss is when training has diverged.
_DIVERGED = 1e5
_NOT_PRINTED = (LEARNING_RATE, GRAD_NORM)


class FitLoop:
    """One call of `fit` on this rank: `fit` -> `_train_one_epoch` -> `_train_one_step` -> `TrainingStep`."""

    def __init__(
        self,
        state: TrainingState,
        plan: FitPlan,
        ddp: DistributedDataParallel,
        resumption: Resumption | None,
        logged: LoggedNumbers,
    ) -> None:
        self._state = state
        self._plan = plan
        self._world = plan.world
        self._ddp = ddp
        # None as soon as all of it is restored.
        self._resumption = resumption
        self._device = plan.data.placement.device
        self._logged = logged
        logged.reserved |= {name.removeprefix("val_") for name in plan.measured}
        logged.best_names = {plan.config.keep_best}
        self._last_epoch = state.position.first_epoch + plan.length.epochs
        self._started_at = self._epoch_started_at = time.perf_counter() - state.history.total_time_seconds
        self._trained_rows, self._training_seconds = _trained_before(state.history, plan)
        self._manager = CheckpointManager(state, plan, ddp, logged, is_resumed=resumption is not None)
        self._requests = StopSignals(plan.config, state, plan.world)
        self._callbacks = plan.callbacks
        state.set(callbacks=plan.callbacks, data=plan.feed.state_dict, stop_training=False)
        self._samples_before = 0
        self._clock_step = -1
        self._validates_within_epochs = plan.config.validates_within_epochs
        self._warned_params: set[str] = set()
        self._profile = Profile(plan.config.profile, self._device, plan.world)
        hashes = make_hash_log(plan.config, state, ddp)
        self._session = Session(
            state, plan.data, ddp, logged, hashes, ends_fit=plan.ends_on_nan, may_defer=plan.defers_verdicts
        )
        self._put_into_training = put_into_training(state.model, *plan.data.loss.modules)
        self._after_step = self._phases_after_step()

    def fit(self) -> StoppedError | None:
        """Train to the last epoch, or until a rank asks to stop; return why it stopped."""
        stop: StoppedError | None = None
        with self._resources():
            self._begin_training()
            try:
                while not self._plan.length.is_over(self._state.position):
                    self._train_one_epoch()
            except StoppedError as error:
                # Its frames would keep the data's workers.
                stop = error.with_traceback(None)
                self._requests.begin_stop(stop)
                self._ddp.sync_buffers()
            self._manager.finish(self._session.totals, self._requests.seconds_left)
            self._report_checkpoints()
            best = ""
            if stop is None:
                best = self._manager.load_best()
                self._logged.is_closed = True
                self._callbacks.call("on_train_end", self._logs())
            else:
                # Here, before another signal ends the process.
                self._plan.display.close()
                is_failing = self._manager.is_failing
                explained = explain_stop(stop, self._state.position, self._plan.config, is_failing=is_failing)
                self._plan.display.header([("stopped", explained)])
        facts = self._profile.facts()
        if best:
            facts = [("best", best), *facts]
        self._plan.display.header(facts)
        if stop is None:
            self._state.set(complete_fits=self._state.position.fits)
        return stop

    def _train_one_epoch(self) -> None:
        """Train for one epoch, or for the rest of one; then validate, record and save."""
        step = self._begin_epoch()
        position = self._state.position
        if not position.stopped:
            with memory_explained(self._world), contextlib.closing(self._plan.shares(position)) as shares:
                try:
                    for share in marked_steps(step.clock.data.each(shares), self._device):
                        self._train_one_step(share)
                        if position.stopped:
                            break
                    self._session.wait_for_verdict()
                    self._keep_before_end()
                except DataInterruptedError:
                    # Workers of a loader have died of the signal that stops the fit: stop in good order.
                    self._session.wait_for_verdict()
                    stop_if_requested(self._requests.agree()[0])
                    raise
                except BaseException:
                    self._session.abort()
                    raise
            # Numbers that are logged from here on do not belong to a batch.
            self._logged.rows = 1
            if self._plan.feed.is_over:
                position.set(stopped=1)
            if self._plan.defers_verdicts:
                # The requests of the last step have arrived with its verdict.
                requests = self._ddp.received()
                self._apply_end(requests)
                self._apply(requests)
        self._end_epoch(step)

    def _train_one_step(self, share: Share) -> None:
        """Run a step; then what follows it, and what any rank has requested."""
        self._session.begin_step(share)
        self._callbacks.on_batch_begin("train", share.number)
        self._session.take_step(share, self._requests.local())
        self._state.take_step(share.global_rows, self._plan.feed.position)
        requests = self._session.received()
        self._apply_end(requests)
        for follow in self._after_step:
            follow(share)
        self._apply(requests)
        self._profile.step()

    def _phases_after_step(self) -> list[Callable[[Share], None]]:
        """Return what follows each step, in order; a fit takes only the phases that it asks for."""
        config = self._plan.config
        logs = bool(config.log_every_n_steps or config.log_every_n_batches)
        phases: list[tuple[Callable[[Share], None], bool]] = [
            (self._call_batch_end, True),
            (self._show, config.verbose or logs),
            (self._validate_if_due, self._validates_within_epochs),
            (self._check_replicas_if_due, bool(config.check_replicas_every_n_steps)),
            (self._save_if_due, bool(config.checkpoint_every_n_steps)),
            (self._report_checkpoints, config.makes_checkpoints and self._world.is_first),
        ]
        return [phase for phase, is_asked_for in phases if is_asked_for]

    def _call_batch_end(self, share: Share) -> None:
        self._callbacks.on_batch_end("train", share.number, self._batch_values)

    def _validate_if_due(self, share: Share) -> None:
        if self._plan.length.validates_at(self._state.position):
            self._validate_within_epoch()

    def _check_replicas_if_due(self, share: Share) -> None:
        every = self._plan.config.check_replicas_every_n_steps
        if every and self._state.position.step % every == 0:
            self._session.wait_for_verdict()
            self._ddp.check_replicas()

    def _save_if_due(self, share: Share) -> None:
        if self._manager.is_due():
            # The latest step may still be undone.
            self._session.wait_for_verdict()
            self._manager.save_step(self._session.totals)

    def _report_checkpoints(self, _: Share | None = None) -> None:
        """Call `on_checkpoint` on rank 0 for each file that has been completed since the last call."""
        if self._world.is_first:
            for path in self._manager.take_complete():
                self._callbacks.call("on_checkpoint", path)

    @contextlib.contextmanager
    def _resources(self) -> Iterator[None]:
        """Acquire the resources of a fit; release them however it ends."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._release_data)
            stack.enter_context(self._session)
            stack.enter_context(freed_memory_kept())
            stack.enter_context(contextlib.closing(self._manager))
            stack.enter_context(contextlib.closing(self._callbacks))
            stack.enter_context(generators_kept(self._device))
            use_own_numpy()
            stack.enter_context(self._profile)
            stack.enter_context(self._requests.catching_signals())
            # Entered last: the group ends before the writer closes, which may take long.
            stack.enter_context(ending_group_on_error(self._world))
            try:
                yield
            except BaseException as error:
                self._callbacks.on_exception(error)
                if is_on_all_ranks(error):
                    # The group stays, and all ranks continue with the same model.
                    self._ddp.sync_buffers()
                raise

    def _release_data(self) -> None:
        self._state.set(data=partial(dict, self._state.data()))
        # They refer to this object: a cycle would keep the data's workers until garbage collection.
        self._after_step.clear()
        del self._manager

    def _begin_training(self) -> None:
        """Call `on_train_begin`; if the fit resumes, load the checkpoint again; call `on_fit_start`."""
        params = self._plan.params(self._last_epoch)
        self._callbacks.call("set_params", {**params, "data_hash": self._state.run["data"]})
        if self._resumption is not None:
            self._resumption.drop_added_groups(self._state)
        self._together(self._callbacks.call, "on_train_begin", {})
        if self._resumption is not None:
            self._resumption.restore(self._state, self._plan, self._ddp, self._logged)
        self._manager.check()
        self._together(self._callbacks.call, "on_fit_start", self._resumption is not None)

    def _begin_epoch(self) -> TrainingStep:
        plan = self._plan
        length = plan.length
        state = self._state
        position = state.position
        if position.samples == 0:
            self._together(self._callbacks.call, "on_epoch_begin", position.epoch, {})
        for name in plan.fused_optimizers:
            fuse(state.optimizers[name])
        reset_peak_memory(self._device)
        # Displayed epochs start at 1; the order of samples counts them from 0.
        last_step = length.end_of_epoch(position, length.steps_per_epoch)
        last_epoch = self._last_epoch if length.knows_epochs else 0
        plan.display.begin_epoch(position.epoch + 1, last_epoch, last_step, position.epoch_steps)
        self._samples_before = position.samples
        self._epoch_started_at = time.perf_counter()
        step = self._session.begin_epoch()
        seed_generators(plan.config.seed, position.epoch, position.samples, plan.own_generators, self._device)
        if self._resumption is not None:
            self._resumption.restore_epoch(plan, step.totals, self._logged)
            self._resumption = None
            if position.samples and self._validates_within_epochs and length.validates_at(position):
                # Unless the checkpoint has it.
                self._validate_within_epoch()
        # Again in each epoch: a callback may have unfrozen some.
        warn_of_params_without_optimizer(state.trained, state.optimizers.values(), self._warned_params)
        self._put_into_training()
        return step

    def _keep_before_end(self) -> None:
        """Keep the state, if a longer fit would continue differently from here than from the end of the epoch."""
        if self._plan.length.ends_early(self._state.position) and not self._state.position.stopped:
            # Resumed with a larger max_steps, a fit would otherwise never train the rest of this epoch.
            self._manager.gather(self._session.totals)
            self._state.keep_before_end(self._world)

    def _end_epoch(self, step: TrainingStep) -> None:
        """Measure, validate, record and save the epoch."""
        plan = self._plan
        state = self._state
        position = state.position
        measured = step.totals.over_ranks(self._world)
        seconds = time.perf_counter() - self._epoch_started_at
        if plan.feed.is_over and not position.epoch_steps:
            # The data had ended before the epoch began.
            self._session.step = None
            return
        if self._session.updates is not None:
            self._session.updates.warn_of_idle()
        self._warn_of_divergence(measured["loss"])
        rows = position.samples - self._samples_before
        if plan.config.check_replicas_every_n_steps is None:
            self._ddp.check_replicas()
        self._ddp.sync_buffers()
        is_validated = plan.length.validates_epoch(position) and self._validate()
        is_whole = not position.stopped or position.epoch_steps == plan.length.steps_per_epoch
        where = f"after epoch {position.epoch + 1}" if is_whole else describe_place(position)
        own = rates_by_name(state.rates) | self._logged_in_epoch()
        self._session.step = None
        # The place in the data moves on with the epoch, not with its last step: a fit that resumes from within the
        # validation would otherwise train the epoch again.
        state.end_epoch(plan.feed.position)
        self._record(step, measured, own, seconds, rows, is_validated=is_validated)
        if is_validated:
            self._together(self._callbacks.call, "on_validation_end", position.epoch - 1, self._validation)
        received = self._together(self._call_epoch_end, position.epoch - 1)
        self._apply_end(received)
        if position.stopped:
            self._explain_end(where)
        self._manager.after_epoch()
        self._report_checkpoints()
        stop_if_requested(received)

    def _explain_end(self, where: str) -> None:
        """Keep and show why a callback on any rank ends the fit with this epoch, if it gives a reason."""
        reasons = self._world.gather(self._callbacks.stop_reason)
        if any(reasons):
            self._state.set(stop_reason=next(filter(None, reasons)))
            explained = f"{where} of {self._last_epoch}: {self._state.stop_reason}"
            self._plan.display.header([("stopped", explained)])

    def _warn_of_divergence(self, loss: float) -> None:
        """Warn once about a loss that is finite, and has grown beyond all bounds."""
        before = self._plan.data.tried.first_loss
        if abs(loss) > _DIVERGED * max(1.0, abs(before)):
            self._plan.data.tried.first_loss = math.inf
            rates = shortened(f"{rate:g}" for rate in rates_by_name(self._state.rates).values())
            warn_together(
                f"epoch {self._state.position.epoch + 1}: training diverges: the mean loss is {loss:.3g}, and was "
                f"{before:.3g} before. Lower the learning rate ({rates}), set clip_norm=1.0, or scale X and y."
            )

    def _validate_within_epoch(self) -> None:
        """Validate, save the best, and stop if a callback asks for it; random generators continue as before."""
        self._session.wait_for_verdict()
        began = time.perf_counter()
        # Numbers that hooks log from here on do not belong to the batch.
        self._logged.rows = 1
        with generators_kept(self._device):
            self._ddp.sync_buffers()
            if not self._validate():
                return
        plan = self._plan
        position = self._state.position
        plan.display.line(around_validation(f"step {position.step:,}", self._validation, [*plan.validation]))
        received = self._together(self._callbacks.call, "on_validation_end", position.epoch, self._validation)
        self._apply_end(received)
        self._manager.after_validation(self._session.totals)
        # The time of the epoch is without validations.
        self._epoch_started_at += time.perf_counter() - began
        stop_if_requested(received)

    def _validate(self) -> bool:
        """Evaluate all validation data, unless the latest step has been validated; return whether it does.

        A fit that resumes from within a validation repeats it.
        """
        if self._validation:
            return False
        position = self._state.position
        model = self._state.model
        display = self._plan.display
        should_stop = self._requests.want_to_stop
        measured: dict[str, float] = {}
        with self._logged.apart([*self._plan.validation]) as logged:
            self._together(self._callbacks.call, "on_test_begin", {})
            for name, rows in self._plan.validation.items():
                if measured:
                    self._callbacks.withdraw_end("test")  # it was about the set before
                found = evaluate_rows(
                    self._world, model, rows, self._callbacks, display, logged, should_stop=should_stop
                )
                # A rank that stops early, after a signal, say, ends the validation on all ranks.
                received, stopping_rank = self._requests.agree(flagged=found is None)
                if stopping_rank is not None:
                    self._callbacks.call("on_test_end", {})
                    stop_if_requested(received)
                assert found is not None
                prefix = ""
                if name:
                    logged.reset()
                    prefix = f"{name}_"
                named = {f"{prefix}{each}": number for each, number in found.items()}
                # The first set has the plain names, too.
                measured = {**(measured or found), **named}
            self._together(self._callbacks.call, "on_test_end", measured)
            measured |= logged.over_ranks(self._world)
        record_validation(self._state.history, position.step, position.epoch + 1, measured)
        return True

    @property
    def _validation(self) -> dict[str, float]:
        """The numbers of the validation of the latest step; empty without one."""
        return validation_of(self._state.history, step=self._state.position.step)

    def prepare_to_save(self) -> None:
        """Gather per-rank state, and any rank's request to end. All ranks call it."""
        self._session.wait_for_verdict()
        self._manager.gather(self._session.totals)
        if self._session.step is None:
            self._apply_end(self._requests.agree()[0])

    def to_checkpoint(self) -> CheckpointState:
        """Return what a checkpoint of this rank holds, after `prepare_to_save`."""
        found = self._state.to_checkpoint(self._world)
        if self._resumption is not None:
            return self._resumption.with_unrestored(found)
        return found

    def prepare_to_evaluate(self) -> None:
        """Make the model the same on every rank. All ranks call it."""
        self._session.wait_for_verdict()
        self._ddp.sync_buffers()

    def _logged_in_epoch(self) -> dict[str, float]:
        """Return what all ranks have logged outside of validations; refuse names that a validation has."""
        found = self._logged.over_ranks(self._world)
        for latest in self._state.history.validations[-1:]:
            for name in latest:
                if name in found:
                    raise on_all_ranks(
                        ConfigError(
                            f"log({name!r}) was called in training, and a validation has a number of this name: what "
                            f"it logs as {name.removeprefix('val_')!r}. Choose another name for one of them."
                        )
                    )
        return found

    def _call_epoch_end(self, epoch: int) -> None:
        """Call `on_epoch_end`: first of most callbacks, then of those that get what the others have logged."""
        self._callbacks.call("on_epoch_end", epoch, self._logs(), last=False)
        record_numbers(self._state.history, self._logged_in_epoch())
        self._logged.reset()
        self._callbacks.call("on_epoch_end", epoch, self._logs(), last=True)
        best = self._plan.config.keep_best
        is_first = epoch == self._state.position.first_epoch
        is_missing = best and best not in (*self._plan.measured, *self._state.history.history)
        if is_first and is_missing:
            warn_together(
                f"keep_best={best!r}: the first epoch has no such number (available: {', '.join(self._logs())}). No "
                "checkpoint is the best one until it is logged."
            )

    def _together(self, call: Callable[..., None], *arguments: Any) -> list[float]:
        """Call callbacks; return the requests of all ranks.

        Learning rates that callbacks set on any rank are set on all; the lowest such rank wins. Callbacks
        must freeze, unfreeze and add parameters to the optimizer alike on all ranks.
        """
        state = self._state
        optimizers = state.optimizers.values()
        rates_before = rates_of(*optimizers)
        facts_before = trained_facts(state.trained, optimizers)
        call(*arguments)
        for rates in state.rates.values():
            rates.follow_groups()
        facts = trained_facts(state.trained, optimizers)
        has_changed = rates_of(*optimizers) != rates_before or facts != facts_before
        received, rank = self._requests.agree(flagged=has_changed)
        if rank is not None:
            # Raises if ranks froze, unfroze or added different parameters.
            agree(self._world, facts)
            found = torch.tensor(rates_of(*optimizers), dtype=torch.float64, device="cpu")
            set_rates(state.rates.values(), self._world.broadcast(found, rank).tolist())
        return received

    def _apply_end(self, received: Sequence[float]) -> None:
        """Make this epoch the last one if a callback on any rank asks for it."""
        if any(received) and received[StopRequest.COMPLETE] > 0:
            self._state.position.set(stopped=1)

    def _apply(self, received: Sequence[float]) -> None:
        """Save, or stop, if any rank requests it."""
        if not any(received):
            return
        self._session.wait_for_verdict()
        number = self._state.position.step
        if received[StopRequest.CLOCK] > 0 and number > self._clock_step:
            saves, validates = self._requests.take_due()
            self._clock_step = number
            if self._plan.defers_verdicts:
                # The next step still has the old request.
                self._clock_step += 1
            if validates:
                self._validate_within_epoch()
            if saves:
                self._manager.save_step(self._session.totals)
        stop_if_requested(received)

    def _show(self, share: Share) -> None:
        plan = self._plan
        totals = self._session.running
        plan.display.step(share.global_rows, totals.cheap_values)
        every = plan.config.log_every_n_steps
        count = self._state.position.step
        if not every:
            every = plan.config.log_every_n_batches
            count = share.number + 1
        if every and count % every == 0:
            self._session.wait_for_verdict()
            steps = plan.length.steps_per_epoch
            of = "" if steps is None else f"/{steps}"
            plan.display.line(f"batch {share.number + 1}{of}  {numbers(totals.over_ranks(self._world))}")

    def _batch_values(self) -> dict[str, Callable[[], float]]:
        """Return functions that compute this rank's numbers of the epoch so far, and the learning rate."""
        rates = {name: partial(float, rate) for name, rate in rates_by_name(self._state.rates).items()}
        return self._session.running.lazy_values() | rates | self._logged.lazy_values()

    def _logs(self) -> dict[str, float]:
        """Return the numbers of the last epoch, under Keras's names."""
        history = self._state.history
        return {name: values[-1] for name, values in history.history.items() if len(values) == len(history.epochs)}

    def _record(
        self,
        step: TrainingStep,
        measured: dict[str, float],
        own: dict[str, float],
        seconds: float,
        rows: int,
        *,
        is_validated: bool,
    ) -> None:
        """Publish the times of an epoch, add it to the history, and show it."""
        history = self._state.history
        position = self._state.position
        num_steps = step.clock.steps
        self._record_step_seconds(step.clock)
        # The times of rank 0, so that the history is the same on every rank.
        times = torch.tensor([seconds, time.perf_counter() - self._started_at], dtype=torch.float64, device="cpu")
        epoch_seconds, history.total_time_seconds = self._world.broadcast(times).tolist()
        self._training_seconds += epoch_seconds
        self._trained_rows += rows
        history.samples_per_second = self._trained_rows / self._training_seconds
        validated = validation_of(history, epoch=position.epoch)
        record_epoch(history, position.epoch, position.step, measured | validated | own)
        usage = self._record_usage(rows, epoch_seconds)
        printed = {name: value for name, value in own.items() if not name.startswith(_NOT_PRINTED)}
        text = "  ".join(filter(None, map(numbers, (measured, printed))))
        more = "  ".join(filter(None, (pace(epoch_seconds, num_steps, rows), *usage, step.guard.explain_epoch())))
        # Validations within the epoch have had their own lines.
        shown = validated if is_validated else {}
        self._plan.display.end_epoch(around_validation(text, shown, [*self._plan.validation], more))

    def _record_step_seconds(self, clock: StepTimer) -> None:
        """Publish how long each part of a step has taken on each rank, as the mean over the epoch."""
        clock.communicated(clock.data, self._plan.feed.seconds_communicated())
        clock.communicated(clock.backward, self._ddp.seconds_communicated(waits=True))
        ranks = clock.over_ranks(self._world)
        num_steps = max(clock.steps, 1)
        means = [{name: value / num_steps for name, value in parts.items()} for parts in ranks]
        self._state.set(step_seconds=means)
        self._profile.add(ranks, clock.steps)

    def _record_usage(self, rows: int, seconds: float) -> list[str]:
        """Publish how this rank has used its device in the epoch; return a description."""
        flops_per_second = None
        flops_per_row = self._plan.data.tried.flops_per_row
        if flops_per_row:
            flops_per_second = flops_per_row * rows / seconds / self._world.size
        self._state.set(device_usage=usage_of(self._device, flops_per_second, self._plan.dtype))
        return explain_usage(self._state.device_usage)


def _trained_before(history: TrainingHistory, plan: FitPlan) -> tuple[int, float]:
    """Return rows and seconds of the epochs before, whose average speed a fit that resumes continues."""
    speed = history.samples_per_second
    if not speed:
        return 0, 0.0
    rows = (plan.feed.rows_of(plan.length.steps_per_epoch) or 0) * len(history.epochs)
    return rows, rows / speed
