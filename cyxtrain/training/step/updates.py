"""Updates that a user's own step makes by `self.optimize`, each with one optimizer.

Each optimizer's parameters are wrapped as a separate module: their gradients have their own buckets, and are
averaged while `backward(inputs=...)` runs. The wrapper of the whole model runs the step as its forward, which shares
the buffers; it averages the gradients of a loss that the step returns instead.

A rank without rows does not run the step: it joins the updates of the others with zeros (`update_calls.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from cyxtrain.checkpoint.format.names import plain_parameters
from cyxtrain.data.batches.batch import Share
from cyxtrain.environment import torch_compat
from cyxtrain.errors import CollectiveMismatchError, ConfigError, NonFiniteError, shortened, warn_together
from cyxtrain.metrics.logged import LoggedNumbers
from cyxtrain.metrics.weighting import cleared
from cyxtrain.optim.clipping import fill_gradients, make_clip, multiply_gradients
from cyxtrain.optim.optimizer_step import Closure, OptimizerStep
from cyxtrain.optim.optimizers import ONLY, described_name, parameters_of
from cyxtrain.optim.precision import Number, quotient, times
from cyxtrain.parallel import DistributedDataParallel, gathering_alone
from cyxtrain.parallel.layout import NUM_SIGNALS
from cyxtrain.parallel.sparse_gradients import makes_sparse_gradients
from cyxtrain.parallel.synchronization import Synchronization
from cyxtrain.training.inputs.checked_data import ModelSetup
from cyxtrain.training.model.own_steps import (
    SLICES_EXCLUDE_UPDATES,
    StepCall,
    accumulation_excludes,
    checked_loss,
    mean_of_loss,
    what_needs_all_rows,
)
from cyxtrain.training.state import TrainingState
from cyxtrain.training.step.loss_division import sum_over_ranks
from cyxtrain.training.step.nonfinite import FiniteGuard, Verdict
from cyxtrain.training.step.transaction import StepTransaction
from cyxtrain.training.step.update_calls import CODE_BITS, UpdateCalls, called

_Result = TypeVar("_Result")


class Updates:
    """The updates of the steps of a fit; `ddp` is the wrapper of the whole model.

    Attributes:
        has_updated: Whether the running step, as far as it is known, has made any update.
        parts: The parts of the model that are optimized, by the optimizer's name.
        norms: Of the gradients that the updates of the running step have clipped.
        received: For each signal, a number above 0 if any rank gave it with an update of the step; None: no update.
    """

    def __init__(
        self,
        state: TrainingState,
        setup: ModelSetup,
        ddp: DistributedDataParallel,
        logged: LoggedNumbers,
        *,
        ends_fit: bool,
    ) -> None:
        self._state = state
        self._setup = setup
        self._ddp = ddp
        self._world = ddp.world
        self._device = setup.placement.device
        self._logged = logged
        self._ends_fit = ends_fit
        assert isinstance(setup.call, StepCall)
        self._call = setup.call
        self._names = [*state.rates]
        self._calls = UpdateCalls(ddp.world, state, self._names)
        self.parts: dict[str, _OptimizedPart] = {}
        self.has_updated = False
        self._idle = set(self._names)
        self._accumulating: dict[str, Synchronization] = {}  # of updates that have not averaged gradients yet
        self.received: Sequence[float] | None = None
        if self._call.optimizes:
            for name in self._names:
                self._part(name)

    def begin(self, share: Share, guard: FiniteGuard, transaction: StepTransaction, sync: Synchronization) -> None:
        """Begin a step; `guard`, `sync`: of the whole model; each update sends the signals too."""
        self._share = share
        self._guard = guard
        self._transaction = transaction
        self._multiplier = sync.scale
        self._signals = sync.signals or [0.0] * NUM_SIGNALS
        self.received = None
        self._accumulating.clear()
        self.has_updated = False
        self._rows = 0
        self._is_last = True
        self._verdicts: defaultdict[str, list[Verdict]] = defaultdict(list)
        self.norms: list[Mapping[str, Tensor]] = []
        self._skipped = self._state.position.skipped
        # With virtual ranks no step may update: ranks without rows have nothing to follow.
        if not self._ddp.slices.is_virtual:
            self._calls.begin(share, asks=self._call.optimizes)

    def run(self, forward: Callable[[], _Result], rows: int, *, is_last: bool) -> _Result:
        """Return the result of a forward that may make updates; `is_last`: of this rank in the step."""
        running = self._call.running
        self._rows = rows
        self._is_last = is_last
        self._calls.number = 0
        running.update = self._update
        try:
            result = forward()
        finally:
            running.update = None
        if is_last:
            self._calls.tell_end()
            self._check_averaged()
        return result

    def _check_averaged(self) -> None:
        """Refuse a step that has called `optimize` in a micro-batch, but not in its last one."""
        if self._accumulating:
            name = next(iter(self._accumulating))
            raise ConfigError(
                f"train_step {called(name)} in a micro-batch of step {self._state.position.step + 1}, and not in the "
                f"last one, in which the gradients of all {self._setup.num_micro_batches} are averaged: call it in "
                "every micro-batch, or set accumulation_steps=1."
            )

    def follow(self) -> None:
        """Take part in the updates of a step without a row on this rank."""
        for name, has_closure in self._calls.followed():
            self.has_updated = True
            self._step(self._part(name), None, retain_graph=False, has_closure=has_closure)

    def finish(self) -> Verdict:
        """End a step that has made updates: update the loss scale, and step the schedules."""
        verdicts = [*chain.from_iterable(self._verdicts.values())]
        verdict = self._guard.end_updates(verdicts)
        self._idle -= self._verdicts.keys()
        skipped = self._skipped + 1 if Verdict.SKIPPED in verdicts else 0
        self._state.position.set(skipped=skipped)
        for name, rates in self._state.rates.items():
            if Verdict.TAKEN in self._verdicts.get(name, [Verdict.TAKEN]):
                # Each schedule counts steps, also those without an update.
                torch_compat.note_step(rates.optimizer)
                rates.step()
        return verdict

    def warn_of_idle(self) -> None:
        """Warn once of optimizers that no update of the fit has used yet, if others were used."""
        if 0 < len(self._idle) < len(self._names):
            warn_together(
                f"train_step has not called self.optimize(..., {min(self._idle)!r}) in this epoch: the parameters "
                f"of {', '.join(map(repr, sorted(self._idle)))} do not change."
            )
            self._idle.clear()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Leave the gradients of a loss that the step returns to the wrapper of the whole model.

        That averages when it is asked to: hooks of a parameter run for the wrapper that was made last.
        """
        with contextlib.ExitStack() as stack:
            for part in self.parts.values():
                stack.enter_context(part.ddp.suspended())
            yield

    def seconds_communicated(self) -> float:
        """Return how long this rank has averaged gradients in updates since the last call."""
        return sum(part.ddp.seconds_communicated() for part in self.parts.values())

    def close(self, error: BaseException | None) -> None:
        """Remove the hooks from the parameters; explain an error if ranks call `optimize` differently."""
        explained: CollectiveMismatchError | None = None
        if isinstance(error, CollectiveMismatchError):
            explained = self._calls.explain(error, {name: part.ddp.collectives for name, part in self.parts.items()})
        for part in self.parts.values():
            part.ddp.close()
        if explained is not None:
            raise explained from error

    def _part(self, name: str) -> _OptimizedPart:
        """Return the part that an optimizer has, as it is now. All ranks call it."""
        if name not in self.parts:
            self.parts[name] = _OptimizedPart(name, self._state, self._device, self._ddp, ends_fit=self._ends_fit)
        part = self.parts[name]
        part.module.refresh()
        return part

    def _update(self, loss: Any, name: str, retain_graph: bool) -> Tensor:
        """Update the parameters of an optimizer; return the loss, detached."""
        has_closure = callable(loss)
        if self._ddp.slices.is_virtual:  # the dry run's step did not
            raise ConfigError(f"virtual_ranks is set, and in step {self._share.number + 1} {SLICES_EXCLUDE_UPDATES}.")
        self._calls.number += 1
        self.has_updated = True
        needs_all_rows = what_needs_all_rows(self._calls.number, loss)
        if needs_all_rows and self._setup.num_micro_batches > 1:
            raise ConfigError(accumulation_excludes(needs_all_rows))
        if has_closure and self._state.loss_scale is not None:
            raise ConfigError("self.optimize takes no closure with precision='fp16': use precision='bf16'.")
        if self._is_last:
            self._calls.tell_update(name, has_closure=has_closure)
            return self._step(self._part(name), loss, retain_graph=retain_graph, has_closure=has_closure)
        part = self._part(name)
        with self._call.precision.suspended(), part.ddp.no_sync():
            return self._backward(part, loss, retain_graph=retain_graph)

    def _step(self, part: _OptimizedPart, loss: Any, *, retain_graph: bool, has_closure: bool) -> Tensor:
        """Average a loss's gradients, and step if they are finite; `loss`: None if this rank has no rows."""
        evaluate = partial(self._evaluate, part, loss) if has_closure else None
        with self._call.precision.suspended():
            value = evaluate() if evaluate else self._backward(part, loss, retain_graph=retain_graph)
            # A callback may have frozen all of them.
            if not part.module.trained:
                self._verdicts[part.name].append(Verdict.TAKEN)
                return value
            verdict = self._check(part)
            self._verdicts[part.name].append(verdict)
            if verdict is Verdict.TAKEN:
                self._apply(part, value, evaluate)
            part.module.zero_grad()
        return value

    def _check(self, part: _OptimizedPart) -> Verdict:
        """Return the verdict on averaged gradients; raise NonFiniteError with the whole step rolled back."""
        losses = [] if self._own_loss is None else [self._own_loss]
        # Several updates of a step that are skipped count as one.
        self._state.position.set(skipped=self._skipped)
        fill_gradients(part.module.trained, part.module)
        try:
            return part.guard.verdict(self._share, losses, partial(self._recompute_locally, part, losses))
        except NonFiniteError:
            self._transaction.roll_back()
            raise

    def _apply(self, part: _OptimizedPart, value: Tensor, evaluate: Callable[[], Tensor] | None) -> None:
        """Clip the averaged gradients, and step; `evaluate` computes loss and gradients again, for a closure."""
        before_step = self._state.callbacks.before_optimizer_step
        if before_step is not None:
            before_step(self._share.number)
        if part.clip is not None:
            own_name = "" if part.name == ONLY else part.name
            for norm in part.clip(part.module.trained).values():
                self.norms.append({own_name: norm})
        if evaluate is None:
            part.step()
            return
        closure = Closure(part.optimizer, self._logged.repeating()(evaluate), value)
        part.optimizer.step(closure)  # type: ignore[arg-type]

    def _evaluate(self, part: _OptimizedPart, closure: Callable[[], Any] | None) -> Tensor:
        """Return the loss of a closure over all ranks, and set the averaged gradients."""
        part.module.zero_grad()
        loss = None
        if closure is not None:
            with self._call.precision.computing():
                loss = closure()
        return self._backward(part, loss, retain_graph=False, averages=True)

    def _backward(self, part: _OptimizedPart, loss: Any, *, retain_graph: bool, averages: bool = False) -> Tensor:
        """Set the gradients of a loss, averaged unless micro-batches follow; return it, detached.

        `loss` is None if this rank has no rows. `averages`: return it over all ranks, as (sum, weight) always is.
        """
        value: Tensor | None = None
        weight = None
        if loss is not None:
            value, weight = _trained_loss(loss)
        self._own_loss = None if value is None else value.detach()
        has_weight = self._is_last and self._calls.agree_on_weight(weight is not None)
        sync = self._sync_of(part)
        part.ddp.share_buffers_once()
        shown, factor = self._shown_and_factor(weight, has_weight=has_weight, averages=averages)
        # An optimizer whose parameters are all frozen takes no part.
        if part.module.trained:
            if value is not None:
                self._accumulate(part, times(value, factor), sync, retain_graph=retain_graph)
            if self._is_last:
                self._average(part, sync)
        return shown

    def _accumulate(self, part: _OptimizedPart, loss: Tensor, sync: Synchronization, *, retain_graph: bool) -> None:
        """Add up the gradients of a loss; the last ones of a step are averaged while they are computed."""
        sync.watch(loss.to(self._device))
        if loss.requires_grad:
            if self._multiplier != 1:
                loss = loss * self._multiplier
            loss.backward(inputs=part.module.trained, retain_graph=retain_graph)

    def _average(self, part: _OptimizedPart, sync: Synchronization) -> None:
        """Average what has accumulated, unless backward has done so; take what ranks have sent with it."""
        if not sync.is_sent:
            part.ddp.average_accumulated()
        self._calls.check_alike(part.name, sync.received[NUM_SIGNALS:])
        self.received = [*map(max, self.received or self._signals, sync.received)]
        if self._multiplier != 1:
            multiply_gradients(part.module.trained, 1.0 / self._multiplier)

    def _sync_of(self, part: _OptimizedPart) -> Synchronization:
        """Return what the gradients of an update are sent with: one for all micro-batches of a step."""
        sync = self._accumulating.pop(part.name, None)
        if sync is None:
            sync = part.ddp.begin_sync(self._multiplier)
        # Ranks compare their calls with the gradients themselves, without another message.
        sync.signals = [*self._signals, *self._calls.signals_of(part.name)]
        if not self._is_last:
            self._accumulating[part.name] = sync
        return sync

    def _shown_and_factor(self, weight: Any, *, has_weight: bool, averages: bool) -> tuple[Tensor, Number]:
        """Return the loss to show, and its factor before backward; N cancels the averaging over N ranks."""
        num_ranks = self._world.size
        factor: Number = 0.0
        if self._own_loss is None:
            shown = torch.zeros((), dtype=torch.float64, device=self._device)
        else:
            shown = self._own_loss
            factor = self._rows * num_ranks / self._share.global_rows
        if has_weight:
            own = (shown, 0.0 if weight is None else weight)
        elif averages:
            own = (shown * self._rows, self._rows)
        else:
            return shown, factor
        total, divisor = sum_over_ranks(self._world, own, self._world.device_of_sums(self._device))
        shown = torch.as_tensor(quotient(total, divisor), dtype=torch.float64, device=self._device)
        if has_weight:
            factor = quotient(num_ranks, divisor)
        return shown, factor

    def _recompute_locally(self, part: _OptimizedPart, own_losses: list[Tensor]) -> list[Tensor]:
        """Set this rank's gradients of the running call of `optimize`, not averaged; return its losses.

        The step runs again, up to that call. It does not if losses tell which rank is at fault.
        """
        part.module.zero_grad()
        if not part.ddp.losses_are_finite():
            return own_losses
        examined_call = self._calls.number
        calls = 0
        losses: list[Tensor] = []
        trained = part.module.trained

        def update(loss: Any, name: str, retain_graph: bool) -> Tensor:
            nonlocal calls
            calls += 1
            value, weight = _trained_loss(loss() if callable(loss) else loss)
            if calls < examined_call:
                return mean_of_loss(value, weight)
            losses.append(value.detach())
            found = torch.autograd.grad(value * self._multiplier, trained, allow_unused=True)
            for parameter, gradient in zip(trained, found, strict=True):
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            raise _ReachedError

        with contextlib.ExitStack() as stack:
            if self._setup.without_rows is not None:
                stack.enter_context(self._setup.without_rows.using_running_statistics(self._ddp))
            stack.enter_context(gathering_alone())
            stack.enter_context(self._logged.repeating())
            for batch in self._share:
                with contextlib.suppress(_ReachedError):
                    self._call.run_apart(batch, update)
        return losses


