"""Memory that ranks of one machine have in common: the bits of all_reduce, or none on any rank; and it never hangs."""

from __future__ import annotations

import copy
import functools
import gc
import os
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from markers import by_night
from rank_processes import run_ranks, values
from ring_values import Op, all_reduce, made, reduced, said_of, same, with_cores
from torch import nn
from worlds import free_port, run_threads

import cyxtrain as cx
from cyxtrain.config import RingOptions
from cyxtrain.errors import CollectiveMismatchError, CyxtrainError, PeerLostError
from cyxtrain.parallel import DistributedDataParallel
from cyxtrain.ring import RingProcessGroup
from cyxtrain.ring.schedules.selector import SHORT_BYTES
from cyxtrain.ring.schedules.summation import FEW_BYTES
from cyxtrain.ring.shared_memory import segment
from cyxtrain.ring.wire.link import Link
from cyxtrain.ring.work import CallOptions

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes share no memory on this system")
FLOATS = [torch.float32, torch.float64]
COUNTS = [1, 2, 7, 1000, FEW_BYTES // 8, FEW_BYTES // 4 + 1, 300_007]


def mean_of(group, dtype, count, seed=0):
    """A mean that is filled with what a rank brings."""
    mean = group.make_gradient_buffers([(count, dtype)])[0]
    assert mean is not None
    mean.tensor.copy_(made(dtype, count, group.rank(), seed))
    return mean


@with_cores((2, 1), by_night(3, 1), by_night(3, 3), by_night(5, 1))
def test_its_bits_are_those_of_all_reduce(world_size, cores):
    def rank_main(group):
        wrong = []
        for dtype in FLOATS:
            for count in COUNTS:
                mean = mean_of(group, dtype, count)
                for seed in range(3):  # again and again, in the same memory
                    own = made(dtype, count, group.rank(), seed)
                    mean.tensor.copy_(own)
                    mean.all_reduce().wait()
                    expected = reduced([made(dtype, count, rank, seed) for rank in range(world_size)], Op.AVG)
                    if not same(mean.tensor, expected) or not same(mean.tensor, all_reduce(group, own, Op.AVG)):
                        wrong.append((dtype, count, seed))
        return wrong

    assert run_threads(world_size, rank_main, seconds=60) == [[]] * world_size


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_smallest_numbers_are_rounded_as_all_reduce_rounds_them(world_size, dtype):
    smallest = torch.tensor(torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps, dtype=dtype)

    def rank_main(group):
        mean = mean_of(group, dtype, 1000)
        own = smallest * torch.arange(group.rank(), group.rank() + 1000)
        mean.tensor.copy_(own)
        mean.all_reduce().wait()
        assert mean.tensor[1] > 0  # else nothing would be shown
        return same(mean.tensor, all_reduce(group, own, Op.AVG))

    assert run_threads(world_size, rank_main) == [True] * world_size


def test_infinities_and_nans_are_everybodys_without_a_word():
    def rank_main(group):
        mean = mean_of(group, torch.float32, 100_000)
        mean.tensor[5] = float("inf") * (1 if group.rank() == 0 else -1)
        mean.tensor[7 + 90_000 * group.rank()] = float("nan")
        mean.tensor[9] = 3e38
        with np.errstate(all="raise"):
            mean.all_reduce().wait()
        return torch.nonzero(~mean.tensor.isfinite()).flatten().tolist()

    assert run_threads(2, rank_main) == [[5, 7, 9, 90_007]] * 2


@with_cores((2, 1), (2, 2), (3, 1), (3, 3))
def test_each_rank_looks_at_its_part_and_all_know_whether_the_mean_is_finite(world_size, cores):
    count = 200_003

    def rank_main(group):
        mean, found = mean_of(group, torch.float32, count), []
        for place in (None, 0, 70_000, None, 140_000, count - 1):
            mean.tensor.fill_(3e38 / world_size)  # finite, although their sum is not
            if place is not None and group.rank() == place % world_size:
                mean.tensor[place] = float("nan" if place else "inf")
            mean.all_reduce().wait()
            found.append((mean.is_known_finite, bool(mean.tensor.isfinite().all())))
        return found

    each = [(True, True), (False, False), (False, False), (True, True), (False, False), (False, False)]
    assert run_threads(world_size, rank_main) == [each] * world_size


def test_what_is_changed_afterwards_is_no_longer_known_to_be_finite():
    def rank_main(group):
        mean = mean_of(group, torch.float32, 1000)
        found = [mean.is_known_finite]
        for change in (lambda: None, lambda: mean.tensor[10:20].view(2, 5).mul_(1e38)):
            mean.all_reduce().wait()
            change()
            found.append(mean.is_known_finite)
        return found

    assert run_threads(2, rank_main) == [[False, True, False]] * 2


@pytest.mark.parametrize("communication", ["inline", "thread"])
def test_it_travels_beside_the_caller_where_collectives_do(communication):
    def rank_main(group):
        means = [mean_of(group, torch.float32, 70_000, seed) for seed in range(4)]
        works = [mean.all_reduce(CallOptions(asyncOp=True)) for mean in means]
        after = torch.full((3,), float(group.rank()))
        group.allreduce([after]).wait()
        assert [work.wait() for work in works] == [True] * 4
        assert after.tolist() == [1.0] * 3
        expected = [
            reduced([made(torch.float32, 70_000, rank, seed) for rank in range(2)], Op.AVG) for seed in range(4)
        ]
        return [same(mean.tensor, each) for mean, each in zip(means, expected, strict=True)]

    assert run_threads(2, rank_main, options=RingOptions(communication=communication)) == [[True] * 4] * 2


@pytest.mark.parametrize(
    ("world_size", "count", "dtype", "options"),
    [
        (1, 10, torch.float32, RingOptions()),
        (2, 0, torch.float32, RingOptions()),
        (2, 10, torch.bfloat16, RingOptions()),
        (2, 10, torch.int64, RingOptions()),
        (2, 10, torch.float32, RingOptions(checksums=True)),
        (2, 10, torch.float32, RingOptions(transport="tcp")),
        (9, 10, torch.float32, RingOptions()),
    ],
)
def test_where_it_cannot_be_there_is_none_on_any_rank(world_size, count, dtype, options):
    def rank_main(group):
        return group.make_gradient_buffers([(count, dtype)])[0]

    assert run_threads(world_size, rank_main, options=options) == [None] * world_size


@pytest.mark.parametrize(
    ("what", "rank"),
    [("memfd_create", 0), ("ftruncate", 0)]  # rank 0 alone makes the file
    + [(what, rank) for what in ("posix_fallocate", "mmap", "dup") for rank in (0, 2)],
)
def test_where_one_rank_cannot_have_it_no_rank_has(what, rank, monkeypatch):
    owner = segment.mmap if what == "mmap" else os
    inner, failing = getattr(owner, what), []

    def fail(*args, **named):
        if failing and failing[0]() == rank:
            raise OSError("no room")
        return inner(*args, **named)

    def rank_main(group):
        ranks[threading.get_ident()] = group.rank()
        group.barrier().wait()
        failing.append(lambda: ranks.get(threading.get_ident()))
        found = group.make_gradient_buffers([(10, torch.float32)])[0]
        tensor = torch.ones(3)
        group.allreduce([tensor]).wait()  # and the group goes on
        return found, tensor.tolist()

    ranks = {}
    monkeypatch.setattr(owner, what, fail)
    assert run_threads(3, rank_main) == [(None, [3.0] * 3)] * 3


def test_an_error_while_the_memory_is_created_names_a_collective_of_the_rings_own():
    """The program has called none of that name."""
    during = "broadcast #2 (int64 [1], src 0)"

    class LostRanks:
        rank = 1
        world_size = 2

        def broadcast(self, tensor, src, timeout):
            raise PeerLostError(f"rank 0 was lost. This rank was in {during}.", rank=0, during=during)

    with pytest.raises(PeerLostError) as caught:
        segment.make_segment(LostRanks(), [4096])
    expected = f"rank 0 was lost. This rank was in {during}. The ring itself called {during}, to create shared memory."
    assert str(caught.value) == expected
    assert (caught.value.rank, caught.value.during) == (0, during)


def test_it_needs_unix_sockets_alone_and_no_right_to_read_other_processes():
    def rank_main(group):
        mean = mean_of(group, torch.float32, 1000)
        mean.all_reduce().wait()
        return group.transport, same(
            mean.tensor, reduced([made(torch.float32, 1000, rank) for rank in range(3)], Op.AVG)
        )

    assert run_threads(3, rank_main, options=RingOptions(transport="unix")) == [("unix", True)] * 3


def test_a_descriptor_that_is_lost_on_one_rank_leaves_all_without(monkeypatch):
    def lose(link):
        done, descriptor = receive(link)
        if done and threading.current_thread().name == "rank 2":
            os.close(descriptor)
            return True, -1
        return done, descriptor

    receive = Link.receive_descriptor
    monkeypatch.setattr(Link, "receive_descriptor", lose)
    assert run_threads(3, lambda group: group.make_gradient_buffers([(10, torch.float32)])) == [[None]] * 3


def test_it_begins_with_zeros_and_is_nobodys_when_it_is_no_longer_used():
    def rank_main(group):
        mean = group.make_gradient_buffers([(5000, torch.float32)])[0]
        assert not mean.tensor.any()
        part = mean.tensor[10:20]  # as a gradient is
        part.fill_(group.rank() + 1.0)
        mean.all_reduce().wait()
        del mean
        gc.collect()
        return part.tolist()

    before = mapped()
    assert run_threads(2, rank_main) == [[1.5] * 10] * 2
    gc.collect()
    assert mapped() == before


def mapped():
    """How much of this process's memory is of the kind."""
    return sum("memfd:cyxtrain" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_other_calls_on_another_rank_are_named():
    def rank_main(group):
        mean = mean_of(group, torch.float32, 200_000)
        call = mean.all_reduce if group.rank() == 0 else functools.partial(group.allreduce, [torch.ones(7)])
        with pytest.raises(CyxtrainError) as error:
            call()
        return type(error.value), "float32 [7]" in str(error.value), "float32 [200000]" in str(error.value)

    assert run_threads(2, rank_main) == [(CollectiveMismatchError, True, True)] * 2


def test_ranks_that_begin_with_different_ones_of_two_that_are_alike_are_told():
    def rank_main(group):
        means = group.make_gradient_buffers([(50_000, torch.float32)] * 2)
        with pytest.raises(CollectiveMismatchError, match=r"memory 0.*memory 1|memory 1.*memory 0"):
            means[group.rank()].all_reduce()

    run_threads(2, rank_main)


def test_ranks_that_want_different_sizes_have_none():
    def rank_main(group):
        found = group.make_gradient_buffers([(10_000 * (1 + (group.rank() == 1)), torch.float32)])
        group.barrier().wait()
        return found

    assert run_threads(3, rank_main) == [[None]] * 3


def test_kinds_that_it_can_average_lie_beside_others_that_it_cannot():
    kinds = [(1000, torch.float32), (10, torch.bfloat16), (1000, torch.float64), (0, torch.float32)]

    def rank_main(group):
        first, no, second, nothing = group.make_gradient_buffers(kinds)
        assert (no, nothing) == (None, None)
        for number, mean in enumerate((first, second)):
            mean.tensor.fill_(number + group.rank())
        for mean in (second, first):
            mean.all_reduce()
        return first.tensor.unique().tolist(), second.tensor.unique().tolist()

    assert run_threads(2, rank_main) == [([0.5], [1.5])] * 2


def test_elements_that_a_user_has_moved_are_averaged_all_the_same():
    def rank_main(group):
        mean = mean_of(group, torch.float32, 1000)
        if group.rank() == 0:
            mean.tensor.share_memory_()
        mean.all_reduce().wait()
        return same(mean.tensor, reduced([made(torch.float32, 1000, rank) for rank in range(2)], Op.AVG))

    assert run_threads(2, rank_main) == [True] * 2


@pytest.fixture(scope="module")
def lived(rank_server):
    """What two processes have lived through, by rank."""
    return values(run_ranks(2, live, free_port(), CYXTRAIN_TRANSPORT="unix"))


def live(port):
    with cx.init():
        found = [write_in_a_child(), train_both_ways(), replace_gradients()]
        return [*found, live_twice(port)]


def test_a_forked_child_has_gradients_of_its_own(lived):
    assert [found[0] for found in lived] == [True] * 2


def write_in_a_child():
    mean = mean_of(dist.group.WORLD, torch.float32, 5000)
    before = mean.tensor.clone()
    child = os.fork()
    if child == 0:
        mean.tensor.fill_(7.0)
        os._exit(0 if mean.tensor.eq(7.0).all() else 1)
    _, status = os.waitpid(child, 0)
    return status == 0 and torch.equal(mean.tensor, before)


@pytest.mark.nightly
@pytest.mark.usefixtures("rank_server")
def test_a_rank_that_ends_on_the_way_is_named():
    ended = run_ranks(3, end_on_the_way, CYXTRAIN_TRANSPORT="unix")
    assert [each.value for each in ended] == ["PeerLostError 1", None, "PeerLostError 1"]
    assert ended[1].kind == "Killed"


def end_on_the_way():
    """Rank 1 is gone while it reduces its part of everybody's memory."""
    cx.init()
    mean = mean_of(dist.group.WORLD, torch.float32, 300_000)
    mean.all_reduce().wait()
    if dist.get_rank() == 1:
        rounds = mean._rounds

        def torn():
            yield next(rounds())
            os.kill(os.getpid(), signal.SIGKILL)

        mean._rounds = torn
    return said_of(mean.all_reduce)


def test_training_gives_the_same_bits_however_gradients_travel(lived):
    assert [found[1] for found in lived] == [(1, 0, True)] * 2


def train_both_ways():
    dist.all_reduce(torch.zeros(SHORT_BYTES))  # what passes through memory in common makes that now, not while we look
    in_common, used = train_a_little()
    make = RingProcessGroup.make_gradient_buffers
    RingProcessGroup.make_gradient_buffers = lambda _, kinds, *__: [None] * len(kinds)
    apart, used_too = train_a_little()
    RingProcessGroup.make_gradient_buffers = make
    return used, used_too, in_common == apart


def train_a_little():
    gc.collect()
    before = mapped()
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(400, 300), nn.Tanh(), nn.Linear(300, 3))
    ddp = DistributedDataParallel(model, bucket_size_mb=0.4)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(5):
        optimizer.zero_grad()
        ddp(torch.randn(8, 400)).square().sum().backward()
        optimizer.step()
    return b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters()), mapped() - before


