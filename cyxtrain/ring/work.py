"""What a collective returns: PyTorch's Work."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import _Work

from cyxtrain.ring.link import Deadline
from cyxtrain.ring.mailbox import ANY_SOURCE, Mailbox, Message


class DoneWork(_Work):
    """A collective that is over; errors have been raised by the call itself."""

    def __init__(self, result: list[Any]) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns True at once."""
        return True

    def is_completed(self) -> bool:
        """Returns True."""
        return True

    def is_success(self) -> bool:
        """Returns True."""
        return True

    def exception(self) -> None:
        """Returns None."""

    def result(self) -> list[Any]:
        """Returns the tensors that hold the result."""
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """Returns a future with the result."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._result)
        return future


class MessageWork(_Work):
    """A send or recv on its way; `wait` moves it, and every other message of the group.

    Args:
        mailbox: Moves messages.
        message: This one; None where nothing had to travel.
        tensor: Sent from or received into; kept alive until the end.
        finish: Called once when a recv is done.
        timeout_seconds: Until `wait` gives up.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        message: Message,
        tensor: Tensor,
        finish: Callable[[], object],
        timeout_seconds: float,
    ) -> None:
        super().__init__()
        self._mailbox = mailbox
        self._message = message
        self._tensor = tensor
        self._finish: Callable[[], object] | None = finish
        self._timeout_seconds = timeout_seconds

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns True when the message has left, or has arrived."""
        seconds = self._timeout_seconds
        if timeout is not None and timeout > timedelta(0):
            seconds = timeout.total_seconds()
        self._mailbox.wait(self._message, Deadline(seconds))
        return self._finished()

    def is_completed(self) -> bool:
        """Returns whether it is done, after moving what can move."""
        if not self._message.done:
            self._mailbox.progress()
        return self._message.done and self._finished()

    def is_success(self) -> bool:
        """Returns whether it is done."""
        return self._message.done

    def result(self) -> list[Tensor]:
        """Returns the tensor."""
        return [self._tensor]

    def source_rank(self) -> int:
        """Returns the rank that a message came from; of recv from any source, once it is done."""
        if self._message.peer == ANY_SOURCE:
            raise RuntimeError("the source of a recv is known when it has arrived: wait() first.")
        return self._message.peer

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> torch.futures.Future[Any]:
        """Returns a future with the tensor, after waiting."""
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([self._tensor])
        return future

    def _finished(self) -> bool:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
        return True
