"""The report of several ranks: a table of ranks, a table of pairs, what is broken, and a verdict."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cyxtrain.config import DistributedConfig
from cyxtrain.doctor.store_exchange import Cause, Pair, PeerResult, RankInfo
from cyxtrain.doctor.terminal import duration, rate, table
from cyxtrain.errors import counted, shortened

if TYPE_CHECKING:
    from rich.console import RenderableType

_MAX_ALL_PAIRS = 28
"""All pairs of 8 ranks; of more only those that are broken or slow are printed."""
_MAX_PRINTED = 20
_SLOW_FACTOR = 3.0
"""How much worse than the median a slow pair is."""
_MAX_SKEW_SECONDS = 1.0
_RANK_TITLES = ("rank", "host", "listens at", "interface")
_PAIR_TITLES = ("ranks", "state", "transport", "round trip", "bandwidth", "clock skew")
_COMPARED = {
    "cyxtrain": "cyxtrain",
    "PyTorch": "torch",
    "Python": "python",
    "cores": "cores",
    "memory": "memory",
    "GPUs": "gpus",
}
_REMEDIES = {
    Cause.SILENT: "Is there a firewall between them? All ranks need TCP to each other.",
    Cause.REFUSED: "Has its process exited (look at its output), or does a firewall refuse?",
    Cause.NO_WAY: "Is the other machine up, and does this one have a route to it (ip route)?",
    Cause.STRANGER: "Does another program use that port, or a proxy change the data?",
    Cause.ABSENT: "Is it stopped, or cut off from rank 0? Look at its output.",
    Cause.BROKE: "Look at its output; a firewall may allow connections and drop their data.",
    Cause.LARGE: "Is the MTU the same on both machines and on all between them?",
}
_VERBS = {Cause.ABSENT: "got no answer from", Cause.BROKE: "lost", Cause.LARGE: "can send only short messages to"}


@dataclass(frozen=True)
class World:
    """All that rank 0 knows in the end."""

    config: DistributedConfig
    infos: dict[int, RankInfo]
    """By rank, those that registered."""
    pairs: list[Pair]
    wrong_secret: list[int] = field(default_factory=list)
    """Ranks whose secret is not rank 0's."""

    @property
    def missing(self) -> list[int]:
        """Ranks that never registered."""
        return [rank for rank in range(self.config.world_size or 1) if rank not in self.infos]

    @property
    def broken(self) -> list[Pair]:
        """The pairs that are not OK."""
        return [pair for pair in self.pairs if not pair.is_ok]

    def address(self, rank: int) -> str:
        """Return where a rank listens, with the port."""
        record = self.infos[rank].record
        return f"[{record.host}]:{record.port}" if ":" in record.host else f"{record.host}:{record.port}"


def report_of(world: World) -> list[RenderableType]:
    """Return the whole report."""
    rows = [
        (str(rank), info.machine.host, world.address(rank), info.machine.interface or "?")
        for rank, info in world.infos.items()
    ]
    parts: list[RenderableType] = [table(_RANK_TITLES, rows, right=(0,)), *_notes(world), *_pairs(world)]
    return [*parts, *faults_of(world), verdict(world)]


def is_healthy(world: World) -> bool:
    """Return whether all ranks can train together."""
    return not faults_of(world)


def faults_of(world: World) -> list[str]:
    """Return what is broken and what to do, one paragraph each."""
    config = world.config
    missing = [
        f"rank {rank} did not register within {config.timeout_ms / 1000:g} s. Was it started, with RANK={rank} "
        f"WORLD_SIZE={config.world_size} MASTER_ADDR={config.master_addr} MASTER_PORT={config.master_port}, and can "
        "its machine reach that port? Look at its output."
        for rank in world.missing
    ]
    found = [*missing, *_incompatible(world)]
    for pair in world.broken[:_MAX_PRINTED]:
        found += _faults_of_pair(world, pair)
    if len(world.broken) > _MAX_PRINTED:
        found.append(f"and {counted(len(world.broken) - _MAX_PRINTED, 'more broken pair')}")
    return found


def verdict(world: World) -> str:
    """Return the last line."""
    broken, count = world.broken, len(world.pairs)
    if broken:
        well = count - len(broken)
        others = "no pair is OK" if not well else "the other pair is OK" if well == 1 else f"the other {well} are OK"
        text = f"broken: {shortened(f'{pair.low} - {pair.high}' for pair in broken)}; {others}"
    else:
        text = f"all {count} pairs are OK" if count > 1 else "the pair is OK" if count else "there is no pair to test"
    if world.missing:
        text += f"; missing: {', '.join(f'rank {rank}' for rank in world.missing)}"
    elif not broken and faults_of(world):
        text += ", but the ranks cannot join: see above"
    return text


