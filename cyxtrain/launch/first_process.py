"""Reap orphans if the launcher is a container's first process: otherwise they stay zombies."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Set

# SI_KERNEL: Ctrl-C in a terminal, which sends it to the whole process group.
_FROM_TERMINAL = 0x80


def run_as_first_process(run: Callable[[], int], *, is_first: bool | None = None) -> int:
    """Run a function; in a child process if this process is the first one of its container.

    The first process then forwards signals, reaps every process that ends, and exits with the child's exit code.
    """
    if is_first is None:
        is_first = os.getpid() == 1
    if sys.platform == "win32" or not is_first:
        return run()
    forwarded = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
    # Blocked before the fork, so that none arrives before `sigwaitinfo` waits for it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*forwarded, signal.SIGCHLD})
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return run()
    try:
        return _reap_until_end_of(child, {*forwarded, signal.SIGCHLD})
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _reap_until_end_of(child: int, numbers: Set[signal.Signals]) -> int:
    """Reap and forward signals until the child has ended; return its exit code, 128 + n for signal n."""
    while True:
        received = signal.sigwaitinfo(numbers)
        if received.si_signo == signal.SIGCHLD:
            status = _reap(child)
            if status is not None:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
        elif received.si_code != _FROM_TERMINAL:  # otherwise the child has received it already
            os.kill(child, received.si_signo)


def _reap(child: int) -> int | None:
    """Reap processes that have ended, up to the child; return its wait status, or None while it runs."""
    # Not one for each SIGCHLD: the kernel keeps a single one pending, however many processes have ended.
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            return status
        if pid == 0:
            return None
