"""What the loss of a step is divided by, the same on every rank, and how the ranks learn it.

A loss is a sum of terms over a weight, and each rank knows its own terms and weight only. Gradients of N ranks are
averaged, so that backward begins from N x the rank's terms / the divisor. The divisor is learned in one of these ways:

- `DivisionByRows`: a mean over samples is divided by the rows of the step, which every rank knows; a sum by 1.
- `DivisionAfterExchange`: one weighted loss. Its weight travels with the gradients; where gradients have 16 bits and a
  step several micro-batches, the ranks add it up after backward.
- `DivisionBeforeBackward`: several weighted losses, or one with gradients of 16 bits: the ranks add the weights up.
- `DivisionBeforeForward`: several weighted losses of several micro-batches: a forward without gradients counts first.
- `DivisionByItems`: a model that divides by num_items itself: the ranks add up what it counts.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from typing_extensions import override

from cyxtrain.data.batches.batch import Batch, Share
from cyxtrain.data.rng import generators_kept
from cyxtrain.environment.accelerator import is_accelerator
from cyxtrain.metrics.accumulator import Accumulator
from cyxtrain.metrics.logged import LoggedNumbers
from cyxtrain.metrics.loss import Loss
from cyxtrain.metrics.weighting import BatchLoss, Weighting
from cyxtrain.optim.clipping import multiply_gradients
from cyxtrain.optim.precision import Number, as_double, quotient, times
from cyxtrain.parallel import DistributedDataParallel, gathering_alone
from cyxtrain.parallel.synchronization import Synchronization
from cyxtrain.progress.step_timer import Part, StepTimer
from cyxtrain.training.inputs.checked_data import ModelSetup
from cyxtrain.training.step.slice_scope import SliceScope
from cyxtrain.training.step.transaction import StepTransaction
from cyxtrain.world.world import World


class LossDivision(ABC):
    """One of the ways above; `latest` are the divisors of the latest micro-batch, one for each loss."""

    _correction: Number = 1.0  # by which gradients were multiplied after backward

    def __init__(self, ddp: DistributedDataParallel, setup: ModelSetup, clock: StepTimer) -> None:
        self._ddp = ddp
        self._setup = setup
        self._clock = clock
        self._loss = setup.loss
        self._world = ddp.world
        self._slices = ddp.slices
        self._device = setup.placement.device
        self._device_of_sums = self._world.device_of_sums(self._device)
        self.kinds = kinds_of(setup.loss)
        self.latest: Sequence[Number] = ()

    def begin(self) -> None:  # noqa: B027 - only one keeps something during a step
        """Begin a step."""

    def begin_slice(self, number: int) -> None:  # noqa: B027 - only one keeps something of a slice
        """Begin a slice of it."""

    def before_forward(self, share: Share, max_micro_batches: int = 0) -> Tensor | int | None:
        """Learn what must be known before the first forward of a step. All ranks call it.

        Return what the model counts in the step, over all ranks, for its argument `num_items`; None: it counts nothing.
        `max_micro_batches`: of any rank, where all must run equally many.
        """
        return None if self._loss.items is None else _at_least_one(self._count_items(share))

    def learn_divisors(self, loss: BatchLoss, share: Share) -> Sequence[Number]:
        """Return the divisor of each loss for the backward of a micro-batch. All ranks call it."""
        self.latest = self._divisors_of(loss, share)
        return self.latest

    @abstractmethod
    def _divisors_of(self, loss: BatchLoss, share: Share) -> Sequence[Number]:
        """Return the divisor of each loss, the same on every rank."""

    def divided(self, loss: BatchLoss, divisors: Sequence[Number]) -> Tensor:
        """Return the sum of the terms of each loss over its divisor, times the number of slices."""
        value: Tensor | None = None
        for number, (factor, _, each) in enumerate(self._loss.components(loss)):
            # Averaging divides by N, so multiply by N x this slice's fraction; exactly 1 for even batches.
            term = times(each.value, quotient(factor * each.sum_factor * self._slices.count, divisors[number]))
            value = term if value is None else value + term
        assert value is not None
        return value

    def watched(self, value: Tensor, loss: BatchLoss) -> Tensor:
        """Return what must be finite of a divided loss for its gradients to be."""
        return value.detach()

    def attach_weight(self, share: Share, sync: Synchronization) -> None:  # noqa: B027 - only one has a weight to send
        """Let this rank's weight travel with the gradients of the next backward."""

    def complete(  # noqa: B027 - most are complete
        self, share: Share, sync: Synchronization, parameters: Sequence[nn.Parameter]
    ) -> None:
        """Divide the averaged gradients of parameters, unless that is done."""

    def mean_of_ranks(self, own: Number) -> Tensor:
        """Return the loss of a complete step over all ranks, 0-dim, float64; `own`: divided, of this rank."""
        (total,) = self._sum_over_ranks([own], self._clock.backward)
        total = torch.as_tensor(total, dtype=torch.float64, device=self._device_of_sums)
        return total * self._correction / self._world.size

    def _count_items(self, share: Share) -> Number:
        assert self._loss.items is not None
        own = sum(map(self._loss.items.count, share))
        (total,) = self._sum_over_ranks([own], self._clock.forward)
        return total

    def _sum_over_slices(self, weights: Mapping[int, Sequence[Number]], within: Part) -> list[Number]:
        """Return sums over the slices of all ranks; `weights`: of each slice of this rank."""
        if not self._slices.is_virtual:
            (own,) = weights.values()
            return self._sum_over_ranks(own, within)
        names = [str(place) for place, _ in enumerate(next(iter(weights.values())))]
        table = Accumulator(names, self._slices.count)
        for number, of_slice in weights.items():
            for name, weight in zip(names, of_slice, strict=True):
                table.add(name, weight, sum_factor=1.0, row=number)
        began = time.perf_counter()
        pairs = table.over(self._world)
        self._clock.communicated(within, time.perf_counter() - began)
        return [pairs[name][0] for name in names]

    def _in_double(self, weight: Number) -> Number:
        """Return a weight in float64: a count plus a Python number would have PyTorch's default type, of few digits."""
        if isinstance(weight, Tensor) and is_accelerator(self._device):
            return as_double(weight, self._device)[0]
        return float(weight)

    def _sum_over_ranks(self, weights: Sequence[Number], within: Part) -> list[Number]:
        began = time.perf_counter()
        totals = sum_over_ranks(self._world, weights, self._device_of_sums)
        if self._world.size > 1:
            self._clock.communicated(within, time.perf_counter() - began)
        return totals


