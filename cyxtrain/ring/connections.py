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
from cyxtrain.ring.schedules.selector import SEGMENT_BYTES, AlgorithmSelector
from cyxtrain.ring.wire.checksums import Checksums
from cyxtrain.ring.wire.kernels import Scratch
from cyxtrain.ring.wire.link import Link
from cyxtrain.ring.wire.peer_read import PeerMemory


class Connections:
    """Links, mailbox, monitor and executor of a group of several ranks.

    Args:
        meeting: The connections; owned from now on.
        rank: This rank.
        names: By rank, its rank in the world, for errors.
        options: Settings of the ring.
        describe: Returns what this rank is doing.
    """

    def __init__(
        self,
        meeting: RendezvousResult,
        rank: int,
        names: Sequence[int],
        options: RingOptions,
        describe: Callable[[], str],
    ) -> None:
        assert meeting.checksums is not None
        assert meeting.acceptor is not None
        assert meeting.selector is not None
        self.meeting = meeting
        self.scratch = Scratch(SEGMENT_BYTES)
        sockets = meeting.sockets
        self.selector = _selector(meeting, rank)
        machines, room = ([entry.machine for entry in meeting.table], [entry.room for entry in meeting.table])
        self.overlaps = is_worth_it(options.communication, machines, room)
        checksums = meeting.checksums if options.checksums else None
        self.links = {peer: _link(meeting, rank, peer, names[peer], checksums) for peer in sockets[Role.COLLECTIVES]}
        self.message_links = {
            peer: Link(sock, names[peer], checksums=checksums) for peer, sock in sockets[Role.MESSAGES].items()
        }
        controls = {names[peer]: sock for peer, sock in sockets[Role.CONTROL].items()}
        others = {names[peer]: meeting.table[peer].process for peer in self.links}
        own = meeting.table[rank].process
        pulse = Heartbeat(own, others, options.heartbeat_timeout_seconds, time.monotonic())
        shortest_seconds = min(entry.heartbeat_timeout_seconds for entry in meeting.table)
        links = (*self.links.values(), *self.message_links.values())
        # The monitor must not be in a reference cycle: what a group held is freed with it.
        stop = functools.partial(_stop, links)
        sums = meeting.checksums
        self.watch = PeerMonitor(
            names[rank], controls, pulse, meeting.acceptor, meeting.selector, shortest_seconds, stop, describe, sums
        )
        self.mailbox = Mailbox(self.message_links, self.watch)
        self.executor = Executor(self.links, self.mailbox, self.watch)

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
        self.watch.abandon()
        self.meeting.abandon()

    def close(self, collectives: int) -> None:
        """Say goodbye, unless the group has failed, and close everything; `collectives`: how many it has done."""
        self.watch.leave(collectives)
        self.mailbox.close()
        self.meeting.close()


def _stop(links: Iterable[Link]) -> None:
    """Wake all threads that wait on a link."""
    for link in links:
        link.stop()


def _link(meeting: RendezvousResult, rank: int, peer: int, name: int, checksums: Checksums | None) -> Link:
    """Return the link for collectives to a peer."""
    memory = PeerMemory(meeting.table[peer].process.pid) if peer in meeting.readers[rank] else None
    offers = rank in meeting.readers[peer]
    return Link(meeting.sockets[Role.COLLECTIVES][peer], name, memory, offers=offers, checksums=checksums)


def _selector(meeting: RendezvousResult, rank: int) -> AlgorithmSelector:
    machines = [entry.machine for entry in meeting.table]
    ranks, cores = range(len(machines)), min(entry.cores for entry in meeting.table)
    are_together = len(set(machines)) == 1
    return AlgorithmSelector(
        rank,
        len(machines),
        ring=tuple(sorted(ranks, key=lambda other: (machines.index(machines[other]), other))),
        can_read_peers=all(other in meeting.readers[reader] for reader in ranks for other in ranks if other != reader),
        shares_memory=meeting.all_unix and len(ranks) <= FEW_RANKS,
        oversubscribed=are_together and len(ranks) > max(2, cores),
        core_per_rank=are_together and len(ranks) <= cores,
    )
