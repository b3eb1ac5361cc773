"""From a process that was started somehow to a report of what is wrong: the doctor's way, step by step.

It joins nothing: it must be able to say what is wrong where joining does not work.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import secrets
from collections.abc import Iterator

import torch.distributed as dist

from cyxtrain.config import DistributedConfig, RingOptions
from cyxtrain.doctor import local_checks, pairs, report, store_exchange
from cyxtrain.doctor.findings import Cause, Pair, View
from cyxtrain.doctor.machine_facts import this_machine
from cyxtrain.doctor.pair_schedule import rounds
from cyxtrain.errors import RendezvousError, counted
from cyxtrain.ring import Deadline, Listeners, StoreClient, StoreLostError, listen, own_record, parse_record
from cyxtrain.world.join import forget_store, open_world_store

_KEYS = "/cyxtrain/doctor"
"""Where the store has what `store_exchange.py` lists."""
_READING_SECONDS = 10.0
"""For rank 0 to read everything, when all pairs have been tried."""
_LEAVING_SECONDS = 2.0


def examine(config: DistributedConfig) -> int:
    """Says what works here, and between the ranks of a world; all that is wrong, and what to do.

    Alone it looks at this machine. With several ranks each says where it is at the store, every pair is tried over
    plain TCP, both ways, one pair per rank at a time, and rank 0 prints what all have found.

    Cost: of each pair two connections, 50 round trips and up to 8 MiB each way; a tenth of a second where it is well.

    Args:
        config: Complete. Rank 0 waits `timeout_ms` for the others.

    Returns:
        0: healthy; 1: something is broken. Ranks other than 0 return 0 once rank 0 knows what they found.

    Raises:
        RendezvousError: This rank cannot take part: rank 0 cannot be reached or has ended, its port is in use.
        ConfigError: The environment says what cannot be.
    """
    if config.world_size == 1:
        facts = local_checks.facts_alone(config)
        _show(local_checks.lines_of(facts))
        return 0 if local_checks.is_healthy(facts) else 1
    with _silent_ring():
        return _examine_world(config)


def _examine_world(config: DistributedConfig) -> int:
    rank, world_size = config.rank or 0, config.world_size or 1
    options = RingOptions.from_environment()
    deadline = Deadline(config.timeout_ms / 1000)
    if rank == 0:
        where = f"{config.master_addr}:{config.master_port}"
        _show([f"{counted(world_size, 'rank')} meet at {where}, within {config.timeout_ms / 1000:g} s", ""])
    store = dist.PrefixStore(
        _KEYS, open_world_store(config, None, config.timeout_ms / 1000)
    )  # it must find secrets that differ
    listening = None
    try:
        listening = listen(rank, store, options.transport)
        roster = _meet(store, config, listening, options, deadline)
        world = _visit_all(store, config, roster, listening, options)
    finally:
        if listening is not None:
            listening.close()
        forget_store()
    if world is None:
        return 0
    _show(report.lines_of(world))
    return 0 if report.is_healthy(world) else 1


def _meet(
    store: dist.Store, config: DistributedConfig, listening: Listeners, options: RingOptions, deadline: Deadline
) -> store_exchange.Roster:
    """Says that this rank is there, and returns who else is."""
    rank, world_size = config.rank or 0, config.world_size or 1
    board = StoreClient(store, f"rank {rank}", store_exchange.AnswerDeadline())
    try:
        entry = own_record(rank, world_size, listening, options)
        store_exchange.arrive(board, rank, entry, this_machine(entry.host))
        if rank:
            return store_exchange.hear_roster(board, rank, world_size, store_exchange.others_patience(config))
        roster = store_exchange.Roster(
            store_exchange.await_all(board, world_size, deadline), world_size, secrets.token_hex(32)
        )
        store_exchange.call_roster(board, roster)
        return roster
    finally:
        board.close()


def _visit_all(
    store: dist.Store,
    config: DistributedConfig,
    roster: store_exchange.Roster,
    listening: Listeners,
    options: RingOptions,
) -> report.World | None:
    """Tries all pairs of this rank; returns what all ranks have found, on rank 0."""
    rank = config.rank or 0
    limit = Deadline((len(rounds(roster.ranks)) + 1) * pairs.ROUND_SECONDS + _READING_SECONDS)
    board = StoreClient(store, f"rank {rank}", store_exchange.AnswerDeadline())
    visits = None
    try:
        arrivals = store_exchange.read_arrivals(board, roster.ranks)
        visits = pairs.StreamPasses(board, rank, roster, arrivals, listening)
        visits.make()
        proof = _proof(options, roster)
        board.set(f"proof/{rank}", proof)
        board.set(f"done/{rank}", "yes")
        if rank:
            _leave(board, visits, rank, limit)
            return None
        for other in roster.ranks[1:]:
            visits.await_word(f"done/{other}", other, limit)
        found = [_read_pair(board, low, high) for each in rounds(roster.ranks) for low, high in each]
        strangers = [other for other in roster.ranks if _knows_another(board, other, proof)]
        _let_go(board, visits, roster)
        return report.World(config, arrivals, sorted(found, key=lambda pair: (pair.low, pair.high)), strangers)
    finally:
        if visits is not None:
            visits.close()
        board.close()


def _leave(board: StoreClient, visits: pairs.StreamPasses, rank: int, limit: Deadline) -> None:
    """Waits until rank 0, with which the store may go, knows all.

    Raises:
        RendezvousError: Rank 0 has ended.
    """
    patience = Deadline(limit.left() + _READING_SECONDS)
    if visits.await_word("over", 0, patience) is not Cause.NONE:
        raise RendezvousError(
            f"rank {rank} has tried its pairs, and rank 0, which shows what all have found, has ended or does not "
            "answer. Look at its output.",
            rank=0,
        )
    with contextlib.suppress(StoreLostError):  # rank 0 does not wait for ever
        board.set(f"left/{rank}", "yes")


def _let_go(board: StoreClient, visits: pairs.StreamPasses, roster: store_exchange.Roster) -> None:
    """Lets the others go, and keeps the store until they have."""
    board.set("over", "yes")
    patience = Deadline(_LEAVING_SECONDS)
    for other in roster.ranks[1:]:
        visits.await_word(f"left/{other}", other, patience)


def _read_pair(board: StoreClient, low: int, high: int) -> Pair:
    keys = (f"view/{low}/{high}", f"view/{high}/{low}")
    texts = [text for text in map(board.get, keys) if text is not None]
    return Pair(low, high, tuple(parse_record(View, text) for text in texts))


def _proof(options: RingOptions, roster: store_exchange.Roster) -> str:
    """Returns what only who knows the secret can say; empty where there is none."""
    if options.secret is None:
        return ""
    secret = options.secret.encode("utf-8", "surrogateescape")
    return hmac.new(secret, bytes.fromhex(roster.token), hashlib.sha256).hexdigest()


def _knows_another(board: StoreClient, rank: int, proof: str) -> bool:
    """Returns whether a rank knows another secret than rank 0; one that has none is told so elsewhere."""
    theirs = (board.get(f"proof/{rank}") or b"").decode("ascii", "replace")
    return bool(theirs) and bool(proof) and theirs != proof


def _show(lines: list[str]) -> None:
    print("\n".join(lines), flush=True)


@contextlib.contextmanager
def _silent_ring() -> Iterator[None]:
    """Keeps the ring's log of who was turned away off the screen: the doctor itself knocks at doors."""
    log = logging.getLogger("cyxtrain.ring")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
