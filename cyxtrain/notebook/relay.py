"""What a worker tells while it works: how far it is, and what callbacks are told that have stayed with the caller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cyxtrain.callbacks.callback import Callback, Logs
from cyxtrain.progress.display import Display, LiveDisplay
from cyxtrain.world import runtime

BEGUN = "begun"
"""A report: from here on a fit hears signals, and stops at a step."""
SHOW = "show"
"""A report: a method of a display, and its arguments."""
TELL = "tell"
"""A report: a callback that has stayed, its hook, and the hook's arguments."""


class Relay(Callback):
    """Stands in a worker for a callback that has stayed where `fit` was called, and tells it what it is told.

    Args:
        name: Of the callback, among the trainer's parts.
        report: Takes what is told; None on other ranks than 0, which say nothing.
    """

    def __init__(self, name: str, report: Callable[[Any], None] | None) -> None:
        self._name = name
        self._report = report

    def _tell(self, hook: str, *arguments: Any) -> None:
        if self._report is not None:
            self._report((TELL, self._name, hook, arguments))

    def set_params(self, params: dict[str, Any]) -> None:
        """Tells it."""
        super().set_params(params)
        self._tell("set_params", params)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Tells it."""
        self._tell("on_train_begin", logs)

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Tells it."""
        self._tell("on_train_end", logs)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Tells it."""
        self._tell("on_epoch_begin", epoch, logs)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Tells it."""
        self._tell("on_epoch_end", epoch, logs)

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Tells it."""
        self._tell("on_test_begin", logs)

    def on_test_end(self, logs: Logs | None = None) -> None:
        """Tells it."""
        self._tell("on_test_end", logs)


class ReportingDisplay(LiveDisplay):
    """Shows a fit in another process.

    Args:
        report: Takes what is to be shown.
        shows: Whether anything is; where a fit has begun is told in any case.
    """

    def __init__(self, report: Callable[[Any], None], *, shows: bool) -> None:
        super().__init__()
        self._report = report
        self._shows = shows

    def _show(self, method: str, *arguments: Any) -> None:
        if self._shows:
            self._report((SHOW, method, arguments))

    def header(self, facts: Sequence[tuple[str, str]]) -> None:
        """Shows a line per fact."""
        self._show("header", list(facts))

    def begin_epoch(self, epoch: int, last_epoch: int, steps: int | None) -> None:
        """Begins a bar."""
        super().begin_epoch(epoch, last_epoch, steps)
        self._report((BEGUN,))
        self._show("begin_epoch", epoch, last_epoch, steps)

    def draw(self, steps: int, text: str) -> None:
        """Moves it."""
        self._show("draw", steps, text)

    def line(self, text: str) -> None:
        """Shows a line."""
        self._show("line", text)

    def end_epoch(self, text: str) -> None:
        """Shows the epoch's line."""
        self._show("end_epoch", text)

    def close(self) -> None:
        """Takes the bar away."""
        self._show("close")


def display_here(report: Callable[[Any], None], shows: bool) -> Display:
    """Returns what shows a fit on this rank."""
    return ReportingDisplay(report, shows=shows) if runtime.is_master() else Display()
