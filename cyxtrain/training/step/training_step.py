"""One training step.

The order of a training step: zero the gradients; accumulate the forward and backward of each micro-batch under no_sync,
of which the last backward averages gradients over ranks (`loss_division` says what they are divided by); unscale; check
for NaN/Inf, and set the next loss scale; clip; step the optimizer, then its schedule; accumulate metrics of the epoch.

Parameters change only after every collective of the step has succeeded; over NCCL the host does not wait for that.
Where it does not wait for the check either, the device itself skips an update whose gradients are bad.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from cyxtrain.data.batches.batch import Batch, Part, Share
from cyxtrain.data.batches.structure import map_tree
from cyxtrain.metrics.logged import LoggedNumbers
from cyxtrain.metrics.sums import Correct, MetricSums, correct_of
from cyxtrain.metrics.weighting import BatchLoss
from cyxtrain.optim.clipping import fill_gradients, make_clip, multiply_gradients
from cyxtrain.optim.optimizer_step import Closure, OptimizerStep
from cyxtrain.optim.optimizers import needs_closure
from cyxtrain.optim.precision import Number
from cyxtrain.parallel import (
    DistributedDataParallel,
    GatherCall,
    depending_on,
    gathering_alone,
    gathers_kept,
)
from cyxtrain.parallel.step_report import Report
from cyxtrain.progress.step_timer import StepTimer
from cyxtrain.training.inputs.checked_data import ModelSetup
from cyxtrain.training.model.snapshot import StepBuffers
from cyxtrain.training.state import TrainingState
from cyxtrain.training.step.loss_division import LossDivision, choose_division
from cyxtrain.training.step.nonfinite import FiniteGuard, Verdict
from cyxtrain.training.step.slice_scope import SliceScope
from cyxtrain.training.step.transaction import StepTransaction


class Result(NamedTuple):
    """Loss and correct predictions of a micro-batch, and (output, labels, rows) if metrics are measured."""

    loss: BatchLoss
    correct: Correct
    measured: tuple[Any, Any, int]
    row: int = 0  # in the sums of the epoch

    @property
    def rows(self) -> int:
        """The number of samples."""
        return self.measured[2]


class TrainingStep:
    """One update of the parameters per global batch; `totals` are the sums of the epoch.

    Args:
        ends_fit: Whether a step that is not finite ends the fit in good order, instead of raising.
        may_defer: Whether the verdict on a step may come with the next one: all ranks compute on accelerators.
    """

    _is_fit = True  # and not a loop of the user's own
    # Other ranks average in a backward, which refuses unused parameters: a rank without rows must refuse alike.
    _others_run_backward = True

    def __init__(
        self,
        ddp: DistributedDataParallel,
        state: TrainingState,
        setup: ModelSetup,
        logged: LoggedNumbers,
        *,
        ends_fit: bool = False,
        may_defer: bool = False,
    ) -> None:
        self._ddp = ddp
        self._loss = setup.loss
        self._setup = setup
        self._optimizer_steps = [OptimizerStep(each) for each in state.optimizers.values()]
        # the optimizer that evaluates the loss itself, such as LBFGS: the only one of its fit
        self._closure_optimizer = next(filter(needs_closure, state.optimizers.values()), None)
        self._rates = [*state.rates.values()]
        self._clip = make_clip(state.config, state.optimizers)
        self._logged = logged
        self._scale = state.loss_scale
        # Of losses before backward. With fp16 the loss scale over N, the number of slices: `divided` has multiplied by
        # N, which is thus left out until `finish`.
        self._multiplier = 1.0
        self._before_update = state.callbacks.before_optimizer_step
        self._world = ddp.world
        self._device = setup.placement.device
        self._parameters = list(ddp.parameters())
        defers = may_defer and not ends_fit and _needs_no_verdict(state)
        self._transaction = _transaction_of(ddp, state, logged, defers=defers)
        self.guard = FiniteGuard(
            ddp, state, self._device, self._transaction, ends_fit=ends_fit, defers_verdicts=defers, is_fit=self._is_fit
        )
        self._scope = SliceScope(ddp, state, logged, self._device)
        self._row = 0  # of the running slice, in the sums of the epoch
        self.totals = MetricSums(self._scope.rows, setup.loss, setup.metrics, self._scope.slices)
        self._items: Tensor | int | None = None  # what the model counts, such as tokens, in the step over all ranks
        self.clock = StepTimer(self._device, profiles=bool(state.config.profile))
        self._division = self._choose_division()

    def __call__(self, share: Share, signals: Sequence[float] = ()) -> None:
        """Zero; accumulate, of which the last micro-batch syncs; unscale; check, update the scale; clip; step.

        `signals`, each 0 or 1, are this rank's requests to stop, save or validate (`stopping.py`); they travel with the
        gradients.
        """
        self.begin(share, signals)
        results = self._accumulate(share)
        verdict = self.finish(share, results)
        if verdict is Verdict.SKIPPED:
            # The search for the cause, `_recompute_locally`, has left this rank's own gradients.
            self._start_over()
            return
        # An overflow of the loss scale counts too: only its gradients are wrong.
        for result in results:
            self.totals.add(result.row, result.loss, result.correct)
            self.totals.metrics.add(*result.measured, result.row)
            # There are names that the dry run did not know.
            if len(result.loss.parts) > len(self._loss.shown):
                self._logged.add_parts(result.loss.parts, self._loss.shown)

    def begin(self, share: Share, signals: Sequence[float] = ()) -> None:
        """Zero the gradients, and copy what a forward changes."""
        share.is_read_again = self._closure_optimizer is not None
        self._start_over()
        self._transaction.begin()
        if self._scale is not None:
            self._multiplier = self._scale.of_slice(self._ddp.slices.count)
        self._signals = signals
        self._sync = self._ddp.begin_sync(self._multiplier, signals)

    def accumulate_micro_batch(self, batch: Batch, share: Share, *, is_last: bool) -> Result:
        """Accumulate the gradients of a micro-batch; the last one ends its slice, and that of a step averages."""
        with contextlib.nullcontext() if is_last else self._ddp.no_sync():
            with self.clock.forward, gathers_kept() as gathers:
                result = self._forward(batch)
            self._accumulate_loss(result.loss, gathers, share, is_last=is_last)
        return result

    def join_without_rows(self, share: Share) -> None:
        """Take part in averaging a step's gradients without a row on this rank."""
        with self.clock.backward:
            self._ddp.share_buffers_once()
            self._join_backward(share)

    def _join_backward(self, share: Share) -> None:
        # A collective in some divisions: the other ranks wait for it.
        self._division.learn_divisors(self._loss.without_rows(), share)
        self._division.attach_weight(share, self._sync)
        self._ddp.average_accumulated(others_run_backward=self._others_run_backward)

    @property
    def received(self) -> Sequence[float]:
        """For each signal, a number above 0 if any rank gave it in this step.

        Where verdicts are deferred: in one of the steps whose reports were read since the last call.
        """
        return self._sync.received

    def finish(self, share: Share, results: Sequence[Result]) -> Verdict:
        """Unscale; check that gradients are finite, update the loss scale; clip; step optimizer and schedule.

        Gradients are divided first if the weight was unknown before backward and did not travel with them.
        On accelerators the verdict on a step may come with the next one, which raises (`FiniteGuard.defers_verdicts`).
        """
        self._division.complete(share, self._sync, self._parameters)
        with self.clock.optimizer:
            if self._multiplier != 1:
                multiply_gradients(self._parameters, 1.0 / self._multiplier)
            # There are none if no sample counts; the step is taken all the same.
            fill_gradients(self._parameters, self._ddp.module)
            self._ddp.show_averages()
            losses = [each.value for result in results for _, _, each in self._loss.components(result.loss)]
            # Bound now: a late verdict calls this when `latest` and `_items` are the next step's.
            recompute = partial(self._recompute_locally, share, self._division.latest, self._items)
            if self.guard.defers_verdicts:
                report = self.guard.report(share, losses, recompute)
                self._update_unless_bad(share, report)
                return Verdict.TAKEN  # as far as is known: if not, the next step raises
            verdict = self.guard.verdict(share, losses, recompute)
            if verdict is Verdict.TAKEN:
                self._update(share, self._optimizer_calls(share))
        return verdict

    def _update(self, share: Share, steps: Sequence[Callable[[], object]]) -> None:
        """Clip; step the optimizers by `steps`, then their schedules."""
        if self._before_update is not None:
            self._before_update(share.number)
        if self._clip is not None:
            norms = self._clip(self._parameters)
            self._logged.add_norms(norms, may_be_skipped=self.guard.defers_verdicts)
        for step in steps:
            step()
        for rates in self._rates:
            rates.step()

    def _update_unless_bad(self, share: Share, report: Report) -> None:
        """Let the device skip the update if its report is bad; where it cannot, wait for the report."""
        on_device = [step.unless(report.bad) for step in self._optimizer_steps]
        steps = [step for step in on_device if step is not None]
        if self._before_update is None and len(steps) == len(on_device):
            self._update(share, steps)
        elif report.is_good():
            self._update(share, self._optimizer_calls(share))

    def _optimizer_calls(self, share: Share) -> Sequence[Callable[[], object]]:
        """Return the calls that step the optimizers, for a host that knows that the gradients are finite."""
        optimizer = self._closure_optimizer
        if optimizer is None:
            return self._optimizer_steps
        closure = Closure(optimizer, partial(self._evaluate, share), self._averaged_loss())
        return [partial(optimizer.step, closure)]

    def _evaluate(self, share: Share) -> Tensor:
        """Return the loss of a share over all ranks, and set the gradients, once more."""
        # A line search may leave the finite: that is no error, and nothing checks it.
        self._start_over()
        self._sync = self._ddp.begin_sync(self._multiplier, self._signals)
        with self._logged.repeating():
            self._accumulate(share)
            self._division.complete(share, self._sync, self._parameters)
        return self._averaged_loss()

    def _averaged_loss(self) -> Tensor:
        """Return the loss that the gradients belong to, averaged over ranks, 0-dim, float64. All ranks call it."""
        own = self._sync.loss
        return self._division.mean_of_ranks(0.0 if own is None else own)

    def _start_over(self) -> None:
        """Zero the gradients, and begin to count the weight anew."""
        self._division.begin()
        # Also those that the optimizer does not have, or they would add up.
        for parameter in self._parameters:
            parameter.grad = None

    def _accumulate(self, share: Share) -> list[Result]:
        """Compute the averaged gradients of the global batch; return the result of each micro-batch of this rank."""
        results: list[Result] = []
        self._items = self._division.before_forward(share)
        self._scope.begin_step()
        with self._scope.of_slices():
            for part in share.parts:
                self._scope.enter(part)
                results += self._accumulate_slice(part, share)
        self._scope.end_step(share)
        self.clock.communicated(self.clock.backward, self._ddp.seconds_communicated())
        return results

    def _accumulate_slice(self, part: Part, share: Share) -> list[Result]:
        """Accumulate the gradients of a slice; this rank's last one averages the sum over all."""
        results: list[Result] = []
        self._row = self._scope.row_of(part)
        self._division.begin_slice(part.number)
        if not part.batches:
            self.join_without_rows(share)
        for batch in self.clock.data.each(share.batches(part.batches)):
            batch.items = self._items
            ends_slice = len(results) == len(part.batches) - 1
            results.append(self.accumulate_micro_batch(batch, share, is_last=ends_slice))
            share.prefetch_next(self.clock.data)
        self._scope.end_slice(part, sum(result.rows for result in results))
        return results

    def _recompute_locally(self, share: Share, divisors: Sequence[Number], items: Tensor | int | None) -> list[Tensor]:
        """Compute this rank's gradients of a share without averaging them; return its losses.

        Losses are divided as in the step: gradients of 16 bits would overflow elsewhere otherwise.
        """
        self._start_over()
        losses = []
        # Where ranks have different numbers of micro-batches, SyncBatchNorm must not wait for the others.
        without_rows = self._setup.without_rows
        apart = contextlib.nullcontext() if without_rows is None else without_rows.using_running_statistics(self._ddp)
        with apart, gathering_alone(), self._logged.repeating(), self._scope.of_slices():
            for part in share.parts:
                self._scope.enter(part)
                losses += self._losses_of(part, share, divisors, items)
        return losses

    def _losses_of(
        self, part: Part, share: Share, divisors: Sequence[Number], items: Tensor | int | None
    ) -> list[Tensor]:
        """Run a slice again, forward and backward; return its losses."""
        losses = []
        for batch in share.batches(part.batches):
            batch.items = items
            loss = self._forward(batch).loss
            losses += [each.value.detach() for _, _, each in self._loss.components(loss)]
            value = self._division.divided(loss, divisors)
            if value.requires_grad:
                self._run_backward(self._times_loss_scale(value))
        return losses

    def _forward(self, batch: Batch) -> Result:
        self._ddp.expect_rows(batch.rows)
        self._logged.rows = batch.rows
        output = self._setup.call(self._ddp.forward, batch)
        loss = self._loss_of(output, batch)
        output = self._loss.measured_part(output)
        measured: tuple[Any, Any, int] = (None, None, batch.rows)
        if self.totals.metrics:
            # Detached: several micro-batches together would keep their graphs.
            measured = map_tree(Tensor.detach, output), batch.labels, batch.rows
        return Result(loss, correct_of(output, batch.labels, self._loss), measured, self._row)

    def _loss_of(self, output: Any, batch: Batch) -> BatchLoss:
        return self._loss(output, batch)

    def _choose_division(self) -> LossDivision:
        return choose_division(self._ddp, self._setup, self.clock, self._logged, self._transaction, self._scope)

    def _accumulate_loss(self, loss: BatchLoss, gathers: Sequence[GatherCall], share: Share, *, is_last: bool) -> None:
        """Run the backward of a micro-batch's loss; the last one of a slice adds up or averages its gradients."""
        with self.clock.backward:
            divisors = self._division.learn_divisors(loss, share)
            if is_last:
                self._division.attach_weight(share, self._sync)
            value = self._scaled_loss(loss, divisors)
            # Without a graph, backward would not reach the gathers, in whose backward other ranks wait.
            if gathers and all(each.value.is_leaf for _, _, each in self._loss.components(loss)):
                value = depending_on(value, gathers)
            ended = self._sync.slices_ended
            if value.requires_grad:
                self._run_backward(value)
            if is_last and self._sync.slices_ended == ended:
                # No gradient came: the loss is a constant, such as 0 if there is no pair of rows.
                self._ddp.average_accumulated(others_run_backward=self._others_run_backward)

    def _run_backward(self, value: Tensor) -> None:
        value.backward()

    def _scaled_loss(self, loss: BatchLoss, divisors: Sequence[Number]) -> Tensor:
        """Return what to call `backward` on, scaled, and let the sync watch the loss for NaN and infinity."""
        value = self._division.divided(loss, divisors)
        self._sync.watch(self._division.watched(value, loss).to(self._device))
        return self._times_loss_scale(value)

    def _times_loss_scale(self, loss: Tensor) -> Tensor:
        return loss if self._multiplier == 1 else loss * self._multiplier


def _needs_no_verdict(state: TrainingState) -> bool:
    """Return whether a step can begin without the verdict on the one before."""
    skips = state.config.on_nonfinite == "skip"
    has_dynamic_scale = state.loss_scale is not None and state.loss_scale.is_dynamic
    return not skips and not has_dynamic_scale


def _transaction_of(
    ddp: DistributedDataParallel, state: TrainingState, logged: LoggedNumbers, *, defers: bool
) -> StepTransaction:
    """Return what a step changes besides parameters, and takes back if it is not taken."""
    if not defers:
        return StepTransaction(StepBuffers(ddp, depth=1), [logged])
    # When the verdict comes late, position and rates have moved on, and the next step has changed buffers. A bad step
    # ends the fit then, so that what it has logged is of no use.
    return StepTransaction(StepBuffers(ddp, depth=2), [state.position, *state.rates.values()])
