"""How ranks find each other, and what they are told where they do not."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ring_values import error_of
from worlds import join_threads, run_threads

from cyxtrain.errors import RendezvousError
from cyxtrain.ring import RingProcessGroup, rendezvous
from cyxtrain.ring.door import HELLO, Identity, Role


def reduce_once(group):
    tensor = torch.ones(3)
    group.allreduce([tensor]).wait()
    assert tensor.tolist() == [group.size()] * 3


def meet(store, rank, world_size, seconds=5.0, **fields):
    return RingProcessGroup(store, rank, world_size, timedelta(seconds=seconds), **fields)


def errors_of_meeting(store, ranks, world_size, seconds):
    """Returns how each rank's meeting ended, and after how many seconds."""
    found = {}

    def run(rank):
        start = time.monotonic()
        error = error_of(lambda: meet(store, rank, world_size, seconds))
        found[rank] = error, time.monotonic() - start

    join_threads([threading.Thread(target=run, args=(rank,)) for rank in ranks], 20.0)
    return [found[rank] for rank in ranks]


def test_ranks_that_do_not_come_are_named_at_the_deadline():
    for error, seconds in errors_of_meeting(dist.HashStore(), [0, 2], 4, 0.4):
        assert isinstance(error, RendezvousError)
        assert str(error).startswith("rank 1, rank 3 of a world of 4 did not come before the deadline")
        assert "DISTRIBUTED_TIMEOUT_MS" in str(error)
        assert error.rank == 1
        assert seconds < 0.4 + 0.5


def test_a_rank_that_publishes_itself_and_does_not_connect_is_named():
    store = dist.HashStore()
    store.set("1/address/1", json.dumps({"host": "127.0.0.1", "port": 1, "world_size": 2}))
    [(error, _)] = errors_of_meeting(store, [0], 2, 0.3)
    assert isinstance(error, RendezvousError)
    assert "rank 1 did not connect to rank 0 before the deadline" in str(error)


def test_a_rank_that_is_taken_is_refused_at_once_and_harms_nobody(monkeypatch):
    def rank_main(group):
        group.barrier()
        if group.rank() == 0:
            with monkeypatch.context() as another_process:
                another_process.setattr(rendezvous, "_PROCESS", "another")
                start = time.monotonic()
                refused.append(error_of(lambda: meet(store, 1, 2)))
                refused.append(time.monotonic() - start)
        reduce_once(group)

    store, refused = dist.HashStore(), []
    run_threads(2, rank_main, store=store)
    error, seconds = refused
    assert isinstance(error, RendezvousError)
    assert "rank 1 is taken" in str(error)
    assert error.rank == 1
    assert seconds < 1.0


def test_ranks_may_meet_again_at_the_same_store():
    store = dist.HashStore()
    for _ in range(3):
        run_threads(3, reduce_once, store=store)


def test_another_world_size_is_refused_on_both_sides_within_a_second():
    store, found = dist.HashStore(), {}

    def run(rank, world_size):
        start = time.monotonic()
        found[rank] = error_of(lambda: meet(store, rank, world_size)), time.monotonic() - start

    join_threads([threading.Thread(target=run, args=arguments) for arguments in ((0, 2), (1, 3))], 10.0)
    for rank, (error, seconds) in found.items():
        assert isinstance(error, RendezvousError)
        assert error.rank == 1 - rank
        assert "a world of 2" in str(error)
        assert "a world of 3" in str(error)
        assert "WORLD_SIZE" in str(error)
        assert seconds < 1.0


def test_a_rank_that_cannot_be_reached_is_named_with_the_cause():
    store = dist.HashStore()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        store.set("1/address/0", json.dumps({"host": "127.0.0.1", "port": free.getsockname()[1], "world_size": 2}))
        store.set("1/run", "00" * 16)
        [(error, _)] = errors_of_meeting(store, [1], 2, 2.0)
    assert isinstance(error, RendezvousError)
    assert str(error).startswith("rank 1 cannot reach rank 0 at 127.0.0.1:")
    assert "Connection refused" in str(error)
    assert error.rank == 0


def test_a_listener_of_another_program_is_not_taken_for_a_rank():
    store = dist.HashStore()
    with socket.create_server(("127.0.0.1", 0)) as server:
        store.set("1/address/0", json.dumps({"host": "127.0.0.1", "port": server.getsockname()[1], "world_size": 2}))
        store.set("1/run", "00" * 16)

        def answer():
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.0 400 Bad Request, and more of it\r\n")
                connection.recv(1000)

        threading.Thread(target=answer, daemon=True).start()
        [(error, _)] = errors_of_meeting(store, [1], 2, 5.0)
    assert isinstance(error, RendezvousError)
    assert "rank 0 at 127.0.0.1:" in str(error)
    assert "the answer came from a process of another run" in str(error)


def test_strangers_at_the_door_do_not_hurt():
    store, groups, strangers = dist.HashStore(), {}, []
    store.set("1/address/1", json.dumps({"host": "127.0.0.1", "port": 1, "world_size": 2}))  # rank 0 opens the door
    first = threading.Thread(target=lambda: groups.update({0: meet(store, 0, 2, 20.0)}), daemon=True)
    first.start()
    try:
        store.wait(["1/run", "1/address/0"])
        address = json.loads(store.get("1/address/0"))
        run = bytes.fromhex(store.get("1/run").decode())
        others = [
            b"",  # silent
            b"GET / HTTP/1.0\r\n\r\n" * 20,
            Identity(run, 0, 1, (0, 1)).hello(Role.CONTROL)[:20],  # half of it
            Identity(bytes(16), 0, 1, (0, 1)).hello(Role.CONTROL),  # another run
            Identity(run, 1, 1, (0, 1)).hello(Role.CONTROL),  # another generation
            Identity(run, 0, 1, (0, 1, 2)).hello(Role.CONTROL),  # another world size
            Identity(run, 0, 9, (0, 1)).hello(Role.CONTROL),  # a rank that is not there
            HELLO.pack(b"CX", 1, 77, 0, 1, 2, run),  # a connection for nothing
            HELLO.pack(b"CX", 99, Role.CONTROL, 0, 1, 2, run),  # another version
        ]
        for words in others * 40:
            stranger = socket.create_connection((address["host"], address["port"]))
            strangers.append(stranger)
            with contextlib.suppress(OSError):
                stranger.sendall(words)
        groups[1] = meet(store, 1, 2, 20.0)
        first.join(20)
        assert set(groups) == {0, 1}
        threads = [threading.Thread(target=reduce_once, args=(group,)) for group in groups.values()]
        join_threads(threads, 20.0)
    finally:
        for stranger in strangers:
            stranger.close()
        threads = [threading.Thread(target=group.shutdown) for group in groups.values()]
        join_threads(threads, 20.0)


@pytest.mark.usefixtures("pipe_of_pytorchs_stores")
def test_a_store_that_ends_while_ranks_meet_is_said_to_have_ended():
    server = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, 2, False, wait_for_workers=False)
    found = []
    waiting = threading.Thread(target=lambda: found.append(error_of(lambda: meet(client, 1, 2, 20.0))), daemon=True)
    waiting.start()
    server.wait(["1/process/1"])
    del server
    waiting.join(10)
    assert isinstance(found[0], rendezvous.StoreLostError)
    assert str(found[0]).startswith("rank 1 lost the store")
