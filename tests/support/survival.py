"""Worlds to which something is done while they live: ranks that are killed, stopped and continued."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import busy_ranks
import faults
import survival_ranks
from rank_processes import Ended, collect, end_processes, environment, start_serving, values
from worlds import free_port, wait_until

from cyxtrain.ring.rendezvous import handshake

# What the ranks are in when one of them is killed -> what they do.
ACTIVITIES = {
    "in the middle of a chunk": "reduce_large",
    "in a large sum": "sum_large",
    "between buckets": "go_backward",
    "in a barrier": "meet",
    "in a fit": "fit",
    "while idle": "do_nothing",
    "beside sub-groups": "reduce_in_parts",
    "while a sub-group is made": "make_groups",
    "with messages on their way": "pass_on",
    "in the handshake": "",
}
_STEPS = 3 * len(handshake.PEER_ROLES)
"""Of all handshakes with one other rank, on either side."""
_HANG_SECONDS = 15.0
"""Of a world in which somebody was killed: what has not ended then never will."""
_multiprocessing = threading.Lock()
"""It is not made for threads, of which several may have a world each."""


class World:
    """Ranks in processes, while they live; see `living`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: list[Any] = []
        self._ends: list[Any] = []

    def start(self, function: Callable[..., Any], variables: dict[str, str], arguments: tuple[Any, ...]) -> None:
        with _multiprocessing:
            end, process = start_serving(function, variables, arguments)
        self._processes.append(process)
        self._ends.append(end)

    def wait_for_all(self, name: str) -> None:
        self.wait_for(*(f"{name}{rank}" for rank in range(len(self._processes))))

    def wait_for(self, *names: str) -> None:
        """Returns when ranks have left these notes."""
        wait_until(lambda: all((self.folder / name).exists() for name in names), 30.0)

    def send(self, number: signal.Signals, *ranks: int) -> float:
        """Sends a signal to ranks, or to all; returns when."""
        at = time.monotonic()
        for rank in ranks or range(len(self._processes)):
            os.kill(self._processes[rank].pid, number)
        return at

    def stop(self, *ranks: int, seconds: float) -> float:
        """Stops ranks, or all, and lets them go on so much later; returns for how long they were stopped."""
        stopped = self.send(signal.SIGSTOP, *ranks)
        time.sleep(seconds)
        return self.send(signal.SIGCONT, *ranks) - stopped

    def outcomes(self, seconds: float = 40.0) -> list[Ended]:
        """Waits until all have ended; fails where one goes on after so many seconds."""
        return collect(self._ends, seconds)

    def values(self, seconds: float = 40.0) -> list[Any]:
        """Waits until all have ended, and returns what they returned; fails where one raised."""
        return values(self.outcomes(seconds))

    def close(self) -> None:
        with _multiprocessing:
            for process in self._processes:
                process.kill()
            end_processes(self._ends, self._processes)


@contextlib.contextmanager
def living(
    folder: Path, world_size: int, function: Callable[..., Any], *arguments: Any, transport: str = "auto"
) -> Iterator[World]:
    """A world in which every rank calls `function(*arguments)`; nothing outlives the block.

    Args:
        folder: Where ranks leave notes; made here.
        world_size: How many ranks.
        function: At the top of its module.
        *arguments: Of the function.
        transport: What carries collectives.
    """
    folder.mkdir()
    world, port = World(folder), free_port()
    try:
        for rank in range(world_size):
            world.start(function, environment(rank, world_size, port, CYXTRAIN_TRANSPORT=transport), arguments)
        yield world
    finally:
        world.close()


