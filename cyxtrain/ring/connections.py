"""Links, mailbox, monitor and executor of a group of several ranks."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence

from cyxtrain.config import RingOptions
from cyxtrain.ring.collective_thread import is_worth_it
from cyxtrain.ring.executor import Executor
from cyxtrain.ring.messages import Mailbox
from cyxtrain.ring.monitoring.heartbeat import Heartbeat
from cyxtrain.ring.monitoring.monitor import PeerMonitor
from cyxtrain.ring.rendezvous.handshake import Role
from cyxtrain.ring.rendezvous.rendezvous import RendezvousResult
from cyxtrain.ring.schedules.algorithms import FEW_RANKS
from cyxtrain.ring.schedules.kernels import Scratch
from cyxtrain.ring.schedules.selector import SEGMENT_BYTES, AlgorithmSelector
from cyxtrain.ring.wire.checksums import Checksums
from cyxtrain.ring.wire.link import Link
from cyxtrain.ring.wire.peer_read import PeerMemory


class Connections:
    """Links, mailbox, monitor and executor of a group of several ranks; it owns the `result` of the rendezvous.

    `describe` returns what this rank is doing.
    """

    def __init__(
        self,
        result: RendezvousResult,
        rank: int,
        global_ranks: Sequence[int],
        options: RingOptions,
        describe: Callable[[], str],
    ) -> None:
        acceptor, selector, checksums = result.acceptor, result.selector, result.checksums
        assert acceptor is not None
        assert selector is not None
        assert checksums is not None
        self.rendezvous_result = result
        self.scratch = Scratch(SEGMENT_BYTES)
        sockets = result.sockets
        self.selector = _selector(result, rank)
        machines, room = [entry.machine for entry in result.table], [entry.room for entry in result.table]
        self.overlaps = is_worth_it(options.communication, machines, room)
        sums = checksums if options.checksums else None
        self.links = {peer: _link(result, rank, peer, global_ranks[peer], sums) for peer in sockets[Role.COLLECTIVES]}
        self.message_links = {
            peer: Link(sock, global_ranks[peer], checksums=sums) for peer, sock in sockets[Role.MESSAGES].items()
        }
        controls = {global_ranks[peer]: sock for peer, sock in sockets[Role.CONTROL].items()}
        others = {global_ranks[peer]: result.table[peer].process for peer in self.links}
        own = result.table[rank].process
        heartbeat = Heartbeat(own, others, options.heartbeat_timeout_seconds, time.monotonic())
        shortest_seconds = min(entry.heartbeat_timeout_seconds for entry in result.table)
        links = (*self.links.values(), *self.message_links.values())
        # The monitor must not be in a reference cycle: what a group held is freed with it.
        stop = functools.partial(_stop, links)
        self.monitor = PeerMonitor(
            global_ranks[rank], controls, heartbeat, acceptor, selector, shortest_seconds, stop, describe, checksums
        )
        self.mailbox = Mailbox(self.message_links, self.monitor)
        self.executor = Executor(self.links, self.mailbox, self.monitor)

    @property
    def transport(self) -> str:
        """How collectives reach the other ranks: "cma", "unix", "tcp", or "cma within a machine, tcp between"."""
        found = {link.transport for link in self.links.values()}
        near = " and ".join(sorted(found - {"tcp"}))
        if not near:
            return "tcp"
        return f"{near} within a machine, tcp between" if "tcp" in found else near

    def abandon(self) -> None:
        """Close everything without a goodbye, in a forked child."""
        self.monitor.abandon()
        self.rendezvous_result.abandon()

    def close(self, collectives: int) -> None:
        """Say goodbye, unless the group has failed, and close everything; `collectives`: how many it has done."""
        self.monitor.leave(collectives)
        self.mailbox.close()
        self.rendezvous_result.close()


def _stop(links: Iterable[Link]) -> None:
    """Wake all threads that wait on a link."""
    for link in links:
        link.stop()


def _link(result: RendezvousResult, rank: int, peer: int, name: int, checksums: Checksums | None) -> Link:
    """Return the link for collectives to a peer."""
    memory = PeerMemory(result.table[peer].process.pid) if peer in result.readable_by_rank[rank] else None
    advertises = rank in result.readable_by_rank[peer]
    return Link(result.sockets[Role.COLLECTIVES][peer], name, memory, advertises=advertises, checksums=checksums)


def _selector(result: RendezvousResult, rank: int) -> AlgorithmSelector:
    machines, readable = [entry.machine for entry in result.table], result.readable_by_rank
    ranks, cores = range(len(machines)), min(entry.cores for entry in result.table)
    are_together = len(set(machines)) == 1
    return AlgorithmSelector(
        rank,
        len(machines),
        ring=tuple(sorted(ranks, key=lambda other: (machines.index(machines[other]), other))),
        can_read_peers=all(other in readable[reader] for reader in ranks for other in ranks if other != reader),
        shares_memory=result.all_unix and len(ranks) <= FEW_RANKS,
        oversubscribed=are_together and len(ranks) > max(2, cores),
        core_per_rank=are_together and len(ranks) <= cores,
    )
