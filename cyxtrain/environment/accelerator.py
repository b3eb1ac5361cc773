"""Accelerators of any kind that PyTorch supports: CUDA, ROCm, XPU, MPS and others, by its device-neutral interface.

What belongs to NVIDIA alone stays where it is used: NCCL, TF32, CUDA graphs, datasheets.

Host and accelerator run asynchronously. Reading a number makes the host wait for all operations before it; reading a
copy later does not.
"""

from __future__ import annotations

import collections
import functools
import sys
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from cyxtrain.errors import warn

# Kinds that are never chosen by default: MPS has no float64, in which losses are summed.
_NOT_DEFAULT = ("mps",)
# Kinds of device on which this package has been run.
_HAS_RUN_ON = ("cpu", "cuda", "meta")
# Fragments of PyTorch's errors for an operation on tensors of several devices.
_OTHER_DEVICE = ("on the same device", "on the expected device", "and weight type")


def visible() -> torch.device | None:
    """Return the kind of accelerator that training uses by default, without an index; None: it uses CPUs."""
    found = torch.accelerator.current_accelerator()
    if found is None or found.type in _NOT_DEFAULT or not torch.accelerator.device_count():
        return None  # counting leaves a forked child able to use CUDA, unlike is_available()
    return torch.device(found.type)


def count() -> int:
    """Return how many accelerators this process sees."""
    return 0 if visible() is None else torch.accelerator.device_count()


def in_use() -> torch.device | None:
    """Return this thread's accelerator, with its index; None: this process has not used one so far."""
    found = torch.accelerator.current_accelerator()
    if found is None or found.type in _NOT_DEFAULT or not torch.get_device_module(found).is_initialized():
        return None
    return torch.device(found.type, torch.accelerator.current_device_index())


def name_of(device: torch.device) -> str:
    """Return the product name of a device, such as "NVIDIA H100", or its kind."""
    named = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if named is None else str(named(device))


def is_there(kind: str) -> bool:
    """Return whether this process sees a device of a kind, also of those that are never chosen by default."""
    found = torch.accelerator.current_accelerator()
    return found is not None and found.type == kind and torch.accelerator.is_available()


def all_with_memory() -> list[tuple[str, str, int]]:
    """Return (device, product name, bytes of memory or 0) of each accelerator."""
    kind = visible()
    if kind is None:
        return []
    found = []
    for index in range(count()):
        device = torch.device(kind.type, index)
        properties = getattr(torch.get_device_module(device), "get_device_properties", None)
        memory = 0
        if properties is not None:
            memory = int(getattr(properties(device), "total_memory", 0))
        found.append((str(device), name_of(device), memory))
    return found


@functools.lru_cache
def warn_if_untested(kind: str) -> None:
    """Warn, once in a process, that this package has never run on this kind of device."""
    if kind not in _HAS_RUN_ON:
        warn(f"Cyxtrain has never been tested on {kind}: compare the first losses with a run on device='cpu'.")


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device runs asynchronously to the host."""
    return device.type not in ("cpu", "meta")


def has_side_streams(device: torch.device) -> bool:
    """Return whether a device can copy from pinned memory on one stream while it computes on another."""
    return is_accelerator(device) and device.type not in _NOT_DEFAULT


def indexed(device: torch.device) -> torch.device:
    """Return a device with its index; an accelerator without one gets the index that this thread uses."""
    if device.index is not None or not is_accelerator(device):
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


@functools.lru_cache(maxsize=64)
def side_stream(device: torch.device, purpose: str) -> torch.Stream:
    """Return a side stream, the same for each purpose: the allocator keeps memory for each stream."""
    return torch.Stream(device)


def done_on(device: torch.device) -> torch.Event:
    """Record an event after all work that is queued on an accelerator's current stream."""
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to an accelerator, asynchronously from pinned memory if possible."""
    return tensor.pin_memory().to(device, non_blocking=True) if has_side_streams(device) else tensor.to(device)


def from_host(numbers: Sequence[Any], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return numbers as a tensor on a device, without waiting for an accelerator."""
    if not is_accelerator(device):
        return torch.tensor(numbers, dtype=dtype, device=device)
    return to_device(torch.tensor(numbers, dtype=dtype, device="cpu"), device)


class HostCopy:
    """An asynchronous copy of a dense and contiguous tensor to the host; on the CPU the tensor itself."""

    def __init__(self, tensor: Tensor) -> None:
        tensor = tensor.detach()
        self._event: Any = None
        self._host = tensor
        if is_accelerator(tensor.device):
            # Only a copy to pinned memory is asynchronous.
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = done_on(tensor.device)

    def is_there(self) -> bool:
        """Return whether the copy is complete."""
        return self._event is None or bool(self._event.query())

    def read(self) -> Tensor:
        """Wait for the copy, and return the numbers on the CPU."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._host


def peak_memory(device: torch.device, kind: Literal["allocated", "reserved"] = "allocated") -> int | None:
    """Return the peak of bytes in tensors, or held for them, since `reset_peak_memory`; None: unknown."""
    peak = getattr(_module_of(device), f"max_memory_{kind}", None)
    return None if peak is None else int(peak(device))


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak of an accelerator's memory."""
    reset = getattr(_module_of(device), "reset_peak_memory_stats", None)
    if reset is not None:
        reset(device)


def _module_of(device: torch.device) -> Any:
    return torch.get_device_module(device) if is_accelerator(device) else None


class Stopwatch:
    """A stopwatch for an accelerator's current stream, used as a context, that does not stop the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self._events: collections.deque[tuple[torch.Event, torch.Event]] = collections.deque()

    def __enter__(self) -> None:
        self._begin = self._event()

    def __exit__(self, *error: object) -> None:
        self._events.append((self._begin, self._event()))
        self._add_up(waits=False)

    def take(self, *, waits: bool) -> float:
        """Return the seconds since the last call, of contexts that the device has completed."""
        self._add_up(waits=waits)
        seconds = self._seconds
        self._seconds = 0.0
        return seconds

    def _event(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def _add_up(self, *, waits: bool) -> None:
        while self._events and (waits or self._events[0][1].query()):
            begin, end = self._events.popleft()
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1000


def may_use_cuda_graphs(device: torch.device) -> bool:
    """Return whether code on a device may have been compiled, by `fit` or by the user."""
    return device.type == "cuda" and "torch._dynamo" in sys.modules


def own_copy(tensor: Tensor) -> Tensor:
    """Return a tensor that later steps do not overwrite, as a CUDA graph overwrites its outputs."""
    return tensor.clone() if may_use_cuda_graphs(tensor.device) else tensor


def remedy_for_devices(error: Exception) -> str:
    """Return the remedy if an error of the user's code is about tensors on several devices; otherwise ""."""
    text = str(error)
    if not any(words in text for words in _OTHER_DEVICE):
        return ""
    full_stop = "" if text.endswith(("!", ".")) else "."
    return (
        f"{full_stop} A tensor was left on the device where it was created: register what a model or a loss keeps as a "
        "buffer (self.register_buffer), and create other tensors on the input's device (device=x.device)."
    )
