"""The least that a collective needs: how many bytes each rank must move, in how many rounds, and how long that takes.

The limit of a row is the larger of two times, both measured by `raw_ranks.py` with as many processes in the same run:

- rounds x the time of one byte: half a round trip, or an exchange in which all send and receive at once, whichever is
  less. ceil(log2 N) rounds are the least in which all ranks can hear of all.
- the bytes that each rank must move, moved by all ranks at once. Over TCP: sent to the next rank while as many come
  from the previous one, through buffers that stay in a cache. On the same host: copied from memory to memory, once,
  however they get to another rank (the byte goes through a Unix socket then).

Bytes of each rank, for S bytes and N ranks: all_reduce 2 (N-1)/N S, all_gather and reduce_scatter (N-1)/N S (Patarasuk
and Yuan, Bandwidth optimal all-reduce algorithms, 2009); broadcast S, along a chain; barrier none.
A limit is no promise that anything can reach it: arithmetic, headers, and reading what another core has just written
are not in it. On few cores a measured limit has the scheduler in it, as the collectives have: a row may come out
above 100 %.
"""

from __future__ import annotations

import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import launches

_SAME_HOST = "tcp" if sys.platform == "win32" else "unix"


def bytes_to_move(operation: str, size: int, ranks: int) -> int:
    """Returns how many bytes a rank must send, at least."""
    share = {
        "all_reduce": 2 * (ranks - 1) / ranks,
        "broadcast": 1.0,
        "all_gather": (ranks - 1) / ranks,
        "reduce_scatter": (ranks - 1) / ranks,
        "barrier": 0.0,
    }[operation]
    return math.ceil(share * size)


def rounds(ranks: int) -> int:
    """Returns in how many rounds everybody can hear of everybody."""
    return math.ceil(math.log2(ranks))


def needed(operation: str, size: int, ranks: int, transport: str) -> list[dict[str, Any]]:
    """Returns what must be measured for the limit of a row: two of a byte, and one of all bytes if there are any."""
    tcp = transport == "tcp"
    one_byte = {"over": "tcp" if tcp else _SAME_HOST, "bytes": 1, "chain": False}
    latency = [one_byte | {"kind": kind} for kind in ("half round trip", "exchange")]
    moved = bytes_to_move(operation, size, ranks)
    bytes_once = {
        "kind": "exchange" if tcp else "copy",
        "over": "tcp",
        "bytes": moved,
        "chain": operation == "broadcast",
    }
    return [*latency, bytes_once] if moved else latency


def measure(parts: list[dict[str, Any]], ranks: int, seconds: float) -> list[dict[str, Any]]:
    """Measures each part once, and returns it with "seconds"."""
    unique = {_key(part): part | {"world_size": ranks} for part in parts}
    with tempfile.TemporaryDirectory(prefix="raw") as folder:
        addresses: dict[str, list[Any]] = {"tcp": [("127.0.0.1", port) for port in launches.free_ports(ranks)]}
        if any(part["over"] == "unix" for part in parts):
            addresses["unix"] = [str(Path(folder) / str(rank)) for rank in range(ranks)]
        task = {"addresses": addresses, "rows": list(unique.values()), "seconds": seconds}
        return launches.slowest(launches.launch("raw_ranks.py", ranks, task))


def limit_seconds(operation: str, size: int, ranks: int, transport: str, measured: list[dict[str, Any]]) -> float:
    """Returns the limit of a row from what `measure` returned."""
    seconds = {_key(part): part["seconds"] for part in measured}
    to_and_fro, both_ways, *moving = (seconds[_key(part)] for part in needed(operation, size, ranks, transport))
    return max([rounds(ranks) * min(to_and_fro, both_ways), *moving])


def _key(part: dict[str, Any]) -> tuple[Any, ...]:
    return part["kind"], part["over"], part["bytes"], part["chain"]
