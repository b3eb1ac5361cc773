"""Meetings for tests: ranks as threads, at a store of the test's own."""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta

from worlds import join_threads

from cyxtrain.config import RingOptions
from cyxtrain.environment.processes import Process
from cyxtrain.errors import RendezvousError
from cyxtrain.ring import RingProcessGroup
from cyxtrain.ring.rendezvous.record import RankRecord
from cyxtrain.ring.rendezvous.store_client import StoreClient
from cyxtrain.ring.wire.link import Deadline

LATE = 0.5
"""Seconds after the deadline that an error may come."""
SECRET = RingOptions(secret="the secret of this run")


def meet(store, rank, world_size, seconds=5.0, **fields):
    return RingProcessGroup(store, rank, world_size, timedelta(seconds=seconds), **fields)


def meet_all(store, ranks, world_size, seconds=5.0, **options):
    """Returns how each rank's meeting ended, and after how many seconds; `options` are by rank: r0=..., r1=..."""
    found = {}

    def run(rank):
        start = time.monotonic()
        error = None
        group = None
        try:
            group = meet(store, rank, world_size, seconds, options=options.get(f"r{rank}"))
        except RendezvousError as raised:
            error = raised
        found[rank] = error, time.monotonic() - start
        if group is not None:
            group.shutdown()

    join_threads([threading.Thread(target=run, args=(rank,)) for rank in ranks], 20.0)
    return [found[rank] for rank in ranks]


def board_of(store, world_size, secret=None):
    """The keys of the ranks' meeting as a member sees them."""
    group = f"0 {' '.join(map(str, range(world_size)))}"
    return StoreClient(store, "the test", Deadline(10.0), secret and secret.encode(), group)


def say_entry(store, rank, world_size, port, secret=None, **fields):
    """Says at the store what a rank would say that is somewhere else."""
    entry = RankRecord(
        world_size, Process("elsewhere", 1, 1), "127.0.0.1", port, has_secret=secret is not None, **fields
    )
    with contextlib.closing(board_of(store, world_size, secret)) as board:
        board.set(f"1/entry/{rank}", entry.to_json())
