"""A ring next to a default group of another backend, such as NCCL's.

NCCL notices neither that the program of a rank has failed nor, on one machine, that its process has ended: on the other
ranks its kernels wait for that rank, and the host waits for its kernels. The ring notices both within a second.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import torch.distributed as dist

from cyxtrain.environment import torch_compat
from cyxtrain.errors import CyxtrainError, warn
from cyxtrain.ring import RingProcessGroup, is_ring
from cyxtrain.world.consensus import backends_of

# How long leaving waits for the abort of an accelerator's groups.
_ABORT_SECONDS = 10.0
# How long an error of an accelerator's group waits for its cause, which arrives at the ring.
_CAUSE_SECONDS = 1.0


class SideRing:
    """The ring that carries small agreements and CPU tensors; if a rank fails, it aborts all other groups."""

    def __init__(self, group: Any, ring: Any) -> None:
        self.group = group
        self.ring: RingProcessGroup = ring
        self.carries_cpu = "cpu" not in backends_of()
        self._aborting: list[threading.Thread] = []
        ring.group.engine.call_on_failure(self._abort_others)

    def _abort_others(self) -> None:
        """Abort each group in its own thread: NCCL may abort a communicator only after another one."""
        for group in torch_compat.process_groups():
            if is_ring(group):
                continue
            thread = threading.Thread(target=_abort, args=(group,), name="cyxtrain-abort", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread can start at the end of the interpreter
                _abort(group)
            else:
                self._aborting.append(thread)

    def failure(self, seconds: float = 0.0) -> CyxtrainError | None:
        """Return the error that has ended the ring, waiting at most so many seconds for it; None: no error."""
        self.ring.group.engine.await_failure(seconds)
        failure = self.ring.group.failure
        if failure.error is None:
            return None
        return failure.call_error(f"a collective of {dist.get_backend()}")

    def cause_of(self, error: BaseException) -> CyxtrainError | None:
        """Return the error of another rank that explains an error of a collective; None: it has a different cause."""
        if not isinstance(error, RuntimeError) or isinstance(error, CyxtrainError):
            return None
        seconds = 0.0
        if isinstance(error, dist.DistError):  # the backend may have noticed before the ring
            seconds = _CAUSE_SECONDS
        failure = self.failure(seconds)
        if failure is None or failure.rank == dist.get_rank():
            return None
        return failure

    def destroy_groups(self) -> None:
        """Destroy all groups; after an error abort an accelerator's groups, whose kernels may wait for ever."""
        if self.ring.group.failure.error is None:
            dist.destroy_process_group()
            return
        self.ring.shutdown()
        until = time.monotonic() + _ABORT_SECONDS
        for thread in self._aborting:
            thread.join(max(until - time.monotonic(), 0.0))
        if not any(thread.is_alive() for thread in self._aborting):
            torch_compat.abort_process_groups()
        else:
            warn(
                f"{dist.get_backend()} could not be aborted within {_ABORT_SECONDS:.0f} s after an error, so this "
                "process may not end by itself. End it with SIGKILL, and look at the GPU with nvidia-smi."
            )


def _abort(group: Any) -> None:
    with contextlib.suppress(RuntimeError):  # users must see the failure that led here
        group.abort()
