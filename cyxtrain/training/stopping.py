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
    """What a rank can request, by its index among the signals."""

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
_ASKING = {signal.SIGINT: StopRequest.INTERRUPT, signal.SIGTERM: StopRequest.TERMINATE}
"""Signals that ask to stop, unless the program ignores them."""
_UNLESS_USED: dict[int, StopRequest] = {}
"""Signals that ask to stop, unless the program ignores them or has a handler of its own."""
if sys.platform == "win32":
    _ASKING[signal.SIGBREAK] = StopRequest.TERMINATE  # what the launcher sends there
else:
    _UNLESS_USED = dict.fromkeys((signal.SIGHUP, signal.SIGUSR1), StopRequest.TERMINATE)
_REQUESTS = _ASKING | _UNLESS_USED

_HANDLER_SECONDS = 2.0
"""How long the second Ctrl-C waits for Python's own handler, which does not run while the main thread is in C++."""
_UNSAVED_SECONDS = 2.0
"""After Ctrl-C a fit without checkpoints ends within so many seconds, even in a step that does not end."""
_PASSED_ON_SECONDS = 0.2
"""Within so many seconds the launcher passes on a Ctrl-C that its ranks may have received, too."""
_CLOSE_SECONDS = 0.2
"""Ranks that are asked to stop at once give up within so many seconds of each other."""


class StoppedError(Exception):
    """Stops a fit in good order; never seen outside of it."""

    def __init__(self, request: StopRequest) -> None:
        super().__init__(request.name)
        self.request = request
        self.number = 0
        """After TERMINATE, of which signal; the same on all ranks."""


