"""`examine`: from a process, however it was started, to a report of what is broken.

It does not join the ranks: it must be able to tell what is wrong when joining fails.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator

import torch.distributed as dist

from cyxtrain.config import DistributedConfig, RingOptions
from cyxtrain.doctor import local_checks, pairs, report, store_exchange
from cyxtrain.doctor.store_exchange import Cause, Pair, PeerResult
from cyxtrain.doctor.terminal import print_report
from cyxtrain.errors import RendezvousError, counted
from cyxtrain.ring import Deadline, RankProbe, StoreClient, StoreLostError
from cyxtrain.world.join import forget_store, open_world_store

# Prefix of the keys that `store_exchange.py` lists.
_KEYS = "/cyxtrain/doctor"
# For each answer of the store.
_ANSWER_SECONDS = 10.0
# For rank 0 to read all results.
_READING_SECONDS = 10.0
# How much longer the other ranks wait for rank 0 than it waits for them.
_GRACE_SECONDS = 5.0
_LEAVING_SECONDS = 2.0


def examine(config: DistributedConfig) -> int:
    """Print what works on this machine and between ranks, and how to fix the rest; return the exit code.

    A single process checks its machine. Several ranks register at the store, test every pair over plain TCP in both
    directions, one pair per rank at a time, and rank 0, which waits `timeout_ms` for the others, prints all results;
    the others return 0 once it has read theirs. Raises RendezvousError if rank 0 cannot be reached or has exited,
    its port is in use, or a process of another world tries to join.

    Cost: for each pair two connections, 50 round trips and up to 8 MiB in each direction; about a tenth of a second.
    """
    if config.world_size == 1:
        checks = local_checks.run_checks(config)
        print_report(local_checks.report_of(checks), is_labelled=False)
        return 0 if local_checks.is_healthy(checks) else 1
    with _ring_warnings_off():
        world = _examine_world(config)
    if world is None:
        return 0
    print_report(report.report_of(world))
    return 0 if report.is_healthy(world) else 1


def _examine_world(config: DistributedConfig) -> report.World | None:
    """Return what all ranks have found, on rank 0."""
    rank = config.rank or 0
    world_size = config.world_size or 1
    seconds = config.timeout_ms / 1000
    options = RingOptions.from_environment()
    deadline = Deadline(seconds)
    if rank == 0:
        address = f"{config.master_addr}:{config.master_port}"
        print(f"waiting for {counted(world_size, 'rank')} at {address}, for at most {seconds:g} s\n", flush=True)
    # Without the run's secret: the doctor must find secrets that differ.
    store = dist.PrefixStore(_KEYS, open_world_store(config, None, seconds))
    answer_deadline = store_exchange.AnswerDeadline(_ANSWER_SECONDS)
    client = StoreClient(store, f"rank {rank}", answer_deadline)
    client_with_secret = StoreClient(store, f"rank {rank}", answer_deadline, options.secret_bytes)
    with contextlib.ExitStack() as stack:
        stack.callback(forget_store)
        probe = stack.enter_context(contextlib.closing(RankProbe(store, rank, world_size, options)))
        store_exchange.register(client, rank, probe.record, local_checks.this_machine(probe.record.host))
        if rank == 0:
            roster = store_exchange.publish_roster(client, world_size, deadline)
        else:
            roster = store_exchange.read_roster(client, rank, Deadline(seconds + _GRACE_SECONDS))
        num_rounds = len(pairs.rounds(roster.ranks)) + 1  # a rank may be late by one
        limit = Deadline(num_rounds * pairs.ROUND_SECONDS + _READING_SECONDS)
        infos = store_exchange.read_infos(client, roster.ranks)
        tests = pairs.PairTests(client, rank, roster, infos, probe)
        tests.run()
        client_with_secret.set(f"done/{rank}", roster.token)
        if rank == 0:
            return _collect(config, client, client_with_secret, tests, limit)
        _wait_for_rank_0(client, tests, rank, limit)
        return None


def _collect(
    config: DistributedConfig,
    client: StoreClient,
    client_with_secret: StoreClient,
    tests: pairs.PairTests,
    limit: Deadline,
) -> report.World:
    """Return all ranks' results on rank 0, and keep the store open until the others have left."""
    ranks = tests.roster.ranks
    for other in ranks[1:]:
        tests.wait_for_key(f"done/{other}", other, limit)
    found = []
    for low, high in itertools.combinations(ranks, 2):
        keys = (f"result/{low}/{high}", f"result/{high}/{low}")
        results = [client.read(PeerResult, key) for key in keys if client.has(key)]
        found.append(Pair(low, high, tuple(results)))
    wrong_secret = []
    for other, info in tests.infos.items():
        done = f"done/{other}"
        # The client with rank 0's secret does not see a value that was proved with a different one.
        if info.record.has_secret and client.has(done) and not client_with_secret.has(done):
            wrong_secret.append(other)
    client.set("over", "yes")
    patience = Deadline(_LEAVING_SECONDS)
    for other in ranks[1:]:
        tests.wait_for_key(f"left/{other}", other, patience)
    return report.World(config, tests.infos, found, wrong_secret)


def _wait_for_rank_0(client: StoreClient, tests: pairs.PairTests, rank: int, limit: Deadline) -> None:
    """Wait until rank 0, whose store may end with it, has read everything; raise if it has exited."""
    if tests.wait_for_key("over", 0, Deadline(limit.left() + _READING_SECONDS)) is not Cause.NONE:
        raise RendezvousError(
            f"rank {rank} has tested its pairs, and rank 0, which prints the results, has exited or does not answer. "
            "Look at its output.",
            rank=0,
        )
    with contextlib.suppress(StoreLostError):  # rank 0 waits only for a while
        client.set(f"left/{rank}", "yes")


@contextlib.contextmanager
def _ring_warnings_off() -> Iterator[None]:
    """Hide the ring's warnings about refused connections: the doctor's own tests cause them."""
    log = logging.getLogger("cyxtrain.ring")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
