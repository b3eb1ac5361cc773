"""The hook through which worker processes can take over a call of a trainer's; the notebook package registers it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Delegate = Callable[[Any, str, tuple[Any, ...], Mapping[str, Any]], Any]
"""Takes the trainer, the method's name, its arguments and keyword arguments; returns its result, or None: run here."""

_delegates: list[Delegate] = []


def register(delegate: Delegate) -> None:
    """Let a layer above run calls of `fit`, `evaluate` and `predict` elsewhere."""
    _delegates[:] = [delegate]


def delegated(trainer: Any, method: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """Return the result of a call that ran elsewhere; None: it is to run in this process."""
    __tracebackhide__ = True
    return _delegates[0](trainer, method, arguments, keywords) if _delegates else None
