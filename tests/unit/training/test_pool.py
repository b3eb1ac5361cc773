"""Claims about a pool of workers that no process is needed for: what it makes of events, signals and lost streams."""

from __future__ import annotations

import io
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import cyxtrain as cx
from cyxtrain.notebook import pool as pools
from cyxtrain.notebook.pool import JobAnswers, Pool, _Received, _Wrote
from cyxtrain.notebook.worker import Answer, Ready, Report, Signal
from cyxtrain.workers.process import RankExit

KILLED = RankExit(index=1, label="rank 1", code=137, killed_by=9, at_seconds=0.0)


@pytest.fixture
def pool() -> Iterator[Pool]:
    """A pool of two that is not started: what workers would say is put into its queue."""
    made = Pool(2, {})
    yield made
    made.abandon()


def say(pool: Pool, *events: Any) -> None:
    for event in events:
        pool._events.put(event)


def run(pool: Pool, received: list[Any] | None = None, *, hears: bool = True) -> JobAnswers:
    return pool.run(print, (), (received if received is not None else []).append, lambda _: hears)


def marks(pool: Pool) -> list[_Wrote]:
    """What two workers write when they are done."""
    return [_Wrote(err, b"[rank %d] %s" % (rank, pool._mark)) for rank in range(2) for err in (False, True)]


def test_answers_reports_and_lines_come_to_whoever_runs_the_job(pool, capsys):
    lines = _Wrote(False, b"[rank 0] mine\n[rank 1] yours\n")
    answers = [_Received(1, Answer("b", True)), _Received(0, Answer("a", True))]
    say(pool, _Received(0, Ready()), _Received(1, Ready()), lines, _Received(0, Report("half")), *answers)
    say(pool, _Received(0, Report("too late")), *marks(pool))
    received: list[Any] = []
    found = run(pool, received)
    assert (found.by_rank, found.can_continue, received) == ({0: "a", 1: "b"}, True, ["half"])
    assert capsys.readouterr() == ("mine\n[rank 1] yours\n", "")
    found.check()


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux a port can be kept for who listens there later")
def test_nobody_else_gets_the_port_of_a_pool_until_it_is_gone(pool):
    address = "", int(pool._supervisor._specs[0].environment["MASTER_PORT"])
    with socket.socket() as stranger:
        with pytest.raises(OSError, match="in use"):
            stranger.bind(address)
        with pytest.raises(OSError, match="in use"):
            socket.create_server(address)
        pool.abandon()
        stranger.bind(address)


def test_a_worker_that_ends_is_named_and_the_others_answer_is_kept(pool):
    say(pool, _Received(0, Ready()), _Received(1, Ready()), KILLED, _Received(0, Answer("a", True)), *marks(pool))
    found = run(pool)
    assert (found.by_rank, found.ended, found.can_continue) == ({0: "a"}, [KILLED], False)
    with pytest.raises(cx.PeerLostError, match=r"rank 1 has exited: its worker process ended \(exit code 137: SIGKILL"):
        found.check()


def test_a_worker_that_ends_after_its_answer_does_not_hold_up_what_was_answered(pool, monkeypatch):
    monkeypatch.setattr(pools, "_DRAIN_SECONDS", float("inf"))  # nobody waits for marks that cannot come
    say(pool, *(_Received(rank, Answer(rank, True)) for rank in range(2)), KILLED)
    assert run(pool).by_rank == {0: 0, 1: 1}


def test_workers_that_do_not_come_in_time_are_named_and_ended(pool, monkeypatch):
    monkeypatch.setattr(pools, "START_SECONDS", -1.0)
    pool._ready.add(0)
    with pytest.raises(cx.RendezvousError, match=r"did not start within -1 s: ranks \[1\]"):
        run(pool)
    assert not pool.is_usable


def test_workers_that_cannot_be_started_say_why(pool, monkeypatch):
    def fail() -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(pool._supervisor, "run", fail)
    pool._supervise()
    assert all(end.closed for end in pool._ends)
    with pytest.raises(cx.RendezvousError, match="cannot be started: no more processes") as caught:
        run(pool)
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)], ids=["SIGINT", "SIGTERM"]
)
def test_a_signal_that_workers_shall_not_hear_ends_them_and_does_what_it_does(pool, number, error):
    pool._signals.append(number)
    say(pool, Signal(number))
    with pytest.raises(error) as caught:
        run(pool, hears=False)
    assert not pool.is_usable
    if error is SystemExit:
        assert caught.value.code == 128 + signal.SIGTERM


def test_a_signal_of_an_earlier_call_is_passed_over_and_the_second_one_ends_the_workers(pool):
    say(pool, Signal(signal.SIGINT), *(_Received(rank, Answer(rank, True)) for rank in range(2)), *marks(pool))
    assert run(pool, hears=False).by_rank == {0: 0, 1: 1}
    pool._signals += [signal.SIGINT, signal.SIGINT]
    say(pool, Signal(signal.SIGINT), Signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        run(pool)
    while not isinstance(said := pool._ends[1].recv(), Signal):
        pass
    assert said == Signal(signal.SIGINT)  # the first one was told


def test_an_interruption_while_it_starts_leaves_no_thread(pool, monkeypatch):
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pool._threads[0], "start", interrupted)
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        pool.start()
    assert not pool.is_usable
    assert threading.active_count() == before


def test_what_workers_write_is_dropped_where_there_is_no_stream(pool, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    answers = [_Received(rank, Answer(rank, True)) for rank in range(2)]
    say(pool, _Wrote(False, b"[rank 0] lost\n"), *answers, *marks(pool))
    assert run(pool).by_rank == {0: 0, 1: 1}


def test_what_a_streams_encoding_does_not_have_becomes_a_question_mark(pool, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), "ascii", newline="")
    monkeypatch.setattr(sys, "stdout", stream)
    pool._print(_Wrote(False, "[rank 0] 3 \u00b5s\n".encode()))
    assert stream.buffer.getvalue() == b"3 ?s\n"  # type: ignore[attr-defined]


def test_a_last_line_without_an_end_is_shown_and_the_mark_is_not(pool, capsys):
    pool._print(_Wrote(False, b"[rank 1] half a line" + pool._mark))
    assert capsys.readouterr().out == "[rank 1] half a line\n"


def test_signals_are_the_pools_within_and_anothers_afterwards(pool, monkeypatch):
    received: list[int] = []
    monkeypatch.setattr(pools.runtime, "is_interactive", lambda: False)
    old = {number: signal.signal(number, lambda n, _: received.append(n)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pool.handling_signals():
            signal.raise_signal(signal.SIGTERM)
            assert (pool._signals, received) == ([signal.SIGTERM], [])
            assert pool._events.get() == Signal(signal.SIGTERM)
        assert received == [signal.SIGTERM]  # no job had heard of it: as if it came now
        assert pool._signals == []
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def test_another_thread_than_the_main_one_leaves_signals_as_they_are(pool):
    before, within = signal.getsignal(signal.SIGINT), []

    def use() -> None:
        with pool.handling_signals():
            within.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join(30)
    assert within == [before]
