"""Reports of a worker: progress for the display, and hooks for callbacks that stay in the notebook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cyxtrain.callbacks.callback import Callback
from cyxtrain.progress.display import Display, LiveDisplay
from cyxtrain.world import runtime

BEGUN = "begun"
"""A report: from now on a fit handles signals and stops at a step."""
SHOW = "show"
"""A report: a method of a display and its arguments."""
HOOK = "hook"
"""A report: a callback that stays in the notebook, a hook of it, and the hook's arguments."""


def _forwarding(method: str) -> Callable[..., None]:
    def forward(sender: Relay | ReportingDisplay, *arguments: Any) -> None:
        sender._forward(method, *arguments)

    return forward


class Relay(Callback):
    """Stands in a worker for a callback that stays in the notebook, and forwards its hooks from rank 0."""

    def __init__(self, name: str, report: Callable[[Any], None] | None) -> None:
        self._name = name
        self._report = report

    def set_params(self, params: dict[str, Any]) -> None:
        """Forward the parameters too."""
        super().set_params(params)
        self._forward("set_params", params)

    def _forward(self, hook: str, *arguments: Any) -> None:
        if self._report is not None:
            self._report((HOOK, self._name, hook, arguments))

    on_train_begin = _forwarding("on_train_begin")
    on_fit_start = _forwarding("on_fit_start")
    on_checkpoint = _forwarding("on_checkpoint")
    on_train_end = _forwarding("on_train_end")
    on_epoch_begin = _forwarding("on_epoch_begin")
    on_epoch_end = _forwarding("on_epoch_end")
    on_test_begin = _forwarding("on_test_begin")
    on_test_end = _forwarding("on_test_end")
    on_validation_end = _forwarding("on_validation_end")


class ReportingDisplay(LiveDisplay):
    """A display in another process; it reports the beginning of a fit even if it `shows` nothing."""

    def __init__(self, report: Callable[[Any], None], *, shows: bool) -> None:
        super().__init__()
        self._report = report
        self._shows = shows

    def _forward(self, method: str, *arguments: Any) -> None:
        if self._shows:
            self._report((SHOW, method, arguments))

    header = _forwarding("header")
    draw = _forwarding("draw")
    line = _forwarding("line")
    end_epoch = _forwarding("end_epoch")
    close = _forwarding("close")

    def begin(self, name: str, steps: int | None, done: int = 0) -> None:
        """Start a bar."""
        self._report((BEGUN,))
        self._forward("begin", name, steps, done)
        super().begin(name, steps, done)


def display_here(report: Callable[[Any], None], shows: bool) -> Display:
    """Return the display of a fit on this rank."""
    return ReportingDisplay(report, shows=shows) if runtime.current().is_first else Display()
