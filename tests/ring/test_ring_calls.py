"""The group's methods as PyTorch's: short forms, wrong arguments, futures, traces, and works that only C++ holds."""

from __future__ import annotations

import gc
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from markers import by_night
from ring_values import Op, options
from torch.profiler import ProfilerActivity, profile
from worlds import run_threads

from cyxtrain.config import RingOptions
from cyxtrain.errors import CollectiveMismatchError
from cyxtrain.ring import backend

THREE = timedelta(seconds=3)


def ones(count, rank=0):
    return torch.full((count,), rank + 1.0)


# --- short forms ----------------------------------------------------------------------------------------------------


def short_forms(group):
    rank, ranks = group.rank(), range(group.size())
    listed = [torch.zeros(2) for _ in ranks]

    def reduced(call):
        tensor = ones(2, rank)
        call(tensor).wait()
        return tensor[0].item()

    yield "allreduce(x)", reduced(lambda x: group.allreduce(x))
    yield "allreduce(x, op=)", reduced(lambda x: group.allreduce(x, op=Op.MAX))
    yield "allreduce(x, op, timeout)", reduced(lambda x: group.allreduce(x, Op.PRODUCT, THREE))
    yield "allreduce([x])", reduced(lambda x: group.allreduce([x]))
    yield "allreduce([x], op)", reduced(lambda x: group.allreduce([x], Op.MIN))
    yield "broadcast(x, 1)", reduced(lambda x: group.broadcast(x, 1))
    yield "broadcast(x, root=2)", reduced(lambda x: group.broadcast(x, root=2, timeout=THREE))
    yield "broadcast([x])", reduced(lambda x: group.broadcast([x]))
    yield "reduce(x)", reduced(lambda x: group.reduce(x))
    yield "reduce(x, 1, op)", reduced(lambda x: group.reduce(x, 1, Op.MAX))
    yield "reduce(x, root=, op=)", reduced(lambda x: group.reduce(x, root=2, op=Op.MIN))
    group.allgather(listed, ones(2, rank), timeout=THREE).wait()
    yield "allgather(xs, x)", [tensor[0].item() for tensor in listed]
    group.gather(listed if rank == 1 else [], ones(2, 10 * rank), 1).wait()
    yield "gather(xs, x, 1)", [tensor[0].item() for tensor in listed]
    target = torch.zeros(2)
    group.scatter(target, [ones(2, other) for other in ranks] if rank == 1 else [], 1).wait()
    yield "scatter(x, xs, 1)", target[0].item()
    group.reduce_scatter(target, [ones(2, other) for other in ranks], Op.MAX).wait()
    yield "reduce_scatter(x, xs, op)", target[0].item()
    group.alltoall(listed, [ones(2, 10 * rank + other) for other in ranks], timeout=THREE).wait()
    yield "alltoall", [tensor[0].item() for tensor in listed]
    flat = torch.zeros(3)
    group.all_to_all_single(flat, ones(3, rank), [], [], THREE).wait()
    yield "all_to_all_single", flat.tolist()
    group.barrier(timeout=THREE).wait()
    group.barrier(THREE).wait()
    group.barrier().wait()


def test_the_short_forms_do_what_pytorchs_do():
    by_rank = run_threads(3, lambda group: dict(short_forms(group)))
    for rank, found in enumerate(by_rank):
        gathered = [1.0, 11.0, 21.0] if rank == 1 else [1.0, 2.0, 3.0]
        assert found == {
            "allreduce(x)": 6.0,
            "allreduce(x, op=)": 3.0,
            "allreduce(x, op, timeout)": 6.0,
            "allreduce([x])": 6.0,
            "allreduce([x], op)": 1.0,
            "broadcast(x, 1)": 2.0,
            "broadcast(x, root=2)": 3.0,
            "broadcast([x])": 1.0,
            "reduce(x)": [6.0, 2.0, 3.0][rank],
            "reduce(x, 1, op)": [1.0, 3.0, 3.0][rank],
            "reduce(x, root=, op=)": [1.0, 2.0, 1.0][rank],
            "allgather(xs, x)": [1.0, 2.0, 3.0],
            "gather(xs, x, 1)": gathered,
            "scatter(x, xs, 1)": rank + 1.0,
            "reduce_scatter(x, xs, op)": rank + 1.0,
            "alltoall": [10.0 * other + rank + 1 for other in range(3)],
            "all_to_all_single": [1.0, 2.0, 3.0],
        }


