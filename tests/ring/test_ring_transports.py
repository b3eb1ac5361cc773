"""TCP, and Unix sockets with shared memory: the same bits over each, and the one that was asked for."""

from __future__ import annotations

import functools
import re
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import transport_ranks
from markers import by_night, nightly_where
from meetings import meet_all
from rank_processes import environment, run_processes, run_ranks, values
from ring_values import Op, all_reduce, reduced
from transport_ranks import brought, cases, digest
from worlds import free_port, run_threads

from cyxtrain.config import RingOptions
from cyxtrain.ring.rendezvous import dial, listen

pytestmark = [
    pytest.mark.usefixtures("rank_server"),
    pytest.mark.skipif(
        sys.platform != "linux", reason="ranks share memory, and find each other by name, on Linux alone"
    ),
]
TRANSPORTS = ["tcp", "unix"]


def world(transport, world_size, checksums=False, full=False):
    return _world(transport, world_size, checksums, cases(world_size, full))


def small_world(transport, world_size):
    """A world of which a test asks no more than NaNs and facts: only two ranks over TCP go through the cases by day."""
    return world(transport, 2) if (transport, world_size) == ("tcp", 2) else _world(transport, world_size, False, ())


@functools.cache
def _world(transport, world_size, checksums, table):
    """What came of every case, by rank; one world for all tests that ask."""
    variables = {"CYXTRAIN_TRANSPORT": transport, "CYXTRAIN_CHECKSUMS": str(int(checksums))}
    return values(run_ranks(world_size, transport_ranks.go_through_all, table, seconds=90.0, **variables))


# --- the bits -------------------------------------------------------------------------------------------------------


@functools.cache
def expected(world_size, full):
    """The digests that must come, by rank."""
    everything = [[digest(part) for part in expected_of(case, world_size)] for case in cases(world_size, full)]
    return [[digests[rank] for digests in everything] for rank in range(world_size)]


def expected_of(case, world_size):
    name, _, op, count = case
    ranks, last = range(world_size), world_size - 1
    everyone = [brought(case, rank, world_size) for rank in ranks]
    parts = [(rank * count, (rank + 1) * count) for rank in ranks]
    if name in ("all_reduce", "reduce", "reduce_scatter"):
        total = total_of(name, everyone, getattr(Op, op))
        if name == "reduce_scatter":
            return [total[slice(*part)] for part in parts]
        return [total if name == "all_reduce" or rank == last else everyone[rank] for rank in ranks]
    if name == "broadcast":
        return [everyone[last]] * world_size
    if name == "scatter":
        return [everyone[last][slice(*part)] for part in parts]
    if name == "all_to_all":
        return [torch.cat([tensor[slice(*part)] for tensor in everyone]) for part in parts]
    whole = torch.cat(everyone)
    return [whole if name == "all_gather" or rank == last else None for rank in ranks]


def total_of(name, tensors, op):
    """What the ring makes of them. PyTorch's all_reduce shows it complex numbers as pairs of real ones."""
    if tensors[0].is_complex() and name == "all_reduce":
        pairs = [torch.view_as_real(tensor).view(-1) for tensor in tensors]
        return torch.view_as_complex(reduced(pairs, op).view(-1, 2))
    return reduced(tensors, op)


def check_bits(transport, world_size, checksums=False, full=False):
    table, by_rank = cases(world_size, full), world(transport, world_size, checksums, full)
    for rank, (found, must) in enumerate(zip(by_rank, expected(world_size, full), strict=True)):
        assert len(found["digests"]) == len(must) == len(table)
        wrong = [case for case, one, other in zip(table, found["digests"], must, strict=True) if one != other]
        assert not wrong, f"{transport}, rank {rank} of {world_size}: {wrong}"


@nightly_where(lambda transport: transport == "unix")
@pytest.mark.parametrize("world_size", [2, by_night(3), by_night(4)])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_collective_gives_the_documented_bits_over_every_transport_around_every_limit(transport, world_size):
    check_bits(transport, world_size)


@pytest.mark.nightly
@pytest.mark.parametrize(("transport", "world_size"), [("unix", 3)])
def test_and_with_checksums(transport, world_size):
    check_bits(transport, world_size, checksums=True)


@pytest.mark.nightly
@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_and_with_every_dtype_and_more_ranks(transport, world_size, checksums):
    check_bits(transport, world_size, checksums, full=True)


@pytest.mark.parametrize("world_size", [2, by_night(3), by_night(4)])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_of_several_nans_all_ranks_get_the_same_bits(transport, world_size):
    found = [rank["nans"] for rank in small_world(transport, world_size)]
    assert found == found[:1] * world_size


@pytest.mark.parametrize("world_size", [2, by_night(3), by_night(4)])
def test_which_nan_stays_does_not_depend_on_the_transport(world_size):
    tcp, unix = (small_world(transport, world_size)[0]["nans"] for transport in TRANSPORTS)
    assert unix == tcp