class StopSignals:
    """The requests of this rank, while a fit runs; rank 0's clock tells when something is due."""

    def __init__(self, config: DistributedTrainingConfig, state: TrainingState, world: World) -> None:
        self._config = config
        self._world = world
        self._state = state
        self._requested: set[StopRequest] = set()
        self._is_stopping = False
        self._number = 0  # the first signal that asked to end the program
        self._interrupted_at = 0.0
        self._gives_up_at = math.inf
        self._grace_seconds = process_env.grace_seconds()
        limit = config.max_time_seconds
        minutes = (config.checkpoint_every_n_minutes, config.validate_every_n_minutes)
        self._ends = None if limit is None else time.monotonic() + limit
        self._intervals = [60.0 * each if world.is_first and each else math.inf for each in minutes]
        self._latest = [time.monotonic()] * len(minutes)
        self._has_clock = limit is not None or any(map(math.isfinite, self._intervals))
        self._before: dict[int, Any] = {}  # handlers
        self._stack = contextlib.ExitStack()

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
        due = self._world.broadcast(torch.tensor(self._due(now), device="cpu"))
        saves, validates = map(bool, due.tolist())
        self._latest = [now if each else before for each, before in zip((saves, validates), self._latest, strict=True)]
        self._requested.discard(StopRequest.CLOCK)
        return saves, validates

    def begin_stop(self, stop: StoppedError) -> None:
        """Drop all requests, also those that follow, and agree on the signal. All ranks call it."""
        self._is_stopping = True
        self._requested.clear()
        self._ends = None
        self._has_clock = False
        stop.number = int(self._world.reduce(torch.tensor(self._number, device="cpu"), dist.ReduceOp.MAX))

    def want_to_stop(self) -> bool:
        """Return whether this rank requests to stop."""
        return first_reason_to_stop(self.local()) is not None

    def agree(self, *, flagged: bool = False) -> tuple[list[float], int | None]:
        """Return (requests of any rank, the lowest flagged rank or None), the same on every rank. All call it."""
        rank, world_size = self._world.rank, self._world.size
        numbers = torch.tensor([*self.local(), float(world_size - rank) if flagged else 0.0], device="cpu")
        *received, first = self._world.reduce(numbers, dist.ReduceOp.MAX).tolist()
        return received, world_size - int(first) if first else None

    @contextlib.contextmanager
    def catching_signals(self) -> Iterator[None]:
        """Turn signals within into requests to stop; only a second Ctrl-C does what it did before."""
        self._before = stopping_signals()
        with contextlib.ExitStack() as stack:
            for number, handler in self._before.items():
                stack.callback(signal.signal, number, handler)
                signal.signal(number, self._handle)
            self._stack = stack.enter_context(contextlib.ExitStack())
            loader_workers.ask(self._wait_for_request)
            try:
                yield
            except KeyboardInterrupt as error:
                raise on_all_ranks(error) from None  # the second Ctrl-C needs no traceback either
            except BLAMING_ANOTHER:
                if self._interrupted_at:
                    raise on_all_ranks(KeyboardInterrupt()) from None
                if time.monotonic() > self._gives_up_at - _CLOSE_SECONDS:
                    raise on_all_ranks(SystemExit(128 + self._number)) from None  # that rank has printed why
                raise
        # A signal after the last step takes effect now; an error in flight goes first.
        late = {StopRequest.TERMINATE: self._number, StopRequest.INTERRUPT: signal.SIGINT}
        for request in self._requested & set(late):
            number = late[request]
            if self._before[number] is signal.SIG_DFL:  # which would end the process at once, without its `finally`
                raise SystemExit(128 + number)
            signal.raise_signal(number)

    def _handle(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        passes_on = process_env.passes_signals_on()
        if number == signal.SIGINT and self._interrupted_at:
            if now >= self._interrupted_at + _PASSED_ON_SECONDS * passes_on:  # otherwise the launcher has passed it on
                signal.signal(number, self._before[number])
                signal.raise_signal(number)
            return
        if not self._is_stopping:
            self._requested.add(_REQUESTS[signal.Signals(number)])
        if number != signal.SIGINT:
            self._number = self._number or number
            self._limit_time(number)
            return
        self._interrupted_at = now
        self._stack.enter_context(_second_ctrl_c_handled(now + _PASSED_ON_SECONDS * passes_on))
        if self._before[number] is signal.default_int_handler and not runtime.is_interactive():
            self._limit_time(number)
            if not self._config.makes_checkpoints:
                self._call_later(_UNSAVED_SECONDS, os.kill, os.getpid(), number)
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
        if self._gives_up_at == math.inf:
            seconds = max(self._grace_seconds - 2.0, self._grace_seconds / 2)
            self._gives_up_at = time.monotonic() + seconds
            # The others later, so that they know whether rank 0 has printed the line.
            later = (not self._world.is_first) * (self._grace_seconds - seconds) / 4
            self._call_later(seconds + later, self._give_up, number, seconds)

    def _call_later(self, seconds: float, function: Any, *arguments: Any) -> None:
        timer = threading.Timer(seconds, function, arguments)
        timer.daemon = True
        timer.start()
        self._stack.callback(timer.cancel)

    def _give_up(self, number: int, seconds: float) -> None:
        """End this process, in another thread than the main one, which does not come to an end."""
        position = self._state.position
        where = f"step {position.step + 1:,}, in epoch {position.epoch + 1},"
        if self._is_stopping:
            where = f"the checkpoint of step {position.step:,}"
        text = (
            f"{where} did not end within {seconds:g} s of {signal.Signals(number).name} on rank {self._world.rank}: "
            f"nothing was saved. To allow more, set --grace or {process_env.GRACE} (now {self._grace_seconds:g}).\n"
        )
        if not runtime.has_failed():
            # Not print, whose lock the main thread may hold; in a thread, because it may block.
            printing = threading.Thread(target=os.write, args=(2, text.encode()), daemon=True)
            printing.start()
            printing.join(1.0)
        remove_unfinished()
        os._exit(128 + number)

    def _due(self, now: float) -> list[bool]:
        return [now - latest >= seconds for latest, seconds in zip(self._latest, self._intervals, strict=True)]


def stopping_signals() -> dict[int, Any]:
    """Return the signals that stop a fit, with their handlers now; none outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return {}  # Python handles signals in the main thread only
    found: dict[int, Any] = {number: signal.getsignal(number) for number in _REQUESTS}
    free = [number for number in found if found[number] is signal.SIG_DFL and not has_native_handler(number)]
    return {n: found[n] for n in found if found[n] not in (None, signal.SIG_IGN) and (n in _ASKING or n in free)}


@contextlib.contextmanager
def _second_ctrl_c_handled(not_before: float) -> Iterator[None]:
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
    """Return the most urgent request of any rank to stop before the end; None: there is none."""
    return next((each for each in REASONS if received[each] > 0), None)


def stop_if_requested(received: Sequence[float]) -> None:
    """Raise StoppedError for the most urgent request to stop of any rank, if there is one."""
    request = first_reason_to_stop(received)
    if request is not None:
        raise StoppedError(request)


def exit_for(stop: StoppedError | None) -> None:
    """Exit after SIGTERM and its like, with a shell's code; raise KeyboardInterrupt after Ctrl-C, not at a prompt."""
    if stop is None:
        return
    if stop.request is StopRequest.TERMINATE:
        raise on_all_ranks(SystemExit(128 + stop.number))
    if stop.request is StopRequest.INTERRUPT and not runtime.is_interactive():
        raise on_all_ranks(KeyboardInterrupt())


def explain_stop(stop: StoppedError, position: Position, config: DistributedTrainingConfig) -> str:
    """Describe where a fit has stopped before its end, and why."""
    kept = "checkpoints are off, nothing was saved"
    if config.makes_checkpoints:
        kept = f"a checkpoint is in {config.checkpoint_dir}"
    name = signal.Signals(stop.number or signal.SIGTERM).name
    return f"{place_in_words(position)}: {REASONS[stop.request].format(name)}; {kept}"


def place_in_words(position: Position) -> str:
    """Describe where in the running epoch a fit stops."""
    return f"after step {position.step:,}, in epoch {position.epoch + 1}"
