"""One rank's part in trying every pair: each calls the other, the higher one measures, both look at memory.

Both ways are tried: the ring's higher rank calls the lower one, other libraries do it the other way round, and which
host is which rank can change from run to run.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time

from cyxtrain.doctor import measure
from cyxtrain.doctor.findings import Arrival, Cause, View, to_json
from cyxtrain.doctor.pair_schedule import partner, rounds
from cyxtrain.doctor.store_exchange import Roster, wait_for
from cyxtrain.ring.monitoring.process_state import State, state_of
from cyxtrain.ring.rendezvous.accept import Acceptor
from cyxtrain.ring.rendezvous.dial import ClosedError, call_once, socket_address
from cyxtrain.ring.rendezvous.handshake import Claim, HandshakeError, RefusedError, Role
from cyxtrain.ring.rendezvous.rendezvous import Meeting
from cyxtrain.ring.rendezvous.store_client import StoreClient
from cyxtrain.ring.wire.link import Deadline, watch_over
from cyxtrain.ring.wire.peer_read import PeerMemory

CONNECT_SECONDS = 5.0
"""For both ways of a pair together."""
MEASURE_SECONDS = 8.0
_SLACK_SECONDS = 2.0
ROUND_SECONDS = CONNECT_SECONDS + MEASURE_SECONDS + _SLACK_SECONDS
"""A pair takes no longer: whoever has fallen behind by more than one round does not come any more."""
_TICK_SECONDS = 1.0
"""How often a rank gives a sign of life, and looks for that of the one for which it waits."""
_SILENT_SECONDS = MEASURE_SECONDS + 4.0
"""Without a sign of life a rank is stopped, or cut off: it gives none while it measures."""
_LOOK_SECONDS = 0.02


class Reception:
    """Where this rank is called: it lets in who knows the token, and keeps them until they are asked for.

    Args:
        rank: This rank.
        listening: With its sockets; they stay the caller's.
        key: The token.
        run: What rank 0 calls this meeting.
    """

    def __init__(self, rank: int, listening: Meeting, key: bytes, run: str) -> None:
        self._run = run
        self._selector = selectors.DefaultSelector()
        self._here: dict[tuple[int, Role], socket.socket] = {}
        listeners = [listener for listener in (listening.listener, listening.near) if listener is not None]
        self._door = Acceptor(listeners, f"rank {rank}", key, self._judge, self._admit, self._selector)

    def serve(self, seconds: float) -> None:
        """Takes who comes, for so long at most."""
        for key, _ in self._selector.select(seconds):
            key.data()
        self._door.expire(time.monotonic())

    def has(self, rank: int, role: Role) -> bool:
        """Returns whether a rank has called."""
        return (rank, role) in self._here

    def take(self, rank: int, role: Role) -> socket.socket | None:
        """Returns the connection that a rank has made, which is the caller's from now on; None: it made none."""
        return self._here.pop((rank, role), None)

    def close(self) -> None:
        """Closes every connection that nobody has taken."""
        self._door.close()
        for sock in self._here.values():
            sock.close()
        self._here.clear()
        self._selector.close()

    def _judge(self, claim: Claim) -> str:
        return "" if claim.run == self._run else "it belongs to another run"

    def _admit(self, claim: Claim, sock: socket.socket) -> None:
        before = self._here.pop((claim.rank, claim.role), None)
        if before is not None:
            before.close()
        self._here[claim.rank, claim.role] = sock


