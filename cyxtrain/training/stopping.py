"""Requests to stop a fit before its last epoch, to save, or to validate; all ranks apply them at the same step.

Each rank has its own requests: a signal arrived, its time limit has passed, a callback ends the fit, or a checkpoint or
a validation is due by the clock. They are sent with the gradients of a step, so that after it every rank knows the
requests of all ranks, without another message.
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
from typing import Any

import torch
import torch.distributed as dist

from cyxtrain.checkpoint.files import remove_unfinished
from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.environment import loader_workers, process_env
from cyxtrain.environment.processes import has_native_handler
from cyxtrain.errors import BLAMING_ANOTHER, on_all_ranks
from cyxtrain.parallel.layout import NUM_SIGNALS
from cyxtrain.training.state import Position, TrainingState
from cyxtrain.world import runtime
from cyxtrain.world.world import World


class StopRequest(enum.IntEnum):
    """What a rank can request, not only to stop, by its index among the signals."""

    TERMINATE = 0
    """SIGTERM, SIGHUP or SIGUSR1: end the program."""
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
    StopRequest.TERMINATE: "terminated by {}",
    StopRequest.INTERRUPT: "interrupted by Ctrl-C",
    StopRequest.FINISH: "max_time_seconds has passed",
}
"""Why a fit stops before its end, for people; the most urgent first."""
# Signals that ask to stop, unless the program ignores them.
_ASKING = {signal.SIGINT: StopRequest.INTERRUPT, signal.SIGTERM: StopRequest.TERMINATE}
# Signals that ask to stop, unless the program ignores them or handles them itself.
_UNLESS_USED: dict[int, StopRequest] = {}
if sys.platform == "win32":
    # What the launcher sends there.
    _ASKING[signal.SIGBREAK] = StopRequest.TERMINATE
else:
    _UNLESS_USED = dict.fromkeys((signal.SIGHUP, signal.SIGUSR1), StopRequest.TERMINATE)
_REQUESTS = _ASKING | _UNLESS_USED

# How long the second Ctrl-C waits for Python's own handler, which does not run while the main thread is in C++.
_HANDLER_SECONDS = 2.0
# After Ctrl-C a fit without checkpoints ends within so many seconds, even in a step that does not end.
_UNSAVED_SECONDS = 2.0
# Within so many seconds the launcher passes on a Ctrl-C that its ranks may have received, too.
_PASSED_ON_SECONDS = 0.2
# Ranks that are asked to stop at once give up within so many seconds of each other.
_CLOSE_SECONDS = 0.2


class StoppedError(Exception):
    """Stops a fit in good order; never seen outside of it."""

    def __init__(self, request: StopRequest) -> None:
        super().__init__(request.name)
        self.request = request
        self.number = 0
        """After TERMINATE: the number of the signal, the same on all ranks."""


class StopSignals:
    """The requests of this rank, while a fit runs; rank 0's clock tells when to save and to validate."""

    def __init__(self, config: DistributedTrainingConfig, state: TrainingState, world: World) -> None:
        self._config = config
        self._world = world
        self._state = state
        self._requested: set[StopRequest] = set()
        self._is_stopping = False
        # The first signal that asked to end the program.
        self._number = 0
        self._interrupted_at = 0.0
        self._second_ctrl_c_from = 0.0
        self._gives_up_at = math.inf
        self._grace_seconds = process_env.grace_seconds()
        self._ends_at = math.inf
        if config.max_time_seconds is not None:
            self._ends_at = time.monotonic() + config.max_time_seconds
        # Seconds between two checkpoints, and between two validations; only the clock of rank 0 counts.
        self._intervals = [math.inf, math.inf]
        if world.is_first:
            minutes = (config.checkpoint_every_n_minutes, config.validate_every_n_minutes)
            self._intervals = [60.0 * (each or math.inf) for each in minutes]
        self._latest = [time.monotonic()] * len(self._intervals)
        self._has_clock = any(map(math.isfinite, (self._ends_at, *self._intervals)))
        # The handlers of signals outside the fit.
        self._before: dict[int, Any] = {}
        self._stack = contextlib.ExitStack()

    def local(self) -> list[float]:
        """Return the requests of this rank as signals."""
        if self._has_clock:
            now = time.monotonic()
            if now >= self._ends_at:
                self._requested.add(StopRequest.FINISH)
            if any(self._due(now)):
                self._requested.add(StopRequest.CLOCK)
        if self._state.stop_training:
            self._requested.add(StopRequest.COMPLETE)
        if not self._requested:
            return [0.0] * NUM_SIGNALS
        return [float(request in self._requested) for request in StopRequest]

    def take_due(self) -> tuple[bool, bool]:
        """Return whether a checkpoint and a validation are due by rank 0's clock. All ranks call it."""
        now = time.monotonic()
        due = self._world.broadcast(torch.tensor(self._due(now), device="cpu"))
        saves, validates = map(bool, due.tolist())
        if saves:
            self._latest[0] = now
        if validates:
            self._latest[1] = now
        self._requested.discard(StopRequest.CLOCK)
        return saves, validates

    def begin_stop(self, stop: StoppedError) -> None:
        """Drop all requests, also those that follow, and agree on the signal. All ranks call it."""
        self._is_stopping = True
        self._requested.clear()
        self._ends_at = math.inf
        self._has_clock = False
        stop.number = int(self._world.reduce(torch.tensor(self._number, device="cpu"), dist.ReduceOp.MAX))

    def seconds_left(self) -> float:
        """Return the seconds until this process ends, whatever it does; infinite if no signal has asked for that."""
        return self._gives_up_at - time.monotonic()

    def want_to_stop(self) -> bool:
        """Return whether this rank requests to stop."""
        return first_reason_to_stop(self.local()) is not None

    def agree(self, *, flagged: bool = False) -> tuple[list[float], int | None]:
        """Return (requests of any rank, the lowest flagged rank or None), the same on every rank. All call it."""
        world_size = self._world.size
        # The lower a rank, the larger its flag: the maximum tells which one is the lowest.
        flag = float(world_size - self._world.rank) if flagged else 0.0
        numbers = torch.tensor([*self.local(), flag], device="cpu")
        *received, largest = self._world.reduce(numbers, dist.ReduceOp.MAX).tolist()
        if not largest:
            return received, None
        return received, world_size - int(largest)

    @contextlib.contextmanager
    def catching_signals(self) -> Iterator[None]:
        """Turn signals within into requests to stop; only a second Ctrl-C does what it did before."""
        self._before = stopping_signals()
        with contextlib.ExitStack() as stack:
            for number, handler in self._before.items():
                stack.callback(signal.signal, number, handler)
                signal.signal(number, self._handle)
            self._stack = stack.enter_context(contextlib.ExitStack())
            # A worker of a loader may die of the same signal: in a stop that is not an error.
            loader_workers.ask(self._wait_for_request)
            try:
                yield
            except KeyboardInterrupt as error:
                # The second Ctrl-C needs no traceback either.
                raise on_all_ranks(error) from None
            except BLAMING_ANOTHER:
                if self._interrupted_at:
                    raise on_all_ranks(KeyboardInterrupt()) from None
                if time.monotonic() > self._gives_up_at - _CLOSE_SECONDS:
                    # The rank that gave up first has printed why.
                    raise on_all_ranks(SystemExit(128 + self._number)) from None
                raise
        # A signal after the last step takes effect now; an error in flight goes first.
        late = {StopRequest.TERMINATE: self._number, StopRequest.INTERRUPT: signal.SIGINT}
        for request in self._requested & set(late):
            number = late[request]
            if self._before[number] is signal.SIG_DFL:
                # It would end the process at once, without running its `finally` blocks.
                raise SystemExit(128 + number)
            signal.raise_signal(number)

    def _handle(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and self._interrupted_at:
            # Sooner, the launcher has passed on the first one.
            if now >= self._second_ctrl_c_from:
                signal.signal(number, self._before[number])
                signal.raise_signal(number)
            return
        if not self._is_stopping:
            self._requested.add(_REQUESTS[signal.Signals(number)])
        if number == signal.SIGINT:
            self._handle_first_ctrl_c(now)
        else:
            # The first of several: launchers, schedulers and people send a signal more than once.
            self._number = self._number or number
            self._limit_time(number)

    def _handle_first_ctrl_c(self, now: float) -> None:
        """Wait for the second one, which ends the fit at once; without a checkpoint to write, end it soon."""
        self._second_ctrl_c_from = now
        if process_env.passes_signals_on():
            self._second_ctrl_c_from += _PASSED_ON_SECONDS
        self._interrupted_at = now
        self._stack.enter_context(_second_ctrl_c_handled(self._second_ctrl_c_from))
        if self._before[signal.SIGINT] is signal.default_int_handler and not runtime.is_interactive():
            self._limit_time(signal.SIGINT)
            if not self._config.makes_checkpoints:
                self._call_later(_UNSAVED_SECONDS, os.kill, os.getpid(), signal.SIGINT)
        if sys.stderr.isatty():
            # Not print: a signal may come in the middle of one.
            os.write(2, b"\nstopping after this step; Ctrl-C again stops at once\n")

    def _wait_for_request(self, seconds: float) -> bool:
        """Return whether this rank is asked to stop, or is within so many seconds."""
        deadline = time.monotonic() + seconds
        while not (self._is_stopping or self.want_to_stop()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._is_stopping or self.want_to_stop()

    def _limit_time(self, number: int) -> None:
        """Let this process end before its launcher kills it, counted from the first signal."""
        if self._gives_up_at < math.inf:
            return
        seconds = max(self._grace_seconds - 2.0, self._grace_seconds / 2)
        self._gives_up_at = time.monotonic() + seconds
        delay = seconds
        if not self._world.is_first:
            # The others later, so that they know whether rank 0 has printed the line.
            delay += (self._grace_seconds - seconds) / 4
        self._call_later(delay, self._give_up, number, seconds)

    def _call_later(self, seconds: float, function: Any, *arguments: Any) -> None:
        timer = threading.Timer(seconds, function, arguments)
        timer.daemon = True
        timer.start()
        self._stack.callback(timer.cancel)

    def _give_up(self, number: int, seconds: float) -> None:
        """End this process from a timer's thread: the main thread is stuck in a step or a checkpoint."""
        position = self._state.position
        where = f"step {position.step + 1:,}, in epoch {position.epoch + 1},"
        if self._is_stopping:
            where = f"the checkpoint of step {position.step:,}"
        message = (
            f"{where} did not end within {seconds:g} s of {signal.Signals(number).name} on rank {self._world.rank}: "
            f"nothing was saved. To allow more, set --grace or {process_env.GRACE} (now {self._grace_seconds:g}).\n"
        )
        if not runtime.has_failed():
            # Not print, whose lock the main thread may hold; in a thread, because it may block.
            printing = threading.Thread(target=os.write, args=(2, message.encode()), daemon=True)
            printing.start()
            printing.join(1.0)
        remove_unfinished()
        # sys.exit would end this thread alone.
        os._exit(128 + number)

    def _due(self, now: float) -> list[bool]:
        return [now - latest >= seconds for latest, seconds in zip(self._latest, self._intervals, strict=True)]


def stopping_signals() -> dict[int, Any]:
    """Return the signals that stop a fit, with their handlers now; empty outside of the main thread."""
    found: dict[int, Any] = {}
    # Python handles signals in the main thread only.
    if threading.current_thread() is not threading.main_thread():
        return found
    for number in _REQUESTS:
        handler = signal.getsignal(number)
        if handler in (None, signal.SIG_IGN):
            continue
        is_free = handler is signal.SIG_DFL and not has_native_handler(number)
        if number in _ASKING or is_free:
            found[number] = handler
    return found


@contextlib.contextmanager
def _second_ctrl_c_handled(not_before: float) -> Iterator[None]:
    """End the group on Ctrl-C if Python's own handler does not run within two seconds.

    While an accelerator runs backward, the main thread waits in C++, where Python calls no signal handler. Once the
    group has ended, so has each wait for another rank, and Python raises KeyboardInterrupt.
    """
    ended = threading.Event()
    reader, writer = socket.socketpair()
    # As set_wakeup_fd requires.
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def listen() -> None:
        with reader:
            while received := reader.recv(64):
                is_second = signal.SIGINT in received and time.monotonic() > not_before
                if is_second and not ended.wait(_HANDLER_SECONDS):
                    runtime.end_group(KeyboardInterrupt(), in_training=True)

    threading.Thread(target=listen, name="cyxtrain-ctrl-c", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        signal.set_wakeup_fd(before)
        writer.close()


def first_reason_to_stop(received: Sequence[float]) -> StopRequest | None:
    """Return the most urgent request of any rank to stop before the end, or None."""
    return next((each for each in REASONS if received[each] > 0), None)


def stop_if_requested(received: Sequence[float]) -> None:
    """Raise StoppedError for the most urgent request to stop of any rank, if there is one."""
    request = first_reason_to_stop(received)
    if request is not None:
        raise StoppedError(request)


def exit_for(stop: StoppedError | None) -> None:
    """Exit with a shell's code after a signal; raise KeyboardInterrupt after Ctrl-C, not at a prompt."""
    if stop is None:
        return
    if stop.request is StopRequest.TERMINATE:
        raise on_all_ranks(SystemExit(128 + stop.number))
    if stop.request is StopRequest.INTERRUPT and not runtime.is_interactive():
        raise on_all_ranks(KeyboardInterrupt())


def explain_stop(stop: StoppedError, position: Position, config: DistributedTrainingConfig, *, is_failing: bool) -> str:
    """Describe where a fit has stopped before its end, and why; `is_failing`: its checkpoint cannot be written."""
    kept = "checkpoints are off, nothing was saved"
    if is_failing:
        kept = f"its checkpoint could not be written to {config.checkpoint_dir}"
    elif config.makes_checkpoints:
        kept = f"a checkpoint is in {config.checkpoint_dir}"
    name = signal.Signals(stop.number or signal.SIGTERM).name
    return f"{describe_place(position)}: {REASONS[stop.request].format(name)}; {kept}"


def describe_place(position: Position) -> str:
    """Describe where in the running epoch a fit stops."""
    return f"after step {position.step:,}, in epoch {position.epoch + 1}"
