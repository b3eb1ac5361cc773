"""By what the loss of a step is divided, on all ranks alike, and how they learn it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cyxtrain.data.batches.batch import Share
from cyxtrain.data.rng import generators_kept
from cyxtrain.environment.accelerator import is_accelerator
from cyxtrain.metrics.logged import LoggedNumbers
from cyxtrain.metrics.weighting import BatchLoss, Weighting
from cyxtrain.optim.clipping import multiply_gradients
from cyxtrain.optim.precision import Number, as_double, quotient, times
from cyxtrain.parallel import DistributedDataParallel, gathering_alone
from cyxtrain.progress.step_timer import Part, StepTimer
from cyxtrain.training.inputs.checked_data import ModelSetup
from cyxtrain.training.step.transaction import StepTransaction
from cyxtrain.world.world import World

Divisors = Sequence[Number] | None


class LossDivision:
    """Divides the loss of each step by the weight of all ranks and micro-batches.

    What decides, and when the loss is divided:

    - a mean over samples: before backward, by the rows of the step, which every rank knows;
    - a sum: never;
    - one weighted loss: before backward by a provisional divisor, a power of two near the weight; after the exchange by
      the weight that has travelled with the gradients (`_divides_after`);
    - one weighted loss with gradients of 16 bits: the ranks add up its weight before backward
      (`_asks_before_backward`); with several micro-batches after the exchange, as their weight is known only then;
    - several weighted losses: before backward, each by its own weight, which the ranks add up; with several
      micro-batches, a forward counts first (`_counts_before_forward`);
    - one that the model divides by num_items: before forward, by what the ranks add up.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        setup: ModelSetup,
        logged: LoggedNumbers,
        transaction: StepTransaction,
        clock: StepTimer,
    ) -> None:
        self._ddp, self._setup, self._logged, self._transaction, self._clock = ddp, setup, logged, transaction, clock
        self._world, self._loss, self._device = ddp.world, setup.loss, setup.placement.device
        self._device_of_sums = self._world.device_of_sums(self._device)
        self.latest: Sequence[Number] = ()
        """The divisors of the latest micro-batch."""
        self.choose()
        self.begin()

    def choose(self) -> None:
        """Choose the way, when it is known what the loss is."""
        loss, micro_batches = self._loss, self._setup.num_micro_batches
        self.kinds = [kind for _, kind, _ in loss.components(loss.without_rows())]
        if micro_batches is None:  # of a loop of the user's own: nobody knows yet how many rows a step has
            self._counts_before_forward = False
            self._divides_after = Weighting.NOTHING not in self.kinds
        else:
            is_one = not loss.weightings and not loss.uses_num_items
            self._counts_before_forward = micro_batches > 1 and loss.has_weights and bool(loss.weightings)
            known_late = micro_batches > 1 or self._ddp.carries_weights
            self._divides_after = loss.has_weights and is_one and known_late
        self._asks_before_backward = loss.has_weights and not self._divides_after

    def begin(self) -> None:
        """Begin a step."""
        self._weight: Number = 0.0  # of this rank's losses so far
        self._correction: Number = 1.0  # by which gradients were multiplied after backward

    def before_forward(self, share: Share, max_micro_batches: int = 0) -> tuple[Tensor | int | None, Divisors]:
        """Return what the model counts as `num_items`, and divisors, if the first forward of a step needs them.

        `max_micro_batches`: of any rank, where all must run equally many.
        """
        if self._loss.items is not None:
            count = sum(map(self._loss.items.count, share))
            (total,) = self._sum_over_ranks([count], self._clock.forward)
            items = total.long().clamp_(min=1) if isinstance(total, Tensor) else max(int(total), 1)
            return items, [total] if self._loss.uses_num_items else None
        if self._counts_before_forward:
            return None, self._divisors(self._count(share, max_micro_batches), share)
        return None, None

    def of_loss(self, loss: BatchLoss, share: Share, known: Divisors) -> Sequence[Number]:
        """Count a micro-batch; return the divisor of each loss, the same on every rank, in its backward."""
        self._weight += self._in_double(loss.weight)
        if known is None:
            components = self._loss.components(loss) if self._asks_before_backward else ()
            known = self._divisors([each.weight for _, _, each in components], share)
        self.latest = known
        return known

    def divided(self, loss: BatchLoss, divisors: Sequence[Number]) -> Tensor:
        """Return the sum of the terms of each loss over its divisor, times the number of ranks."""
        value: Tensor | None = None
        for number, (factor, _, each) in enumerate(self._loss.components(loss)):
            # Averaging divides by N, so multiply by N x this rank's fraction; exactly 1 for even batches.
            term = times(each.value, quotient(factor * each.sum_factor * self._world.size, divisors[number]))
            value = term if value is None else value + term
        assert value is not None
        return value

    def watched(self, value: Tensor, loss: BatchLoss) -> Tensor:
        """Return a divided loss, NaN if its weight is not finite: gradients are, when they are divided by that."""
        if not self._divides_after:
            return value.detach()
        nothing = self._in_double(loss.weight) * 0.0
        return value.detach() + (nothing.to(value.dtype) if isinstance(nothing, Tensor) else nothing)

    def send(self, share: Share) -> None:
        """Send this rank's weight with the next gradients, which are divided by that of all ranks."""
        if self._divides_after and self._ddp.carries_weights:
            self._ddp.divide_by(self._weight, self._provisional_divisor(share))

    def complete(self, share: Share, parameters: Sequence[nn.Parameter]) -> None:
        """Divide the gradients of parameters, unless that was done before or when they were exchanged."""
        if not self._divides_after:
            return
        if self._ddp.carries_weights:
            self._correction = self._ddp.factor
            return
        with self._clock.backward:
            (total,) = self._sum_over_ranks([self._weight], self._clock.backward)
        self._correction = quotient(self._provisional_divisor(share), total)
        multiply_gradients(parameters, self._correction)

    def mean_of_ranks(self, own: Number) -> Tensor:
        """Return the loss of a complete step over all ranks, 0-dim, float64; `own`: divided, of this rank."""
        (total,) = self._sum_over_ranks([own], self._clock.backward)
        total = torch.as_tensor(total, dtype=torch.float64, device=self._device_of_sums)
        return total * self._correction / self._world.size

    def _provisional_divisor(self, share: Share) -> float:
        """Return what a loss is divided by before backward if its weight is known only then: a power of two near it.

        All ranks know it without a message, and nothing is rounded; it keeps the gradients of 16 bits in range.
        """
        return 2.0 ** round(math.log2(share.global_rows * self._loss.weight_per_row))

    def _divisors(self, weights: Sequence[Number], share: Share) -> list[Number]:
        """Return the divisor of each loss; `weights`: this rank's, if the ranks add them up now."""
        if self._divides_after:
            return [self._provisional_divisor(share)] * len(self.kinds)
        divisors: list[Number] = [1.0 if kind is Weighting.NOTHING else share.global_rows for kind in self.kinds]
        if self._asks_before_backward:
            places = [place for place, kind in enumerate(self.kinds) if kind is Weighting.WEIGHTS]
            totals = self._sum_over_ranks([weights[place] for place in places], self._clock.backward)
            for place, weight in zip(places, totals, strict=True):
                divisors[place] = weight
        return divisors

    def _count(self, share: Share, max_micro_batches: int) -> list[Number]:
        """Return this rank's weight of each loss in a share, by a forward of each micro-batch without gradients.

        Every rank runs `max_micro_batches` forwards, on no rows if it has fewer micro-batches.
        """
        weights: list[Number] = [0.0] * len(self.kinds)
        with torch.no_grad(), generators_kept(self._device), gathering_alone(), self._logged.repeating():
            for batch in share:
                loss = self._loss(self._setup.call(self._ddp.forward, batch), batch)
                for number, (_, _, each) in enumerate(self._loss.components(loss)):
                    weights[number] += self._in_double(each.weight)
            for _ in range(max_micro_batches - len(share)):
                if self._setup.without_rows is not None:
                    self._setup.without_rows.forward(self._ddp.forward)
        self._transaction.put_back_buffers()
        return weights

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


def sum_over_ranks(world: World, numbers: Sequence[Number], device: torch.device) -> list[Number]:
    """Return sums over ranks in float64, on the `World.device_of_sums`; the host does not wait for an accelerator."""
    if device.type == "cpu":
        found: list[Number] = world.reduce(torch.cat([as_double(each, device) for each in numbers])).tolist()
        return found
    if world.size == 1 and not any(isinstance(each, Tensor) for each in numbers):
        return list(numbers)
    return [*world.reduce(torch.cat([as_double(each, device) for each in numbers])).unbind()]
