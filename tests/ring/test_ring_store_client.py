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
from meetings import LATE, meet
from ring_values import error_of
from worlds import join_threads, run_threads, wait_until

from cyxtrain.config import RingOptions
from cyxtrain.errors import RendezvousError
from cyxtrain.ring.monitoring import wait_graph
from cyxtrain.ring.rendezvous import record as entry_module
from cyxtrain.ring.rendezvous import rendezvous
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


@pytest.mark.parametrize("seconds", [0.2, 1.0])
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


def test_a_rank_that_ends_when_all_have_met_is_not_missed(monkeypatch):
    """It may have left in peace: whoever has not noticed yet that all have met looks once more."""

    def all_connected(self):
        found = really_all_connected(self)
        if self._rank == 0 and not looked:
            wait_until(lambda: really_all_connected(self))
            return False
        return found

    def check(self):
        if self._rank == 0 and really_all_connected(self):
            looked.append("a process has ended")
            raise RendezvousError("rank 1 died: its process ended during rendezvous", rank=1)

    looked, really_all_connected = [], Membership.all_connected
    monkeypatch.setattr(Membership, "all_connected", all_connected)
    monkeypatch.setattr(Membership, "check", check)
    run_threads(2, lambda group: group.barrier())
    assert looked


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


def test_ranks_that_are_not_connected_with_all_others_are_named():
    store = dist.HashStore()
    rolls = [Membership(store, rank, [4, 7, 9], Deadline(5.0)) for rank in range(3)]
    for roll in rolls:
        roll.claim()
    rolls[0].report_connected()
    assert rolls[2].unconnected() == [7, 9]
    assert not rolls[0].all_connected()
    rolls[1].report_connected()
    rolls[2].report_connected()
    assert rolls[0].unconnected() == []
    assert rolls[0].all_connected()


@pytest.mark.parametrize("lives", [1, 3])
def test_who_fails_before_all_have_met_ends_it_for_all_and_who_fails_afterwards_for_nobody(lives):
    def meet_again(store):
        rolls = [Membership(store, rank, range(3), Deadline(5.0)) for rank in range(3)]
        for roll in rolls:
            roll.claim()
            roll.register(RankRecord(3))
        return rolls

    failure = RendezvousError("rank 7 died: its process ended during rendezvous", rank=7)
    store = dist.HashStore()
    for _ in range(lives):
        rolls = meet_again(store)
        for roll in rolls:
            roll.report_connected()
        assert all(roll.all_connected() for roll in rolls)
        assert not rolls[2].report_failure(failure)
        for roll in rolls:
            roll.check()
    rolls = meet_again(store)
    rolls[1].report_connected()
    rolls[2].report_connected()
    assert rolls[1].report_failure(failure)
    rolls[0].report_connected()
    for roll in rolls:
        assert str(error_of(roll.all_connected)).startswith("rank 7 died")
        assert str(error_of(roll.check)).startswith("rank 7 died")


def test_a_rank_that_waits_long_for_a_message_warns_about_its_sender(monkeypatch, caplog):
    def rank_main(group):
        tensor = torch.ones(3)
        if group.rank() == 0:
            group.recv([tensor], 1).wait(timedelta(seconds=20))
            return
        wait_until(lambda: "has waited" in caplog.text)
        group.send([tensor], 0).wait()

    monkeypatch.setattr(wait_graph, "WARN_SECONDS", 1.5)
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