def seconds_to_learn_of_a_kill(
    folder: Path, activity: str, world_size: int, seed: int, transport: str = "auto"
) -> list[float]:
    """Kills a rank at a random moment, and sees how each survivor learns of it.

    Args:
        folder: For notes; made here.
        activity: One of `ACTIVITIES`.
        world_size: How many ranks.
        seed: Of rank and moment.
        transport: What carries collectives.

    Returns:
        For each survivor, the seconds from the kill to the error.
    """
    draw = random.Random(f"{activity} {world_size} {seed}")
    victim = draw.randrange(world_size)
    story = f"rank {victim} of {world_size} killed {activity} over {transport} (seed {seed})"
    if activity == "in the handshake":
        step = draw.randrange(_STEPS * (world_size - 1))
        story += f", before step {step}"
        arguments: tuple[Any, ...] = str(folder), victim, step
        with living(folder, world_size, survival_ranks.join_and_be_killed, *arguments, transport=transport) as world:
            outcomes = world.outcomes(_HANG_SECONDS)
        killed = float((folder / "at").read_text())
        types = {"RendezvousError", "PeerLostError"}  # of whoever had met all before, and begun
        assert "RendezvousError" in {ended.value["type"] for ended in outcomes if ended.value is not None}, story
    else:
        plan, moment = _moment(draw, activity, victim)
        story += f", {plan}" if plan else f", after {moment:.4f} s"
        name = ACTIVITIES[activity]
        live, arguments = survival_ranks.live_until_the_end, (str(folder), name, plan)
        with living(folder, world_size, live, *arguments, transport=transport) as world:
            if plan:
                outcomes = world.outcomes(_HANG_SECONDS)
                killed = float((folder / "at").read_text())
            else:
                world.wait_for_all("busy")
                time.sleep(moment)
                killed = world.send(signal.SIGKILL, victim)
                outcomes = world.outcomes(_HANG_SECONDS)
        types = {"PeerLostError"} | ({"RendezvousError", "StoreLostError"} if name == "make_groups" else set())
    return _check_survivors(outcomes, victim, types, killed, story)


def _moment(draw: random.Random, activity: str, victim: int) -> tuple[faults.Faults, float]:
    """Draws when it happens: at a system call, before a collective, or after some time."""
    if activity == "in the middle of a chunk":
        fault = faults.ProcessFault(faults.Kill(), victim, at_call=draw.randrange(1, 400))
    elif activity == "between buckets":
        fault = faults.ProcessFault(faults.Kill(), victim, at_collective=draw.randrange(20, 300))
    else:
        return [], draw.uniform(0.0, 0.4)
    return [fault], 0.0


def _check_survivors(outcomes: list[Ended], victim: int, types: set[str], killed: float, story: str) -> list[float]:
    seconds = []
    for ended in outcomes:
        if ended.rank == victim:
            assert ended.kind == "Killed", f"{story}: it ended otherwise: {ended}"
            continue
        assert ended.error is None, f"{story}: rank {ended.rank} raised\n{ended.traceback}"
        facts = ended.value
        seconds.append(facts["at"] - killed)
        says = f"{story}: rank {ended.rank} learnt after {seconds[-1]:.3f} s: {facts}"
        assert (facts["type"] in types, facts["rank"]) == (True, victim), says
        assert f"rank {victim}" in facts["message"], says
        assert seconds[-1] < seconds_to_learn(len(outcomes)), says
    return seconds


def seconds_to_learn(ranks: int) -> float:
    """Within how many seconds every survivor says who is lost: one; two where ranks wait for each other's cores."""
    return 1.0 if ranks <= (os.cpu_count() or 1) else 2.0


# --- scenarios: each is a world to which something happens, and returns what its test looks at -----------------------


def stopped_at(folder: Path, function: Callable[..., Any], plan: faults.Faults, *arguments: Any) -> tuple[Any, Any]:
    """Returns what three ranks return in peace, and what they return while one is stopped as planned."""
    folder.mkdir(exist_ok=True)
    quiet = run_alone(folder / "quiet", 3, function, [], *arguments)
    stopped = run_alone(folder / "stopped", 3, function, plan, *arguments)
    assert sum(count for _, count in stopped) == len(plan), f"{plan}: it ended before anything happened"
    return [found for found, _ in quiet], [found for found, _ in stopped]


