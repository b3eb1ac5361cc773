"""The door lets members in and nobody else: strangers cost little, hear nothing, and are told of once a second."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import resource
import select
import selectors
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from strangers import CLAIM, HELLO, UNFINISHED, WORDS, connect, hear_all, say

from cyxtrain.ring.rendezvous import accept as door_module
from cyxtrain.ring.rendezvous.accept import Acceptor, SparseLog
from cyxtrain.ring.rendezvous.handshake import (
    MAX_BYTES,
    HandshakeClient,
    Hello,
    NoProofError,
    RefusedError,
    Role,
    take_message,
)

KEY = b"the secret of this run"
HANDSHAKE_SECONDS = 5.0
STRANGERS = 256


class House:
    """A door that the test itself turns: nothing happens between two calls."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.listener.setblocking(False)
        self.selector = selectors.DefaultSelector()
        self.members: dict[Hello, socket.socket] = {}
        self.refusals: dict[int, str] = {}
        self.door = Acceptor([self.listener], "rank 0", KEY, self._judge, self._admit, self.selector)

    def _judge(self, claim: Hello) -> str:
        return self.refusals.get(claim.rank, "")

    def _admit(self, claim: Hello, sock: socket.socket) -> None:
        self.members[claim] = sock

    @property
    def address(self) -> tuple[str, int]:
        return self.listener.getsockname()[:2]

    @property
    def watched(self) -> int:
        """How many sockets the door waits for, the listener included."""
        return len(self.selector.get_map())

    def turn(self, seconds: float = 0.0) -> int:
        """Does what is to be done; returns how many sockets had something."""
        ready = self.selector.select(seconds)
        for key, _ in ready:
            key.data()
        return len(ready)

    def settle(self) -> None:
        """Turns until nothing is left to do; what was sent over loopback is there at once."""
        while self.turn():
            pass

    def close(self) -> None:
        self.door.close()
        for sock in self.members.values():
            sock.close()
        self.selector.close()
        self.listener.close()


@pytest.fixture
def house() -> Iterator[House]:
    made = House()
    yield made
    made.close()


@pytest.fixture
def guests() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def shake(house: House, guest: socket.socket, claim: Hello = CLAIM, key: bytes = KEY) -> None:
    """A whole handshake, the door turned in between."""
    caller, received = HandshakeClient(claim, key), bytearray()
    guest.sendall(caller.hello())
    house.settle()
    received += guest.recv(MAX_BYTES)
    guest.sendall(caller.prove(take_message(received)))
    house.settle()
    verdict = guest.recv(MAX_BYTES)
    received += verdict
    if not verdict:
        raise NoProofError("it closed the connection")
    caller.conclude(take_message(received))


# --- who comes in ---------------------------------------------------------------------------------------------------


def test_a_member_is_handed_over_with_what_it_said_of_itself(house, guests):
    for role in Role:
        guest = guests.enter_context(connect(house.address))
        claim = dataclasses.replace(CLAIM, role=role)
        shake(house, guest, claim)
        house.members[claim].sendall(b"welcome")
        assert guest.recv(100) == b"welcome"
    assert house.watched == 1
    assert not house.door.unauthenticated


def test_a_member_that_speaks_one_byte_at_a_time_is_let_in(house, guests):
    guest = guests.enter_context(connect(house.address))
    guest.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    caller, received = HandshakeClient(CLAIM, KEY), bytearray()

    def drip(data):
        for byte in data:
            guest.sendall(bytes([byte]))
            house.settle()

    drip(caller.hello())
    received += guest.recv(MAX_BYTES)
    drip(caller.prove(take_message(received)))
    received += guest.recv(MAX_BYTES)
    caller.conclude(take_message(received))
    assert list(house.members) == [CLAIM]


