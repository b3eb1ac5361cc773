"""The failure of a group: its life, and the words for it in the ring.

1. **Seen.** The monitor's thread sees that a control connection ends, a process is gone, a rank is silent, or a rank
   sends an abort frame. A call sees that its link breaks, a frame is wrong or corrupt, its deadline passes, or Ctrl-C
   interrupts it. The program reports its own error (`Engine.fail`).
2. **Explained.** A broken link does not show its cause: `PeerMonitor.broken_link_error` waits for that.
3. **Stored.** `PeerMonitor.fail` stores the first error in the group's `GroupFailure`; later errors are dropped.
4. **Told.** It then sends the error to all ranks in an abort frame, and stops all links. So every call that waits, on
   any rank, finds its link broken and the error stored.
5. **Raised.** Each of these calls, and each later one, raises a copy that names the call (`GroupFailure.call_error`).

Ranks that still connect take the same steps without a monitor: see `_Connector` in `rendezvous/mesh.py`.

A verb has one meaning in all of the ring. `x_error(...)` returns an exception, which its caller raises; `why_x(...)`
returns a reason as text. `check_x(...)` raises if something is wrong, `raise_x(...)` always. `fail(...)` ends a group.
A noun such as `failure` only returns a value.
"""

from __future__ import annotations

import time

from cyxtrain.errors import CyxtrainError, error_from_facts
from cyxtrain.ring.wire.frames import append_sentence


class GroupFailure:
    """Why a group has ended: its first error, or that this rank has left it. Only its `PeerMonitor` stores it."""

    def __init__(self) -> None:
        self.error: CyxtrainError | None = None
        """None while the group is open."""
        self.at = 0.0
        """When it was stored, in seconds of `time.monotonic`."""
        self.is_raised = False
        """Whether this rank's program has seen the error: one of its calls raised it, or the program reported it."""

    def store(self, error: CyxtrainError) -> None:
        """End the group with an error."""
        self.error = error
        self.at = time.monotonic()

    def call_error(self, call: str) -> CyxtrainError:
        """Return the error as a call of the program raises it: a copy that names the call; the program then saw it."""
        assert self.error is not None
        self.is_raised = True
        return located_error(self.error, call)


def located_error(error: CyxtrainError, call: str) -> CyxtrainError:
    """Return a copy of an error that names the call, or the operation, in which this rank was."""
    message = str(error)
    if call not in message:
        message = append_sentence(message, f"This rank was in {call}.")
    return error_from_facts(error.to_facts() | {"message": message, "during": call})
