"""What ends the collectives of an accelerator after a rank has failed.

NCCL notices neither that the program of a rank has failed nor, on one machine, that its process is gone: on the other
ranks its kernels wait for that rank, and the host waits for its kernels. The ring beside it hears of both within a
second.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

from cyxtrain.environment import torch_compat
from cyxtrain.ring import RingProcessGroup


class AbortOnFailure:
    """Aborts all process groups but rings as soon as a ring fails.

    Each is aborted in a thread of its own: to abort one communicator of NCCL may wait for another one to be aborted,
    and whoever has found the failure must go on to report it.

    Args:
        ring: Carries what the ranks tell each other beside the other groups.
    """

    def __init__(self, ring: RingProcessGroup) -> None:
        self._threads: list[threading.Thread] = []
        ring.call_on_failure(self._begin)

    def _begin(self) -> None:
        for group in torch_compat.process_groups():
            if isinstance(group, RingProcessGroup):
                continue
            thread = threading.Thread(target=_abort, args=(group,), name="cyxtrain-abort", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # at the end of the interpreter no thread can be started
                _abort(group)
            else:
                self._threads.append(thread)

    def is_done(self, seconds: float) -> bool:
        """Return whether all that was begun has ended, for which this waits."""
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)


def _abort(group: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the failure that led here is what people must see
        group.abort()
