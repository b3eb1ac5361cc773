"""A thread for collectives with `async_op=True`, which run while the caller computes.

Handing a call over costs about 60 us, and the thread a core to run on. If all ranks share a machine without free cores,
a collective runs in the calling thread instead, and is done when its call returns.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from cyxtrain.errors import CyxtrainError

_log = logging.getLogger("cyxtrain.ring")


def is_worth_it(wanted: str, machines: Sequence[str], room: Sequence[int]) -> bool:
    """Return whether collectives run in their own thread, the same on every rank; `room` is `RankRecord.room`."""
    if wanted != "auto":
        return wanted == "thread"
    return len(set(machines)) > 1 or min(room) >= len(machines)


class PendingCall:
    """A call that another thread makes."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._lock = threading.Lock()  # held until it is done; much cheaper than an Event
        self._lock.acquire()
        self._callbacks_lock = threading.Lock()
        self._callbacks: list[Callable[[], object]] = []
        self._value: Any = None
        self._concluded = False
        self._trim: Callable[[Any], Any] = lambda value: value
        self.error: BaseException | None = None
        self.done = False

    def run(self) -> None:
        """Make the call."""
        try:
            self._value = self._call()
        except BaseException as error:
            self.error = error  # raised in the thread that waits
        self._conclude()

    def _conclude(self) -> None:
        """Wake the waiting threads, and run the callbacks."""
        self._call = lambda: None  # releases its tensors
        with self._callbacks_lock:
            self.done = True
            callbacks = self._callbacks
            self._callbacks = []
        self._lock.release()
        for callback in callbacks:
            # A failing callback must not end the thread.
            try:
                callback()
            except Exception:
                _log.exception("a callback of a collective has failed")
        self._concluded = True
        self._value = self._trim(self._value)

    def trim(self, trim: Callable[[Any], Any]) -> None:
        """Keep only `trim(result)` once the callbacks have seen the result."""
        self._trim = trim
        if self._concluded:
            self._value = trim(self._value)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the call is done, at most `seconds`; return whether it is."""
        if self.done:
            return True
        if seconds is None:
            seconds = -1  # how a lock waits for ever
        if not self._lock.acquire(timeout=seconds):
            return False
        self._lock.release()
        return True

    def when_done(self, callback: Callable[[], object]) -> None:
        """Run a callback when the call is done; at once if it is done already."""
        with self._callbacks_lock:
            if not self.done:
                self._callbacks.append(callback)
                return
        callback()

    def outcome(self) -> Any:
        """Return the result of a call that is done, or raise its error."""
        if isinstance(self.error, CyxtrainError):
            raise self.error.again()
        if self.error is not None:
            raise self.error
        return self._value


class CollectiveThread:
    """A thread that makes posted calls one after the other."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[PendingCall | None] = queue.SimpleQueue()
        self._pending = 0
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="cyxtrain-ring", daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether the current thread is this one: it must not wait for itself."""
        return threading.get_ident() == self._thread.ident

    @property
    def busy(self) -> bool:
        """Whether any posted call is not done."""
        return self._pending > 0

    def post(self, call: Callable[[], Any]) -> PendingCall:
        """Queue a call."""
        pending = PendingCall(call)
        with self._lock:
            if not self._closed:
                self._pending += 1
                self._queue.put(pending)
                return pending
        # The group was left, and refuses the call with an error.
        pending.run()
        return pending

    def close(self, seconds: float) -> None:
        """End the thread after the queued calls; wait for that at most `seconds`."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        if not self.is_current:
            self._thread.join(seconds)

    def _run(self) -> None:
        while (pending := self._queue.get()) is not None:
            try:
                pending.run()
            finally:
                del pending  # otherwise its tensors would live until the next call
                with self._lock:
                    self._pending -= 1
