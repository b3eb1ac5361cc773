"""What a process believes about its world is checked: after a fork, and when RANK and WORLD_SIZE have changed."""

from __future__ import annotations

import multiprocessing
import os
import sys

import pytest
import torch
from fitting import fingerprint, make_model, make_rows
from markers import by_night
from rank_processes import environment, run_processes, run_ranks, values
from worlds import free_port

import cyxtrain as cx

pytestmark = pytest.mark.usefixtures("rank_server")
X, Y = make_rows(20)
needs_fork = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")


def fit():
    """Returns who trained, and the bits that came of it."""
    trainer = cx.DistributedTrainer(make_model(), "cross_entropy", "sgd")
    trainer.fit(X, Y, epochs=1, effective_batch_size=4, verbose=False)
    return cx.get_rank(), cx.get_world_size(), fingerprint(trainer.model)


def error_of(function, *arguments):
    with pytest.raises(cx.ConfigError) as raised:
        function(*arguments)
    return str(raised.value)


def in_children(function, environments):
    """Calls a function in forked children of this process; returns what each returned, or its error as a text."""
    context = multiprocessing.get_context("fork")
    ends = []
    for number, variables in enumerate(environments):
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_call, args=(theirs, function, number, variables))
        child.start()
        ends.append((ours, child))
    found = [ours.recv() for ours, _ in ends]
    for _, child in ends:
        child.join(10)
    return found


def _call(end, function, number, variables):
    os.environ.update(variables)
    try:
        end.send(function(number))
    except cx.CyxtrainError as error:
        end.send(f"{type(error).__name__}: {error}")


def fit_in(number):
    found = fit()
    use_threads()
    return found


def use_threads():
    """Does what PyTorch does in several threads, where it has some."""
    torch.ones(1 << 18).exp()


def fit_by_config(number):
    cx.init(cx.DistributedConfig(rank=number, world_size=2))
    return fit()


def fit_alone_by_config(number):
    cx.init(cx.DistributedConfig(rank=0, world_size=1))
    return fit()


def predict(number):
    trainer = cx.DistributedTrainer(make_model(), "cross_entropy", "sgd")
    return trainer.predict(X).shape[0], cx.get_rank()


def wrap(number):
    return str(cx.DistributedDataParallel(make_model()))


def talk(number):
    assert cx.get_rank() == 0  # that of the parent, whose data a DataLoader's worker may want
    cx.barrier()


def fork_after_a_world_of_one():
    torch.set_num_threads(2)
    use_threads()
    before = fit()
    port = free_port()
    by_environment = in_children(fit_in, [environment(rank, 2, port) for rank in range(2)])
    by_config = in_children(fit_by_config, [{"MASTER_PORT": str(free_port())}] * 2)
    alone = in_children(fit_alone_by_config, [{}, {}])
    refused = in_children(fit_in, [{}, environment(0, 1, free_port())])
    predicted = in_children(predict, [{}])
    refused += in_children(wrap, [{}])
    talks = in_children(talk, [{}])
    return {
        "ranks": [by_environment, by_config],
        "alone": alone,
        "refused": refused,
        "talks": talks,
        "predicted": predicted,
        "parent": [before, fit()],
    }


def fork_as_a_rank_of_two():
    """Children of both ranks: as they are, and as their own world, which trains beside that of their parents."""
    with cx.init():
        refused = in_children(fit_in, [{}])
        port = torch.tensor([free_port()])
        cx.broadcast(port, 0)
        other = in_children(fit_in, [{"MASTER_PORT": str(port.item())}])
        return {"refused": refused, "other": other, "own": fit()}


def join_what_is_described_by_now(first):
    """A world of one, made before anything was described; but for one of two ranks, where `first` says so."""
    described = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    if first == "all" or described["RANK"] == "0":
        wrapper = cx.DistributedDataParallel(make_model()) if cx.init() else None
        fit()
    os.environ.update(described)
    found = fit()
    if first == "all":
        return (*found, error_of(wrapper, X))
    return found


def change_the_environment_of_a_rank():
    with cx.init():
        before = fit()
        os.environ["RANK"] = str(1 - cx.get_rank())
        said = [error_of(fit), error_of(cx.init), error_of(cx.init, cx.DistributedConfig(collective_timeout_ms=5000))]
        os.environ["RANK"] = str(cx.get_rank())
        del os.environ["WORLD_SIZE"]  # says nothing against it
        return said, before == fit()


@needs_fork
def test_child_of_a_world_of_one_is_a_rank_of_the_world_that_is_described_or_is_refused():
    (found,) = values(run_processes(fork_after_a_world_of_one, [{"OMP_NUM_THREADS": "1"}]))
    parameters = found["parent"][0][2]
    assert found["parent"] == found["alone"] == [(0, 1, parameters)] * 2
    for ranks in found["ranks"]:
        assert [rank[:2] for rank in ranks] == [(0, 2), (1, 2)]
        assert ranks[0][2] == ranks[1][2]
    said = "ConfigError: this process was forked from rank 0 of 1 and is not a rank: set RANK"
    assert all(refused.startswith(said) for refused in found["refused"])
    assert found["talks"][0].startswith("NotInitializedError: barrier() needs the world, and this process was forked")
    assert found["predicted"] == [(20, 0)]


@needs_fork
def test_child_of_a_rank_is_refused_unless_another_world_is_described():
    ranks = values(run_ranks(2, fork_as_a_rank_of_two))
    for rank, found in enumerate(ranks):
        assert found["refused"][0].startswith(f"ConfigError: this process was forked from rank {rank} of 2")
        assert found["own"][:2] == found["other"][0][:2] == (rank, 2)
        assert found["own"][2] == found["other"][0][2] == ranks[0]["own"][2]


@pytest.mark.parametrize("first", ["all", by_night("rank 0")])
def test_world_of_one_of_an_earlier_cell_gives_way_to_the_world_that_is_described(first):
    ranks = values(run_ranks(2, join_what_is_described_by_now, first))
    assert [found[:2] for found in ranks] == [(0, 2), (1, 2)]
    assert ranks[0][2] == ranks[1][2]
    for found in ranks if first == "all" else ():
        assert "was wrapped in a world of 1 rank, and this is one of 2: wrap it again" in found[3]


def test_environment_that_contradicts_the_world_of_several_is_an_error_that_says_both():
    for rank, (said, is_same) in enumerate(values(run_ranks(2, change_the_environment_of_a_rank))):
        assert len(set(said)) == 1
        assert f"joined as rank {rank} of 2, and the environment has RANK={1 - rank} and WORLD_SIZE=2 now" in said[0]
        assert is_same
