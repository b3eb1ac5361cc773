"""What cannot work is refused before anything starts, and nothing works after the end."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from ring_values import Op, all_reduce, broadcast, options
from worlds import run_threads

from cyxtrain.errors import ConfigError, CyxtrainError
from cyxtrain.ring import RingProcessGroup

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
]


def three(group, dtype=torch.float32):
    return [torch.zeros(3, dtype=dtype) for _ in range(group.size())]


REFUSED = {
    "a list that is too short": (
        lambda group: group.allgather([three(group)[:-1]], [torch.zeros(3)]),
        "all_gather: needs a list of 2 tensors, one per rank, got 1",
    ),
    "a source that is none": (lambda group: broadcast(-1)(group), "rank -1 is not in this group of 2"),
    "a destination that is none": (
        lambda group: group.reduce([torch.zeros(3)], options(dist.ReduceOptions, rootRank=-1)),
        "rank -1 is not in this group of 2",
    ),
    "another length": (
        lambda group: group.allgather([three(group)], [torch.zeros(4)]),
        "all_gather: needs a tensor of 4 elements of torch.float32, got 3 of torch.float32",
    ),
    "another dtype": (
        lambda group: group.allgather([three(group)], [torch.zeros(3).double()]),
        "needs a tensor of 3 elements of torch.float64, got 3 of torch.float32",
    ),
    "an output that is too small": (
        lambda group: group.all_gather_single(torch.zeros(5), torch.zeros(3)),
        "needs a tensor of 6 elements",
    ),
    "inputs that do not fit": (
        lambda group: group.reduce_scatter([torch.zeros(2)], [three(group)]),
        "reduce_scatter: needs a tensor of 2 elements",
    ),
    "one input that does not fit": (
        lambda group: group.reduce_scatter_single(torch.zeros(2), torch.zeros(5)),
        "reduce_scatter: needs a tensor of 4 elements",
    ),
    "rows that do not divide": (
        lambda group: group.all_to_all_single(torch.zeros(3), torch.zeros(3), [], []),
        "3 rows do not divide among 2 ranks",
    ),
    "parts that do not add up": (
        lambda group: group.all_to_all_single(torch.zeros(3), torch.zeros(3), [1, 1], [1, 2]),
        "do not make 3 rows",
    ),
    "two dtypes": (
        lambda group: group.all_to_all_single(torch.zeros(2), torch.zeros(2).double(), [], []),
        "all_to_all: needs tensors of one dtype, got torch.float32 and torch.float64",
    ),
    "a list of another length": (
        lambda group: group.alltoall(three(group), [torch.zeros(3)]),
        "all_to_all: needs a list of 2 tensors, one per rank, got 1",
    ),
    "a part for itself of two lengths": (
        lambda group: group.all_to_all_single(torch.zeros(3), torch.zeros(3), [1, 2], [2, 1]),
        "to itself",
    ),
    "a rank that is not there": (
        lambda group: group.broadcast([torch.zeros(3)], options(dist.BroadcastOptions, rootRank=2)),
        "rank 2 is not in this group of 2",
    ),
    "a message to nobody": (
        lambda group: group.send([torch.zeros(3)], 5),
        "rank 5 is not in this group of 2",
    ),
    "a message to itself": (
        lambda group: group.send([torch.zeros(3)], group.rank()),
        "cannot send to or receive from itself",
    ),
    "a sum of eighths": (
        lambda group: group.allreduce([torch.zeros(3).to(torch.float8_e5m2)]),
        "has no arithmetic",
    ),
    "an order of complex numbers": (
        lambda group: all_reduce(group, torch.zeros(3, dtype=torch.complex64), Op.MAX),
        "complex numbers have no order",
    ),
    "bits of floats": (lambda group: all_reduce(group, torch.zeros(3), Op.BAND), "whole numbers and booleans"),
    "a scaled sum": (
        lambda group: all_reduce(group, torch.zeros(3), dist._make_nccl_premul_sum(2.0)),
        "it has SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR",
    ),
    "a sparse tensor": (
        lambda group: group.broadcast([torch.zeros(3).to_sparse()], options(dist.BroadcastOptions)),
        r"this one is torch.sparse_coo. Call to_dense\(\) first",
    ),
    "a tensor elsewhere": (
        lambda group: group.allreduce([torch.zeros(3, device="meta")]),
        "accelerators such as CUDA's; this one is on meta",
    ),
    "a quantised tensor": (
        lambda group: group.allreduce([torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8)]),
        "qint8",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_work_is_refused_before_anything_starts(what):
    call, message = REFUSED[what]

    def rank_main(group):
        if group.rank() == 0:  # the other rank does not notice: nothing has been sent, nothing counted
            with pytest.raises(CyxtrainError, match=message):
                call(group)
        return all_reduce(group, torch.ones(2)).tolist()

    assert run_threads(2, rank_main) == [[2.0, 2.0]] * 2


def test_a_world_of_one_binds_no_port_and_starts_no_thread():
    threads = threading.active_count()
    group = RingProcessGroup(dist.HashStore(), 0, 1)
    assert threading.active_count() == threads
    assert group.group.engine.monitor is None
    group.shutdown()


def test_a_group_that_was_left_refuses_everything_and_can_be_left_again():
    def rank_main(group):
        group.shutdown()
        group.shutdown()
        tensor = torch.full((3,), 7.0)
        for call in (
            lambda: group.allreduce([tensor]),
            lambda: group.barrier(),
            lambda: group.send([tensor], 1 - group.rank()),
        ):
            with pytest.raises(CyxtrainError, match=rf"rank {group.rank()} has left this group"):
                call()
        assert tensor.tolist() == [7.0] * 3

    run_threads(2, rank_main)


def test_a_message_to_itself_is_a_config_error_in_a_world_of_one_too():
    group = RingProcessGroup(dist.HashStore(), 0, 1)
    with pytest.raises(ConfigError, match="rank 0 cannot send to or receive from itself"):
        group.send([torch.zeros(1)], 0)
    group.shutdown()
