"""One training step.

The order of a training step: zero the gradients; accumulate the forward and backward of each micro-batch under no_sync,
of which the last backward averages gradients over ranks; unscale; check for NaN/Inf, and set the next loss scale; clip;
step the optimizer, then its schedule; accumulate metrics of the epoch.

Parameters change only after every collective of the step has succeeded; over NCCL the host does not wait for that.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cyxtrain.config.settings import require
from cyxtrain.data.batches.batch import Batch, Share
from cyxtrain.data.batches.structure import map_tree
from cyxtrain.data.rng import generators_kept
from cyxtrain.environment.accelerator import is_accelerator
from cyxtrain.metrics.logged import LoggedNumbers
from cyxtrain.metrics.sums import Correct, MetricSums, correct_of
from cyxtrain.metrics.weighting import BatchLoss, Weighting
from cyxtrain.optim.clipping import fill_gradients, make_clip, multiply_gradients
from cyxtrain.optim.optimizer_step import Closure, OptimizerStep
from cyxtrain.optim.optimizers import needs_closure
from cyxtrain.optim.precision import Number, as_double, quotient, times
from cyxtrain.parallel import (
    DistributedDataParallel,
    GatherCall,
    backward_alike,
    depending_on,
    gather_no_rows,
    gathering_alone,
    gathers_kept,
)
from cyxtrain.progress.step_timer import Part, StepTimer
from cyxtrain.training.inputs.checked_data import ModelSetup
from cyxtrain.training.model.snapshot import StepBuffers
from cyxtrain.training.state import TrainingState
from cyxtrain.training.step.nonfinite import FiniteGuard, Verdict
from cyxtrain.training.step.transaction import Participant, StepTransaction
from cyxtrain.training.step.updates import Updates

Divisors = Sequence[Number] | None


class Result(NamedTuple):
    """Loss and correct predictions of a micro-batch, and (output, targets, rows) if metrics are measured."""

    loss: BatchLoss
    answers: Correct
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
        self._is_accelerator = is_accelerator(self._device)
        self._device_of_sums = self._world.device_of_sums(self._device)
        self._parameters = list(ddp.parameters())
        self._weight: Number = 0.0  # of this rank's terms in the running step, if the data decide it
        self._factor: Number = 1.0  # of the gradients after backward
        self._choose_weighting()
        defers = may_defer and not (ends_fit or state.config.on_nonfinite == "skip")
        defers = defers and not (self._scale is not None and self._scale.is_dynamic)
        follows: list[Participant] = [state.position, *self._rates] if defers else []
        self._transaction = StepTransaction(StepBuffers(ddp, depth=1 + defers), [logged, *follows])
        self.guard = FiniteGuard(
            ddp, state, self._device, self._transaction, ends_fit=ends_fit, defers_verdicts=defers, is_fit=is_fit
        )
        self.totals = MetricSums(1, setup.loss, setup.metrics)
        self.clock = StepTimer(self._device, profiles=bool(state.config.profile))

    def _choose_weighting(self) -> None:
        """Choose when gradients are divided by the weight of all ranks, if the data decide how much counts.

        That of one loss travels with the gradients, which are divided when they are there. Several losses have a weight
        each, by which they are divided before backward adds them up: it needs a message, and with several micro-batches
        a forward that counts.
        """
        loss, num = self._loss, self._setup.num_micro_batches
        self._counts_before_forward = num is not None and num > 1 and loss.counts_terms and bool(loss.weightings)
        if num is None:
            self._divides_after = loss.weighting is not Weighting.NOTHING
        else:
            is_counted = loss.counts_terms and not loss.weightings and not loss.uses_num_items
            # The weight of several micro-batches together is known when all have run.
            self._divides_after = is_counted and (num > 1 or self._ddp.carries_weights)
        self._kinds = [kind for _, kind, _ in loss.terms(loss.without_rows())]
        self._all_reduces_weights = loss.counts_terms and not self._divides_after

    def __call__(self, share: Share) -> None:
        """Zero; accumulate, of which the last micro-batch syncs; unscale; check, update the scale; clip; step."""
        self.begin()
        if self._own_updates is not None:
            self._own_updates.begin(share, self.guard, self._transaction, self._multiplier)
        results = self._accumulate(share)
        if self.finish(share, results) is Verdict.SKIPPED:
            return
        for result in results:
            self.totals.add(0, result.loss, result.answers)
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
            with self.clock.forward, gathers_kept() as kept:
                if self._own_updates is None:
                    result = self._forward(batch)
                else:
                    result = self._own_updates.run(partial(self._forward, batch), batch.rows, is_last=is_last)
            if self._has_updated:
                return result
            with self.clock.backward:
                known = self._divisors_of(result.loss, share, divisors)
                self._weight += result.loss.weight
                if is_last:
                    self._send_weight(share)
                self._backward(result.loss, known, kept, is_last=is_last)
        return result

    def join_without_rows(self, share: Share, divisors: Divisors = None) -> None:
        """Take part in averaging a step's gradients without a row on this rank."""
        with self.clock.backward:
            self._ddp.forward_without_batch()
            if self._own_updates is not None:
                self._own_updates.follow()
            if self._has_updated:
                return
            self._divisors_of(self._loss.without_rows(), share, divisors)
            self._send_weight(share)
            self._ddp.backward_without_batch()

    @property
    def _has_updated(self) -> bool:
        """Whether a step of the user's own has updated parameters itself."""
        return self._own_updates is not None and self._own_updates.made

    def finish(self, share: Share, results: Sequence[Result]) -> Verdict:
        """Unscale; check that gradients are finite, update the loss scale; clip; step the optimizer and the schedule.

        On accelerators the verdict on a step may come with the next one, which raises (`FiniteGuard.defers_verdicts`).
        """
        if self._own_updates is not None and self._own_updates.made:
            self.clock.communicated(self.clock.forward, self._own_updates.seconds_communicated())
            for norms in self._own_updates.norms:
                self._logged.add_norms(norms, may_be_skipped=False)
            return self._own_updates.finish()
        self._divide_by_weight(share)
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
        losses = [each.value for result in results for _, _, each in self._loss.terms(result.loss)]
        recompute = partial(self._recompute_locally, share)
        if not self.guard.defers_verdicts:
            verdict = self.guard.verdict(share, losses, recompute)
            return verdict, self._updates(share) if verdict is Verdict.TAKEN else ()
        report = self.guard.report(share, losses, recompute)
        late = [step.unless(report.bad) for step in self._steps] if self._before_update is None else [None]
        if None not in late:
            return Verdict.TAKEN, [step for step in late if step is not None]
        return Verdict.TAKEN, self._updates(share) if report.is_good() else ()  # this call blocks

    def _updates(self, share: Share) -> Sequence[Callable[[], object]]:
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
            self._divide_by_weight(share)
        self._ddp.is_finite()  # a line search may leave the finite
        return self._averaged_loss()

    def _averaged_loss(self) -> Tensor:
        """Return the loss over all ranks of which the gradients are, 0-dim, float64."""
        own = self._ddp.checked_loss
        (total,) = self._sum_over_ranks([0.0 if own is None else own], self.clock.backward)
        return (
            torch.as_tensor(total, dtype=torch.float64, device=self._device_of_sums) * self._factor / self._world.size
        )

    def _zero(self) -> None:
        self._weight = 0.0
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
        items, divisors = self._precompute_divisors(share)
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
        items, divisors = self._precompute_divisors(share, max_micro_batches)
        self._ddp.forward_without_batch()
        with self._ddp.no_sync():
            batches = iter(share)
            for _ in range(max_micro_batches):
                batch = next(batches, None)
                value: Tensor | None = None
                with gathers_kept() as kept:
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
                known = self._divisors_of(loss, share, divisors)
                self._weight += loss.weight
                backward_alike(self._world, value if batch is None else self._scaled_loss(loss, known), kept)
                share.prefetch_next(self.clock.data)
        self._send_weight(share)
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
                terms = [each for _, _, each in self._loss.terms(self._forward(batch).loss)]
                for loss in terms:
                    if loss.value.requires_grad:
                        self._times_loss_scale(loss.value).backward(retain_graph=loss is not terms[-1])
                    losses.append(loss.value.detach())
        return losses

    def _forward(self, batch: Batch) -> Result:
        self._ddp.expect_rows(batch.rows)
        self._logged.rows = batch.rows
        output = self._setup.call(self._ddp.forward, batch)
        if self._setup.num_micro_batches is None:
            self._loss.check_shapes(output, batch.targets)  # there was no dry run
        loss = self._loss(output, batch)
        if self._setup.num_micro_batches is None:
            self._choose_weighting()
            require(
                not (self._loss.weightings and self._loss.counts_terms),
                "DistributedAMPTrainer does not know what several losses count before a step is complete: use fit, or "
                "return one loss as (sum, weight).",
            )
        # Detached: several micro-batches together would keep their graphs.
        output, measures = self._loss.measured_part(output), bool(self.totals.metrics)
        measured = (map_tree(Tensor.detach, output), batch.answers, batch.rows) if measures else (None, None, 0)
        return Result(loss, correct_of(output, batch.answers, self._loss), measured)

    def _backward(
        self, loss: BatchLoss, divisors: Sequence[Number], kept: Sequence[GatherCall], *, is_last: bool
    ) -> None:
        value = self._scaled_loss(loss, divisors)
        if kept and all(each.value.is_leaf for _, _, each in self._loss.terms(loss)):
            value = depending_on(value, kept)
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
        value: Tensor | None = None
        for number, (factor, _, each) in enumerate(self._loss.terms(loss)):
            # Averaging divides by N, so multiply by N x this rank's fraction; exactly 1 for even batches.
            term = times(each.value, quotient(factor * each.terms * self._world.size, divisors[number]))
            value = term if value is None else value + term
        assert value is not None
        self._ddp.watch(value.to(self._device))
        return self._times_loss_scale(value)

    def _times_loss_scale(self, loss: Tensor) -> Tensor:
        return loss if self._multiplier == 1 else loss * self._multiplier

    def _divisors_of(self, loss: BatchLoss, share: Share, known: Divisors) -> Sequence[Number]:
        """Return the divisor of each loss, for the sum of all ranks' terms, in this backward."""
        if known is not None:
            return known
        terms = self._loss.terms(loss) if self._all_reduces_weights else ()
        return self._divisors([each.weight for _, _, each in terms], share)

    def _divisors(self, weights: Sequence[Number], share: Share) -> list[Number]:
        """Return the divisor of each loss, the same on every rank; `weights`: this rank's, if they are all_reduced."""
        if self._divides_after:
            return [self._unit(share)]
        divisors: list[Number] = [1.0 if kind is Weighting.NOTHING else share.global_rows for kind in self._kinds]
        if self._all_reduces_weights:
            places = [place for place, kind in enumerate(self._kinds) if kind is Weighting.TERMS]
            totals = self._sum_over_ranks([weights[place] for place in places], self.clock.backward)
            for place, weight in zip(places, totals, strict=True):
                divisors[place] = weight
        return divisors

    def _precompute_divisors(self, share: Share, max_micro_batches: int = 0) -> tuple[Tensor | int | None, Divisors]:
        """Return (items, divisors) if the first forward of a step needs them; other arguments as `_count_weights`."""
        items: Tensor | int | None = None
        divisors: Divisors = None
        if self._loss.items is not None:
            count = sum(map(self._loss.items.count, share))
            (total,) = self._sum_over_ranks([count], self.clock.forward)
            items = total.long().clamp_(min=1) if isinstance(total, Tensor) else max(int(total), 1)
            divisors = [total] if self._loss.uses_num_items else None
        elif self._counts_before_forward:
            divisors = self._divisors(self._count_weights(share, max_micro_batches), share)
        return items, divisors

    def _count_weights(self, share: Share, max_micro_batches: int) -> list[Number]:
        """Return this rank's weight of each loss in a share, by a forward of each micro-batch without gradients.

        Each of several losses has its own weight, which must be known before the first backward. Every rank runs
        `max_micro_batches` forwards, on no rows if it has fewer micro-batches.
        """
        weights: list[Number] = [0.0] * len(self._kinds)
        with torch.no_grad(), generators_kept(self._device), gathering_alone(), self._logged.repeating():
            for batch in share:
                loss = self._loss(self._setup.call(self._ddp.forward, batch), batch)
                for number, (_, _, each) in enumerate(self._loss.terms(loss)):
                    weight = each.weight
                    stays = self._is_accelerator and isinstance(weight, Tensor)
                    weights[number] += as_double(weight, self._device)[0] if stays else float(weight)
            for _ in range(max_micro_batches - len(share)):
                if self._setup.without_rows is not None:
                    self._setup.without_rows.forward(self._ddp.forward)
        self._transaction.put_back_buffers()
        return weights

    def _unit(self, share: Share) -> float:
        """Return what a loss is divided by before backward if its weight is known only then: a power of two near it.

        All ranks know it without a message, and nothing is rounded; it keeps the gradients of 16 bits in range.
        """
        return 2.0 ** round(math.log2(share.global_rows * self._loss.weight_per_row))

    def _send_weight(self, share: Share) -> None:
        """Send this rank's weight with the next gradients, which are divided by that of all ranks."""
        if self._divides_after and self._ddp.carries_weights:
            self._ddp.divide_by(self._weight, self._unit(share))

    def _divide_by_weight(self, share: Share) -> None:
        """Divide gradients by the weight of all ranks, unless that was done when they were exchanged."""
        if not self._divides_after:
            return
        if self._ddp.carries_weights:
            self._factor = self._ddp.factor
            return
        with self.clock.backward:
            (total,) = self._sum_over_ranks([self._weight], self.clock.backward)
        self._factor = quotient(self._unit(share), total)
        multiply_gradients(self._parameters, self._factor)

    def _sum_over_ranks(self, weights: Sequence[Number], within: Part) -> list[Number]:
        """Return sums over ranks in float64; on an accelerator they stay there, so that the host need not wait."""
        stays = self._device_of_sums.type != "cpu"
        if stays and self._world.size == 1 and not any(isinstance(each, Tensor) for each in weights):
            return list(weights)
        totals = torch.cat([as_double(each, self._device_of_sums) for each in weights])
        if self._world.size > 1 or not stays:
            began = time.perf_counter()
            self._world.reduce(totals)
            self.clock.communicated(within, time.perf_counter() - began)
        return [*totals.unbind()] if stays else totals.tolist()
