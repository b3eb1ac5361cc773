"""How the numbers of a bucket become means over ranks.

By an all_reduce; in shared memory; by a comm hook; in half precision. (As low-rank matrices: `compression.py`.)
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from cyxtrain.ring import CallOptions, MeanWeight, SharedGradientBuffer
from cyxtrain.world.consensus import backends_of

_ASYNCHRONOUS = CallOptions(asyncOp=True)
_AVERAGING = ("ring", "nccl")  # backends with ReduceOp.AVG, which Gloo, for one, has not


class MeanWork:
    """The all_reduce of a tensor to its mean over ranks, in place; untouchable until `wait` returns."""

    def __init__(self, tensor: Tensor, group: Any) -> None:
        backend: str = dist.get_backend(group)
        if backend not in _AVERAGING:  # "cpu:gloo,cuda:nccl", say, or unnamed
            backend = backends_of(group).get(tensor.device.type, backend)
        op = dist.ReduceOp.AVG
        self._divisor = 1
        if backend not in _AVERAGING:
            op = dist.ReduceOp.SUM
            self._divisor = group.size()
        self._tensor = tensor
        self._work: Any = dist.all_reduce(tensor, op, group, async_op=True)

    def wait(self) -> None:
        """Return when the mean is there."""
        self._work.wait()
        if self._divisor > 1:
            self._tensor.div_(self._divisor)


def multiply(numbers: Tensor, factor: Tensor | float) -> None:
    """Multiply in place by a number, or by a 0-dim tensor, without waiting for its device."""
    if not isinstance(factor, Tensor):
        numbers.mul_(factor)
    elif numbers.dtype.itemsize > 2:
        numbers.mul_(factor.to(numbers.device, numbers.real.dtype))
    else:  # in 16 bits the factor itself would be rounded
        numbers.copy_(numbers.float() * factor.to(numbers.device, torch.float32))


class GradientExchange(ABC):
    """The exchange of a bucket: `launch`; when all are launched, `launch_second_round`; `wait`; `complete`.

    `numbers` is the bucket's flat tensor: gradients, then flags.
    """

    def __init__(self, numbers: Tensor, gradients_end: int) -> None:
        self._numbers = numbers
        self._gradients = numbers[:gradients_end]
        self._flags = numbers[gradients_end:]
        self._pending: Sequence[Any] = ()  # collectives in progress

    @abstractmethod
    def launch(self, group: Any, scale: float) -> None:
        """Send this rank's numbers. Its gradients have been multiplied by `scale`, which only PowerSGD must know."""

    def launch_second_round(self) -> None:  # noqa: B027 - most exchanges have one round
        """Begin a second round, if there is one."""

    def wait(self) -> None:
        """Wait until the flags are means over ranks, and, after `complete`, the gradients."""
        for work in self._pending:
            work.wait()
        self._pending = ()
        self._store()

    def _store(self) -> None:  # noqa: B027 - most exchanges end in place
        """Copy what was received into the bucket."""

    @property
    def results(self) -> list[Tensor]:
        """What was received, the same on every rank: if it is finite, all ranks' gradients are."""
        return [self._numbers]

    @property
    def collective(self) -> str:
        """What the ring's errors call its collective."""
        return f"AVG, {str(self._numbers.dtype).removeprefix('torch.')} {[*self._numbers.shape]})"

    @property
    def is_known_finite(self) -> bool:
        """Whether all numbers are known to be finite, at no cost."""
        return False

    def complete(self, *, is_finite: bool, unused: Collection[int]) -> None:  # noqa: B027 - most exchanges keep nothing
        """Finish the gradients, and keep what the next step needs; `unused` are those that no rank has made."""

    def divide_by(self, weight: MeanWeight) -> None:  # noqa: B027 - most multiply afterwards
        """Give this rank's weight of the next numbers, before `launch`."""

    def multiply(self, factor: Tensor | float) -> None:
        """Multiply the gradients, which are complete; a 0-dim tensor may be on another device."""
        multiply(self._gradients, factor)

    def abandon(self) -> None:
        """Wait for an interrupted exchange, whose memory is filled anew. The group reports if it failed."""
        for work in self._pending:
            with contextlib.suppress(RuntimeError):
                work.wait()
        self._pending = ()


class AllReduceExchange(GradientExchange):
    """An all_reduce of the bucket."""

    @override
    def launch(self, group: Any, scale: float) -> None:
        self._pending = [MeanWork(self._numbers, group)]


class SharedMemoryExchange(GradientExchange):
    """A bucket in memory that all ranks share: nothing is sent."""

    def __init__(self, shared_buffer: SharedGradientBuffer, gradients_end: int) -> None:
        super().__init__(shared_buffer.tensor, gradients_end)
        self._shared_buffer = shared_buffer

    @override
    def launch(self, group: Any, scale: float) -> None:
        self._pending = [self._shared_buffer.all_reduce(_ASYNCHRONOUS)]

    @property
    @override
    def collective(self) -> str:
        return self._shared_buffer.description.partition("(")[2]

    @property
    @override
    def is_known_finite(self) -> bool:
        return self._shared_buffer.is_known_finite

    @override
    def divide_by(self, weight: MeanWeight) -> None:
        self._shared_buffer.divide_by(weight, len(self._gradients))

    @override
    def multiply(self, factor: Tensor | float) -> None:
        """Do nothing: they were multiplied when they were added up."""


class CommHookExchange(GradientExchange):
    """PyTorch's comm hooks, which may do anything to gradients: the flags are reduced separately."""

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
        self._pending = [MeanWork(self._flags, group), self._future]

    @override
    def _store(self) -> None:
        result = self._future.wait()
        self._future = None
        gradients = result[0] if isinstance(result, (list, tuple)) else result
        if gradients.data_ptr() != self._gradients.data_ptr():  # a hook may work in place
            self._gradients.copy_(gradients)


class HalfPrecisionExchange(GradientExchange):
    """Half as many bytes: each rank's part of the mean is rounded to a narrower type, and summed there.

    A gradient beyond the type's range becomes infinite. Source: torch.distributed's fp16_compress_hook.
    """

    def __init__(self, numbers: Tensor, gradients_end: int, dtype: torch.dtype) -> None:
        super().__init__(numbers, gradients_end)
        self._narrow = torch.empty_like(numbers, dtype=dtype)
        self._world_size = 1

    @override
    def launch(self, group: Any, scale: float) -> None:
        self._world_size = group.size()
        end = len(self._gradients)
        torch.div(self._gradients, self._world_size, out=self._narrow[:end])
        self._narrow[end:] = self._flags  # a sum of ones is exact; a third is not
        self._pending = [dist.all_reduce(self._narrow, dist.ReduceOp.SUM, group, async_op=True)]

    @override
    def _store(self) -> None:
        self._numbers.copy_(self._narrow)
        self._flags.div_(self._world_size)
