"""Requests to stop a fit, or to save, before its last epoch; all ranks apply them at the same step.

Each rank has its own requests: a signal arrived, or its time limit has passed. They are sent with the gradients of a
step, so that after it every rank knows those of all ranks, without another message.
"""

from __future__ import annotations

import contextlib
import enum
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType

import torch
import torch.distributed as dist

from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.errors import on_all_ranks
from cyxtrain.parallel.layout import NUM_SIGNALS
from cyxtrain.training.state import Position, TrainingState
from cyxtrain.world import runtime


class StopRequest(enum.IntEnum):
    """What a rank can request, by its index among the signals."""

    TERMINATE = 0
    """SIGTERM: end the program."""
    INTERRUPT = 1
    """SIGINT, that is Ctrl-C: stop at the user's request."""
    FINISH = 2
    """The time limit has passed."""
    COMPLETE = 3
    """A callback has ended the fit, which is then complete."""
    CLOCK = 4
    """A checkpoint or a validation is due by rank 0's clock; `StopSignals.take_due` tells which."""


assert len(StopRequest) == NUM_SIGNALS
REASONS = {
    StopRequest.TERMINATE: "terminated by SIGTERM",
    StopRequest.INTERRUPT: "interrupted by Ctrl-C",
    StopRequest.FINISH: "max_time_seconds has passed",
}
"""Why a fit stops before its end, for people; the most urgent first."""
_SIGNALS = {signal.SIGINT: StopRequest.INTERRUPT, signal.SIGTERM: StopRequest.TERMINATE}
if sys.platform == "win32":
    _SIGNALS[signal.SIGBREAK] = StopRequest.TERMINATE  # what the launcher sends there
_PATIENCE_SECONDS = 8.0
"""After SIGTERM a process ends within ten seconds, even in a step that does not end."""

_HANDLER_SECONDS = 2.0
"""How long the second Ctrl-C waits for Python's own handler, which does not run while the main thread is in C++."""


class StoppedError(Exception):
    """Stops a fit in good order; never seen outside of it."""

    def __init__(self, request: StopRequest) -> None:
        super().__init__(request.name)
        self.request = request


