"""CUDA tensors on a backend for CPUs: they travel by way of pinned host memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def host_copy(tensor: Tensor) -> Tensor:
    """Returns the elements of a CUDA tensor in one dimension, in pinned memory, once its stream has made them."""
    staged = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu", pin_memory=True)
    return staged.copy_(tensor.detach().reshape(-1))


def beside(call: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a call for another thread that is made as this thread would make it.

    It sees what this one's stream has been asked for so far. Copies run on a stream of their own, beside what the
    caller computes, and are over when the call is.
    """
    call = functools.partial(_in_mode, torch.is_inference_mode_enabled(), call)
    if not torch.cuda.is_initialized():
        return call
    device, before = torch.cuda.current_device(), torch.cuda.Event()
    before.record()

    def staged() -> Any:
        stream = _stream(device)
        with torch.cuda.device(device), torch.cuda.stream(stream):
            stream.wait_event(before)
            result = call()
            stream.synchronize()
        return result

    return staged


def _in_mode(inference: bool, call: Callable[[], Any]) -> Any:
    with torch.inference_mode(inference):
        return call()


@functools.lru_cache(maxsize=64)
def _stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
