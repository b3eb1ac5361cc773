"""The public collectives hand all that they are given to PyTorch's, and small agreements come about.

What PyTorch's collectives then do, on any dtype, shape and reduction, is in test_contract.py.
"""

from __future__ import annotations

import dataclasses
import os
import pickle

import pytest
import torch
import torch.distributed as dist
from kept_worlds import on_ranks
from rank_processes import run_ranks

import cyxtrain as cx
from cyxtrain.world import runtime

pytestmark = pytest.mark.usefixtures("rank_server")
CALLS = {
    "all_reduce": lambda t: cx.all_reduce(t),
    "broadcast": lambda t: cx.broadcast(t, 0),
    "all_gather": lambda t: cx.all_gather([t], t),
    "reduce_scatter": lambda t: cx.reduce_scatter(t, [t]),
    "scatter": lambda t: cx.scatter(t, [t]),
    "gather": lambda t: cx.gather(t, [t]),
    "reduce": lambda t: cx.reduce(t, 0),
    "barrier": lambda t: cx.barrier(),
    "send": lambda t: cx.send(t, 1),
    "recv": lambda t: cx.recv(t, 1),
    "get_rank": lambda t: cx.get_rank(),
    "get_world_size": lambda t: cx.get_world_size(),
    "get_local_rank": lambda t: cx.get_local_rank(),
    "is_master": lambda t: cx.is_master(),
}


@pytest.mark.parametrize("name", CALLS)
def test_before_init_every_function_says_what_to_call(name):
    with pytest.raises(cx.NotInitializedError, match=rf"^{name}\(\) needs the world: call cyxtrain\.init\(\) first"):
        CALLS[name](torch.ones(1))


def test_a_collective_can_be_pickled():
    assert pickle.loads(pickle.dumps(cx.all_reduce)) is cx.all_reduce


def own():
    """A tensor of this rank: 1, 2, 3 times rank + 1."""
    return (torch.arange(1, 4) * (cx.get_rank() + 1)).double()


def everyones():
    return torch.stack([(torch.arange(1, 4) * (rank + 1)).double() for rank in range(cx.get_world_size())])


def check_reductions():
    expected = {
        cx.ReduceOp.SUM: everyones().sum(0),
        cx.ReduceOp.PRODUCT: everyones().prod(0),
        cx.ReduceOp.MIN: everyones().amin(0),
        cx.ReduceOp.MAX: everyones().amax(0),
    }
    if dist.get_backend() == "ring":  # not every version of Gloo has it
        expected[cx.ReduceOp.AVG] = everyones().mean(0)
    for op, result in expected.items():
        tensor = own()
        assert cx.all_reduce(tensor, op) is None
        torch.testing.assert_close(tensor, result)


def check_rest():
    rank, world_size = cx.get_rank(), cx.get_world_size()
    last = world_size - 1
    tensor = own()
    cx.broadcast(tensor, last)
    assert torch.equal(tensor, everyones()[last])
    outputs = [torch.empty(3, dtype=torch.float64) for _ in range(world_size)]
    cx.all_gather(outputs, own())
    assert torch.equal(torch.stack(outputs), everyones())
    outputs = [torch.zeros(3, dtype=torch.float64) for _ in range(world_size)]
    cx.gather(own(), outputs if rank == last else None, last)
    assert torch.equal(torch.stack(outputs), everyones() if rank == last else torch.zeros(world_size, 3).double())
    tensor = torch.empty(3, dtype=torch.float64)
    cx.scatter(tensor, list(everyones()) if rank == last else None, last)
    assert torch.equal(tensor, own())
    tensor = own()
    cx.reduce(tensor, last)
    assert rank != last or torch.equal(tensor, everyones().sum(0))
    tensor = torch.empty(3, dtype=torch.float64)
    cx.reduce_scatter(tensor, [own() + other for other in range(world_size)])
    assert torch.equal(tensor, everyones().sum(0) + world_size * rank)
    cx.barrier()


@on_ranks(1, 3)
def test_every_public_collective_takes_the_arguments_of_pytorchs():
    check_reductions()
    check_rest()


@on_ranks(2, backend="gloo")
def test_every_public_collective_takes_them_over_gloo_too():
    assert dist.get_backend() == "gloo"
    check_reductions()
    check_rest()


@on_ranks(1, 2, 3)
def test_async_op_gives_a_work_to_wait_for():
    rank, world_size = cx.get_rank(), cx.get_world_size()
    tensor, part = own(), torch.empty(3, dtype=torch.float64)
    outputs = [torch.empty(3, dtype=torch.float64) for _ in range(world_size)]
    receives = outputs if rank == 0 else None
    gives = list(everyones()) if rank == 0 else None
    for work in (
        cx.all_reduce(tensor, async_op=True),
        cx.broadcast(tensor, 0, async_op=True),
        cx.all_gather(outputs, tensor, async_op=True),
        cx.reduce_scatter(part, outputs, async_op=True),
        cx.gather(own(), receives, async_op=True),
        cx.scatter(part, gives, async_op=True),
        cx.reduce(own(), async_op=True),
        cx.barrier(async_op=True),
    ):
        assert work.wait()
        assert work.is_completed()
    assert torch.equal(tensor, everyones().sum(0))
    assert torch.equal(part, own())


