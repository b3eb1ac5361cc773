"""What happens with one batch.

The order of a training step: zero the gradients; forward and backward of each micro-batch, of which the last backward
averages gradients over ranks; unscale; finite?, and the next loss scale; clip; step the optimizer, then its schedule;
add to the sums of the epoch.

Parameters change only after every collective of the step has succeeded; over NCCL the host does not wait for that.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cyxtrain.data.batches.batch import Batch, Share
from cyxtrain.data.batches.specs import form_of
from cyxtrain.data.batches.structure import Tree, map_output, map_tree, tensors
from cyxtrain.data.rng import generators_kept
from cyxtrain.environment.accelerator import HostCopy, is_accelerator
from cyxtrain.errors import ConfigError
from cyxtrain.metrics.loss import Loss
from cyxtrain.metrics.metric import Metrics
from cyxtrain.metrics.sums import Correct, MetricSums, correct_of
from cyxtrain.metrics.weighting import BatchLoss, Weighting
from cyxtrain.optim.clipping import Clip, multiply_gradients
from cyxtrain.optim.learning_rates import LearningRates
from cyxtrain.optim.optimizer_step import OptimizerStep
from cyxtrain.optim.precision import LossScale
from cyxtrain.parallel import DistributedDataParallel, backward_alike, gather_nothing, gathering_alone, gathers_kept
from cyxtrain.progress.step_timer import Part, StepTimer
from cyxtrain.training.inputs.empty_batches import EmptyBatch
from cyxtrain.training.model.forward import ModelCall
from cyxtrain.training.nonfinite import FiniteGuard, Verdict
from cyxtrain.world import runtime

Number = Tensor | float


class TrainingStep:
    """One update of the parameters per joined batch.

    Args:
        ddp: The model.
        loss: Of a batch.
        optimizer: Of the model's parameters.
        rates: Of the optimizer.
        clip: Makes gradients smaller where they are too large, or None.
        guard: Lets a step pass, or not.
        call: How the model is called.
        scale: Of the loss, or None.
        device: Where the model computes.
        metrics: What is measured beside loss and accuracy.
        clock: Takes the time of its parts.
        before_update: Called with the number of the step in its epoch, when its gradients are there; or None.
        accumulates: Whether a step may have several micro-batches, on any rank.
        without_rows: What a rank computes that has fewer micro-batches than another one; None: nothing.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        rates: LearningRates,
        clip: Clip | None,
        guard: FiniteGuard,
        call: ModelCall,
        scale: LossScale | None,
        device: torch.device,
        metrics: Metrics,
        clock: StepTimer,
        before_update: Callable[[int], object] | None,
        *,
        accumulates: bool,
        without_rows: EmptyBatch | None = None,
    ) -> None:
        self._ddp = ddp
        self._loss = loss
        self._step_optimizer = OptimizerStep(optimizer)
        self._rates = rates
        self._clip = clip
        self._guard = guard
        self._call = call
        self._scale, self._multiplier = scale, 1.0
        self._clock = clock
        self._before_update = before_update
        # What a micro-batch counts is known when it has been run: of several, together, when all have.
        self._weighs_at_end = accumulates and loss.counts_terms and not loss.weightings and not loss.obeys_items
        self._weighs_first = accumulates and loss.counts_terms and bool(loss.weightings)
        self._kinds = [kind for _, kind, _ in loss.added(loss.nothing())]
        self._asks_ranks = loss.counts_terms and not self._weighs_at_end
        self._world_size = dist.get_world_size()
        self._device, self._is_accelerator = device, is_accelerator(device)
        self._may_count_nothing = loss.may_be_left_out(is_accelerator=self._is_accelerator)
        self._always_counts = not loss.weightings and not any(self._may_count_nothing)
        self._parameters = list(ddp.parameters())
        self._without_rows = without_rows
        self.totals = MetricSums(1, device, loss, metrics)

    def __call__(self, share: Share) -> None:
        """Zero, forward and backward of each micro-batch, unscale, finite?, clip, step, and the schedule's."""
        self._zero()
        self._guard.before_step()
        if self._scale is not None:
            self._multiplier = self._scale.of_each(self._world_size)
            self._ddp.expect_scale(self._multiplier)
        results = self._accumulate(share)
        with self._clock.optimizer:
            self._unscale()
            losses = [each.value for result in results for _, _, each in self._counted(result.loss)]
            verdict = self._judge_and_update(share, losses, lambda: self._run_alone(share))
        if verdict is not Verdict.SKIPPED:
            for result in results:
                self.totals.add(0, result.loss, result.answers)
                self.totals.metrics.add(*result.said)

    def explain_epoch(self) -> str:
        """Returns what there is to say of the epoch's steps beside its numbers, when the last one has been taken."""
        return self._guard.explain_epoch()

    def settle(self) -> None:
        """Waits until it is known whether the latest step was taken, as `FiniteGuard.settle`; all ranks call it."""
        self._guard.settle()

    def give_up(self) -> None:
        """As `FiniteGuard.give_up`."""
        self._guard.give_up()

    def _judge_and_update(
        self, share: Share, losses: Sequence[Tensor], again: Callable[[], Sequence[Tensor]]
    ) -> Verdict:
        """Takes the step where it may be taken. A late verdict is that of the next step: it raises."""
        if not self._guard.is_late:
            verdict = self._guard.verdict(share, losses, again)
            if verdict is Verdict.TAKEN:
                self._update(share)
            return verdict
        report = self._guard.report(share, losses, again, self._rates.undoable())
        step = None if self._before_update is not None else self._step_optimizer.unless(report.bad)
        if step is not None or report.is_good():  # to ask it is to wait for it
            self._update(share, step)
        return Verdict.TAKEN

    def _update(self, share: Share, step: Callable[[], object] | None = None) -> None:
        if self._before_update is not None:
            self._before_update(share.number)
        if self._clip is not None:
            self._clip(self._parameters)
        (step or self._step_optimizer)()
        self._rates.step()

    def _zero(self) -> None:
        for parameter in self._parameters:  # also those that the optimizer does not have: they would add up for ever
            parameter.grad = None

    def _accumulate(self, share: Share) -> list[Result]:
        """Makes the averaged gradients of the joined batch; returns what each micro-batch of this rank gave.

        Only the last backward averages, and with it all that was accumulated before.
        """
        results: list[Result] = []
        clock = self._clock
        if self._loss.gathers or self._without_rows is not None:
            rounds, fewest = self._most_and_fewest(len(share))
            if rounds != fewest:
                return self._accumulate_unevenly(share, rounds)
        items, divisors = self._counted_first(share)
        if share.rows == 0:
            with clock.backward:
                self._ddp.forward_without_batch()
                self._divisors_of(self._loss.nothing(), share, divisors)
                self._ddp.backward_without_batch()
        for batch in clock.data.each(share):
            batch.items = items
            is_last = len(results) == len(share) - 1
            with contextlib.nullcontext() if is_last else self._ddp.no_sync():
                with clock.forward:
                    results.append(self._forward(batch))
                with clock.backward:
                    loss = results[-1].loss
                    self._backward(loss, self._divisors_of(loss, share, divisors), is_last=is_last)
            share.ahead(clock.data)
        clock.communicated(clock.backward, self._ddp.seconds_communicated())
        if self._weighs_at_end:
            self._divide_by_weight(sum(result.loss.weight for result in results), share)
        return results

    def _accumulate_unevenly(self, share: Share, rounds: int) -> list[Result]:
        """As `_accumulate`, if ranks have different numbers of micro-batches, and all must run equally many.

        Because the loss gathers rows, or a layer such as SyncBatchNorm needs all ranks in each forward and backward. So
        gradients are averaged when all backwards are complete.

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
                    elif self._without_rows is not None:
                        self._ddp.expect_rows(0)
                        value = self._without_rows(self._ddp.forward)
                    else:
                        gather_nothing(self._loss.gathers, self._device)
                loss = self._loss.nothing() if batch is None else results[-1].loss
                known = self._divisors_of(loss, share, divisors)
                backward_alike(value if batch is None else self._to_average(loss, known), kept)
                share.ahead(self._clock.data)
        self._ddp.backward_without_batch()
        self._clock.communicated(self._clock.backward, self._ddp.seconds_communicated())
        if self._weighs_at_end:
            self._divide_by_weight(sum(result.loss.weight for result in results), share)
        return results

    def _most_and_fewest(self, count: int) -> tuple[int, int]:
        counts = torch.tensor([count, -count], device="cpu")
        dist.all_reduce(counts, dist.ReduceOp.MAX, group=runtime.cpu_group())
        most, fewest = counts.tolist()
        return most, -fewest

    def _run_alone(self, share: Share) -> list[Tensor]:
        """Makes this rank's own gradients of a share; returns its losses."""
        self._zero()
        losses = []
        apart = contextlib.nullcontext() if self._without_rows is None else self._without_rows.apart(self._ddp)
        with apart, gathering_alone():
            for batch in share:
                counted = self._counted(self._forward(batch).loss)
                for _, _, loss in counted:
                    self._scaled(loss.value).backward(retain_graph=loss is not counted[-1][2])
                    losses.append(loss.value.detach())
        return losses

    def _forward(self, batch: Batch) -> Result:
        self._ddp.expect_rows(batch.rows)
        output = self._call(self._ddp.forward, batch)
        loss = self._loss(output, batch)
        # Without the graph, which several micro-batches would keep together.
        measures = bool(self.totals.metrics)
        said = (map_output(Tensor.detach, output), batch.answers, batch.rows) if measures else (None, None, 0)
        return Result(loss, correct_of(output, batch.answers, self._loss), said)

    def _counted(self, loss: BatchLoss) -> list[tuple[int, float, BatchLoss]]:
        """Returns (number, factor, loss) of each loss that a micro-batch's loss adds up, if something in it counts.

        A mean over nothing, computed in the model, is 0 / 0: no factor, and no choice on the device, would clear the
        NaN in its gradients.
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
        """Returns what to call `backward` on, scaled; None: nothing in the loss counts."""
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

    def _unscale(self) -> None:
        if self._multiplier != 1:
            multiply_gradients(self._parameters, 1.0 / self._multiplier)

    def _divisors_of(self, loss: BatchLoss, share: Share, known: Sequence[Number] | None) -> Sequence[Number]:
        """Returns what the sum of all ranks' terms of each loss is divided by, in this backward."""
        if known is not None:
            return known
        if not self._asks_ranks:
            return self._divisors((), share)
        return self._divisors([each.weight for _, _, each in self._loss.added(loss)], share)

    def _divisors(self, weights: Sequence[Number], share: Share) -> list[Number]:
        """Returns the divisor of each loss, the same on every rank.

        Args:
            weights: What this rank has counted of each; empty: nothing needs to be known of it.
            share: Of this rank.
        """
        divisors: list[Number] = [1.0 if kind is Weighting.NOTHING else share.joined_rows for kind in self._kinds]
        if self._asks_ranks:
            places = [place for place, kind in enumerate(self._kinds) if kind is Weighting.TERMS]
            joined = self._sum_over_ranks([weights[place] for place in places], self._clock.backward)
            for place, weight in zip(places, joined, strict=True):
                divisors[place] = weight
        return divisors

    def _counted_first(self, share: Share, rounds: int = 0) -> tuple[Tensor | int | None, Sequence[Number] | None]:
        """Returns (items, divisors) of a step, if they are asked for before its first forward.

        Args:
            share: Of this rank.
            rounds: How many micro-batches each rank runs, if it has fewer; all that it has.
        """
        items: Tensor | int | None = None
        divisors: Sequence[Number] | None = None
        if self._loss.items is not None:
            count = sum(map(self._loss.items.count, share))
            (joined,) = self._sum_over_ranks([count], self._clock.forward)
            items = joined.long().clamp_(min=1) if isinstance(joined, Tensor) else max(int(joined), 1)
            divisors = [joined] if self._loss.obeys_items else None
        elif self._weighs_first:
            divisors = self._divisors(self._weights_of(share, rounds), share)
        return items, divisors

    def _weights_of(self, share: Share, rounds: int) -> list[Number]:
        """Returns what this rank counts of each loss in a share, by a forward of each micro-batch without gradients.

        Of several losses, each is divided by a weight of its own, which must be known before the first backward.
        """
        weights: list[Number] = [0.0] * len(self._kinds)
        with torch.no_grad(), generators_kept(self._device), gathering_alone():
            for batch in share:
                loss = self._loss(self._call(self._ddp.forward, batch), batch)
                for number, (_, _, each) in enumerate(self._loss.added(loss)):
                    weight = each.weight
                    stays = self._is_accelerator and isinstance(weight, Tensor)
                    weights[number] += _as_double(weight, self._device)[0] if stays else float(weight)
            for _ in range(rounds - len(share)):
                if self._without_rows is not None:
                    self._without_rows.forward(self._ddp.forward)
        self._guard.bring_back()
        return weights

    def _divide_by_weight(self, weight: Number, share: Share) -> None:
        """Divides by what all ranks have counted, instead of by the number of samples."""
        with self._clock.backward:
            (joined,) = self._sum_over_ranks([weight], self._clock.backward)
        multiply_gradients(self._parameters, _quotient(share.joined_rows, joined))

    def _sum_over_ranks(self, weights: Sequence[Number], within: Part) -> list[Number]:
        """Returns sums over ranks in float64; on an accelerator they stay there, so that the host need not wait."""
        stays = self._is_accelerator and (self._world_size == 1 or dist.get_backend() != "ring")
        if stays and self._world_size == 1 and not any(isinstance(each, Tensor) for each in weights):
            return list(weights)
        device = self._device if stays else torch.device("cpu")
        joined = torch.cat([_as_double(each, device) for each in weights])
        if self._world_size > 1 or not stays:
            began = time.perf_counter()
            dist.all_reduce(joined, group=dist.group.WORLD if stays else runtime.cpu_group())
            self._clock.communicated(within, time.perf_counter() - began)
        return [*joined.unbind()] if stays else joined.tolist()


