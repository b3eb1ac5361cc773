"""Join a world, and report how that ended and how long it took."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

import cyxtrain as cx


def own_rank() -> int:
    return int(os.environ["RANK"])


def join(seconds: float = 2.0, **fields: Any) -> tuple[str, str, int | None, float]:
    """Join the world; return the type, text and rank of the error ("joined" if none), and the seconds until then."""
    began = time.monotonic()
    try:
        with cx.init(cx.DistributedConfig(timeout_ms=int(1000 * seconds), **fields)):
            total = torch.ones(1)
            cx.all_reduce(total)
            assert total.item() == cx.get_world_size()
    except cx.RendezvousError as error:
        return type(error).__name__, str(error), error.rank, time.monotonic() - began
    return "joined", "", None, time.monotonic() - began
