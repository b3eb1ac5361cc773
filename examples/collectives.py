"""Collectives: each function that exchanges tensors between ranks, with small numbers and the result on every rank.

Run it on two ranks, or alone, where each call involves only this rank:

    cyxtrain launch -n 2 -- python examples/collectives.py
    python examples/collectives.py

The functions are the same as in `torch.distributed`, and also work in place: a call changes the tensor that you pass.
Rank 0 prints the tensors of all ranks. Expect a line per call, a column per rank, and `ranks counted: 2` at the end, or
the number of ranks that you start.
"""

from __future__ import annotations

import torch

import cyxtrain as cx


def show(call: str, tensor: torch.Tensor) -> None:
    everyone = [torch.empty_like(tensor) for _ in range(cx.get_world_size())] if cx.is_master() else None
    cx.gather(tensor, everyone, dst=0)
    if everyone is not None:
        print(f"{call:<20}", "  ".join(f"{each.tolist()!s:<24}" for each in everyone).rstrip())


def main() -> None:
    rank, world_size = cx.get_rank(), cx.get_world_size()

    def own() -> torch.Tensor:
        return torch.tensor([rank + 1.0, 10.0 * (rank + 1)])

    show("initially", own())

    # All to all: every rank ends with the same tensor.
    for name in ("SUM", "MAX", "MIN", "AVG"):
        tensor = own()
        cx.all_reduce(tensor, getattr(cx.ReduceOp, name))
        show(f"all_reduce {name}", tensor)

    tensor = own()
    cx.broadcast(tensor, src=world_size - 1)
    show("broadcast from last", tensor)

    gathered = [torch.empty(2) for _ in range(world_size)]  # a tensor from each rank
    cx.all_gather(gathered, own())
    show("all_gather", torch.cat(gathered))

    tensor = torch.empty(2)
    cx.reduce_scatter(tensor, [own() + 100 * to for to in range(world_size)])  # a tensor for each rank
    show("reduce_scatter", tensor)

    # One to one: a token goes from rank to rank, and each adds its number. A receiver waits for its sender.
    token = torch.zeros(1)
    if rank > 0:
        cx.recv(token, src=rank - 1)
    token += rank + 1
    if rank < world_size - 1:
        cx.send(token, dst=rank + 1)
    show("recv, add, send", token)

    # The call may return at once and continue in the background: do not use the tensor before wait().
    count = torch.ones(())
    work = cx.all_reduce(count, async_op=True)
    doubled = own() * 2  # anything that does not need the tensor
    work.wait()
    show("meanwhile", doubled)

    cx.barrier()  # wait until all ranks are here
    if cx.is_master():
        print(f"ranks counted: {count:.0f}")


if __name__ == "__main__":
    with cx.init():
        main()
