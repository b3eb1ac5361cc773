"""What ranks bring to the ring in tests, the bits that must come out, and calls for ranks that do not agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import contract_values
import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cyxtrain.errors import CyxtrainError
from cyxtrain.ring import RingProcessGroup
from cyxtrain.ring.schedules.summation import chunks, is_latency_bound

Op = dist.ReduceOp
Reduction = dist.ReduceOp.RedOpType
Call = Callable[[RingProcessGroup], Any]
Options = TypeVar("Options")
DTYPES = contract_values.DTYPES
REAL: dict[Reduction, Callable[[Tensor, Tensor], Tensor]] = {
    Op.SUM: torch.add,
    Op.AVG: torch.add,
    Op.PRODUCT: torch.mul,
    Op.MIN: torch.minimum,
    Op.MAX: torch.maximum,
}
WHOLE: dict[Reduction, Callable[..., Any]] = {
    Op.SUM: np.add,
    Op.AVG: np.add,
    Op.PRODUCT: np.multiply,
    Op.MIN: np.minimum,
    Op.MAX: np.maximum,
    Op.BAND: np.bitwise_and,
    Op.BOR: np.bitwise_or,
    Op.BXOR: np.bitwise_xor,
}


def made(dtype: torch.dtype, count: int, rank: int, seed: int = 0) -> Tensor:
    """Return the input of a rank: the same tensor at every call."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    whole = torch.randint(-9, 10, (count,), generator=generator)
    if dtype is torch.bool:
        return whole > 0
    if dtype in contract_values.UNSIGNED:
        return whole.abs().to(dtype)
    if dtype in contract_values.SIGNED:
        return whole.to(dtype)
    real = torch.randn(count, generator=generator, dtype=torch.float64)
    if dtype.is_complex:
        return torch.complex(real, real.flip(0)).to(dtype)
    return real.to(dtype)


