"""How the numbers of a bucket become means over ranks.

By an all_reduce; in shared memory; in the order of slices; by a comm hook; in half precision. (As low-rank matrices:
`compression.py`.)
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
from cyxtrain.world.slices import Slices, additions_of_rows, rows_by_rank

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

    def __init__(self, shared_buffer: SharedGradientBuffer, gradients_end: int, *, is_mean_of_ranks: bool) -> None:
        super().__init__(shared_buffer.tensor, gradients_end)
        self._shared_buffer = shared_buffer
        self._is_mean_of_ranks = is_mean_of_ranks  # and not one of slices

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
        if self._is_mean_of_ranks:
            self._shared_buffer.divide_by(weight, len(self._gradients))

    @override
    def multiply(self, factor: Tensor | float) -> None:
        """Multiply the gradients of slices; those of ranks were multiplied when they were added up."""
        if not self._is_mean_of_ranks:
            super().multiply(factor)


def padded(count: int, slices: Slices) -> int:
    """Return how many elements a row of `SliceExchange` has: as many for each rank."""
    if not slices.is_virtual:
        return count
    return -(-count // slices.num_ranks) * slices.num_ranks


class SliceExchange(GradientExchange):
    """The mean over slices, in the order of their tree: the same bits on any number of ranks, over any backend.

    Each rank adds up its part of all ranks' rows, and sends the result to the others.

    Cost: the bytes of an all_reduce, if each rank has one row; each further row, its elements once.

    Args:
        rows: This rank's, `padded`; the first one receives the result.
        numbers: The first row without padding.
        slices: Those of this rank.
        divisor: By which the sum is divided.
    """

    def __init__(
        self, rows: Sequence[Tensor], numbers: Tensor, gradients_end: int, slices: Slices, divisor: int
    ) -> None:
        super().__init__(numbers, gradients_end)
        self._divisor = divisor
        self._rows = rows
        self._slices = slices
        self._group: Any = None
        by_rank = rows_by_rank(slices)
        self._part = len(rows[0]) // slices.num_ranks
        self._sizes = [len(of_rank) * self._part for of_rank in by_rank]  # elements that each rank sends to this one
        # Two numbers are added with the same result in either order: any all_reduce does.
        self._is_one_addition = [*map(len, by_rank)] == [1, 1]
        self._received: Tensor | None = None

    @override
    def launch(self, group: Any, scale: float) -> None:
        self._group = group
        num_ranks = self._slices.num_ranks
        if num_ranks == 1:
            return
        if self._is_one_addition:
            self._pending = [dist.all_reduce(self._numbers, dist.ReduceOp.SUM, group, async_op=True)]
            return
        sent = self._rows[0]
        if len(self._rows) > 1:
            sent = torch.stack([row.view(num_ranks, -1) for row in self._rows], dim=1).view(-1)
        self._received = sent.new_empty(sum(self._sizes))
        equal = [len(self._rows) * self._part] * num_ranks
        work = dist.all_to_all_single(self._received, sent, self._sizes, equal, group, async_op=True)
        self._pending = [work]

    @override
    def launch_second_round(self) -> None:
        if self._received is None:
            return
        for work in self._pending:
            work.wait()
        parts = self._received.view(-1, self._part)
        self._received = None
        for into, source in additions_of_rows(self._slices):
            parts[into].add_(parts[source])
        everywhere = [*self._rows[0].view(self._slices.num_ranks, -1)]
        self._pending = [dist.all_gather(everywhere, parts[0], self._group, async_op=True)]

    @override
    def _store(self) -> None:
        if self._divisor > 1:
            self._numbers.div_(self._divisor)


def sum_over_slices(rows: Sequence[Tensor], slices: Slices, group: Any) -> Tensor:
    """Return the sum of vectors that the ranks have, as many as `rows_of`, in the order of the tree of slices."""
    count = len(rows[0])
    whole = padded(count, slices)
    longer = [torch.nn.functional.pad(row, (0, whole - count)) for row in rows]
    exchange = SliceExchange(longer, longer[0][:count], count, slices, 1)
    exchange.launch(group, 1.0)
    exchange.launch_second_round()
    exchange.wait()
    return longer[0][:count]


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
