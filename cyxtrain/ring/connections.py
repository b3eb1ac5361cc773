"""What a group of several ranks has besides its numbering: links, mailbox, monitor and executor over a mesh."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from cyxtrain.config import RingOptions
from cyxtrain.ring.collective_thread import is_worth_it
from cyxtrain.ring.executor import Executor
from cyxtrain.ring.messages import Mailbox
from cyxtrain.ring.monitoring.heartbeat import Heartbeat
from cyxtrain.ring.monitoring.monitor import PeerMonitor
from cyxtrain.ring.rendezvous.handshake import Role
from cyxtrain.ring.rendezvous.mesh import Mesh
from cyxtrain.ring.rendezvous.record import RankRecord
from cyxtrain.ring.schedules.algorithms import FEW_RANKS
from cyxtrain.ring.schedules.kernels import Scratch
from cyxtrain.ring.schedules.selector import SEGMENT_BYTES, AlgorithmSelector
from cyxtrain.ring.wire.link import Link


class Connections:
    """Links, mailbox, monitor and executor of a group of several ranks; it owns the `mesh`.

    `describe` returns what this rank is doing.
    """

    def __init__(self, mesh: Mesh, options: RingOptions, describe: Callable[[], str]) -> None:
        records, names, rank = mesh.directory.records, mesh.directory.global_ranks, mesh.rank
        self.mesh = mesh
        self.scratch = Scratch(SEGMENT_BYTES)
        self.selector = _selector(records, rank, all_unix=mesh.all_unix)
        machines, room = [record.machine for record in records], [record.room for record in records]
        self.overlaps = is_worth_it(options.communication, machines, room)
        sums = mesh.checksums if options.checksums else None
        self.links, self.message_links = (
            {peer: Link(sock, names[peer], sums) for peer, sock in mesh.sockets[role].items()}
            for role in (Role.COLLECTIVES, Role.MESSAGES)
        )
        controls = {names[peer]: sock for peer, sock in mesh.sockets[Role.CONTROL].items()}
        others = {names[peer]: records[peer].process for peer in self.links}
        heartbeat = Heartbeat(records[rank].process, others, options.heartbeat_timeout_seconds, time.monotonic())
        links = (*self.links.values(), *self.message_links.values())
        self.monitor = PeerMonitor(names[rank], controls, heartbeat, mesh, links, describe)
        self.mailbox = Mailbox(self.message_links, self.monitor)
        self.executor = Executor(self.links, self.mailbox, self.monitor)

    @property
    def transport(self) -> str:
        """How collectives reach the other ranks: "unix", "tcp", or "unix within a machine, tcp between"."""
        found = {link.transport for link in self.links.values()}
        return found.pop() if len(found) == 1 else "unix within a machine, tcp between"

    def abandon(self) -> None:
        """Close everything without a goodbye, in a forked child."""
        self.monitor.abandon()
        self.mesh.abandon()

    def disconnect(self, collectives: int) -> None:
        """Say goodbye, unless the group has failed, and close all but the listeners of the mesh.

        `collectives`: how many the group has done. A mesh whose listeners a thread still serves is closed, too.
        """
        is_free = self.monitor.leave(collectives)
        self.mailbox.close()
        if is_free:
            self.mesh.disconnect()
        else:
            self.mesh.close()


def _selector(records: Sequence[RankRecord], rank: int, *, all_unix: bool) -> AlgorithmSelector:
    machines = [record.machine for record in records]
    ranks, cores = range(len(machines)), min(record.cores for record in records)
    are_together = len(set(machines)) == 1
    return AlgorithmSelector(
        rank,
        len(machines),
        ring=tuple(sorted(ranks, key=lambda other: (machines.index(machines[other]), other))),
        shares_memory=all_unix and len(ranks) <= FEW_RANKS,
        oversubscribed=are_together and len(ranks) > max(2, cores),
        core_per_rank=are_together and len(ranks) <= cores,
    )
