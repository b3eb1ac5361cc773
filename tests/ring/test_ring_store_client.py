"""The store at which ranks meet: what it does not answer, what it may not learn, and who is named."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from markers import by_night
from meetings import LATE, meet
from ring_values import error_of
from worlds import join_threads, run_threads, wait_until

from cyxtrain.config import RingOptions
from cyxtrain.errors import PeerLostError, RendezvousError
from cyxtrain.ring.monitoring import wait_graph
from cyxtrain.ring.monitoring.group_registry import GroupRegistry
from cyxtrain.ring.rendezvous import record as entry_module
from cyxtrain.ring.rendezvous import rendezvous
from cyxtrain.ring.rendezvous.directory import Directory
from cyxtrain.ring.rendezvous.membership import Membership
from cyxtrain.ring.rendezvous.record import RankRecord
from cyxtrain.ring.rendezvous.store_client import StoreClient
from cyxtrain.ring.wire.link import Deadline


class SilentStore(dist.Store):
    """A store whose process is stopped: it takes questions, and answers none until it goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()

    def check(self, keys):
        self.goes_on.wait(30)
        return False

    def compare_set(self, key, expected, desired):
        return desired


@pytest.mark.parametrize("seconds", [0.2, by_night(1.0)])
def test_a_store_that_does_not_answer_is_left_at_the_deadline(seconds):
    store = SilentStore()
    try:
        start = time.monotonic()
        error = error_of(lambda: meet(store, 1, 2, seconds))
        assert isinstance(error, RendezvousError)
        assert "rank 1 gets no answer from the store" in str(error)
        assert error.rank == 0
        assert time.monotonic() - start < seconds + LATE
    finally:
        store.goes_on.set()


def test_a_secret_that_is_no_text_lets_in_who_knows_it_and_shows_itself_nowhere():
    options = RingOptions(secret="caf\udce9 and more")  # how Python shows bytes of the environment that are no UTF-8

    def rank_main(rank):
        group = meet(store, rank, 2, options=options)
        group.barrier()
        joined.append(rank)
        group.shutdown()

    store, joined = dist.HashStore(), []
    join_threads([threading.Thread(target=rank_main, args=(rank,)) for rank in range(2)], 20.0)
    assert sorted(joined) == [0, 1]
    assert "more" not in repr(options)
    assert "11" * 32 not in repr(RankRecord(2, key="11" * 32))


def test_of_an_error_that_is_not_ours_the_others_hear_the_name_only(monkeypatch):
    def broken(name, *rest):
        if name == 1:
            raise ValueError("what is nobody's business")
        return listen(name, *rest)

    def rank_main(rank):
        start = time.monotonic()
        with pytest.raises((RendezvousError, ValueError)) as raised:
            meet(store, rank, 2)
        found[rank] = raised.value, time.monotonic() - start

    listen = rendezvous.listen
    monkeypatch.setattr(rendezvous, "listen", broken)
    store, found = dist.HashStore(), {}
    join_threads([threading.Thread(target=rank_main, args=(rank,)) for rank in range(2)], 20.0)
    assert isinstance(found[1][0], ValueError)
    first, seconds = found[0]
    assert str(first).startswith("rank 1 cannot join: ValueError. Look at its output.")
    assert "business" not in str(first)
    assert seconds < 1.0


def test_a_rank_that_leaves_while_others_still_compare_is_not_missed(monkeypatch):
    """It has heard of all that they are connected, and they have what it sent."""

    def receive(self, *arguments):
        if threading.current_thread().name == "rank 0":
            assert left.wait(10)
        return really_receive(self, *arguments)

    def rank_main(group):
        if group.rank() == 1:
            group.shutdown()
            left.set()
        return "joined"

    left, really_receive = threading.Event(), Directory._receive
    monkeypatch.setattr(Directory, "_receive", receive)
    assert run_threads(2, rank_main) == ["joined", "joined"]


def test_forked_processes_are_told_apart(monkeypatch):
    own = RankRecord(2).token
    monkeypatch.setattr(entry_module.os, "getpid", lambda: 12345)
    assert RankRecord(2).token != own


