"""What was found between ranks, for people: a line per rank, a line per pair, what is wrong, and a verdict."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cyxtrain.config import DistributedConfig
from cyxtrain.doctor.findings import Arrival, Cause, Pair, View
from cyxtrain.doctor.machine_facts import Machine
from cyxtrain.errors import counted
from cyxtrain.progress.tables import aligned, duration, rate, truncated, wrapped
from cyxtrain.ring import why_incompatible

_SHOWN_PAIRS = 28
"""As many as 8 ranks have; of more only what stands out is shown."""
_SHOWN_AT_MOST = 20
_HOST_CHARACTERS = 16
_GPU_CHARACTERS = 20
_SLOW_TIMES = 3.0
"""How much worse than the middle of all pairs a pair is that is shown as slow."""
_LATE_SECONDS = 1.0
_PAIR_TITLES = ("ranks", "hosts", "", "way", "round trip", "bandwidth", "clock skew")
_RANK_TITLES = ("rank", "host", "listens at", "interface", "cores", "memory", "GPUs")
_VERSIONS: dict[str, Callable[[Machine], str]] = {
    "cyxtrain": lambda machine: machine.cyxtrain,
    "PyTorch": lambda machine: machine.torch,
    "Python": lambda machine: machine.python,
}
_REMEDIES = {
    Cause.SILENT: "Is a firewall between them? All ranks need TCP to each other.",
    Cause.REFUSED: "Has its process ended (look at its output), or does a firewall refuse?",
    Cause.NO_WAY: "Is the other machine up, and do the routes of this one (ip route) lead there?",
    Cause.STRANGER: "Does another program use that port, or change what goes through?",
    Cause.ABSENT: "Is it stopped, or cut off from rank 0? Look at its output.",
    Cause.BROKE: "Look at its output; a firewall may let in connections, and not what they carry.",
    Cause.LARGE: "Is the MTU the same on both machines, and on all between them?",
}
_VERBS = {Cause.ABSENT: "waited in vain for", Cause.BROKE: "lost", Cause.LARGE: "barely reaches"}


@dataclass(frozen=True)
class World:
    """All that rank 0 knows in the end.

    Attributes:
        config: Of rank 0, complete.
        arrivals: By rank, who came.
        pairs: Of those who came.
        strangers: Ranks that know another secret than rank 0.
    """

    config: DistributedConfig
    arrivals: dict[int, Arrival]
    pairs: list[Pair]
    strangers: list[int] = field(default_factory=list)

    @property
    def missing(self) -> list[int]:
        """Who never came."""
        return [rank for rank in range(self.config.world_size or 1) if rank not in self.arrivals]

    @property
    def broken(self) -> list[Pair]:
        """The pairs that are not well."""
        return [pair for pair in self.pairs if not pair.is_well]

    def host(self, rank: int) -> str:
        """Returns the name of a rank's machine, short enough for a table."""
        return truncated(self.arrivals[rank].machine.host, _HOST_CHARACTERS)

    def address(self, rank: int, *, port: bool = False) -> str:
        """Returns where a rank listens."""
        entry = self.arrivals[rank].entry
        host = f"[{entry.host}]" if port and ":" in entry.host else entry.host
        return f"{host}:{entry.port}" if port else host


def lines_of(world: World) -> list[str]:
    """Returns the whole report."""
    parts = [_ranks(world), _notes(world), _pairs(world)]
    faults = faults_of(world)
    found = [line for part in parts if part for line in (*part, "")]
    for fault in faults:
        found += wrapped(fault, "  ")
    return [*found, *([""] if faults else []), *wrapped(verdict(world), "  ")]


def is_healthy(world: World) -> bool:
    """Returns whether all ranks can train together."""
    return not faults_of(world)


def faults_of(world: World) -> list[str]:
    """Returns what is wrong, a sentence or two each, with what to do."""
    return [*_missing(world), *_misfits(world), *_broken(world)]


