"""The contract of the collectives: what each rank calls, through PyTorch's public names, and where what must come."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from contract_setting import Setting
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager, _get_default_group, _get_default_store, _world

# --- with arithmetic ------------------------------------------------------------------------------------------------


def all_reduce(s: Setting) -> None:
    tensor = s.in_place()
    s.wait(dist.all_reduce(tensor, s.op, async_op=s.case.async_op))
    s.reduced(tensor, s.everyones())


def all_reduce_coalesced(s: Setting) -> None:
    tensors = [s.in_place(part) for part in range(2)]
    s.wait(dist.all_reduce_coalesced(tensors, s.op, async_op=s.case.async_op))
    for part, tensor in enumerate(tensors):
        s.reduced(tensor, s.everyones(part))


@contextlib.contextmanager
def _coalesced(s: Setting) -> Iterator[None]:
    try:
        with _coalescing_manager(async_ops=s.case.async_op) as manager:
            yield
    finally:
        # PyTorch does not, where the block raises, and then collects the calls that follow instead of doing them.
        _world.pg_coalesce_state.pop(_get_default_group(), None)
    if s.case.async_op:
        manager.wait()


def all_reduce_in_a_coalescing_manager(s: Setting) -> None:
    tensors = [s.in_place(part) for part in range(2)]
    with _coalesced(s):
        for tensor in tensors:
            dist.all_reduce(tensor, s.op)
    for part, tensor in enumerate(tensors):
        s.reduced(tensor, s.everyones(part))


def reduce(s: Setting) -> None:
    tensor = s.in_place()
    s.wait(dist.reduce(tensor, s.root, s.op, async_op=s.case.async_op))
    if s.rank == s.root:
        s.reduced(tensor, s.everyones())
    elif s.ours:
        s.moved(tensor, s.given(s.rank))


def reduce_scatter(s: Setting) -> None:
    output, inputs = s.room(), [s.input(s.given(s.rank, part)) for part in s.ranks]
    s.wait(dist.reduce_scatter(output, inputs, s.op, async_op=s.case.async_op))
    s.reduced(output, s.everyones(s.rank))


def reduce_scatter_tensor(s: Setting) -> None:
    output, tensor = s.room(), s.input(s.given(s.rank, shape=s.joined))
    s.wait(dist.reduce_scatter_tensor(output, tensor, s.op, async_op=s.case.async_op))
    s.reduced(output, [s.share(brought, s.rank) for brought in s.everyones(shape=s.joined)])


def reduce_scatter_in_a_coalescing_manager(s: Setting) -> None:
    outputs = [s.room() for _ in range(2)]
    inputs = [s.input(s.given(s.rank, part, s.joined)) for part in range(2)]
    with _coalesced(s):
        for output, tensor in zip(outputs, inputs, strict=True):
            dist.reduce_scatter_tensor(output, tensor, s.op)
    for part, output in enumerate(outputs):
        s.reduced(output, [s.share(brought, s.rank) for brought in s.everyones(part, s.joined)])


# --- where things only move -----------------------------------------------------------------------------------------


def broadcast(s: Setting) -> None:
    tensor = s.in_place()
    s.wait(dist.broadcast(tensor, s.root, async_op=s.case.async_op))
    s.moved(tensor, s.given(s.root))


def all_gather(s: Setting) -> None:
    outputs, tensor = [s.room() for _ in s.ranks], s.input(s.given(s.rank))
    s.wait(dist.all_gather(outputs, tensor, async_op=s.case.async_op))
    for rank, output in enumerate(outputs):
        s.moved(output, s.given(rank))


def all_gather_coalesced(s: Setting) -> None:
    outputs = [[s.room() for _ in range(2)] for _ in s.ranks]
    inputs = [s.input(s.given(s.rank, part)) for part in range(2)]
    s.wait(dist.all_gather_coalesced(outputs, inputs, async_op=s.case.async_op))
    for rank, part in itertools.product(s.ranks, range(2)):
        s.moved(outputs[rank][part], s.given(rank, part))


def _one_after_the_other(s: Setting, tensors: list[Tensor]) -> Tensor:
    return torch.cat(tensors) if s.case.shape else torch.stack(tensors)


def all_gather_into_tensor(s: Setting) -> None:
    output, tensor = s.room(s.joined), s.input(s.given(s.rank))
    s.wait(dist.all_gather_into_tensor(output, tensor, async_op=s.case.async_op))
    s.moved(output, _one_after_the_other(s, s.everyones()))


def all_gather_into_tensor_in_place(s: Setting) -> None:
    """What a rank brings is its part of the output already."""
    output = s.room(s.joined)
    own = output[s.rank] if not s.case.shape else output[s.rank * s.case.count : (s.rank + 1) * s.case.count]
    own.copy_(s.given(s.rank))
    s.wait(dist.all_gather_into_tensor(output, own, async_op=s.case.async_op))
    s.moved(output, _one_after_the_other(s, s.everyones()))


def all_gather_in_a_coalescing_manager(s: Setting) -> None:
    outputs = [s.room(s.joined) for _ in range(2)]
    inputs = [s.input(s.given(s.rank, part)) for part in range(2)]
    with _coalesced(s):
        for output, tensor in zip(outputs, inputs, strict=True):
            dist.all_gather_into_tensor(output, tensor)
    for part, output in enumerate(outputs):
        s.moved(output, _one_after_the_other(s, s.everyones(part)))


def gather(s: Setting) -> None:
    outputs = [s.room() for _ in s.ranks] if s.rank == s.root else None
    s.wait(dist.gather(s.input(s.given(s.rank)), outputs, s.root, async_op=s.case.async_op))
    for rank, output in enumerate(outputs or ()):
        s.moved(output, s.given(rank))


def scatter(s: Setting) -> None:
    output = s.room()
    inputs = [s.input(s.given(s.rank, part)) for part in s.ranks] if s.rank == s.root else None
    s.wait(dist.scatter(output, inputs, s.root, async_op=s.case.async_op))
    s.moved(output, s.given(s.root, s.rank))


def all_to_all(s: Setting) -> None:
    outputs, inputs = [s.room() for _ in s.ranks], [s.input(s.given(s.rank, part)) for part in s.ranks]
    s.wait(dist.all_to_all(outputs, inputs, async_op=s.case.async_op))
    for rank, output in enumerate(outputs):
        s.moved(output, s.given(rank, s.rank))


def _rows(s: Setting, giver: int, taker: int) -> int:
    """How many rows go from one rank to another: also none, and not as many as go back."""
    return (giver + 2 * taker) % 4 * s.case.count


def uneven_all_to_all(s: Setting) -> None:
    def piece(giver: int, taker: int) -> Tensor:
        return s.given(giver, taker, (_rows(s, giver, taker), *s.case.shape[1:]))

    outputs = [s.room(tuple(piece(rank, s.rank).shape)) for rank in s.ranks]
    inputs = [s.input(piece(s.rank, rank)) for rank in s.ranks]
    s.wait(dist.all_to_all(outputs, inputs, async_op=s.case.async_op))
    for rank, output in enumerate(outputs):
        s.moved(output, piece(rank, s.rank))


def all_to_all_single(s: Setting) -> None:
    output, tensor = s.room(s.joined), s.input(s.given(s.rank, shape=s.joined))
    s.wait(dist.all_to_all_single(output, tensor, async_op=s.case.async_op))
    s.moved(output, torch.cat([s.share(brought, s.rank) for brought in s.everyones(shape=s.joined)]))


def uneven_all_to_all_single(s: Setting) -> None:
    def brought(giver: int) -> Tensor:
        total = sum(_rows(s, giver, taker) for taker in s.ranks)
        return s.given(giver, shape=(total, *s.case.shape[1:]))

    receive, send = [_rows(s, rank, s.rank) for rank in s.ranks], [_rows(s, s.rank, rank) for rank in s.ranks]
    output, tensor = s.room((sum(receive), *s.case.shape[1:])), s.input(brought(s.rank))
    s.wait(dist.all_to_all_single(output, tensor, receive, send, async_op=s.case.async_op))
    came = [brought(rank).split([_rows(s, rank, taker) for taker in s.ranks])[s.rank] for rank in s.ranks]
    s.moved(output, torch.cat(came))


def barrier(s: Setting) -> None:
    """Nobody passes before all have come; the store knows who has."""
    store = _get_default_store()
    keys = [f"{s.case}/{rank}" for rank in s.ranks]
    store.add(keys[s.rank], 1)  # unlike set, it waits until the store has it
    s.wait(dist.barrier(async_op=s.case.async_op))
    if not store.check(keys):
        s.wrong.append("passed before all had come")


# --- messages -------------------------------------------------------------------------------------------------------


def send_and_recv(s: Setting) -> None:
    """A ring of messages with a tag; rank 0 begins."""
    ahead, behind = (s.rank + 1) % s.size, (s.rank - 1) % s.size
    tensor, came = s.input(s.given(s.rank)), s.room()
    if s.rank == 0:
        dist.send(tensor, ahead, tag=3 + s.root)
    source = dist.recv(came, behind, tag=3 + s.root)
    if s.rank > 0:
        dist.send(tensor, ahead, tag=3 + s.root)
    if source != behind:
        s.wrong.append(f"recv says that rank {source} sent, not {behind}")
    s.moved(came, s.given(behind))


def recv_from_any_source(s: Setting) -> None:
    """One rank hears from all others, in no order; the barrier keeps the next case's messages apart."""
    if s.rank != s.root:
        dist.send(s.input(s.given(s.rank)), s.root, tag=7)
        dist.barrier()
        return
    sources = []
    for _ in range(s.size - 1):
        came = s.room()
        sources.append(dist.recv(came, tag=7))
        s.moved(came, s.given(sources[-1]))
    if sorted(sources) != [rank for rank in s.ranks if rank != s.root]:
        s.wrong.append(f"recv says that these ranks sent: {sources}")
    dist.barrier()


