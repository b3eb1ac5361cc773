"""The thread that calls a tracker, so that training never waits for a service; and the local files of runs."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cyxtrain.callbacks.trackers.run_info import git_state
from cyxtrain.checkpoint.files import TEMPORARY_SUFFIX, remove_leftover, replacing, temporary_file
from cyxtrain.environment.regular_files import read_text
from cyxtrain.errors import reason_of

START_SECONDS = 5.0
END_SECONDS = 10.0
QUEUE_POINTS = 10_000
BATCH_POINTS = 1_000
BATCH_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0
_FILE = "file of a tracker's run"
_LATE = ", late"


class Point(NamedTuple):
    """A number of a fit: its name in the history, the optimizer step, the value, and seconds since 1970."""

    name: str
    step: int
    value: float
    seconds: float


class BackgroundSender:
    """Calls a tracker's methods in one thread: in order, in batches, and again after an error.

    `run` is what is known of a run, as `new_run` returns it; the local file `path` has it, too. Before it begins, runs
    in the folder whose processes are gone are finished. A full queue drops new points. `status`: "" while the fit runs.
    """

    def __init__(self, tracker: Any, run: dict[str, Any], path: Path, status: str = "") -> None:
        self.run = run
        self.problem = ""
        """The first error of a call."""
        self.num_dropped = 0
        self._tracker = tracker
        self._path = path
        self._pattern = f"{type(tracker).__name__}-*.json"
        self._condition = threading.Condition()
        self._writing = threading.Lock()
        self._queue = deque(Point(*each) for each in run["waiting"])
        self._sending: list[Point] = []
        self._files: dict[str, Path] = {}
        self._status = status
        self._is_of_this_fit = not status
        self._until = 0.0
        self._has_tried = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"cyxtrain {type(tracker).__name__}", daemon=True)

    def begin(self, seconds: float) -> None:
        """Start the thread, whose first call `wait_for_first_call` waits for, so many seconds from now at most."""
        self._until = time.monotonic() + seconds
        _begun.add(self)
        self._thread.start()

    def wait_for_first_call(self) -> None:
        """Wait until the first call has returned: usually, the library is imported, and the run has its id."""
        # The library itself may fork.
        if threading.current_thread() is not self._thread:
            self._has_tried.wait(self._until - time.monotonic())

    def add(self, points: Sequence[Point]) -> None:
        """Queue points."""
        with self._condition:
            room = max(QUEUE_POINTS - len(self._queue) - len(self._sending), 0)
            self._queue.extend(points[:room])
            self.num_dropped += len(points[room:])
            self._condition.notify_all()

    def add_file(self, kind: str, path: Path) -> None:
        """Queue a file, in place of one of its kind that still waits."""
        with self._condition:
            self._files[kind] = path
            self._condition.notify_all()

    def state(self) -> dict[str, Any]:
        """Return what is known of the run, with the points that the tracker has not confirmed."""
        with self._condition:
            waiting = [[*each] for each in (*self._sending, *self._queue)]
            return self.run | {"sent": dict(self.run["sent"]), "waiting": waiting}

    def close(self, status: str) -> dict[str, Any]:
        """Send what waits, finish the run, and return the state, after 10 s at most; the thread may continue."""
        with self._condition:
            self._status = status
            if self.run["status"]:
                self.run["status"] = status
            self._condition.notify_all()
        self._thread.name += _LATE
        self._thread.join(END_SECONDS)
        self._write()
        return self.state()

    def _run(self) -> None:
        with contextlib.ExitStack() as stack:
            # Processes that were killed have left theirs.
            self._attempt(_is_in_use, self._path.with_name(self._pattern))
            # Locked while it is there, so that other fits leave the run alone.
            self._attempt(stack.enter_context, temporary_file(self._path, _FILE))
            if self.run["status"] and self._is_of_this_fit:
                self._attempt(self._finish_earlier_runs)
            if self.run["unseen"] and self._is_of_this_fit:
                self.run["unseen"] = git_state() | self.run["unseen"]
            if self._repeat(self._start):
                self._send()

    def _finish_earlier_runs(self) -> None:
        """Send what waits of runs whose processes are gone, and finish them."""
        own = self.run
        until = time.monotonic() + START_SECONDS
        for path in self._path.parent.glob(self._pattern):
            run = new_run() | read_run(path)
            # A run without an id begins only now, under this tracker's name.
            is_alike = run["project"] == own["project"] and (run["run_id"] or run["name"] == own["name"])
            if not run["status"] or not is_alike or time.monotonic() > until or _is_in_use(path):
                continue
            earlier = BackgroundSender(self._tracker, run, path, run["status"])
            earlier._run()
            self.problem = self.problem or earlier.problem
            if run["status"]:
                # Something failed; the tracker must not keep the run.
                self._attempt(self._tracker.finish, run["status"])

    def _start(self) -> None:
        self.run["run_id"] = self._tracker.start(self.run["run_id"], self.run["unseen"])
        self.run["unseen"] = {}
        self._write()

    def _send(self) -> None:
        """Send what is queued until the fit ends, and finish the run."""
        while self._take_work():
            if self._sending:
                if not self._repeat(self._tracker.log, self._sending):
                    return
                with self._condition:
                    self.run["sent"] |= {point.name: point.step for point in self._sending}
                    self._sending = []
                self._write()
            with self._condition:
                paths = [*self._files.values()]
                self._files.clear()
            # `keep_last` may have removed a checkpoint.
            for path in filter(Path.exists, paths):
                self._attempt(self._tracker.artifact, path)
        if self.run["status"] and self._attempt(self._tracker.finish, self._status):
            self.run["status"] = ""
            self._write()

    def _take_work(self) -> bool:
        """Wait for points or files, and take a batch; False: the fit has ended, and nothing is left."""
        with self._condition:
            self._condition.wait_for(lambda: self._status or self._queue or self._files)
            self._condition.wait_for(lambda: self._status or len(self._queue) >= BATCH_POINTS, BATCH_SECONDS)
            while self._queue and len(self._sending) < BATCH_POINTS:
                self._sending.append(self._queue.popleft())
            return bool(self._sending or self._files)

    def _repeat(self, call: Callable[..., Any], *arguments: Any) -> bool:
        """Call until it succeeds; once the fit has ended, twice. Return whether it has succeeded."""
        pause = 1.0
        tries_left = 2
        while True:
            has_succeeded = self._attempt(call, *arguments)
            self._has_tried.set()
            tries_left -= bool(self._status)
            if has_succeeded or not tries_left:
                return has_succeeded
            with self._condition:
                self._condition.wait_for(lambda: self._status, pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _attempt(self, call: Callable[..., Any], *arguments: Any) -> bool:
        """Call once, and note an error; return whether it has succeeded."""
        try:
            call(*arguments)
        except Exception as error:  # whatever a service's library raises
            self.problem = self.problem or f"{type(error).__name__}: {reason_of(error)}".rstrip(".")
            return False
        return True

    def _write(self) -> None:
        with self._writing:
            self._attempt(self._replace_file)

    def _replace_file(self) -> None:
        with replacing(self._path, _FILE, synchronizes=False) as file:
            file.write(json.dumps(self.state()).encode())


_begun: weakref.WeakSet[BackgroundSender] = weakref.WeakSet()


def _wait_before_fork() -> None:
    # In the middle of an import, a loader's worker would wait for its lock forever.
    for each in [*_begun]:
        each.wait_for_first_call()


if sys.platform != "win32":
    os.register_at_fork(before=_wait_before_fork, after_in_child=_begun.clear)


def wait_for_late(tracker: Any) -> float:
    """Wait for threads of earlier fits with such a tracker; return what is left of 5 s, 0: one is still there."""
    until = time.monotonic() + START_SECONDS
    for each in threading.enumerate():
        if each.name == f"cyxtrain {type(tracker).__name__}{_LATE}":
            each.join(until - time.monotonic())
    return max(until - time.monotonic(), 0.0)


def new_run(key: str = "", run_id: str = "") -> dict[str, Any]:
    """Return what is known of a run of which nothing has been sent.

    "key" names its local file; "run_id" is "" until the service has given one; "unseen" are settings that the service
    has not been shown; "sent" is the last step of each curve; "status" is what the run is to be finished with, "" if it
    is finished or a user's.
    """
    run: dict[str, Any] = {"key": key, "run_id": run_id, "project": "", "name": "", "unseen": {}, "status": ""}
    return run | {"sent": {}, "waiting": [], "checkpoint_step": -1}


def read_run(path: Path) -> dict[str, Any]:
    """Return what the local file knows of a run; empty without one."""
    try:
        return dict(json.loads(read_text(path)))
    except (OSError, ValueError, TypeError):
        return {}


def _is_in_use(path: Path) -> bool:
    """Return whether a process has this run; remove the locked files of processes that are gone."""
    locked = list(path.parent.glob(f".{path.name}.*{TEMPORARY_SUFFIX}"))
    for each in locked:
        remove_leftover(each)
    return any(each.exists() for each in locked)