def test_a_proof_of_one_group_proves_nothing_in_another_one_of_the_same_ranks():
    store, names = dist.HashStore(), ("1", "2")
    options = [RingOptions(secret="secret", group_name=name) for name in names]
    one, other = (Membership(store, 0, range(2), Deadline(5.0), each) for each in options)
    one.store.set("key", "value")
    assert one.store.get("key") == b"value"
    assert other.store.get("key") is None
    assert other.store.forged == {"key"}


def error_while_rank_1_sends_no_records(monkeypatch, seconds, registry=None):
    """Return the error of rank 0, which is connected to rank 1."""

    def compare(self, rank, *arguments):
        if rank == 0:
            return really_compare(self, rank, *arguments)
        is_told.wait(10)
        raise RendezvousError("its own deadline")

    def run(rank):
        found[rank] = error_of(lambda: meet(store, rank, 2, seconds, registry=None if rank else registry))
        is_told.set()

    is_told, really_compare, store, found = threading.Event(), Directory.compare, dist.HashStore(), {}
    monkeypatch.setattr(Directory, "compare", compare)
    join_threads([threading.Thread(target=run, args=(rank,)) for rank in range(2)], 10.0)
    return found[0]


def test_a_rank_that_sends_no_records_for_comparison_is_named_at_the_deadline(monkeypatch):
    error = error_while_rank_1_sends_no_records(monkeypatch, 0.4)
    assert isinstance(error, RendezvousError)
    assert "did not send its records for comparison within 0.4 s" in str(error)
    assert error.rank == 1


def test_a_rank_that_another_group_loses_ends_the_comparison(monkeypatch):
    class World:
        def peer_failure(self, since):
            return PeerLostError("rank 1 is lost: killed", rank=1) if comparing.is_set() else None

    def receive(self, *arguments):
        comparing.set()
        return really_receive(self, *arguments)

    comparing, really_receive, registry, world = threading.Event(), Directory._receive, GroupRegistry(), World()
    registry.add(world)
    monkeypatch.setattr(Directory, "_receive", receive)
    error = error_while_rank_1_sends_no_records(monkeypatch, 20.0, registry)
    assert isinstance(error, PeerLostError)
    assert str(error) == "rank 1 is lost: killed"


@pytest.mark.parametrize("lives", [1, 3])
def test_who_fails_first_ends_it_for_all_in_each_life_anew(lives):
    store = dist.HashStore()
    for life in range(lives):
        rolls = [Membership(store, rank, range(3), Deadline(5.0)) for rank in range(3)]
        for roll in rolls:
            roll.claim()
            roll.register(RankRecord(3))
            roll.check()
        rolls[1].report_failure(RendezvousError(f"rank {life} died", rank=life))
        rolls[2].report_failure(RendezvousError("what came of it", rank=2))
        for roll in rolls:
            assert str(error_of(roll.check)) == f"rank {life} died (reported by rank 1)"


def test_a_rank_that_waits_long_for_a_message_warns_about_its_sender(monkeypatch, caplog):
    def rank_main(group):
        tensor = torch.ones(3)
        if group.rank() == 0:
            group.recv([tensor], 1).wait(timedelta(seconds=20))
            return
        wait_until(lambda: "has waited" in caplog.text)
        group.send([tensor], 0).wait()

    monkeypatch.setattr(wait_graph, "WARN_SECONDS", 0.5)
    with caplog.at_level(logging.WARNING, "cyxtrain.ring"):
        run_threads(2, rank_main)
    [line] = [record.getMessage() for record in caplog.records if "has waited" in record.getMessage()]
    assert "rank 0 has waited" in line
    assert "for rank 1 in message (float32 [3], tag 0)" in line
    assert "It reports: " in line


def test_what_is_wrong_with_a_question_is_not_the_stores_end():
    board = StoreClient(dist.HashStore(), "rank 0", Deadline(5.0))
    with pytest.raises(AttributeError):
        board.set("key", 5)
    assert not board.lost


@pytest.mark.parametrize(
    "fields", [{"port": 70_000}, {"port": -1}, {"host": "näher"}, {"host": "node0"}, {"heartbeat_timeout_seconds": 0.0}]
)
def test_an_entry_that_cannot_be_is_none_of_a_ranks(fields):
    text = dataclasses.replace(RankRecord(2), **fields).to_json()
    assert "holds what no rank has written" in str(error_of(lambda: RankRecord.from_json(text)))