def tiled(dtype: torch.dtype, count: int, rank: int) -> Tensor:
    """Return what a rank brings of many elements: drawn ones, again and again, after a prime number of them."""
    drawn = made(dtype, min(count, 4099), rank)
    return drawn.repeat(-(-count // len(drawn)))[:count].clone()


def reductions_of(dtype: torch.dtype) -> list[Reduction]:
    return [getattr(Op, name) for name in contract_values.reductions_of(dtype)]


def reduced(tensors: Sequence[Tensor], op: Reduction) -> Tensor:
    """The documented result: of few bytes a tree of neighbours, of more each chunk all around.

    Few: neighbours are combined, then neighbouring pairs, and so on; the last one waits if it has no neighbour.
    More: chunk c is combined from rank c + 1 on, all around, with rank c as the last.
    """
    if is_latency_bound(len(tensors), tensors[0].numel(), tensors[0].element_size()):
        return in_a_tree(tensors, op)
    return all_around(tensors, op)


def in_a_tree(tensors: Sequence[Tensor], op: Reduction) -> Tensor:
    total = Op.SUM if op == Op.AVG else op
    places = list(tensors)
    while len(places) > 1:
        places = [folded(places[place : place + 2], total) for place in range(0, len(places), 2)]
    return averaged(places[0], len(tensors)) if op == Op.AVG else places[0]


def all_around(tensors: Sequence[Tensor], op: Reduction) -> Tensor:
    parts = []
    for chunk, (start, end) in enumerate(chunks(tensors[0].numel(), len(tensors))):
        order = [tensors[(chunk + 1 + step) % len(tensors)][start:end] for step in range(len(tensors))]
        parts.append(folded(order, op))
    return torch.cat(parts)


def folded(order: Sequence[Tensor], op: Reduction) -> Tensor:
    dtype = order[0].dtype
    if dtype.is_complex and op == Op.PRODUCT:
        total = torch.view_as_real(order[0].clone())
        for part in map(torch.view_as_real, order[1:]):
            (a, b), (c, d) = total.unbind(1), part.unbind(1)
            total = torch.stack([a * c - b * d, a * d + b * c], dim=1)
        return torch.view_as_complex(total)
    if dtype.is_complex:
        return torch.view_as_complex(folded([torch.view_as_real(part.clone()) for part in order], op))
    if contract_values.is_whole(dtype):
        arrays: list[npt.NDArray[Any]] = [part.numpy() for part in order]
        whole = arrays[0].copy()
        for array in arrays[1:]:
            whole = WHOLE[op](whole, array)
        total = torch.from_numpy(whole)
        return averaged(total, len(order)) if op == Op.AVG else total
    total = order[0].clone()
    for part in order[1:]:
        total = REAL[op](total, part)
    return averaged(total, len(order)) if op == Op.AVG else total


def averaged(total: Tensor, world_size: int) -> Tensor:
    if total.dtype is torch.bool:
        return total
    if contract_values.is_whole(total.dtype):
        array: npt.NDArray[Any] = total.numpy()
        return torch.from_numpy((np.sign(array) * (np.abs(array) // world_size)).astype(array.dtype))
    if total.is_complex():
        return torch.view_as_complex(torch.view_as_real(total) / world_size)
    return total / world_size


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def same(found: Tensor, expected: Tensor) -> bool:
    return found.dtype == expected.dtype and found.shape == expected.shape and bits(found) == bits(expected)


def options(kind: Callable[[], Options], **fields: Any) -> Options:
    made_options = kind()
    for name, value in fields.items():
        setattr(made_options, name, value)
    return made_options


def all_reduce(group: RingProcessGroup, tensor: Tensor, op: Reduction = Op.SUM) -> Tensor:
    group.allreduce([tensor], options(dist.AllreduceOptions, reduceOp=op)).wait()
    return tensor


def with_cores(*worlds: Any) -> pytest.MarkDecorator:
    """Parametrize a test by (ranks, cores): three ranks or more that share cores communicate through rank 0.

    Args:
        *worlds: Pairs of integers, or `pytest.param` of such a pair.
    """
    values = [getattr(world, "values", world) for world in worlds]
    ids = [f"{size} ranks on {cores} core{'s' * (cores > 1)}" for size, cores in values]
    return pytest.mark.parametrize(("world_size", "cores"), worlds, indirect=["cores"], ids=ids)


WORLDS = with_cores((2, 1), (3, 1), (3, 3), (4, 3), (4, 4))
LARGE = 2_000_003


# --- calls, for ranks that do not agree -----------------------------------------------------------------------------


def reduce_all(shape: tuple[int, ...] = (3,), dtype: torch.dtype = torch.float32, op: Reduction = Op.SUM) -> Call:
    return lambda group: group.allreduce([torch.zeros(shape, dtype=dtype)], options(dist.AllreduceOptions, reduceOp=op))


def broadcast(src: int = 0, shape: tuple[int, ...] = (3,), dtype: torch.dtype = torch.float32) -> Call:
    return lambda group: group.broadcast(
        [torch.zeros(shape, dtype=dtype)], options(dist.BroadcastOptions, rootRank=src)
    )


def reduce(dst: int) -> Call:
    return lambda group: group.reduce([torch.zeros(3)], options(dist.ReduceOptions, rootRank=dst))


def gather_all(shape: tuple[int, ...] = (3,), dtype: torch.dtype = torch.float32) -> Call:
    def call(group: RingProcessGroup) -> Any:
        outputs = [torch.zeros(shape, dtype=dtype) for _ in range(group.size())]
        return group.allgather([outputs], [torch.zeros(shape, dtype=dtype)])

    return call


def scatter_all(count: int, op: Reduction = Op.SUM) -> Call:
    """Reduces, and leaves each rank `count` elements."""
    return lambda group: group.reduce_scatter_single(
        torch.zeros(count), torch.zeros(count * group.size()), options(dist.ReduceScatterOptions, reduceOp=op)
    )


def exchange(rows: int) -> Call:
    return lambda group: group.all_to_all_single(
        torch.zeros(rows * group.size()), torch.zeros(rows * group.size()), [], []
    )


def barrier(group: RingProcessGroup) -> Any:
    return group.barrier()


def in_turn(*calls: Call) -> Call:
    return lambda group: [call(group) for call in calls]


def said_of(call: Callable[[], object]) -> str:
    """Return the type of the error that a call raises and its rank, such as "PeerLostError 1"; or "nothing"."""
    try:
        call()
    except CyxtrainError as error:
        return f"{type(error).__name__} {error.rank}"
    return "nothing"


def error_of(call: Callable[[], object]) -> CyxtrainError:
    with pytest.raises(CyxtrainError) as caught:
        call()
    return caught.value
