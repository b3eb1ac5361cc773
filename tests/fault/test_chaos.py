"""Links that are slow, late, cut, closed or that change bits: nothing changes silently, and the right rank is named."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist
from chaos import Proxy
from chaos_ranks import World, everything, everything_behind, run_world, run_worlds, sums_under
from chaos_records import Traffic
from faults import (
    Close,
    Cut,
    Delay,
    Fault,
    Faults,
    Flip,
    Forge,
    HoldGil,
    Kill,
    OneWay,
    ProcessFault,
    Reset,
    Slices,
    Stop,
    Throttle,
)
from markers import by_night
from rank_processes import Ended, run_ranks
from worlds import run_threads, wait_until
from xxhash import xxh3_64, xxh3_64_digest

from cyxtrain.config import RingOptions
from cyxtrain.errors import CyxtrainError, DamagedFrameError, PeerLostError, RendezvousError
from cyxtrain.ring.wire.checksums import Checksums

SEED = int(os.environ.get("CHAOS_SEED", "20"))
LARGE = 4000
"""Times the bytes of `everything`: more than kernels hold for a connection."""
CHECKED = RingOptions(secret="known", checksums=True)
ENDS_IN_SECONDS = 3.0
"""After a link broke; where both its ranks live, each waits a second for a word from somebody who knows why."""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def undisturbed() -> Callable[[int], World]:
    """What a world of three comes to at a scale, with a proxy that only passes everything on."""
    known: dict[int, World] = {}

    def at(scale: int) -> World:
        if scale not in known:
            known[scale] = run_world(3, everything, scale=scale)
            assert known[scale].errors == [None] * 3
        return known[scale]

    return at


# --- what changes nothing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "fault"),
    [
        (1, Fault(Slices(1))),
        by_night(1, Fault(Delay(0.005))),
        by_night(1, Fault(Delay(0.05), rank=1)),
        by_night(1, Fault(Throttle(100_000))),
        by_night(20, Fault(Slices(7), role="messages")),
        by_night(1, Fault(Cut(), after_bytes=500, seconds=0.3)),
        by_night(1, Fault(Cut(), past_handshake=True, seconds=0.5)),
        by_night(1, Fault(OneWay(), rank=0, after_bytes=400, seconds=0.5)),
        (LARGE, Fault(Throttle(20_000_000), rank=2)),
        by_night(LARGE, Fault(Cut(), rank=1, after_bytes=100_000, seconds=0.5)),
        by_night(LARGE, Fault(OneWay(), peer=0, after_bytes=1_000_000, seconds=0.5)),
    ],
    ids=repr,
)
def test_slow_links_and_short_black_holes_change_no_bit(scale, fault, undisturbed):
    world = run_world(3, everything, [fault], scale=scale)
    assert world.happened
    assert world.errors == [None] * 3
    assert world.results == undisturbed(scale).results


def test_a_proxy_changes_no_bit(undisturbed):
    assert run_threads(3, lambda group: everything(group, 1)) == undisturbed(1).results


# --- the end of a link ----------------------------------------------------------------------------------------------


def ends_of_links(traffic: list[Traffic], steps: int) -> Iterator[Fault]:
    """A close and a reset at bytes all over every direction of every link: in handshake, headers and payloads."""
    for flow in traffic:
        assert flow.handshake is not None
        inside = [flow.handshake * step // steps for step in range(steps)]
        stream = flow.sent - flow.handshake
        after = sorted(
            {*range(0, stream, max(1, stream // steps)), *(near for near in (1, 75, 76, 92) if near < stream)}
        )
        for what in (Close(), Reset()):
            for position in inside:
                yield Fault(what, flow.rank, flow.peer, flow.role, position, times=1)
            for position in after:
                yield Fault(what, flow.rank, flow.peer, flow.role, position, past_handshake=True)


def check_ends(faults: list[Fault], undisturbed: World) -> None:
    worlds = run_worlds([[f] for f in faults], lambda plan: run_world(3, everything, plan, join_seconds=10.0))
    counts: Counter[str] = Counter()
    slowest = 0.0
    for fault, world in zip(faults, worlds, strict=True):
        if not world.happened:
            # What is said on a control link at the end comes or comes not: the others may have left before.
            assert fault.role == "control", fault
            counts["did not happen"] += 1
        elif all(error is None for error in world.errors):
            # Somebody who was sent away before it could say who it is may come again.
            assert not fault.past_handshake or fault.role == "control", fault
            assert world.results == undisturbed.results, fault
            counts["connected again" if not fault.past_handshake else "all had what they needed"] += 1
        else:
            for error in world.errors:
                assert isinstance(error, CyxtrainError), (fault, world.errors)
                assert type(error).__name__ in ("PeerLostError", "RendezvousError"), (fault, world.errors)
                assert error.rank in (fault.rank, fault.peer), (fault, world.errors)
            slowest = max(slowest, *(seconds or 0.0 for seconds in world.seconds))
            counts["named, after " + ("the handshake" if fault.past_handshake else "an end inside the handshake")] += 1
    print(f"\n{len(faults)} ends of links: {dict(counts)}; the slowest rank knew after {slowest:.2f} s")
    assert slowest < ENDS_IN_SECONDS


def test_the_end_of_a_link_names_its_ranks_on_every_rank(undisturbed):
    every = list(ends_of_links(undisturbed(1).traffic, 5))
    check_ends(random.Random(SEED).sample(every, 6), undisturbed(1))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_the_end_of_a_link_names_its_ranks_wherever_it_comes(undisturbed):
    check_ends(list(ends_of_links(undisturbed(1).traffic, 12)), undisturbed(1))


# --- bits that are flipped ------------------------------------------------------------------------------------------


def drawn_flips(count: int, seed: int, traffic: list[Traffic], *roles: str) -> list[Fault]:
    """So many flips, anywhere in what follows the handshakes: each bit of all of it is as likely as any other."""
    generator = random.Random(seed)
    flows = [flow for flow in traffic if flow.role in roles]
    streams = [flow.sent - (flow.handshake or 0) for flow in flows]
    found = []
    for flow in generator.choices(flows, streams, k=count):
        bit = generator.randrange(8 * (flow.sent - (flow.handshake or 0)))
        found.append(Fault(Flip(bit), flow.rank, flow.peer, flow.role, past_handshake=True))
    return found


NIGHTLY = [pytest.mark.nightly, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(
    ("count", "seed"), [(5, SEED), pytest.param(1500, SEED + 1, marks=NIGHTLY)], ids=["day", "night"]
)
def test_every_flipped_bit_is_found_and_the_link_named(count, seed):
    clean = run_world(3, everything, options=CHECKED)
    assert clean.errors == [None] * 3
    faults = drawn_flips(count, seed, clean.traffic, "collectives", "messages")
    worlds = run_worlds([[f] for f in faults], lambda plan: run_world(3, everything, plan, options=CHECKED))
    found: Counter[str] = Counter()
    for fault, world in zip(faults, worlds, strict=True):
        # A flip counts only once its byte was sent on, and if the rank that read it said so, of the right link.
        assert len(world.happened) == 1, (fault, world.errors)
        for error in world.errors:
            assert isinstance(error, DamagedFrameError), (fault, world.errors)
            assert error.rank == fault.rank, (fault, world.errors)
            assert f"from rank {fault.rank} to rank {fault.peer}" in str(error), (fault, error)
        found[f"{fault.role}"] += 1
    print(f"\nseed {seed}: {count} bits flipped, {sum(found.values())} found: {dict(found)}")
    assert sum(found.values()) == count


def test_a_flipped_bit_is_not_noticed_without_checksums(undisturbed):
    """Otherwise the tests above would show nothing: here a payload changes, and only the result tells."""
    flow = next(flow for flow in undisturbed(1).traffic if flow.role == "messages")
    assert flow.handshake is not None
    last = 8 * (flow.sent - flow.handshake) - 1
    world = run_world(3, everything, [Fault(Flip(last), flow.rank, flow.peer, flow.role, past_handshake=True)])
    assert len(world.happened) == 1
    assert world.errors == [None] * 3
    differing = [rank for rank in range(3) if world.results[rank] != undisturbed(1).results[rank]]
    assert differing == [flow.peer]


@pytest.mark.parametrize("role", ["collectives", "messages"])
def test_checksums_that_somebody_without_the_secret_calculates_anew_do_not_fit(role, monkeypatch):
    forging = [Fault(Forge(), 1, 0, role, past_handshake=True)]
    world = run_world(2, everything, forging, options=CHECKED)
    for error in world.errors:
        assert isinstance(error, DamagedFrameError)
        assert (error.rank, "from rank 1 to rank 0 was corrupted" in str(error)) == (1, True)
    monkeypatch.setattr(Checksums, "of", lambda self, data: xxh3_64_digest(data))
    monkeypatch.setattr(Checksums, "begin", lambda self: xxh3_64())
    monkeypatch.setattr(Checksums, "end", lambda self, begun: begun.digest())
    world = run_world(2, everything, forging, options=CHECKED)  # without a key nobody would see it
    assert world.errors == [None] * 2
    assert world.results != run_world(2, everything, options=CHECKED).results


def test_a_flipped_bit_of_what_ranks_decide_by_is_found():
    clean = run_world(2, everything, options=CHECKED)
    [flow] = [flow for flow in clean.traffic if (flow.rank, flow.role) == (1, "collectives")]
    assert flow.handshake is not None
    fault = Fault(Flip(8 * (flow.handshake - 20)), 1, 0, "collectives")  # its last field; behind it are 8 bytes of sum
    found = run_world(2, everything, [fault]).errors[0]
    assert isinstance(found, DamagedFrameError)
    assert (found.rank, "in the comparison of records" in str(found)) == (1, True)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_every_flipped_bit_of_a_handshake_is_refused():
    count, seed = 300, SEED + 1
    clean = run_world(2, everything, options=CHECKED)
    generator, faults = random.Random(seed), []
    for _ in range(count):
        flow = generator.choice(clean.traffic)
        assert flow.handshake is not None
        faults.append(Fault(Flip(generator.randrange(8 * flow.handshake)), flow.rank, flow.peer, flow.role))

    def run(plan: Faults) -> World:
        return run_world(2, everything, plan, options=CHECKED, join_seconds=5.0)

    # Where a link is refused, both wait out the time they have to join: many may wait at once, and a rank that the
    # machine is slow to start must still have sent what is to be flipped.
    plans = [[f] for f in faults]
    worlds = run_worlds(plans, run, at_once=16)
    # Where the machine was too slow for so many at once, nothing has been flipped: once more, by itself.
    worlds = [world if world.happened else run(plan) for plan, world in zip(plans, worlds, strict=True)]
    refused, counts = 0, Counter[str]()
    for fault, world in zip(faults, worlds, strict=True):
        assert world.happened, fault
        # Who said the last word may have thought that both had met, and then finds the other gone.
        for rank, error in enumerate(world.errors):
            assert isinstance(error, (RendezvousError, DamagedFrameError, PeerLostError)), (fault, world.errors)
            assert error.rank in (0, 1), (fault, world.errors)
            counts["name the other rank" if error.rank == 1 - rank else "name this rank"] += 1
        assert any(isinstance(error, (RendezvousError, DamagedFrameError)) for error in world.errors), (fault, world)
        refused += 1
    print(f"\nseed {seed}: {count} bits flipped in handshakes, {refused} refused; of the errors {dict(counts)}")


@pytest.mark.parametrize("every", [47, by_night(11)])
def test_a_flipped_bit_in_what_is_said_beside_the_ring_names_its_rank(every):
    def listening(group, scale):
        wait_until(lambda: group.group.failure.error is not None, 10.0)
        group.barrier()

    faults = [Fault(Flip(bit), 1, 0, "control", past_handshake=True) for bit in range(3, 26 * 8 * 2, every)]
    beating = RingOptions(secret="known", heartbeat_timeout_seconds=1.0)  # a sign of life ten times as often
    worlds = run_worlds([[f] for f in faults], lambda plan: run_world(2, listening, plan, options=beating))
    for fault, world in zip(faults, worlds, strict=True):
        assert len(world.happened) == 1, fault
        for error in world.errors:
            assert isinstance(error, (PeerLostError, DamagedFrameError)), (fault, world.errors)
            assert error.rank == 1, (fault, world.errors)


# --- faults of processes --------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.usefixtures("rank_server")
@pytest.mark.parametrize("what", [Stop(1.2), HoldGil(1.2)], ids=repr)
def test_a_short_stop_and_a_held_gil_change_no_bit(what):
    clean = run_ranks(3, sums_under, [], 10)
    hit = run_ranks(3, sums_under, [ProcessFault(what, rank=1, at_collective=5)], 10)
    assert [ended.kind for ended in hit] == [None] * 3, hit
    assert [ended.value[0] for ended in hit] == [ended.value[0] for ended in clean]
    assert all(ended.value[1] >= 1.1 for ended in hit), "it did not fall into a collective"


@pytest.mark.usefixtures("rank_server")
@pytest.mark.parametrize(
    "when", [*(by_night({"at_call": number}) for number in (1, 7, 40)), {"at_collective": 3}], ids=repr
)
def test_a_rank_that_is_killed_at_a_call_is_named_by_the_others(when):
    ended = run_ranks(3, sums_under, [ProcessFault(Kill(), rank=1, **when)], 30)
    assert ended[1].kind == "Killed"
    assert [(end.kind, end.error["rank"]) for end in (ended[0], ended[2])] == [("PeerLostError", 1)] * 2


@pytest.mark.usefixtures("rank_server", "pipe_of_pytorchs_stores")
def test_processes_behind_a_proxy_fare_as_threads_do(undisturbed):
    def run(*faults: Fault) -> list[Ended]:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with Proxy(3, faults) as proxy:
            return run_ranks(3, everything_behind, proxy.ports, store.port, CHECKED)

    assert [ended.value for ended in run(Fault(Slices(5)))] == undisturbed(1).results
    damaged = run(Fault(Flip(1000), 2, 0, "collectives", past_handshake=True))
    assert [(ended.kind, ended.error and ended.error["rank"]) for ended in damaged] == [("DamagedFrameError", 2)] * 3