def stopped_for_ever(folder: Path, victim: int, idle: bool) -> tuple[float, list[dict[str, Any]]]:
    """Stops a rank of three until the others have learnt of it; returns when, and how each learnt."""
    name = survival_ranks.wait_beside_a_stopped_rank
    with living(folder, 3, name, str(folder), victim, idle) as world:
        world.wait_for_all("busy")
        stopped = world.send(signal.SIGSTOP, victim)
        world.wait_for(*(f"learnt{rank}" for rank in range(3) if rank != victim))
        (folder / "resumed").touch()
        world.send(signal.SIGCONT, victim)
        return stopped, world.values()


def stopped_again_and_again(
    folder: Path, ranks: tuple[int, ...], times: int, seconds: float, gap_seconds: float
) -> list[tuple[int, list[str]]]:
    """Stops ranks of three, or all, several times, with gaps; returns how often each rank reduced, and what it got."""
    with living(folder, 3, survival_ranks.reduce_until_told, str(folder)) as world:
        world.wait_for_all("busy")
        for _ in range(times):
            time.sleep(gap_seconds)
            world.stop(*ranks, seconds=seconds)
        time.sleep(gap_seconds)
        (folder / "enough").touch()
        return world.values()


def stopped_in_own_wait(folder: Path) -> list[float]:
    """Stops a rank that waits with a deadline of 3 s for one that comes after 4; returns how long they took."""
    with living(folder, 2, survival_ranks.wait_through_an_own_stop, str(folder), 3.0) as world:
        world.wait_for_all("busy")
        # These times are the scenario: a wait of 4.05 s, which is too long, and of which it runs for 1.55 s.
        time.sleep(0.25)
        world.stop(1, seconds=2.5)
        time.sleep(1.3)
        (folder / "late").touch()
        return world.values()


def killed_beside_a_group(folder: Path, makes: bool) -> tuple[float, list[Ended]]:
    """Returns when the last of three ranks was killed, and how all ended."""
    with living(folder, 3, survival_ranks.lose_the_last_rank_beside_a_group, str(folder), makes) as world:
        outcomes = world.outcomes(_HANG_SECONDS)
        return float((folder / "at").read_text()), outcomes


def killed_beside_a_worker(folder: Path, world_size: int, victim: int) -> tuple[float, list[Ended]]:
    """Kills a rank, but not its DataLoader's worker; returns when, and how all ended."""
    with living(folder, world_size, survival_ranks.feed_from_a_worker, str(folder)) as world:
        world.wait_for_all("busy")
        killed = world.send(signal.SIGKILL, victim)
        world.wait_for(*(f"learnt{rank}" for rank in range(world_size) if rank != victim))
        os.kill(int((folder / f"worker{victim}").read_text()), signal.SIGKILL)  # else it goes on for seconds
        return killed, world.outcomes()


def check_many_lives(
    folder: Path, processes: int, lives: int, warm_up: int, most_kib: int, seconds: float = 40.0
) -> None:
    """Fails where joining and leaving costs memory, descriptors or threads: two ranks, in one process or in two.

    Memory may grow once after the first lives: Python's table of interned strings is made larger at some time.
    """
    function = busy_ranks.live_often_in_threads if processes == 1 else busy_ranks.live_often
    for held in run_alone(folder, processes, function, lives, warm_up, seconds=seconds):
        print(f"after every {warm_up} lives {held}")
        assert held[-1]["descriptors"] <= held[0]["descriptors"]
        assert held[-1]["threads"] <= held[0]["threads"]
        assert min(after["kib"] - before["kib"] for before, after in itertools.pairwise(held)) < most_kib


def run_alone(
    folder: Path, world_size: int, function: Callable[..., Any], *arguments: Any, seconds: float = 60.0
) -> list[Any]:
    """Returns what ranks return that nobody disturbs from outside."""
    with living(folder, world_size, function, *arguments) as world:
        return world.values(seconds)


def show(what: str, seconds: list[float]) -> None:
    """Prints how times are distributed."""
    if seconds:
        found = f"median {1000 * statistics.median(seconds):.1f} ms, worst {1000 * max(seconds):.1f} ms"
        print(f"\n{what}: {len(seconds)} times, {found}")
