"""The same module on every rank, its gradients averaged during backward."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cyxtrain.config import DDPConfig
from cyxtrain.config.settings import require, unknown_name
from cyxtrain.environment import torch_compat
from cyxtrain.errors import ConfigError
from cyxtrain.parallel.bucket import GradientObserver
from cyxtrain.parallel.compression import gathered_state, load_state
from cyxtrain.parallel.consistency.broadcasting import SharedBuffers, share_tensors, tensors_of
from cyxtrain.parallel.consistency.replicas import check_replicas, check_same_module
from cyxtrain.parallel.finite import all_finite, values_of
from cyxtrain.parallel.layout import NUM_SIGNALS
from cyxtrain.parallel.reducer import Reducer, trained_parameters
from cyxtrain.parallel.step_report import Report
from cyxtrain.parallel.synchronization import Synchronization
from cyxtrain.world import runtime
from cyxtrain.world.slices import Slices
from cyxtrain.world.world import World

ALL_SLICES = -1
"""In place of the number of a slice: the average over all of them."""


class DistributedDataParallel(nn.Module):
    """Wraps a module, so that training it on N ranks equals training it once on all their samples.

    Parameters and buffers, frozen ones too, start as rank 0's. Gradients, sparse ones too, are averaged while backward
    runs; buffers are shared before each step, as in `sync_buffers`. Parameters that are added, replaced, unfrozen or
    converted later are averaged from the next forward on. `copy.deepcopy` returns a copy of the bare module. In a world
    of one it is inert: no hook, no copy.

    Args:
        model: The module. It is not copied: training the wrapper trains it.
        config: How gradients are exchanged.
        device_ids: As in PyTorch; at most one device, where the module must be already.
        output_device: As in PyTorch; ignored, outputs stay where they are.
        **fields: Fields of `DDPConfig`, which take precedence over `config`.

    Raises:
        NotInitializedError: Before `cyxtrain.init()`.
        ConfigError: A setting is wrong, or the ranks have different modules.
    """

    num_signals = NUM_SIGNALS

    def __init__(
        self,
        model: nn.Module,
        config: DDPConfig | None = None,
        *,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        **fields: Any,
    ) -> None:
        super().__init__()
        self.config = _merged(config, fields)
        require(isinstance(model, nn.Module), f"model must be a torch.nn.Module, got {type(model).__name__}.")
        if device_ids is not None and len(device_ids) > 1:
            raise ConfigError(f"device_ids={list(device_ids)}: one process drives one device. Start a rank per device.")
        self.module = model
        runtime.require_world("DistributedDataParallel")
        self._world = world = runtime.join_for_all()  # that of before may be invalid, such as after a fork
        trained_parameters(model)  # refuses lazy modules
        self._reducer: Reducer | None = None
        self._sharing = SharedBuffers(model)
        self._latest = _StepState()
        self._slices: Slices | None = None  # None: one per rank
        if world.size > 1:
            torch_compat.require_end_of_backward()
            check_same_module(model, world)
            if self.config.broadcast_parameters:
                share_tensors(world, [*model.parameters(), *model.buffers()], self._names)
            self._reducer = Reducer(model, self.config, world, self.num_signals)

    def use_slices(self, slices: Slices) -> None:
        """Average the gradients of slices from now on, with the same bits on any number of ranks. All ranks call it.

        Each backward outside `no_sync` ends a slice, as does `average_accumulated`; this rank's last one averages.

        Args:
            slices: Those of this rank, the same number of them in all on every rank.
        """
        if slices == self._slices:
            return
        torch_compat.require_end_of_backward()
        self._slices = slices
        reducer = Reducer(self.module, self.config, self.world, self.num_signals, slices)
        if self._reducer is not None:
            reducer.take_over(self._reducer)
        self._reducer = reducer

    def observe(self, observer: GradientObserver | None) -> None:
        """Let `observer` see gradients from now on, those of this rank's slices as they are added up; None: nobody.

        A world of one without virtual ranks adds nothing up: there it sees the averages only.
        """
        self._latest.observer = observer
        if self._reducer is not None:
            self._reducer.observe(observer)

    def show_averages(self) -> None:
        """Show the averaged gradients to the observer, if there is one."""
        observer = self._latest.observer
        if observer is None:
            return
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None:
                observer(ALL_SLICES, name, parameter.grad)

    @property
    def slices(self) -> Slices:
        """The slices of a step, of which this rank has some; by default one per rank."""
        return self._slices or Slices.of(self.world)

    @property
    def world(self) -> World:
        """The ranks over which gradients are averaged; of a world that the program has joined since then, as many."""
        found = runtime.following(self._world)
        if found is not self._world:  # to set an attribute of a module takes long
            self._world = found
        return found

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        """Call the module, and prepare backward to average gradients.

        Raises:
            ConfigError: The world has another size than when the model was wrapped, or ranks have changed the module in
                different ways.
        """
        if runtime.is_initialized():
            runtime.following(self._world)  # refuses one of another size
        averages = self._reducer is not None and torch.is_grad_enabled()
        if averages:
            self._prepare()
        output = self.module(*inputs, **named_inputs)
        if averages and self._reducer is not None:
            self._reducer.record_forward()
        given = _first_tensor(inputs[0] if len(inputs) == 1 else (inputs, named_inputs))
        self._latest.input = _reference(given)
        self._latest.output = _reference(output)
        if self._reducer is not None and self.training:
            self._count_rows(given)
        return output

    def expect_rows(self, rows: int) -> None:
        """Set how many `rows` the next forward has; by default, those of its first tensor argument."""
        self._latest.expected_rows = rows

    def _count_rows(self, given: Tensor | None) -> None:
        rows = self._latest.expected_rows
        self._latest.expected_rows = None
        if rows is None:
            has_rows = given is not None and given.dim() > 0
            rows = len(given) if given is not None and has_rows else 1
        self._latest.rows += rows

    @property
    def buffer_rows(self) -> int:
        """Rows of this rank's training forwards since buffers were shared: its weight in their mean."""
        return self._latest.rows

    @buffer_rows.setter
    def buffer_rows(self, rows: int) -> None:
        self._latest.rows = rows

    def backward(self, t: Tensor) -> Tensor | None:
        """Accumulate gradients locally; `sync_gradients` averages them.

        Args:
            t: The loss, if it has a graph; otherwise the gradient of the last output, of its shape.

        Returns:
            The gradient of the last input, if that is a leaf that requires one; otherwise None.

        Raises:
            ConfigError: `t` is a gradient, and the last output was freed.
        """
        with self.no_sync():
            if t.requires_grad:
                t.backward()
            else:
                output = self._latest.output()
                if output is None:
                    raise ConfigError("backward(gradient) needs the output of the last forward: keep it in a variable.")
                output.backward(t)
        source = self._latest.input()
        return source.grad if source is not None and source.is_leaf else None

    def sync_gradients(self) -> dict[str, Tensor]:
        """Average over ranks what has accumulated; calling it twice changes nothing.

        Cost: an all_reduce of one number, which tells whether any rank has accumulated something; then the gradients.

        Returns:
            The gradient of each parameter that has one, by name.
        """
        if self._reducer is not None:
            self._follow_module(tensors_of(self.module)[0])
            world = self.world
            unsynced = torch.tensor([int(self._reducer.unsynced)], device="cpu")
            if world.reduce(unsynced, dist.ReduceOp.MAX).item():
                self._reducer.synchronize(world)
        return {name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}

    def update_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """Average what is not averaged yet, step the `optimizer` and clear the gradients."""
        self.sync_gradients()
        optimizer.step()
        optimizer.zero_grad()

    def share_buffers_once(self) -> None:
        """Share the buffers of a step as its first forward does; later ones share none until gradients are averaged.

        So a rank without samples joins the first forward of the others.
        """
        self._prepare()
        if self._reducer is not None:
            self._reducer.next_sync.has_shared_buffers = True

    def average_accumulated(self, *, others_run_backward: bool = True) -> None:
        """Average what has accumulated, without a backward of this rank that does; what has not accumulated is zero.

        Args:
            others_run_backward: Whether other ranks average by a backward, which refuses parameters that are unused:
                then all ranks do. False if all ranks call this method.
        """
        if self._reducer is not None:
            is_absent = not self._reducer.unsynced
            self._reducer.synchronize(self.world, absent=is_absent, refuses_unused=others_run_backward)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate locally within; the first backward outside averages everything."""
        if self._reducer is None:
            yield
            return
        before = self._reducer.held
        self._reducer.held = True
        try:
            yield
        finally:
            self._reducer.held = before

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Leave the module to another wrapper within, which averages its gradients."""
        before = self._latest.is_suspended
        self._latest.is_suspended = True
        try:
            with self.no_sync():
                yield
        finally:
            self._latest.is_suspended = before
            if self._reducer is not None:
                self._reducer.unsynced = False

    def begin_sync(self, scale: float = 1.0, signals: Sequence[float] = ()) -> Synchronization:
        """Begin a synchronisation: what is accumulated and watched, and was not averaged, is discarded.

        All ranks call it. Changes of the module are followed here, as ranks may run different numbers of forwards.

        Args:
            scale: What the gradients are multiplied by, the same on every rank.
            signals: Of this rank, `num_signals` of them or none, each 0 or 1.
        """
        if self._reducer is not None:
            self._follow_module(tensors_of(self.module)[0])
        return self._new_sync(scale, signals)

    def discard_sync(self) -> None:
        """Discard what is accumulated and watched, and was not averaged."""
        self._new_sync(1.0, ())

    def _new_sync(self, scale: float, signals: Sequence[float]) -> Synchronization:
        sync = Synchronization(scale, signals)
        self._latest.sync = sync
        if self._reducer is None:
            sync.complete(1.0, lambda: sync.signals)
        else:
            self._reducer.next_sync = sync
            self._reducer.discard()
        return sync

    @property
    def collectives(self) -> list[str]:
        """What errors of the ring call the collectives that average gradients."""
        return [] if self._reducer is None else self._reducer.collectives

    def received(self) -> list[float]:
        """Return, for each signal, a number above 0 if a report read since the last call has it from any rank."""
        return [0.0] * NUM_SIGNALS if self._reducer is None else self._reducer.flags.received()

    @property
    def carries_weights(self) -> bool:
        """Whether the next synchronisation can divide by a weight of all ranks: there are others, and 32 bits."""
        return self._reducer is not None and self._reducer.carries_weights

    def use_reports(self) -> None:
        """Leave flags on the accelerator until `read_report`: backward does not wait.

        After each synchronisation call `report` or `is_finite`. `read_report`, not backward, then refuses a parameter
        that is unused on some rank.
        """
        self._latest.has_reports = True
        if self._reducer is not None:
            self._reducer.flags.wait_for_report = True

    def report(self, losses: Sequence[Tensor]) -> Report:
        """Begin to copy to the host what `is_finite` checks, and the ranks' signals.

        Args:
            losses: Of this rank's micro-batches, for `Report.losses`.
        """
        if self._reducer is not None:
            return self._reducer.report(losses)
        loss = self._latest.sync.loss
        parameters = tensors_of(self.module)[0]
        watched = [] if loss is None else [loss.to(parameters[0].device).reshape(1)]
        return Report(parameters, watched, [], losses, lambda _: None)

    def read_report(self, report: Report) -> bool:
        """Wait for a `report`; return whether all its gradients and losses are finite.

        Raises:
            DistributedTrainingError: A parameter was unused on some rank; on every rank alike.
        """
        report.merge()
        return report.is_good()

    def is_finite(self) -> bool:
        """Return whether the latest averaged gradients, and the losses that were watched, are finite.

        The result is the same on every rank. Cost: gradients are read once, at most: if ranks have checked them in
        shared memory, later changes by `.data` or NumPy are not seen.
        """
        if self._latest.has_reports:
            return self.read_report(self.report([]))
        if self._reducer is None:
            return all_finite([*self._gradients(), *self._watched_losses()])
        if not self._reducer.is_finite():
            return False
        return not self._latest.sync.has_changed_averages or all_finite(self._gradients())

    def _gradients(self) -> list[Tensor]:
        return [values_of(p.grad) for p in tensors_of(self.module)[0] if p.grad is not None]

    def losses_are_finite(self) -> bool:
        """Return whether the losses that were watched on all ranks are finite."""
        if self._reducer is not None:
            return self._reducer.flags.losses_are_finite
        return all_finite(self._watched_losses())

    def _watched_losses(self) -> list[Tensor]:
        loss = self._latest.sync.loss
        return [] if loss is None else [loss]

    def seconds_communicated(self, *, waits: bool = False) -> float:
        """Return how long this rank has communicated in backward, or waited for others, since the last call.

        An accelerator runs a collective later than the host launches it, so its time is known only at the next call,
        unless `waits` makes the host wait for the accelerator.
        """
        return 0.0 if self._reducer is None else self._reducer.take_seconds(waits=waits)

    def check_replicas(self) -> None:
        """Compare the parameters of all ranks, bit for bit. All ranks call it; it changes nothing.

        Cost: a hash of all parameters, and two all_gathers of a few bytes; nothing in a world of one.

        Raises:
            ReplicasDifferError: With the rank that differs from most, and the parameters; on every rank.
        """
        check_replicas([*self.module.named_parameters()], self.world)

    def compression_state(self) -> dict[str, Any]:
        """Return the state of compression on all ranks, for a checkpoint. All ranks call it."""
        low_rank = {} if self._reducer is None else self._reducer.low_rank
        return gathered_state(low_rank, self.world)

    def load_compression_state(self, state: Mapping[str, Any]) -> None:
        """Load a `state` of `compression_state`, from any number of ranks; raise CheckpointError if it is malformed."""
        if self._reducer is not None and state:
            load_state(self._reducer.low_rank, state, self._world)

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """Let `hook` average, called with `state`: PyTorch's `hook(state, bucket) -> Future[Tensor]`, once."""
        if self._reducer is not None:  # a world of one has nothing to send
            self._reducer.exchange_by_hook(state, hook)

    def sync_buffers(self) -> None:
        """Make buffers, such as running means, the same on all ranks. All ranks call it.

        Floating-point ones become the mean over ranks, weighted by samples of training forwards since the last time;
        others take rank 0's values. Identical ones are not modified.
        """
        if self._reducer is not None and self.world.size > 1:
            self._share_buffers(tensors_of(self.module)[1])

    def _share_buffers(self, buffers: Sequence[Tensor], *, before_step: bool = False) -> None:
        rows = self._latest.rows
        self._latest.rows = 0
        share = self._sharing.share_before_step if before_step else self._sharing.share
        share(self.world, buffers, lambda: [name for name, _ in self.module.named_buffers()], rows)

    def _names(self) -> list[str]:
        return [name for name, _ in (*self.module.named_parameters(), *self.module.named_buffers())]

    def _prepare(self) -> None:
        """Follow changes of the module, unless `begin_sync` has; share buffers before the first forward of a step."""
        reducer = self._reducer
        if reducer is None or self._latest.is_suspended:
            return
        parameters, buffers = tensors_of(self.module)
        has_begun = reducer.next_sync is self._latest.sync
        if not has_begun and not reducer.held:
            self._follow_module(parameters)
        if buffers and self.training and self._slices is None:
            self._share_before_step(buffers)

    def _share_before_step(self, buffers: Sequence[Tensor]) -> None:
        """Share buffers, unless an earlier forward of the step has: ranks may run different numbers of forwards."""
        reducer = self._reducer
        if reducer is None or reducer.unsynced or reducer.next_sync.has_shared_buffers:
            return
        self._share_buffers(buffers, before_step=True)
        # A loop of the user's own, which begins no synchronisation, shares them before each forward.
        reducer.next_sync.has_shared_buffers = reducer.next_sync is self._latest.sync

    def _follow_module(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace the reducer if parameters were added, replaced, unfrozen or converted.

        The ranks compare their modules, which they must have changed alike.
        """
        reducer = self._reducer
        if reducer is None or reducer.fits(parameters):
            return
        world = self.world
        check_same_module(self.module, world)
        if self.config.broadcast_parameters and world.size > 1:
            share_tensors(world, reducer.new_parameters(parameters), self._names)
        self._reducer = Reducer(self.module, self.config, world, self.num_signals, self._slices)
        self._reducer.take_over(reducer)

    def close(self) -> None:
        """Remove the hooks from the module, which can then be wrapped again."""
        if self._reducer is not None:
            self._reducer.close()
            self._reducer = None

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Return a copy of the bare module, as weight averaging needs it: no one averages a copy's gradients."""
        return copy.deepcopy(self.module, memo)

    def __getstate__(self) -> dict[str, Any]:
        if self._reducer is not None:
            raise ConfigError(
                "a DistributedDataParallel cannot be pickled: gradients of the copy would not be averaged. Pickle "
                "get_model(), and wrap it again to train it; copy.deepcopy returns a copy of the bare module."
            )
        return {**self.__dict__, "_world": World()}  # process groups cannot be pickled

    def state_dict(self, *args: Any, **fields: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the module's own state: names have no prefix, and load into the bare module."""
        state: dict[str, Any] = self.module.state_dict(*args, **fields)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load `state_dict`, whose names have no prefix; `strict` and `assign` as in PyTorch.

        Raises:
            ConfigError: `assign`, if there are other ranks: it would replace the parameters.
        """
        if assign and self._reducer is not None:
            raise ConfigError("assign=True would replace the parameters, and the new gradients would not be averaged.")
        return self.module.load_state_dict(state_dict, strict, assign)

    def get_model(self) -> nn.Module:
        """Return the wrapped module."""
        return self.module

    def get_rank(self) -> int:
        """Return this rank."""
        return self.world.rank

    def get_world_size(self) -> int:
        """Return the number of ranks."""
        return self.world.size

    def is_master(self) -> bool:
        """Return whether this is rank 0."""
        return self.world.is_first


def _nothing() -> Tensor | None:
    return None


@dataclasses.dataclass
class _StepState:
    """What changes in each step; as attributes of the module, they would take long to set."""

    input: Callable[[], Tensor | None] = _nothing
    output: Callable[[], Tensor | None] = _nothing
    sync: Synchronization = dataclasses.field(default_factory=Synchronization)  # the latest that was begun
    has_reports: bool = False  # whether flags stay on the accelerator until a report is read
    rows: int = 0  # rows of training forwards, since buffers were shared
    expected_rows: int | None = None  # rows of the next forward, if set
    is_suspended: bool = False  # whether another wrapper averages
    observer: GradientObserver | None = None  # what sees gradients


def unwrap(model: nn.Module) -> tuple[list[DistributedDataParallel], nn.Module]:
    """Return (our wrappers, the module inside them or PyTorch's)."""
    wrappers = []
    while isinstance(model, (DistributedDataParallel, nn.parallel.DistributedDataParallel, nn.DataParallel)):
        if isinstance(model, DistributedDataParallel):
            wrappers.append(model)
        model = model.module
    return wrappers, model


def _merged(config: DDPConfig | None, fields: dict[str, Any]) -> DDPConfig:
    right = config is None or isinstance(config, DDPConfig)
    require(right, f"config must be a DDPConfig, got {type(config).__name__}.")
    known = [field.name for field in dataclasses.fields(DDPConfig)]
    for name in fields:
        if name not in known:
            raise unknown_name("DistributedDataParallel", name, known, "argument")
    merged = dataclasses.replace(config or DDPConfig(), **fields)
    merged.validate()
    return merged


def _first_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value
    parts: Iterable[Any] = ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, (list, tuple)):
        parts = value
    for part in parts:
        found = _first_tensor(part)
        if found is not None:
            return found
    return None


def _reference(value: Any) -> Callable[[], Tensor | None]:
    """Return a weak reference to the first tensor in a value."""
    # A strong reference would keep the last output alive, and with it memory that the next step needs.
    tensor = _first_tensor(value)
    return _nothing if tensor is None else weakref.ref(tensor)
