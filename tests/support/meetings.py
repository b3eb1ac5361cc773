"""Meetings for tests: ranks as threads, at a store of the test's own."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
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


def meet(store: dist.Store, rank: int, world_size: int, seconds: float = 5.0, **fields: Any) -> RingProcessGroup:
    return RingProcessGroup(store, rank, world_size, timedelta(seconds=seconds), **fields)


def meet_all(
    store: dist.Store, ranks: Sequence[int], world_size: int, seconds: float = 5.0, **options: RingOptions
) -> list[tuple[RendezvousError | None, float]]:
    """Return each rank's error, or None, and the seconds that it took; `options` are by rank: r0=..., r1=..."""
    found: dict[int, tuple[RendezvousError | None, float]] = {}

    def run(rank: int) -> None:
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


def board_of(store: dist.Store, secret: str | None = None) -> StoreClient:
    """Return a client of the store that reads and writes the keys of the rendezvous as a member does."""
    return StoreClient(store, "the test", Deadline(10.0), secret.encode() if secret else None, "0  ")


def say_entry(
    store: dist.Store, rank: int, world_size: int, port: int, secret: str | None = None, **fields: Any
) -> None:
    """Write the record of a rank on another machine to the store."""
    entry = RankRecord(
        world_size, Process("elsewhere", 1, 1), "127.0.0.1", port, has_secret=secret is not None, **fields
    )
    board_of(store, secret).set(f"1/entry/{rank}", entry.to_json())