def verdict(world: World) -> str:
    """Returns the last line."""
    broken, missing = world.broken, world.missing
    if broken:
        names = ", ".join(f"{pair.low} - {pair.high}" for pair in broken[:_SHOWN_AT_MOST])
        more = f" and {len(broken) - _SHOWN_AT_MOST} more" if len(broken) > _SHOWN_AT_MOST else ""
        well = len(world.pairs) - len(broken)
        others = "no pair is well" if not well else "the other pair is well" if well == 1 else ""
        text = f"broken: {names}{more}; {others or f'the other {well} pairs are well'}"
    else:
        text = f"all {counted(len(world.pairs), 'pair')} are well" if len(world.pairs) > 1 else "the pair is well"
        text = text if world.pairs else "there is no pair to try"
    if missing:
        text += f"; missing: {', '.join(f'rank {rank}' for rank in missing)}"
    elif not broken and faults_of(world):
        text += ", and the ranks do not fit together: see above"
    return text


def _ranks(world: World) -> list[str]:
    rows: list[Sequence[str]] = [_RANK_TITLES]
    for rank, arrival in world.arrivals.items():
        machine = arrival.machine
        found = (str(rank), world.host(rank), world.address(rank, port=True), machine.interface or "?")
        rows.append((*found, str(machine.cores), machine.memory, truncated(machine.gpus, _GPU_CHARACTERS)))
    return aligned(rows, right=(0, 4, 5))


def _notes(world: World) -> list[str]:
    """Returns what is no fault, and worth knowing."""
    common, found = [], []
    for what, version in _VERSIONS.items():
        versions: dict[str, list[str]] = {}
        for rank, arrival in world.arrivals.items():
            versions.setdefault(version(arrival.machine), []).append(str(rank))
        if len(versions) > 1:
            each = "; ".join(f"{name} on {_named(ranks)}" for name, ranks in versions.items())
            found.append(f"note: {what} differs: {each}. Install the same everywhere.")
        else:
            common.append(f"{what} {next(iter(versions))}")
    if common:
        found.insert(0, f"on all ranks: {', '.join(common)}")
    skews = [(abs(view.skew_seconds), pair) for pair in world.pairs if (view := pair.measured) is not None]
    worst = max(skews, default=None, key=lambda skew: skew[0])
    if worst is not None and worst[0] > _LATE_SECONDS:
        pair = worst[1]
        found.append(
            f"note: the clocks of rank {pair.low} and rank {pair.high} are {duration(worst[0])} apart. Training does "
            "not mind; whoever compares their logs does. NTP sets clocks."
        )
    return [line for note in found for line in wrapped(note, "  ")]


def _named(ranks: list[str]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(ranks)}"


def _pairs(world: World) -> list[str]:
    if not world.pairs:
        return []
    shown = world.pairs
    before: list[str] = []
    if len(world.pairs) > _SHOWN_PAIRS:
        before = [*_summary(world), ""]
        outstanding = [*world.broken, *_slow(world.pairs)]
        shown = outstanding[:_SHOWN_AT_MOST]
        if len(outstanding) > len(shown):
            before.insert(-1, f"of {len(outstanding)} pairs that are broken or slow the first {len(shown)}:")
    if not shown:
        return before[:-1]
    return [*before, *aligned([_PAIR_TITLES, *(_row(world, pair) for pair in shown)], right=(4, 5, 6))]


def _row(world: World, pair: Pair) -> Sequence[str]:
    view, state = pair.measured, "ok" if pair.is_well else "BROKEN"
    figures = ["", "", ""]
    if view is not None:
        skew = f"{abs(view.skew_seconds) * 1e3:.1f} ms"
        figures = [duration(view.round_trip_seconds), rate(view.bytes_per_second), skew]
    hosts = f"{world.host(pair.low)} - {world.host(pair.high)}"
    return (f"{pair.low} - {pair.high}", hosts, state, pair.transport, *figures)


