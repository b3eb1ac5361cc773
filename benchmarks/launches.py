"""Launches for benchmarks: ranks in separate processes, ways that take turns, and ratios of neighbours in time.

A program of ranks is a file beside this one. `launch` starts it once per rank; it asks `given()` what to do and
gives what it found to `report()`. This module imports no torch, and nothing else that takes long.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
_DECIDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "DISTRIBUTED_BACKEND")


class LaunchError(RuntimeError):
    """A rank failed, or did not end in time; the message has what it wrote."""


# --- in the process of the benchmark ----------------------------------------------------------------------------------


def launch(
    program: str, world_size: int, task: dict[str, Any], *, seconds: float = 600.0, **variables: str
) -> list[Any]:
    """Runs a program as every rank of a world.

    Args:
        program: The name of a file beside this one.
        world_size: How many ranks.
        task: What `given()` returns in each of them: JSON types.
        seconds: Until the ranks are killed.
        **variables: More of the environment.

    Returns:
        What each rank reported, by rank.

    Raises:
        LaunchError: A rank failed or did not end. No process is left.
    """
    world = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    # One thread per rank; a secret, as without one the ring says that it makes one; CPUs, as those compared with use.
    world |= {"OMP_NUM_THREADS": "1", "CYXTRAIN_SECRET": secrets.token_hex(16), "DISTRIBUTED_BACKEND": "cpu"}
    world |= variables
    kept = {name: value for name, value in os.environ.items() if name not in _DECIDED}
    with tempfile.TemporaryDirectory(prefix="benchmark") as name:
        folder, ranks = Path(name), []
        try:
            for rank in range(world_size):
                command = [sys.executable, str(_HERE / program), json.dumps(task), str(folder / f"report{rank}")]
                with open(folder / f"output{rank}", "wb") as output:
                    environment = kept | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                    environment["LAUNCHED_AT"] = repr(time.time())
                    process = subprocess.Popen(
                        command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
                    )
                    ranks.append(process)
            _wait(ranks, time.monotonic() + seconds)
            codes = [process.poll() for process in ranks]
        finally:
            for process in ranks:
                process.kill()
            for process in ranks:
                process.wait()
        _raise_failures(codes, folder, seconds)
        return [json.loads((folder / f"report{rank}").read_text("utf-8")) for rank in range(world_size)]


def _wait(ranks: Sequence[subprocess.Popen[bytes]], deadline: float) -> None:
    """Returns when all ranks have ended; two seconds after one has failed; or at the deadline."""
    while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
        if any(process.poll() for process in ranks):
            deadline = min(deadline, time.monotonic() + 2)
        for process in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.5)


def _raise_failures(codes: Sequence[int | None], folder: Path, seconds: float) -> None:
    failed = []
    for rank, code in enumerate(codes):
        if code != 0:
            # Where one has failed the others are not waited for: it is the one to look at.
            how = f"ended with {code}" if code else f"did not end in {seconds:g} s, or not after another had failed"
            failed.append(f"rank {rank} {how}:\n{(folder / f'output{rank}').read_text('utf-8', 'replace')}")
    if failed:
        raise LaunchError("\n".join(failed))


def take_turns(ways: Sequence[str], launches: int, run: Callable[[str], Any]) -> dict[str, list[Any]]:
    """Runs every way `launches` times, one after the other, each round in another order.

    What disturbs the machine for some seconds then disturbs neighbours, whose ratio is taken, and no way comes always
    after the same other one.

    Returns:
        What `run(way)` returned, by way, in the order of rounds.
    """
    found: dict[str, list[Any]] = {way: [] for way in ways}
    for number in range(launches):
        turn, took = number % len(ways), []
        for way in [*ways[turn:], *ways[:turn]]:
            began = time.monotonic()
            found[way].append(run(way))
            took.append(f"{way} {time.monotonic() - began:.0f} s")
        print(f"  launch {number + 1} of {launches}: {', '.join(took)}", file=sys.stderr, flush=True)
    return found


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Returns the median of the ratios of what was measured in the same round."""
    return paired_quartiles(numerators, denominators)[1]


def paired_quartiles(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[float, float, float]:
    """Returns lower quartile, median and upper quartile of the ratios of what was measured in the same round."""
    ratios = [n / d for n, d in zip(numerators, denominators, strict=True)]
    # One is not enough for Python's quantiles before 3.13.
    lower, median, upper = statistics.quantiles(ratios, method="inclusive") if len(ratios) > 1 else ratios * 3
    return lower, median, upper


def slowest(reports: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Returns each row of a launch as the rank found it whose median is the largest."""
    return [max(rows, key=lambda row: row["seconds"]) for rows in zip(*reports, strict=True)]


def free_ports(count: int) -> list[int]:
    """Returns TCP ports that nobody uses at the moment, all different."""
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in socks:
            sock.bind(("127.0.0.1", 0))
        return [int(sock.getsockname()[1]) for sock in socks]


def machine() -> dict[str, Any]:
    """Returns what a figure depends on."""
    return {
        "cores": os.cpu_count(),
        "processor": _processor(),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
    }


def save_results(path: Path | None, rows: Sequence[dict[str, Any]]) -> None:
    """Writes what was measured, and on which machine, as JSON; None: nowhere."""
    if path is not None:
        path.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=2) + "\n", encoding="utf-8")


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


# --- in the process of a rank -----------------------------------------------------------------------------------------


def given() -> dict[str, Any]:
    """Returns the task of this launch."""
    task: dict[str, Any] = json.loads(sys.argv[1])
    return task


def report(found: Any) -> None:
    """Hands in what this rank found: JSON types."""
    Path(sys.argv[2]).write_text(json.dumps(found), "utf-8")


def repeat(
    call: Callable[[], object], seconds: float, agree: Callable[[int], int], least: int = 3, most: int = 5000
) -> dict[str, Any]:
    """Measures a call that all ranks make together, and that is warm.

    Args:
        call: What is measured.
        seconds: About how long, on rank 0.
        agree: Returns on every rank what rank 0 gave it: ranks must make equally many calls.
        least: Calls at least.
        most: Calls at most.

    Returns:
        How many calls were made, and the median and the lower quartile of their seconds.
    """
    times: list[float] = []
    while more := agree(_calls_to_make(times, seconds, least, most)):
        times += [_timed(call) for _ in range(more)]
    return {
        "calls": len(times),
        "seconds": statistics.median(times),
        "lower_quartile_seconds": sorted(times)[len(times) // 4],
    }


def _calls_to_make(times: Sequence[float], seconds: float, least: int, most: int) -> int:
    """Returns how many calls are still to be made when so many have been; one at first, to see how long it takes."""
    if not times:
        return 1
    in_time = int(len(times) * seconds / max(sum(times), 1e-9))
    wanted = max(least, min(in_time, most)) - len(times)
    # Nearly enough is enough: the last calls are not worth another round.
    return wanted if wanted > len(times) // 10 or len(times) < least else 0


def _timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
