"""One training step.

The order of a training step: zero the gradients; accumulate the forward and backward of each micro-batch under no_sync,
of which the last backward averages gradients over ranks, or over the weight of all ranks; unscale; check for NaN/Inf,
and set the next loss scale; clip; step the optimizer, then its schedule; accumulate metrics of the epoch.

Parameters change only after every collective of the step has succeeded; over NCCL the host does not wait for that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cyxtrain.config.settings import require
from cyxtrain.data.batches.batch import Batch, Share
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
    backward_alike,
    depending_on,
    gather_no_rows,
    gathering_alone,
    gathers_kept,
)
from cyxtrain.progress.step_timer import StepTimer
from cyxtrain.training.inputs.checked_data import ModelSetup
from cyxtrain.training.model.snapshot import StepBuffers
from cyxtrain.training.state import TrainingState
from cyxtrain.training.step.loss_division import Divisors, LossDivision
from cyxtrain.training.step.nonfinite import FiniteGuard, Verdict
from cyxtrain.training.step.transaction import Participant, StepTransaction
from cyxtrain.training.step.updates import Updates


class Result(NamedTuple):
    """Loss and correct predictions of a micro-batch, and (output, targets, rows) if metrics are measured."""

    loss: BatchLoss
    correct: Correct
    measured: tuple[Any, Any, int]


class TrainingStep:
    """One update of the parameters per global batch; `totals` are the sums of the epoch.

    `ends_fit` and `is_fit`: as `FiniteGuard`; `may_defer`: whether all ranks compute on accelerators, and the wrapper
    uses reports.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        state: TrainingState,
        setup: ModelSetup,
        logged: LoggedNumbers,
        updates: Updates | None = None,
        *,
        ends_fit: bool = False,
        may_defer: bool = False,
        is_fit: bool = True,
    ) -> None:
        self._ddp = ddp
        self._loss = setup.loss
        self._setup = setup
        self._own_updates = updates
        self._steps = [OptimizerStep(each) for each in state.optimizers.values()]
        self._with_closure = [each for each in state.optimizers.values() if needs_closure(each)]
        self._rates = [*state.rates.values()]
        self._clip = make_clip(state.config, state.optimizers)
        self._logged = logged
        self._scale, self._multiplier = state.loss_scale, 1.0
        self._before_update = state.callbacks.before_optimizer_step
        self._world = ddp.world
        self._device = setup.placement.device
        self._parameters = list(ddp.parameters())
        defers = may_defer and not (ends_fit or state.config.on_nonfinite == "skip")
        defers = defers and not (self._scale is not None and self._scale.is_dynamic)
        # A step whose verdict comes late and is bad ends the fit: what it has logged is of no use.
        others: list[Participant] = [state.position, *self._rates] if defers else [logged]
        self._transaction = StepTransaction(StepBuffers(ddp, depth=1 + defers), others)
        self.guard = FiniteGuard(
            ddp, state, self._device, self._transaction, ends_fit=ends_fit, defers_verdicts=defers, is_fit=is_fit
        )
        self.totals = MetricSums(1, setup.loss, setup.metrics)
        self.clock = StepTimer(self._device, profiles=bool(state.config.profile))
        self._division = LossDivision(ddp, setup, logged, self._transaction, self.clock)

    def __call__(self, share: Share) -> None:
        """Zero; accumulate, of which the last micro-batch syncs; unscale; check, update the scale; clip; step."""
        self.begin()
        if self._own_updates is not None:
            self._own_updates.begin(share, self.guard, self._transaction, self._multiplier)
        results = self._accumulate(share)
        if self.finish(share, results) is Verdict.SKIPPED:
            self._zero()  # they are this rank's own, of the search for the cause
            return
        for result in results:
            self.totals.add(0, result.loss, result.correct)
            self.totals.metrics.add(*result.measured)
            if len(result.loss.parts) > len(self._loss.shown):
                self._logged.add_parts(result.loss.parts, self._loss.shown)

    def begin(self) -> None:
        """Zero the gradients, and copy what a forward changes."""
        self._zero()
        self._transaction.begin()
        if self._scale is not None:
            self._multiplier = self._scale.of_each(self._world.size)
            self._ddp.expect_scale(self._multiplier)

    def accumulate_micro_batch(self, batch: Batch, share: Share, divisors: Divisors = None, *, is_last: bool) -> Result:
        """Accumulate the gradients of a micro-batch; the last one of a step averages the sum over ranks.

        `divisors`: what the sum of all ranks' terms of each loss is divided by; None: computed from this micro-batch.
        """
        with contextlib.nullcontext() if is_last else self._ddp.no_sync():
            with self.clock.forward, gathers_kept() as gathers:
                if self._own_updates is None:
                    result = self._forward(batch)
                else:
                    result = self._own_updates.run(partial(self._forward, batch), batch.rows, is_last=is_last)
            if self._has_updated:
                return result
            with self.clock.backward:
                known = self._division.of_loss(result.loss, share, divisors)
                if is_last:
                    self._division.send(share)
                self._backward(result.loss, known, gathers, is_last=is_last)
        return result

    def join_without_rows(self, share: Share, divisors: Divisors = None) -> None:
        """Take part in averaging a step's gradients without a row on this rank."""
        with self.clock.backward:
            self._ddp.forward_without_batch()
            if self._own_updates is not None:
                self._own_updates.follow()
            if self._has_updated:
                return
            self._division.of_loss(self._loss.without_rows(), share, divisors)
            self._division.send(share)
            self._ddp.backward_without_batch()

    @property
    def _has_updated(self) -> bool:
        """Whether a step of the user's own has updated parameters itself."""
        return self._own_updates is not None and self._own_updates.has_updated

    def finish(self, share: Share, results: Sequence[Result]) -> Verdict:
        """Unscale; check that gradients are finite, update the loss scale; clip; step the optimizer and the schedule.

        On accelerators the verdict on a step may come with the next one, which raises (`FiniteGuard.defers_verdicts`).
        """
        if self._own_updates is not None and self._own_updates.has_updated:
            self.clock.communicated(self.clock.forward, self._own_updates.seconds_communicated())
            for norms in self._own_updates.norms:
                self._logged.add_norms(norms, may_be_skipped=False)
            return self._own_updates.finish()
        self._division.complete(share, self._parameters)
        with self.clock.optimizer:
            if self._multiplier != 1:
                multiply_gradients(self._parameters, 1.0 / self._multiplier)
            fill_gradients(self._parameters, self._ddp.module)
            verdict, steps = self._decide(share, results)
            if steps:
                if self._before_update is not None:
                    self._before_update(share.number)
                if self._clip is not None:
                    norms = self._clip(self._parameters)
                    self._logged.add_norms(norms, may_be_skipped=self.guard.defers_verdicts)
                for step in steps:
                    step()
                for rates in self._rates:
                    rates.step()
        return verdict

    def _decide(self, share: Share, results: Sequence[Result]) -> tuple[Verdict, Sequence[Callable[[], object]]]:
        """Return the verdict, and the functions that step the optimizers, if they are to step."""
        losses = [each.value for result in results for _, _, each in self._loss.components(result.loss)]
        recompute = partial(self._recompute_locally, share)
        if not self.guard.defers_verdicts:
            verdict = self.guard.verdict(share, losses, recompute)
            return verdict, self._optimizer_steps(share) if verdict is Verdict.TAKEN else ()
        report = self.guard.report(share, losses, recompute)
        late = [step.unless(report.bad) for step in self._steps]
        on_device = [step for step in late if step is not None]
        if self._before_update is None and len(on_device) == len(late):
            return Verdict.TAKEN, on_device
        return Verdict.TAKEN, self._optimizer_steps(share) if report.is_good() else ()  # this call blocks

    def _optimizer_steps(self, share: Share) -> Sequence[Callable[[], object]]:
        """Return what steps the optimizers once the host knows that the gradients are finite."""
        if not self._with_closure:
            return self._steps
        (optimizer,) = self._with_closure
        loss = self._averaged_loss()
        return [partial(optimizer.step, Closure(optimizer, partial(self._evaluate, share), loss))]

    def _evaluate(self, share: Share) -> Tensor:
        """Return the loss of a share over all ranks, and set the gradients, once more."""
        self._zero()
        with self._logged.repeating():
            self._accumulate(share)
            self._division.complete(share, self._parameters)
        self._ddp.is_finite()  # a line search may leave the finite
        return self._averaged_loss()

    def _averaged_loss(self) -> Tensor:
        """Return the loss over all ranks of which the gradients are, 0-dim, float64."""
        own = self._ddp.checked_loss
        return self._division.mean_of_ranks(0.0 if own is None else own)

    def _zero(self) -> None:
        self._division.begin()
        for parameter in self._parameters:  # also those that the optimizer does not have, or they would add up
            parameter.grad = None

    def _accumulate(self, share: Share) -> list[Result]:
        """Compute the averaged gradients of the global batch; return the result of each micro-batch of this rank."""
        results: list[Result] = []
        if self._loss.gathers or self._setup.without_rows is not None:
            counts = torch.tensor([len(share), -len(share)], device="cpu")
            self._world.reduce(counts, dist.ReduceOp.MAX)
            most, least = int(counts[0]), -int(counts[1])
            require(
                most == least or not self._setup.call.optimizes,
                f"step {share.number + 1} has no rows for some rank, and its train_step needs those of all ranks at "
                "once (SyncBatchNorm or gathered rows) and calls optimize: set drop_last=True.",
            )
            if most != least:
                return self._accumulate_unevenly(share, most)
        items, divisors = self._division.before_forward(share)
        if share.rows == 0:
            self.join_without_rows(share, divisors)
        for batch in self.clock.data.each(share):
            batch.items = items
            results.append(self.accumulate_micro_batch(batch, share, divisors, is_last=len(results) == len(share) - 1))
            share.prefetch_next(self.clock.data)
        self.clock.communicated(self.clock.backward, self._ddp.seconds_communicated())
        return results

    def _accumulate_unevenly(self, share: Share, max_micro_batches: int) -> list[Result]:
        """As `_accumulate`, if ranks have different numbers of micro-batches and all must run equally many.

        The loss gathers rows, or a layer such as SyncBatchNorm needs all ranks in each forward and backward. Gradients
        are averaged when all backwards are complete.
        """
        results: list[Result] = []
        items, divisors = self._division.before_forward(share, max_micro_batches)
        self._ddp.forward_without_batch()
        with self._ddp.no_sync():
            batches = iter(share)
            for _ in range(max_micro_batches):
                batch = next(batches, None)
                value: Tensor | None = None
                with gathers_kept() as gathers:
                    if batch is not None:
                        batch.items = items
                        results.append(self._forward(batch))
                    elif self._setup.without_rows is not None:
                        self._ddp.expect_rows(0)
                        with self._logged.repeating():
                            value = self._setup.without_rows(self._ddp.forward)
                    else:
                        gather_no_rows(self._world, self._loss.gathers, self._device)
                loss = self._loss.without_rows() if batch is None else results[-1].loss
                known = self._division.of_loss(loss, share, divisors)
                backward_alike(self._world, value if batch is None else self._scaled_loss(loss, known), gathers)
                share.prefetch_next(self.clock.data)
        self._division.send(share)
        self._ddp.backward_without_batch()
        self.clock.communicated(self.clock.backward, self._ddp.seconds_communicated())
        return results

    def _recompute_locally(self, share: Share) -> list[Tensor]:
        """Compute this rank's gradients of a share without averaging them; return its losses."""
        self._zero()
        losses = []
        without_rows = self._setup.without_rows
        apart = contextlib.nullcontext() if without_rows is None else without_rows.using_running_statistics(self._ddp)
        with apart, gathering_alone(), self._logged.repeating():
            for batch in share:
                loss = self._forward(batch).loss
                losses += [each.value.detach() for _, _, each in self._loss.components(loss)]
                # Divided as in the step: gradients of 16 bits would overflow elsewhere otherwise.
                value = self._division.divided(loss, self._division.latest)
                if value.requires_grad:
                    self._times_loss_scale(value).backward()
        return losses

    def _forward(self, batch: Batch) -> Result:
        self._ddp.expect_rows(batch.rows)
        self._logged.rows = batch.rows
        output = self._setup.call(self._ddp.forward, batch)
        if self._setup.num_micro_batches is None:
            self._loss.check_shapes(output, batch.targets)  # there was no dry run
        loss = self._loss(output, batch)
        if self._setup.num_micro_batches is None:
            self._division.choose()
            require(
                len({*self._division.kinds}) == 1 and not (self._loss.weightings and self._loss.has_weights),
                "DistributedAMPTrainer does not know what several losses count before a step is complete, unless all "
                "are means over samples, or sums: use fit, or return one loss as (sum, weight).",
            )
        # Detached: several micro-batches together would keep their graphs.
        output, measures = self._loss.measured_part(output), bool(self.totals.metrics)
        measured = (map_tree(Tensor.detach, output), batch.labels, batch.rows) if measures else (None, None, 0)
        return Result(loss, correct_of(output, batch.labels, self._loss), measured)

    def _backward(
        self, loss: BatchLoss, divisors: Sequence[Number], gathers: Sequence[GatherCall], *, is_last: bool
    ) -> None:
        value = self._scaled_loss(loss, divisors)
        if gathers and all(each.value.is_leaf for _, _, each in self._loss.components(loss)):
            value = depending_on(value, gathers)
        has_parts = self._own_updates is not None and bool(self._own_updates.parts)
        if value.requires_grad:
            with self._own_updates.suspended() if self._own_updates is not None else contextlib.nullcontext():
                value.backward()
        if not is_last:
            self._ddp.skip_backward()
        elif has_parts or self._ddp.awaits_backward:  # the loss is a constant, such as 0 if there is no pair of rows
            self._ddp.backward_without_batch()

    def _scaled_loss(self, loss: BatchLoss, divisors: Sequence[Number]) -> Tensor:
        """Return what to call `backward` on, scaled."""
        value = self._division.divided(loss, divisors)
        self._ddp.watch(self._division.watched(value, loss).to(self._device))
        return self._times_loss_scale(value)

    def _times_loss_scale(self, loss: Tensor) -> Tensor:
        return loss if self._multiplier == 1 else loss * self._multiplier
