"""Accelerator tensors on a CPU backend: they are copied through pinned host memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cyxtrain.environment import accelerator


def can_carry(device: torch.device) -> bool:
    """Return whether the ring can carry tensors of a device other than the CPU."""
    visible = accelerator.visible()
    return visible is not None and device.type == visible.type


def host_copy(tensor: Tensor) -> Tensor:
    """Return an accelerator tensor's elements, flat, in pinned memory, once its stream has made them."""
    staged = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu", pin_memory=True)
    return staged.copy_(tensor.detach().reshape(-1))


def beside(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return a call for another thread that sees this thread's mode, and what its stream was asked so far."""
    call = functools.partial(_in_mode, torch.is_inference_mode_enabled(), call)
    device = accelerator.in_use()
    if device is None:
        return call
    before = torch.Event(device)
    before.record(torch.accelerator.current_stream(device))

    def staged() -> Any:
        stream = accelerator.side_stream(device, "ring")
        with stream:  # and on its device
            stream.wait_event(before)
            result = call()
            stream.synchronize()
        return result

    return staged


def _in_mode(inference: bool, call: Callable[[], Any]) -> Any:
    with torch.inference_mode(inference):
        return call()