def _summary(world: World) -> list[str]:
    """Returns what all pairs that were measured have in common."""
    found = [(view, pair) for pair in world.pairs if (view := pair.measured) is not None]
    lines = [f"{counted(len(world.pairs), 'pair')}, of which {len(world.pairs) - len(world.broken)} are well"]
    if not found:
        return lines
    trips = sorted(found, key=lambda each: each[0].round_trip_seconds)
    rates = sorted(found, key=lambda each: -each[0].bytes_per_second)
    (best, _), (worst, last) = trips[0], trips[-1]
    lines.append(
        f"  round trip  {duration(best.round_trip_seconds)} to {duration(worst.round_trip_seconds)} "
        f"(ranks {last.low} - {last.high})"
    )
    (best, _), (worst, last) = rates[0], rates[-1]
    lines.append(
        f"  bandwidth   {rate(best.bytes_per_second)} down to {rate(worst.bytes_per_second)} "
        f"(ranks {last.low} - {last.high})"
    )
    return lines


def _slow(pairs: list[Pair]) -> list[Pair]:
    """Returns the pairs that are well and much slower than most."""
    views = [view for pair in pairs if (view := pair.measured) is not None]
    if not views:
        return []
    trip = statistics.median(view.round_trip_seconds for view in views)
    usual = statistics.median(view.bytes_per_second for view in views)

    def is_slow(view: View | None) -> bool:
        return view is not None and (
            view.round_trip_seconds > _SLOW_TIMES * trip or view.bytes_per_second < usual / _SLOW_TIMES
        )

    return [pair for pair in pairs if pair.is_well and is_slow(pair.measured)]


def _missing(world: World) -> list[str]:
    config = world.config
    return [
        f"rank {rank} did not come within {config.timeout_ms / 1000:g} s. Was it started, with RANK={rank} "
        f"WORLD_SIZE={config.world_size} MASTER_ADDR={config.master_addr} MASTER_PORT={config.master_port}, and can "
        "its machine reach that port? Look at its output."
        for rank in world.missing
    ]


def _misfits(world: World) -> list[str]:
    """Returns why ranks that reach each other cannot join."""
    first = world.arrivals[0].entry
    reasons = [why_incompatible(rank, arrival.entry, 0, first) for rank, arrival in world.arrivals.items()]
    found = [reason for reason in reasons if reason]
    found += [
        f"rank {rank} knows another secret than rank 0. Set CYXTRAIN_SECRET to the same value on every rank."
        for rank in world.strangers
    ]
    asked = first.transport
    for pair in world.pairs:
        is_near = any(view.transport for view in pair.views)
        if asked in ("cma", "unix") and pair.is_well and is_near and pair.transport not in (asked, "cma"):
            found.append(
                f"CYXTRAIN_TRANSPORT={asked}, and between rank {pair.low} and rank {pair.high} there is only "
                f"{pair.transport}. Leave CYXTRAIN_TRANSPORT away: then the ring takes what there is."
            )
    return found


def _broken(world: World) -> list[str]:
    broken = world.broken
    found = [sentence for pair in broken[:_SHOWN_AT_MOST] for sentence in _faults_of_pair(world, pair)]
    if len(broken) > _SHOWN_AT_MOST:
        found.append(f"and {counted(len(broken) - _SHOWN_AT_MOST, 'pair')} more")
    return found


def _faults_of_pair(world: World, pair: Pair) -> list[str]:
    found = [_fault(world, view) for view in pair.views if view.cause]
    silent = {pair.low, pair.high} - {view.rank for view in pair.views}
    if not found:
        found = [
            f"rank {rank} has said nothing of rank {pair.low + pair.high - rank}: its process has ended, or is "
            "stopped. Look at its output."
            for rank in sorted(silent)
        ]
    return found


def _fault(world: World, view: View) -> str:
    cause = Cause(view.cause)
    who = f"rank {view.rank} ({world.address(view.rank)})"
    whom = f"rank {view.peer} ({world.address(view.peer, port=True)})"
    return f"{who} {_VERBS.get(cause, 'cannot reach')} {whom}: {view.detail}. {_remedy(world, view, cause)}"


def _remedy(world: World, view: View, cause: Cause) -> str:
    theirs, ours = world.arrivals[view.peer].entry, world.arrivals[view.rank].entry
    if theirs.host.startswith("127.") and theirs.machine != ours.machine:
        return (
            f"Only its own machine reaches {theirs.host}: set MASTER_ADDR to an address or host name of rank 0 that "
            "all machines reach."
        )
    return _REMEDIES[cause]