def _notes(world: World) -> list[str]:
    """Return information that is no fault."""
    common, found = [], []
    for what, name in _COMPARED.items():
        ranks: dict[str, list[str]] = {}
        for rank, info in world.infos.items():
            ranks.setdefault(str(getattr(info.machine, name)), []).append(str(rank))
        if len(ranks) > 1:
            each = "; ".join(
                f"{value} on rank{'s' if len(names) > 1 else ''} {', '.join(names)}" for value, names in ranks.items()
            )
            found.append(f"note: {what} differs: {each}")
        else:
            common.append(f"{what} {next(iter(ranks))}")
    if common:
        found.insert(0, f"on all ranks: {', '.join(common)}")
    skews = [(abs(result.skew_seconds), pair) for pair in world.pairs if (result := pair.measured) is not None]
    skew, pair = max(skews, default=(0.0, None), key=lambda each: each[0])
    if pair is not None and skew > _MAX_SKEW_SECONDS:
        found.append(
            f"note: the clocks of rank {pair.low} and rank {pair.high} are {duration(skew)} apart. Training works; "
            "times in logs do not match. NTP sets clocks."
        )
    return found


def _pairs(world: World) -> list[RenderableType]:
    """Return a table of all pairs, or, if they are many, a summary and those that are broken or slow."""
    shown = world.pairs
    found: list[RenderableType] = []
    if len(shown) > _MAX_ALL_PAIRS:
        outstanding = [*world.broken, *_slow(world.pairs)]
        shown = outstanding[:_MAX_PRINTED]
        found += _summary(world)
        if len(outstanding) > len(shown):
            found.append(f"the first {len(shown)} of {len(outstanding)} pairs that are broken or slow:")
    rows = []
    for pair in shown:
        result, figures = pair.measured, ("", "", "")
        if result is not None:
            skew = f"{abs(result.skew_seconds) * 1e3:.1f} ms"
            figures = (duration(result.round_trip_seconds), rate(result.bytes_per_second), skew)
        rows.append((f"{pair.low} - {pair.high}", "ok" if pair.is_ok else "BROKEN", pair.transport, *figures))
    return [*found, table(_PAIR_TITLES, rows, right=(3, 4, 5))] if rows else found


def _summary(world: World) -> list[str]:
    lines = [f"{counted(len(world.pairs), 'pair')}, of which {len(world.pairs) - len(world.broken)} are OK"]
    results = [result for pair in world.pairs if (result := pair.measured) is not None]
    if results:
        fast, slow = (choose(results, key=lambda result: result.round_trip_seconds) for choose in (min, max))
        low, high = (choose(results, key=lambda result: result.bytes_per_second) for choose in (min, max))
        for name, best, worst, at in (
            ("round trip", duration(fast.round_trip_seconds), duration(slow.round_trip_seconds), slow),
            ("bandwidth", rate(high.bytes_per_second), rate(low.bytes_per_second), low),
        ):
            lines.append(f"{name}: {best} to {worst} (ranks {min(at.rank, at.peer)} - {max(at.rank, at.peer)})")
    return lines


def _slow(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the pairs that are OK and much slower than the median."""
    results = [result for pair in pairs if (result := pair.measured) is not None]
    if not results:
        return []
    trip = _SLOW_FACTOR * statistics.median(result.round_trip_seconds for result in results)
    speed = statistics.median(result.bytes_per_second for result in results) / _SLOW_FACTOR

    def is_slow(result: PeerResult | None) -> bool:
        return result is not None and (result.round_trip_seconds > trip or result.bytes_per_second < speed)

    return [pair for pair in pairs if pair.is_ok and is_slow(pair.measured)]


def _incompatible(world: World) -> list[str]:
    """Return why ranks that reach each other cannot join."""
    first = world.infos[0].record
    found = [reason for rank, info in world.infos.items() if (reason := info.record.why_incompatible(rank, first, 0))]
    found += [
        f"rank {rank} has another secret than rank 0. Set CYXTRAIN_SECRET to the same value on every rank."
        for rank in world.wrong_secret
    ]
    requested = first.transport
    for pair in world.pairs:
        is_local = any(result.transport for result in pair.results)
        if requested == "unix" and pair.is_ok and is_local and pair.transport != "unix":
            found.append(
                f"CYXTRAIN_TRANSPORT={requested}, but between rank {pair.low} and rank {pair.high} only "
                f"{pair.transport} works. Unset CYXTRAIN_TRANSPORT: the ring then uses the fastest that works."
            )
    return found


def _faults_of_pair(world: World, pair: Pair) -> list[str]:
    found = [_fault(world, result) for result in pair.results if result.cause]
    silent = {pair.low, pair.high} - {result.rank for result in pair.results}
    return found or [
        f"rank {rank} reported nothing about rank {pair.low + pair.high - rank}: its process has exited or is "
        "suspended. Look at its output."
        for rank in sorted(silent)
    ]


def _fault(world: World, result: PeerResult) -> str:
    cause, theirs, ours = Cause(result.cause), world.infos[result.peer].record, world.infos[result.rank].record
    remedy = _REMEDIES[cause]
    if theirs.host.startswith("127.") and theirs.machine != ours.machine:
        remedy = (
            f"{theirs.host} is reachable only from its own machine: set MASTER_ADDR to an address or host name of "
            "rank 0 that all machines reach."
        )
    return (
        f"rank {result.rank} ({ours.host}) {_VERBS.get(cause, 'cannot reach')} rank {result.peer} "
        f"({world.address(result.peer)}): {result.detail}. {remedy}"
    )
