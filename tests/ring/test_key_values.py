"""The store of one run: what it does for PyTorch, whom it lets in, and what a stranger can cost."""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import socket
import struct
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from markers import by_night, nightly_where
from rank_processes import environment, run_processes, run_ranks, values
from strangers import HELLO, WORDS, connect, hear_all, say
from worlds import free_port, join_threads

import cyxtrain as cx
from cyxtrain.errors import RendezvousError
from cyxtrain.ring.rendezvous import store as store_module
from cyxtrain.ring.rendezvous.handshake import Hello
from cyxtrain.ring.rendezvous.key_values import Connection, KeyValues, KeyValueStore
from cyxtrain.ring.rendezvous.membership import Membership
from cyxtrain.ring.rendezvous.store import reach_store, serve_store
from cyxtrain.ring.rendezvous.store_client import StoreClient
from cyxtrain.ring.wire.link import Deadline
from cyxtrain.world import runtime


def error_of(call):
    """What a call raises; None: nothing."""
    try:
        call()
    except Exception as error:
        return error
    return None


SECRET = b"the secret of this run"
SECONDS = timedelta(seconds=10)


@contextlib.contextmanager
def store_of_rank_0(secret=SECRET):
    """Gives (server, port, the store as rank 0 has it, a function that connects as another rank)."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    own = serve_store("127.0.0.1", port, 2, secret, 5.0)
    own.set_timeout(SECONDS)
    joined = []

    def join(rank=1, known=secret, seconds=5.0):
        joined.append(reach_store(rank, "127.0.0.1", port, 2, known, seconds))
        joined[-1].set_timeout(SECONDS)
        return joined[-1]

    try:
        yield own.source, port, own, join
    finally:
        for store in (*joined, own):
            store.close()


@pytest.fixture(params=["rank 0", "rank 1"])
def store(request):
    with store_of_rank_0() as (_, _, own, join):
        yield own if request.param == "rank 0" else join()


@nightly_where(lambda store, prefixed: prefixed != (store == "rank 1"))
@pytest.mark.parametrize("prefixed", [False, True], ids=["called from Python", "called from C++"])
def test_it_does_what_a_store_of_pytorchs_does(store, prefixed):
    used = dist.PrefixStore("run", store) if prefixed else store
    like = dist.PrefixStore("run", dist.HashStore())
    for each in (used, like):
        each.set_timeout(timedelta(seconds=0.1))

    def outcomes(each):
        yield each.set("text", "value")
        yield each.get("text")
        yield each.set("bytes", bytes(range(256)).decode("latin-1"))
        yield each.get("bytes")
        yield each.add("number", 3)
        yield each.add("number", -5)
        yield each.get("number")
        yield each.compare_set("new", "", "first")
        yield each.compare_set("new", "", "second")
        yield each.compare_set("new", "first", "second")
        yield each.compare_set("absent", "something", "second")
        yield each.check(["text", "new"])
        yield each.check(["text", "absent"])
        yield each.delete_key("text")
        yield each.delete_key("text")
        yield each.check(["text"])
        yield each.append("longer", "a")
        yield each.append("longer", "b")
        yield each.get("longer")
        yield each.multi_set(["one", "two"], ["1", "2"])
        yield each.multi_get(["two", "one"])
        yield each.wait(["one", "two"])
        yield isinstance(error_of(lambda: each.wait(["absent"], timedelta(seconds=0.05))), dist.DistStoreError)
        yield isinstance(error_of(lambda: each.get("absent")), dist.DistStoreError)

    assert [*outcomes(used)] == [*outcomes(like)]


def test_many_threads_use_one_connection_while_one_waits():
    with store_of_rank_0() as (_, _, own, join):
        other = join()
        waiting = threading.Thread(target=lambda: other.wait(["late"]))
        waiting.start()
        adding = [threading.Thread(target=lambda: [other.add("sum", 1) for _ in range(100)]) for _ in range(4)]
        join_threads(adding, 20.0)
        assert other.add("sum", 0) == 400
        own.set("late", "here")
        waiting.join(10)
        assert not waiting.is_alive()


def test_who_does_not_know_the_secret_is_not_let_in_and_the_run_goes_on():
    with store_of_rank_0() as (_, _, own, join):
        error = error_of(lambda: join(1, b"another secret", 0.6))
        assert isinstance(error, RendezvousError)
        assert "another run has 127.0.0.1:" in str(error)
        assert "CYXTRAIN_SECRET" in str(error)
        assert "choose another MASTER_PORT" in str(error)
        own.set("key", "value")
        assert join().get("key") == b"value"


def test_a_client_of_pytorchs_writes_nothing_and_reads_nothing():
    with store_of_rank_0() as (server, port, _, _):
        error = error_of(lambda: dist.TCPStore("127.0.0.1", port, 2, False, timedelta(seconds=0.3)))
        assert isinstance(error, RuntimeError)
        assert server.values.answer({"do": "count", "keys": []}) == 0


def test_a_member_that_says_what_is_no_question_is_sent_away_alone():
    with store_of_rank_0() as (server, _, own, join):
        where = server._listener.getsockname()
        bad, good = reach_store(1, *where, 2, SECRET, 5.0), join()
        for words in (struct.pack(">I", 2**32 - 1), struct.pack(">I", 2) + b"[]", struct.pack(">I", 3) + b"{{{"):
            say(bad.source._socket, words)
            bad.source._socket.settimeout(10)
            assert hear_all(bad.source._socket) == b""
            bad.close()
            bad = reach_store(1, *where, 2, SECRET, 5.0)
        bad.close()
        own.set("key", "value")
        assert good.get("key") == b"value"


@pytest.mark.parametrize(
    "question",
    [
        {},
        {"do": "set"},
        {"do": "set", "keys": []},
        {"do": "set", "keys": ["a"]},
        {"do": "set", "keys": ["a"], "value": 5},
        {"do": "set", "keys": ["a"], "value": "€"},
        {"do": "add", "keys": ["a"], "number": "many"},
        {"do": "add", "keys": ["a"], "number": None},
        {"do": "fly", "keys": ["a"], "value": ""},
        {"do": "get", "keys": [["a"]]},
        {"do": "get", "keys": ["a", "b"]},
    ],
    ids=json.dumps,
)
def test_a_question_that_cannot_be_changes_nothing(question):
    values = KeyValues()
    assert isinstance(error_of(lambda: values.answer(question)), (ValueError, KeyError, TypeError, AttributeError))
    assert values.answer({"do": "count", "keys": []}) == 0


@pytest.mark.parametrize(
    "question",
    [
        {"do": "set", "keys": ["a"], "value": 5},
        {"do": "add", "keys": ["a"], "number": 1e999},
        {"do": "append", "keys": ["long"], "value": "x"},
    ],
    ids=["no text", "infinite", "an answer that is too long"],
)
def test_what_one_member_asks_ends_the_store_for_nobody(question):
    with store_of_rank_0() as (_, _, own, join):
        for _ in range(5):
            own.append("long", "x" * (1 << 20))
        assert isinstance(error_of(lambda: join().source.ask(question, 5.0)), ValueError)
        own.set("key", "value")
        assert join().get("key") == b"value"


def test_who_asks_and_does_not_read_the_answers_is_not_read():
    with store_of_rank_0() as (_, _, own, join):
        own.set("key", "x" * (1 << 20))
        lazy = join().source._socket
        question = b'{"do": "get", "keys": ["key"]}'
        lazy.settimeout(0.2)
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < 256 << 20:
                sent += lazy.send((struct.pack(">I", len(question)) + question) * 1000)
        assert sent < 64 << 20  # what the kernel's buffers hold
        assert join().get("key") == own.get("key")


def test_questions_that_come_together_are_all_answered_when_the_answers_are_read():
    with store_of_rank_0() as (_, _, own, join):
        own.set("key", "x" * (1 << 20))
        sock = join().source._socket
        question = b'{"do": "get", "keys": ["key"]}'
        say(sock, (struct.pack(">I", len(question)) + question) * 20)
        sock.shutdown(socket.SHUT_WR)
        sock.settimeout(10)
        received = sum(len(part) for part in iter(lambda: sock.recv(1 << 20), b""))
        assert received > 20 << 20


def test_many_short_keys_are_bounded_as_python_keeps_them():
    values = KeyValues()
    questions = ({"do": "set", "keys": [f"{number:x}"], "value": ""} for number in range(1_000_000))
    error = error_of(lambda: [values.answer(question) for question in questions])
    assert "holds at most 16 MiB" in str(error)
    assert values.answer({"do": "count", "keys": []}) < 120_000


def test_its_size_is_bounded_and_deleting_makes_room():
    with store_of_rank_0() as (_, _, _, join):
        store = join()
        for number in range(16):
            error = error_of(lambda number=number: store.set(f"key {number}", "x" * (1 << 20)))
            if error is not None:
                break
        assert number == 15
        assert "holds at most 16 MiB" in str(error)
        assert store.delete_key("key 3")
        store.set("key 15", "x" * (1 << 20))
        assert "at most 2 MiB" in str(error_of(lambda: store.set("long", "x" * (5 << 20))))


def rss_bytes(pid):
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * 4096


def serve_until_told(secret, pipe):
    with store_of_rank_0(secret) as (_, port, own, _):
        own.set("of a member", "kept")
        pipe.send(port)
        pipe.recv()
        pipe.send(own.get("of a member"))


@pytest.mark.parametrize("secret", [SECRET, by_night(None)], ids=["with a secret", "without"])
def test_a_stranger_costs_rank_0_little_memory(secret):
    here, there = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=serve_until_told, args=(secret, there))
    process.start()
    port = here.recv()
    before = rss_bytes(process.pid)
    for number in range(600):  # more than may wait at a time
        with contextlib.suppress(OSError), connect(("127.0.0.1", port)) as sock:
            say(sock, [*WORDS.values(), HELLO][number % (len(WORDS) + 1)])
    with (
        contextlib.suppress(RendezvousError, RuntimeError, ValueError),
        contextlib.closing(reach_store(1, "127.0.0.1", port, 2, None, 0.5)) as stranger,
    ):
        for number in range(10_000):
            stranger.set(f"key {number}", "x" * 100_000)
    assert rss_bytes(process.pid) - before < 50 << 20
    here.send("enough")
    assert here.recv() == b"kept"
    process.join(10)
    assert process.exitcode == 0


def test_its_end_is_noticed_after_the_port_is_free():
    with store_of_rank_0() as (server, port, _, join):
        other = join()
        assert not other.await_end(0.05)
        found = []

        def await_end():
            found.append(other.await_end(10.0))
            found.append(error_of(lambda: serve_store("127.0.0.1", port, 2, SECRET, 1.0).close()))

        waiting = threading.Thread(target=await_end)
        waiting.start()
        server.close()
        waiting.join(10)
        assert found == [True, None]
        assert isinstance(error_of(lambda: other.set("key", "value")), dist.DistNetworkError)


def test_a_store_that_does_not_answer_is_left_at_the_deadline_of_the_rendezvous():
    own, other = socket.socketpair()
    with own, other:
        store = KeyValueStore(Connection(own), "127.0.0.1", SECONDS)
        begin = time.monotonic()
        client = StoreClient(dist.PrefixStore("run", store), "rank 1", Deadline(0.1))
        assert "rank 1 gets no answer from the store" in str(error_of(lambda: client.get("key")))
        assert time.monotonic() - begin < 5.0  # far below the store's own timeout
        assert client.lost


def test_a_forked_child_lets_go_of_it():
    with store_of_rank_0() as (server, port, own, join):

        def child():
            server.abandon()
            error_of(lambda: socket.create_connection(("127.0.0.1", port), 1.0))

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(10)
        assert process.exitcode == 0
        own.set("key", "value")
        assert join().get("key") == b"value"


def test_a_rank_outside_of_rank_0s_world_hears_so_and_connections_of_one_rank_are_few():
    with store_of_rank_0() as (_, _, _, join):
        assert "rank 0 for a world of 2" in str(error_of(lambda: join(2)))
        errors = [error_of(join) for _ in range(9)]
        assert errors[:8] == [None] * 8
        assert "too many processes have joined as rank 1" in str(errors[8])


def test_a_rank_of_another_version_hears_so(monkeypatch):
    with store_of_rank_0() as (_, _, own, join):
        monkeypatch.setattr(store_module, "Hello", functools.partial(Hello, protocol=3))
        for text in (str(error_of(join)), own.source.refusal()):
            assert "rank 1 speaks version 3 of the ring's protocol" in text


@pytest.mark.parametrize(
    ("rank", "world_size", "reason"),
    [
        (1, 3, "it was started for a world of 3, rank 0 for a world of 2"),
        (1, 1, "it was started for a world of 1, rank 0 for a world of 2"),
        (0, 2, "two processes were started as rank 0. Give every machine its own --node-rank"),
    ],
)
def test_a_process_of_another_world_is_refused_and_rank_0_hears_of_it_while_ranks_are_missing(rank, world_size, reason):
    with store_of_rank_0() as (_, port, own, join):
        assert own.source.refusal() == ""
        error = error_of(lambda: reach_store(rank, "127.0.0.1", port, world_size, SECRET, 10.0))
        assert str(error).startswith(f"rank 0 at 127.0.0.1:{port} refused rank {rank}: {reason}")
        assert own.source.refusal().startswith(f"rank 0 refused a process that claimed to be rank {rank}: {reason}")
        with pytest.raises(RendezvousError, match="rank 0 refused a process"):
            Membership(own, 0, range(2), Deadline(10.0)).check()
        Membership(join(), 1, range(2), Deadline(10.0)).check()
        assert own.source.refusal() == ""  # it was one too many


# --- a store of PyTorch's, where PyTorch needs one --------------------------------------------------------------------

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a packet filter of Linux")


@linux_only
@pytest.mark.usefixtures("pipe_of_pytorchs_stores")
def test_a_store_of_pytorchs_that_is_closed_to_newcomers_serves_those_who_are_there():
    served, listener = store_module.host_store("127.0.0.1", 10.0)
    member = store_module.reach_tcp_store(1, "127.0.0.1", served.port, 2, 5.0)
    store_module.close_to_newcomers(listener)
    with pytest.raises(TimeoutError):
        socket.create_connection(("127.0.0.1", served.port), 0.3)
    served.set("key", "value")
    assert member.get("key") == b"value"


def train_over_gloo():
    with cx.init():
        store = runtime._joined.store
        with contextlib.suppress(TimeoutError), socket.create_connection((store.host, store.port), 0.3):
            return "a stranger is let in"
        tensor = torch.ones(3)
        group = dist.new_group(backend="gloo")  # its ranks meet at that store
        dist.all_reduce(tensor, group=group)
        return [type(store).__name__, tensor.tolist()]


@linux_only
@pytest.mark.usefixtures("rank_server")
def test_strangers_do_not_reach_the_store_of_a_gloo_world():
    port = free_port()
    environments = [environment(rank, 2, port, DISTRIBUTED_BACKEND="gloo") for rank in range(2)]
    assert values(run_processes(train_over_gloo, environments)) == [["TCPStore", [2.0, 2.0, 2.0]]] * 2


@pytest.mark.usefixtures("rank_server")
def test_groups_of_gloo_and_of_the_ring_are_made_in_a_world_of_the_ring():
    assert values(run_ranks(3, make_groups)) == [[[3.0], [2.0], [3.0]], [[3.0], [2.0], [3.0]], [[3.0], [1.0], [3.0]]]


def make_groups():
    with cx.init():
        sums = []
        for group in (dist.new_group(backend="gloo"), dist.new_group([0, 1]), dist.new_group()):
            tensor = torch.ones(1)
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.all_reduce(tensor, group=group)
            sums.append(tensor.tolist())
        return sums
