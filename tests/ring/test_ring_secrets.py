"""Ranks prove to each other that they know the secret; who does not is told from who does, on both sides, at once."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from joined_ranks import join, own_rank
from markers import by_night
from meetings import LATE, SECRET, board_of, meet, meet_all, say_entry
from rank_processes import run_ranks, values
from strangers import CLAIM, connect, hear_all, say, shake_hands
from worlds import wait_until

from cyxtrain.config import RingOptions
from cyxtrain.errors import RendezvousError
from cyxtrain.ring.rendezvous.handshake import HandshakeError, HandshakeServer, RefusedError, take_message
from cyxtrain.ring.rendezvous.record import RankRecord

RUN = "5f" * 16

# --- secrets --------------------------------------------------------------------------------------------------------


def test_ranks_of_one_secret_meet_without_a_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [error for error, _ in meet_all(dist.HashStore(), [0, 1, 2], 3, r0=SECRET, r1=SECRET, r2=SECRET)] == (
            [None] * 3
        )


def test_without_a_secret_rank_0_makes_one_and_warns_once_for_all():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        store = dist.HashStore()
        assert [error for error, _ in meet_all(store, [0, 1, 2], 3)] == [None] * 3
    [warning] = [str(warning.message) for warning in found]
    assert warning.startswith("CYXTRAIN_SECRET is not set: every process that reaches rank 0's port")
    assert "require_secret=True" in warning
    entries = [RankRecord.from_json(store.get(f"1/entry/{rank}")) for rank in range(3)]
    assert [len(bytes.fromhex(entry.key)) for entry in entries] == [32, 0, 0]
    assert [len(bytes.fromhex(entry.run)) for entry in entries] == [16, 0, 0]


def test_a_secret_of_their_own_is_not_written_into_the_store():
    store = dist.HashStore()
    meet_all(store, [0, 1], 2, r0=SECRET, r1=SECRET)
    for rank in range(2):
        assert b"the secret" not in store.get(f"1/entry/{rank}")
        assert RankRecord.from_json(board_of(store, SECRET.secret).get(f"1/entry/{rank}")).key == ""


@pytest.mark.parametrize("knows", [by_night(0), 1])
def test_a_secret_on_one_rank_only_is_said_at_once_where_it_is_not_and_at_the_deadline_where_it_is(knows):
    found = meet_all(dist.HashStore(), [0, 1], 2, 0.6, **{f"r{knows}": SECRET})
    for error, seconds in found:
        assert "CYXTRAIN_SECRET" in str(error)
        assert seconds < 0.6 + LATE
    assert f"rank {knows} was started with a secret and rank {1 - knows} without" in str(found[1 - knows][0])
    assert f"A process that claimed to be rank {1 - knows} did not know the secret" in str(found[knows][0])


@pytest.mark.parametrize("odd", [by_night(0), 1, by_night(2)])
def test_different_secrets_are_said_in_the_log_at_once_and_on_all_sides_at_the_deadline(odd, caplog):
    options = {f"r{rank}": SECRET for rank in range(3)} | {f"r{odd}": RingOptions(secret="another one")}
    for rank, (error, seconds) in enumerate(meet_all(dist.HashStore(), [0, 1, 2], 3, 0.6, **options)):
        other = odd if rank != odd else min({0, 1, 2} - {odd})
        assert f"A process that claimed to be rank {other} did not know the secret of this run" in str(error)
        assert "CYXTRAIN_SECRET is set on rank " in str(error)
        assert "and must be the same on every rank" in str(error)
        assert "another one" not in str(error)
        assert seconds < 0.6 + LATE
    assert f"ignores a value at 1/entry/{odd} of the store that was written without the secret" in caplog.text


def test_who_comes_as_a_missing_rank_without_the_secret_is_part_of_the_cause():
    rank_0 = Waiting(SECRET, 0.8)
    with rank_0, connect(rank_0.address) as sock, pytest.raises(HandshakeError):
        shake_hands(sock, replace(CLAIM, run=rank_0.entry.run), b"another secret")
    assert "rank 1 did not connect to rank 0" in str(rank_0.error)
    assert "a process that claimed to be rank 1 did not know the secret" in str(rank_0.error)


# --- strangers at the door of rank 0, which waits for rank 1 --------------------------------------------------------


class Waiting:
    """Rank 0 of two, its door open, while rank 1 says that it is here and does not come.

    Attributes:
        entry: What rank 0 says of itself.
        address: Where it listens.
        error: How its meeting ended, after the block.
    """

    def __init__(self, options: RingOptions, seconds: float = 5.0) -> None:
        self._seconds = seconds
        self._store = dist.HashStore()
        self._secret = options.secret
        say_entry(self._store, 1, 2, 1, options.secret)
        self._thread = threading.Thread(target=self._run, args=(options,), daemon=True)
        self.error: RendezvousError | None = None

    def __enter__(self) -> Waiting:
        self._thread.start()
        wait_until(lambda: self._store.check(["1/entry/0"]))
        self.entry = RankRecord.from_json(board_of(self._store, self._secret).get("1/entry/0"))
        self.address = (self.entry.host, self.entry.port)
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(self._seconds + LATE)
        assert not self._thread.is_alive()

    def _run(self, options: RingOptions) -> None:
        try:
            meet(self._store, 0, 2, self._seconds, options=options).shutdown()
        except RendezvousError as error:
            self.error = error


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"run": RUN}, "it belongs to another run than rank 0, or to an earlier incarnation of this run"),
        by_night({"generation": 1}, "it belongs to another run than rank 0, or to an earlier incarnation of this run"),
        by_night({"rank": 2}, "there is no rank 2 in a world of 2"),
        by_night({"rank": 0}, "rank 0 is taken"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_who_knows_the_secret_and_is_no_member_hears_why_within_a_second_and_so_does_the_log(change, reason, caplog):
    with Waiting(SECRET, 0.3) as rank_0:
        claim = replace(CLAIM, **({"run": rank_0.entry.run} | change))
        start = time.monotonic()
        with connect(rank_0.address) as sock, pytest.raises(RefusedError) as refused:
            shake_hands(sock, claim, SECRET.secret.encode())
        assert str(refused.value).startswith(reason)
        assert time.monotonic() - start < 1.0
    assert f"rank 0 turned away a connection from 127.0.0.1: {reason}" in caplog.records[0].getMessage()
    assert "rank 1 did not connect" in str(rank_0.error)  # it waits for the right one all the same


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"protocol": 10}, ("rank 1 speaks version 10", "rank 0 version 9")),
        ({"world_size": 3}, ("rank 1 was started for a world of 3", "rank 0 for a world of 2")),
        ({"checksums": True}, ("rank 1 was started with checksums", "rank 0 without")),
    ],
    ids=str,
)
def test_a_member_that_does_not_fit_is_refused_in_words_on_both_sides_within_a_second(change, words):
    with Waiting(SECRET) as rank_0:
        start = time.monotonic()
        claim = replace(CLAIM, **({"run": rank_0.entry.run} | change))
        with connect(rank_0.address) as sock, pytest.raises(RefusedError) as refused:
            shake_hands(sock, claim, SECRET.secret.encode())
    assert time.monotonic() - start < 1.0
    for error in (refused.value, rank_0.error):
        assert all(word in str(error) for word in words)


# --- strangers at the port of rank 0, which rank 1 calls ------------------------------------------------------------


@contextlib.contextmanager
def impostor(answer):
    """Somebody listens where rank 0 should; `answer(connection)` is called with each that comes."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.settimeout(5.0)
                        answer(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(5.0)


def call(port, seconds=5.0):
    """Rank 1 calls rank 0 at a port; returns how that ended, and after how many seconds."""
    store = dist.HashStore()
    say_entry(store, 0, 2, port, SECRET.secret, run=RUN)
    return meet_all(store, [1], 2, seconds, r1=SECRET)[0]


def test_a_rank_that_cannot_be_reached_is_named_with_the_cause():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        error, seconds = call(free.getsockname()[1])
    assert isinstance(error, RendezvousError)
    assert str(error).startswith("rank 1 cannot reach rank 0 at 127.0.0.1:")
    assert "Connection refused" in str(error)
    assert error.rank == 0
    assert seconds < 1.0


def test_a_listener_of_another_program_is_not_taken_for_a_rank():
    with impostor(lambda sock: say(sock, b"HTTP/1.0 400 Bad Request, and more of it\r\n") or hear_all(sock)) as port:
        error, seconds = call(port)
    assert "rank 0 at 127.0.0.1:" in str(error)
    assert "what answers there is not rank 0 of this run (it does not speak this protocol)" in str(error)
    assert seconds < 1.0


def test_a_listener_that_does_not_know_the_secret_is_not_taken_for_a_rank():
    def answer(sock):
        listener, received = HandshakeServer(b"another secret"), bytearray(sock.recv(4096))
        say(sock, listener.answer(take_message(received)))
        sock.recv(4096)
        say(sock, listener.verdict())

    with impostor(answer) as port:
        error, seconds = call(port)
    assert "what answers there is not rank 0 of this run (it does not know the secret)" in str(error)
    assert seconds < 1.0


def test_a_listener_that_says_nothing_is_named_at_the_deadline():
    with impostor(lambda sock: hear_all(sock)) as port:
        error, seconds = call(port, 0.4)
    assert "rank 1 cannot reach rank 0 at 127.0.0.1:" in str(error)
    assert "no answer before the deadline" in str(error)
    assert 0.4 <= seconds < 0.4 + LATE


def test_a_listener_that_closes_every_connection_is_tried_until_the_deadline():
    with impostor(lambda sock: None) as port:
        error, seconds = call(port, 1.2)
    assert "closes every connection of rank 1" in str(error)
    assert 1.2 <= seconds < 1.2 + LATE


# --- whole processes, with what their environment says ---------------------------------------------------------------


def join_with_secret(folder, secrets, require, seconds=10.0):
    """Joins when all are ready; returns how that ended, and how long after that."""
    ready = [Path(folder) / f"ready {rank}" for rank in range(len(secrets))]
    os.environ["CYXTRAIN_SECRET"] = secrets[own_rank()] or ""
    ready[own_rank()].touch()
    wait_until(lambda: all(file.exists() for file in ready))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        ended = join(seconds, require_secret=require)
    return *ended, [str(warning.message) for warning in found if "CYXTRAIN_SECRET" in str(warning.message)]


@pytest.mark.usefixtures("rank_server")
@pytest.mark.parametrize("secrets", [[None] * 3, by_night(["one"] * 3)], ids=["none", "one for all"])
def test_processes_join_with_one_secret_or_none_of_which_rank_0_warns(tmp_path, secrets):
    found = values(run_ranks(3, join_with_secret, str(tmp_path), secrets, False))
    assert [name for name, *_ in found] == ["joined"] * 3
    assert [len(warned) for *_, warned in found] == [int(secrets[0] is None), 0, 0]


@pytest.mark.usefixtures("rank_server")
@pytest.mark.parametrize(
    "secrets",
    [by_night(["one", None]), by_night([None, "one"]), by_night(["one", "another"]), ["one", "one", "another"]],
    ids=str,
)
def test_secrets_that_differ_are_said_by_all_processes_at_the_deadline(tmp_path, secrets):
    found = values(run_ranks(len(secrets), join_with_secret, str(tmp_path), secrets, False, 1.5))
    for rank, (name, message, _, seconds, _) in enumerate(found):
        assert name == "RendezvousError"
        is_set = "is not set" if secrets[rank] is None else "is set"
        assert f"{is_set} on rank " in message
        if secrets[rank] != secrets[0]:
            assert f"or rank {rank} and rank 0 were started with different secrets" in message
        else:
            assert (
                f"A process that claimed to be rank {len(secrets) - 1} did not know the secret of this run" in message
            )
        assert seconds < 1.5 + LATE


@pytest.mark.usefixtures("rank_server")
def test_a_secret_that_is_required_is_enough_where_it_is_there_and_said_with_the_remedy_where_not(tmp_path):
    found = values(run_ranks(2, join_with_secret, str(tmp_path), ["one", "one"], True))
    assert [(name, warned) for name, *_, warned in found] == [("joined", [])] * 2
    for ended in run_ranks(2, join_with_secret, str(tmp_path), [None, None], True):
        assert ended.kind == "ConfigError"
        assert "CYXTRAIN_SECRET is not set" in ended.message
        assert "token_hex" in ended.message
