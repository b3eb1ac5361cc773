"""Workers of DataLoaders while signals stop a fit: they ignore these signals, and end with their rank.

A scheduler, a container or a terminal sends a signal to all processes at once. A worker that died of it would take the
rank along before its checkpoint is written. One may still die: a spawned worker that is only starting, or one that was
started before the fit. If the fit is stopping, that is no error, and the rank does without it.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from multiprocessing.connection import wait
from typing import Any

from cyxtrain.environment import torch_compat

_SIGNALS_FOLLOW_SECONDS = 1.0
"""How long after a worker's death its rank may receive the same signal."""
_POLL_SECONDS = 1.0
DEATHS = (RuntimeError, EOFError, OSError)
"""What PyTorch raises if a worker has died, also while a batch comes from it."""
_wait_for_stop: Callable[[float], bool] | None = None


@contextlib.contextmanager
def ignoring_signals(numbers: Collection[int], wait_for_stop: Callable[[float], bool]) -> Iterator[None]:
    """Let workers of any DataLoader that start within ignore signals; their deaths in a stop raise no error.

    `wait_for_stop` waits at most so many seconds and returns whether this rank is asked to stop.
    """
    global _wait_for_stop
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch_compat.replaced(torch_compat.WORKER_LOOP, functools.partial(_Worker, numbers)))
        stack.enter_context(torch_compat.replaced(torch_compat.SET_WORKER_PIDS, _ended_by_kill))
        stack.enter_context(torch_compat.replaced(torch_compat.CHECK_WORKERS, _checked_later))
        _wait_for_stop = wait_for_stop
        try:
            yield
        finally:
            _wait_for_stop = None


def may_end() -> bool:
    """Return whether a fit is stopping, so that the death of a worker is no error."""
    return _wait_for_stop is not None and _wait_for_stop(0.0)


class _Worker:
    """PyTorch's loop of a worker, for processes that are forked or spawned."""

    def __init__(self, numbers: Collection[int], loop: Callable[..., None]) -> None:
        self._numbers = numbers
        self._loop = loop

    def __reduce__(self) -> Any:
        return _found_worker, (self._numbers,)

    def __call__(self, *arguments: Any) -> None:
        self._ignore()
        threading.Thread(target=_end_with_rank, name="end of the rank", daemon=True).start()
        with torch_compat.replaced(torch_compat.SET_WORKER_HANDLERS, self._also_ignoring):
            self._loop(*arguments)

    def _also_ignoring(self, set_own: Callable[[], None]) -> Callable[[], None]:
        def set_both() -> None:
            set_own()
            self._ignore()

        return set_both

    def _ignore(self) -> None:
        for number in self._numbers:
            signal.signal(number, lambda *_: None)  # SIG_IGN would be inherited by programs that it starts


def _found_worker(numbers: Collection[int]) -> _Worker:
    return _Worker(numbers, torch_compat.find(torch_compat.WORKER_LOOP))


def _end_with_rank() -> None:
    rank, parent = multiprocessing.parent_process(), os.getppid()
    assert rank is not None
    # A fork server is the parent of its workers; other children of the rank may hold the sentinel open.
    while not wait([rank.sentinel], _POLL_SECONDS) and os.getppid() == parent:
        pass
    os._exit(0)


def _ended_by_kill(set_pids: Callable[[int, Sequence[int]], None]) -> Callable[[int, Sequence[int]], None]:
    """Let the loader end its workers by SIGKILL where it sends SIGTERM to those that do not end by themselves."""

    def set_own_pids(key: int, pids: Sequence[int]) -> None:
        set_pids(key, pids)
        for child in multiprocessing.active_children():
            process = vars(child)["_popen"]
            if child.pid in pids:
                process.terminate = functools.partial(_kill, key, weakref.ref(process))

    return set_own_pids


def _kill(key: int, process: weakref.ref[Any]) -> None:
    with contextlib.suppress(ValueError):  # the loader has forgotten them already
        torch_compat.find(torch_compat.REMOVE_WORKER_PIDS)(key)
    process().kill()  # type: ignore[union-attr]


def _checked_later(check: Callable[[], None]) -> Callable[[], None]:
    """Return PyTorch's handler of SIGCHLD, which raises nothing if the rank is asked to stop."""

    def check_unless_stopping() -> None:
        try:
            check()
        except RuntimeError:
            if _wait_for_stop is None or not _wait_for_stop(_SIGNALS_FOLLOW_SECONDS):
                raise

    return check_unless_stopping