class StreamPasses:
    """One rank's visits to all others, one at a time.

    Args:
        board: The store.
        rank: This rank.
        roster: Who is there.
        arrivals: What they said of themselves.
        listening: This rank's sockets, which others call.
    """

    def __init__(
        self, board: StoreClient, rank: int, roster: Roster, arrivals: dict[int, Arrival], listening: Meeting
    ) -> None:
        self._board = board
        self._rank = rank
        self._roster = roster
        self._arrivals = arrivals
        self._own = arrivals[rank].entry
        self._key = bytes.fromhex(roster.token)
        self._run = arrivals[0].entry.run  # rank 0, which called the roster, is in it
        self._reception = Reception(rank, listening, self._key, self._run)
        self._began = time.monotonic()
        self._beat = Deadline(0.0)

    def make(self) -> None:
        """Tries every pair of this rank, and says at the store what it found."""
        for number, pairs in enumerate(rounds(self._roster.ranks)):
            peer = partner(self._rank, pairs)
            if peer is not None:
                self._board.set(f"view/{self._rank}/{peer}", to_json(self._visit(peer, number)))

    def close(self) -> None:
        """Closes every socket."""
        self._reception.close()

    def await_word(self, key: str, peer: int, deadline: Deadline, *, knocks: bool = False) -> Cause:
        """Waits until a rank has said something at the store; returns why it has not.

        Args:
            key: Where.
            peer: Who shall say it.
            deadline: When to give up in any case; whoever shows no sign of life is given up before.
            knocks: Whether to give up, too, where nobody listens at its port: where that matters anyway. It finds
                sooner that a process on another machine has ended, or that a firewall refuses.
        """
        entry, cause, pulse = self._arrivals[peer].entry, Cause.NONE, b""
        tick, silence = Deadline(_TICK_SECONDS), Deadline(_SILENT_SECONDS)

        def is_decided() -> bool:
            nonlocal tick, silence, pulse, cause
            self._serve()
            if self._board.has(key):
                return True
            if state_of(entry.process, self._own.process) is State.GONE:
                cause = Cause.BROKE
            elif tick.passed():
                tick = Deadline(_TICK_SECONDS)
                if knocks and entry.machine != self._own.machine and _is_refused(entry.host, entry.port):
                    cause = Cause.REFUSED
                if (now := self._pulse_of(peer)) != pulse:
                    pulse, silence = now, Deadline(_SILENT_SECONDS)
            return cause is not Cause.NONE or silence.passed()

        wait_for(is_decided, deadline)
        return cause if cause is not Cause.NONE or self._board.has(key) else Cause.ABSENT

    def _serve(self, seconds: float = 0.0) -> None:
        """Takes who comes, for so long at most, and gives a sign of life now and then."""
        self._reception.serve(seconds)
        if self._beat.passed():
            self._beat = Deadline(_TICK_SECONDS)
            self._board.set(f"pulse/{self._rank}", str(time.monotonic()))

    def _pulse_of(self, peer: int) -> bytes:
        key = f"pulse/{peer}"
        return self._board.get(key) or b""

    def _visit(self, peer: int, number: int) -> View:
        """Returns what this rank finds of one other, in the round of that number."""
        self._board.set(f"ready/{self._rank}/{peer}", "yes")
        until = self._began + (number + 1) * ROUND_SECONDS + _SLACK_SECONDS
        patience = Deadline(until - time.monotonic())
        cause = self.await_word(f"ready/{peer}/{self._rank}", peer, patience, knocks=True)
        if cause is not Cause.NONE:
            return View(self._rank, peer, cause.value, _WORDS[cause])
        deadline = Deadline(CONNECT_SECONDS)
        called, cause, detail = self._call(peer, Role.COLLECTIVES, deadline)
        near = self._may_be_near(peer)
        near_call = self._call(peer, Role.MESSAGES, deadline)[0] if near and self._rank > peer else None
        wanted = [Role.COLLECTIVES, Role.MESSAGES] if near and self._rank < peer else [Role.COLLECTIVES]
        while not deadline.passed() and not all(self._reception.has(peer, role) for role in wanted):
            self._serve(_LOOK_SECONDS)
        came, near_came = (self._reception.take(peer, role) for role in (Role.COLLECTIVES, Role.MESSAGES))
        transport = self._transport(peer, near_call or near_came)
        try:
            view = View(self._rank, peer, cause.value, detail, transport)
            if cause is Cause.NONE and self._rank > peer and called is not None:
                return _measured(view, called)
            if came is not None and self._rank < peer:
                _follow(came)
            return view
        finally:
            for sock in (called, came, near_call, near_came):
                if sock is not None:
                    sock.close()

    def _call(self, peer: int, role: Role, deadline: Deadline) -> tuple[socket.socket | None, Cause, str]:
        """Returns (connection or None, why there is none, the same in words)."""
        entry = self._arrivals[peer].entry
        claim = Claim(self._run, 0, role, self._rank, self._roster.world_size, checksums=False, to_rank=peer)
        address = socket_address(entry, near=role is Role.MESSAGES)
        try:
            return call_once(address, claim, self._key, deadline, self._serve), Cause.NONE, ""
        except (RefusedError, HandshakeError) as error:
            return None, Cause.STRANGER, f"what answers there is not this rank ({error})"
        except ClosedError:
            return None, Cause.BROKE, "it closed the connection"
        except OSError as error:
            return None, *_cause_of(error)

    def _may_be_near(self, peer: int) -> bool:
        """Returns whether both are on one machine, where the ring would try Unix sockets."""
        entry = self._arrivals[peer].entry
        return entry.machine == self._own.machine and bool(entry.unix) and bool(self._own.unix)

    def _transport(self, peer: int, near: socket.socket | None) -> str:
        """Returns what the ring would take from this rank; "" between machines."""
        entry = self._arrivals[peer].entry
        if entry.machine != self._own.machine:
            return ""
        if near is None:
            return "tcp"
        return "cma" if entry.memory and PeerMemory(entry.process.pid).can_be_read(entry.memory) else "unix"


_WORDS = {
    Cause.ABSENT: "it did not come to be tried",
    Cause.BROKE: "its process has ended meanwhile",
    Cause.REFUSED: "connection refused",
}


def _measured(view: View, sock: socket.socket) -> View:
    """Returns a view with what was measured, or why it was not."""
    watch_over(sock)
    try:
        figures = measure.lead(sock, MEASURE_SECONDS)
    except measure.LargeLostError:
        detail = f"short messages arrive, and 256 KiB do not within {MEASURE_SECONDS:g} s"
        return _failed(view, Cause.LARGE, detail)
    except TimeoutError:
        return _failed(view, Cause.BROKE, f"connected, and then no answer within {MEASURE_SECONDS:g} s")
    except (measure.ClosedError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it was closed"
        return _failed(view, Cause.BROKE, f"the connection ended in the middle ({reason.lower()})")
    return View(
        view.rank,
        view.peer,
        transport=view.transport,
        round_trip_seconds=figures.round_trip_seconds,
        bytes_per_second=figures.bytes_per_second,
        skew_seconds=figures.skew_seconds,
    )


def _failed(view: View, cause: Cause, detail: str) -> View:
    return View(view.rank, view.peer, cause.value, detail, view.transport)


def _follow(sock: socket.socket) -> None:
    """Answers the rank that measures, which also says what goes wrong."""
    watch_over(sock)
    try:
        measure.follow(sock, MEASURE_SECONDS)
    except (measure.ClosedError, OSError):
        return


def _cause_of(error: OSError) -> tuple[Cause, str]:
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return Cause.SILENT, f"no answer within {CONNECT_SECONDS:g} s"
    if isinstance(error, ConnectionRefusedError):
        return Cause.REFUSED, "connection refused"
    reason = os.strerror(error.errno).lower() if error.errno else str(error)
    return Cause.NO_WAY, f"its own system does not send there ({reason})"


def _is_refused(host: str, port: int) -> bool:
    """Returns whether nobody listens there any more; False where that cannot be told."""
    try:
        socket.create_connection((host, port), timeout=_TICK_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
