"""Averages gradients over ranks while backward still runs.

Each parameter has a hook that autograd calls when its gradient is complete. The hook copies the gradient to its bucket;
buckets are launched in index order as they become complete, and the end of backward launches the rest and waits. The
layout never changes: a resumed run sums in the same order as the uninterrupted one.
Source: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training (2020), section 4.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cyxtrain.config import DDPConfig
from cyxtrain.environment import accelerator, torch_compat
from cyxtrain.environment.allocator import keep_freed_memory
from cyxtrain.errors import ConfigError, DistributedTrainingError, shortened
from cyxtrain.parallel.bucket import STEP_LATER, Bucket, GradientObserver, checked_gradient
from cyxtrain.parallel.compression import install_compression
from cyxtrain.parallel.consistency.broadcasting import tensors_of
from cyxtrain.parallel.finite import all_finite, values_of
from cyxtrain.parallel.layout import NUM_SIGNALS, BucketSpec, ParameterSpec, bucket_layout
from cyxtrain.parallel.sparse_gradients import SparseGradients, split_sparse
from cyxtrain.parallel.step_report import Report
from cyxtrain.parallel.sync_flags import SyncFlags
from cyxtrain.parallel.synchronization import Synchronization
from cyxtrain.ring import RowSum, SharedGradientBuffer, gradient_buffers_of, is_ring
from cyxtrain.world import runtime
from cyxtrain.world.slices import Slices, additions_of_rows, rows_by_rank
from cyxtrain.world.world import World

_REENTRANT = "Gradient checkpointing runs one backward inside another: give it use_reentrant=False."
_SPARSE = -1  # in place of the index of a bucket
_NOT_MEASURED = contextlib.nullcontext()
_open_reducers: weakref.WeakSet[Reducer] = weakref.WeakSet()  # all reducers with hooks on a module


class Reducer:
    """The buckets of a module's trained parameters, and the hooks that fill them.

    Of a rank's slices, each ends with a backward; the last one of a step launches.
    """

    _moved: nn.Parameter | None = None  # the latest whose gradient is in a bucket

    def __init__(
        self,
        model: nn.Module,
        config: DDPConfig,
        world: World,
        num_signals: int = NUM_SIGNALS,
        slices: Slices | None = None,
    ) -> None:
        keep_freed_memory()  # autograd's own gradients are freed in each step, when they were copied to a bucket
        parameters = trained_parameters(model)
        self._model = model
        # With the parameter itself: its id must not be reused.
        self._kinds = {id(p): (p.dtype, p.get_device(), p.requires_grad, p) for p in model.parameters()}
        self._names = {parameter: name for name, parameter in parameters}
        self._allow_unused = config.find_unused_parameters or config.static_graph
        self._trained = [parameter for _, parameter in parameters]
        self._versions: list[int] | None = None
        dense, sparse = split_sparse(parameters, model)
        self._sparse = SparseGradients(sparse)
        layout = _layout(dense, sparse, config, num_signals)
        self._slices = slices or Slices.of(world)
        self._buckets = _make_buckets(layout, dense, config, world, self._slices)
        self.low_rank = install_compression(self._buckets, config)  # the gradients that PowerSGD exchanges, by name
        self._is_compressing = config.compression is not None
        self._world = world
        self._current_run: weakref.ref[_Backward] | None = None
        self._next_bucket = 0
        self._absent = False
        self.flags = SyncFlags(self._buckets, self._names)
        self.held = False  # whether backward accumulates locally
        self.next_sync = Synchronization()  # what the next backward sends with its gradients
        self.seconds = 0.0  # time that the host has communicated, or waited for other ranks
        self.unsynced = False  # whether there are gradients that were not averaged
        self._first_tensor = torch_compat.tensor_of(self._trained[0]) if self._trained else 0
        self._comm_hook: tuple[Any, Callable[[Any, Any], Any]] | None = None
        self._device_waits: accelerator.Stopwatch | None = None
        self._observer: GradientObserver | None = None
        self._handles: list[Any] = []  # of the hooks on parameters
        self._newer: weakref.WeakSet[Reducer] = weakref.WeakSet()  # reducers of the same parameters, made later
        self._add_hooks([[dense[number][1] for number in spec.parameters] for spec in layout])

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self._trained[0].device if self._trained else torch.device("cpu")

    def _add_hooks(self, buckets: Sequence[Sequence[nn.Parameter]]) -> None:
        for other in _open_reducers:
            if not other._names.keys().isdisjoint(self._names):
                other._newer.add(self)
        _open_reducers.add(self)
        reference = weakref.ref(self)  # a hook must not keep the reducer, and with it the buckets, alive
        sparse = [parameter for _, parameter in self._sparse.parameters]
        for index, parameters in [*enumerate(buckets), (_SPARSE, sparse)]:
            for slot, parameter in enumerate(parameters):
                torch_compat.reattach_lost_hooks(parameter)
                hook = functools.partial(Reducer._on_gradient, reference, index, slot)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def take_over(self, earlier: Reducer) -> None:
        """Close an `earlier` reducer of the same module, and continue from its state, in its place."""
        earlier.close()
        # `self` takes the place of `earlier`: it only looks newer than a wrapper that was made between the two, which
        # still averages what it has.
        for other in [each for each in earlier._newer if each is not self]:
            if not other._names.keys().isdisjoint(self._names):
                other._newer.discard(self)
                self._newer.add(other)
        self.unsynced = earlier.unsynced
        self.next_sync = earlier.next_sync
        self.flags.take_over(earlier.flags)
        self.observe(earlier._observer)
        self.seconds = earlier.seconds
        self._device_waits = earlier._device_waits
        if earlier._comm_hook is not None:
            self.exchange_by_hook(*earlier._comm_hook)
        for name in self.low_rank.keys() & earlier.low_rank.keys():
            now = self.low_rank[name]
            before = earlier.low_rank[name]
            if (now.query.shape, now.error.shape) == (before.query.shape, before.error.shape):
                now.query.copy_(before.query)
                now.error.copy_(before.error)

    def fits(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Return whether the module's `parameters` are those that this reducer was built for, of the same kinds.

        A parameter that is frozen now still fits: it has no gradient. If tensors were swapped, as by `load_state_dict`
        after torch.__future__.set_swap_module_params_on_conversion(True), the same parameters have lost their hooks:
        the first one is checked for that.
        """
        kinds = self._kinds
        for parameter in parameters:
            kind = kinds.get(id(parameter))
            if kind is None:
                return False
            dtype, device, was_trained, _ = kind
            if dtype is not parameter.dtype or device != parameter.get_device():
                return False
            if parameter.requires_grad and not was_trained:
                return False
        is_swapped = bool(self._trained) and torch_compat.tensor_of(self._trained[0]) != self._first_tensor
        return len(parameters) == len(kinds) and not is_swapped

    def new_parameters(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Return those of the `parameters` that the module did not have."""
        return [parameter for parameter in parameters if id(parameter) not in self._kinds]

    def record_forward(self) -> None:
        """Record the parameters' versions: they must not change until backward has averaged their gradients."""
        self._versions = torch_compat.versions_of(self._trained)

    @property
    def carries_weights(self) -> bool:
        """Whether this rank's weight can travel in the last bucket: not in 16 bits, nor compressed."""
        return not self._is_compressing and bool(self._buckets) and self._buckets[-1].numbers.dtype.itemsize > 2

    @property
    def _group(self) -> Any:
        return self._world.group_for(self.device)

    def _switch_world(self, world: World) -> None:
        if world.group_for(self.device) is not self._group:
            for bucket in self._buckets:
                bucket.change_group()
        self._world = world

    @property
    def collectives(self) -> list[str]:
        """What the ring's errors call the collective of each bucket."""
        return [bucket.exchange.collective for bucket in self._buckets]

    def is_finite(self) -> bool:
        """Return whether gradients and losses of the latest synchronisation are finite, on every rank alike."""
        # They end in flags, one of which is NaN if a rank's loss is not finite.
        dense = [bucket.numbers for bucket in self._buckets if not bucket.exchange.is_known_finite]
        return all_finite(dense + [values_of(p.grad) for _, p in self._sparse.parameters if p.grad is not None])

    def report(self, losses: Sequence[Tensor]) -> Report:
        """Return the report of the latest synchronisation, with the losses of this rank's micro-batches."""
        return self.flags.report(self._trained, losses)

    def exchange_by_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """Let a comm hook average gradients from now on; raise ConfigError if there is one, or compression."""
        if self._comm_hook is not None:
            raise ConfigError("a comm hook is registered already; a module has one.")
        if self._is_compressing:
            raise ConfigError("DDPConfig.compression and a comm hook exclude each other: leave one out.")
        self._comm_hook = (state, hook)
        for bucket in self._buckets:
            bucket.exchange_by_hook(state, hook)

    def close(self) -> None:
        """Remove the hooks; `.grad` stays."""
        for handle in self._handles:
            handle.remove()
        _open_reducers.discard(self)
        for other in _open_reducers:
            other._newer.discard(self)

    def observe(self, observer: GradientObserver | None) -> None:
        """Let `observer` see the dense gradients of this rank's slices from now on; None: nobody."""
        self._observer = observer
        for bucket in self._buckets:
            bucket.observer = observer

    def discard(self) -> None:
        """Forget what has accumulated, and was not averaged."""
        self.unsynced = False

    def synchronize(self, world: World, *, absent: bool = False, refuses_unused: bool = False) -> None:
        """Average what has accumulated in `.grad`, or add up a slice of it; one that is `absent` has no samples: zeros.

        `refuses_unused`: whether unused parameters are refused, unless the config allows them; all ranks alike.
        """
        self._switch_world(world)
        self._begin()
        self._absent = absent
        if absent:
            self._versions = None  # they are of a forward that does not belong to this backward
        self._finish(refuses_unused=refuses_unused and not self._allow_unused)

    @staticmethod
    def _on_gradient(reference: weakref.ref[Reducer], index: int, slot: int, _: Tensor) -> None:
        """Copy a gradient to its bucket, and launch the buckets that are complete. Called by autograd."""
        self = reference()
        if self is None:
            return
        # Of two wrappers of one module, the newer one averages.
        if self.held or self._newer:
            self.unsynced = True
            return
        if self._current_run is None or self._current_run() is None:
            self._begin_backward()
        if index == _SPARSE:
            checked_gradient(*self._sparse.parameters[slot])  # for its errors: it is averaged at the end
            return
        bucket = self._buckets[index]
        if bucket.launched:
            raise DistributedTrainingError(f"a gradient came after its bucket had been sent. {_REENTRANT}")
        bucket.take(slot)
        if self._slices.is_virtual:
            self._release(bucket.parameter(slot))
        if self._is_in_last_slice:
            self._launch()

    @property
    def _is_in_last_slice(self) -> bool:
        return self.next_sync.slices_ended == len(self._slices.owned) - 1

    def _release(self, parameter: nn.Parameter | None) -> None:
        """Free the gradient that was taken before this one: no hook looks at it any more, and its memory is hot."""
        if self._moved is not None:
            self._moved.grad = None
        self._moved = parameter

    def at_end_of_backward(self) -> None:
        """Launch the remaining buckets, and wait for all. Called by autograd."""
        if torch_compat.current_autograd_node() is not None:
            self._current_run = None
            raise DistributedTrainingError(f"a backward ended inside another one. {_REENTRANT}")
        self._finish(refuses_unused=not self._allow_unused)

    def _begin_backward(self) -> None:
        self._switch_world(runtime.following(self._world))
        if self._versions is None:  # the loss is not from the wrapper's forward
            self._check_module()
            self.record_forward()
        self._begin()
        backward = _Backward(self)
        self._current_run = weakref.ref(backward)
        torch_compat.call_after_backward(backward.at_end)

    def _begin(self) -> None:
        """Begin a synchronisation, unless an earlier slice of the step has."""
        self._absent = False
        self._moved = None
        if self.next_sync.slices_ended:
            return
        self.flags.read()  # of the previous synchronisation, if they are still on their way
        for bucket in self._buckets:
            bucket.clear()
        self._next_bucket = 0

    def _launch(self, *, rest: bool = False) -> None:
        """Launch the next buckets that are complete; or the rest, with zeros for what is missing."""
        while self._next_bucket < len(self._buckets):
            bucket = self._buckets[self._next_bucket]
            if rest:
                bucket.fill()
            elif not bucket.complete:
                return
            began = time.perf_counter()
            bucket.launch(self._group, self.next_sync, absent=self._absent)
            self.seconds += time.perf_counter() - began
            self._next_bucket += 1

    def _finish(self, *, refuses_unused: bool) -> None:
        """End a slice; after the last one wait for all buckets, and give the averages to the parameters."""
        if not self._is_in_last_slice:
            self._end_slice()
            return
        try:
            self._launch(rest=True)
            self._check_versions()
            flags_by_bucket, unused = self._receive()
            runtime.check_default_group()  # an aborted NCCL raises nothing
        except RuntimeError as error:
            cause = runtime.cause_of(error)
            if cause is None:
                raise
            raise cause from error
        finally:
            self._current_run = None
            self._versions = None
            self.next_sync = Synchronization()
        self.unsynced = False
        self.flags.end_synchronization(flags_by_bucket, unused, refuses_unused=refuses_unused)

    def _end_slice(self) -> None:
        """Add a slice of this rank's, which is not the last one, to the sums of the step."""
        self._current_run = None
        self._check_versions()
        self._versions = None
        for bucket in self._buckets:
            bucket.fill()
            bucket.end_slice(self.next_sync, absent=self._absent)
            bucket.next_slice()
        self.next_sync.end_slice()
        self.unsynced = False
        for parameter in self._trained:
            parameter.grad = None

    def _receive(self) -> tuple[Sequence[Sequence[float] | None], list[nn.Parameter]]:
        """Wait for all, and give out the averages.

        Return the flags of each bucket, as `SyncFlags.receive`, and the parameters with sparse gradients that some rank
        has not used.
        """
        began = time.perf_counter()
        for bucket in self._buckets:
            bucket.exchange.launch_second_round()  # PowerSGD has one
        with self._stopwatch():
            for bucket in self._buckets:
                bucket.exchange.wait()
        self.seconds += time.perf_counter() - began
        is_finite = True
        if self.low_rank:  # only PowerSGD needs to know, to keep or drop what it has left out
            is_finite = all_finite([each for bucket in self._buckets for each in bucket.exchange.results])
        flags_by_bucket = self.flags.receive()
        # The last bucket carries what is sent once: signals, weight and loss. There is one: trainers refuse a model
        # that trains nothing (`check_trained`).
        factor = self._buckets[-1].factor_of(self.next_sync.weight, flags_by_bucket[-1])
        for bucket, bucket_flags in zip(self._buckets, flags_by_bucket, strict=True):
            bucket.finish(bucket_flags, is_finite=is_finite, factor=factor)
        began = time.perf_counter()
        unused = self._sparse.average(self._world, absent=self._absent, factor=factor)
        self.seconds += time.perf_counter() - began
        self.next_sync.complete(factor, self.flags.received)
        return flags_by_bucket, unused

    def _stopwatch(self) -> contextlib.AbstractContextManager[None]:
        """Return what measures how long an accelerator waits for its backend; with the ring, the host waits."""
        numbers = self._buckets[0].numbers
        if numbers.is_cpu or is_ring(self._group):
            return _NOT_MEASURED
        if self._device_waits is None:
            self._device_waits = accelerator.Stopwatch(numbers.device)
        return self._device_waits

    def take_seconds(self, *, waits: bool) -> float:
        """Return how long this rank has communicated since the last call; `waits` for the accelerator."""
        seconds = self.seconds
        self.seconds = 0.0
        if self._device_waits is not None:
            seconds += self._device_waits.take(waits=waits)
        return seconds

    def _check_module(self) -> None:
        if not self.fits(tensors_of(self._model)[0]):
            raise DistributedTrainingError(
                "the model's parameters have changed since it was wrapped (added, replaced, unfrozen or converted), "
                "and this loss is not from the wrapper's forward, which would have noticed. Call ddp(...) before, or "
                "wrap the model anew."
            )

    def _check_versions(self) -> None:
        """Refuse an update that a hook has made in backward, with this rank's gradient alone."""
        if self._versions is None:
            return
        versions = torch_compat.versions_of(self._trained)
        if versions != self._versions:
            found = zip(self._trained, versions, self._versions, strict=True)
            changed = [parameter for parameter, now, before in found if now != before]
            names = shortened(self._names[parameter] for parameter in changed)
            raise DistributedTrainingError(
                f"a hook changed {names} in backward, before the gradients were averaged over ranks. {STEP_LATER}"
            )


def _layout(
    dense: Sequence[tuple[str, nn.Parameter]],
    sparse: Sequence[tuple[str, nn.Parameter]],
    config: DDPConfig,
    num_signals: int,
) -> list[BucketSpec]:
    """Return the buckets of the dense gradients; without any, an empty one carries the signals."""
    specs = [ParameterSpec(p.numel(), p.dtype, p.device) for _, p in dense]
    layout = bucket_layout(specs, int(config.bucket_size_mb * 2**20), num_signals)
    if layout or not sparse:
        return layout
    return [BucketSpec((), (), 0, torch.float32, sparse[0][1].device, num_signals)]


def _make_buckets(
    layout: Sequence[BucketSpec],
    dense: Sequence[tuple[str, nn.Parameter]],
    config: DDPConfig,
    world: World,
    slices: Slices,
) -> list[Bucket]:
    """Return the buckets of a layout. All ranks call it."""
    as_view = config.gradient_as_bucket_view
    shared_buffers = _gradient_buffers(layout, config, world, slices)
    return [
        Bucket(spec, dense, index, spec is layout[-1], slices, shared_buffer, as_view=as_view)
        for index, (spec, shared_buffer) in enumerate(zip(layout, shared_buffers, strict=True))
    ]


def _gradient_buffers(
    layout: Sequence[BucketSpec], config: DDPConfig, world: World, slices: Slices
) -> Sequence[SharedGradientBuffer | None]:
    """Return memory for each bucket that all ranks share, if they can. All ranks call it."""
    are_on_cpu = all(spec.device.type == "cpu" for spec in layout)
    if config.compression is not None or not are_on_cpu or world.size == 1:
        return [None] * len(layout)
    row_sum = None
    if slices.is_virtual:
        num_rows = tuple(map(len, rows_by_rank(slices)))
        row_sum = RowSum(num_rows, additions_of_rows(slices), slices.count)
    return gradient_buffers_of(world.cpu_tensors, [(spec.count, spec.dtype) for spec in layout], row_sum)


class _Backward:
    """A run of autograd. Held by autograd's callback alone, so it is gone after an error in backward."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer

    def at_end(self) -> None:
        self._reducer.at_end_of_backward()


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return (name, parameter) of trained parameters; raise ConfigError if a lazy module has not run."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ConfigError(f"{name} has no shape yet: run a lazy module once, on every rank, before it is trained.")
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
