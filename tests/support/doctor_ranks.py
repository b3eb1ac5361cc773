"""What the ranks of test_doctor.py and test_bench.py do, each in its own process; no pytest here."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
from collections.abc import Callable
from typing import Any
from unittest import mock

import strangers

from cyxtrain.config import DistributedConfig
from cyxtrain.doctor import examine, measure, pairs
from cyxtrain.launch import bench
from cyxtrain.ring.rendezvous import dial, probe


def said_by(function: Callable[..., int], *arguments: Any) -> dict[str, Any]:
    """Returns the exit code of a command, and what it printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = function(DistributedConfig.from_environment(), *arguments)
    return {"code": code, "out": out.getvalue()}


def examine_here(connect_seconds: float = 5.0) -> dict[str, Any]:
    pairs.CONNECT_SECONDS = connect_seconds
    return said_by(examine)


def bench_here(sizes: list[int], seconds: float) -> dict[str, Any]:
    return said_by(bench.bench, sizes, seconds)


def examine_with_one_way_closed(rank: int, peer: int) -> dict[str, Any]:
    """One rank looks for another one at a port where nobody listens."""
    if int(os.environ["RANK"]) == rank:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            nobody = unused.getsockname()
        address_of, test = dial.socket_address, pairs.PairTests._test

        def test_blindly(self: pairs.PairTests, other: int, number: int) -> Any:
            record = self.infos[other].record

            def blind_address_of(entry: Any, *, unix: bool) -> tuple[int, Any]:
                if other == peer and entry is record and not unix:
                    return socket.AF_INET, nobody
                return address_of(entry, unix=unix)

            with mock.patch.object(probe, "socket_address", blind_address_of):
                return test(self, other, number)

        mock.patch.object(pairs.PairTests, "_test", test_blindly).start()
    return examine_here(1.0)


def examine_and_die(rank: int) -> dict[str, Any]:
    """One rank ends without a word when it begins to measure."""
    if int(os.environ["RANK"]) == rank:
        measure.lead = lambda *_: os._exit(3)
    return examine_here()


def examine_and_stop(rank: int) -> dict[str, Any]:
    """One rank stops before it tries anybody."""
    if int(os.environ["RANK"]) == rank:

        def stop(tests: pairs.PairTests) -> None:
            os.kill(os.getpid(), signal.SIGSTOP)

        mock.patch.object(pairs.PairTests, "run", stop).start()
    return examine_here()


def examine_among_strangers() -> dict[str, Any]:
    """Before the ranks call each other, and while they do, somebody says all sorts of things to each port."""
    make = pairs.PairTests.run
    left: list[socket.socket] = []

    def make_among_strangers(self: pairs.PairTests) -> None:
        for info in self.infos.values():
            for words in (*strangers.WORDS.values(), *strangers.UNFINISHED.values()):
                left.append(strangers.connect((info.record.host, info.record.port)))
                strangers.say(left[-1], words)
        make(self)

    mock.patch.object(pairs.PairTests, "run", make_among_strangers).start()
    try:
        return examine_here()
    finally:
        for sock in left:
            sock.close()
