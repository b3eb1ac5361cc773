"""Collectives beside the calling thread: what was asked for with `async_op=True` travels while the caller computes.

A thread of its own costs a hand-over, about 60 us, and a core to run on. Where all ranks share a machine and its cores
are taken there is nothing to win: then a collective runs in the calling thread, and is done when its call returns.
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
    """Returns whether a group's collectives shall travel in threads of their own; the same on every rank.

    Args:
        wanted: "auto", "inline" or "thread", as CYXTRAIN_COMMUNICATION says.
        machines: By rank, where it runs.
        room: By rank, what it found of `room_for_ranks`.
    """
    if wanted != "auto":
        return wanted == "thread"
    return len(set(machines)) > 1 or min(room) >= len(machines)


class PendingCall:
    """One call that another thread makes.

    Attributes:
        done: Whether it is over.
        error: What it raised; None: nothing.

    Args:
        call: What is to be called.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._lock = threading.Lock()  # held until it is done; much cheaper than an Event
        self._lock.acquire()
        self._changing = threading.Lock()
        self._then: list[Callable[[], object]] = []
        self._value: Any = None
        self._concluded = False
        self._cut: Callable[[Any], Any] = _whole
        self.error: BaseException | None = None
        self.done = False

    def run(self) -> None:
        """Makes the call."""
        try:
            self._value = self._call()
        except BaseException as error:
            self.error = error
        self._conclude()

    def _conclude(self) -> None:
        """Wakes who waits, and calls back."""
        self._call = _nothing  # lets go of the tensors in it
        with self._changing:
            self.done = True
            then, self._then = self._then, []
        self._lock.release()
        for callback in then:
            try:
                callback()
            except Exception:  # it must not end the thread that others wait for
                _log.exception("a callback of a collective has failed")
        self._concluded = True
        self._value = self._cut(self._value)

    def cut(self, cut: Callable[[Any], Any]) -> None:
        """Keeps only a part of what the call returns, once the callbacks that are given have seen it."""
        self._cut = cut
        if self._concluded:
            self._value = cut(self._value)

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until it is done, at most so long; returns whether it is. The call itself has a deadline."""
        if self.done:
            return True
        if not self._lock.acquire(timeout=-1 if seconds is None else seconds):
            return False
        self._lock.release()
        return True

    def when_done(self, callback: Callable[[], object]) -> None:
        """Calls back when it is done; at once where it is."""
        with self._changing:
            if not self.done:
                self._then.append(callback)
                return
        callback()

    def outcome(self) -> Any:
        """Returns what the call returned, or raises its error; to be asked when it is done."""
        if self.error is not None:
            raise self.error.again() if isinstance(self.error, CyxtrainError) else self.error
        return self._value


def _whole(value: Any) -> Any:
    return value


def _nothing() -> None:
    """Stands where a call was."""


class CollectiveThread:
    """A thread that makes calls one after the other, in the order in which they were posted."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[PendingCall | None] = queue.SimpleQueue()
        self._pending = 0
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="cyxtrain-ring", daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether this thread is it: what a callback asks for must not wait for itself."""
        return threading.get_ident() == self._thread.ident

    @property
    def busy(self) -> bool:
        """Whether anything is posted that is not done."""
        return self._pending > 0

    def post(self, call: Callable[[], Any]) -> PendingCall:
        """Lets the thread make a call, after all that were posted before."""
        delivery = PendingCall(call)
        with self._lock:
            if not self._closed:
                self._pending += 1
                self._queue.put(delivery)
                return delivery
        delivery.run()  # a group that was left refuses it in words
        return delivery

    def close(self, seconds: float) -> None:
        """Ends the thread, once it has made the calls that were posted; waits for that, at most so long."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        if not self.is_current:
            self._thread.join(seconds)

    def _run(self) -> None:
        while (delivery := self._queue.get()) is not None:
            try:
                delivery.run()
            finally:
                del delivery  # else it would keep tensors until the next one comes
                with self._lock:
                    self._pending -= 1
