"""Learning-rate schedules: as users give them, and as checkpoints keep them."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from cyxtrain.checkpoint.format.encoding import encode_tree
from cyxtrain.checkpoint.format.validation import same_kinds
from cyxtrain.config.settings import takes, unknown_name
from cyxtrain.errors import CheckpointError, ConfigError, brief
from cyxtrain.optim.learning_rates import ScheduleMaker, schedules_in
from cyxtrain.optim.named_schedules import SCHEDULERS

_PARTS = "_schedulers"
"""Where PyTorch keeps the state of schedules within a schedule."""

_PROGRESS = {
    *("last_epoch", "T_cur", "T_i", "_step_count", "_last_lr", "_is_initial", "_get_lr_called_within_step"),
    *("base_lrs", _PARTS, "_schedule_phases", "lr_lambdas", "_scale_fn_custom"),
}
"""What of a state tells how far a schedule is, or has been said elsewhere, or is no setting."""

SchedulerLike = LRScheduler | Callable[..., LRScheduler] | str | None


def make_scheduler(scheduler: SchedulerLike, optimizer: torch.optim.Optimizer) -> LRScheduler | ScheduleMaker | None:
    """Returns a scheduler of the optimizer, what makes one when a fit knows its steps, or None.

    Args:
        scheduler: One of `torch.optim.lr_scheduler`; a function of the optimizer, or of `(optimizer, total_steps)`,
            that returns one; or "constant", "linear", "cosine" or "one_cycle", which end with each fit.
        optimizer: Whose learning rate it sets.

    Raises:
        ConfigError: It is none of these, belongs to another optimizer, or needs something other than steps.
    """
    if scheduler is None:
        return None
    if isinstance(scheduler, str):
        if scheduler not in SCHEDULERS:
            raise unknown_name("cyxtrain", scheduler, list(SCHEDULERS), "scheduler")
        return SCHEDULERS[scheduler](optimizer)
    if callable(scheduler) and wants_total_steps(scheduler):
        return partial(_made_for, scheduler)
    if isinstance(scheduler, type) and not takes(scheduler, 1):
        name = scheduler.__name__
        raise ConfigError(
            f"scheduler is the class {name}, which wants more than the optimizer; give a schedule, or a function: "
            f"lambda optimizer, total_steps: {name}(optimizer, ...)."
        )
    return _checked(scheduler(optimizer) if callable(scheduler) else scheduler, scheduler, optimizer)


def wants_total_steps(function: Callable[..., Any]) -> bool:
    """Returns whether a function of the optimizer must be given the number of steps, too.

    Either it has a parameter `total_steps` without a default, or it cannot be called without a second argument. A class
    needs the name: what a second argument means to it, we do not know.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # it is written in C
        return False
    if "total_steps" in parameters:
        return parameters["total_steps"].default is inspect.Parameter.empty
    places = [each for each in parameters.values() if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    second = len(places) > 1 and places[1].default is inspect.Parameter.empty
    return second and not isinstance(function.func if isinstance(function, partial) else function, type)


def _made_for(function: Callable[..., Any], optimizer: torch.optim.Optimizer, total_steps: int) -> LRScheduler:
    """Returns what a function of `(optimizer, total_steps)` makes."""
    by_name = "total_steps" in inspect.signature(function).parameters
    made = function(optimizer, total_steps=total_steps) if by_name else function(optimizer, total_steps)
    return _checked(made, function, optimizer)


def _checked(made: Any, given: Any, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Returns a schedule that can be used; refuses what is none."""
    if not isinstance(made, LRScheduler):
        raise ConfigError(
            "scheduler must be one of torch.optim.lr_scheduler, or a function that makes one of the optimizer, got "
            f"{given!r}."
        )
    if isinstance(made, ReduceLROnPlateau):
        raise ConfigError(
            "ReduceLROnPlateau looks at a number after each epoch, and schedulers are stepped without one: "
            "give the trainer callbacks=[cx.callbacks.ReduceLROnPlateau(...)] instead."
        )
    if made.optimizer is not optimizer:
        raise ConfigError(f"the scheduler {type(made).__name__} is of another optimizer: build it of the trainer's.")
    return made


def scheduler_facts(scheduler: LRScheduler | None) -> dict[str, Any]:
    """Returns what must be the same on every rank.

    Raises:
        ConfigError: No checkpoint could hold its state.
    """
    if scheduler is None:
        return {"the scheduler": None}
    try:
        state = encode_tree(scheduler.state_dict(), "scheduler", {})
    except CheckpointError as error:
        raise ConfigError(
            f"the scheduler {type(scheduler).__name__} has a state that cannot be kept: {error}"
        ) from error
    return {"the scheduler": type(scheduler).__name__, "the scheduler's state": state}


def scheduler_state(scheduler: LRScheduler | None) -> dict[str, Any]:
    """Returns what a checkpoint holds of it; nothing where there is none."""
    return {} if scheduler is None else {"type": type(scheduler).__name__, "state": scheduler.state_dict()}


def check_scheduler_state(scheduler: LRScheduler | None, saved: Mapping[str, Any], source: str) -> None:
    """Refuses the state of another kind of scheduler, or of none.

    Raises:
        CheckpointError: With both.
    """
    own, other = (None if scheduler is None else type(scheduler).__name__), saved.get("type")
    if own != other:
        raise CheckpointError(
            f"Cannot load {source}: it was written with {_named(other)}, and this trainer has {_named(own)}. Build the "
            "trainer as it was."
        )
    if scheduler is None:
        return
    state, now = saved.get("state"), scheduler.state_dict()
    is_known = type(scheduler).__module__.startswith(("torch.", f"{__package__}."))
    if is_known and not same_kinds(state, now):
        raise CheckpointError(f"Cannot load {source}: the state of its {own} is {brief(state)}, which is none.")
    if not _same_parts(state, now):
        raise CheckpointError(
            f"Cannot load {source}: its {own} is made of other schedules than this trainer's. Build the trainer as it "
            "was."
        )


def schedule_settings(scheduler: LRScheduler | None) -> list[dict[str, Any]]:
    """Returns how a schedule of PyTorch's, and each that it is made of, was built; of a user's own we cannot know."""
    found = []
    for part in schedules_in(scheduler):
        state = part.state_dict() if type(part).__module__ == LRScheduler.__module__ else {}
        # Milestones that are counted are told as they were given.
        found.append(
            {
                name.lstrip("_"): sorted(value.elements()) if isinstance(value, Counter) else value
                for name, value in state.items()
                if name not in _PROGRESS
            }
        )
    return found


def load_scheduler_state(scheduler: LRScheduler | None, saved: Mapping[str, Any]) -> None:
    """Takes over what `scheduler_state` gave; `check_scheduler_state` has seen it."""
    if scheduler is not None:
        scheduler.load_state_dict(_like(saved["state"], scheduler.state_dict()))


def _like(saved: Any, own: Any) -> Any:
    """Returns a copy in which counters are counters again: to a checkpoint they are dictionaries."""
    if isinstance(own, Counter):
        return Counter(saved)
    if isinstance(saved, Mapping) and isinstance(own, Mapping):
        return {name: _like(value, own.get(name)) for name, value in saved.items()}
    if isinstance(saved, list) and isinstance(own, Sequence) and len(saved) == len(own):
        return [_like(value, other) for value, other in zip(saved, own, strict=True)]
    return saved


def _same_parts(saved: Any, own: Mapping[str, Any]) -> bool:
    """Returns whether a schedule that is made of others is made of as many, and these of theirs."""
    if not isinstance(saved, Mapping) or (_PARTS in saved) != (_PARTS in own):
        return False
    theirs, ours = saved.get(_PARTS, ()), own.get(_PARTS, ())
    return len(theirs) == len(ours) and all(_same_parts(*pair) for pair in zip(theirs, ours, strict=True))


def _named(kind: str | None) -> str:
    return "no scheduler" if kind is None else f"the scheduler {kind}"