def isend_and_irecv(s: Setting) -> None:
    """Two messages to each other rank at once, told apart by their tags, and received in the other order."""
    others = [rank for rank in s.ranks if rank != s.rank]
    sends = [dist.isend(s.input(s.given(s.rank, tag)), rank, tag=tag) for rank in others for tag in (1, 2)]
    rooms = {(rank, tag): s.room() for rank in others for tag in (2, 1)}
    receives = [dist.irecv(room, rank, tag=tag) for (rank, tag), room in rooms.items()]
    for work in (*reversed(receives), *sends):
        assert work is not None
        work.wait()
    for (rank, tag), room in rooms.items():
        s.moved(room, s.given(rank, tag))


def batch_isend_irecv(s: Setting) -> None:
    others = [rank for rank in s.ranks if rank != s.rank]
    rooms = {rank: s.room() for rank in others}
    batch = [dist.P2POp(dist.isend, s.input(s.given(s.rank, rank)), rank) for rank in others]
    batch += [dist.P2POp(dist.irecv, room, rank) for rank, room in rooms.items()]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    for rank, room in rooms.items():
        s.moved(room, s.given(rank, s.rank))


REDUCING: dict[str, Callable[[Setting], None]] = {
    "all_reduce": all_reduce,
    "all_reduce_coalesced": all_reduce_coalesced,
    "all_reduce in a coalescing manager": all_reduce_in_a_coalescing_manager,
    "reduce": reduce,
    "reduce_scatter": reduce_scatter,
    "reduce_scatter_tensor": reduce_scatter_tensor,
    "reduce_scatter_tensor in a coalescing manager": reduce_scatter_in_a_coalescing_manager,
}
MOVING: dict[str, Callable[[Setting], None]] = {
    "broadcast": broadcast,
    "all_gather": all_gather,
    "all_gather_coalesced": all_gather_coalesced,
    "all_gather_into_tensor": all_gather_into_tensor,
    "all_gather_into_tensor in place": all_gather_into_tensor_in_place,
    "all_gather_into_tensor in a coalescing manager": all_gather_in_a_coalescing_manager,
    "gather": gather,
    "scatter": scatter,
    "all_to_all": all_to_all,
    "all_to_all, uneven": uneven_all_to_all,
    "all_to_all_single": all_to_all_single,
    "all_to_all_single, uneven": uneven_all_to_all_single,
}
MESSAGES: dict[str, Callable[[Setting], None]] = {
    "send and recv": send_and_recv,
    "recv from any source": recv_from_any_source,
    "isend and irecv": isend_and_irecv,
    "batch_isend_irecv": batch_isend_irecv,
}
COLLECTIVES = REDUCING | MOVING | MESSAGES | {"barrier": barrier}
