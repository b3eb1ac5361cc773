"""The hook by which worker processes take over a trainer's calls; the notebook package registers it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn

from cyxtrain.training.inputs.checked_data import TrainerArguments
from cyxtrain.world.world import World


class TrainerParts(NamedTuple):
    """What a delegate sends, changes and reads of a trainer.

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

    @classmethod
    def of(cls, trainer: Any) -> TrainerParts:
        """Return the parts of a `DistributedTrainer`."""
        state = trainer._state
        modules = {} if state.loss is None else state.loss.named_modules("loss")
        return cls(
            owners={"trainer": trainer, "its state": state, **state.parts_of_fits},
            of_fits=frozenset(state.parts_of_fits),
            modules={**modules, "model": trainer.model},
            local=frozenset({"_fit", "_logged", "_wrappers", "_state"}),
            given=trainer._arguments(World()),
            is_fitting=trainer._fit is not None,
        )


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
