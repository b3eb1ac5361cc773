"""Updates that a step of the user's own makes by `self.optimize`, each with one optimizer.

Each optimizer's parameters are wrapped as a separate module: their gradients have their own buckets, and are
averaged while `backward(inputs=...)` runs. The wrapper of the whole model runs the step as its forward, which shares
the buffers; it averages the gradients of a loss that the step returns instead.

A rank without rows does not run the step. If there is one, the first rank broadcasts what the step does, in that step
only: each update, each evaluation of its loss, and the end. The ranks without rows join with zeros.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cyxtrain.checkpoint.format.names import plain_parameters
from cyxtrain.data.batches.batch import Share
from cyxtrain.environment import torch_compat
from cyxtrain.errors import CollectiveMismatchError, ConfigError, NonFiniteError, on_all_ranks, shortened, warn_together
from cyxtrain.metrics.logged import LoggedNumbers
from cyxtrain.metrics.weighting import cleared
from cyxtrain.optim.clipping import fill_gradients, make_clip, multiply_gradients
from cyxtrain.optim.optimizer_step import Closure, OptimizerStep
from cyxtrain.optim.optimizers import ONLY, described_name, parameters_of
from cyxtrain.optim.precision import Number, quotient, times
from cyxtrain.parallel import DistributedDataParallel, gathering_alone
from cyxtrain.parallel.layout import NUM_SIGNALS
from cyxtrain.parallel.sparse_gradients import makes_sparse_gradients
from cyxtrain.training.inputs.checked_data import ModelSetup
from cyxtrain.training.model.own_steps import (
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
from cyxtrain.world.world import World

_Result = TypeVar("_Result")
_CODE_BITS = 8
"""Signals by which ranks compare their calls of `optimize`: one for the first of a step, others for the optimizer."""
_END, _UPDATE, _EVALUATE = range(3)
"""What the first rank of a step broadcasts: the end; (an update, its optimizer's number, whether it has a closure);
(an evaluation, whether its loss is (sum, weight))."""


class Updates:
    """The updates of the steps of a fit; `ddp` is the wrapper of the whole model.

    Attributes:
        has_updated: Whether the running step, as far as it is known, has made any update.
        parts: What has been or will be optimized, by the optimizer's name.
        norms: Of the gradients that the updates of the running step have clipped.
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
        self._state, self._setup, self._ddp, self._logged = state, setup, ddp, logged
        self._world, self._ends_fit = ddp.world, ends_fit
        assert isinstance(setup.call, StepCall)
        self._call = setup.call
        self._names, self._device = [*state.rates], setup.placement.device
        self.parts: dict[str, _Part] = {}
        self.has_updated = False
        self._idle = set(self._names)
        self._signals: Sequence[float] = [0.0] * NUM_SIGNALS
        self._received: list[float] | None = None
        for name in self._names if self._call.optimizes else ():
            self._part(name)

    def exchange_signals(self, signals: Sequence[float]) -> Callable[[], list[float]]:
        """Send numbers with the next gradients, as `DistributedDataParallel.exchange_signals`."""
        received = self._ddp.exchange_signals(signals)
        self._signals, self._received = signals, None
        return lambda: received() if self._received is None else self._received

    def begin(self, share: Share, guard: FiniteGuard, transaction: StepTransaction, multiplier: float) -> None:
        """Begin a step; `guard`: of the whole model; `multiplier`: of losses before backward."""
        self._share, self._guard, self._transaction, self._multiplier = share, guard, transaction, multiplier
        self.has_updated, self._rows, self._is_last, self._calls = False, 0, True, 0
        self._verdicts: dict[str, list[Verdict]] = {}
        self.norms: list[Mapping[str, Tensor]] = []
        self._skipped = self._state.position.skipped
        self._leader = _leader(self._world, share, asks=self._call.optimizes)

    def run(self, forward: Callable[[], _Result], rows: int, *, is_last: bool) -> _Result:
        """Return what a forward returns that may make updates; `is_last`: of this rank in the step."""
        running = self._call.running
        self._rows, self._is_last, self._calls = rows, is_last, 0
        running.update = self._update
        try:
            result = forward()
        finally:
            running.update = None
        if is_last:
            self._tell(_END)
        return result

    def follow(self) -> None:
        """Take part in the updates of a step without a row on this rank."""
        while (call := self._tell(_END))[0] != _END:
            self.has_updated, self._calls = True, self._calls + 1
            self._step(self._part(self._names[call[1]]), None, retain_graph=False, has_closure=bool(call[2]))

    def finish(self) -> Verdict:
        """End a step that has made updates: update the loss scale, and step the schedules."""
        verdicts = [each for own in self._verdicts.values() for each in own]
        verdict = self._guard.end_updates(verdicts)
        self._idle -= self._verdicts.keys()
        self._state.position.set(skipped=self._skipped + 1 if Verdict.SKIPPED in verdicts else 0)
        for name, rates in self._state.rates.items():
            if Verdict.TAKEN in self._verdicts.get(name, [Verdict.TAKEN]):
                torch_compat.note_step(rates.optimizer)  # each schedule counts steps, also those without an update
                rates.step()
        self._ddp.forget()
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
        """Remove the hooks from the parameters; explain an error of the ring if ranks call `optimize` differently."""
        calls = self._calls_in(str(error)) if isinstance(error, CollectiveMismatchError) else {}
        for part in self.parts.values():
            part.ddp.close()
        if calls:
            raise _differing(calls) from error

    def _running_call(self, name: str) -> str:
        """Return the running call of `optimize` in words."""
        return f"{_called(name)} as call {self._calls} of step {self._state.position.step + 1}"

    def _calls_in(self, text: str) -> dict[int, str]:
        """Return what each rank did that an error of the ring names, in words; nothing if none called `optimize`."""
        names = {each: part.name for part in self.parts.values() for each in part.ddp.collectives}
        found: dict[int, str] = {}
        for rank, call in re.findall(r"rank (\d+) is in (\w+ #\d+(?: \(.*?\))?)", text):
            name = next((names[each] for each in names if each in call), None)
            own = name is not None and int(rank) == self._world.rank
            found[int(rank)] = f"was in {call}" if name is None else self._running_call(name) if own else _called(name)
        return found if any(_CALLED in each for each in found.values()) else {}

    def _tell(self, *message: int) -> list[int]:
        """Return what the leading rank does; without one, in a step in which all ranks have rows, the message."""
        if self._leader is None:
            return [*message]
        told = torch.tensor([*message, 0, 0][:3], device="cpu")
        found: list[int] = self._world.broadcast(told, self._leader).tolist()
        if self._share.rows and found[: len(message)] != [*message]:
            raise _differing({self._leader: self._told(found), self._world.rank: self._told(message)})
        return found

    def _told(self, message: Sequence[int]) -> str:
        """Return what a rank does that tells a message, in words."""
        if message[0] == _UPDATE:
            return self._running_call(self._names[message[1]])
        return "called it no more" if message[0] == _END else "had a loss of another form, a mean or (sum, weight)"

    def _part(self, name: str) -> _Part:
        """Return what is optimized under a name. All ranks call it."""
        if name not in self.parts:
            self.parts[name] = _Part(name, self._state, self._device, self._ddp, ends_fit=self._ends_fit)
        self.parts[name].owned.follow()
        return self.parts[name]

    def _update(self, loss: Any, name: str, retain_graph: bool) -> Tensor:
        """Update the parameters of an optimizer; return the loss, detached."""
        has_closure, self._calls, self.has_updated = callable(loss), self._calls + 1, True
        alone = what_needs_all_rows(self._calls, loss)
        if alone and (self._setup.num_micro_batches or 1) > 1:
            raise ConfigError(accumulation_excludes(alone))
        if has_closure and self._state.loss_scale is not None:
            raise ConfigError("self.optimize takes no closure with precision='fp16': use precision='bf16'.")
        if self._is_last:
            self._tell(_UPDATE, self._names.index(name), int(has_closure))
            return self._step(self._part(name), loss, retain_graph=retain_graph, has_closure=has_closure)
        part = self._part(name)
        with self._call.precision.suspended(), part.ddp.no_sync():
            return self._backward(part, loss, retain_graph=retain_graph)

    def _step(self, part: _Part, loss: Any, *, retain_graph: bool, has_closure: bool) -> Tensor:
        """Average the gradients of a loss, and step if they are finite; None: this rank has no rows."""
        evaluate = partial(self._evaluate, part, loss) if has_closure else None
        with self._call.precision.suspended():
            value = evaluate() if evaluate else self._backward(part, loss, retain_graph=retain_graph)
            if not part.owned.trained:  # all are frozen: by a callback, say
                self._verdicts.setdefault(part.name, []).append(Verdict.TAKEN)
                return value
            own = [] if self._own is None else [self._own]
            self._state.position.set(skipped=self._skipped)
            fill_gradients(part.owned.trained, part.owned)
            try:
                verdict = part.guard.verdict(self._share, own, partial(self._recompute_locally, part, own))
            except NonFiniteError:
                self._transaction.roll_back()
                raise
            self._verdicts.setdefault(part.name, []).append(verdict)
            if verdict is Verdict.TAKEN:
                if (before := self._state.callbacks.before_optimizer_step) is not None:
                    before(self._share.number)
                if part.clip is not None:
                    own_name = "" if part.name == ONLY else part.name
                    self.norms += [{own_name: norm} for norm in part.clip(part.owned.trained).values()]
                if evaluate is None:
                    part.step()
                else:
                    again = Closure(part.optimizer, self._logged.repeating()(evaluate), value)
                    part.optimizer.step(again)  # type: ignore[arg-type]
            part.owned.zero_grad()
        return value

    def _evaluate(self, part: _Part, closure: Callable[[], Any] | None) -> Tensor:
        """Return the loss of a closure over all ranks, and set the averaged gradients."""
        part.owned.zero_grad()
        part.ddp.forget()  # a line search may leave the finite
        loss = None
        if closure is not None:
            with self._call.precision.computing():
                loss = closure()
        return self._backward(part, loss, retain_graph=False, averages=True)

    def _backward(self, part: _Part, loss: Any, *, retain_graph: bool, averages: bool = False) -> Tensor:
        """Set the gradients of a loss, averaged unless micro-batches follow; return it, detached.

        `loss` is None if this rank has no rows. `averages`: return it over all ranks, as (sum, weight) always is.
        """
        ddp, world_size = part.ddp, self._world.size
        value, weight = (None, None) if loss is None else _trained_loss(loss)
        self._own = None if value is None else value.detach()
        has_weight = bool(self._tell(_EVALUATE, int(weight is not None))[1]) if self._is_last else False
        ddp.forward_without_batch()
        ddp.expect_scale(self._multiplier)
        code = self._names.index(part.name) + (self._calls == 1) * 2 ** (_CODE_BITS - 1)
        received = ddp.exchange_signals([*self._signals, *(float(code >> bit & 1) for bit in range(_CODE_BITS))])
        factor: Number = 0.0 if value is None else self._rows * world_size / self._share.global_rows
        shown = torch.zeros((), dtype=torch.float64, device=self._device) if self._own is None else self._own
        if averages or has_weight:
            mine = (shown, 0.0 if weight is None else weight) if has_weight else (shown * self._rows, self._rows)
            sums = sum_over_ranks(self._world, mine, self._world.device_of_sums(self._device))
            shown = torch.as_tensor(quotient(sums[0], sums[1]), dtype=torch.float64, device=self._device)
            factor = quotient(world_size, sums[1]) if has_weight else factor
        trained = part.owned.trained
        if not trained:
            return shown
        if value is not None and value.requires_grad:
            scaled = times(value, factor)
            ddp.watch(scaled)
            scaled = scaled if self._multiplier == 1 else scaled * self._multiplier
            scaled.backward(inputs=trained, retain_graph=retain_graph)
        if self._is_last:
            if ddp.awaits_backward or value is None or not value.requires_grad:
                ddp.backward_without_batch()
            numbers = received()
            self._received = [*map(max, self._received or self._signals, numbers)]
            if any(0.1 < each * world_size < world_size - 0.1 for each in numbers[NUM_SIGNALS:]):
                calls = self._world.gather(self._running_call(part.name))
                raise on_all_ranks(_differing(dict(enumerate(calls))))
            if self._multiplier != 1:
                multiply_gradients(trained, 1.0 / self._multiplier)
        return shown

    def _recompute_locally(self, part: _Part, own: list[Tensor]) -> list[Tensor]:
        """Set this rank's gradients of the running call of `optimize`, without averaging them; return its losses.

        The step runs again, up to that call. It does not if losses tell which rank is at fault.
        """
        part.owned.zero_grad()
        if not part.ddp.losses_are_finite():
            return own
        number, calls, losses, trained = self._calls, 0, list[Tensor](), part.owned.trained

        def update(loss: Any, name: str, retain_graph: bool) -> Tensor:
            nonlocal calls
            calls += 1
            value, weight = _trained_loss(loss() if callable(loss) else loss)
            if calls < number:
                return mean_of_loss(value, weight)
            losses.append(value.detach())
            found = torch.autograd.grad(value * self._multiplier, trained, allow_unused=True)
            for parameter, gradient in zip(trained, found, strict=True):
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            raise _ReachedError

        without_rows = self._setup.without_rows
        apart = contextlib.nullcontext() if without_rows is None else without_rows.using_running_statistics(self._ddp)
        with apart, gathering_alone(), self._logged.repeating():
            for batch in self._share:
                with contextlib.suppress(_ReachedError):
                    self._call.run_apart(batch, update)
        return losses


def make_updates(
    state: TrainingState, setup: ModelSetup, ddp: DistributedDataParallel, logged: LoggedNumbers, *, ends_fit: bool
) -> Updates | None:
    """Return what the steps of the user's own may call; None: there are none."""
    return Updates(state, setup, ddp, logged, ends_fit=ends_fit) if isinstance(setup.call, StepCall) else None


def _trained_loss(loss: Any) -> tuple[Tensor, Any]:
    """Return (value, None) of a mean over rows, or (sum, weight), where the sum is 0 if the weight is."""
    value, weight = checked_loss(loss)
    if weight is not None:
        value = cleared(value, weight)
    return value, weight


class _Owned(nn.Module):
    """The parameters of an optimizer, with their names in the model; `follow` those that callbacks add to it."""

    def __init__(self, trained: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self._parts = (trained, optimizer)  # in a tuple: not a module of this one
        self.follow()

    def follow(self) -> None:
        trained, optimizer = self._parts
        wanted, own = [*map(id, parameters_of(optimizer))], torch_compat.own_parameters(self)
        if sorted(wanted) != sorted(map(id, own.values())):
            own.clear()
            own.update({name: each for name, each in plain_parameters(trained) if id(each) in wanted})

    @property
    def trained(self) -> list[nn.Parameter]:
        return [each for each in self.parameters() if each.requires_grad]


class _Wrapper(DistributedDataParallel):
    """Averages the gradients of an update, and compares the calls of the ranks."""

    num_signals = NUM_SIGNALS + _CODE_BITS


class _Part:
    """What `self.optimize` needs of one optimizer."""

    def __init__(
        self, name: str, state: TrainingState, device: torch.device, ddp: DistributedDataParallel, *, ends_fit: bool
    ) -> None:
        self.name, self.optimizer, config = name, state.optimizers[name], ddp.config
        self.owned = _Owned(ddp.module, self.optimizer)
        known = {id(parameter) for parameter in parameters_of(self.optimizer)}
        sparse = [own for own, each in makes_sparse_gradients(ddp.module).items() if id(each) in known]
        if sparse or config.compression == "powersgd":
            what = f"the sparse gradients of {shortened(sparse)}" if sparse else "compression='powersgd'"
            remedy = "sparse=False" if sparse else "compression='bf16', or none"
            raise ConfigError(f"self.optimize does not average {what}: use {remedy}.")
        # An update may use a part of the parameters, and those of this optimizer are the same on all ranks already.
        self.ddp = _Wrapper(self.owned, dataclasses.replace(config, broadcast_parameters=False))
        part = f", {described_name(name)}"
        self.guard = FiniteGuard(self.ddp, state, device, StepTransaction(), ends_fit=ends_fit, part=part)
        self.step = OptimizerStep(self.optimizer)
        self.clip = make_clip(state.config, {name: self.optimizer})


class _ReachedError(Exception):
    """Ends a step that runs again, at the call of `optimize` that is examined."""


_CALLED = "called self.optimize"


def _called(name: str) -> str:
    return _CALLED if name == ONLY else f"{_CALLED}(optimizer={name!r})"


def _differing(calls: Mapping[int, str]) -> CollectiveMismatchError:
    """Return the error for ranks that call `optimize` differently; `calls`: in words, by rank."""
    (first, what), *others = sorted(calls.items())
    rank, other = next(((rank, other) for rank, other in others if other != what), (first, what))
    return CollectiveMismatchError(
        f"train_step does not call self.optimize alike on all ranks: rank {rank} {other}, and rank {first} {what}. All "
        "ranks must make the same calls in the same order: decide by what they share, such as self.step, not by a "
        "rank's own batch, loss or random numbers.",
        rank=rank,
        during="train_step",
    )


def _leader(world: World, share: Share, *, asks: bool) -> int | None:
    """Return the first rank with rows if some rank has none; otherwise None. All ranks call it.

    Where each rank has its own data, the ranks ask each other, if the step makes updates at all.
    """
    if share.count_ranks is not None or not asks:
        return 0 if share.count_ranks is not None and share.count_ranks() < world.size else None
    rank = world.rank if share.rows else world.size
    found = torch.tensor([rank, int(share.rows > 0)], device="cpu")
    world.reduce(found, dist.ReduceOp.MIN)
    return None if found[1] else int(found[0])