def test_a_member_that_may_not_come_in_hears_why_and_the_log_says_so_too(house, guests, caplog):
    house.refusals[1] = "rank 1 is taken"
    guest = guests.enter_context(connect(house.address))
    with pytest.raises(RefusedError, match=r"^rank 1 is taken$"):
        shake(house, guest)
    assert hear_all(guest) == b""
    assert [record.getMessage() for record in caplog.records] == [
        "rank 0 turned away a connection from 127.0.0.1: rank 1 is taken"
    ]
    assert not house.members


# --- who does not ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WORDS)
def test_who_says_no_hello_hears_not_one_byte(house, guests, name):
    guest = guests.enter_context(connect(house.address))
    say(guest, WORDS[name])
    house.settle()
    assert hear_all(guest) == b""
    assert house.watched == 1


def test_who_does_not_know_the_secret_hears_our_hello_and_nothing_more(house, guests):
    for _ in range(3):
        guest = guests.enter_context(connect(house.address))
        caller, received = HandshakeClient(CLAIM, b"another secret"), bytearray()
        say(guest, caller.hello())
        house.settle()
        received += guest.recv(MAX_BYTES)
        answer = take_message(received)
        assert not received
        say(guest, caller.prove(answer))
        house.settle()
        assert hear_all(guest) == b""
    assert house.door.unauthenticated == {1: 3}
    assert not house.members


def test_a_secret_that_is_wrong_is_counted_for_so_many_ranks_only(house, guests):
    """A stranger may name four thousand million ranks."""
    for rank in range(1100):
        guest = guests.enter_context(connect(house.address))
        with pytest.raises(NoProofError):
            shake(house, guest, dataclasses.replace(CLAIM, rank=1000 * rank), b"another secret")
        guest.close()
    assert len(house.door.unauthenticated) <= 1024


def test_a_handshake_that_was_heard_before_opens_no_door(house, guests):
    member = guests.enter_context(connect(house.address))
    said: list[bytes] = []

    class Recorded:
        def sendall(self, data):
            said.append(data)
            member.sendall(data)

        def recv(self, count):
            return member.recv(count)

    shake(house, Recorded())
    again = guests.enter_context(connect(house.address))
    again.sendall(b"".join(said))
    house.settle()
    received = bytearray(hear_all(again))
    take_message(received)
    assert not received
    assert len(house.members) == 1


@pytest.mark.parametrize("name", UNFINISHED)
def test_who_is_slow_has_five_seconds(house, guests, name):
    guest = guests.enter_context(connect(house.address))
    say(guest, UNFINISHED[name])
    house.settle()
    came = time.monotonic()
    house.door.expire(came + HANDSHAKE_SECONDS - 0.5)
    assert house.watched == 2
    house.door.expire(came + HANDSHAKE_SECONDS)
    assert house.watched == 1
    assert hear_all(guest) == b""


@pytest.mark.parametrize("whole", [True, False])
def test_a_proof_that_came_in_time_counts_also_where_nobody_read_it_then(house, guests, monkeypatch, whole):
    guest = guests.enter_context(connect(house.address))
    caller, received = HandshakeClient(CLAIM, KEY), bytearray()
    guest.sendall(caller.hello())
    house.settle()
    received += guest.recv(MAX_BYTES)
    proof = caller.prove(take_message(received))
    guest.sendall(proof if whole else proof[:-1])
    late = time.monotonic() + HANDSHAKE_SECONDS
    monkeypatch.setattr(door_module.time, "monotonic", lambda: late)
    house.settle()
    monkeypatch.undo()
    if whole:
        received += guest.recv(MAX_BYTES)
        caller.conclude(take_message(received))
    else:
        assert hear_all(guest) == b""
    assert list(house.members) == [CLAIM] * whole