def make_updates(
    state: TrainingState, setup: ModelSetup, ddp: DistributedDataParallel, logged: LoggedNumbers, *, ends_fit: bool
) -> Updates | None:
    """Return the updates that a user's own step may make; None: the step is the built-in one."""
    if not isinstance(setup.call, StepCall):
        return None
    return Updates(state, setup, ddp, logged, ends_fit=ends_fit)


def _trained_loss(loss: Any) -> tuple[Tensor, Any]:
    """Return (value, None) of a mean over rows, or (sum, weight), where the sum is 0 if the weight is."""
    value, weight = checked_loss(loss)
    if weight is not None:
        value = cleared(value, weight)
    return value, weight


class _OptimizerParameters(nn.Module):
    """The parameters of an optimizer, with their names in the model; `refresh` follows its groups."""

    def __init__(self, trained: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        # In a tuple, so that PyTorch does not register the model as a part of this module.
        self._sources = (trained, optimizer)
        self.refresh()

    def refresh(self) -> None:
        trained, optimizer = self._sources
        wanted = [*map(id, parameters_of(optimizer))]
        own = torch_compat.own_parameters(self)
        if sorted(wanted) != sorted(map(id, own.values())):
            own.clear()
            own.update({name: each for name, each in plain_parameters(trained) if id(each) in wanted})

    @property
    def trained(self) -> list[nn.Parameter]:
        return [each for each in self.parameters() if each.requires_grad]


class _Wrapper(DistributedDataParallel):
    """Averages the gradients of an update, and compares the calls of the ranks."""

    num_signals = NUM_SIGNALS + CODE_BITS


class _OptimizedPart:
    """The parameters of one optimizer, wrapped, and how their gradients are checked and applied."""

    def __init__(
        self, name: str, state: TrainingState, device: torch.device, ddp: DistributedDataParallel, *, ends_fit: bool
    ) -> None:
        self.name = name
        self.optimizer = state.optimizers[name]
        self.module = _OptimizerParameters(ddp.module, self.optimizer)
        _check_averaged(ddp, self.optimizer)
        # An update may use a part of the parameters, and all ranks have the same ones already.
        self.ddp = _Wrapper(self.module, dataclasses.replace(ddp.config, broadcast_parameters=False))
        self.guard = FiniteGuard(
            self.ddp, state, device, StepTransaction(), ends_fit=ends_fit, part=f", {described_name(name)}"
        )
        self.step = OptimizerStep(self.optimizer)
        self.clip = make_clip(state.config, {name: self.optimizer})


def _check_averaged(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """Refuse gradients that `self.optimize` cannot average."""
    known = {id(parameter) for parameter in parameters_of(optimizer)}
    sparse = [name for name, each in makes_sparse_gradients(ddp.module).items() if id(each) in known]
    if sparse:
        raise ConfigError(
            f"self.optimize does not average the sparse gradients of {shortened(sparse)}: use sparse=False."
        )
    if ddp.config.compression == "powersgd":
        raise ConfigError("self.optimize does not average compression='powersgd': use compression='bf16', or none.")


class _ReachedError(Exception):
    """Ends a step that runs again, at the call of `optimize` that is examined."""