class DivisionByRows(LossDivision):
    """Divides means over samples by the rows of the step, and sums by 1."""

    @override
    def _divisors_of(self, loss: BatchLoss, share: Share) -> Sequence[Number]:
        return _known_divisors(self.kinds, share)


class DivisionAfterExchange(LossDivision):
    """Divides by a power of two before backward, and by the weight of all ranks after it."""

    @override
    def begin(self) -> None:
        self._correction = 1.0
        self._weights: dict[int, Number] = {}  # of the losses of each slice of this rank so far
        self.begin_slice(self._slices.owned.start)

    @override
    def begin_slice(self, number: int) -> None:
        self._number = number
        self._weights.setdefault(number, 0.0)

    @override
    def _divisors_of(self, loss: BatchLoss, share: Share) -> Sequence[Number]:
        self._weights[self._number] += self._in_double(loss.weight)
        return [self._provisional_divisor(share)] * len(self.kinds)

    @override
    def watched(self, value: Tensor, loss: BatchLoss) -> Tensor:
        # A weight that is not finite makes the gradients NaN when they are divided by it.
        nothing = self._in_double(loss.weight) * 0.0
        return value.detach() + (nothing.to(value.dtype) if isinstance(nothing, Tensor) else nothing)

    @override
    def attach_weight(self, share: Share, sync: Synchronization) -> None:
        if self._ddp.carries_weights:
            sync.divide_by(self._weights[self._number], self._provisional_divisor(share))

    @override
    def complete(self, share: Share, sync: Synchronization, parameters: Sequence[nn.Parameter]) -> None:
        if self._ddp.carries_weights:
            # The wrapper has multiplied the averages; the loss of a closure needs the factor too.
            self._correction = sync.factor
            return
        with self._clock.backward:
            weights = {number: [weight] for number, weight in self._weights.items()}
            (total,) = self._sum_over_slices(weights, self._clock.backward)
        self._correction = quotient(self._provisional_divisor(share), total)
        multiply_gradients(parameters, self._correction)
        # In 16 bits they may have become infinite.
        sync.has_changed_averages = True

    def _provisional_divisor(self, share: Share) -> float:
        """Return what a loss is divided by before backward: a power of two near the weight of all ranks.

        All ranks know it without a message, and nothing is rounded; it keeps the gradients of 16 bits in range.
        """
        return 2.0 ** round(math.log2(share.global_rows * self._loss.weight_per_row))


class DivisionBeforeBackward(LossDivision):
    """Divides each weighted loss by its own weight, which the ranks add up before each backward."""

    @override
    def _divisors_of(self, loss: BatchLoss, share: Share) -> Sequence[Number]:
        return self._divisors({0: [each.weight for _, _, each in self._loss.components(loss)]}, share)

    def _divisors(self, weights: Mapping[int, Sequence[Number]], share: Share) -> Sequence[Number]:
        """Return the divisor of each loss; `weights`: of each slice of this rank."""
        divisors = _known_divisors(self.kinds, share)
        weighted = [number for number, kind in enumerate(self.kinds) if kind is Weighting.WEIGHTS]
        of_weighted = {number: [of_slice[place] for place in weighted] for number, of_slice in weights.items()}
        totals = self._sum_over_slices(of_weighted, self._clock.backward)
        for number, total in zip(weighted, totals, strict=True):
            divisors[number] = total
        return divisors


