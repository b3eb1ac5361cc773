"""The parts of a group of several ranks that a world of one lacks: links, mailbox, monitor and executor."""

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
        records = mesh.directory.records
        self.mesh = mesh
        self.scratch = Scratch(SEGMENT_BYTES)
        self.selector = _selector(records, mesh.rank, all_unix=mesh.all_unix)
        machines = [record.machine for record in records]
        room = [record.room for record in records]
        self.overlaps = is_worth_it(options.communication, machines, room)
        self.links = _links(mesh, Role.COLLECTIVES, options)
        self.message_links = _links(mesh, Role.MESSAGES, options)
        self.monitor = self._monitor_peers(options, describe)
        self.mailbox = Mailbox(self.message_links, self.monitor)
        self.executor = Executor(self.links, self.mailbox, self.monitor)

    def _monitor_peers(self, options: RingOptions, describe: Callable[[], str]) -> PeerMonitor:
        records = self.mesh.directory.records
        names = self.mesh.directory.global_ranks
        rank = self.mesh.rank
        controls = {names[peer]: sock for peer, sock in self.mesh.sockets[Role.CONTROL].items()}
        others = {names[peer]: records[peer].process for peer in self.links}
        heartbeat = Heartbeat(records[rank].process, others, options.heartbeat_timeout_seconds, time.monotonic())
        links = (*self.links.values(), *self.message_links.values())
        return PeerMonitor(names[rank], controls, heartbeat, self.mesh, links, describe)

    @property
    def transport(self) -> str:
        """How collectives reach the other ranks: "unix", "tcp", or "unix within a machine, tcp between"."""
        transports = {link.transport for link in self.links.values()}
        if len(transports) == 1:
            return transports.pop()
        return "unix within a machine, tcp between"

    def abandon(self) -> None:
        """Close everything without a goodbye, in a forked child."""
        self.monitor.abandon()
        self.mesh.abandon()

    def disconnect(self, collectives: int) -> None:
        """Send a goodbye, unless the group has failed, and close all but the listeners of the mesh.

        `collectives`: how many the group has done. A mesh whose listeners a thread still serves is closed, too.
        """
        thread_has_ended = self.monitor.leave(collectives)
        self.mailbox.close()
        if thread_has_ended:
            self.mesh.disconnect()
        else:
            self.mesh.close()


def _links(mesh: Mesh, role: Role, options: RingOptions) -> dict[int, Link]:
    checksums = mesh.checksums if options.checksums else None
    names = mesh.directory.global_ranks
    return {peer: Link(sock, names[peer], checksums) for peer, sock in mesh.sockets[role].items()}


def _selector(records: Sequence[RankRecord], rank: int, *, all_unix: bool) -> AlgorithmSelector:
    world_size = len(records)
    machines = [record.machine for record in records]
    cores = min(record.cores for record in records)
    are_together = len(set(machines)) == 1
    return AlgorithmSelector(
        rank,
        world_size,
        ring=_ordered_by_machine(machines),
        shares_memory=all_unix and world_size <= FEW_RANKS,
        oversubscribed=are_together and world_size > max(2, cores),
        core_per_rank=are_together and world_size <= cores,
    )


def _ordered_by_machine(machines: Sequence[str]) -> tuple[int, ...]:
    """Return all ranks, ordered by machine; machines come in the order of their first ranks."""
    return tuple(sorted(range(len(machines)), key=lambda rank: (machines.index(machines[rank]), rank)))
