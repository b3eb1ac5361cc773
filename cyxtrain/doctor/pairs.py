"""One rank's tests of every pair: each rank connects to the other, and the higher one measures.

Both directions are tried: the ring's higher rank connects to the lower one, other libraries do the opposite, and hosts
may get other ranks in the next run.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Sequence
from dataclasses import replace

from cyxtrain.doctor import measure
from cyxtrain.doctor.store_exchange import Cause, PeerResult, RankInfo, Roster
from cyxtrain.environment.processes import State, state_of
from cyxtrain.errors import reason_of
from cyxtrain.ring import Deadline, RankProbe, StoreClient

CONNECT_SECONDS = 5.0
"""For both directions of a pair together."""
MEASURE_SECONDS = 8.0
_SLACK_SECONDS = 2.0
ROUND_SECONDS = CONNECT_SECONDS + MEASURE_SECONDS + _SLACK_SECONDS
"""The longest time for a pair; a rank that is more than one round late counts as absent."""
_HEARTBEAT_SECONDS = 1.0
# A rank whose heartbeat is missing for longer is suspended or cut off; it sends none while it measures.
_SILENT_SECONDS = MEASURE_SECONDS + 4.0
_POLL_SECONDS = 0.02
_DETAILS = {
    Cause.ABSENT: "it did not take part in the test",
    Cause.BROKE: "its process has exited",
    Cause.REFUSED: "connection refused",
}


def rounds(ranks: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return all pairs, the lower rank first, in rounds: each rank at most once in a round.

    N - 1 rounds for an even number of ranks, N for an odd one.
    Source: the circle method; Kirkman, On a problem in combinations (1847).
    """
    circle: list[int | None] = [*sorted(ranks)]
    if len(circle) % 2 == 1:
        circle.append(None)  # the rank that faces it pauses
    half = len(circle) // 2
    found: list[list[tuple[int, int]]] = []
    for _ in range(len(circle) - 1):
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found


class PairTests:
    """One rank's tests with all other ranks, one at a time; the sockets of `probe` stay the caller's."""

    def __init__(
        self, client: StoreClient, rank: int, roster: Roster, infos: dict[int, RankInfo], probe: RankProbe
    ) -> None:
        self.roster = roster
        self.infos = infos
        self._client = client
        self._rank = rank
        self._own = infos[rank].record
        self._probe = probe
        self._began = time.monotonic()
        self._next_heartbeat = Deadline(0.0)
        probe.start(infos[0].record.run, bytes.fromhex(roster.token))

    def run(self) -> None:
        """Test every pair of this rank and write the results to the store."""
        for number, pairs in enumerate(rounds(self.roster.ranks)):
            for pair in pairs:
                if self._rank in pair:
                    peer = sum(pair) - self._rank
                    self._client.write(f"result/{self._rank}/{peer}", self._test(peer, number))

    def wait_for_key(self, key: str, peer: int, deadline: Deadline, *, probes_port: bool = False) -> Cause:
        """Wait until the rank `peer` has written a key to the store; return why it has not.

        Without its heartbeat the wait ends early; with `probes_port` also if its port refuses connections, which tells
        sooner about a process on another machine that has exited, or a firewall.
        """
        record = self.infos[peer].record
        cause = Cause.NONE
        heartbeat = b""
        next_look = Deadline(_HEARTBEAT_SECONDS)
        silence = Deadline(_SILENT_SECONDS)

        def is_decided() -> bool:
            nonlocal cause, heartbeat, next_look, silence
            self._serve()
            if self._client.has(key):
                return True
            if state_of(record.process, self._own.process) is State.GONE:
                cause = Cause.BROKE
            elif next_look.passed():
                next_look = Deadline(_HEARTBEAT_SECONDS)
                if probes_port and record.machine != self._own.machine and self._probe.refuses(record):
                    cause = Cause.REFUSED
                latest = self._client.get(f"heartbeat/{peer}") or b""
                if latest != heartbeat:
                    heartbeat = latest
                    silence = Deadline(_SILENT_SECONDS)
            return cause is not Cause.NONE or silence.passed()

        deadline.poll_until(is_decided)
        if cause is Cause.NONE and not self._client.has(key):
            return Cause.ABSENT
        return cause

    def _serve(self, seconds: float = 0.0) -> None:
        """Accept connections for at most `seconds`, and write a heartbeat when it is due."""
        self._probe.serve(seconds)
        if self._next_heartbeat.passed():
            self._next_heartbeat = Deadline(_HEARTBEAT_SECONDS)
            self._client.set(f"heartbeat/{self._rank}", str(time.monotonic()))

    def _test(self, peer: int, number: int) -> PeerResult:
        """Test the pair with a peer in a round; `number` is the round's."""
        self._client.set(f"ready/{self._rank}/{peer}", "yes")
        until = self._began + (number + 1) * ROUND_SECONDS + _SLACK_SECONDS
        patience = Deadline(until - time.monotonic())
        cause = self.wait_for_key(f"ready/{peer}/{self._rank}", peer, patience, probes_port=True)
        if cause is not Cause.NONE:
            return PeerResult(self._rank, peer, cause.value, _DETAILS[cause])
        deadline = Deadline(CONNECT_SECONDS)
        dialed, cause, detail = self._dial(peer, deadline)
        while not deadline.passed() and peer not in self._probe.accepted:
            self._serve(_POLL_SECONDS)
        accepted = self._probe.accepted.pop(peer, None)
        with contextlib.ExitStack() as stack:
            for sock in filter(None, (dialed, accepted)):
                stack.enter_context(sock)
            transport = self._probe.transport_to(self.infos[peer].record)
            result = PeerResult(self._rank, peer, cause.value, detail, transport)
            is_higher = self._rank > peer
            if dialed is not None and is_higher:
                return _measured(result, dialed)
            if accepted is not None and not is_higher:
                measure.follow(accepted, MEASURE_SECONDS)
            return result

    def _dial(self, peer: int, deadline: Deadline) -> tuple[socket.socket | None, Cause, str]:
        """Return (connection or None, why it failed, the detail for the report)."""
        try:
            # It serves meanwhile: the peer dials this rank too, and counts on its heartbeat.
            return self._probe.dial(peer, self.infos[peer].record, deadline, self._serve), Cause.NONE, ""
        except ConnectionAbortedError as error:
            return None, Cause.STRANGER, f"another program answers there ({error})"
        except ConnectionResetError:
            return None, Cause.BROKE, "it closed the connection"
        except ConnectionRefusedError:
            return None, Cause.REFUSED, "connection refused"
        except OSError as error:
            if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
                return None, Cause.SILENT, f"no answer within {CONNECT_SECONDS:g} s"
            return None, Cause.NO_WAY, f"its own system does not send there ({reason_of(error).lower()})"


def _measured(result: PeerResult, sock: socket.socket) -> PeerResult:
    """Return a result with measurements, or why there are none."""
    cause = Cause.BROKE
    try:
        trip, rate, skew = measure.lead(sock, MEASURE_SECONDS)
        return replace(result, round_trip_seconds=trip, bytes_per_second=rate, skew_seconds=skew)
    except measure.LargeLostError:
        cause = Cause.LARGE
        detail = f"short messages arrive, and 256 KiB do not within {MEASURE_SECONDS:g} s"
    except TimeoutError:
        detail = f"connected, and then no answer within {MEASURE_SECONDS:g} s"
    except OSError as error:
        detail = f"the connection ended during the test ({(error.strerror or 'it was closed').lower()})"
    return replace(result, cause=cause.value, detail=detail)
