"""What the ranks of test_doctor.py and test_bench.py do, each in a process of its own; no pytest here."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

import strangers

from cyxtrain.config import DistributedConfig
from cyxtrain.doctor import examine, measure, pairs
from cyxtrain.launch import bench


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
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            nobody = probe.getsockname()
        entry_of, visit = pairs.socket_address, pairs.StreamPasses._visit

        def visit_blindly(self: pairs.StreamPasses, other: int, number: int) -> Any:
            here = self._arrivals[other].entry
            pairs.socket_address = lambda entry, *, unix: (
                (socket.AF_INET, nobody) if other == peer and entry is here and not unix else entry_of(entry, unix=unix)
            )
            return visit(self, other, number)

        pairs.StreamPasses._visit = visit_blindly
    return examine_here(1.0)


def examine_and_die(rank: int) -> dict[str, Any]:
    """One rank ends without a word when it begins to measure."""
    if int(os.environ["RANK"]) == rank:
        measure.lead = lambda *_: os._exit(3)
    return examine_here()


def examine_and_stop(rank: int) -> dict[str, Any]:
    """One rank stops before it tries anybody."""
    if int(os.environ["RANK"]) == rank:
        pairs.StreamPasses.make = lambda self: os.kill(os.getpid(), signal.SIGSTOP)
    return examine_here()


def examine_among_strangers() -> dict[str, Any]:
    """Before the ranks call each other, and while they do, somebody says all sorts of things to each port."""
    make, left = pairs.StreamPasses.make, []

    def make_among_strangers(self: pairs.StreamPasses) -> None:
        for arrival in self._arrivals.values():
            for words in (*strangers.WORDS.values(), *strangers.UNFINISHED.values()):
                left.append(strangers.connect((arrival.entry.host, arrival.entry.port)))
                strangers.say(left[-1], words)
        make(self)

    pairs.StreamPasses.make = make_among_strangers
    try:
        return examine_here()
    finally:
        for sock in left:
            sock.close()
