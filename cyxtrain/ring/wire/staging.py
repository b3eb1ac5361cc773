"""Tensors of an accelerator on a backend for CPUs: they are copied through pinned host memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cyxtrain.environment import accelerator


def can_carry(device: torch.device) -> bool:
    """Return whether the ring can carry tensors of a device that is not the CPU."""
    visible = accelerator.visible()
    return visible is not None and device.type == visible.type


def host_copy(tensor: Tensor) -> Tensor:
    """Returns the elements of an accelerator's tensor, flat, in pinned memory, once its stream has made them."""
    staged = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu", pin_memory=True)
    return staged.copy_(tensor.detach().reshape(-1))


def beside(call: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a call for another thread that is made as this thread would make it.

    It sees what this one's stream has been asked for so far. Copies run on a stream of their own, beside what the
    caller computes, and are over when the call is.
    """
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
