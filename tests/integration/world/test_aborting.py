"""A rank that fails beside NCCL: all ranks end within seconds, each with the error that names the rank."""

from __future__ import annotations

import time

import fake_nccl
import pytest
import torch
import torch.distributed as dist
from failing_step import FailsInStep3
from fitting import make_model, make_rows
from markers import by_night, nightly_where
from rank_processes import run_ranks, values
from torch import nn

import cyxtrain as cx
from cyxtrain.parallel.step_report import Report
from cyxtrain.ring import RingProcessGroup
from cyxtrain.world import runtime

pytestmark = pytest.mark.usefixtures("rank_server")
X, Y = make_rows(48)


def fit(how, tells):
    with fake_nccl.joined(tells=tells):
        assert dist.get_backend() == fake_nccl.NAME
        trainer = cx.DistributedTrainer(make_model(), "cross_entropy", "sgd", callbacks=[FailsInStep3(how)])
        return trainer.fit(X, Y, epochs=1, batch_size=4, verbose=False).train_losses


def fit_over_the_ring():
    with cx.init():
        trainer = cx.DistributedTrainer(make_model(), "cross_entropy", "sgd")
        return trainer.fit(X, Y, epochs=1, batch_size=4, verbose=False).train_losses


def own_loop(how):
    """As `fit`, without a trainer; the error leaves by `with cx.init()`."""
    with fake_nccl.joined(tells=True):
        for step in range(4):
            if step == 2 and cx.get_rank() == cx.get_world_size() - 1:
                raise KeyError("broken in step 3")
            cx.all_reduce(torch.ones(3))


def fit_in_a_group_of_pytorchs_own():
    """As many scripts make it for NCCL, which Gloo under another name stands in for: CPU tensors go over Gloo."""
    make = dist.ProcessGroupGloo
    dist.Backend.register_backend("other", lambda *given: make(*given[:3], timeout=given[3]), devices=["cuda"])
    dist.init_process_group("cpu:gloo,cuda:other")
    with cx.init():
        assert isinstance(runtime.cpu_group(), RingProcessGroup)
        trainer = cx.DistributedTrainer(make_model(), "cross_entropy", "sgd", callbacks=[FailsInStep3("raises")])
        trainer.fit(X, Y, epochs=1, batch_size=4, verbose=False)


@nightly_where(lambda how, tells: tells == (how == "raises"))
@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("how", ["raises", "killed"])
@pytest.mark.parametrize("world_size", [2, by_night(3)])
def test_all_ranks_end_with_the_error_of_the_one_that_failed(world_size, how, tells):
    *others, last = run_ranks(world_size, fit, how, tells, seconds=20)
    if how == "raises":
        assert (last.kind, last.message) == ("KeyError", "'broken in step 3'")
    for ended in others:
        assert ended.kind == ("DistributedTrainingError" if how == "raises" else "PeerLostError"), ended.traceback
        assert ended.error["rank"] == world_size - 1
        assert ended.error["during"] == "a collective of fakenccl"
        assert ("broken in step 3" in ended.message) == (how == "raises")


def test_what_an_aborted_collective_has_left_decides_nothing(monkeypatch):
    def refuse() -> None:
        raise cx.PeerLostError("rank 1 is lost", rank=1)

    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.full((2,), float("nan"))
    report = Report([parameter], [torch.zeros(2)], [], [], lambda flags: None)
    monkeypatch.setattr(runtime, "check_default_group", refuse)
    for read in (report.is_good, report.merge, lambda: report.nonfinite):
        with pytest.raises(cx.PeerLostError):
            read()


def test_error_in_a_loop_of_ones_own_is_the_cause_too():
    first, last = run_ranks(2, own_loop, "raises", seconds=20)
    assert last.kind == "KeyError"
    assert (first.kind, first.error["rank"]) == ("PeerLostError", 1), first.traceback
    assert "rank 1 has ended: KeyError" in first.message


def test_a_group_of_pytorchs_own_with_two_backends_ends_with_the_error_too():
    first, last = run_ranks(2, fit_in_a_group_of_pytorchs_own, seconds=20)
    assert last.kind == "KeyError", last.traceback
    assert (first.kind, first.error["rank"]) == ("DistributedTrainingError", 1), first.traceback
    assert "broken in step 3" in first.message


def test_without_an_error_all_train_and_leave_as_over_the_ring():
    assert values(run_ranks(2, fit, "well", True)) == values(run_ranks(2, fit_over_the_ring))


def leave_with_an_error_of_all():
    """Rank 0's program ends with an error of all ranks, while the others still exchange what it has received."""
    caught = None
    try:
        with cx.init() as world:
            rank = world.rank
            try:
                cx.DistributedTrainer(make_model(), "cross_entropy").fit(X, Y, virtual_ranks=2, verbose=False)
            except cx.ConfigError as error:
                caught = error
            if rank:
                time.sleep(0.5)
                sent = dist.isend(torch.ones(1), 3 - rank)
                dist.recv(torch.zeros(1), 3 - rank)
                sent.wait()
            raise caught
    except cx.ConfigError as error:
        return str(error)


def test_an_error_of_all_ranks_that_ends_one_program_first_does_not_end_the_group():
    for words in values(run_ranks(3, leave_with_an_error_of_all, seconds=20)):
        assert "virtual_ranks=2, and there are 3 ranks" in words
