"""As a container's first process, the launcher reaps orphans: nobody else does, and they stay as zombies for ever."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Set

_FROM_TERMINAL = 0x80
"""SI_KERNEL: Ctrl-C in a terminal, which sends it to all of a process group."""


def run_as_first_process(run: Callable[[], int], *, is_first: bool | None = None) -> int:
    """Runs a function; in a child, where this process is the first one of its container.

    The first process then passes signals on, reaps whatever ends, and ends with the child's exit code. Its own children
    and the ranks' processes never mix, so that it takes nobody's exit code.

    Args:
        run: Returns the exit code.
        is_first: Whether this is the first process; None: its number says.

    Returns:
        The exit code, in both processes.
    """
    if sys.platform == "win32" or not (os.getpid() == 1 if is_first is None else is_first):
        return run()
    passed_on = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*passed_on, signal.SIGCHLD})
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return run()
    try:
        return _reap_until_end_of(child, {*passed_on, signal.SIGCHLD})
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _reap_until_end_of(child: int, numbers: Set[signal.Signals]) -> int:
    """Reaps, and passes signals on, until the child has ended; returns its exit code, 128 + n for signal n."""
    while True:
        received = signal.sigwaitinfo(numbers)
        if received.si_signo != signal.SIGCHLD:
            if received.si_code != _FROM_TERMINAL:  # else the child has it already
                os.kill(child, received.si_signo)
            continue
        while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:  # the child is there: it never runs out of children
            if ended[0] == child:
                code = os.waitstatus_to_exitcode(ended[1])
                return code if code >= 0 else 128 - code