def test_a_wrapper_goes_on_in_another_world_and_its_copy_is_unwrapped(lived):
    assert [found[3] for found in lived] == [[2, [0.5], 0, [0.5], "Linear"]] * 2


def live_twice(port):
    found = []
    rank = dist.get_rank()
    dist.all_reduce(torch.zeros(SHORT_BYTES))  # this world has memory through which such ones pass, the next one none
    model = nn.Linear(1, 1, bias=False)
    ddp = DistributedDataParallel(model)
    for _ in range(2):
        model.weight.grad = None
        ddp(torch.full((1, 1), float(rank))).sum().backward()
        gc.collect()
        found += [mapped(), model.weight.grad.flatten().tolist()]
        if len(found) == 2:
            cx.finalize()
            model.weight.grad = None
            os.environ["MASTER_PORT"] = str(port)
            cx.init()
    return [*found, type(copy.deepcopy(ddp)).__name__]


def test_what_a_hook_puts_in_the_place_of_a_gradient_is_not_trained_on(lived):
    assert [found[2] for found in lived] == [[0.5, 0.5]] * 2


def replace_gradients():
    model = nn.Linear(1, 2, bias=False)
    ddp = DistributedDataParallel(model)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 100))
    ddp(torch.full((1, 1), float(dist.get_rank()))).sum().backward()
    return model.weight.grad.flatten().tolist()
