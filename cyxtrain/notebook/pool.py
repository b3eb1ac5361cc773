"""Workers that stay: ranks of this machine that one process starts, gives jobs to, and takes with it when it ends."""

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
from types import FrameType
from typing import Any

from cyxtrain.environment import process_env, standard_streams
from cyxtrain.errors import PeerLostError, RendezvousError
from cyxtrain.notebook.channel import Answer, Channel, Done, Here, Job, Report, Signal, pair
from cyxtrain.notebook.worker import NAME
from cyxtrain.workers.machine import free_port, launch_environment
from cyxtrain.workers.output import Terminal
from cyxtrain.workers.process import RankExit, RankSpec
from cyxtrain.workers.supervisor import SLICE_SECONDS, Reaction, Supervisor
from cyxtrain.world import runtime

START_SECONDS = 120.0
"""Seconds in which all workers must be there; importing PyTorch may take long on a slow disk."""
_ORPHAN_SECONDS = 0.5
"""What workers may take to end where our process has ended: within a second nothing is left."""
_AFTER_ERROR_SECONDS = 5.0
"""Seconds for the other ranks to answer after one that cannot go on."""
_DRAIN_SECONDS = 2.0
"""Seconds for what workers have written to arrive, after their answers."""
# Where modules are found is the notebook's: so is the very package that is imported here.
_START = (
    f'import json, os, sys; sys.path[:] = json.loads(os.environ["{process_env.WORKER_CHANNEL}"])["path"]; '
    "from cyxtrain.notebook.worker import main; main()"
)


@dataclass(frozen=True)
class _Reported:
    rank: int
    message: Here | Report | Answer


@dataclass(frozen=True)
class _Wrote:
    to_stderr: bool
    lines: bytes


_Event = _Reported | _Wrote | Signal | RankExit


@dataclass
class JobAnswers:
    """What has become of a job.

    Attributes:
        by_rank: What workers have answered.
        ended: Those that have ended instead, the first one first.
        can_go_on: Whether all can be given another job; else whoever has read the answers shall close the pool.
    """

    by_rank: dict[int, Any] = field(default_factory=dict)
    ended: list[RankExit] = field(default_factory=list)
    can_go_on: bool = True

    def check(self) -> None:
        """Refuses to go on where a worker has ended.

        Raises:
            PeerLostError: With the first one that has.
        """
        if not self.ended:
            return
        first = self.ended[0]
        raise PeerLostError(
            f"{first.label} has ended: its worker process, with {first.describe()}. What it wrote last is above; the "
            "next call starts new workers.",
            rank=first.index,
        )


class _Writer:
    """Where a supervisor's terminal writes to: the queue of events."""

    def __init__(self, post: Callable[[_Event], None], *, to_stderr: bool) -> None:
        self._post = post
        self._to_stderr = to_stderr

    def write(self, data: bytes, /) -> int:
        """Takes whole lines."""
        self._post(_Wrote(self._to_stderr, data))
        return len(data)


