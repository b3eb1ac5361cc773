"""When to give up, and waiting: what counts is the time for which this process ran."""

from __future__ import annotations

import socket
import sys
import threading
import time

import pytest
import survival_ranks
from survival import living

from cyxtrain.ring.wire import link
from cyxtrain.ring.wire.link import Deadline, Link, LinkBroken, Poller


class FakeClock:
    """A clock that stands until it is moved; in the place of `time` in `link`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(link, "time", clock)
    return clock


@pytest.fixture
def pair():
    """A link and the socket at its other end."""
    ours, theirs = socket.socketpair()
    yield Link(ours, 1), theirs
    ours.close()
    theirs.close()


# --- deadlines ------------------------------------------------------------------------------------------------------


def test_a_deadline_passes_when_its_time_is_up(clock):
    deadline = Deadline(5.0)
    assert (deadline.left(), deadline.passed()) == (5.0, False)
    clock.now += 4.75
    assert (deadline.left(), deadline.passed()) == (0.25, False)
    clock.now += 0.25
    assert (deadline.left(), deadline.passed()) == (0.0, True)
    clock.now += 100.0
    assert (deadline.left(), deadline.passed()) == (0.0, True)


def test_a_wait_that_ends_late_moves_the_deadline_by_as_much(clock):
    deadline = Deadline(5.0)
    clock.now += 7.0
    deadline.extend_if_suspended(3.0)
    assert (deadline.left(), deadline.passed()) == (1.0, False)


@pytest.mark.parametrize("late_seconds", [-2.0, 0.0, 0.01, 0.5])
def test_a_wait_that_ends_early_or_hardly_late_does_not(late_seconds, clock):
    deadline = Deadline(5.0)
    deadline.extend_if_suspended(late_seconds)
    assert deadline.left() == 5.0


# --- waiting --------------------------------------------------------------------------------------------------------


def test_a_wait_ends_when_something_arrives_or_can_be_sent(pair):
    ours, theirs = pair
    poller, deadline = Poller(), Deadline(20.0)
    assert poller.wait([], [ours], deadline)
    assert not poller.wait([ours], [], deadline, 0.01)
    theirs.send(b"x")
    assert poller.wait([ours], [], deadline)


def test_a_wait_ends_when_its_link_is_stopped_by_another_thread(pair):
    ours, _ = pair
    stopping = threading.Timer(0.05, ours.stop)
    stopping.start()
    began = time.monotonic()
    assert Poller().wait([ours], [], Deadline(20.0))
    assert time.monotonic() - began < 1.0
    stopping.join()
    with pytest.raises(LinkBroken, match="rank 1: the connection was closed"):
        ours.receive(memoryview(bytearray(1)))


@pytest.mark.parametrize(("deadline_seconds", "longest_seconds"), [(0.1, 2.0), (20.0, 0.1), (0.0, 2.0)])
def test_a_wait_ends_with_its_deadline_or_its_piece_and_not_before(deadline_seconds, longest_seconds, pair):
    ours, _ = pair
    deadline = Deadline(deadline_seconds)
    began = time.monotonic()
    assert not Poller().wait([ours], [], deadline, longest_seconds)
    assert time.monotonic() - began >= min(deadline_seconds, longest_seconds)
    assert deadline.passed() == (deadline_seconds < 20.0)


def test_many_different_waits_keep_few_kernel_objects():
    pairs = [socket.socketpair() for _ in range(100)]
    poller = Poller()
    try:
        for ours, theirs in pairs:
            assert not poller.wait([ours], [], Deadline(0.0))
            theirs.send(b"x")
            assert poller.wait([ours], [], Deadline(1.0))
        assert len(poller._polls) <= link._MAX_POLLS
    finally:
        for sock in (sock for pair in pairs for sock in pair):
            sock.close()


def test_a_wait_that_took_longer_than_it_could_moves_the_deadline(pair, clock, monkeypatch):
    ours, _ = pair
    poller, deadline = Poller(), Deadline(5.0)
    monkeypatch.setattr(poller, "_poll", lambda *_: _Sleeping(clock))
    assert not poller.wait([ours], [], deadline)
    assert deadline.left() == 4.5  # of 5.0, half a second was waited; the other six it did not run


class _Sleeping:
    """A poll that takes six seconds longer than it was told."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock

    def poll(self, milliseconds: int) -> list[tuple[int, int]]:
        self._clock.now += milliseconds / 1000 + 6.0
        return []


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGSTOP")
@pytest.mark.nightly
@pytest.mark.usefixtures("rank_server")
def test_a_process_that_is_stopped_in_a_wait_finds_its_deadline_moved(tmp_path):
    with living(tmp_path / "notes", 1, survival_ranks.wait_alone, str(tmp_path / "notes"), 3.0) as world:
        world.wait_for_all("busy")
        stopped_seconds = world.stop(seconds=2.0)
        ((began, ended),) = world.values()
    assert ended - began > 3.0 + stopped_seconds - 0.6


# --- what waits in a connection -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("address", "near"), [("127.0.0.1", True), ("127.0.0.2", False)])
def test_a_connection_within_a_machine_holds_no_more_than_a_cache(address, near):
    if sys.platform != "linux":
        pytest.skip("of other systems 127.0.0.2 is no address as it comes")
    with socket.create_server((address, 0)) as server, socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.connect(server.getsockname())
        as_it_comes = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        Link(sock, 1)
        found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        with socket.socket() as other:  # the kernel doubles what it is asked for, and has its own limit
            other.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 19)
            asked = other.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        assert as_it_comes != asked
        assert found == (asked if near else as_it_comes)
