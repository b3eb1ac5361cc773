"""Control connections of a group: heartbeats, aborts, goodbyes, and reports of which rank waits.

One thread per group reads them all, and sees most failures first: if a rank dies, the kernel closes its control
connections, and `_on_data` sees the end without a goodbye. `failure.py` tells what follows.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from cyxtrain.errors import CollectiveMismatchError, CyxtrainError, PeerLostError
from cyxtrain.ring.monitoring.failure import GroupFailure
from cyxtrain.ring.monitoring.heartbeat import Heartbeat, lost_error
from cyxtrain.ring.monitoring.wait_graph import MESSAGES, NOBODY, WaitGraph
from cyxtrain.ring.rendezvous.handshake import Role
from cyxtrain.ring.rendezvous.mesh import Mesh
from cyxtrain.ring.wire.frames import (
    Control,
    DamagedError,
    FrameError,
    Numbered,
    abort_error,
    control_frame,
    damaged_error,
    take_control_frame,
)
from cyxtrain.ring.wire.link import Link, watch_over

_log = logging.getLogger("cyxtrain.ring")
_CAUSE_WAIT_SECONDS = 1.0
"""How long a broken data link waits for the cause, which arrives on another connection."""
_BEATS_PER_TIMEOUT = 10
_LONGEST_BEAT_SECONDS = 0.5
"""TCP_USER_TIMEOUT runs from the oldest unacknowledged byte: rarer heartbeats delay detection."""
_LATE_SECONDS = 0.5
"""If the thread wakes this late, its whole process was suspended."""
_LEAVE_SECONDS = 2.0
"""How long `leave` waits for the thread, which may block writing to a full log pipe."""
_READ_BYTES = 1 << 16
_NETWORK_ERRORS = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)
"""By number: Python raises some of them as TimeoutError, like its own timeouts."""


class PeerMonitor:
    """Detects and stores the failure of a group, and tells all ranks; owns the control connections, by rank.

    It stops the `links` of the group when the group ends, which wakes all threads that wait there. `describe` returns
    what this rank is doing, for a waiting peer. Ranks are global: the launcher's numbers, as errors name them. The
    monitor must not be in a reference cycle, because whatever a group held is freed with it.
    """

    def __init__(self, mesh: Mesh, links: Sequence[Link], describe: Callable[[], str]) -> None:
        assert mesh.listeners is not None
        assert mesh.listeners.acceptor is not None
        records = mesh.directory.records
        own = records[mesh.rank]
        names = mesh.directory.global_ranks
        controls = {names[peer]: sock for peer, sock in mesh.sockets[Role.CONTROL].items()}
        others = {names[peer]: records[peer].process for peer in mesh.sockets[Role.CONTROL]}
        # All ranks beat as often as the most impatient one needs.
        shortest_timeout_seconds = min(record.heartbeat_timeout_seconds for record in records)
        self.rank = mesh.global_rank
        self.failure = GroupFailure()
        self._controls = controls
        self._heartbeat = Heartbeat(own.process, others, own.heartbeat_timeout_seconds, time.monotonic())
        self._acceptor = mesh.listeners.acceptor
        self._selector = mesh.listeners.selector
        self._beat_seconds = min(_LONGEST_BEAT_SECONDS, shortest_timeout_seconds / _BEATS_PER_TIMEOUT)
        self._links = links
        self._describe = describe
        self._checksums = mesh.checksums
        self._changed = threading.Condition()
        self._on_failure: Callable[[], None] | None = None
        self._departed: dict[int, int] = {}  # by rank that has left, how many collectives it had begun
        self._waits = WaitGraph(self.rank)
        self._received = {peer: bytearray() for peer in controls}
        self._unreachable: set[int] = set()
        self._leaving = False
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._on_wake)
        for peer, sock in controls.items():
            sock.setblocking(False)
            watch_over(sock)
            self._selector.register(sock, selectors.EVENT_READ, functools.partial(self._on_data, peer))
        self._thread = threading.Thread(target=self._run, name="cyxtrain-monitor", daemon=True)
        self._thread.start()

    def fail(self, error: CyxtrainError) -> CyxtrainError:
        """End the group: store the first error, tell all ranks, stop every link; return the error that is stored."""
        with self._changed:
            if self.failure.error is not None:
                return self.failure.error
            self.failure.store(error)
            try:
                # Before the links stop: a neighbour whose link ends would blame this rank.
                self._send(Control.ABORT, error.to_facts())
            finally:  # also if Ctrl-C arrives just then
                self._stop_links()
                self._changed.notify_all()
            on_failure = self._on_failure
        if on_failure is not None:
            on_failure()
        return error

    def call_on_failure(self, function: Callable[[], None]) -> None:
        """Call a function once, in any thread, when the group fails; now, if it has failed already."""
        with self._changed:
            self._on_failure = function
            has_failed = self.failure.error is not None
        if has_failed:
            function()

    def await_failure(self, seconds: float) -> None:
        """Wait until the group has failed, at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure.error is not None, seconds)

    def broken_link_error(self, peer: int, reason: str) -> CyxtrainError:
        """Return the error for a broken link: the cause that a rank reported, or that `peer` has left or died.

        Waits up to a second: the cause arrives on another connection.
        """
        # Also ends when a failure is stored, and is False then.
        if self.await_goodbye(peer):
            return CollectiveMismatchError(
                f"rank {peer} has left (finalize, or the end of its program) after {self._departed[peer]} "
                f"collectives, and rank {self.rank} still needs it. All ranks must make the same calls.",
                rank=peer,
            )
        return self.failure.error or PeerLostError(
            f"rank {peer} died or was cut off: the connection to it broke ({reason}). "
            f"Look at the output of rank {peer} and at the network, and start all ranks again.",
            rank=peer,
        )

    def is_closed(self, peer: int) -> bool:
        """Return whether nothing more will arrive from `peer`: it has left, or the group has failed."""
        return self.failure.error is not None or peer in self._departed

    def await_goodbye(self, peer: int) -> bool:
        """Return whether `peer`, whose link has ended, sends a goodbye within a second, before the group fails."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_closed(peer), _CAUSE_WAIT_SECONDS)
            return self.failure.error is None and peer in self._departed

    @contextlib.contextmanager
    def waiting(self, operation: Numbered, peer: int, since: float) -> Iterator[None]:
        """Report to all that this rank has been waiting for `peer` for a long time; warn later."""
        thread = threading.get_ident()
        with self._changed:
            self._waits.begin(thread, operation.sequence, peer, operation.describe(), since)
            if self.failure.error is None:
                self._send(Control.WAITING, {"sequence": operation.sequence, "peer": peer})
        try:
            yield
        finally:
            with self._changed:
                self._waits.end(thread)
                # A report about a collective expires with its sequence number; messages have none.
                if self.failure.error is None and operation.sequence == MESSAGES:
                    self._send(Control.WAITING, {"sequence": MESSAGES, "peer": NOBODY})

    def find_straggler(self, sequence: int, peer: int) -> int:
        """Return the slow rank: the end of the chain of waits that begins with `peer`."""
        with self._changed:
            return self._waits.find_straggler(sequence, peer)

    def leave(self, collectives: int) -> bool:
        """Send a goodbye to all, unless the group has failed, stop every link and end the thread.

        Return whether the thread has ended, so that another thread may use the selector.
        """
        with self._changed:
            if self.failure.error is None:
                self._send(Control.GOODBYE, {"collectives": collectives})
                left = (
                    f"rank {self.rank} has left this group (finalize, destroy_process_group, or the end of the "
                    "program). Make a new group, or leave later."
                )
                self.failure.store(CyxtrainError(left))
                self._stop_links()
                self._changed.notify_all()
        # A byte, as closing alone would not wake the thread while a forked child has the socket open.
        self._wake_writer.send(b"!")
        self._thread.join(_LEAVE_SECONDS)
        self._wake_writer.close()
        for sock in (self._wake_reader, *self._controls.values()):
            with contextlib.suppress(KeyError):  # a socket that its peer has closed is no longer registered
                self._selector.unregister(sock)
        for sock in self._controls.values():
            _close_after_reading(sock)
        self._wake_reader.close()
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """Close everything without a goodbye, in a forked child, which is not a rank and lacks the thread."""
        self._changed = threading.Condition()  # another thread of the parent may have held the old one
        forked = f"this process was forked from rank {self.rank} and is not a rank: only its parent can communicate."
        self.failure.store(CyxtrainError(forked))
        for sock in (*self._controls.values(), self._wake_reader, self._wake_writer):
            sock.close()

    def _send(self, kind: Control, facts: dict[str, object], peers: Iterable[int] | None = None) -> None:
        """Send a control frame to some ranks; None: to all. The caller holds the lock."""
        frame = control_frame(kind, facts, self._checksums)
        if peers is None:
            peers = self._controls
        for peer in peers:
            if peer in self._departed or peer in self._unreachable:
                continue
            # A short frame fits into the socket's buffer, unless the peer has read nothing for a long time.
            try:
                sent = self._controls[peer].send(frame)
            except BlockingIOError:
                continue
            except OSError:
                sent = 0
            if sent < len(frame):
                self._unreachable.add(peer)  # a partial frame desynchronizes the stream

    def _stop_links(self) -> None:
        """Wake all threads that wait on a link."""
        for link in self._links:
            link.stop()

    def _run(self) -> None:
        try:
            self._read()
        except BaseException as error:
            # Without this thread, the group would notice no failure.
            self.fail(
                CyxtrainError(f"rank {self.rank} can no longer receive control frames ({error!r}).", rank=self.rank)
            )
            raise

    def _read(self) -> None:
        next_tick = time.monotonic() + self._beat_seconds
        while not self._leaving:
            for key, _ in self._selector.select(max(next_tick - time.monotonic(), 0.0)):
                key.data()
            now = time.monotonic()
            if now < next_tick:
                continue
            if now - next_tick > _LATE_SECONDS:
                self._heartbeat.discount_pause(now - next_tick, now)
            self._tick(now)
            next_tick = time.monotonic() + self._beat_seconds

    def _tick(self, now: float) -> None:
        """Send heartbeats, examine the heartbeats of others, and ask or warn about slow ranks."""
        self._acceptor.expire(now)
        with self._changed:
            if self.failure.error is not None:
                return
            self._send(Control.HEARTBEAT, {})
        error = self._heartbeat.examine(now)
        if error is not None:
            self.fail(error)
            return
        with self._changed:
            warning = self._waits.unanswered(now)
            asked = self._waits.question(now)
            if asked is not None:
                self._send(Control.QUESTION, {}, [asked])
        if warning is not None:
            _log.warning(warning)

    def _on_wake(self) -> None:
        self._leaving = True

    def _on_data(self, peer: int) -> None:
        sock = self._controls[peer]
        broken: OSError | None = None
        try:
            data = sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            data = b""
            broken = error
        self._received[peer] += data
        self._heartbeat.received(peer, time.monotonic())
        is_intact = self._apply_frames(peer)
        if data and is_intact:
            return
        self._selector.unregister(sock)
        self._heartbeat.forget(peer)
        # After an invalid frame the group has failed already, and this changes nothing.
        if peer not in self._departed:
            self.fail(_disconnect_error(peer, broken))

    def _apply_frames(self, peer: int) -> bool:
        """Apply all complete frames received from a rank; return False if one of them is invalid."""
        try:
            while (frame := take_control_frame(self._received[peer], self._checksums)) is not None:
                self._apply(peer, *frame)
        except DamagedError:
            self.fail(damaged_error(peer, self.rank, "a control frame"))
            return False
        except FrameError as error:
            self.fail(PeerLostError(f"rank {peer} sent an invalid control frame ({error}).", rank=peer))
            return False
        return True

    def _apply(self, peer: int, kind: Control, facts: dict[str, Any]) -> None:
        if kind is Control.ABORT:
            self.fail(abort_error(facts, peer))
        elif kind is Control.GOODBYE:
            with self._changed:
                self._departed[peer] = _number(facts, "collectives")
                self._heartbeat.forget(peer)
                self._changed.notify_all()
        elif kind is Control.WAITING:
            with self._changed:
                self._waits.peer_waits(peer, _number(facts, "sequence"), _number(facts, "peer"))
        elif kind is Control.QUESTION:
            activity = self._describe()
            with self._changed:
                self._send(Control.ANSWER, {"doing": activity}, [peer])
        elif kind is Control.ANSWER:
            with self._changed:
                warning = self._waits.answered(peer, str(facts.get("doing")), time.monotonic())
            if warning is not None:
                _log.warning(warning)


def _close_after_reading(sock: socket.socket) -> None:
    # Closing with unread data sends RST, which can discard what this rank sent last: its goodbye or its error.
    with contextlib.suppress(OSError):
        while sock.recv(_READ_BYTES):
            pass
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)
    sock.close()


def _number(facts: dict[str, Any], name: str) -> int:
    value = facts.get(name)
    if type(value) is not int:
        raise FrameError("a control frame without a whole number")
    return value


def _disconnect_error(peer: int, error: OSError | None) -> PeerLostError:
    """Return the error for a control connection that ended without a goodbye."""
    if error is None or error.errno not in _NETWORK_ERRORS:
        return lost_error(peer)
    return PeerLostError(
        f"rank {peer} is lost: its machine, or the network to it, is unreachable ({error.strerror}). Check both, and "
        "start all ranks again.",
        rank=peer,
    )