class Pool:
    """Worker processes, ranks 0 to `num_processes` - 1 of a world of their own.

    One thread at a time uses it. When this process ends, however it ends, they end within a second.

    Args:
        num_processes: How many.
        variables: Their environment, but for what makes them ranks.
    """

    def __init__(self, num_processes: int, variables: Mapping[str, str]) -> None:
        self.num_processes = num_processes
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._leaving = self._has_ended = False
        self._problem: OSError | None = None
        self._here: set[int] = set()
        self._signals: list[int] = []
        self._marks = 0
        self._mark = f"\0{secrets.token_hex(8)}\n".encode()
        standard_streams.open_absent()  # no worker can be given a channel as its stdout
        self._channels, self._ends = zip(*(pair() for _ in range(num_processes)), strict=True)
        terminal = Terminal(_Writer(self._events.put, to_stderr=False), _Writer(self._events.put, to_stderr=True))
        self._port = contextlib.ExitStack()
        specs = _specs(self._ends, variables, str(self._port.enter_context(free_port())))
        self._supervisor = Supervisor(specs, terminal, self._note_exit, _ORPHAN_SECONDS)
        self._threads = [threading.Thread(target=self._supervise, name="workers", daemon=True)]
        for rank, channel in enumerate(self._channels):
            listens = threading.Thread(target=self._listen, args=(rank, channel), name=f"worker {rank}", daemon=True)
            self._threads.append(listens)

    def start(self) -> None:
        """Starts them; it does not wait until they are there."""
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:  # Ctrl-C
            self.close()
            raise

    @property
    def is_usable(self) -> bool:
        """Whether it takes jobs."""
        return not self._leaving and not self._has_ended

    def run(
        self,
        function: Callable[..., tuple[Any, bool]],
        arguments: tuple[Any, ...],
        apply: Callable[[Any], None],
        hear: Callable[[int], bool],
    ) -> JobAnswers:
        """Lets all workers call a function, and returns what they answer.

        What workers write appears on our stdout and stderr, in this thread; that of other ranks than 0 with the rank.

        Args:
            function: As in `Job`.
            arguments: As in `Job`.
            apply: Called with each report.
            hear: Is called when a signal has come, within `hearing_signals`; returns whether the workers shall hear of
                it. If not, and at the second signal, they are ended, and the signal does what it does.

        Raises:
            RendezvousError: They did not come within `START_SECONDS`.
            KeyboardInterrupt, SystemExit: A signal has ended the workers.
        """
        job, self._marks = Job(function, arguments, self._mark), 0
        try:
            self._tell(job)
            answers = self._wait_for_answers(apply, hear)
            self._drain()
        except BaseException:
            self.close()
            raise
        return answers

    def interrupt(self) -> None:
        """Lets workers take it for Ctrl-C."""
        self._tell(Signal(signal.SIGINT))

    def forget_answers(self) -> None:
        """Lets the workers forget what they have answered."""
        self._tell(Done())

    def close(self) -> None:
        """Ends all workers; when it returns nothing is left of them."""
        self._leaving = True
        self._supervisor.request_stop(signal.SIGTERM)
        self._supervisor.request_stop(signal.SIGTERM)  # nothing that they still do is worth waiting for
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def abandon(self) -> None:
        """Lets go of what a forked child has inherited: the workers are its parent's, and end with that one."""
        self._leaving = True
        for channel in (*self._channels, *self._ends):
            channel.close()
        self._port.close()
        self._supervisor.abandon()

    def _wait_for_answers(self, apply: Callable[[Any], None], hear: Callable[[int], bool]) -> JobAnswers:
        answers = JobAnswers()
        received, deadline, starts_until = 0, math.inf, time.monotonic() + START_SECONDS
        while len(answers.by_rank) + len(answers.ended) < self.num_processes and time.monotonic() < deadline:
            self._check_start(starts_until)
            event = self._next()
            if isinstance(event, _Wrote):
                self._show(event)
            elif isinstance(event, _Reported) and isinstance(event.message, Answer):
                answers.by_rank[event.rank] = event.message.value
                answers.can_go_on &= event.message.can_go_on
            elif isinstance(event, _Reported) and isinstance(event.message, Report):
                apply(event.message.value)
            elif isinstance(event, _Reported):
                self._here.add(event.rank)
            elif isinstance(event, Signal) and event.number in self._signals:  # else it was an earlier call's
                received += 1
                self._take_signal(event, goes_on=received == 1 and hear(event.number))
            elif isinstance(event, RankExit):
                answers.ended.append(event)
                answers.can_go_on = False
            if not answers.can_go_on:
                deadline = min(deadline, time.monotonic() + _AFTER_ERROR_SECONDS)
        return answers

    def _check_start(self, until: float) -> None:
        """Refuses to wait for workers that cannot come."""
        if self._problem is not None:
            raise RendezvousError(f"worker processes cannot be started: {self._problem}.") from self._problem
        if len(self._here) < self.num_processes and time.monotonic() > until:
            missing = [rank for rank in range(self.num_processes) if rank not in self._here]
            raise RendezvousError(f"worker processes did not start within {START_SECONDS:g} s: ranks {missing}.")

    def _drain(self) -> None:
        """Shows what the workers have written until they answered."""
        deadline = time.monotonic() + _DRAIN_SECONDS
        while self._marks < 2 * self.num_processes and time.monotonic() < deadline:
            event = self._next()
            if isinstance(event, _Wrote):
                self._show(event)
            elif isinstance(event, RankExit):
                return  # whoever runs the next job sees that it cannot

    def _take_signal(self, signalled: Signal, *, goes_on: bool) -> None:
        self._signals.remove(signalled.number)
        if goes_on:
            self._tell(signalled)
        elif signalled.number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise SystemExit(128 + signalled.number)

    def _next(self) -> _Event | None:
        """Returns the next event, or None: there has been none for a while."""
        try:
            return self._events.get(timeout=SLICE_SECONDS)
        except queue.Empty:
            return None

    def _tell(self, message: Job | Done | Signal) -> None:
        for channel in self._channels:
            with contextlib.suppress(OSError):  # its end is on the way to us, too
                channel.send(message)

    def _show(self, wrote: _Wrote) -> None:
        """Writes on what workers have written, without the name of rank 0: as if this process had written it."""
        stream = sys.stderr if wrote.to_stderr else sys.stdout
        for line in wrote.lines.splitlines(keepends=True):
            text = line.removeprefix(b"[rank 0] ")
            if text.endswith(self._mark):
                self._marks += 1
                text = text.removesuffix(self._mark)
                text = b"" if re.fullmatch(rb"(\[rank \d+\] )?", text) else text + b"\n"
            if stream is not None:
                encoding = stream.encoding or "utf-8"
                stream.write(text.decode(errors="replace").encode(encoding, "replace").decode(encoding))
        if stream is not None:
            stream.flush()

    @contextlib.contextmanager
    def hearing_signals(self) -> Iterator[None]:
        """Within, Ctrl-C and SIGTERM are for `run` alone; a notebook's SIGTERM stays what it is: the end."""
        numbers = [signal.SIGINT] if runtime.is_interactive() else [signal.SIGINT, signal.SIGTERM]
        if threading.current_thread() is not threading.main_thread():
            numbers = []  # only the main thread hears signals
        before = {number: signal.getsignal(number) for number in numbers}
        received = {number: old for number, old in before.items() if old not in (None, signal.SIG_IGN)}

        def post(number: int, _: FrameType | None) -> None:
            self._signals.append(number)
            self._events.put(Signal(number))

        for number in received:
            signal.signal(number, post)
        try:
            yield
        finally:
            for number, handler in received.items():
                signal.signal(number, handler)
            late = list(self._signals)
            self._signals.clear()
            for each in late:  # too late for a job: as if it came now
                signal.raise_signal(each)

    def _supervise(self) -> None:
        try:
            self._supervisor.run()
        except OSError as error:
            self._problem = error
        finally:
            self._port.close()
            for end in self._ends:  # whoever listens hears that nobody is there
                end.close()

    def _note_exit(self, ended: RankExit) -> Reaction:
        self._has_ended = True
        self._events.put(ended)
        return Reaction.KEEP_GOING  # the others say first what they know

    def _listen(self, rank: int, channel: Channel) -> None:
        with channel, contextlib.suppress(EOFError, OSError):
            while True:
                self._events.put(_Reported(rank, channel.recv()))


def _specs(ends: Sequence[Channel], variables: Mapping[str, str], port: str) -> list[RankSpec]:
    shared = {**variables, "CYXTRAIN_SECRET": variables.get("CYXTRAIN_SECRET") or secrets.token_hex(32)}
    specs, path = [], [place for place in sys.path if isinstance(place, str)]
    for rank, end in enumerate(ends):
        told = json.dumps({"channel": end.fileno(), "path": path})
        own = {**launch_environment(shared, rank, len(ends), port), process_env.WORKER_CHANNEL: told}
        words = (sys.executable, "-c", _START, NAME, f"{rank} of {len(ends)}")
        specs.append(RankSpec(f"rank {rank}", words, own, inherits=(end.fileno(),)))
    return specs
