"""Connections that no rank makes: while ranks meet and while they train, they change nothing and cost little."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hostile_ranks import Folder, join_and_train, run_out_of_descriptors
from rank_processes import environment, run_processes, values
from strangers import CLAIM, Address, Crowd, connect, hear_all, shake_hands
from worlds import free_port

from cyxtrain.ring.rendezvous.handshake import RefusedError

pytestmark = [pytest.mark.usefixtures("rank_server"), pytest.mark.timeout(120)]
HOST = "127.0.0.1"
SECRET = "the secret of this run"
MORE_MEMORY_MB = 10.0
LEAVE_SECONDS = 7.0  # a handshake may take five, and is looked at every second


class Visit:
    """Strangers come to every port of a world: before its doors open, while they are open, and while it trains.

    Args:
        folder: Where the ranks tell how far they are.
        world_size: How many ranks there are.
        store_port: Where the store of rank 0 listens.
        count: How many strangers come to each rank's port in each of the three times, and to the store's in all.
    """

    def __init__(self, folder: Folder, world_size: int, store_port: int, count: int) -> None:
        self._folder = folder
        self._last = world_size - 1
        self._store_port = store_port
        self._count = count
        self.came = 0

    def run(self) -> None:
        try:
            self._visit(self._folder)
        finally:
            for name in ("come", "gather", "train", "done"):  # nobody waits for strangers that do not come
                self._folder.tell(name)

    def _visit(self, folder: Folder) -> None:
        first = [int(folder.hear(f"port{rank}")) for rank in range(self._last)]
        self._come([*first, self._store_port], lambda: folder.tell("come"), b"")
        folder.hear("all are here")
        self._come([*first, self._store_port], lambda: folder.tell("gather"), b"")
        for rank in range(self._last + 1):
            folder.hear(f"joined{rank}")
        ports = [*first, int(folder.hear(f"port{self._last}")), self._store_port]
        recorded = bytes.fromhex(folder.hear("recorded"))
        self._come(ports, lambda: folder.tell("train"), recorded, until="fitted0")

    def _come(self, ports: list[int], begin: Callable[[], None], recorded: bytes, until: str | None = None) -> None:
        """Half of them come, something begins, the others come, more until something is over, and all leave."""
        crowds = [Crowd((HOST, port), recorded, keep=900 // len(ports)) for port in ports]
        try:
            for crowd in crowds:
                crowd.come(self._count // 2)
            begin()
            for crowd in crowds:
                crowd.come(self._count // 2)
            while until is not None and not self._folder.told(until):
                for crowd in crowds[:-1]:
                    crowd.come(min(self._count, 1))
            for crowd in crowds[:-1]:
                crowd.come(self._count // 4)  # also while the ranks do nothing but reduce
            self.came += sum(crowd.count for crowd in crowds)
        finally:
            for crowd in crowds:
                crowd.leave()


@contextlib.contextmanager
def in_background(work: Callable[[], None], seconds: float = 60.0) -> Iterator[None]:
    """Does work in a thread while the block runs; its error is the block's."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="strangers", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(seconds)
        if errors:
            raise errors[0]
    assert not thread.is_alive()


def run_world(folder: Path, world_size: int, count: int, secret: str | None) -> tuple[list[dict[str, Any]], float]:
    """A world that so many strangers visit; returns what each rank found, and the seconds that it took."""
    folder.mkdir(parents=True)
    port = free_port()
    more = {} if secret is None else {"CYXTRAIN_SECRET": secret}
    environments = [environment(rank, world_size, port, **more) for rank in range(world_size)]
    visit = Visit(Folder(str(folder)), world_size, port, count)
    start = time.monotonic()
    with in_background(visit.run):
        found = values(run_processes(join_and_train, environments, str(folder), seconds=90.0))
    assert visit.came >= count * (3 * world_size - 2)
    return found, time.monotonic() - start


def check_strangers_change_nothing(folder: Path, world_size: int, count: int, secret: str | None) -> None:
    quiet, _ = run_world(folder / "quiet", world_size, 0, secret)
    visited, seconds = run_world(folder / "visited", world_size, count, secret)
    for rank, (before, after) in enumerate(zip(quiet, visited, strict=True)):
        for what in ("fingerprint", "history", "digests", "threads"):
            assert after[what] == before[what], f"rank {rank}: {what}"
        assert len(after["digests"]) == 1
        assert before["lines"] == []
        assert all("turned away a connection from 127.0.0.1" in text for _, text in after["lines"])
        for who in {f"rank {rank}", "the store of rank 0"} if rank == 0 else {f"rank {rank}"}:
            times = [at for at, text in after["lines"] if text.startswith(f"{who} turned")]
            assert 1 <= len(times) <= seconds + 1
            assert all(later - earlier > 0.9 for earlier, later in itertools.pairwise(times)), times
        assert after["left_seconds"] < LEAVE_SECONDS
        assert after["resident_mb"] < before["resident_mb"] + MORE_MEMORY_MB
        assert after["highest_mb"] < before["highest_mb"] + MORE_MEMORY_MB


@pytest.mark.nightly
@pytest.mark.parametrize(("world_size", "secret"), [(2, SECRET), (3, None)])
def test_a_thousand_strangers_at_every_port_change_nothing(tmp_path, world_size, secret):
    check_strangers_change_nothing(tmp_path / "world", world_size, 1000, secret)


@pytest.mark.nightly
def test_a_rank_without_descriptors_does_not_spin_and_answers_again_when_it_has_some(tmp_path):
    folder = Folder(str(tmp_path))

    def come() -> None:
        folder.hear("waits")
        crowd: list[Any] = []
        address: Address = (HOST, int(folder.hear("port0")))
        try:
            while not folder.told("again"):
                if len(crowd) < 200:
                    crowd.append(connect(address))
                time.sleep(0.01)
        finally:
            for sock in crowd:
                sock.close()
        with connect(address) as sock, pytest.raises(RefusedError, match="belongs to another run"):
            shake_hands(sock, CLAIM, SECRET.encode())
        with connect(address) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert hear_all(sock) == b""
        folder.tell("refused")

    port = free_port()
    environments = [environment(rank, 2, port, CYXTRAIN_SECRET=SECRET) for rank in range(2)]
    with in_background(come):
        first, second = values(run_processes(run_out_of_descriptors, environments, str(tmp_path)))
    assert (first["total"], second["total"]) == (2.0, 2.0)
    assert first["busy"] < 0.1
    assert {text for _, text in first["lines"]} == {"rank 0 cannot take connections for now: Too many open files"}
    assert len(first["lines"]) <= 4
