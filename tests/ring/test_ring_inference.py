"""Tensors that were made in inference mode: every collective writes into them, inside of that mode and outside."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from markers import nightly_where
from ring_values import Op, all_reduce, options
from torch import Tensor
from worlds import run_threads

from cyxtrain.config import RingOptions
from cyxtrain.ring import RingProcessGroup

TRANSPORTS = ["tcp", "unix"]
SIDES = [4, 80, 750]
"""Few bytes, those that fit into a window of shared memory, and those that need two."""


def made_there(side: int, value: float, *, transposed: bool = False) -> Tensor:
    with torch.inference_mode():
        tensor = torch.full((side, side), value)
        return tensor.t() if transposed else tensor


def through_all(group: RingProcessGroup, side: int, *, transposed: bool) -> dict[str, bool]:
    """Calls every collective with tensors of inference mode; returns whether each gave what it should."""
    rank, size = group.rank(), group.size()
    found = {}

    def new(value: float = 0.0) -> Tensor:
        return made_there(side, value, transposed=transposed)

    def check(name: str, outputs: list[Tensor], *values: float) -> None:
        rights = [bool((output == value).all()) for output, value in zip(outputs, values, strict=True)]
        found[name] = all(rights)

    own = rank + 1.0
    everyone, total = [other + 1.0 for other in range(size)], size * (size + 1) / 2
    for op, value in ((Op.SUM, total), (Op.AVG, total / size), (Op.MAX, float(size))):
        tensor = new(own)
        all_reduce(group, tensor, op)
        check(f"all_reduce {op}", [tensor], value)
    tensor = new(own)
    group.reduce([tensor], options(dist.ReduceOptions, rootRank=1)).wait()
    check("reduce", [tensor], total if rank == 1 else own)
    tensor = new(own)
    group.broadcast([tensor], options(dist.BroadcastOptions, rootRank=1)).wait()
    check("broadcast", [tensor], 2.0)
    outputs = [new() for _ in range(size)]
    group.allgather([outputs], [new(own)]).wait()
    check("all_gather", outputs, *everyone)
    output = made_there(side, 0.0).expand(size, side, side).clone()
    group.all_gather_single(output, new(own)).wait()
    check("all_gather_into_tensor", list(output), *everyone)
    output = new()
    group.reduce_scatter([output], [[new(own) for _ in range(size)]]).wait()
    check("reduce_scatter", [output], total)
    output = new()
    group.reduce_scatter_single(output, torch.full((size, side, side), own)).wait()
    check("reduce_scatter_tensor", [output], total)
    outputs = [new() for _ in range(size)] if rank == 1 else []
    group.gather([outputs] if outputs else [], [new(own)], options(dist.GatherOptions, rootRank=1)).wait()
    check("gather", outputs, *(everyone if rank == 1 else ()))
    output, rows = new(), [[new(value) for value in everyone]] if rank == 1 else []
    group.scatter([output], rows, options(dist.ScatterOptions, rootRank=1)).wait()
    check("scatter", [output], own)
    outputs = [new() for _ in range(size)]
    group.alltoall(outputs, [new(own) for _ in range(size)]).wait()
    check("all_to_all", outputs, *everyone)
    output = made_there(side * size, 0.0)
    group.all_to_all_single(output, made_there(side * size, own), [], []).wait()
    check("all_to_all_single", list(output.view(size, -1)), *everyone)
    output = new()
    works = [group.recv([output], (rank - 1) % size), group.send([new(own)], (rank + 1) % size)]
    for work in works:
        work.wait()
    check("recv", [output], everyone[rank - 1])
    return found


DAILY = [("unix", "inline", False), ("unix", "thread", True)]


@nightly_where(lambda transport, communication, within: (transport, communication, within) not in DAILY)
@pytest.mark.parametrize("within", [True, False])
@pytest.mark.parametrize("communication", ["inline", "thread"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_collective_writes_into_tensors_of_inference_mode(transport, communication, within):
    def rank_main(group):
        wrong = []
        for transposed in (False, True):
            for side in SIDES:
                with torch.inference_mode(within):
                    found = through_all(group, side, transposed=transposed)
                wrong += [f"{name} of {side} x {side}" for name, right in found.items() if not right]
        return wrong

    chosen = RingOptions(transport=transport, communication=communication)
    assert run_threads(3, rank_main, options=chosen) == [[]] * 3


@nightly_where(lambda transport: transport == "tcp")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_group_that_was_made_in_inference_mode_serves_training(transport):
    """With what it keeps from one collective to the next."""

    def rank_main(group):
        with torch.inference_mode():
            inner = RingProcessGroup(store, group.rank(), 3, generation=1, options=chosen)
        try:
            for inference in (True, False):
                with torch.inference_mode(inference):
                    for count in [side * side for side in SIDES] * 2:
                        for op, value in ((Op.SUM, 3.0), (Op.MAX, 1.0)):
                            assert all_reduce(inner, torch.ones(count), op).unique().tolist() == [value]
        finally:
            inner.shutdown()

    store, chosen = dist.HashStore(), RingOptions(transport=transport)
    run_threads(3, rank_main)


def test_an_empty_tensor_of_inference_mode_travels_too():
    def rank_main(group):
        with torch.inference_mode():
            tensor = torch.ones(0, 3)
        return list(all_reduce(group, tensor).shape)

    assert run_threads(2, rank_main) == [[0, 3]] * 2
