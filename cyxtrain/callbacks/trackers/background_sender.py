"""The thread that calls a tracker, so that training never waits for a service; and the run's local file."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cyxtrain.checkpoint.files import replacing
from cyxtrain.environment.regular_files import read_text
from cyxtrain.errors import CheckpointError, reason_of

START_SECONDS = 5.0
END_SECONDS = 10.0
QUEUE_POINTS = 10_000
BATCH_POINTS = 1_000
BATCH_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0


class Point(NamedTuple):
    """A number of a fit: its name in the history, the optimizer step, the value, and seconds since 1970."""

    name: str
    step: int
    value: float
    seconds: float


class BackgroundSender:
    """Calls a tracker's methods in one thread: in order, in batches, and again after an error.

    `run`, which it writes to `path`, has the "run_id" ("": the service has not given one yet), by name the last step
    "sent", and the points "waiting" to be sent. A full queue drops new points. `owns_run`: whether to finish the run.
    """

    def __init__(
        self, tracker: Any, run: dict[str, Any], path: Path, settings: Mapping[str, str], *, owns_run: bool
    ) -> None:
        self.run = run
        self.problem = ""
        """The first error of a call."""
        self._tracker = tracker
        self._path = path
        self._settings = settings
        self._owns_run = owns_run
        self._condition = threading.Condition()
        self._queue = deque(Point(*each) for each in run["waiting"])
        self._sending: list[Point] = []
        self._file: Path | None = None
        self._num_lost = 0
        # Set when the fit ends.
        self._status = ""
        self._has_given_up = False
        self._has_tried = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cyxtrain-tracker", daemon=True)
        self._thread.start()
        # By then a library has usually been imported: a loader forks no worker in the middle of it.
        self._has_tried.wait(START_SECONDS)

    def add(self, points: Iterable[Point]) -> None:
        """Queue points."""
        with self._condition:
            for point in points:
                if len(self._queue) + len(self._sending) < QUEUE_POINTS:
                    self._queue.append(point)
                else:
                    self._num_lost += 1
            self._condition.notify_all()

    def add_file(self, path: Path) -> None:
        """Queue a file, in place of one that still waits."""
        with self._condition:
            self._file = path
            self._condition.notify_all()

    def state(self) -> dict[str, Any]:
        """Return what is known of the run, with the points that the tracker has not confirmed."""
        with self._condition:
            waiting = [[*each] for each in (*self._sending, *self._queue)]
            return self.run | {"sent": dict(self.run["sent"]), "waiting": waiting}

    def close(self, status: str) -> int:
        """Send what waits, finish the run and end the thread, within limits; return how many points were lost."""
        with self._condition:
            self._status = status
            self._condition.notify_all()
        self._thread.join(END_SECONDS)
        with self._condition:
            # A call that does not return is left alone; after it, the thread ends.
            self._has_given_up = True
            return self._num_lost + len(self._sending) + len(self._queue)

    def _run(self) -> None:
        if not self._repeat(self._start):
            return
        while self._take_work():
            if self._sending:
                if not self._repeat(self._tracker.log, self._sending):
                    return
                with self._condition:
                    self.run["sent"] |= {point.name: point.step for point in self._sending}
                    self._sending = []
                self._write()
            with self._condition:
                path = self._file
                self._file = None
            # `keep_last` may have removed it.
            if path is not None and path.exists():
                self._attempt(self._tracker.artifact, path)
        if self._owns_run and not self._has_given_up:
            self._attempt(self._tracker.finish, self._status)

    def _start(self) -> None:
        self.run["run_id"] = self._tracker.start(self.run["run_id"], self._settings)
        self._write()

    def _take_work(self) -> bool:
        """Wait for points or a file, and take a batch; False: the fit has ended, and nothing is left."""
        with self._condition:
            self._condition.wait_for(lambda: self._status or self._queue or self._file)
            self._condition.wait_for(lambda: self._status or len(self._queue) >= BATCH_POINTS, BATCH_SECONDS)
            while self._queue and len(self._sending) < BATCH_POINTS:
                self._sending.append(self._queue.popleft())
            return bool(self._sending or self._file) and not self._has_given_up

    def _repeat(self, call: Callable[..., Any], *arguments: Any) -> bool:
        """Call until it succeeds; once the fit has ended, twice. Return whether to continue."""
        pause = 1.0
        tries_left = 2
        while True:
            has_succeeded = self._attempt(call, *arguments)
            self._has_tried.set()
            tries_left -= bool(self._status)
            if has_succeeded or not tries_left or self._has_given_up:
                return has_succeeded and not self._has_given_up
            with self._condition:
                self._condition.wait_for(lambda: self._status, pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _attempt(self, call: Callable[..., Any], *arguments: Any) -> bool:
        """Call once, and note an error; return whether it has succeeded."""
        try:
            call(*arguments)
        except Exception as error:  # whatever a service's library raises
            self.problem = self.problem or f"{type(error).__name__}: {reason_of(error)}"
            return False
        return True

    def _write(self) -> None:
        # Without the points: checkpoints have them.
        kept = {name: value for name, value in self.run.items() if name != "waiting"}
        try:
            with replacing(self._path, "file of a tracker's run", synchronizes=False) as file:
                file.write(json.dumps(kept).encode())
        except CheckpointError as error:
            self.problem = self.problem or str(error)


def new_run(key: str = "", run_id: str = "") -> dict[str, Any]:
    """Return what is known of a run of which nothing has been sent; `key` names its local file."""
    return {"key": key, "run_id": run_id, "sent": {}, "waiting": [], "checkpoint_step": -1}


def read_run(path: Path) -> dict[str, Any]:
    """Return what the local file knows of a run; empty without one."""
    try:
        return dict(json.loads(read_text(path)))
    except (OSError, ValueError, TypeError):
        return {}
