"""The proxy by itself, between plain sockets: it does what a plan says at the very byte, and nothing else."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch.distributed as dist
from chaos import FRAME, HELLO, Proxy
from chaos_links import Connection
from faults import (
    Close,
    Cut,
    Delay,
    Fault,
    Flip,
    HoldGil,
    OneWay,
    Reset,
    Slices,
    Stop,
    Throttle,
    suffer,
)
from rank_processes import run_ranks, values
from worlds import child_environment, wait_until

from cyxtrain.ring.rendezvous import dial

DATA = bytes(range(256)) * 40


@dataclass
class Ends:
    """A link from rank 1 to rank 0 through the proxy: both its ends, past a handshake."""

    proxy: Proxy
    near: socket.socket
    far: socket.socket
    handshake: int


@contextlib.contextmanager
def linked(*faults: Fault, role: str = "collectives") -> Iterator[Ends]:
    with Proxy(2, faults) as proxy, socket.create_server(("127.0.0.1", 0)) as listener:
        store = dist.HashStore()
        entry = json.dumps({"host": "127.0.0.1", "port": listener.getsockname()[1], "kept": [1]})
        proxy.store(store).set("7/entry/0", entry)
        assert store.get("7/entry/0").decode() == entry
        with dial.socket.socket() as near:
            near.settimeout(10)
            near.connect_ex(listener.getsockname())
            rest = message() + (struct.pack(">I", 2) + b"{}" + bytes(8)) * (role == "collectives")
            hello, answer = message(rank=1, role=role) + rest, message(rank=0) + rest
            near.sendall(hello)
            far, _ = listener.accept()
            far.settimeout(10)
            with far:
                assert exactly(far, len(hello)) == hello
                far.sendall(answer)
                assert exactly(near, len(answer)) == answer
                yield Ends(proxy, near, far, len(hello))


def message(**body: object) -> bytes:
    text = json.dumps(body).encode()
    return FRAME.pack(HELLO, len(text)) + text


def exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        assert part, f"it ended after {len(data)} of {count} bytes"
        data += part
    return data


def silent(sock: socket.socket, seconds: float = 0.1) -> bool:
    """Whether nothing comes in that time."""
    sock.settimeout(seconds)
    try:
        return not sock.recv(1, socket.MSG_PEEK)
    except TimeoutError:
        return True
    finally:
        sock.settimeout(10)


def late(*, past: bool = True, **fields) -> dict:
    return {"rank": 1, "peer": 0, "past_handshake": past} | fields


def test_without_a_plan_everything_comes_through_both_ways():
    with linked() as ends:
        ends.near.sendall(DATA)
        ends.far.sendall(DATA[::-1])
        assert exactly(ends.far, len(DATA)) == DATA
        assert exactly(ends.near, len(DATA)) == DATA[::-1]
        ends.near.shutdown(socket.SHUT_WR)
        assert ends.far.recv(1) == b""
        ends.far.sendall(b"half open")
        assert exactly(ends.near, 9) == b"half open"
    there, back = ends.proxy.traffic()
    assert (there.rank, there.peer, there.role) == (1, 0, "collectives")
    assert (there.sent - there.handshake, back.sent - back.handshake) == (len(DATA), len(DATA) + 9)
    assert there.handshake == ends.handshake


def test_more_than_the_proxy_holds_waits_at_its_sender_and_arrives_whole():
    data = DATA * 500
    with linked() as ends:
        ends.near.setblocking(False)
        sent = 0
        while sent < len(data):
            with contextlib.suppress(BlockingIOError):
                sent += ends.near.send(data[sent : sent + 100_000])
                continue
            assert exactly(ends.far, 50_000)
            data, sent = data[50_000:], sent - 50_000
        assert exactly(ends.far, len(data)) == data


@pytest.mark.parametrize("after", [0, 1, 255, 5000])
def test_a_flow_is_closed_at_the_very_byte(after):
    with linked(Fault(Close(), after_bytes=after, **late())) as ends:
        ends.near.sendall(DATA)
        assert exactly(ends.far, after) == DATA[:after]
        assert (ends.far.recv(1), ends.near.recv(1)) == (b"", b"")  # a FIN: an end without an error
        assert [happened.at_byte - ends.handshake for happened in ends.proxy.happened] == [after]


def test_a_reset_is_an_error_for_both_sides():
    with linked(Fault(Reset(), after_bytes=100, **late())) as ends:
        ends.near.sendall(DATA)
        for sock in (ends.far, ends.near):
            with pytest.raises(ConnectionResetError):
                exactly(sock, len(DATA))


@pytest.mark.parametrize("bit", [0, 7, 8, 8 * 3000 + 5, 8 * len(DATA) - 1])
def test_one_bit_is_flipped_and_no_other(bit):
    with linked(Fault(Flip(bit), **late())) as ends:
        ends.near.sendall(DATA)
        expected = bytearray(DATA)
        expected[bit // 8] ^= 1 << bit % 8
        assert exactly(ends.far, len(DATA)) == expected
        ends.far.sendall(DATA)
        assert exactly(ends.near, len(DATA)) == DATA
        wait_until(lambda: ends.proxy.happened)
        assert [happened.at_byte - ends.handshake for happened in ends.proxy.happened] == [bit // 8]


def test_a_flip_beyond_the_end_of_the_stream_has_not_happened():
    with linked(Fault(Flip(8 * len(DATA)), **late())) as ends:
        ends.near.sendall(DATA)
        assert exactly(ends.far, len(DATA)) == DATA
        assert ends.proxy.happened == []


def test_a_fault_concerns_its_own_link_only():
    other = [late(peer=2), late(role="messages"), late(rank=2)]
    with linked(*[Fault(Close(), **fields) for fields in other]) as ends:
        ends.near.sendall(DATA)
        assert exactly(ends.far, len(DATA)) == DATA
    with linked(Fault(Close(), past_handshake=True, role="control"), role="control") as ends:
        assert ends.far.recv(1) == b""


def test_slices_are_sent_one_by_one():
    near, caller = socket.socketpair()
    far, listener = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # it keeps apart what was sent apart
    with near, caller, far, listener:
        Connection(near, far, (1, 0, "control"), [Fault(Slices(3))], [], DATA[:100]).pump(time.monotonic())
        assert [listener.recv(100) for _ in range(34)] == [DATA[:100][at : at + 3] for at in range(0, 100, 3)]


def test_slices_arrive_whole():
    with linked(Fault(Slices(1), **late())) as ends:
        ends.near.sendall(DATA[:2000])
        assert exactly(ends.far, 2000) == DATA[:2000]


def test_a_delay_moves_everything_by_so_much():
    with linked(Fault(Delay(0.2), **late())) as ends:
        begin = time.monotonic()
        ends.near.sendall(DATA)
        ends.near.shutdown(socket.SHUT_WR)
        assert exactly(ends.far, len(DATA)) == DATA
        assert time.monotonic() - begin >= 0.2
        assert ends.far.recv(1) == b""


def test_a_throttle_lets_so_much_through_in_a_second():
    with linked(Fault(Throttle(20_000), **late())) as ends:
        begin = time.monotonic()
        ends.near.sendall(DATA[:6000])
        assert exactly(ends.far, 6000) == DATA[:6000]
        assert 0.25 <= time.monotonic() - begin < 1.0


def test_a_black_hole_swallows_nothing_and_heals():
    with linked(Fault(Cut(), after_bytes=10, seconds=1.0, **late())) as ends:
        ends.near.sendall(DATA)
        ends.far.sendall(b"back")
        assert exactly(ends.far, 10) == DATA[:10]
        assert silent(ends.far)
        ends.near.shutdown(socket.SHUT_WR)
        assert silent(ends.far)
        assert exactly(ends.far, len(DATA) - 10) == DATA[10:]
        assert ends.far.recv(1) == b""
        assert exactly(ends.near, 4) == b"back"


def test_a_black_hole_may_be_one_way():
    with linked(Fault(OneWay(), after_bytes=6, seconds=0.3, **late())) as ends:
        ends.near.sendall(b"before")
        assert exactly(ends.far, 6) == b"before"
        wait_until(lambda: ends.proxy.happened)
        ends.near.sendall(b"after")
        ends.far.sendall(b"back")
        assert exactly(ends.near, 4) == b"back"
        assert silent(ends.far)
        assert exactly(ends.far, 5) == b"after"
        assert time.monotonic() - ends.proxy.happened[0].at >= 0.3


def test_who_says_nothing_sensible_or_comes_before_a_rank_listens_is_let_go():
    with Proxy(1) as proxy:
        with socket.create_connection(("127.0.0.1", proxy.ports[0]), timeout=10) as early:
            early.sendall(message(rank=1, role="control"))
            assert early.recv(1) == b""
        with socket.create_connection(("127.0.0.1", proxy.ports[0]), timeout=10):
            pass


# --- processes ------------------------------------------------------------------------------------------------------


def suffers(what: Stop | HoldGil) -> tuple[float, float]:
    """Does it to this process; returns for how long its other thread did not run, and how long it took."""
    stamps, over = [time.monotonic()], threading.Event()

    def tick() -> None:
        while not over.wait(0.01):
            stamps.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.monotonic()
    suffer(what)
    seconds = time.monotonic() - begin
    over.set()
    thread.join()
    return max(b - a for a, b in zip(stamps, [*stamps[1:], time.monotonic()], strict=True)), seconds


@pytest.mark.usefixtures("rank_server")
def test_a_stop_and_a_held_gil_stop_every_thread_for_so_long():
    for what in (Stop(0.5), HoldGil(0.5)):
        ((gap, seconds),) = values(run_ranks(1, suffers, what))
        assert 0.45 <= gap < 5.0
        assert 0.5 <= seconds < 5.0


def test_a_killed_process_ends_with_the_signal():
    program = "from faults import *; suffer(Kill()); print('alive')"
    ended = subprocess.run([sys.executable, "-c", program], env=child_environment(), capture_output=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (-9, b"")
