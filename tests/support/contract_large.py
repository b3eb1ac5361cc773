"""Every collective on more than 2 GiB, once: what two ranks do. Bytes, so that there are as many elements too."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

import cyxtrain as cx

HALF = 2**30 + 519
WHOLE = 2 * HALF
_PERIOD = 251  # divides no power of two: a piece that lands in another place shows
_PIECE = 2**26 // _PERIOD * _PERIOD


def pattern(rank: int, part: int = 0) -> Tensor:
    """The bytes that a rank brings, for as long as they repeat themselves."""
    return ((torch.arange(_PERIOD) + 7 * rank + 31 * part) % 256).to(torch.uint8)


def filled(count: int, row: Tensor) -> Tensor:
    tensor = torch.empty(count, dtype=torch.uint8)
    whole = count // _PERIOD * _PERIOD
    tensor[:whole].view(-1, _PERIOD).copy_(row)
    tensor[whole:] = row[: count - whole]
    return tensor


def is_filled(tensor: Tensor, row: Tensor) -> bool:
    pieces = (tensor[start : start + _PIECE] for start in range(0, tensor.numel(), _PIECE))
    return all(torch.equal(piece, filled(piece.numel(), row)) for piece in pieces)


def all_reduce(rank: int) -> bool:
    tensor = filled(WHOLE, pattern(rank))
    dist.all_reduce(tensor)
    return is_filled(tensor, pattern(0) + pattern(1))


def reduce(rank: int) -> bool:
    tensor = filled(WHOLE, pattern(rank))
    dist.reduce(tensor, 1)
    return is_filled(tensor, pattern(0) + pattern(1) if rank == 1 else pattern(0))


def reduce_scatter_tensor(rank: int) -> bool:
    output, whole = torch.empty(HALF, dtype=torch.uint8), filled(WHOLE, pattern(rank))
    dist.reduce_scatter_tensor(output, whole)
    shift = rank * HALF % _PERIOD
    return is_filled(output, (pattern(0) + pattern(1)).roll(-shift))


def broadcast(rank: int) -> bool:
    tensor = filled(WHOLE, pattern(rank))
    dist.broadcast(tensor, 1)
    return is_filled(tensor, pattern(1))


def all_gather_into_tensor(rank: int) -> bool:
    output = torch.empty(WHOLE, dtype=torch.uint8)
    dist.all_gather_into_tensor(output, filled(HALF, pattern(rank)))
    return is_filled(output[:HALF], pattern(0)) and is_filled(output[HALF:], pattern(1))


def gather(rank: int) -> bool:
    outputs = [torch.empty(HALF, dtype=torch.uint8) for _ in range(2)] if rank == 0 else None
    dist.gather(filled(HALF, pattern(rank)), outputs, 0)
    return all(is_filled(output, pattern(other)) for other, output in enumerate(outputs or ()))


def scatter(rank: int) -> bool:
    output = torch.empty(HALF, dtype=torch.uint8)
    dist.scatter(output, [filled(HALF, pattern(1, part)) for part in range(2)] if rank == 1 else None, 1)
    return is_filled(output, pattern(1, rank))


def all_to_all_single(rank: int) -> bool:
    output, tensor = (
        torch.empty(WHOLE, dtype=torch.uint8),
        torch.cat([filled(HALF, pattern(rank, p)) for p in range(2)]),
    )
    dist.all_to_all_single(output, tensor)
    return is_filled(output[:HALF], pattern(0, rank)) and is_filled(output[HALF:], pattern(1, rank))


def send_and_recv(rank: int) -> bool:
    if rank == 0:
        dist.send(filled(WHOLE, pattern(0)), 1)
        return True
    tensor = torch.empty(WHOLE, dtype=torch.uint8)
    dist.recv(tensor, 0)
    return is_filled(tensor, pattern(0))


ALL = (
    all_reduce,
    reduce,
    reduce_scatter_tensor,
    broadcast,
    all_gather_into_tensor,
    gather,
    scatter,
    all_to_all_single,
    send_and_recv,
)


def run_all() -> dict[str, bool]:
    """Whether each collective was right on this rank."""
    with cx.init(cx.DistributedConfig(collective_timeout_ms=300_000)):
        return {collective.__name__: collective(dist.get_rank()) for collective in ALL}