class StopSignals:
    """The requests of this rank, while a fit runs; if it `keeps_time`, its clock tells when something is due."""

    def __init__(self, config: DistributedTrainingConfig, state: TrainingState, *, keeps_time: bool) -> None:
        self._state = state
        self._requested: set[StopRequest] = set()
        limit = config.max_time_seconds
        minutes = (config.checkpoint_every_n_minutes, config.validate_every_n_minutes)
        self._ends = None if limit is None else time.monotonic() + limit
        self._intervals = [60.0 * each if keeps_time and each else math.inf for each in minutes]
        self._latest = [time.monotonic()] * len(minutes)
        self._has_clock = limit is not None or any(map(math.isfinite, self._intervals))
        self._timer: threading.Timer | None = None

    def local(self) -> list[float]:
        """Return the requests of this rank as signals."""
        if self._has_clock:
            now = time.monotonic()
            if self._ends is not None and now >= self._ends:
                self._requested.add(StopRequest.FINISH)
            if any(self._due(now)):
                self._requested.add(StopRequest.CLOCK)
        if self._state.stop_training:
            self._requested.add(StopRequest.COMPLETE)
        if not self._requested:
            return [0.0] * NUM_SIGNALS
        return [float(request in self._requested) for request in StopRequest]

    def take_due(self) -> tuple[bool, bool]:
        """Return whether a checkpoint and a validation are due by rank 0's clock; all ranks call it after CLOCK."""
        now = time.monotonic()
        due = torch.tensor(self._due(now), device="cpu")
        dist.broadcast(due, 0, group=runtime.cpu_group())
        saves, validates = map(bool, due.tolist())
        self._latest = [now if each else before for each, before in zip((saves, validates), self._latest, strict=True)]
        self._requested.discard(StopRequest.CLOCK)
        return saves, validates

    def clear(self) -> None:
        """Drop all requests: the fit stops."""
        self._cancel()
        self._requested.clear()
        self._ends, self._has_clock = None, False

    def want_to_stop(self) -> bool:
        """Return whether this rank requests to stop."""
        return first_reason_to_stop(self.local()) is not None

    def agree(self, *, flagged: bool = False) -> tuple[list[float], int | None]:
        """Return (requests of any rank, the lowest flagged rank or None), the same on every rank. All call it."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        numbers = torch.tensor([*self.local(), float(world_size - rank) if flagged else 0.0], device="cpu")
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=runtime.cpu_group())
        *received, first = numbers.tolist()
        return received, world_size - int(first) if first else None

    @contextlib.contextmanager
    def catching_signals(self) -> Iterator[None]:
        """Turn the first Ctrl-C or SIGTERM within into a request; the second does what it did before."""
        if threading.current_thread() is not threading.main_thread():
            yield  # Python handles signals in the main thread only
            return
        before = {number: signal.getsignal(number) for number in _SIGNALS}

        def handle(number: int, _: FrameType | None) -> None:
            self._requested.add(_SIGNALS[signal.Signals(number)])
            signal.signal(number, before[signal.Signals(number)])
            if number != signal.SIGINT:
                self._timer = threading.Timer(_PATIENCE_SECONDS, os.kill, (os.getpid(), number))
                self._timer.daemon = True
                self._timer.start()
            else:
                stack.enter_context(_second_ctrl_c_handled())
                if sys.stderr.isatty():
                    # Not print: a signal may come in the middle of one.
                    os.write(2, b"\nstopping after this step; Ctrl-C again stops at once\n")

        stack = contextlib.ExitStack()
        try:
            for number in _SIGNALS:
                if before[number] not in (None, signal.SIG_IGN):
                    signal.signal(number, handle)
            yield
        finally:
            self._cancel()
            stack.close()
            for number, handler in before.items():
                if handler is not None:
                    signal.signal(number, handler)
            # A signal after the last step takes effect now.
            for number, request in _SIGNALS.items():
                if request in self._requested:
                    signal.raise_signal(number)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _due(self, now: float) -> list[bool]:
        return [now - latest >= seconds for latest, seconds in zip(self._latest, self._intervals, strict=True)]


@contextlib.contextmanager
def _second_ctrl_c_handled() -> Iterator[None]:
    """End the group on Ctrl-C if Python's own handler does not run within two seconds.

    While an accelerator runs backward, the main thread waits in C++, where Python calls no signal handler. Once the
    group has ended, so has each wait for another rank, and Python raises KeyboardInterrupt.
    """
    ended, (reader, writer) = threading.Event(), socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def listen() -> None:
        with reader:
            while received := reader.recv(64):
                if signal.SIGINT in received and not ended.wait(_HANDLER_SECONDS):
                    runtime.end_group(KeyboardInterrupt(), in_training=True)

    threading.Thread(target=listen, name="cyxtrain-ctrl-c", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        signal.set_wakeup_fd(before)
        writer.close()


def first_reason_to_stop(received: Sequence[float]) -> StopRequest | None:
    """Return the most urgent request of any rank to stop before the end; None: there is none."""
    return next((each for each in REASONS if received[each] > 0), None)


def stop_if_requested(received: Sequence[float]) -> None:
    """Raise StoppedError for the most urgent request to stop of any rank, if there is one."""
    request = first_reason_to_stop(received)
    if request is not None:
        raise StoppedError(request)


def exit_for(request: StopRequest) -> None:
    """Exit after SIGTERM, with a shell's code; raise KeyboardInterrupt after Ctrl-C, but not at a prompt."""
    if request is StopRequest.TERMINATE:
        raise on_all_ranks(SystemExit(128 + signal.SIGTERM))
    if request is StopRequest.INTERRUPT and not runtime.is_interactive():
        raise on_all_ranks(KeyboardInterrupt())


def explain_stop(request: StopRequest, position: Position, config: DistributedTrainingConfig) -> str:
    """Describe where a fit has stopped before its end, and why."""
    kept = "checkpoints are off, nothing was saved"
    if config.makes_checkpoints:
        kept = f"a checkpoint is in {config.checkpoint_dir}"
    return f"{place_in_words(position)}: {REASONS[request]}; {kept}"


def place_in_words(position: Position) -> str:
    """Describe where in the running epoch a fit stops."""
    return f"after step {position.step:,}, in epoch {position.epoch + 1}"