# --- the one that was asked for -------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_collectives_travel_as_asked(transport, world_size):
    for found in small_world(transport, world_size):
        assert (found["transport"], found["shares memory"]) == (transport, transport == "unix")


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nobody_listens_at_a_unix_socket_any_more_when_all_have_met(transport, world_size):
    assert [found["unix"] for found in small_world(transport, world_size)] == [[]] * world_size


@pytest.mark.parametrize("world_size", [2, by_night(3)])
def test_by_itself_the_ring_shares_memory_on_one_machine(world_size):
    for variables in ({}, {"CYXTRAIN_TRANSPORT": "auto"}, {"CYXTRAIN_TRANSPORT": ""}):
        for found in values(run_ranks(world_size, transport_ranks.join_and_say, **variables)):
            assert (found["transport"], found["shares memory"], found["unix"]) == ("unix", True, [])


def test_cma_is_auto_and_rank_0_warns_once_and_says_what_to_do():
    first, second = values(run_ranks(2, transport_ranks.join_and_make_groups, CYXTRAIN_TRANSPORT="cma"))
    assert [first["transports"], second["transports"]] == [["unix"] * 3] * 2
    assert second["told"] == []
    (told,) = first["told"]
    assert told.startswith("CYXTRAIN_TRANSPORT=cma: ranks do not read each other's memory any more; they share memory")
    assert told.endswith("Unset CYXTRAIN_TRANSPORT.")


def check_refused(message):
    assert re.search(r"rank \d was started with CYXTRAIN_TRANSPORT=(unix|tcp) and rank \d with (unix|tcp)\. ", message)
    assert {"unix", "tcp"} <= set(re.split(r"[ .=]", message))
    assert "Set it to the same value in the environment of every rank." in message


def test_ranks_that_were_told_different_transports_are_refused_and_shown_both():
    port = free_port()
    told = enumerate(["unix", "tcp"])
    environments = [environment(rank, 2, port, CYXTRAIN_TRANSPORT=transport) for rank, transport in told]
    for ended in run_processes(transport_ranks.join_and_say, environments):
        assert ended.kind == "RendezvousError", ended
        check_refused(ended.message)
        assert ended.seconds < 3.0


def test_so_are_those_who_agree_with_most():
    unix, tcp = RingOptions(transport="unix"), RingOptions(transport="tcp")
    for error, seconds in meet_all(dist.HashStore(), range(3), 3, r0=unix, r1=tcp, r2=unix):
        assert error is not None
        check_refused(str(error))
        assert seconds < 1.0


# --- what there is where there is less ------------------------------------------------------------------------------


def travelled(group):
    """How a rank travels; what it reduces on the way must be right."""
    total = sum(range(group.size() + 1))
    for count in (3, 100_000, 1_000_003):
        assert bool((all_reduce(group, torch.full((count,), 1.0 + group.rank())) == total).all())
    return group.group.engine.transport, group.group.engine.selector.shares_memory


def test_ranks_whom_unix_sockets_connect_share_memory():
    assert run_threads(3, travelled) == [("unix", True)] * 3


@pytest.mark.filterwarnings("ignore:CYXTRAIN_TRANSPORT=cma:FutureWarning")
@pytest.mark.parametrize("transport", ["auto", "unix", "cma"])
def test_a_unix_socket_that_cannot_be_reached_leads_to_tcp_or_an_error_where_it_was_asked_for(monkeypatch, transport):
    """As for two containers, that share a kernel and not a network."""
    monkeypatch.setattr(dial, "unix_address", lambda name: f"\0{name[1:]}-of-another-network")
    options = RingOptions(transport=transport)
    if transport != "unix":
        assert run_threads(3, travelled, options=options) == [("tcp", False)] * 3
        return
    for error, seconds in meet_all(dist.HashStore(), range(2), 2, r0=options, r1=options):
        assert error is not None
        assert "rank 1 cannot reach rank 0 at @cyxtrain-" in str(error)
        assert seconds < 2.0


def test_a_rank_without_unix_sockets_is_met_over_tcp(monkeypatch):
    listen_unix = listen.listen_unix

    def none_on_rank_1(transport):
        return None if threading.current_thread().name == "rank 1" else listen_unix(transport)

    monkeypatch.setattr(listen, "listen_unix", none_on_rank_1)
    # Nobody calls rank 1 there, which calls rank 0.
    mixed = ("unix within a machine, tcp between", False)
    assert run_threads(3, travelled) == [("unix", False), mixed, mixed]


def test_without_abstract_names_ranks_of_one_machine_meet_on_tcp(monkeypatch):
    """Elsewhere than on Linux a Unix socket leaves a file, and its buffers are small."""
    monkeypatch.setattr(listen, "sys", SimpleNamespace(platform="darwin"))

    def rank_main(group):
        tensor = torch.ones(200_000)
        group.allreduce([tensor]).wait()
        return float(tensor.sum()), group.transport

    assert run_threads(2, rank_main) == [(400_000.0, "tcp")] * 2