def test_not_more_than_4_kib_of_a_stranger_are_read(house, guests, monkeypatch):
    read = []

    def recv(sock, count, *flags):
        part = socket.SocketType.recv(sock, count, *flags)
        read.append(len(part))
        return part

    longest = HELLO.replace(b'"run": "', b'"run": "' + b"0" * (2048 - len(HELLO)))
    longest = longest[:4] + (2040).to_bytes(4, "big") + longest[8:]
    guest = guests.enter_context(connect(house.address))
    guest.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            guest.send(longest + b"CYXT" + (2040).to_bytes(4, "big") + b" " * 10**6)
    monkeypatch.setattr(socket.socket, "recv", recv)
    house.settle()
    monkeypatch.undo()
    assert 2048 < sum(read) <= MAX_BYTES
    assert house.watched == 1


def test_the_257th_stranger_takes_the_place_of_the_first(house, guests):
    crowd = [guests.enter_context(connect(house.address)) for _ in range(STRANGERS + 2)]
    house.settle()
    assert house.watched == 1 + STRANGERS
    assert [hear_all(guest) for guest in crowd[:2]] == [b"", b""]
    assert select.select(crowd[2:], [], [], 0.0)[0] == []


def test_a_stranger_that_speaks_while_it_loses_its_place_does_no_harm(house, guests):
    crowd = [guests.enter_context(connect(house.address)) for _ in range(STRANGERS)]
    house.settle()
    guests.enter_context(connect(house.address))  # the listener is ready first,
    crowd[0].sendall(HELLO)  # then the one who must go: both come out of one call of select
    assert house.turn(5.0) == 2
    house.settle()
    member = guests.enter_context(connect(house.address))
    shake(house, member)
    assert list(house.members) == [CLAIM]


def test_closing_leaves_nobody_connected(house, guests):
    crowd = [guests.enter_context(connect(house.address)) for _ in range(5)]
    house.settle()
    house.door.close()
    assert [hear_all(guest) for guest in crowd] == [b""] * 5
    assert house.watched == 1


# --- out of descriptors ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def no_more_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(entry) for entry in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
    free = []
    try:
        with contextlib.suppress(OSError):
            while True:
                free.append(os.dup(0))
        yield
    finally:
        for descriptor in free:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="Linux only")
def test_without_descriptors_it_waits_instead_of_spinning_and_then_takes_members_again(house, guests, caplog):
    guest = guests.enter_context(connect(house.address))
    with no_more_descriptors():
        assert house.turn(1.0) == 1
        assert house.turn(0.1) == 0  # although somebody waits at the listener
        house.door.expire(time.monotonic() + 0.5)
        assert house.watched == 0
        assert house.door.failure is None  # files may become free
        house.door.expire(time.monotonic() + 1.1)
        assert house.turn(1.0) == 1
        assert house.door.failure is not None
        assert house.door.failure.errno == errno.EMFILE
    assert os.strerror(errno.EMFILE) in caplog.records[0].getMessage()
    house.door.expire(time.monotonic() + 3.0)
    shake(house, guest)
    assert list(house.members) == [CLAIM]
    assert house.door.failure is None


# --- the log --------------------------------------------------------------------------------------------------------


def test_strangers_are_told_of_once_a_second_with_how_many_they_were(caplog):
    log = SparseLog("rank 3")
    for tenth in range(1, 100):
        log.note(f"saw number {tenth}", 100 + tenth / 10)
    log.flush(111.0)
    log.flush(120.0)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "rank 3 saw number 1"
    assert 10 <= len(lines) <= 11
    assert all(line.endswith(" since the last such line)") for line in lines[1:])
    assert 1 + sum(int(line.split("(")[1].split()[0]) for line in lines[1:]) == 99
    assert {(record.name, record.levelno) for record in caplog.records} == {("cyxtrain.ring", logging.WARNING)}


def test_a_stranger_writes_no_line_and_no_escape_into_the_log(caplog):
    SparseLog("rank 3").note("it connected to \x1b]0;owned\x07\x1b[2J\nrank 1 has failed: \u202e" + "x" * 5000, 100)
    message = caplog.records[0].getMessage()
    assert message.startswith("rank 3 it connected to ]0;owned [2J rank 1 has failed: x")
    assert message.isprintable()
    assert len(message) < 500