@on_ranks(2, 3)
def test_messages_go_round_and_say_where_they_come_from():
    rank, world_size = cx.get_rank(), cx.get_world_size()
    for source in ("named", "any"):
        if rank == 0:
            cx.send(own(), 1, tag=5)
        tensor = torch.empty(3, dtype=torch.float64)
        before = (rank - 1) % world_size
        assert cx.recv(tensor, before if source == "named" else None, tag=5) == before
        if rank > 0:
            cx.send(tensor, (rank + 1) % world_size, tag=5)
        assert tensor.tolist() == [1, 2, 3]
        cx.barrier()


@on_ranks(3)
def test_groups_of_some_ranks_have_their_own_numbering():
    group = dist.new_group([1, 2])
    if cx.get_rank() > 0:
        check_group_of_ranks_1_and_2(group)
    cx.barrier()


def check_group_of_ranks_1_and_2(group):
    tensor = own()
    cx.all_reduce(tensor, group=group)
    assert tensor.tolist() == [5, 10, 15]
    for arguments in ({"src": 2}, {"group_src": 1}):
        tensor = own()
        cx.broadcast(tensor, group=group, **arguments)
        assert tensor.tolist() == [3, 6, 9]
    tensor = own()
    cx.reduce(tensor, group_dst=1, group=group)
    assert cx.get_rank() == 1 or tensor.tolist() == [5, 10, 15]
    outputs = [torch.empty(3, dtype=torch.float64) for _ in range(2)]
    cx.gather(own(), outputs if cx.get_rank() == 2 else None, group=group, group_dst=1)
    assert cx.get_rank() == 1 or torch.stack(outputs).tolist() == [[2, 4, 6], [3, 6, 9]]
    if cx.get_rank() == 1:
        cx.send(own(), group=group, group_dst=1)
    else:
        assert cx.recv(tensor, group=group, group_src=0) == 1
        assert tensor.tolist() == [2, 4, 6]
    cx.barrier(group)
    world = dataclasses.replace(runtime.current(), size=2, cpu_group=group)
    assert world.gather(f"rank {cx.get_rank()}") == ["rank 1", "rank 2"]


@on_ranks(1, 3)
def test_texts_of_all_ranks_are_gathered_as_they_are():
    rank, ranks = cx.get_rank(), range(cx.get_world_size())
    assert runtime.current().gather(f"rank {rank}") == [f"rank {r}" for r in ranks]
    assert runtime.current().gather("") == ["" for _ in ranks]
    assert runtime.current().gather("ä" * rank * 1000 + "☃") == ["ä" * r * 1000 + "☃" for r in ranks]
    name = os.fsdecode(b"name-\xff")
    assert runtime.current().gather(name) == [name for _ in ranks]


def run_with_another_default_device():
    torch.set_default_device("meta")  # "cuda", on machines that have it
    with cx.init():
        tensor = torch.ones(5, device="cpu")
        cx.all_reduce(tensor)
        parts = [torch.empty(5, device="cpu") for _ in range(2)]
        cx.all_gather(parts, tensor)
        cx.reduce_scatter(tensor, parts)
        return tensor.tolist()


def test_collectives_of_cpu_tensors_do_not_depend_on_the_users_default_device():
    assert [ended.value for ended in run_ranks(2, run_with_another_default_device)] == [[4.0] * 5] * 2


@on_ranks(2)
def test_small_agreements_do_not_depend_on_the_users_defaults():
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float16)
    try:
        assert runtime.current().gather(f"rank {cx.get_rank()}") == ["rank 0", "rank 1"]
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("backend", ["cpu", "gloo"])
def test_small_agreements_go_over_a_cpu_group(backend):
    ended = run_ranks(2, backend_of_small_agreements, backend)
    assert [outcome.value for outcome in ended] == ["ring" if backend == "cpu" else "gloo"] * 2


def backend_of_small_agreements(backend):
    with cx.init(cx.DistributedConfig(backend=backend)):
        return dist.get_backend(runtime.cpu_group())


@pytest.mark.nightly
@on_ranks(2)
def test_a_compiled_function_may_call_them():
    tensor = own()
    torch.compile(lambda t: (cx.barrier(), cx.all_reduce(t)), backend="eager")(tensor)
    assert tensor.tolist() == [3.0, 6.0, 9.0]
