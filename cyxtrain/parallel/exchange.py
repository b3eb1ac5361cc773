"""How the numbers of a bucket travel, to become means over ranks.

As they are; not at all, in memory that all ranks have in common; by a comm hook; or in half precision. (As thin
matrices: `powersgd.py`.)
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from cyxtrain.ring import CallOptions, SharedGradientBuffer
from cyxtrain.world.consensus import backends_of

_ASYNCHRONOUS = CallOptions(asyncOp=True)


class Waitable(Protocol):
    """What travels, and can be waited for."""

    def wait(self) -> object:
        """Returns when it has arrived."""


class Average(NamedTuple):
    """A pending average of a tensor over ranks, in place.

    Attributes:
        tensor: Floats; not to be touched until `wait` returns.
        divisor: What a sum is divided by; 1: the backend averages.
        work: The all_reduce.
    """

    tensor: Tensor
    divisor: int
    work: Any

    def wait(self) -> None:
        """Wait for the average."""
        self.work.wait()
        if self.divisor > 1:
            self.tensor.div_(self.divisor)


def averaging(tensor: Tensor, group: Any) -> tuple[Any, int]:
    """Return the reduction that averages a tensor over a group, and what to divide its result by."""
    backend: str = dist.get_backend(group)
    if backend not in ("ring", "nccl"):  # "cpu:gloo,cuda:nccl", say, or an unnamed one
        backend = backends_of(group).get(tensor.device.type, backend)
    if backend in ("ring", "nccl"):
        return dist.ReduceOp.AVG, 1
    return dist.ReduceOp.SUM, dist.get_world_size(group)  # Gloo, say, has no AVG


def average(tensor: Tensor, group: Any) -> Average:
    """Start to average a tensor over ranks, in place."""
    op, divisor = averaging(tensor, group)
    return Average(tensor, divisor, dist.all_reduce(tensor, op, group, async_op=True))


class GradientExchange(ABC):
    """How one bucket is averaged: `launch`; `send_on` once all buckets are launched; `arrive`; `settle`.

    Args:
        numbers: The bucket's flat tensor: gradients, then flags.
        gradients_end: Where the flags begin.
    """

    def __init__(self, numbers: Tensor, gradients_end: int) -> None:
        self._numbers = numbers
        self._gradients, self._flags = numbers[:gradients_end], numbers[gradients_end:]
        self._pending: list[Waitable] = []

    @abstractmethod
    def launch(self, group: Any, scale: float) -> None:
        """Start to average this rank's numbers, which are pending from then on.

        Args:
            group: The process group.
            scale: The factor on gradients in this step, such as a loss scale.
        """

    def send_on(self) -> None:  # noqa: B027 - most ways have one round
        """Begins a second round, where there is one; all buckets have been launched."""

    def arrive(self) -> None:
        """Waits; then the flags are means over ranks, and, after `settle`, the gradients."""
        for pending in self._pending:
            pending.wait()
        self._pending = []
        self._take_in()

    def _take_in(self) -> None:  # noqa: B027 - most ways end in place
        """Puts what has arrived in its place."""

    @property
    def arrived(self) -> list[Tensor]:
        """What has arrived: where that is finite, each rank's gradients are; the same on every rank."""
        return [self._numbers]

    @property
    def is_known_finite(self) -> bool:
        """Whether all numbers are known to be finite, at no cost."""
        return False

    def settle(self, *, is_whole: bool, unused: Collection[int]) -> None:  # noqa: B027 - most ways keep nothing
        """Completes the gradients, and keeps what is for the next step.

        Args:
            is_whole: Whether what has arrived, in all buckets, is finite.
            unused: Numbers of the gradients, in this bucket, that no rank has made.
        """

    def abandon(self) -> None:
        """Waits for what was interrupted: it travels in memory that is filled anew. The group says if it failed."""
        for pending in self._pending:
            with contextlib.suppress(RuntimeError):
                pending.wait()
        self._pending = []


class AllReduceExchange(GradientExchange):
    """An all_reduce of the bucket."""

    @override
    def launch(self, group: Any, scale: float) -> None:
        op, divisor = averaging(self._numbers, group)
        self._pending = [Average(self._numbers, divisor, dist.all_reduce(self._numbers, op, group, async_op=True))]


class SharedMemoryExchange(GradientExchange):
    """A bucket in memory that all ranks have in common: nothing of it travels.

    Args:
        mean: The bucket's numbers, and how they are averaged.
        gradients_end: As `GradientExchange`.
    """

    def __init__(self, mean: SharedGradientBuffer, gradients_end: int) -> None:
        super().__init__(mean.tensor, gradients_end)
        self._mean = mean

    @override
    def launch(self, group: Any, scale: float) -> None:
        self._pending = [self._mean.all_reduce(_ASYNCHRONOUS)]

    @property
    def is_known_finite(self) -> bool:
        """Whether the ranks have found so, each its part."""
        return self._mean.is_known_finite


class CommHookExchange(GradientExchange):
    """PyTorch's comm hooks. A hook may do anything to gradients: the flags travel by themselves.

    Args:
        numbers: As `GradientExchange`.
        gradients_end: As `GradientExchange`.
        hook: Takes the state and the bucket, returns a Future of the gradients.
        state: For the hook.
        bucket: As torch.distributed.GradBucket.
    """

    def __init__(
        self, numbers: Tensor, gradients_end: int, hook: Callable[[Any, Any], Any], state: Any, bucket: Any
    ) -> None:
        super().__init__(numbers, gradients_end)
        self._hook = hook
        self._state = state
        self._bucket = bucket
        self._future: Any = None

    @override
    def launch(self, group: Any, scale: float) -> None:
        self._future = self._hook(self._state, self._bucket)
        self._pending = [average(self._flags, group), self._future]

    def _take_in(self) -> None:
        result = self._future.wait()
        self._future = None
        gradients = result[0] if isinstance(result, (list, tuple)) else result
        if gradients.data_ptr() != self._gradients.data_ptr():
            self._gradients.copy_(gradients)


class HalfPrecisionExchange(GradientExchange):
    """Half as many bytes: each rank's part of the mean is rounded to a narrower type, and added up there.

    A gradient beyond the type's range becomes infinite. Source: torch.distributed's fp16_compress_hook.

    Args:
        numbers: As `GradientExchange`.
        gradients_end: As `GradientExchange`.
        dtype: What travels.
    """

    def __init__(self, numbers: Tensor, gradients_end: int, dtype: torch.dtype) -> None:
        super().__init__(numbers, gradients_end)
        self._narrow = torch.empty_like(numbers, dtype=dtype)
        self._world_size = 1

    @override
    def launch(self, group: Any, scale: float) -> None:
        self._world_size, end = dist.get_world_size(group), len(self._gradients)
        torch.div(self._gradients, self._world_size, out=self._narrow[:end])
        self._narrow[end:] = self._flags  # a sum of ones is exact; a third is not
        self._pending = [dist.all_reduce(self._narrow, dist.ReduceOp.SUM, group, async_op=True)]

    def _take_in(self) -> None:
        self._numbers.copy_(self._narrow)
        self._flags.div_(self._world_size)
