"""Which ranks are alive: the operating system decides on one machine, heartbeats between machines.

No sockets and no threads: its methods are called with what happened, and when.
"""

from __future__ import annotations

from cyxtrain.environment.processes import Process, State, state_of
from cyxtrain.errors import CyxtrainError, PeerLostError, PeerSilentError

STOPPED_SECONDS = 4.0
"""How long a rank on this machine may be stopped: a stop of three seconds is always forgiven, one of six never."""

GONE_SECONDS = 0.5
"""Also how often the operating system is asked, even if heartbeats are more frequent."""


class Heartbeat:
    """The last signs of life of all other ranks; `now` is in seconds of `time.monotonic`.

    A rank on another machine may be silent for `timeout_seconds`. Ranks are global: the launcher's numbers.
    """

    def __init__(self, own: Process, others: dict[int, Process], timeout_seconds: float, now: float) -> None:
        self._own = own
        self._others = dict(others)
        self._timeout_seconds = timeout_seconds
        self._last_data = dict.fromkeys(others, now)
        # The state that a rank has had since that time; data from the rank starts the time anew.
        self._timed_states: dict[int, State] = {}
        self._state_since: dict[int, float] = {}
        self._system_states: dict[int, State | None] = {}  # as the operating system told them last; None: it cannot
        self._ask_system_at = now

    def received(self, peer: int, now: float) -> None:
        """Note that data arrived from a rank."""
        self._last_data[peer] = now
        self._timed_states.pop(peer, None)

    def forget(self, peer: int) -> None:
        """Stop watching a rank that has left."""
        self._others.pop(peer, None)

    def discount_pause(self, seconds: float, now: float) -> None:
        """Discount a time for which this process itself was suspended."""
        for clock in (self._last_data, self._state_since):
            for peer, since in clock.items():
                clock[peer] = min(since + seconds, now)  # not ahead: data may have arrived since the pause began

    def examine(self, now: float) -> CyxtrainError | None:
        """Return why the group must end, or None. Cost: two files of /proc for each rank here, twice a second."""
        if now >= self._ask_system_at:
            self._ask_system_at = now + GONE_SECONDS
            self._system_states = {peer: state_of(process, self._own) for peer, process in self._others.items()}
        for peer, process in self._others.items():
            state = self._system_states[peer]
            if state is None:
                error = self._examine_silence(peer, now)
            else:  # silence does not count here: a busy process may hold the GIL, and send no heartbeats
                error = self._examine_process(peer, process, state, now)
            if error is not None:
                return error
        return None

    def _examine_silence(self, peer: int, now: float) -> CyxtrainError | None:
        seconds = now - self._last_data[peer]
        if seconds < self._timeout_seconds:
            return None
        return PeerSilentError(
            f"rank {peer} is connected and has sent nothing for {seconds:.1f} s: its process is suspended, or one call "
            f"in it holds the GIL for as long. Look at rank {peer}; CYXTRAIN_HEARTBEAT_TIMEOUT_MS sets how long it may "
            "be silent.",
            rank=peer,
        )

    def _examine_process(self, peer: int, process: Process, state: State, now: float) -> CyxtrainError | None:
        if state is not self._timed_states.get(peer, State.ALIVE):
            self._timed_states[peer] = state
            self._state_since[peer] = now
        if state is State.ALIVE:
            return None
        seconds = now - self._state_since[peer]
        if state is State.GONE:
            # The end of its connection is noticed sooner, and a goodbye may have arrived that is not read yet.
            return None if seconds < GONE_SECONDS else lost_error(peer)
        if seconds < STOPPED_SECONDS:
            return None
        return PeerSilentError(
            f"rank {peer} is suspended (SIGSTOP or Ctrl-Z), and has been for {seconds:.1f} s (process {process.pid}). "
            "Start all ranks again, and suspend none of them for longer than three seconds.",
            rank=peer,
        )


def lost_error(peer: int) -> PeerLostError:
    """Return the error for a rank that has ended without a goodbye."""
    return PeerLostError(
        f"rank {peer} died: its process ended without an error message (killed, or out of memory?). "
        f"Look at the output of rank {peer}, and start all ranks again.",
        rank=peer,
    )
