"""What the ring promises of its other collectives beyond the contract of test_contract.py."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from contract_values import DTYPES
from markers import by_night
from ring_values import all_reduce, made, options, reduced, reductions_of, same
from worlds import run_threads

from cyxtrain.config import RingOptions
from cyxtrain.errors import ConfigError
from cyxtrain.ring import RingProcessGroup

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
]
NAMES_OF_PYTORCH_2_11 = {
    "_allgather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "alltoall_base": "all_to_all_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
}


@pytest.mark.parametrize("world_size", [1, 2, *map(by_night, (3, 4, 5))])
def test_reduce_and_reduce_scatter_combine_in_the_order_of_all_reduce(world_size):
    def rank_main(group):
        wrong, rank = [], group.rank()
        for dtype in DTYPES:
            for op in reductions_of(dtype):
                everyone = [made(dtype, 11 * world_size, other) for other in range(world_size)]
                expected = reduced(everyone, op)
                tensor, dst = everyone[rank].clone(), world_size - 1
                group.reduce([tensor], options(dist.ReduceOptions, rootRank=dst, reduceOp=op)).wait()
                part, listed = torch.empty(11, dtype=dtype), torch.empty(11, dtype=dtype)
                chosen = options(dist.ReduceScatterOptions, reduceOp=op)
                group.reduce_scatter_single(part, everyone[rank], chosen).wait()
                group.reduce_scatter([listed], [list(everyone[rank].split(11))], chosen).wait()
                share = expected[11 * rank : 11 * (rank + 1)]
                ok = same(tensor, expected) if rank == dst else same(tensor, everyone[rank])
                wrong += [] if ok and same(part, share) and same(listed, share) else [f"{dtype} {op}"]
        return wrong

    assert run_threads(world_size, rank_main) == [[]] * world_size


@pytest.mark.parametrize("name", NAMES_OF_PYTORCH_2_11)
def test_the_names_that_pytorch_2_11_calls_are_the_same_methods(name):
    assert getattr(RingProcessGroup, name) is getattr(RingProcessGroup, NAMES_OF_PYTORCH_2_11[name])


def expanded(count):
    return torch.zeros(1).expand(count)


INTO_SHARED_MEMORY = {
    "all_reduce": lambda group: group.allreduce([expanded(3)]),
    "windows": lambda group: group.allreduce([torch.zeros(5).unfold(0, 3, 1)]),
    "reduce": lambda group: group.reduce([expanded(3)], dist.ReduceOptions()),
    "reduce_scatter": lambda group: group.reduce_scatter([expanded(3)], [[torch.zeros(3)] * 2]),
    "reduce_scatter_tensor": lambda group: group.reduce_scatter_single(expanded(3), torch.zeros(6)),
    "broadcast": lambda group: group.broadcast([expanded(3)], dist.BroadcastOptions()),
    "all_gather": lambda group: group.allgather([[expanded(3)] * 2], [torch.zeros(3)]),
    "all_gather_into_tensor": lambda group: group.all_gather_single(expanded(6), torch.zeros(3)),
    "gather": lambda group: group.gather([[expanded(3)] * 2], [torch.zeros(3)], dist.GatherOptions()),
    "scatter": lambda group: group.scatter([expanded(3)], [[torch.zeros(3)] * 2], dist.ScatterOptions()),
    "all_to_all": lambda group: group.alltoall([expanded(3)] * 2, [torch.zeros(3)] * 2),
    "all_to_all_single": lambda group: group.all_to_all_single(expanded(6), torch.zeros(6), [], []),
    "recv": lambda group: group.recv([expanded(3)], 1),
}


@pytest.mark.parametrize("what", INTO_SHARED_MEMORY)
def test_a_result_whose_elements_share_memory_is_refused_before_anything_starts(what):
    def rank_main(group):
        if group.rank() == 0:  # the other rank does not notice: nothing has been sent, nothing counted
            with pytest.raises(ConfigError, match=r"share memory .*expand\(\): nothing can be received into it"):
                INTO_SHARED_MEMORY[what](group)
        return all_reduce(group, torch.ones(2)).tolist()

    assert run_threads(2, rank_main) == [[2.0, 2.0]] * 2


def test_two_groups_at_once_do_not_mix():
    def rank_main(first):
        second = RingProcessGroup(store, first.rank(), 3, generation=1)
        try:
            for value in range(50):
                one, two = torch.full((5,), 1.0 * value), torch.full((7,), 2.0 * value)
                all_reduce(first, one)
                all_reduce(second, two)
                assert (one[0], two[0]) == (3 * value, 6 * value)
        finally:
            second.shutdown()

    store = dist.HashStore()
    run_threads(3, rank_main)


def test_a_work_says_that_it_is_done_and_holds_the_result():
    def rank_main(group):
        tensor = torch.ones(3)
        work = group.allreduce([tensor])
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        assert work.result()[0] is tensor
        assert work.get_future().wait()[0] is tensor

    run_threads(2, rank_main)


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_reduce_scatter_may_put_its_result_into_any_part_of_its_input(place, transport):
    """The rest of the input is still needed; the second time it passes through shared memory, in two windows."""
    count, world_size = 200_000, 3

    def rank_main(group):
        first, right = group.rank() * count, []
        for _ in range(2):
            source = torch.arange(count * world_size, dtype=torch.float32) + group.rank()
            output = source[place * count : (place + 1) * count]
            group.reduce_scatter_single(output, source).wait()
            expected = torch.arange(first, first + count, dtype=torch.float32) * world_size + 3.0
            right.append(torch.equal(output, expected))
        return right

    assert run_threads(world_size, rank_main, options=RingOptions(transport=transport)) == [[True] * 2] * world_size