def _as_double(number: Number, device: torch.device) -> Tensor:
    """Returns a number as shape (1,), without a copy to an accelerator, for which the host would wait."""
    if isinstance(number, Tensor):
        return number.detach().to(device, torch.float64, non_blocking=number.is_cpu).reshape(1)
    return torch.full((1,), number, dtype=torch.float64, device=device)


def _quotient(number: Number, divisor: Number) -> Number:
    """Returns number / divisor in float64, and 0 where the divisor is: on an accelerator without asking for it."""
    if not isinstance(divisor, Tensor):
        return number / divisor if divisor else 0.0
    # Of a number, `/` would be a product with 1 / divisor, which is rounded twice.
    above = number if isinstance(number, Tensor) else torch.tensor(number, dtype=torch.float64, device="cpu")
    return torch.div(above.double(), divisor).masked_fill_(divisor == 0, 0.0)


def _times(loss: Tensor, factor: Number) -> Tensor:
    """Returns loss * factor with the bits that a number as factor gives, also where that is a float64 tensor."""
    if not isinstance(factor, Tensor):
        return loss if factor == 1 else loss * factor
    wide = loss.float() if loss.dtype.itemsize == 2 else loss
    return (wide * factor.to(wide.dtype)).to(loss.dtype)


class Result(NamedTuple):
    """What a micro-batch gave: its loss, and what the model said; (output, targets, rows) where somebody measures."""

    loss: BatchLoss
    answers: Correct
    said: tuple[Any, Any, int]