WRONG = {
    "no tensor": (lambda group: group.allreduce([]), ValueError, "all_reduce: needs at least one tensor, got 0"),
    "a text": (lambda group: group.allreduce("x"), ValueError, "all_reduce: needs a tensor, or a list.* got str"),
    "numbers": (lambda group: group.broadcast([1, 2], 0), ValueError, "broadcast: .* got a list of int"),
    "no input": (lambda group: group.gather([], [], 0), ValueError, "gather: needs 1 tensor, got 0"),
    "no outputs": (lambda group: group.gather([], ones(1), 0), ValueError, "gather: needs a list of tensors"),
    "no list": (lambda group: group.allgather(ones(1), ones(1)), ValueError, "all_gather: needs a list of tensors"),
    "too few outputs": (lambda group: group.allgather([[ones(1)] * 2], [ones(1)] * 2), ValueError, "as many outputs"),
    "two messages": (lambda group: group.send([ones(1)] * 2, 1, 0), ValueError, "send: needs 1 tensor, got 2"),
    "an op that is none": (lambda group: group.allreduce(ones(1), op="sum"), ValueError, "ReduceOp.SUM, not 'sum'"),
    "a root that is none": (lambda group: group.broadcast(ones(1), "1"), TypeError, "integer"),
    "a rank that is none": (lambda group: group.broadcast(ones(1), 7), ValueError, "rank 7 is not in this group"),
    "too much": (
        lambda group: group.broadcast(ones(1), 0, THREE, 1),
        TypeError,
        "takes root, timeout after the tensors",
    ),
    "no such argument": (
        lambda group: group.allreduce(ones(1), root=1),
        TypeError,
        "unexpected keyword argument 'root'",
    ),
    "a part of another type": (
        lambda group: group.reduce_scatter(ones(1), [ones(1), ones(2).int()]),
        ValueError,
        "reduce_scatter: needs tensors of one dtype",
    ),
    "a part of another size": (
        lambda group: group.reduce_scatter(ones(3), [ones(1), ones(2)]),
        ValueError,
        "reduce_scatter: needs a tensor of 3 elements",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments_are_refused_in_words_before_anything_starts(what):
    call, kind, message = WRONG[what]

    def rank_main(group):
        if group.rank() == 0:  # the other rank does not notice
            with pytest.raises(kind, match=message):
                call(group)
        tensor = ones(1)
        group.allreduce(tensor).wait()
        return tensor.item()

    assert run_threads(2, rank_main) == [2.0, 2.0]


# --- parts of different sizes, and tensors that share memory --------------------------------------------------------


@pytest.mark.parametrize("scale", [1, 100_003])
@pytest.mark.parametrize("op", [Op.SUM, Op.AVG])
def test_reduce_scatter_takes_parts_of_different_sizes_with_the_bits_of_all_reduce(op, scale):
    def rank_main(group):
        rank, sizes = group.rank(), [scale * size for size in (2, 0, 3, 1)]
        whole = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(rank))
        part = torch.empty(sizes[rank])
        group.reduce_scatter(part, list(whole.split(sizes)), op).wait()
        group.allreduce(whole, op).wait()
        return torch.equal(part, whole.split(sizes)[rank])

    assert run_threads(4, rank_main) == [True] * 4


@pytest.mark.parametrize("world_size", [2, 8])
def test_ranks_that_divide_the_same_elements_otherwise_are_told(world_size):
    def rank_main(group):
        sizes = [1, *[2] * (world_size - 2), 3]
        if group.rank() == 0:
            sizes.reverse()
        with pytest.raises(CollectiveMismatchError):
            group.reduce_scatter(ones(sizes[group.rank()]), [ones(size) for size in sizes]).wait()

    run_threads(world_size, rank_main)


def coalesced(group):
    same, base, strided = ones(2, group.rank()), ones(6, group.rank()), ones(6, group.rank()).view(2, 3)
    group.allreduce_coalesced([same, same]).wait()
    group.allreduce([base[:4], base[2:]]).wait()
    group.allreduce([strided.t(), strided[0], ones(3)]).wait()
    sparse = ones(3, group.rank()).to_sparse()
    group.allreduce([sparse, sparse]).wait()
    reduced = ones(2, group.rank())
    group.reduce([reduced, reduced], options(dist.ReduceOptions, rootRank=0)).wait()
    return same.tolist(), base.tolist(), strided.flatten().tolist(), sparse.to_dense().tolist(), reduced.tolist()


def test_what_stands_twice_in_a_call_is_reduced_once():
    for rank, found in enumerate(run_threads(2, coalesced)):
        assert found == ([3.0] * 2, [3.0] * 6, [3.0] * 6, [3.0] * 3, [2.0 * rank if rank else 3.0] * 2)


def test_an_output_over_another_ones_input_is_written_when_that_has_been_read():
    def rank_main(group):
        memory = torch.arange(8.0) + 10 * group.rank()
        group.all_gather_single_coalesced([memory[:4], memory[4:]], [memory[4:6], memory[:2]]).wait()
        gathered = memory.tolist()
        memory = torch.arange(8.0) + 10 * group.rank()
        group.reduce_scatter_single_coalesced([memory[4:6], torch.empty(2)], [memory[:4], memory[4:]]).wait()
        second = torch.empty(2)
        memory = torch.arange(8.0) + 10 * group.rank()
        group.reduce_scatter_single_coalesced([memory[4:6], second], [memory[:4], memory[4:]]).wait()
        return gathered, second.tolist()

    (gathered, second), (other, _) = run_threads(2, rank_main)
    assert gathered == other == [4.0, 5.0, 14.0, 15.0, 0.0, 1.0, 10.0, 11.0]
    assert second == [4.0 + 14.0, 5.0 + 15.0]


# --- futures --------------------------------------------------------------------------------------------------------


def futures(group):
    rank, ranks, x = group.rank(), range(group.size()), torch.ones(2, 3)
    many = [torch.empty(2, 3) for _ in ranks]
    works = {
        "allreduce": group.allreduce([x]),
        "two": group.allreduce_coalesced([x, torch.ones(4)]),
        "broadcast": group.broadcast(x, 0),
        "gather": group.gather(many if rank == 0 else [], x, 0),
        "scatter": group.scatter(x, many if rank == 0 else [], 0),
        "reduce_scatter": group.reduce_scatter(x, many),
        "alltoall": group.alltoall(many, many),
        "allgather": group.allgather(many, x),
        "barrier": group.barrier(),
        "message": group.send([x], 1, 0) if rank == 0 else group.recv([x], 0, 0),
    }
    return {
        name: [
            list(map(list, (tensor.shape for tensor in found))) for found in (work.get_future().wait(), work.result())
        ]
        for name, work in works.items()
    }


def test_futures_and_results_hold_the_tensors_as_they_were_given():
    x, many = [[2, 3]], [[2, 3]] * 2
    for rank, found in enumerate(run_threads(2, futures)):
        expected = {
            "allreduce": x,
            "two": [[2, 3], [4]],
            "broadcast": x,
            "gather": many if rank == 0 else [],
            "scatter": x,
            "reduce_scatter": x,
            "alltoall": many,
            "allgather": [[2, 2, 3]],  # as NCCL's: PyTorch's quantization hooks read that
            "barrier": [],
            "message": x,
        }
        assert found == {name: [shapes, shapes] for name, shapes in expected.items()}


# --- traces ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("communication", ["inline", "thread"])
def test_calls_are_in_a_trace_with_their_shapes(communication):
    def rank_main(group):
        if group.rank() == 1:
            calls(group)
            return None
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
            calls(group)
        return sorted((event.name, event.input_shapes) for event in seen.events() if event.name.startswith("ring:"))

    def calls(group):
        x, peer = torch.ones(2, 3), 1 - group.rank()
        group.allreduce([x, torch.ones(4)], options(dist.AllreduceOptions, asyncOp=True)).wait()
        group.allgather([torch.ones(2, 3) for _ in range(2)], x).wait()
        group.broadcast(x, 0).wait()
        group.barrier().wait()
        (group.send if group.rank() == 0 else group.recv)([x], peer, 0).wait()
        with pytest.raises(ValueError, match="one dtype"):
            group.alltoall([x, x], [x, x.int()])

    found = run_threads(2, rank_main, options=RingOptions(communication=communication))[0]
    expected = [
        ("ring:all_gather", [[2, 3]]),
        ("ring:all_reduce", [[2, 3], [4]]),
        ("ring:all_to_all", [[2, 3], [2, 3]]),
        ("ring:barrier", []),
        ("ring:broadcast", [[2, 3]]),
        ("ring:send", [[2, 3]]),
    ]
    if communication == "thread" and torch.__version__.startswith("2.11"):
        expected.remove(("ring:all_reduce", [[2, 3], [4]]))  # its profiler loses what ends in another thread
    assert found == expected


# --- works that only C++ holds --------------------------------------------------------------------------------------


@pytest.mark.parametrize("communication", ["inline", by_night("thread")])
def test_a_work_that_python_has_let_go_of_is_still_there_for_cpp(communication):
    """PyTorch's registry of works holds the C++ half alone, as its reducer does."""

    def rank_main(group):
        tensor = ones(3, group.rank())
        work = group.allreduce([tensor], options(dist.AllreduceOptions, asyncOp=True))
        held = work.boxed()
        del work
        gc.collect()
        again = dist.Work.unbox(held)
        again.wait()
        return tensor.tolist(), [found.tolist() for found in again.get_future().wait()]

    found = run_threads(2, rank_main, options=RingOptions(communication=communication))
    assert found == [([3.0] * 3, [[3.0] * 3])] * 2


def test_works_that_are_let_go_of_keep_no_memory():
    def rank_main(group):
        alive = []
        for _ in range(3):
            tensor = torch.ones(10_000)
            alive.append(torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage()))
            group.allreduce([tensor], options(dist.AllreduceOptions, asyncOp=True)).wait()
        del tensor
        return [ref.expired() for ref in alive]

    assert run_threads(2, rank_main) == [[True] * 3] * 2


# --- devices --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "devices"), [(0, ["cpu"]), (2, ["cpu", "cuda"])])
def test_cuda_is_registered_where_cuda_is(monkeypatch, count, devices):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    assert backend._devices() == devices


def test_the_ring_is_registered_for_the_devices_of_this_machine():
    assert dist.Backend.backend_capability["ring"] == backend._devices()
