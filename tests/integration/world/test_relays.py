"""A stranger at the store and between two ranks: forging, deleting, relaying and changing do nothing, or are named."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import selectors
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from markers import by_night
from meetings import SECRET, board_of, meet
from rank_processes import run_processes, values
from ring_values import error_of
from strangers import CLAIM
from worlds import child_environment, free_port, join_threads, wait_until

import cyxtrain as cx
from cyxtrain.errors import RendezvousError
from cyxtrain.ring.rendezvous.dial import dial_once, socket_address
from cyxtrain.ring.rendezvous.handshake import RefusedError
from cyxtrain.ring.rendezvous.membership import Membership
from cyxtrain.ring.rendezvous.record import RankRecord
from cyxtrain.ring.wire.link import Deadline

HOST = "127.0.0.1"
FORGED = ("claims/1", "1/entry/0", "1/entry/1", "1/met/0", "1/met/1", "1/verdict", "1/heard/1")


class Relay:
    """Listens, and passes every byte between whoever comes and an address, changed if so wanted.

    Attributes:
        port: Where it listens.
        passed: How many bytes it has passed on.
    """

    def __init__(self, address: Any = None, change: bool = False) -> None:
        self._listener = socket.create_server((HOST, 0))
        self.port = int(self._listener.getsockname()[1])
        self.address = address
        self.passed = 0
        self._change = change
        self._ends = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ends = True
        self._thread.join(10)

    def _run(self) -> None:
        others: dict[socket.socket, socket.socket] = {}
        with selectors.DefaultSelector() as selector, self._listener:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._ends:
                for key, _ in selector.select(0.05):
                    sock: Any = key.fileobj
                    if sock is self._listener:
                        caller, _ = sock.accept()
                        with contextlib.suppress(OSError):
                            called = socket.create_connection(self.address)
                            others[caller], others[called] = called, caller
                            for end in (caller, called):
                                selector.register(end, selectors.EVENT_READ)
                        continue
                    if sock in others:
                        self._pass_on(sock, others, selector)
            for sock in others:
                sock.close()

    def _pass_on(self, sock: socket.socket, others: dict[socket.socket, socket.socket], selector: Any) -> None:
        try:
            data = sock.recv(65536)
            if data and self._change and self.passed > 4000:
                data = data[:-1] + bytes([data[-1] ^ 1])
            if data:
                others[sock].sendall(data)
                self.passed += len(data)
                return
        except OSError:
            pass
        for end in (sock, others[sock]):
            selector.unregister(end)
            end.close()
            del others[end]


# --- between two ranks ----------------------------------------------------------------------------------------------


def test_a_handshake_that_is_relayed_is_refused_by_the_rank_that_was_not_meant():
    """Also where the table of addresses was forged, as one that knows the secret could."""
    store = dist.HashStore()
    board = board_of(store, SECRET.secret)
    found: list[Any] = []
    rank_0 = threading.Thread(target=lambda: found.append(error_of(lambda: meet(store, 0, 2, 1.5, options=SECRET))))
    rank_0.start()
    board.set("1/entry/1", RankRecord(2, host=HOST, port=1, has_secret=True).to_json())
    wait_until(lambda: board.has("1/entry/0"))
    entry = RankRecord.from_json(board.get("1/entry/0"))
    relay = Relay((entry.host, entry.port))
    claim = replace(CLAIM, run=entry.run)
    try:
        with pytest.raises(RefusedError, match="something relays the connection"):
            dial_once(
                socket_address(replace(entry, port=relay.port), unix=False),
                claim,
                SECRET.secret.encode(),
                Deadline(5.0),
                lambda: None,
            )
        dial_once(socket_address(entry, unix=False), claim, SECRET.secret.encode(), Deadline(5.0), lambda: None).close()
    finally:
        relay.close()
        rank_0.join(10)
    assert "rank 1 died" in str(found[0])


# --- at a store of PyTorch's, where everybody writes ------------------------------------------------------------------


def train(seconds: float = 20.0, delay: float = 0.0) -> list[float]:
    """Joins, averages some gradients, and returns weights."""
    if os.environ["RANK"] == "1":
        threading.Event().wait(delay)  # the scenario: rank 1 starts later
    with cx.init(cx.DistributedConfig(timeout_ms=int(1000 * seconds), require_secret=True)):
        weights = torch.zeros(50_000)
        for step in range(3):
            gradient = torch.full_like(weights, step + dist.get_rank())
            dist.all_reduce(gradient)
            weights += gradient
        return [weights.sum().item(), float(cx.get_rank())]


@contextlib.contextmanager
def agents_store():
    """A store of PyTorch's as torchrun's agent keeps it; gives it, and the environments of two ranks."""
    server = dist.TCPStore(HOST, 0, None, True, timedelta(seconds=30), wait_for_workers=False)
    more = {"TORCHELASTIC_USE_AGENT_STORE": "True", "CYXTRAIN_SECRET": "the secret of this run"}
    yield (
        server,
        [
            {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": HOST, "MASTER_PORT": str(server.port), **more}
            for rank in range(2)
        ],
    )


def stranger_of(server: Any) -> Any:
    """The store as somebody sees it who knows its port alone."""
    client = dist.TCPStore(HOST, server.port, None, False, timedelta(seconds=30), wait_for_workers=False)
    return dist.PrefixStore("/worker/attempt_0", dist.PrefixStore("/cyxtrain/1", client))


def trained() -> list[list[float]]:
    return [[50_000.0 * (1 + 3 + 5), float(rank)] for rank in range(2)]


@contextlib.contextmanager
def meanwhile(work: Any):
    """Does work again and again while the block runs."""
    ends = threading.Event()

    def run() -> None:
        while not ends.is_set():
            work()
            time.sleep(0.001)  # lets the others in

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join(10)


def put_between(stranger: Any, relay: Relay) -> None:
    """Rewrites each entry so that it names the relay, keeping its proof."""
    for rank in range(2):
        key = f"1/entry/{rank}"
        if not stranger.check([key]):
            continue
        found = stranger.compare_set(key, "", "")
        proof, _, text = found.rpartition(b"\n")
        facts = json.loads(text)
        if facts["port"] != relay.port:
            relay.address = (facts["host"], facts["port"])
            facts |= {"port": relay.port, "unix": "", "memory": ""}
            stranger.compare_set(key, found, proof + b"\n" * bool(proof) + json.dumps(facts).encode())


@pytest.mark.usefixtures("rank_server", "pipe_of_pytorchs_stores")
@pytest.mark.parametrize("change", [by_night(False), True], ids=["as it is", "changed"])
@pytest.mark.parametrize("delay", [0.3, *(by_night(tries / 10) for tries in range(20))])
def test_a_relay_between_two_ranks_gets_no_byte_of_theirs(delay, change):
    with agents_store() as (server, environments):
        relay, stranger = Relay(change=change), stranger_of(server)
        try:
            with meanwhile(lambda: put_between(stranger, relay)):
                ended = run_processes(train, environments, 6.0, delay, seconds=60.0)
        finally:
            relay.close()
        assert relay.passed == 0
    for rank, outcome in enumerate(ended):
        if outcome.kind is None:
            assert outcome.value == trained()[rank]
        else:
            assert outcome.kind == "RendezvousError"
            assert "did not know the secret" in outcome.message


@pytest.mark.usefixtures("rank_server", "pipe_of_pytorchs_stores")
@pytest.mark.parametrize("what", ["forged", by_night("deleted")])
@pytest.mark.parametrize("key", [FORGED[1], *map(by_night, FORGED)])
def test_a_key_that_is_forged_or_deleted_once_changes_nothing(key, what):
    """At a random moment, which the number of the try decides."""
    with agents_store() as (server, environments):
        stranger = stranger_of(server)
        moment = random.Random(f"{key} {what}").random()

        ends = threading.Event()

        def act() -> None:
            while what == "deleted" and not ends.wait(0.0005) and not stranger.check([key]):
                pass
            ends.wait(moment / 100)  # the scenario: some moment
            if what == "deleted":
                stranger.delete_key(key)
            else:
                stranger.set(key, json.dumps({"type": "RendezvousError", "message": "a lie", "rank": 0}))

        thread = threading.Thread(target=act, daemon=True)
        thread.start()
        try:
            found = values(run_processes(train, environments, seconds=60.0))
        finally:
            ends.set()
            thread.join(10)
        assert found == trained()


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", ["forged", "deleted"])
@pytest.mark.parametrize("key", FORGED)
def test_fifty_times_a_key_that_is_forged_or_deleted_at_a_random_moment_changes_nothing(key, what):
    draw = random.Random(f"{key} {what}")
    for _ in range(50):
        store, sums, moment = dist.HashStore(), {}, 0.03 * draw.random()

        def rank_main(rank: int, store: Any = store, sums: Any = sums) -> None:
            group = meet(store, rank, 2, 20.0, options=SECRET)
            tensor = torch.ones(1000)
            group.allreduce([tensor]).wait()
            sums[rank] = tensor.sum().item()
            group.shutdown()

        def act(store: Any = store, moment: float = moment) -> None:
            time.sleep(moment)  # the scenario: some moment
            store.delete_key(key) if what == "deleted" else store.set(key, '{"message": "a lie", "rank": 0}')

        threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(2)]
        join_threads([*threads, threading.Thread(target=act)], 30.0)
        assert sums == {0: 2000.0, 1: 2000.0}


def test_ranks_that_read_different_tables_all_say_which_field(monkeypatch):
    """Here rank 1 alone is lied to, as a store that anybody writes can: without a secret nothing else protects it."""
    await_all = Membership.await_all
    monkeypatch.setattr(
        Membership,
        "await_all",
        lambda self: [replace(entry, cores=entry.cores + (self._rank == 1)) for entry in await_all(self)],
    )
    store, found = dist.HashStore(), {}

    def rank_main(rank: int) -> None:
        found[rank] = error_of(lambda: meet(store, rank, 3, 5.0, options=SECRET))

    join_threads([threading.Thread(target=rank_main, args=(rank,)) for rank in range(3)], 20.0)
    for rank, error in found.items():
        assert isinstance(error, RendezvousError)
        others = [1] if rank != 1 else [0, 2]
        assert any(f"rank {rank} and rank {other} have read different values" in str(error) for other in others)
        assert "of: cores." in str(error)


@pytest.mark.parametrize(
    "fields",
    [{"cores": -5}, {"room": -1}, {"room": 2**40}, {"world_size": 0}, {"transport": "\x1b[31m"}, {"unix": "x" * 5000}],
    ids=str,
)
def test_an_entry_with_a_value_out_of_range_is_refused(fields):
    text = replace(RankRecord(2), **fields).to_json()
    assert "holds what no rank has written" in str(error_of(lambda: RankRecord.from_json(text)))


def test_text_of_others_is_shown_without_control_characters():
    facts = {"type": "RendezvousError", "message": "\x1b[2Jgone\x07 \u202eback\nsecond line"}
    assert str(cx.errors.error_from_facts(facts)) == "?[2Jgone? ?back\nsecond line"


# --- two runs, one port ---------------------------------------------------------------------------------------------


def train_beside_another_run(refused: str) -> None:
    """As `train`; leaves once rank 0 of the other run has been refused, so that the two surely meet."""
    try:
        with cx.init(cx.DistributedConfig(timeout_ms=5_000, require_secret=True)):
            total = torch.ones(50_000)
            dist.all_reduce(total)
            wait_until(Path(refused).exists)
    except BaseException:
        if os.environ["RANK"] == "0":
            Path(refused).touch()
        raise


@pytest.mark.nightly
@pytest.mark.usefixtures("rank_server")
def test_two_runs_with_secrets_of_their_own_at_one_port_do_not_end_each_other(tmp_path):
    port = free_port()
    runs = [
        [
            {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": HOST,
                "MASTER_PORT": str(port),
                "CYXTRAIN_SECRET": f"the secret of {run}",
            }
            for rank in range(2)
        ]
        for run in range(2)
    ]
    refused = str(tmp_path / "refused")
    ended = run_processes(train_beside_another_run, list(itertools.chain(*runs)), refused, seconds=60.0)
    outcomes = [ended[:2], ended[2:]]
    assert sorted(all(rank.kind is None for rank in run) for run in outcomes) == [False, True]
    [other] = [run for run in outcomes if run[0].kind is not None]
    assert "is in use on this machine" in other[0].message
    assert "another run has 127.0.0.1" in other[1].message or "could not reach rank 0" in other[1].message


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_of_two_launchers_at_one_port_one_always_ends_well(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import torch, cyxtrain as cx\n"
        "cx.init()\n"
        "total = torch.ones(1)\n"
        "cx.all_reduce(total)\n"
        "cx.barrier()\n"
        "cx.finalize()\n"
        "print(f'total {total.item():g}')\n"
    )
    for _ in range(8):
        port = str(free_port())
        command = [
            sys.executable,
            "-m",
            "cyxtrain",
            "launch",
            "-n",
            "2",
            "--master-port",
            port,
            "--",
            "python",
            program,
        ]
        runs = [
            subprocess.Popen(
                command, env=child_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            for _ in range(2)
        ]
        said = [run.communicate(timeout=120)[0] for run in runs]
        well = [run.returncode == 0 and text.count("total 2") == 2 for run, text in zip(runs, said, strict=True)]
        assert any(well), said
        for is_well, text in zip(well, said, strict=True):
            assert is_well or "is in use on this machine" in text or "another run has" in text