class EvaluationStep:
    """Sums of each batch, without gradients.

    Args:
        model: In evaluation mode.
        loss: Of a batch.
        table_rows: How many different numbers their batches have, over all ranks.
        call: How the model is called.
        device: Where it computes.
        metrics: As `TrainingStep`.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, table_rows: int, call: ModelCall, device: torch.device, metrics: Metrics
    ) -> None:
        self._model = model
        self._loss = loss
        self._call = call
        self.totals = MetricSums(table_rows, device, loss, metrics)

    def __call__(self, batch: Batch) -> None:
        """Forward."""
        with torch.no_grad(), gathering_alone():
            output = self._call.without_graph(self._model, batch)
            self._loss.check_shapes(output, batch.targets)
            loss = self._loss(output, batch)
            self.totals.add(batch.number, loss, correct_of(output, batch.answers, self._loss))
            self.totals.metrics.add(output, batch.answers, batch.rows)


class PredictionStep:
    """Collects the outputs of batches, without gradients.

    Args:
        model: In evaluation mode.
        call: How it is called.
        loss: Of the fit: where the model computes it, that is no output.
    """

    def __init__(self, model: nn.Module, call: ModelCall, loss: Loss) -> None:
        self._model = model
        self._call = call
        self._loss = loss
        self._outputs: list[Tree] = []
        self._copies: list[HostCopy] = []

    @property
    def outputs(self) -> list[Tree]:
        """Outputs of all batches so far, on the CPU."""
        self._read_copies()
        return self._outputs

    def __call__(self, batch: Batch) -> None:
        """Forward. Outputs on an accelerator are read one batch later, when it computes with the next one.

        Raises:
            ConfigError: The model returns something else than tensors with a row per row, or not always of one kind.
        """
        with torch.no_grad(), gathering_alone():
            given = self._call.without_graph(self._model, batch, predicting=True)
        output = _outputs(self._loss.without_own(given), batch.rows)
        kind, first = form_of(output), form_of(self._outputs[0] if self._outputs else output)
        if kind != first:
            raise ConfigError(f"predict needs rows of one kind; the model returned {first}, then {kind}.")
        copies = [HostCopy(tensor.contiguous()) for tensor in tensors(output) if is_accelerator(tensor.device)]
        self._read_copies()
        self._outputs.append(output)
        self._copies = copies

    def _read_copies(self) -> None:
        """Replace the latest outputs by their copies on the host, in memory that is not pinned."""
        if self._copies:
            copies = iter(self._copies)
            self._copies = []
            self._outputs[-1] = map_tree(
                lambda tensor: next(copies).read().clone() if is_accelerator(tensor.device) else tensor,
                self._outputs[-1],
            )


def _outputs(output: Any, rows: int) -> Tree:
    """Returns a model's outputs, where they are: one, or several in a dictionary, a tuple or a list."""
    if isinstance(output, Tensor) and output.dim() > 0 and len(output) == rows:
        return output
    if isinstance(output, Mapping) and output:
        return {str(name): _outputs(part, rows) for name, part in output.items()}
    if isinstance(output, (tuple, list)) and output:
        parts = [_outputs(part, rows) for part in output]
        make: Callable[[list[Tree]], Tree] = getattr(output, "_make", type(output))  # a named tuple's own
        return make(parts)
    found = f"a tensor of shape {list(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
    raise ConfigError(
        "predict needs a model that returns a tensor with a row per row of X, or several in a dictionary, a tuple or a "
        f"list; for {rows} rows it returned {found}."
    )
