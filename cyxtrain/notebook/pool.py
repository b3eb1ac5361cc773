"""A pool of worker processes: ranks of this machine that one process starts, uses and ends."""

from __future__ import annotations

import contextlib
import json
import math
import queue
import re
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import Pipe
from types import FrameType
from typing import Any, NamedTuple

from cyxtrain.environment import process_env, standard_streams
from cyxtrain.errors import PeerLostError, RendezvousError
from cyxtrain.notebook.worker import NAME, Answer, Channel, Job, Ready, Report, Signal
from cyxtrain.training.stopping import stopping_signals
from cyxtrain.workers.machine import free_port, launch_environment
from cyxtrain.workers.output import Terminal
from cyxtrain.workers.process import RankExit, RankSpec
from cyxtrain.workers.supervisor import SLICE_SECONDS, Supervisor
from cyxtrain.world import runtime

START_SECONDS = 120.0
"""For all workers to start; importing PyTorch may take long on a slow disk."""
# For workers to end after our process has ended: within a second nothing is left.
_ORPHAN_SECONDS = 0.5
# For the other ranks to answer after one that cannot take another job.
_AFTER_ERROR_SECONDS = 5.0
# For the workers' output to arrive after their answers.
_DRAIN_SECONDS = 2.0
# The notebook's sys.path, so that workers import the same modules, this package included.
_START = (
    f'import json, os, sys; sys.path[:] = json.loads(os.environ["{process_env.WORKER_CHANNEL}"])["path"]; '
    "from cyxtrain.notebook.worker import main; main()"
)


class _Received(NamedTuple):
    rank: int
    message: Ready | Report | Answer


class _Wrote(NamedTuple):
    to_stderr: bool
    lines: bytes


_Event = _Received | _Wrote | Signal | RankExit


@dataclass
class JobAnswers:
    """The results of a job."""

    by_rank: dict[int, Any] = field(default_factory=dict)
    ended: list[RankExit] = field(default_factory=list)
    """Workers that have exited instead, the first one first."""
    can_continue: bool = True
    """Whether all can take another job; otherwise the caller must close the pool."""

    def check(self) -> None:
        """Raise PeerLostError, naming the first one, if a worker has exited."""
        if self.ended:
            first = self.ended[0]
            raise PeerLostError(
                f"{first.label} has exited: its worker process ended ({first.describe()}). Its last output is above; "
                "the next call starts new workers.",
                rank=first.index,
            )


@dataclass(frozen=True)
class _Writer:
    """Where a supervisor's terminal writes to: a queue of events."""

    post: Callable[[_Event], None]
    to_stderr: bool

    def write(self, data: bytes, /) -> int:
        """Post whole lines."""
        self.post(_Wrote(self.to_stderr, data))
        return len(data)


