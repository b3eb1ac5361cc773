"""What happens with one batch.

The order of a training step: zero the gradients; accumulate under no_sync, with the model's forward and backward of
each micro-batch; the last micro-batch syncs (averages gradients over ranks); unscale; finite?; clip; step the optimizer
and the schedule; update the loss scale; add to the sums of the epoch.

Parameters change only after every collective of the step has succeeded; over NCCL the host does not wait for that.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cyxtrain.config.settings import require
from cyxtrain.data.batches.batch import Batch, Share
from cyxtrain.data.batches.structure import map_output
from cyxtrain.data.rng import generators_kept
from cyxtrain.environment.accelerator import is_accelerator
from cyxtrain.metrics.sums import Correct, MetricSums, correct_of
from cyxtrain.metrics.weighting import BatchLoss, Weighting
from cyxtrain.optim.clipping import make_clip, multiply_gradients
from cyxtrain.optim.optimizer_step import OptimizerStep
from cyxtrain.parallel import DistributedDataParallel, backward_alike, gather_nothing, gathering_alone, gathers_kept
from cyxtrain.progress.step_timer import Part, StepTimer
from cyxtrain.training.inputs.plan import ModelSetup
from cyxtrain.training.nonfinite import FiniteGuard, Verdict
from cyxtrain.training.state import TrainingState
from cyxtrain.world import runtime

Number = Tensor | float


class Result(NamedTuple):
    """What a micro-batch gave: its loss, its right answers, and (output, targets, rows) if metrics are measured."""

    loss: BatchLoss
    answers: Correct
    measured: tuple[Any, Any, int]


class TrainingStep:
    """One update of the parameters per joined batch.

    Args:
        ddp: The model.
        state: Of the training; the step changes its optimizer, rates and loss scale.
        setup: How batches reach the model, and what is computed of its output.
        guard: Decides whether a step is taken.

    Attributes:
        totals: Sums of the epoch.
        clock: What the parts of its steps took.
    """

    def __init__(
        self, ddp: DistributedDataParallel, state: TrainingState, setup: ModelSetup, guard: FiniteGuard
    ) -> None:
        self._ddp = ddp
        self._loss = setup.loss
        self._setup = setup
        self.guard = guard
        self._step_optimizer = OptimizerStep(state.optimizer)
        self._rates = state.rates
        self._clip = make_clip(state.config)
        self._scale, self._multiplier = state.loss_scale, 1.0
        self._before_update = state.callbacks.before_optimizer_step
        self._world_size = dist.get_world_size()
        self._device = setup.placement.device
        self._is_accelerator = is_accelerator(self._device)
        self._parameters = list(ddp.parameters())
        self._look_at_loss()
        self.totals = MetricSums(1, self._device, setup.loss, setup.metrics)
        self.clock = StepTimer(self._device, profiles=bool(state.config.profile))

    def _look_at_loss(self) -> None:
        """Decide when all ranks' counts are summed, which gradients are divided by."""
        loss, num = self._loss, self._setup.num_micro_batches
        if num is None:
            self._weighs_at_end = loss.weighting is not Weighting.NOTHING
            self._weighs_first = False
            self._may_count_nothing = [not loss.is_known] * max(len(loss.weightings), 1)
        else:
            # What several micro-batches count together is known when all have run.
            self._weighs_at_end = num > 1 and loss.counts_terms and not loss.weightings and not loss.obeys_items
            self._weighs_first = num > 1 and loss.counts_terms and bool(loss.weightings)
            self._may_count_nothing = loss.may_be_left_out(is_accelerator=self._is_accelerator)
        self._kinds = [kind for _, kind, _ in loss.added(loss.nothing())]
        self._asks_ranks = loss.counts_terms and not self._weighs_at_end
        self._always_counts = not loss.weightings and not any(self._may_count_nothing)

    def __call__(self, share: Share) -> None:
        """Zero; accumulate, of which the last micro-batch syncs; unscale; finite?; clip; step; update the scale."""
        self.begin()
        results = self._accumulate(share)
        if self.finish(share, results) is not Verdict.SKIPPED:
            for result in results:
                self.totals.add(0, result.loss, result.answers)
                self.totals.metrics.add(*result.measured)

    def begin(self) -> None:
        """Zero the gradients, and keep what a forward changes."""
        self._zero()
        self.guard.before_step()
        if self._scale is not None:
            self._multiplier = self._scale.of_each(self._world_size)
            self._ddp.expect_scale(self._multiplier)

    def add(self, batch: Batch, share: Share, divisors: Sequence[Number] | None = None, *, is_last: bool) -> Result:
        """Add the gradients of a micro-batch; the last one of a step averages over ranks all that were added.

        Args:
            batch: Rows of this rank.
            share: To which it belongs.
            divisors: What the sum of all ranks' terms of each loss is divided by; None: as this micro-batch tells.
            is_last: Whether it is the last one of the step.
        """
        with contextlib.nullcontext() if is_last else self._ddp.no_sync():
            with self.clock.forward:
                result = self._forward(batch)
            with self.clock.backward:
                self._backward(result.loss, self._divisors_of(result.loss, share, divisors), is_last=is_last)
        return result

    def add_nothing(self, share: Share, divisors: Sequence[Number] | None = None) -> None:
        """Take part in the averaging of a step without a row."""
        with self.clock.backward:
            self._ddp.forward_without_batch()
            self._divisors_of(self._loss.nothing(), share, divisors)
            self._ddp.backward_without_batch()

    def finish(self, share: Share, results: Sequence[Result]) -> Verdict:
        """Unscale; finite?; clip; step the optimizer and the schedule; update the scale.

        On accelerators the verdict on a step may come with the next one, which raises (`FiniteGuard.is_late`).
        """
        if self._weighs_at_end:
            self._divide_by_weight(sum(result.loss.weight for result in results), share)
        with self.clock.optimizer:
            if self._multiplier != 1:
                multiply_gradients(self._parameters, 1.0 / self._multiplier)
            verdict, step = self._judge(share, results)
            if step is not None:
                if self._before_update is not None:
                    self._before_update(share.number)
                if self._clip is not None:
                    self._clip(self._parameters)
                step()
                self._rates.step()
        return verdict

    def _judge(self, share: Share, results: Sequence[Result]) -> tuple[Verdict, Callable[[], object] | None]:
        """Return whether the step is taken, and what takes it; None: nothing."""
        losses = [each.value for result in results for _, _, each in self._counted(result.loss)]
        again = partial(self._run_alone, share)
        if not self.guard.is_late:
            verdict = self.guard.verdict(share, losses, again)
            return verdict, self._step_optimizer if verdict is Verdict.TAKEN else None
        report = self.guard.report(share, losses, again, self._rates.undoable())
        step = None if self._before_update is not None else self._step_optimizer.unless(report.bad)
        if step is None and report.is_good():  # to ask it is to wait for it
            return Verdict.TAKEN, self._step_optimizer
        return Verdict.TAKEN, step

    def _zero(self) -> None:
        for parameter in self._parameters:  # also those that the optimizer does not have, or they would add up
            parameter.grad = None

    def _accumulate(self, share: Share) -> list[Result]:
        """Make the averaged gradients of the joined batch; return what each micro-batch of this rank gave."""
        results: list[Result] = []
        if self._loss.gathers or self._setup.without_rows is not None:
            rounds, fewest = self._most_and_fewest(len(share))
            if rounds != fewest:
                return self._accumulate_unevenly(share, rounds)
        items, divisors = self._counted_first(share)
        if share.rows == 0:
            self.add_nothing(share, divisors)
        for batch in self.clock.data.each(share):
            batch.items = items
            results.append(self.add(batch, share, divisors, is_last=len(results) == len(share) - 1))
            share.ahead(self.clock.data)
        self.clock.communicated(self.clock.backward, self._ddp.seconds_communicated())
        return results

    def _accumulate_unevenly(self, share: Share, rounds: int) -> list[Result]:
        """As `_accumulate`, if ranks have different numbers of micro-batches and all must run equally many.

        The loss gathers rows, or a layer such as SyncBatchNorm needs all ranks in each forward and backward. Gradients
        are averaged when all backwards are complete.

        Args:
            share: Of this rank.
            rounds: The largest number of micro-batches of any rank.
        """
        results: list[Result] = []
        items, divisors = self._counted_first(share, rounds)
        self._ddp.forward_without_batch()
        with self._ddp.no_sync():
            batches = iter(share)
            for _ in range(rounds):
                batch = next(batches, None)
                value: Tensor | None = None
                with gathers_kept() as kept:
                    if batch is not None:
                        batch.items = items
                        results.append(self._forward(batch))
                    elif self._setup.without_rows is not None:
                        self._ddp.expect_rows(0)
                        value = self._setup.without_rows(self._ddp.forward)
                    else:
                        gather_nothing(self._loss.gathers, self._device)
                loss = self._loss.nothing() if batch is None else results[-1].loss
                known = self._divisors_of(loss, share, divisors)
                backward_alike(value if batch is None else self._to_average(loss, known), kept)
                share.ahead(self.clock.data)
        self._ddp.backward_without_batch()
        self.clock.communicated(self.clock.backward, self._ddp.seconds_communicated())
        return results

    def _most_and_fewest(self, count: int) -> tuple[int, int]:
        counts = torch.tensor([count, -count], device="cpu")
        dist.all_reduce(counts, dist.ReduceOp.MAX, group=runtime.cpu_group())
        most, fewest = counts.tolist()
        return most, -fewest

    def _run_alone(self, share: Share) -> list[Tensor]:
        """Make this rank's own gradients of a share, not averaged; return its losses."""
        self._zero()
        losses = []
        without_rows = self._setup.without_rows
        apart = contextlib.nullcontext() if without_rows is None else without_rows.apart(self._ddp)
        with apart, gathering_alone():
            for batch in share:
                counted = self._counted(self._forward(batch).loss)
                for _, _, loss in counted:
                    self._scaled(loss.value).backward(retain_graph=loss is not counted[-1][2])
                    losses.append(loss.value.detach())
        return losses

    def _forward(self, batch: Batch) -> Result:
        self._ddp.expect_rows(batch.rows)
        output = self._setup.call(self._ddp.forward, batch)
        if self._setup.num_micro_batches is None:
            self._loss.check_shapes(output, batch.targets)  # there was no dry run
        loss = self._loss(output, batch)
        if self._setup.num_micro_batches is None:
            self._look_at_loss()
            require(
                not (self._loss.weightings and self._loss.counts_terms),
                "DistributedAMPTrainer does not know what several losses count before a step is complete: use fit, or "
                "return one loss as (sum, weight).",
            )
        # Detached: several micro-batches together would keep their graphs.
        measures = bool(self.totals.metrics)
        measured = (map_output(Tensor.detach, output), batch.answers, batch.rows) if measures else (None, None, 0)
        return Result(loss, correct_of(output, batch.answers, self._loss), measured)

    def _counted(self, loss: BatchLoss) -> list[tuple[int, float, BatchLoss]]:
        """Return (number, factor, loss) of each loss that a micro-batch's loss adds up, if something in it counts.

        A mean over nothing, computed in the model, is 0 / 0: no factor would clear the NaN in its gradients.
        """
        if self._always_counts:  # asked twice in each step
            return [(0, 1.0, loss)]
        added = [(number, factor, each) for number, (factor, _, each) in enumerate(self._loss.added(loss))]
        return [each for each in added if not self._may_count_nothing[each[0]] or each[2].counts]

    def _backward(self, loss: BatchLoss, divisors: Sequence[Number], *, is_last: bool) -> None:
        value = self._to_average(loss, divisors)
        if value is not None:
            value.backward()
        elif is_last:
            self._ddp.backward_without_batch()
        else:
            self._ddp.skip_backward()

    def _to_average(self, loss: BatchLoss, divisors: Sequence[Number]) -> Tensor | None:
        """Return what to call `backward` on, scaled; None: nothing in the loss counts."""
        value: Tensor | None = None
        for number, factor, each in self._counted(loss):
            # Gradients are averaged over ranks: N times each rank's share of the joined mean. Exactly 1 in even
            # batches.
            term = _times(each.value, _quotient(factor * each.terms * self._world_size, divisors[number]))
            value = term if value is None else value + term
        if value is None:
            return None
        self._ddp.watch(value)
        return self._scaled(value)

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss if self._multiplier == 1 else loss * self._multiplier

    def _divisors_of(self, loss: BatchLoss, share: Share, known: Sequence[Number] | None) -> Sequence[Number]:
        """Return what the sum of all ranks' terms of each loss is divided by, in this backward."""
        if known is not None:
            return known
        if not self._asks_ranks:
            return self._divisors((), share)
        return self._divisors([each.weight for _, _, each in self._loss.added(loss)], share)

    def _divisors(self, weights: Sequence[Number], share: Share) -> list[Number]:
        """Return the divisor of each loss, the same on every rank; `weights`: this rank's counts, if it needs them."""
        divisors: list[Number] = [1.0 if kind is Weighting.NOTHING else share.joined_rows for kind in self._kinds]
        if self._asks_ranks:
            places = [place for place, kind in enumerate(self._kinds) if kind is Weighting.TERMS]
            joined = self._sum_over_ranks([weights[place] for place in places], self.clock.backward)
            for place, weight in zip(places, joined, strict=True):
                divisors[place] = weight
        return divisors

    def _counted_first(self, share: Share, rounds: int = 0) -> tuple[Tensor | int | None, Sequence[Number] | None]:
        """Return (items, divisors) of a step, if its first forward needs them; `rounds`: as `_weights_of`."""
        items: Tensor | int | None = None
        divisors: Sequence[Number] | None = None
        if self._loss.items is not None:
            count = sum(map(self._loss.items.count, share))
            (joined,) = self._sum_over_ranks([count], self.clock.forward)
            items = joined.long().clamp_(min=1) if isinstance(joined, Tensor) else max(int(joined), 1)
            divisors = [joined] if self._loss.obeys_items else None
        elif self._weighs_first:
            divisors = self._divisors(self._weights_of(share, rounds), share)
        return items, divisors

    def _weights_of(self, share: Share, rounds: int) -> list[Number]:
        """Return what this rank counts of each loss in a share, by a forward of each micro-batch without gradients.

        Each of several losses is divided by a weight of its own, which must be known before the first backward.

        Args:
            share: Of this rank.
            rounds: Forwards that every rank runs, on no rows if it has fewer micro-batches.
        """
        weights: list[Number] = [0.0] * len(self._kinds)
        with torch.no_grad(), generators_kept(self._device), gathering_alone():
            for batch in share:
                loss = self._loss(self._setup.call(self._ddp.forward, batch), batch)
                for number, (_, _, each) in enumerate(self._loss.added(loss)):
                    weight = each.weight
                    stays = self._is_accelerator and isinstance(weight, Tensor)
                    weights[number] += _as_double(weight, self._device)[0] if stays else float(weight)
            for _ in range(rounds - len(share)):
                if self._setup.without_rows is not None:
                    self._setup.without_rows.forward(self._ddp.forward)
        self.guard.bring_back()
        return weights

    def _divide_by_weight(self, weight: Number, share: Share) -> None:
        """Divide by what all ranks have counted, instead of by the number of samples."""
        with self.clock.backward:
            (joined,) = self._sum_over_ranks([weight], self.clock.backward)
        multiply_gradients(self._parameters, _quotient(share.joined_rows, joined))

    def _sum_over_ranks(self, weights: Sequence[Number], within: Part) -> list[Number]:
        """Return sums over ranks in float64; on an accelerator they stay there, so that the host need not wait."""
        stays = self._is_accelerator and (self._world_size == 1 or dist.get_backend() != "ring")
        if stays and self._world_size == 1 and not any(isinstance(each, Tensor) for each in weights):
            return list(weights)
        device = self._device if stays else torch.device("cpu")
        joined = torch.cat([_as_double(each, device) for each in weights])
        if self._world_size > 1 or not stays:
            began = time.perf_counter()
            dist.all_reduce(joined, group=dist.group.WORLD if stays else runtime.cpu_group())
            self.clock.communicated(within, time.perf_counter() - began)
        return [*joined.unbind()] if stays else joined.tolist()


def _as_double(number: Number, device: torch.device) -> Tensor:
    """Return a number as shape (1,), without a copy to an accelerator for which the host would wait."""
    if isinstance(number, Tensor):
        return number.detach().to(device, torch.float64, non_blocking=number.is_cpu).reshape(1)
    return torch.full((1,), number, dtype=torch.float64, device=device)


def _quotient(number: Number, divisor: Number) -> Number:
    """Return number / divisor in float64, and 0 if the divisor is 0, without waiting for an accelerator."""
    if not isinstance(divisor, Tensor):
        return number / divisor if divisor else 0.0
    # A Python number / tensor is number * (1 / divisor), which is rounded twice.
    above = number if isinstance(number, Tensor) else torch.tensor(number, dtype=torch.float64, device="cpu")
    return torch.div(above.double(), divisor).masked_fill_(divisor == 0, 0.0)


def _times(loss: Tensor, factor: Number) -> Tensor:
    """Return loss * factor with the same bits for a float64 tensor as factor as for a number."""
    if not isinstance(factor, Tensor):
        return loss if factor == 1 else loss * factor
    wide = loss.float() if loss.dtype.itemsize == 2 else loss
    return (wide * factor.to(wide.dtype)).to(loss.dtype)