class DivisionBeforeForward(DivisionBeforeBackward):
    """Divides each weighted loss by its weight in all micro-batches, which a forward without gradients counts first."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        setup: ModelSetup,
        clock: StepTimer,
        logged: LoggedNumbers,
        transaction: StepTransaction,
        scope: SliceScope,
    ) -> None:
        super().__init__(ddp, setup, clock)
        self._scope = scope
        self._logged = logged
        self._transaction = transaction
        self._of_step: Sequence[Number] = ()

    @override
    def before_forward(self, share: Share, max_micro_batches: int = 0) -> Tensor | int | None:
        share.is_read_again = True
        items = super().before_forward(share, max_micro_batches)
        self._of_step = self._divisors(self._count(share, items, max_micro_batches), share)
        return items

    @override
    def _divisors_of(self, loss: BatchLoss, share: Share) -> Sequence[Number]:
        return self._of_step

    def _count(self, share: Share, items: Tensor | int | None, max_micro_batches: int) -> dict[int, list[Number]]:
        """Return the weight of each loss in a share, for each slice of this rank.

        Every rank runs `max_micro_batches` forwards, on no rows if it has fewer micro-batches.
        """
        weights: dict[int, list[Number]] = {}
        with torch.no_grad(), generators_kept(self._device), gathering_alone(), self._logged.repeating():
            with self._scope.of_slices():
                for part in share.parts:
                    self._scope.enter(part)
                    weights[part.number] = self._count_slice(share.batches(part.batches), items)
                    self._transaction.put_back_buffers()
            for _ in range(max_micro_batches - len(share)):
                if self._setup.without_rows is not None:
                    self._setup.without_rows.forward(self._ddp.forward)
                    self._transaction.put_back_buffers()
        return weights

    def _count_slice(self, batches: Iterable[Batch], items: Tensor | int | None) -> list[Number]:
        weights: list[Number] = [0.0] * len(self.kinds)
        for batch in batches:
            batch.items = items
            loss = self._loss(self._setup.call(self._ddp.forward, batch), batch)
            for number, (_, _, each) in enumerate(self._loss.components(loss)):
                weights[number] += self._in_double(each.weight)
        return weights


class DivisionByItems(LossDivision):
    """Divides by the items that the model counts, which the ranks add up before forward."""

    @override
    def before_forward(self, share: Share, max_micro_batches: int = 0) -> Tensor | int | None:
        self._total = self._count_items(share)
        return _at_least_one(self._total)

    @override
    def _divisors_of(self, loss: BatchLoss, share: Share) -> Sequence[Number]:
        return [self._total]


def choose_division(
    ddp: DistributedDataParallel,
    setup: ModelSetup,
    clock: StepTimer,
    logged: LoggedNumbers,
    transaction: StepTransaction,
    scope: SliceScope,
) -> LossDivision:
    """Return how the loss of steps is divided."""
    loss = setup.loss
    if loss.uses_num_items:
        return DivisionByItems(ddp, setup, clock)
    if not loss.has_weights:
        return DivisionByRows(ddp, setup, clock)
    # With virtual ranks the ranks run different numbers of backwards.
    is_accumulated = setup.num_micro_batches > 1 or ddp.slices.is_virtual
    if loss.weightings:
        if is_accumulated:
            return DivisionBeforeForward(ddp, setup, clock, logged, transaction, scope)
        return DivisionBeforeBackward(ddp, setup, clock)
    if is_accumulated or ddp.carries_weights:
        return DivisionAfterExchange(ddp, setup, clock)
    return DivisionBeforeBackward(ddp, setup, clock)


def kinds_of(loss: Loss) -> list[Weighting]:
    """Return how each loss is weighted."""
    return [kind for _, kind, _ in loss.components(loss.without_rows())]


def sum_over_ranks(world: World, numbers: Sequence[Number], device: torch.device) -> list[Number]:
    """Return sums over ranks in float64, on the `World.device_of_sums`; the host does not wait for an accelerator."""
    if device.type == "cpu":
        found: list[Number] = world.reduce(torch.cat([as_double(each, device) for each in numbers])).tolist()
        return found
    if world.size == 1 and not any(isinstance(each, Tensor) for each in numbers):
        return list(numbers)
    return [*world.reduce(torch.cat([as_double(each, device) for each in numbers])).unbind()]


def _known_divisors(kinds: Sequence[Weighting], share: Share) -> list[Number]:
    """Return what every rank knows to divide losses by, in the place of a weight too."""
    return [1.0 if kind is Weighting.NOTHING else share.global_rows for kind in kinds]


def _at_least_one(items: Number) -> Tensor | int:
    return items.long().clamp_(min=1) if isinstance(items, Tensor) else max(int(items), 1)
