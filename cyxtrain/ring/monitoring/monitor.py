"""What happens beside the ring: signs of life, aborts with their cause, goodbyes, strangers at the door.

One thread per group hears all control connections. The first error of a group is kept for ever: it is told to
all others, then every link is stopped, so that whoever waits wakes and finds the cause here.
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
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from cyxtrain.errors import CollectiveMismatchError, CyxtrainError, PeerLostError, error_from_facts, reported
from cyxtrain.ring.monitoring.heartbeat import Heartbeat, lost
from cyxtrain.ring.monitoring.wait_graph import MESSAGES, NOBODY, WaitGraph
from cyxtrain.ring.rendezvous.accept import Acceptor
from cyxtrain.ring.wire.checksums import Checksums
from cyxtrain.ring.wire.frames import (
    Control,
    DamagedError,
    FrameError,
    Numbered,
    control_frame,
    damaged,
    take_control_frame,
)
from cyxtrain.ring.wire.link import watch_over

_log = logging.getLogger("cyxtrain.ring")
_CAUSE_SECONDS = 1.0
"""How long a broken data link waits for the cause, which comes on another connection."""
_BEATS_PER_TIMEOUT = 10
_LONGEST_BEAT_SECONDS = 0.5
"""A kernel counts the time without an answer from the first byte that is not acknowledged, and asks by itself only
where nothing is on its way: were beats rarer, a cut of the network would be noticed so much later."""
_LATE_SECONDS = 0.5
"""A thread that wakes so much later than it wanted was stopped, with its whole process."""
_LEAVE_SECONDS = 2.0
"""How long a rank that leaves waits for the thread, which may hang in a log that nobody reads."""
_NETWORK_ERRORS = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)
"""By number: Python raises some of them as TimeoutError, which is also what its own timeouts raise."""


class PeerMonitor:
    """Hears and tells why a group ends.

    Attributes:
        rank: This rank, as errors name it.
        failed_at: When the group failed, in seconds of `time.monotonic`.
        is_raised: Whether this rank's program has seen the failure, as an error that a call has raised.

    Args:
        rank: This rank, as errors name it.
        controls: The control connection to each other rank; the watch owns them from now on.
        pulse: Judges whether the others live.
        door: Turns away strangers.
        selector: Waits for door and control connections; the data of each is the function to call.
        heartbeat_timeout_seconds: The shortest that any rank has: this one says more often that it lives.
        stop_links: Wakes everybody who waits on a link of the group; called once, when the group ends.
        describe: Returns what this rank does, for one that waits for it.
        checksums: Those of control frames, which always carry them.
    """

    def __init__(
        self,
        rank: int,
        controls: dict[int, socket.socket],
        pulse: Heartbeat,
        door: Acceptor,
        selector: selectors.BaseSelector,
        heartbeat_timeout_seconds: float,
        stop_links: Callable[[], None],
        describe: Callable[[], str],
        checksums: Checksums,
    ) -> None:
        self.rank = rank
        self.failed_at = 0.0
        self.is_raised = False
        self._controls = controls
        self._pulse = pulse
        self._door = door
        self._selector = selector
        self._beat_seconds = min(_LONGEST_BEAT_SECONDS, heartbeat_timeout_seconds / _BEATS_PER_TIMEOUT)
        self._stop_links = stop_links
        self._describe = describe
        self._checksums = checksums
        self._changed = threading.Condition()
        self._failure: CyxtrainError | None = None
        self._on_failure: Callable[[], None] | None = None
        self._departed: dict[int, int] = {}
        self._waits = WaitGraph(rank)
        self._heard = {peer: bytearray() for peer in controls}
        self._deaf: set[int] = set()
        self._leaving = False
        self._wake_reader, self._wake_writer = socket.socketpair()
        selector.register(self._wake_reader, selectors.EVENT_READ, self._take_leave)
        for peer, sock in controls.items():
            sock.setblocking(False)
            watch_over(sock)
            selector.register(sock, selectors.EVENT_READ, functools.partial(self._hear, peer))
        self._thread = threading.Thread(target=self._run, name="cyxtrain-watch", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> CyxtrainError | None:
        """The first error of the group, or None."""
        return self._failure

    def is_over(self, peer: int) -> bool:
        """Returns whether nothing more will come from `peer`: it has left, or the group has failed."""
        return self._failure is not None or peer in self._departed

    def fail(self, error: CyxtrainError) -> CyxtrainError:
        """Keeps the first error, tells it to all others, then stops every link.

        Returns:
            The error that counts: an earlier one, or this one.
        """
        with self._changed:
            if self._failure is not None:
                return self._failure
            self._failure, self.failed_at = error, time.monotonic()
            try:
                self._say(Control.ABORT, error.to_facts())
            finally:  # also where Ctrl-C comes just then
                self._stop_links()
                self._changed.notify_all()
            on_failure = self._on_failure
        if on_failure is not None:
            on_failure()
        return error

    def call_on_failure(self, function: Callable[[], None]) -> None:
        """Set what is called once, in any thread, when the group fails; if it has failed already, call it now."""
        with self._changed:
            self._on_failure, failure = function, self._failure
        if failure is not None:
            function()

    def await_failure(self, seconds: float) -> CyxtrainError | None:
        """Return the first error of the group, for which this waits; None: there was none."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, seconds)
            return self._failure

    def explain(self, peer: int, reason: str) -> CyxtrainError:
        """Returns why the link to `peer` broke: the cause somebody told, or that the peer is lost.

        Waits up to a second: the cause travels on another connection than the data.
        """
        if self.has_left(peer):
            return CollectiveMismatchError(
                f"rank {peer} has left (finalize, or the end of its program) after {self._departed[peer]} "
                f"collectives, and rank {self.rank} still needs it. All ranks must make the same calls.",
                rank=peer,
            )
        return self._failure or PeerLostError(
            f"rank {peer} is lost: the connection to it broke ({reason}). "
            f"Look at the output of rank {peer} and at the network, and start all ranks again.",
            rank=peer,
        )

    def has_left(self, peer: int) -> bool:
        """Returns whether `peer`, whose link has ended, said goodbye before; waits up to a second for a word."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or peer in self._departed, _CAUSE_SECONDS)
            return self._failure is None and peer in self._departed

    @contextlib.contextmanager
    def waiting(self, operation: Numbered, peer: int, since: float) -> Iterator[None]:
        """Tells all that this rank has been waiting for `peer` for long, and warns if it goes on for very long."""
        thread = threading.get_ident()
        with self._changed:
            self._waits.begin(thread, operation.sequence, peer, operation.describe(), since)
            if self._failure is None:
                self._say(Control.WAITING, {"sequence": operation.sequence, "peer": peer})
        try:
            yield
        finally:
            with self._changed:
                self._waits.end(thread)
                if self._failure is None and operation.sequence == MESSAGES:
                    self._say(Control.WAITING, {"sequence": MESSAGES, "peer": NOBODY})

    def blame(self, sequence: int, peer: int) -> int:
        """Returns whom all wait for in the end, where this rank waits for `peer`, and `peer` perhaps for another."""
        with self._changed:
            return self._waits.blame(sequence, peer)

    def leave(self, collectives: int) -> None:
        """Says goodbye to all, unless the group has failed, stops every link and ends the thread."""
        with self._changed:
            if self._failure is None:
                self._say(Control.GOODBYE, {"collectives": collectives})
                self._failure = CyxtrainError(
                    f"rank {self.rank} has left this group (finalize, destroy_process_group, or the end of the "
                    "program). Make a new group, or leave later."
                )
                self._stop_links()
                self._changed.notify_all()
        self._wake_writer.send(b"!")  # its end alone would not wake us while a child of a fork still holds it
        self._thread.join(_LEAVE_SECONDS)
        self._wake_writer.close()
        for sock in self._controls.values():
            with contextlib.suppress(OSError):
                while sock.recv(65536):  # what is unread would make the kernel take back what we said last
                    pass
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
            sock.close()
        self._wake_reader.close()

    def abandon(self) -> None:
        """Closes everything without a word, in a forked child: it has no thread of ours, and is no rank."""
        self._changed = threading.Condition()
        self._failure = CyxtrainError(
            f"this process was forked from rank {self.rank} and is no rank itself: only its parent can communicate."
        )
        for sock in (*self._controls.values(), self._wake_reader, self._wake_writer):
            sock.close()

    def _say(self, kind: Control, facts: dict[str, object], peers: Iterable[int] | None = None) -> None:
        """Says something to some ranks, or to all. The caller holds the lock."""
        frame = control_frame(kind, facts, self._checksums)
        for peer in self._controls if peers is None else peers:
            if peer in self._departed or peer in self._deaf:
                continue
            # A short frame fits into the buffer, unless the peer has read nothing for very long.
            try:
                sent = self._controls[peer].send(frame)
            except (BlockingIOError, InterruptedError):
                continue
            except OSError:
                sent = 0
            if sent < len(frame):
                self._deaf.add(peer)  # half a frame was said: whatever follows would not be understood

    def _run(self) -> None:
        try:
            self._listen()
        except BaseException as error:
            # Without this thread no loss would be noticed any more.
            self.fail(CyxtrainError(f"rank {self.rank} can no longer hear the others ({error!r}).", rank=self.rank))
            raise

    def _listen(self) -> None:
        next_tick = time.monotonic() + self._beat_seconds
        while not self._leaving:
            for key, _ in self._selector.select(max(next_tick - time.monotonic(), 0.0)):
                key.data()
            now = time.monotonic()
            if now < next_tick:
                continue
            if now - next_tick > _LATE_SECONDS:
                self._pulse.was_stopped(now - next_tick, now)
            self._tick(now)
            next_tick = time.monotonic() + self._beat_seconds

    def _tick(self, now: float) -> None:
        """Does what is to be done at every beat."""
        self._door.expire(now)
        with self._changed:
            if self._failure is not None:
                return
            self._say(Control.HEARTBEAT, {})
        error = self._pulse.examine(now)
        if error is not None:
            self.fail(error)
        with self._changed:
            warning = self._waits.unanswered(now)
            asked = self._waits.question(now)
            if asked is not None:
                self._say(Control.QUESTION, {}, [asked])
        if warning is not None:
            _log.warning(warning)

    def _take_leave(self) -> None:
        self._leaving = True

    def _hear(self, peer: int) -> None:
        """Takes what a peer says."""
        received, sock, broken = self._heard[peer], self._controls[peer], None
        try:
            part = sock.recv(65536)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            part, broken = b"", error
        received += part
        self._pulse.received(peer, time.monotonic())
        try:
            while (frame := take_control_frame(received, self._checksums)) is not None:
                self._take(peer, *frame)
        except DamagedError:
            self.fail(damaged(peer, self.rank, "what is said beside the ring"))
            part = b""
        except FrameError as error:
            self.fail(PeerLostError(f"rank {peer} said what is no frame ({error}).", rank=peer))
            part = b""
        if part:
            return
        self._selector.unregister(sock)
        self._pulse.forget(peer)
        if peer not in self._departed:
            self.fail(_end_of(peer, broken))

    def _take(self, peer: int, kind: Control, facts: dict[str, Any]) -> None:
        """Does what a control frame asks for."""
        if kind is Control.ABORT:
            self.fail(error_from_facts(facts | {"message": reported(facts.get("message"), peer)}))
        elif kind is Control.GOODBYE:
            with self._changed:
                self._departed[peer] = _number(facts, "collectives")
                self._pulse.forget(peer)
                self._changed.notify_all()
        elif kind is Control.WAITING:
            with self._changed:
                self._waits.told(peer, _number(facts, "sequence"), _number(facts, "peer"))
        elif kind is Control.QUESTION:
            doing = self._describe()
            with self._changed:
                self._say(Control.ANSWER, {"doing": doing}, [peer])
        elif kind is Control.ANSWER:
            with self._changed:
                warning = self._waits.answered(peer, str(facts.get("doing")), time.monotonic())
            if warning is not None:
                _log.warning(warning)


def _number(facts: dict[str, Any], name: str) -> int:
    value = facts.get(name)
    if type(value) is not int:
        raise FrameError("a control frame counts in something else than whole numbers")
    return value


def _end_of(peer: int, error: OSError | None) -> PeerLostError:
    """Returns the error for a control connection that has ended without a goodbye."""
    if error is None or error.errno not in _NETWORK_ERRORS:
        return lost(peer)
    return PeerLostError(
        f"rank {peer} is lost: the network to it, or its machine, is gone ({error.strerror}). Look at both, and start "
        "all ranks again.",
        rank=peer,
    )
