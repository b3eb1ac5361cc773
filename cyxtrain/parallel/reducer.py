"""Averages gradients over ranks while backward still runs.

Each parameter has a hook that fires when its gradient is complete. It puts the gradient into its bucket; buckets
leave in index order as they become complete, and the end of backward sends the rest and waits. The layout never
changes: a resumed run sums in the same order as the uninterrupted one.
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
from cyxtrain.errors import ConfigError, DistributedTrainingError, on_all_ranks, shortened
from cyxtrain.parallel.bucket import STEP_LATER, Bucket
from cyxtrain.parallel.compression import compress
from cyxtrain.parallel.consistency.broadcasting import tensors_of
from cyxtrain.parallel.finite import all_finite, values_of
from cyxtrain.parallel.layout import NUM_SIGNALS, BucketSpec, ParameterSpec, bucket_layout
from cyxtrain.parallel.sparse_gradients import SparseGradients, split_sparse
from cyxtrain.parallel.step_report import Report
from cyxtrain.ring import RingProcessGroup, SharedGradientBuffer
from cyxtrain.world import runtime

_REENTRANT = "Gradient checkpointing runs one backward inside another: give it use_reentrant=False."
_SPARSE = -1
"""Instead of the number of a bucket."""
_NOT_MEASURED = contextlib.nullcontext()
_open: weakref.WeakSet[Reducer] = weakref.WeakSet()
"""All reducers whose hooks are on a module."""


class Reducer:
    """The buckets of a module, and the hooks that fill them.

    Args:
        model: Its trained parameters are averaged.
        config: Sizes and semantics.
    """

    def __init__(self, model: nn.Module, config: DDPConfig) -> None:
        keep_freed_memory()  # autograd's own gradients are freed in each step, when they have come into a bucket
        parameters = trained_parameters(model)
        self._model = model
        self._kinds = {id(p): (p.dtype, p.get_device(), p.requires_grad, p) for p in model.parameters()}  # keeps ids
        self._names = {parameter: name for name, parameter in parameters}
        self._as_view = config.gradient_as_bucket_view
        self._allow_unused = config.find_unused_parameters or config.static_graph
        self._trained = [parameter for _, parameter in parameters]
        self._versions: list[int] | None = None
        dense, sparse = split_sparse(parameters, model)
        self._sparse = SparseGradients(sparse)
        layout = _layout(dense, sparse, config)
        self._buckets = [
            Bucket(spec, dense, index, spec is layout[-1], mean)
            for index, (spec, mean) in enumerate(zip(layout, _memory_in_common(layout, config), strict=True))
        ]
        self.low_rank = compress(self._buckets, config)
        """The gradients that travel as thin matrices, by name."""
        self._is_compressing = config.compression is not None
        self._group: Any = runtime.group_for(self.device)
        self._backward: weakref.ref[_Backward] | None = None
        self._next_bucket = 0
        self._absent = self._refuses_unused = False
        self._unread: accelerator.HostCopy | None = None
        self.held = False
        """Whether backward shall accumulate locally."""
        self.signals = [0.0] * NUM_SIGNALS
        """What this rank tells the others in each synchronisation."""
        self.loss: Tensor | None = None
        """This rank's loss in the next synchronisation."""
        self.reports = False
        """Whether flags stay on the accelerator, and refusals wait, until somebody reads `report`."""
        self.scale = 1.0
        """What the gradients of the next synchronisations are multiplied by."""
        self.seconds = 0.0
        """That the host has communicated, or waited for other ranks."""
        self.unsynced = self.is_prepared = False
        """Whether gradients are here that no other rank has seen; whether buffers have been shared for this step."""
        self._watch_gradients([[dense[number][1] for number in spec.parameters] for spec in layout])

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self._trained[0].device if self._trained else torch.device("cpu")

    def _watch_gradients(self, buckets: Sequence[Sequence[nn.Parameter]]) -> None:
        self._first = torch_compat.tensor_of(self._trained[0]) if self._trained else 0
        self._hook: tuple[Any, Callable[[Any, Any], Any]] | None = None
        self._device_waits: accelerator.Stopwatch | None = None
        self._handles: list[Any] = []
        self._newer: weakref.WeakSet[Reducer] = weakref.WeakSet()
        for other in _open:
            if not other._names.keys().isdisjoint(self._names):
                other._newer.add(self)
        _open.add(self)
        own = weakref.ref(self)  # a hook must not keep the reducer, and with it the buckets, alive
        sparse = [parameter for _, parameter in self._sparse.parameters]
        for index, parameters in [*enumerate(buckets), (_SPARSE, sparse)]:
            for slot, parameter in enumerate(parameters):
                torch_compat.attach_hooks(parameter)
                hook = functools.partial(Reducer._on_gradient, own, index, slot)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def take_over(self, earlier: Reducer) -> None:
        """Continue where an `earlier` reducer of the same module ended; that one is closed."""
        earlier.close()
        earlier.read_flags()
        self.unsynced, self.seconds, self.is_prepared = earlier.unsynced, earlier.seconds, earlier.is_prepared
        self._device_waits = earlier._device_waits
        self.signals, self.loss, self.scale = earlier.signals, earlier.loss, earlier.scale
        self.reports = earlier.reports
        if earlier._hook is not None:
            self.travel_by_hook(*earlier._hook)
        for name in self.low_rank.keys() & earlier.low_rank.keys():
            now, before = self.low_rank[name], earlier.low_rank[name]
            if (now.query.shape, now.error.shape) == (before.query.shape, before.error.shape):
                now.query.copy_(before.query)
                now.error.copy_(before.error)

    def fits(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Return whether the module still has the parameters that it had, of the same kind.

        A parameter that is frozen now still fits: it has no gradient. Where tensors were swapped, as `load_state_dict`
        does after torch.__future__.set_swap_module_params_on_conversion(True), the same parameters have lost their
        hooks: the first one tells. Cost: a look-up for each.

        Args:
            parameters: All that the module has now.
        """
        kinds = self._kinds
        for parameter in parameters:
            kind = kinds.get(id(parameter))
            if kind is None or kind[0] is not parameter.dtype or kind[1] != parameter.get_device():
                return False
            if parameter.requires_grad and not kind[2]:
                return False
        is_swapped = bool(self._trained) and torch_compat.tensor_of(self._trained[0]) != self._first
        return len(parameters) == len(kinds) and not is_swapped

    def new_parameters(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Return those of the `parameters` that the module did not have."""
        return [parameter for parameter in parameters if id(parameter) not in self._kinds]

    def note_forward(self) -> None:
        """Note the parameters' versions: until backward has averaged their gradients, nobody may change them."""
        self._versions = torch_compat.versions_of(self._trained)

    def _use(self, group: Any) -> None:
        if group is not self._group:
            for bucket in self._buckets:
                bucket.change_group()
            self._group = group

    @property
    def received(self) -> list[float]:
        """For each signal, something above 0 where any rank told it in the latest synchronisation."""
        self.read_flags()
        return self._buckets[-1].received

    @property
    def losses_are_finite(self) -> bool:
        """Whether the losses of all ranks were, in the latest synchronisation."""
        self.read_flags()
        return self._buckets[-1].losses_are_finite

    def is_finite(self) -> bool:
        """Returns whether all that has travelled in the latest synchronisation is: gradients and losses.

        The same on every rank. Cost: it is read once, but for what ranks have looked at in memory in common.
        """
        dense = [bucket.numbers for bucket in self._buckets if not bucket.travel.is_known_finite]
        return all_finite(dense + [values_of(p.grad) for _, p in self._sparse.parameters if p.grad is not None])

    def report(self, losses: Sequence[Tensor]) -> Report:
        """Return what has travelled in the latest synchronisation, on its way to the host.

        Args:
            losses: Of this rank's micro-batches.
        """
        unused = [bucket.unused_flags() for bucket in self._buckets] if self._refuses_unused else []
        merge = functools.partial(self._take_in, refuses=self._refuses_unused)
        return Report(self._trained, [bucket.flags for bucket in self._buckets], unused, losses, merge)

    def travel_by_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """Lets a comm hook average gradients, from now on.

        Raises:
            ConfigError: Something else does.
        """
        if self._hook is not None:
            raise ConfigError("a comm hook is registered already; a module has one.")
        if self._is_compressing:
            raise ConfigError("DDPConfig.compression and a comm hook both say how gradients travel: leave one out.")
        self._hook = (state, hook)
        for bucket in self._buckets:
            bucket.travel_by_hook(state, hook)

    def close(self) -> None:
        """Removes the hooks; `.grad` stays as it is."""
        for handle in self._handles:
            handle.remove()
        _open.discard(self)
        for other in _open:
            other._newer.discard(self)

    def synchronize(self, group: Any, *, absent: bool = False) -> None:
        """Averages what has accumulated in `.grad`; a parameter without one counts as zeros.

        Args:
            group: The process group.
            absent: This rank has no samples, and takes the part of a backward.

        Raises:
            PeerLostError, CollectiveMismatchError, CollectiveTimeoutError: As the collectives.
        """
        self._use(group)
        self._begin()
        self._absent = absent
        if absent:
            self._versions = None  # of a forward that was not for this backward
        self._finish(check=absent and not self._allow_unused)

    @staticmethod
    def _on_gradient(own: weakref.ref[Reducer], index: int, slot: int, _: Tensor) -> None:
        """Copy one gradient into its bucket, and launch complete buckets. Called by autograd."""
        self = own()
        if self is None:
            return
        if self.held or self._newer:  # of two wrappers of one module, the newer one averages
            self.unsynced = True
            return
        if self._backward is None or self._backward() is None:
            self._begin_backward()
        if index == _SPARSE:
            self._sparse.check(slot)
            return
        bucket = self._buckets[index]
        if bucket.launched:
            raise DistributedTrainingError(f"a gradient came after its bucket had been sent. {_REENTRANT}")
        bucket.take(slot, as_view=self._as_view)
        self._launch(incomplete=False)

    def at_end_of_backward(self) -> None:
        """Sends what has not been sent, and waits for all. Called by autograd."""
        if torch_compat.current_autograd_node() is not None:
            self._backward = None
            raise DistributedTrainingError(f"a backward ended inside another one. {_REENTRANT}")
        self._finish(check=not self._allow_unused)

    def _begin_backward(self) -> None:
        self._use(runtime.group_for(self.device))
        if self._versions is None:  # the loss is not from the wrapper's forward
            self._check_module()
            self.note_forward()
        self._begin()
        backward = _Backward(self)
        self._backward = weakref.ref(backward)
        torch_compat.call_after_backward(backward.at_end)

    def _begin(self) -> None:
        self.read_flags()
        for bucket in self._buckets:
            bucket.clear()
        self._next_bucket = 0
        self._absent = False

    def _launch(self, *, incomplete: bool) -> None:
        """Launch the next buckets in index order, up to the first incomplete one or, if asked, all of them."""
        while self._next_bucket < len(self._buckets):
            bucket = self._buckets[self._next_bucket]
            if not bucket.complete:
                if not incomplete:
                    return
                bucket.fill(as_view=self._as_view)
            began = time.perf_counter()
            bucket.launch(self._group, absent=self._absent, signals=self.signals, loss=self.loss, scale=self.scale)
            self.seconds += time.perf_counter() - began
            self._next_bucket += 1

    def _finish(self, *, check: bool) -> None:
        """Sends the rest, waits for all, and gives the averages to the parameters."""
        try:
            self._launch(incomplete=True)
            self._check_versions()
            unused = self._receive()
            if not isinstance(self._group, RingProcessGroup):
                runtime.check_default_group()
        except RuntimeError as error:
            cause = runtime.cause_of(error)
            if cause is None:
                raise
            raise cause from error
        finally:
            self._backward = self.loss = self._versions = None
            self.is_prepared = False
        self.unsynced = False
        self._refuses_unused = check
        if check and unused:
            self._refuse_unused(unused)

    def _receive(self) -> list[nn.Parameter]:
        """Waits for all, and gives each parameter its averaged gradient; returns those that were unused somewhere."""
        began = time.perf_counter()
        for bucket in self._buckets:
            bucket.travel.send_on()
        with self._stopwatch():
            for bucket in self._buckets:
                bucket.travel.arrive()
        self.seconds += time.perf_counter() - began
        is_whole = not self.low_rank or all_finite([each for bucket in self._buckets for each in bucket.travel.arrived])
        unused: list[nn.Parameter] = []
        found = self._flags_as_needed()
        for bucket, numbers in zip(self._buckets, found, strict=True):
            bucket.finish(numbers, as_view=self._as_view, is_whole=is_whole)
            if not self.reports and self._unread is None and numbers is not None:
                unused += bucket.hear(numbers)
        began = time.perf_counter()
        unused += self._sparse.average(self._group, absent=self._absent)
        self.seconds += time.perf_counter() - began
        return unused

    def _stopwatch(self) -> contextlib.AbstractContextManager[None]:
        """Return what measures how long an accelerator waits for its backend; over the ring the host waits."""
        numbers = self._buckets[0].numbers
        if numbers.is_cpu or isinstance(self._group, RingProcessGroup):
            return _NOT_MEASURED
        if self._device_waits is None:
            self._device_waits = accelerator.Stopwatch(numbers.device)
        return self._device_waits

    def take_seconds(self, *, waits: bool) -> float:
        """Return how long this rank has communicated, or waited for others, since the last call.

        Args:
            waits: Whether to wait for the accelerator; without, its latest steps may be left for the next call.
        """
        seconds, self.seconds = self.seconds, 0.0
        return seconds + (0.0 if self._device_waits is None else self._device_waits.take(waits=waits))

    def _flags_as_needed(self) -> Sequence[Sequence[float] | None]:
        """Return the flags of each bucket, where the host has to know them now.

        Where this rank has all gradients, each parameter was used somewhere. So on an accelerator, whose flags come in
        one copy, it does not wait for them; they are read by a report, or when the next synchronisation begins.
        """
        flags = [bucket.flags for bucket in self._buckets]
        if flags[0].is_cpu or len({each.device for each in flags}) > 1:
            return [each.tolist() for each in flags]
        waits = all(bucket.complete for bucket in self._buckets)
        if self.reports and waits:
            return [None] * len(flags)
        copy = accelerator.HostCopy(torch.cat(flags))
        if not self.reports:
            self._unread = copy
        return [None] * len(flags) if waits else self._split(copy)

    def _split(self, copy: accelerator.HostCopy) -> list[list[float]]:
        numbers = copy.read()
        runtime.check_default_group()
        return [each.tolist() for each in numbers.split([len(bucket.flags) for bucket in self._buckets])]

    def read_flags(self) -> None:
        """Take in the flags of the latest synchronisation, where they have not been read yet; waits for them.

        Raises:
            DistributedTrainingError: A parameter was unused on some rank, on every rank alike.
        """
        copy, self._unread = self._unread, None
        if copy is not None:
            self._take_in(self._split(copy), self._refuses_unused)

    def _take_in(self, flags: Sequence[Sequence[float]], refuses: bool) -> list[float]:
        unused = [p for bucket, own in zip(self._buckets, flags, strict=True) for p in bucket.hear(own)]
        if refuses and unused:
            self._refuse_unused(unused)
        return self.received

    def _check_module(self) -> None:
        if not self.fits(tensors_of(self._model)[0]):
            raise DistributedTrainingError(
                "the model's parameters have changed since it was wrapped (added, replaced, unfrozen or converted), "
                "and this loss is not from the wrapper's forward, which would have noticed. Call ddp(...) before, or "
                "wrap the model anew."
            )

    def _check_versions(self) -> None:
        """Refuse what a hook that steps in backward has done: with this rank's gradient alone."""
        if self._versions is None:
            return
        versions = torch_compat.versions_of(self._trained)
        if versions != self._versions:
            changed = [p for p, now, then in zip(self._trained, versions, self._versions, strict=True) if now != then]
            names = shortened(self._names[parameter] for parameter in changed)
            raise DistributedTrainingError(
                f"a hook changed {names} in backward, before the gradients were averaged over ranks. {STEP_LATER}"
            )

    def _refuse_unused(self, parameters: Sequence[nn.Parameter]) -> None:
        # Every rank has seen the same flags, so every rank raises.
        names = ", ".join(self._names[parameter] for parameter in parameters)
        error = DistributedTrainingError(
            f"these parameters took no part in the loss on at least one rank: {names}. If that is intended, set "
            "DDPConfig(find_unused_parameters=True), or freeze them with requires_grad_(False) before wrapping."
        )
        raise on_all_ranks(error)


def _layout(
    dense: Sequence[tuple[str, nn.Parameter]], sparse: Sequence[tuple[str, nn.Parameter]], config: DDPConfig
) -> list[BucketSpec]:
    """Return the buckets of the dense gradients; without any, an empty one carries what ranks tell each other."""
    specs = [ParameterSpec(p.numel(), p.dtype, p.device) for _, p in dense]
    layout = bucket_layout(specs, int(config.bucket_size_mb * 2**20))
    if layout or not sparse:
        return layout
    return [BucketSpec((), (), 0, torch.float32, sparse[0][1].device, has_signals=True)]


def _memory_in_common(layout: Sequence[BucketSpec], config: DDPConfig) -> Sequence[SharedGradientBuffer | None]:
    """Returns memory for each bucket, where all ranks have some in common and it goes as it is. All ranks call it."""
    are_here = all(spec.device.type == "cpu" for spec in layout)
    group = runtime.group_for(torch.device("cpu"))
    if config.compression is not None or not are_here or not isinstance(group, RingProcessGroup):
        return [None] * len(layout)
    return group.make_gradient_buffers([(spec.count, spec.dtype) for spec in layout])


class _Backward:
    """One run of autograd, which alone keeps this alive: where it dies of an error, the reducer begins anew."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer

    def at_end(self) -> None:
        self._reducer.at_end_of_backward()


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Returns (name, parameter) of those that are trained, each once.

    Raises:
        ConfigError: A parameter or buffer of a lazy module that has not run yet.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ConfigError(f"{name} has no shape yet: run a lazy module once, on every rank, before it is trained.")
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
