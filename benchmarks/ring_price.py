"""What frame headers and watching cost: all_reduce over the ring on TCP as it is, and over it without them.

    python benchmarks/ring_price.py [ranks] [pairs]

Without: no header is made, sent or compared, and no thread listens to control connections; the schedule, the links
and the arithmetic are the same. A run in which anything goes wrong would then hang or give wrong numbers.

Each variant runs in processes of its own; they take turns. For each size: the lower quartile of the calls of each run
(a scheduler that puts both ranks on one core doubles the others), the median of it over the runs, and the ratio of
these medians. Below 1.05 everywhere is the promise. A third variant, checksums on, is shown beside them. Every chunk
has at least one element: without headers empty ones do not travel at all.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import statistics
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from cyxtrain.config import RingOptions
from cyxtrain.ring import RingProcessGroup, connections, executor, small
from cyxtrain.ring.wire import transfers
from cyxtrain.ring.wire.frames import Operation

SIZES = [64, 1 << 10, 16 << 10, 250_000, 1_000_000, 4_000_000, 25 << 20, 100 << 20]
"""Bytes of float32."""
VARIANTS = ("without", "with", "with checksums")
_SECONDS_PER_SIZE = 0.5


class _SilentWatch:
    """Stands where the watch stands, and does nothing."""

    def __init__(self, rank, controls, *_):  # noqa: ANN001, ANN002, ANN204
        self.rank, self.failure = rank, None
        self._controls = controls

    def leave(self, collectives: int) -> None:
        for sock in self._controls.values():
            sock.close()


def _strip() -> None:
    """Takes headers and watching out of the ring of this process."""
    for module in (transfers, executor, small):
        module.HEADER_BYTES = 0
        module.header = lambda begin, payload, checksums, address=0: b""
        module.expected_header = lambda identity, payload_bytes: b""
    small.put_sequence = lambda frame, sequence: None
    transfers.check_header = lambda link, head, expected, offered: None
    Operation.identity = lambda operation: b""
    connections.PeerMonitor = _SilentWatch


def run_rank(rank: int, world_size: int, port: int, variant: str, results: multiprocessing.Queue) -> None:
    """Measures every size as one rank; rank 0 gives the lower quartiles, in microseconds."""
    torch.set_num_threads(1)
    if variant == "without":
        _strip()
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, timedelta(seconds=60), wait_for_workers=False)
    options = RingOptions(secret="bench", checksums=variant == "with checksums", transport="tcp")
    ring = RingProcessGroup(store, rank, world_size, timedelta(seconds=60), options=options)
    quartiles = {}
    for size in SIZES:
        tensor = torch.ones(size // 4)
        count = torch.zeros(world_size)  # one element for each chunk
        start = time.perf_counter()
        for _ in range(5):
            ring.allreduce([tensor])
        # All ranks must make equally many calls: rank 0 says how many.
        count.fill_(max(5, int(5 * _SECONDS_PER_SIZE / (time.perf_counter() - start))) if rank == 0 else 0)
        ring.allreduce([count])
        tensor.zero_()  # sums of zeros stay what they are
        seconds = []
        for _ in range(int(count[0])):
            begin = time.perf_counter()
            ring.allreduce([tensor])
            seconds.append(time.perf_counter() - begin)
        assert not tensor.any()
        quartiles[size] = statistics.quantiles(seconds, n=4)[0] * 1e6
    if rank == 0:
        results.put(json.dumps(quartiles))
    ring.shutdown()


def run(variant: str, world_size: int) -> dict[int, float]:
    """Returns the lower quartile of the microseconds of a call, by size, of one run of a variant."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    ranks = [
        context.Process(target=run_rank, args=(rank, world_size, port, variant, results)) for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    quartiles = json.loads(results.get(timeout=300))
    for process in ranks:
        process.join()
    return {int(size): value for size, value in quartiles.items()}


def main(world_size: int, pairs: int) -> None:
    print(f"{world_size} ranks, {os.cpu_count()} cores, {pairs} runs of each variant")
    runs = {variant: [] for variant in VARIANTS}
    for _ in range(pairs):
        for variant in VARIANTS:
            runs[variant].append(run(variant, world_size))
    print(f"{'bytes':>10} {'without us':>11} {'with us':>11} {'with/without':>13} {'checksums/with':>15}")
    for size in SIZES:
        bare, full, summed = (statistics.median(found[size] for found in runs[variant]) for variant in VARIANTS)
        print(f"{size:>10} {bare:>11.1f} {full:>11.1f} {full / bare:>13.3f} {summed / full:>15.3f}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2, int(sys.argv[2]) if len(sys.argv) > 2 else 5)
