"""The hook through which worker processes can take over a call of a trainer's; the notebook package registers it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn

from cyxtrain.training.inputs.checked_data import TrainerArguments


class TrainerParts(NamedTuple):
    """What a delegate sends of a trainer and changes in place, and what it asks of it (`trainer.parts_of_trainer`).

    Attributes:
        owners: The objects whose attributes a call may change, by name: "trainer", "its state", the optimizers and
            their learning rates.
        of_fits: Names of those that only `fit` needs and other calls are not sent: an optimizer's state is large.
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
"""Takes the trainer, the method's name, its arguments and keyword arguments; returns its result, or None: run here."""

_delegates: list[Delegate] = []


def register(delegate: Delegate) -> None:
    """Let a layer above run calls of `fit`, `evaluate` and `predict` elsewhere."""
    _delegates[:] = [delegate]


def delegated(trainer: Any, method: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """Return the result of a call that ran elsewhere; None: it is to run in this process."""
    __tracebackhide__ = True
    return _delegates[0](trainer, method, arguments, keywords) if _delegates else None
