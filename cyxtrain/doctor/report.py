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

# All pairs of 8 ranks; of more only those that are broken or slow are printed.
_MAX_ALL_PAIRS = 28
_MAX_PRINTED = 20
# How much worse than the median a slow pair is.
_SLOW_FACTOR = 3.0
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
        host = f"[{record.host}]" if ":" in record.host else record.host
        return f"{host}:{record.port}"


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
    text = _verdict_of_pairs(world)
    if world.missing:
        text += f"; missing: {', '.join(f'rank {rank}' for rank in world.missing)}"
    elif not world.broken and faults_of(world):
        text += ", but the ranks cannot join: see above"
    return text


def _verdict_of_pairs(world: World) -> str:
    num_broken = len(world.broken)
    num_ok = len(world.pairs) - num_broken
    if num_broken > 0:
        others = {0: "no pair is OK", 1: "the other pair is OK"}.get(num_ok, f"the other {num_ok} are OK")
        return f"broken: {shortened(f'{pair.low} - {pair.high}' for pair in world.broken)}; {others}"
    return {0: "there is no pair to test", 1: "the pair is OK"}.get(num_ok, f"all {num_ok} pairs are OK")


def _notes(world: World) -> list[str]:
    """Return how the ranks' machines compare, and clocks that are far apart: information, not faults."""
    common = []
    found = []
    for title, attribute in _COMPARED.items():
        ranks: dict[str, list[str]] = {}
        for rank, info in world.infos.items():
            ranks.setdefault(str(getattr(info.machine, attribute)), []).append(str(rank))
        if len(ranks) > 1:
            values = [f"{value} on {_named_ranks(numbers)}" for value, numbers in ranks.items()]
            found.append(f"note: {title} differs: {'; '.join(values)}")
        else:
            common.append(f"{title} {next(iter(ranks))}")
    if common:
        found.insert(0, f"on all ranks: {', '.join(common)}")
    return [*found, *_clocks_apart(world)]


def _named_ranks(numbers: Sequence[str]) -> str:
    noun = "ranks" if len(numbers) > 1 else "rank"
    return f"{noun} {', '.join(numbers)}"


def _clocks_apart(world: World) -> list[str]:
    """Return a note of the two ranks whose clocks differ most, if they differ much."""
    result = max(_measurements(world.pairs), key=lambda result: abs(result.skew_seconds), default=None)
    if result is None or abs(result.skew_seconds) <= _MAX_SKEW_SECONDS:
        return []
    low, high = sorted((result.rank, result.peer))
    skew = duration(abs(result.skew_seconds))
    return [
        f"note: the clocks of rank {low} and rank {high} are {skew} apart. Training works; times in logs do not match. "
        "NTP sets clocks."
    ]


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
        state = "ok" if pair.is_ok else "BROKEN"
        figures = ("", "", "")
        result = pair.measured
        if result is not None:
            skew = f"{abs(result.skew_seconds) * 1e3:.1f} ms"
            figures = (duration(result.round_trip_seconds), rate(result.bytes_per_second), skew)
        rows.append((f"{pair.low} - {pair.high}", state, pair.transport, *figures))
    if rows:
        found.append(table(_PAIR_TITLES, rows, right=(3, 4, 5)))
    return found


def _summary(world: World) -> list[str]:
    lines = [f"{counted(len(world.pairs), 'pair')}, of which {len(world.pairs) - len(world.broken)} are OK"]
    results = _measurements(world.pairs)
    if results:
        shortest = min(result.round_trip_seconds for result in results)
        slow = max(results, key=lambda result: result.round_trip_seconds)
        lines.append(f"round trip: {duration(shortest)} to {duration(slow.round_trip_seconds)} ({_ranks_of(slow)})")
        highest = max(result.bytes_per_second for result in results)
        narrow = min(results, key=lambda result: result.bytes_per_second)
        lines.append(f"bandwidth: {rate(highest)} to {rate(narrow.bytes_per_second)} ({_ranks_of(narrow)})")
    return lines


def _measurements(pairs: Sequence[Pair]) -> list[PeerResult]:
    return [pair.measured for pair in pairs if pair.measured is not None]


def _ranks_of(result: PeerResult) -> str:
    low, high = sorted((result.rank, result.peer))
    return f"ranks {low} - {high}"


def _slow(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the pairs that are OK and much slower than the median."""
    results = _measurements(pairs)
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
    reasons = [info.record.why_incompatible(rank, first, 0) for rank, info in world.infos.items()]
    found = [reason for reason in reasons if reason]
    found += [
        f"rank {rank} and rank 0 have different secrets. Set CYXTRAIN_SECRET to the same value on every rank."
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
    cause = Cause(result.cause)
    theirs = world.infos[result.peer].record
    ours = world.infos[result.rank].record
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