class Pool:
    """Worker processes that are ranks 0 to `num_processes` - 1 of their own world.

    One thread at a time may use it. When this process ends, however it ends, they end within a second.
    """

    def __init__(self, num_processes: int, variables: Mapping[str, str]) -> None:
        self.num_processes = num_processes
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._is_closed = False
        self._has_ended = False
        self._problem: OSError | None = None
        self._ready: set[int] = set()
        self._signals: list[int] = []  # received, and not handled yet
        self._is_interrupted = False  # the workers, in this job
        self._marks = 0  # streams of workers of which the job's output has arrived
        self._mark = f"\0{secrets.token_hex(8)}\n".encode()
        standard_streams.open_absent()  # otherwise a worker could inherit a channel as its stdout
        self._channels: Sequence[Channel]
        self._ends: Sequence[Channel]
        self._channels, self._ends = zip(*(Pipe() for _ in range(num_processes)), strict=True)
        terminal = Terminal(_Writer(self._events.put, to_stderr=False), _Writer(self._events.put, to_stderr=True))
        self._port = contextlib.ExitStack()
        specs = _specs(self._ends, variables, str(self._port.enter_context(free_port())))
        self._supervisor = Supervisor(specs, terminal, self._note_exit, _ORPHAN_SECONDS)
        targets: dict[str, Callable[[], None]] = {"workers": self._supervise}
        for rank, channel in enumerate(self._channels):
            targets[f"worker {rank}"] = partial(self._listen, rank, channel)
        self._threads = [threading.Thread(target=target, name=name, daemon=True) for name, target in targets.items()]

    def start(self) -> None:
        """Start the workers without waiting until they are ready."""
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:  # Ctrl-C
            self.close()
            raise

    @property
    def is_usable(self) -> bool:
        """Whether it takes jobs."""
        return not self._is_closed and not self._has_ended

    def run(
        self,
        function: Callable[..., tuple[Any, bool]],
        arguments: tuple[Any, ...],
        apply: Callable[[Any], None],
        on_signal: Callable[[int], bool],
    ) -> JobAnswers:
        """Let all workers call a function as in `Job`, and return their answers.

        This thread calls `apply` with each report, and prints the workers' output on our stdout and stderr, with the
        rank for ranks other than 0. For a signal that arrives within `handling_signals` it calls `on_signal`, which
        returns whether to pass the signal on to the workers. If not, and at the second Ctrl-C, it ends them, and the
        signal takes its usual effect.
        """
        self._marks = 0
        self._is_interrupted = False
        try:
            self._send(Job(function, arguments, self._mark))
            answers = self._wait_for_answers(apply, on_signal)
            self._drain()
        except BaseException:
            self.close()  # workers that are still in this job cannot take the next one
            raise
        return answers

    def interrupt(self) -> None:
        """Send Ctrl-C to the workers, once in a job: a second one would stop a fit at once, in the middle of a step."""
        if not self._is_interrupted:
            self._is_interrupted = True
            self._send(Signal(signal.SIGINT))

    def close(self) -> None:
        """End all workers; when it returns, nothing of them is left."""
        self._is_closed = True
        self._supervisor.request_stop(signal.SIGKILL)  # nothing is worth waiting for
        for thread in self._threads:
            if thread.ident is not None:  # it was started
                thread.join()

    def abandon(self) -> None:
        """Close what a forked child has inherited: the workers belong to its parent and end with it."""
        self._is_closed = True
        for channel in (*self._channels, *self._ends):
            channel.close()
        self._port.close()
        self._supervisor.abandon()

    def _wait_for_answers(self, apply: Callable[[Any], None], on_signal: Callable[[int], bool]) -> JobAnswers:
        """Handle events until all workers have answered or exited, or their time after an error is up."""
        answers = JobAnswers()
        passed_on: set[int] = set()
        start_deadline = time.monotonic() + START_SECONDS
        deadline = math.inf
        while len(answers.by_rank) + len(answers.ended) < self.num_processes and time.monotonic() < deadline:
            self._check_start(start_deadline)
            event = self._next()
            if isinstance(event, _Wrote):
                self._print(event)
            elif isinstance(event, _Received):
                self._receive(event, answers, apply)
            elif isinstance(event, Signal) and event.number in self._signals:  # otherwise it was for an earlier call
                self._signals.remove(event.number)
                self._pass_on_or_raise(event, passed_on, on_signal)
            elif isinstance(event, RankExit):
                answers.ended.append(event)
                answers.can_continue = False
            if not answers.can_continue:
                deadline = min(deadline, time.monotonic() + _AFTER_ERROR_SECONDS)
        return answers

    def _receive(self, event: _Received, answers: JobAnswers, apply: Callable[[Any], None]) -> None:
        rank, message = event
        if isinstance(message, Answer):
            answers.by_rank[rank] = message.value
            answers.can_continue &= message.can_continue
        elif isinstance(message, Report):
            apply(message.value)
        else:
            self._ready.add(rank)

    def _pass_on_or_raise(self, event: Signal, passed_on: set[int], on_signal: Callable[[int], bool]) -> None:
        """Pass a signal on to the workers, or let it take its usual effect; `passed_on` are the earlier ones."""
        is_repeated = event.number in passed_on
        if is_repeated and event.number != signal.SIGINT:
            return  # only Ctrl-C is pressed twice
        if not is_repeated and on_signal(event.number):
            passed_on.add(event.number)
            if event.number == signal.SIGINT:
                self.interrupt()
            else:
                self._send(event)
        elif event.number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise SystemExit(128 + event.number)

    def _check_start(self, deadline: float) -> None:
        """Raise RendezvousError if the workers cannot be started, or have not started in time."""
        if self._problem is not None:
            raise RendezvousError(f"worker processes cannot be started: {self._problem}.") from self._problem
        if len(self._ready) < self.num_processes and time.monotonic() > deadline:
            missing = [rank for rank in range(self.num_processes) if rank not in self._ready]
            raise RendezvousError(f"worker processes did not start within {START_SECONDS:g} s: ranks {missing}.")

    def _drain(self) -> None:
        """Print what the workers wrote before they answered."""
        deadline = time.monotonic() + _DRAIN_SECONDS
        # Each worker marks the ends of its stdout and of its stderr.
        while self._marks < 2 * self.num_processes and time.monotonic() < deadline:
            event = self._next()
            if isinstance(event, _Wrote):
                self._print(event)
            elif isinstance(event, RankExit):
                return  # the next job finds that the pool is not usable

    def _next(self) -> _Event | None:
        try:
            return self._events.get(timeout=SLICE_SECONDS)
        except queue.Empty:
            return None

    def _send(self, message: Job | Signal) -> None:
        for channel in self._channels:
            with contextlib.suppress(OSError):  # the worker has ended: its RankExit follows
                channel.send(message)

    def _print(self, wrote: _Wrote) -> None:
        """Print the workers' output, rank 0's without its label, as if this process had written it."""
        stream = standard_streams.STDERR if wrote.to_stderr else standard_streams.STDOUT
        for line in wrote.lines.splitlines(keepends=True):
            text = line.removeprefix(b"[rank 0] ")
            if text.endswith(self._mark):
                self._marks += 1
                text = text.removesuffix(self._mark)
                if re.fullmatch(rb"(\[rank \d+\] )?", text):
                    continue
                text += b"\n"  # the mark followed a line that had no end
            stream.write(text.decode(errors="replace"))
        stream.flush()

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Pass signals that stop a fit to `run` alone; in a notebook only Ctrl-C: its SIGTERM means the end."""
        replaced = stopping_signals()
        if runtime.is_interactive():
            replaced = {number: old for number, old in replaced.items() if number == signal.SIGINT}

        def post(number: int, _: FrameType | None) -> None:
            self._signals.append(number)
            self._events.put(Signal(number))

        for number in replaced:
            signal.signal(number, post)
        try:
            yield
        finally:
            for number, handler in replaced.items():
                signal.signal(number, handler)
            late = list(self._signals)
            self._signals.clear()
        for each in late:  # too late for the job: raise it now, unless an error is in flight
            signal.raise_signal(each)

    def _supervise(self) -> None:
        try:
            self._supervisor.run()
        except OSError as error:
            self._problem = error
        finally:
            self._port.close()
            for end in self._ends:  # ends the listening threads
                end.close()

    def _note_exit(self, ended: RankExit) -> bool:
        self._has_ended = True
        self._events.put(ended)
        return False  # so that the others can report their errors

    def _listen(self, rank: int, channel: Channel) -> None:
        with channel, contextlib.suppress(EOFError, OSError):  # the worker has ended, which is an event too
            while True:
                self._events.put(_Received(rank, channel.recv()))


def _specs(ends: Sequence[Channel], variables: Mapping[str, str], port: str) -> list[RankSpec]:
    shared = {**variables, "CYXTRAIN_SECRET": variables.get("CYXTRAIN_SECRET") or secrets.token_hex(32)}
    shared["CYXTRAIN_PORT"] = f"{port} {port}"
    path = [place for place in sys.path if isinstance(place, str)]
    specs = []
    for rank, end in enumerate(ends):
        environment = launch_environment(shared, rank, len(ends), port)
        environment[process_env.WORKER_CHANNEL] = json.dumps({"channel": end.fileno(), "path": path})
        command = (sys.executable, "-c", _START, NAME, f"{rank} of {len(ends)}")
        specs.append(RankSpec(f"rank {rank}", command, environment, inherits=(end.fileno(),)))
    return specs
