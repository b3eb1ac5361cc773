"""How ranks find each other, and what they are told where they do not."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from meetings import LATE, SECRET, meet, meet_all, say_entry
from ring_values import error_of
from worlds import join_threads, run_threads

from cyxtrain.config import RingOptions
from cyxtrain.environment.processes import State, this_process
from cyxtrain.errors import PeerLostError, RendezvousError
from cyxtrain.ring.monitoring.group_registry import GroupRegistry
from cyxtrain.ring.rendezvous import record, rendezvous
from cyxtrain.ring.rendezvous.membership import Membership
from cyxtrain.ring.rendezvous.record import RankRecord
from cyxtrain.ring.rendezvous.store_client import StoreLostError
from cyxtrain.ring.wire.link import Deadline


def reduce_once(group):
    tensor = torch.ones(3)
    group.allreduce([tensor]).wait()
    assert tensor.tolist() == [group.size()] * 3


@contextlib.contextmanager
def two_ranks(store, options):
    """Two ranks that have met, and that reduce after what is done meanwhile."""
    report_connected, done = threading.Barrier(3), threading.Event()

    def rank_main(rank):
        group = meet(store, rank, 2, options=options)
        try:
            report_connected.wait(10)
            done.wait(10)
            reduce_once(group)
        finally:
            group.shutdown()

    with ThreadPoolExecutor(2) as ranks:
        futures = [ranks.submit(rank_main, rank) for rank in range(2)]
        report_connected.wait(10)
        try:
            yield
        finally:
            done.set()
        for future in futures:
            future.result(20)


# --- who does not come ----------------------------------------------------------------------------------------------


def test_ranks_that_do_not_come_are_named_at_the_deadline():
    for error, seconds in meet_all(dist.HashStore(), [0, 2], 4, 0.4):
        assert isinstance(error, RendezvousError)
        assert str(error).startswith(
            "rank 1, rank 3 of a world of 4 did not join before the deadline: joining timed out after 0.4 s"
        )
        assert "DISTRIBUTED_TIMEOUT_MS" in str(error)
        assert error.rank == 1
        assert seconds < 0.4 + LATE


def test_the_first_rank_that_gives_up_ends_it_for_all_with_its_cause():
    store, found = dist.HashStore(), {}

    def run(rank, seconds):
        start = time.monotonic()
        found[rank] = error_of(lambda: meet(store, rank, 3, seconds)), time.monotonic() - start

    join_threads([threading.Thread(target=run, args=arguments) for arguments in ((0, 0.4), (1, 20.0))], 10.0)
    assert str(found[1][0]) == f"{found[0][0]} (reported by rank 0)"
    assert found[1][1] < 0.4 + LATE


def test_a_rank_that_says_it_is_here_and_does_not_connect_is_named():
    store = dist.HashStore()
    say_entry(store, 1, 2, 1)
    [(error, seconds)] = meet_all(store, [0], 2, 0.3)
    assert isinstance(error, RendezvousError)
    assert "Joining timed out after 0.3 s: rank 1 did not connect to rank 0 at 127.0.0.1:" in str(error)
    assert "firewalls" in str(error)
    assert seconds < 0.3 + LATE


def test_a_rank_whose_process_has_ended_is_not_waited_for():
    store = dist.HashStore()
    gone = replace(this_process("127.0.0.1"), started=1)
    store.set("1/entry/1", RankRecord(3, gone, "127.0.0.1", 1).to_json())
    [(error, seconds)] = meet_all(store, [0], 3)
    assert str(error).startswith("rank 1 died: its process ended during rendezvous")
    assert error.rank == 1
    assert seconds < 1.0


def test_sixteen_ranks_that_join_ask_the_operating_system_at_most_twice_a_second(monkeypatch):
    questions = []

    def state_of(process, asking):
        questions.append(process)
        return State.ALIVE

    monkeypatch.setattr(record, "state_of", state_of)
    joined = meet_all(dist.HashStore(), range(16), 16, 60.0)
    assert {error for error, _ in joined} == {None}
    assert len(questions) <= sum(15 * (2 * seconds + 1) for _, seconds in joined)


@pytest.mark.usefixtures("pipe_of_pytorchs_stores")
def test_a_store_that_ends_while_ranks_meet_is_said_to_have_ended():
    error = error_of_a_meeting_whose_store_ends(GroupRegistry(), threading.Event())
    assert isinstance(error, StoreLostError)
    assert str(error).startswith("rank 1 lost the store")


@pytest.mark.usefixtures("pipe_of_pytorchs_stores")
def test_a_store_that_ends_because_another_group_lost_a_rank_is_not_blamed():
    gone, asked = threading.Event(), []

    class World:
        def peer_failure(self, since):  # it hears of the rank a moment after the store has gone
            asked.extend([since] * gone.is_set())
            return PeerLostError("rank 2 is lost: killed", rank=2) if len(asked) > 3 else None

    registry, world = GroupRegistry(), World()
    registry.add(world)
    error = error_of_a_meeting_whose_store_ends(registry, gone)
    assert isinstance(error, PeerLostError)
    assert str(error) == "rank 2 is lost: killed"


def error_of_a_meeting_whose_store_ends(registry, gone):
    server = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, 2, False, wait_for_workers=False)
    found = []

    def rank_main():
        found.append(error_of(lambda: meet(client, 1, 2, 20.0, registry=registry)))

    waiting = threading.Thread(target=rank_main, daemon=True)
    waiting.start()
    server.wait(["1/entry/1"])
    del server
    gone.set()
    waiting.join(10)
    return found[0]


@pytest.mark.parametrize("key", ["1/entry/0", "1/verdict"])
@pytest.mark.parametrize("text", ["what nobody has written", "[" * 100_000, "[]"], ids=lambda text: text[:8])
def test_a_store_that_another_program_uses_is_said_to_be_so(key, text):
    store = dist.HashStore()
    store.set(key, text)
    [(error, _)] = meet_all(store, [1], 2)
    assert "the store at which the ranks meet holds what no rank has written" in str(error)
    assert "MASTER_PORT" in str(error)


# --- who comes twice, or from somewhere else ------------------------------------------------------------------------


def test_ranks_may_meet_again_at_the_same_store():
    store = dist.HashStore()
    for _ in range(3):
        run_threads(3, reduce_once, store=store)


@pytest.mark.parametrize("options", [None, SECRET], ids=["no secret", "a secret"])
def test_a_rank_that_is_taken_is_refused_at_once_and_its_holder_says_so_in_its_log(monkeypatch, caplog, options):
    store = dist.HashStore()
    with two_ranks(store, options), monkeypatch.context() as another_process:
        another_process.setattr("cyxtrain.ring.rendezvous.record._IMPORTED", "another")
        start = time.monotonic()
        error = error_of(lambda: meet(store, 1, 2, options=options))
        seconds = time.monotonic() - start
    assert type(error) is RendezvousError
    assert str(error).startswith("rank 1 is taken: another process at 127.0.0.1 (pid ")
    assert error.rank == 1
    assert seconds < 1.0
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("rank 1 turned away a connection from 127.0.0.1: rank 1 is taken")


def test_another_world_size_is_refused_on_both_sides_within_a_second():
    store, found = dist.HashStore(), {}

    def run(rank, world_size):
        start = time.monotonic()
        found[rank] = error_of(lambda: meet(store, rank, world_size)), time.monotonic() - start

    join_threads([threading.Thread(target=run, args=arguments) for arguments in ((0, 2), (1, 3))], 10.0)
    for error, seconds in found.values():
        assert isinstance(error, RendezvousError)
        assert "a world of 2" in str(error)
        assert "a world of 3" in str(error)
        assert "WORLD_SIZE" in str(error)
        assert seconds < 1.0


def test_rank_0_leaves_with_the_store_when_the_one_that_it_refuses_has_read_why():
    store = dist.HashStore()
    rolls = [Membership(store, rank, range(2), Deadline(5.0)) for rank in range(2)]
    for rank, roll in enumerate(rolls):
        roll.claim()
        roll.register(RankRecord(2 + rank))
    refused = error_of(rolls[0].await_all)
    reporting = threading.Thread(target=rolls[0].report_failure, args=(refused,))
    reporting.start()
    reporting.join(0.1)
    assert reporting.is_alive()
    assert "a world of 3" in str(error_of(rolls[1].check))
    reporting.join(5.0)
    assert not reporting.is_alive()


def test_two_versions_of_the_protocol_refuse_each_other_in_words_on_both_sides_within_a_second(monkeypatch):
    made = rendezvous.own_record

    def entry(rank, *rest):
        return replace(made(rank, *rest), protocol=1 + rank)

    monkeypatch.setattr(rendezvous, "own_record", entry)
    for error, seconds in meet_all(dist.HashStore(), [0, 1], 2):
        assert "speaks version 1 of the ring's protocol" in str(error) or "speaks version 2" in str(error)
        assert "version 1" in str(error)
        assert "version 2" in str(error)
        assert "Install the same version of cyxtrain everywhere" in str(error)
        assert seconds < 1.0


def test_checksums_on_one_rank_only_are_refused_on_both_sides_within_a_second():
    found = meet_all(dist.HashStore(), [0, 1], 2, r0=RingOptions(checksums=True), r1=RingOptions())
    for error, seconds in found:
        assert "rank 0 was started with checksums and rank 1 without" in str(error)
        assert "CYXTRAIN_CHECKSUMS" in str(error)
        assert seconds < 1.0


def test_what_a_group_held_is_free_when_it_has_left_and_not_when_python_collects():
    def rank_main(rank):
        group = meet(store, rank, 2)
        reduce_once(group)
        group.shutdown()
        parts = (
            group._group,
            group.group.engine,
            group.group.engine.monitor,
            group.group.engine.mesh,
        )
        held.extend(weakref.ref(part) for part in parts)

    store, held = dist.HashStore(), []
    gc.disable()
    try:
        join_threads([threading.Thread(target=rank_main, args=(rank,)) for rank in range(2)], 20.0)
        assert [ref() for ref in held] == [None] * 8
    finally:
        gc.enable()
