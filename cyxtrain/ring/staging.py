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
    """Returns a call for another thread that sees what the streams of this one have been asked for so far.

    Copies then run on a stream of their own, beside what the caller computes, and are over when the call is.
    """
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


@functools.lru_cache(maxsize=64)
def _stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
