"""Reap orphans if the launcher is a container's first process: otherwise they stay zombies."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Set

_FROM_TERMINAL = 0x80
"""SI_KERNEL: Ctrl-C in a terminal, which sends it to the whole process group."""


def run_as_first_process(run: Callable[[], int], *, is_first: bool | None = None) -> int:
    """Run a function; in a child process if this process is the first one of its container.

    The first process then forwards signals, reaps every process that ends, and exits with the child's exit code.
    """
    if sys.platform == "win32" or not (os.getpid() == 1 if is_first is None else is_first):
        return run()
    forwarded = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
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
        if received.si_signo != signal.SIGCHLD:
            if received.si_code != _FROM_TERMINAL:  # otherwise the child has received it already
                os.kill(child, received.si_signo)
            continue
        while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
            if ended[0] == child:
                code = os.waitstatus_to_exitcode(ended[1])
                return code if code >= 0 else 128 - code
