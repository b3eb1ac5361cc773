"""Workers of DataLoaders while signals stop a fit: they ignore these signals, and end with their rank.

A scheduler, a container or a terminal sends a signal to all processes at once. A worker that died of it would end the
rank before its checkpoint is written. Some workers still die: a spawned one that is only starting, or one that was
started before the fit. If the fit is stopping, that is not an error: the rank continues without it.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from multiprocessing.connection import wait
from typing import Any

from cyxtrain.environment import torch_compat

# How long after a worker's death its rank may receive the same signal.
_SIGNALS_FOLLOW_SECONDS = 1.0
DEATHS = (RuntimeError, EOFError, OSError)
"""What PyTorch raises if a worker has died, also while a batch comes from it."""
_run_loop = torch_compat.find(torch_compat.WORKER_LOOP)
_wait_for_stop: Callable[[float], bool] | None = None
_is_ending = False
"""Whether the program is ending after a stop."""
_kept = contextlib.ExitStack()
"""Never closed: PyTorch's check stays replaced until the process ends."""


@contextlib.contextmanager
def ignoring_signals(numbers: Collection[int]) -> Iterator[None]:
    """Let DataLoader workers that start within ignore signals; their deaths in a stop raise no error."""
    global _wait_for_stop, _is_ending
    _replace_check()
    _is_ending = False
    with (
        torch_compat.replaced(torch_compat.WORKER_LOOP, lambda _: functools.partial(_run_worker, tuple(numbers))),
        torch_compat.replaced(torch_compat.SET_WORKER_PIDS, _ended_by_kill),
    ):
        try:
            yield
        except (SystemExit, KeyboardInterrupt):
            _is_ending = True  # the signal may reach its workers before
            raise
        finally:
            _wait_for_stop = None


def ask(wait_for_stop: Callable[[float], bool]) -> None:
    """Set the function that waits at most so many seconds and returns whether this rank is asked to stop."""
    global _wait_for_stop
    _wait_for_stop = wait_for_stop


def may_end() -> bool:
    """Return whether a fit is stopping, so that the death of a worker is not an error."""
    return _wait_for_stop is not None and _wait_for_stop(0.0)


def _run_worker(numbers: Collection[int], *arguments: Any) -> None:
    threading.Thread(target=_end_with_rank, name="end of the rank", daemon=True).start()
    # PyTorch's loop would install its handlers over ours.
    with torch_compat.replaced(torch_compat.SET_WORKER_HANDLERS, _called_already):
        for number in numbers:
            signal.signal(number, lambda *_: None)  # SIG_IGN would be inherited by programs that it starts
        _run_loop(*arguments)


def _called_already(set_handlers: Callable[[], None]) -> Callable[[], None]:
    """Call PyTorch's function now, and return one that does nothing when the loop calls it."""
    set_handlers()
    return lambda: None


def _end_with_rank() -> None:
    rank = multiprocessing.parent_process()
    parent = os.getppid()
    assert rank is not None
    # A fork server is the parent of its workers; other children of the rank may hold the sentinel open.
    while not wait([rank.sentinel], timeout=1.0) and os.getppid() == parent:
        pass
    os._exit(0)


def _ended_by_kill(set_pids: Callable[[int, Sequence[int]], None]) -> Callable[[int, Sequence[int]], None]:
    """Let the loader end hanging workers by SIGKILL instead of SIGTERM, which they ignore."""

    def set_own_pids(key: int, pids: Sequence[int]) -> None:
        set_pids(key, pids)
        for child in multiprocessing.active_children():
            if child.pid in pids:
                vars(child)["_popen"].terminate = functools.partial(_kill, key, child.pid or 0)

    return set_own_pids


def _kill(key: int, pid: int) -> None:
    with contextlib.suppress(ValueError):  # the loader has forgotten them already
        torch_compat.find(torch_compat.REMOVE_WORKER_PIDS)(key)
    os.kill(pid, getattr(signal, "SIGKILL", signal.SIGTERM))  # Windows has no SIGKILL


@functools.cache
def _replace_check() -> None:
    """Let PyTorch's handler of SIGCHLD raise nothing if the rank is asked to stop."""
    _kept.enter_context(torch_compat.replaced(torch_compat.CHECK_WORKERS, _checked_later))


def _checked_later(check: Callable[[], None]) -> Callable[[], None]:
    def check_unless_stopping() -> None:
        try:
            check()
        except RuntimeError:
            if not _is_stopping():
                raise

    return check_unless_stopping


def _is_stopping() -> bool:
    """Return whether the program is ending, or this rank is asked to stop within a second."""
    if _is_ending:
        return True
    return _wait_for_stop is not None and _wait_for_stop(_SIGNALS_FOLLOW_SECONDS)
