"""Tensors as flat memory to send from and receive into; an accelerator's tensors are copied through pinned memory."""

from __future__ import annotations

import cmath
import contextlib
import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cyxtrain.environment import accelerator
from cyxtrain.errors import ConfigError, CyxtrainError
from cyxtrain.ring.schedules.kernels import memory_of

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def address_of(memory: memoryview) -> int:
    """Return the address of writable bytes, at least one."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def addresses_of(tensor: Tensor) -> tuple[int, int]:
    """Return where a strided tensor's memory begins and ends."""
    begin = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


def check_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor that the ring can carry; refuse sparse ones and unsupported devices."""
    if tensor.is_cpu and tensor.layout is torch.strided:
        return tensor
    if tensor.layout is not torch.strided:
        raise CyxtrainError(
            f"the ring carries dense tensors, and sparse COO tensors in all_reduce; this one is {tensor.layout}. "
            "Call to_dense() first."
        )
    if not tensor.is_cpu and not can_carry(tensor.device):
        raise CyxtrainError(
            f"the ring carries tensors of CPUs and of accelerators such as CUDA's; this one is on {tensor.device}. "
            "Call cpu() first."
        )
    return tensor


def check_target(tensor: Tensor) -> Tensor:
    """Return a tensor that can be received into; refuse one whose elements share memory, as after expand()."""
    if not check_tensor(tensor).is_contiguous() and _shares_memory(tensor):
        raise ConfigError(
            f"elements of this tensor {list(tensor.shape)} share memory (strides {list(tensor.stride())}), as after "
            "expand(): nothing can be received into it. Pass a tensor with its own memory: contiguous() or clone()."
        )
    return tensor


def _shares_memory(tensor: Tensor) -> bool:
    """Return whether any two elements are at one place; for rare strides of `as_strided`, whether they may be."""
    last = 0  # the last place that the dimensions with smaller strides reach
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= last:
            return True
        last += (size - 1) * stride
    return False


def flat_copy_of(tensor: Tensor) -> Tensor:
    """Return a new one-dimensional CPU tensor with the same elements."""
    if not check_tensor(tensor).is_cpu:
        return host_copy(tensor)
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1)


def copy_back(flat: Tensor, tensor: Tensor) -> None:
    """Copy a result to its tensor if `flat_view_of` made a copy."""
    if flat.data_ptr() != tensor.data_ptr():
        write(flat, tensor)


def write(flat: Tensor, tensor: Tensor) -> None:
    """Copy as many elements, in one dimension, into a tensor."""
    with _mode_to_change(tensor):
        tensor.detach().copy_(flat.view(tensor.shape))


def replace(tensor: Tensor, whole: Tensor) -> None:
    """Copy all elements to a tensor from another one of the same size and layout."""
    with torch.no_grad(), _mode_to_change(tensor):
        tensor.copy_(whole)


def _mode_to_change(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    if _needs_inference_mode(tensor):
        return torch.inference_mode()
    return contextlib.nullcontext()


def _needs_inference_mode(tensor: Tensor) -> bool:
    """Return whether PyTorch refuses to change a tensor here: it was made in inference mode."""
    return tensor.is_inference() and not torch.is_inference_mode_enabled()


def is_finite(tensor: Tensor) -> bool:
    """Return whether no element of a CPU tensor is NaN or infinite. Cost: they are read once."""
    # NaN and infinities survive a sum, which may overflow by itself.
    return cmath.isfinite(tensor.sum().item()) or bool(tensor.isfinite().all())


def overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two one-dimensional, contiguous tensors share memory."""
    one_begin, one_end = addresses_of(one)
    other_begin, other_end = addresses_of(other)
    return one_begin < other_end and other_begin < one_end


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor's memory holds its elements in order and unmodified."""
    return tensor.is_contiguous() and tensor.is_cpu and not tensor.is_conj() and not tensor.is_neg()


def has_plain_memory(tensor: Tensor) -> bool:
    """Return whether a tensor is a plain one whose memory can be read and written at its address."""
    plain = type(tensor) in _PLAIN_TYPES and tensor.layout is torch.strided and is_plain(tensor)
    # A tensor of zeros may have no memory.
    return plain and tensor.data_ptr() != 0


def flat_view_of(tensor: Tensor) -> Tensor:
    """Return the elements in one dimension, which may be changed: a view of plain memory, otherwise a copy."""
    if not is_plain(check_tensor(tensor)):
        return flat_copy_of(tensor)
    if _needs_inference_mode(tensor):
        if tensor.numel() == 0:
            return flat_copy_of(tensor)
        # The same memory as a tensor of this mode.
        return torch.frombuffer(memory_of(tensor), dtype=tensor.dtype)
    if tensor.dim() == 1 and not tensor.requires_grad:
        return tensor
    return tensor.detach().view(-1)


def can_carry(device: torch.device) -> bool:
    """Return whether the ring can carry tensors of a device other than the CPU."""
    visible = accelerator.visible()
    return visible is not None and device.type == visible.type


def host_copy(tensor: Tensor) -> Tensor:
    """Return an accelerator tensor's elements, flat, in pinned memory, once its stream has made them."""
    staged = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu", pin_memory=True)
    return staged.copy_(tensor.detach().reshape(-1))


def for_another_thread(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return a call for another thread, in this thread's mode, which waits for the work queued on its stream."""
    call = functools.partial(_in_mode, torch.is_inference_mode_enabled(), call)
    device = accelerator.in_use()
    if device is None:
        return call
    before = torch.Event(device)
    before.record(torch.accelerator.current_stream(device))

    def staged() -> Any:
        stream = accelerator.side_stream(device, "ring")
        # `with stream` also selects its device.
        with stream:
            stream.wait_event(before)
            result = call()
            stream.synchronize()
        return result

    return staged


def _in_mode(inference: bool, call: Callable[[], Any]) -> Any:
    with torch.inference_mode(inference):
        return call()
