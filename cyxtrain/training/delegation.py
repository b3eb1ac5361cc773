"""The hook by which worker processes take over a trainer's calls; the notebook package registers it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn

from cyxtrain.training.inputs.checked_data import TrainerArguments


class TrainerParts(NamedTuple):
    """What a delegate sends, changes and reads of a trainer (`trainer.parts_of_trainer`).

    Attributes:
        owners: The objects whose attributes a call may change, by name: "trainer", "its state", the optimizers and
            their learning rates.
        of_fits: Names of owners that only `fit` needs. They are not sent for other calls: optimizer state is large.
        modules: The loss's modules, and the "model", by name.
        local: Names of the trainer's attributes that stay in their process, or are parts themselves.
    """

    owners: dict[str, Any]
    of_fits: frozenset[str]
    modules: dict[str, nn.Module]
    local: frozenset[str]
    given: TrainerArguments
    is_fitting: bool


Delegate = Callable[[Any, str, tuple[Any, ...], Mapping[str, Any]], Any]
"""Takes the trainer, the method's name, its arguments and keyword arguments; returns its result, or None to run it
here."""

_delegates: list[Delegate] = []


def register(delegate: Delegate) -> None:
    """Let a layer above run calls of `fit`, `evaluate` and `predict` elsewhere."""
    _delegates[:] = [delegate]


def delegated(trainer: Any, method: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """Return the result of a call that ran elsewhere, or None if it must run in this process."""
    __tracebackhide__ = True
    if not _delegates:
        return None
    return _delegates[0](trainer, method, arguments, keywords)
