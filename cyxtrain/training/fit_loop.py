"""One call of `fit`: epoch after epoch, the steps of each, and what becomes of its numbers."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from cyxtrain.checkpoint.manager import CheckpointManager
from cyxtrain.data.batches.batch import Share
from cyxtrain.data.rng import generators_kept, seed_generators
from cyxtrain.environment.accelerator import reset_peak_memory
from cyxtrain.environment.allocator import freed_memory_kept
from cyxtrain.errors import is_on_all_ranks
from cyxtrain.metrics.sums import MetricSums
from cyxtrain.optim.clipping import make_clip
from cyxtrain.optim.optimizers import fuse
from cyxtrain.parallel import DistributedDataParallel
from cyxtrain.progress.display import numbers
from cyxtrain.progress.flops import explain_usage, usage_of
from cyxtrain.progress.history import record_epoch
from cyxtrain.progress.profiling import Profile
from cyxtrain.progress.step_timer import StepTimer
from cyxtrain.training.epoch import run_epoch
from cyxtrain.training.evaluation import Evaluation, evaluate_rows
from cyxtrain.training.inputs.facts import trained_facts
from cyxtrain.training.inputs.plan import CheckedData, FitPlan
from cyxtrain.training.model.modes import put_into_training
from cyxtrain.training.model.out_of_memory import memory_explained
from cyxtrain.training.nonfinite import FiniteGuard
from cyxtrain.training.resuming.resume import Resumed
from cyxtrain.training.state import TrainingState
from cyxtrain.training.step import TrainingStep
from cyxtrain.training.stopping import StoppedError, StopRequest, StopSignals, first_reason_to_stop
from cyxtrain.training.trained import forgotten, warn_of_forgotten
from cyxtrain.world import runtime
from cyxtrain.world.agreement import agree, ending_group_on_error


class FitLoop:
    """One call of `fit` on this rank.

    Args:
        state: What is trained; it changes as the fit goes on.
        run: What is asked for.
        ddp: The model, wrapped.
        resumed: What belongs to this rank of a checkpoint that the fit goes on from; None: it begins.
    """

    def __init__(
        self,
        state: TrainingState,
        run: FitPlan,
        ddp: DistributedDataParallel,
        resumed: Resumed | None,
    ) -> None:
        self._state = state
        self._run = run
        self._ddp = ddp
        self._resumed = resumed
        self._device = run.data.placement.device
        self._last_epoch = state.position.first_epoch + run.config.epochs
        self._began = time.perf_counter() - state.history.total_time_seconds
        self._keeper = CheckpointManager(state, run.config, self._device, self._prepare_to_write, run.larger_is_better)
        self._wishes = StopSignals(run.config, state, keeps_time=runtime.is_master())
        self._callbacks = state.callbacks = run.callbacks
        state.data = run.feed.state_dict
        state.stop_training = False
        self._totals: MetricSums | None = None
        self._step: TrainingStep | None = None
        self._saved_step = -1
        if run.uses_reports:
            ddp.use_reports()
        self._forgotten: set[str] = set()
        self._profile = Profile(run.config.profile, self._device)
        self._put_into_training = put_into_training(state.model, *run.data.loss.modules)

    def train(self) -> StopRequest | None:
        """Trains until the last epoch, or until a rank wishes to stop; returns why it stopped."""
        stopped, position = None, self._state.position
        with contextlib.ExitStack() as stack:
            stack.callback(self._let_go_of_data)
            stack.enter_context(freed_memory_kept())
            stack.enter_context(contextlib.closing(self._keeper))
            stack.enter_context(contextlib.closing(self._callbacks))
            stack.enter_context(generators_kept(self._device))
            stack.enter_context(self._profile)
            stack.enter_context(self._wishes.hearing_signals())
            stack.enter_context(_telling(self._ddp))  # first of all: what has been begun to write may take its time
            stack.enter_context(self._showing_errors())
            self._begin()
            try:
                while not self._run.is_over(position):
                    self._epoch()
            except StoppedError as error:
                stopped = error.wish
                self._wishes.heeded()
                self._ddp.sync_buffers()
            self._keeper.finish(self._totals)
            if stopped is None:
                self._callbacks.call("on_train_end", self._logs())
        self._run.display.header(self._profile.facts())
        return stopped

    @contextlib.contextmanager
    def _showing_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._callbacks.on_exception(error)
            raise

    def _let_go_of_data(self) -> None:
        """Keep the state of the data, and not the data: they may have workers."""
        self._state.data = functools.partial(dict, self._run.feed.state_dict())
        del self._keeper  # it knows this object: a circle would keep the workers until the next collection

    def prepare_to_save(self) -> None:
        """Takes into the state what belongs to each rank, and what a callback on any has decided. All ranks call it."""
        self._settle()
        if self._totals is not None:
            self._keeper.gather(self._totals)
        else:
            self._keeper.gather_compression()
            self._heed_end(self._wishes.agree()[0])

    def _prepare_to_write(self) -> dict[str, Any]:
        """Make what rank 0 writes that of all ranks; return what compression keeps. All ranks call it."""
        self._ddp.sync_buffers()
        return self._ddp.compression_state()

    def prepare_to_evaluate(self) -> None:
        """Makes the model the same on every rank. All ranks call it."""
        self._settle()
        self._ddp.sync_buffers()

    def _settle(self) -> None:
        """Waits until it is known whether the latest step was taken, where it is not yet. All ranks call it."""
        if self._step is not None:
            self._step.settle()

    @contextlib.contextmanager
    def _settled(self, step: TrainingStep) -> Iterator[None]:
        """Within, a step may not be known to be taken; after it each is, also after an error."""
        self._step = step
        try:
            yield
            step.settle()
        except BaseException:
            step.give_up()
            raise
        finally:
            self._step = None

    def _begin(self) -> None:
        """Lets callbacks begin, or go on."""
        self._callbacks.call("set_params", self._run.params(self._last_epoch))
        resumed = self._resumed
        if resumed is not None:
            self._state.forget_added_groups()  # a callback may add them when training begins
        self._call("on_train_begin", {})
        if resumed is not None:
            # Once more: what a callback does to a model or a rate when training begins was done before.
            self._state.load_values(resumed.checkpoint, resumed.source)
            self._state.load_trained(resumed.checkpoint)
            self._state.rates.resume_from(self._run.schedule_steps(self._state.rates.warmup_steps))
            self._callbacks.load_state_dict(resumed.callbacks, resumed.source)
            self._ddp.load_compression_state(self._state.compression)
            self._state.stop_training |= resumed.stop_training
        self._keeper.check()

    def _epoch(self) -> None:
        """Trains for one epoch, or for what is left of it, validates, records, saves."""
        run, position = self._run, self._state.position
        epoch = position.epoch
        if position.samples == 0:
            self._call("on_epoch_begin", epoch, {})
        if run.fuses:
            fuse(self._state.optimizer)
        steps = run.steps_per_epoch
        reset_peak_memory(self._device)
        run.display.begin_epoch(epoch + 1, self._last_epoch, None if steps is None else steps - position.epoch_steps)
        before = position.samples
        clock = StepTimer(self._device, profiles=bool(run.config.profile))
        measured, seconds, note = self._train(clock)
        if run.feed.is_over and not position.epoch_steps:
            self._totals = None
            return  # the data were over before it had begun
        rows = position.samples - before
        if run.config.check_replicas_every_n_steps is None:
            self._ddp.check_replicas()
        self._ddp.sync_buffers()
        is_due = run.validation is not None and run.config.validates_after(epoch + 1)
        validation = self._validate(run.validation) if run.validation is not None and is_due else None
        position.epoch, position.samples, position.epoch_steps, self._totals = epoch + 1, 0, 0, None
        self._state.rates.end_epoch()
        self._state.forget_ranks()
        self._take_times(clock)
        self._record(measured, validation, seconds, rows, note)
        received = self._call("on_epoch_end", epoch, self._logs())
        self._heed_end(received)
        self._keeper.after_epoch()
        wish = first_reason_to_stop(received)
        if wish is not None:
            raise StoppedError(wish)

    def _call(self, hook: str, *arguments: Any) -> list[float]:
        """Calls a hook of all callbacks; returns what any rank wishes.

        The learning rates that callbacks set on any rank are those on all; of several ranks, the first one's. What they
        unfreeze, freeze, or add to the optimizer must be the same on all.
        """
        rates, state = self._state.rates, self._state
        before, trained = rates.now(), trained_facts(state.trained, state.optimizer)
        self._callbacks.call(hook, *arguments)
        rates.follow_groups()
        facts = trained_facts(state.trained, state.optimizer)
        received, rank = self._wishes.agree(speaks=rates.now() != before or facts != trained)
        if rank is not None:
            agree(facts)
            found = torch.tensor(rates.now(), dtype=torch.float64, device="cpu")
            dist.broadcast(found, rank, group=runtime.cpu_group())
            rates.set_all(found.tolist())
        return received

    def _warn_of_forgotten(self) -> None:
        """Warns, once each, of parameters that the optimizer does not have: also of those that a callback unfreezes."""
        found = forgotten(self._state.trained, self._state.optimizer)
        if runtime.is_master() and not self._forgotten.issuperset(found):
            warn_of_forgotten(self._state.trained, [name for name in found if name not in self._forgotten])
        self._forgotten.update(found)

    def _validate(self, rows: CheckedData) -> Evaluation:
        """Evaluates the epoch; whoever resumes one that stops here validates first."""
        self._call("on_test_begin", {})
        found = evaluate_rows(
            self._state.model,
            rows,
            distributed=True,
            give_up=lambda: self._wishes.want_to_stop,
            callbacks=self._callbacks,
        )
        received, gave_up = self._wishes.agree(speaks=found is None)
        wish = first_reason_to_stop(received)
        if wish is not None and gave_up is not None:
            self._callbacks.call("on_test_end", {})
            raise StoppedError(wish)
        assert found is not None
        self._call("on_test_end", {name: found[name] for name in found.keys()})  # noqa: SIM118
        return found

    def _train(self, clock: StepTimer) -> tuple[dict[str, float], float, str]:
        """Takes the steps of the epoch that are left; returns (numbers over all ranks, seconds, what else to say)."""
        began = time.perf_counter()
        run, position = self._run, self._state.position
        step = self._make_step(clock)
        self._totals = step.totals
        self._prepare(step)
        self._warn_of_forgotten()

        def train_one_step(share: Share) -> None:
            self._callbacks.on_train_batch_begin(share.number)
            received = self._ddp.exchange_signals(self._wishes.own())
            step(share)
            position.samples += share.joined_rows
            position.step += 1
            position.epoch_steps += 1
            position.passes, position.batches, position.order = run.feed.position
            self._state.forget_ranks()
            wishes = received()
            self._heed_end(wishes)
            self._callbacks.on_train_batch_end(share.number, step.totals.lazy_values)
            self._show(share, step.totals)
            self._check_and_save(step)
            self._heed(wishes, step.totals)
            clock.steps += 1
            self._profile.step()

        self._put_into_training()
        # Epochs count from 1 for people; the order of samples is that of number 0 first.
        if not position.stopped:
            with memory_explained(), contextlib.closing(run.shares(position)) as shares, self._settled(step):
                given = (clock.data.each(shares), train_one_step, self._device)
                run_epoch(*given, give_up=lambda: bool(position.stopped))
            position.passes, position.batches, position.order = run.feed.position
            position.stopped |= int(run.feed.is_over)
            self._heed_last_step(step)
        return step.totals.over_ranks(runtime.cpu_group()), time.perf_counter() - began, step.explain_epoch()

    def _check_and_save(self, step: TrainingStep) -> None:
        """Compares the replicas, and saves, where that is due after so many steps."""
        every = self._run.config.check_replicas_every_n_steps
        if every and self._state.position.step % every == 0:
            step.settle()
            self._ddp.check_replicas()
        if self._keeper.is_due():
            step.settle()
            self._keeper.save_step(step.totals)

    def _heed_last_step(self, step: TrainingStep) -> None:
        """Does what ranks have wished in the last step of an epoch, where that is known only now."""
        if self._run.uses_reports:
            wishes = self._ddp.received()
            self._heed_end(wishes)
            self._heed(wishes, step.totals)

    def _make_step(self, clock: StepTimer) -> TrainingStep:
        config, state = self._run.config, self._state
        return TrainingStep(
            self._ddp,
            self._run.data.loss,
            state.optimizer,
            state.rates,
            make_clip(config),
            self._make_guard(),
            self._run.data.call,
            state.loss_scale,
            self._device,
            self._run.data.metrics,
            clock,
            self._callbacks.before_optimizer_step,
            accumulates=self._run.feed.micro_batches > 1,
            without_rows=self._run.without_rows,
        )

    def _make_guard(self) -> FiniteGuard:
        state, ends = self._state, self._run.ends_on_nan
        on_nonfinite = self._run.config.on_nonfinite
        waits = self._run.uses_reports and self._ddp.config.compression != "powersgd"  # which keeps errors of each step
        scale = state.loss_scale
        return FiniteGuard(self._ddp, on_nonfinite, state.position, self._device, scale, ends=ends, waits=waits)

    def _show(self, share: Share, totals: MetricSums) -> None:
        """Shows how far the epoch is."""
        run = self._run
        run.display.step(share.joined_rows, totals.cheap_values)
        every = run.config.log_every_n_batches
        if every and (share.number + 1) % every == 0:
            self._settle()
            text = numbers(totals.over_ranks(runtime.cpu_group()))
            of = "" if run.steps_per_epoch is None else f"/{run.steps_per_epoch}"
            run.display.line(f"batch {share.number + 1}{of}  {text}")

    def _logs(self) -> dict[str, float]:
        """Returns the numbers of the last epoch, under Keras's names."""
        history = self._state.history
        return {name: values[-1] for name, values in history.history.items() if len(values) == len(history.epochs)}

    def _heed_end(self, received: Sequence[float]) -> None:
        """Makes this epoch the last one, where a callback on any rank wants it."""
        if any(received) and received[StopRequest.COMPLETE] > 0:
            self._state.position.stopped = 1

    def _heed(self, received: Sequence[float], totals: MetricSums) -> None:
        """Does what any rank wishes."""
        if not any(received):
            return
        self._settle()
        step = self._state.position.step
        if received[StopRequest.SAVE] > 0 and step > self._saved_step:
            self._keeper.save_step(totals)
            self._wishes.saved()
            self._saved_step = step + int(self._run.uses_reports)  # what is heard then was wished before
        wish = first_reason_to_stop(received)
        if wish is not None:
            raise StoppedError(wish)

    def _prepare(self, step: TrainingStep) -> None:
        """Gives generators and sums of the epoch their first values, or those of the checkpoint."""
        position = self._state.position
        seed_generators(self._run.config.seed, position.epoch, position.samples, runtime.get_rank(), self._device)
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            resumed.hand_over(step.totals, self._device)

    def _take_times(self, clock: StepTimer) -> None:
        """Notes where the time of the epoch's steps went, on all ranks."""
        clock.communicated(clock.data, self._run.feed.seconds_communicated())
        clock.communicated(clock.backward, self._ddp.seconds_communicated(waits=True))
        ranks, steps = clock.over_ranks(), max(clock.steps, 1)
        self._state.step_seconds = [{name: value / steps for name, value in parts.items()} for parts in ranks]
        self._profile.add(ranks, clock.steps)

    def _record(
        self, measured: dict[str, float], validation: Evaluation | None, seconds: float, rows: int, note: str
    ) -> None:
        """Adds an epoch to the history. Times are rank 0's: the history is the same on every rank."""
        times = torch.tensor([seconds, time.perf_counter() - self._began], dtype=torch.float64, device="cpu")
        dist.broadcast(times, 0, group=runtime.cpu_group())
        epoch_seconds, total_seconds = times.tolist()
        run, history = self._run, self._state.history
        text = numbers(measured)
        if validation is not None:
            validated = {name: validation[name] for name in validation.keys()}  # noqa: SIM118
            measured = measured | {f"val_{name}": value for name, value in validated.items()}
            text += f"  {numbers(validated, 'val_')}"
        record_epoch(history, self._state.position.epoch, measured)
        run.training_seconds += epoch_seconds
        run.training_rows += rows
        history.total_time_seconds = total_seconds
        history.samples_per_second = run.training_rows / run.training_seconds
        flops = run.data.flops_per_row and run.data.flops_per_row * rows / epoch_seconds / dist.get_world_size()
        self._state.device_usage = usage_of(self._device, flops, run.dtype)
        said = (f"{rows / epoch_seconds:,.0f} samples/s", *explain_usage(self._state.device_usage), note)
        run.display.end_epoch("  ".join(filter(None, (text, *said))))


@contextlib.contextmanager
def _telling(ddp: DistributedDataParallel) -> Iterator[None]:
    """As `telling`; after what fails on all alike, the group goes on, and the model is the same on all."""
    with ending_group_on_error():
        try:
            yield
        except BaseException as error:
            if is_on_all_ranks(error):
                ddp.sync_buffers()
            raise
