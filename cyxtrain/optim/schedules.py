"""Learning-rate schedules as users pass them, and as checkpoints store them."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from cyxtrain.checkpoint.format.encoding import encode_tree, same_kinds
from cyxtrain.config.settings import takes, unknown_name
from cyxtrain.errors import CheckpointError, ConfigError, brief
from cyxtrain.optim.learning_rates import ScheduleMaker, schedules_in
from cyxtrain.optim.optimizers import described_name
from cyxtrain.optim.schedule_classes import SCHEDULERS, GivenSchedule, Schedule, given_schedule, is_schedule

# where PyTorch stores the states of schedules within a schedule
_PARTS = "_schedulers"

# names in a state that are progress, are stored elsewhere, or are not settings
_PROGRESS = {
    *("last_epoch", "T_cur", "T_i", "_step_count", "_last_lr", "_is_initial", "_get_lr_called_within_step"),
    *("base_lrs", _PARTS, "_schedule_phases", "lr_lambdas", "_scale_fn_custom"),
}

SchedulerLike = LRScheduler | Schedule | Callable[..., LRScheduler | Schedule] | str | None


def make_scheduler(scheduler: SchedulerLike, optimizer: torch.optim.Optimizer) -> LRScheduler | ScheduleMaker | None:
    """Return a scheduler of the optimizer, a function that makes one when a fit knows its steps, or None."""
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
            f"scheduler is the class {name}, which needs more than the optimizer: pass a schedule, or a function: "
            f"lambda optimizer, total_steps: {name}(optimizer, ...)."
        )
    made = scheduler(optimizer) if callable(scheduler) else scheduler
    return _checked(made, scheduler, optimizer)


def make_schedulers(
    scheduler: SchedulerLike,
    schedulers: Mapping[str, SchedulerLike] | None,
    optimizers: Mapping[str, torch.optim.Optimizer],
) -> dict[str, LRScheduler | ScheduleMaker | None]:
    """Return the scheduler of each optimizer by its name; `scheduler` belongs to an only optimizer."""
    if scheduler is not None:
        if len(optimizers) > 1 or schedulers is not None:
            example = f"schedulers={{{next(iter(optimizers))!r}: ...}}"
            raise ConfigError(f"scheduler is for a single optimizer: give schedulers by name, as in {example}.")
        schedulers = dict.fromkeys(optimizers, scheduler)
    if schedulers is None:
        schedulers = {}
    if not isinstance(schedulers, Mapping):
        raise ConfigError(f"schedulers must be a dictionary by the optimizers' names, got {brief(schedulers)}.")
    for name in schedulers:
        if name not in optimizers:
            raise unknown_name("the trainer", str(name), list(optimizers), "optimizer for the schedule")
    return {name: make_scheduler(schedulers.get(name), optimizer) for name, optimizer in optimizers.items()}


def wants_total_steps(function: Callable[..., Any]) -> bool:
    """Return whether a function of the optimizer also needs the number of steps.

    Either it has a parameter `total_steps` without a default, or it requires a second argument. A class needs the name:
    its second argument may mean anything.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C
        return False
    if "total_steps" in parameters:
        return parameters["total_steps"].default is inspect.Parameter.empty
    called = function.func if isinstance(function, partial) else function
    if isinstance(called, type):
        return False
    places = [each for each in parameters.values() if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return len(places) > 1 and places[1].default is inspect.Parameter.empty


def _made_for(function: Callable[..., Any], optimizer: torch.optim.Optimizer, total_steps: int) -> LRScheduler:
    """Return the schedule that a function of `(optimizer, total_steps)` makes."""
    if "total_steps" in inspect.signature(function).parameters:
        made = function(optimizer, total_steps=total_steps)
    else:
        made = function(optimizer, total_steps)
    return _checked(made, function, optimizer)


def _checked(made: Any, given: Any, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Return a schedule; refuse another object, and a schedule that needs a metric."""
    if not isinstance(made, LRScheduler) and not is_schedule(made):
        raise ConfigError(
            "scheduler must be one of torch.optim.lr_scheduler, another object with step(), state_dict() and "
            f"load_state_dict(), or a function that makes one of the optimizer, got {brief(given)}."
        )
    if isinstance(made, ReduceLROnPlateau) or "plateau" in type(made).__name__.lower():
        raise ConfigError(
            f"{type(made).__name__} needs a metric at each step, and schedulers are stepped without one: "
            "pass callbacks=[cx.callbacks.ReduceLROnPlateau(...)] instead."
        )
    if getattr(made, "optimizer", optimizer) is not optimizer:
        raise ConfigError(
            f"the scheduler {type(made).__name__} uses a different optimizer: build it with the trainer's."
        )
    return made if isinstance(made, LRScheduler) else GivenSchedule(made, optimizer)


def scheduler_facts(scheduler: LRScheduler | None, name: str) -> dict[str, Any]:
    """Return facts that must be equal on every rank; `name` is the optimizer's."""
    name = described_name(name, "scheduler")
    if scheduler is None:
        return {f"the {name}": None}
    try:
        state = encode_tree(scheduler.state_dict(), "scheduler", {})
    except CheckpointError as error:
        raise ConfigError(f"the scheduler {_kind(scheduler)} has a state that cannot be saved: {error}") from error
    return {f"the {name}": _kind(scheduler), f"the {name}'s state": state}


def scheduler_state(scheduler: LRScheduler | None) -> dict[str, Any]:
    """Return a scheduler's part of a checkpoint; empty without one."""
    if scheduler is None:
        return {}
    return {"type": _kind(scheduler), "state": scheduler.state_dict()}


def check_scheduler_state(scheduler: LRScheduler | None, saved: Mapping[str, Any], source: str) -> None:
    """Refuse the state of another kind of scheduler."""
    own = None if scheduler is None else _kind(scheduler)
    other = saved.get("type")
    if own != other:
        raise CheckpointError(
            f"Cannot load {source}: it was written with {_named(other)}, and this trainer has {_named(own)}. Build the "
            "trainer as it was."
        )
    if scheduler is None:
        return
    state = saved.get("state")
    present = scheduler.state_dict()
    is_known = type(scheduler).__module__.startswith(("torch.", f"{__package__}."))
    if is_known and not same_kinds(state, present):
        raise CheckpointError(f"Cannot load {source}: the state of its {own} is {brief(state)}, which is invalid.")
    if not _same_parts(state, present):
        raise CheckpointError(
            f"Cannot load {source}: its {own} is made of other schedules than this trainer's. Build the trainer as it "
            "was."
        )


def schedule_settings(scheduler: LRScheduler | None) -> list[dict[str, Any]]:
    """Return the settings of a schedule and of each part of it; they are empty unless it is PyTorch's."""
    found = []
    for part in schedules_in(scheduler):
        settings = {}
        state = part.state_dict() if type(part).__module__ == LRScheduler.__module__ else {}
        for name, value in state.items():
            if isinstance(value, Counter):  # milestones, which the user passed as a list
                value = sorted(value.elements())
            if name not in _PROGRESS:
                settings[name.lstrip("_")] = value
        found.append(settings)
    return found


def load_scheduler_state(scheduler: LRScheduler | None, saved: Mapping[str, Any]) -> None:
    """Load the result of `scheduler_state`, after `check_scheduler_state`."""
    if scheduler is not None:
        scheduler.load_state_dict(_with_counters(saved["state"], scheduler.state_dict()))


def _with_counters(saved: Any, own: Any) -> Any:
    """Return a copy of a saved state with counters where its own has them: checkpoints store dictionaries."""
    if isinstance(own, Counter):
        return Counter(saved)
    if isinstance(saved, Mapping) and isinstance(own, Mapping):
        return {name: _with_counters(value, own.get(name)) for name, value in saved.items()}
    if isinstance(saved, list) and isinstance(own, Sequence) and len(saved) == len(own):
        return [_with_counters(value, other) for value, other in zip(saved, own, strict=True)]
    return saved


def _same_parts(saved: Any, own: Mapping[str, Any]) -> bool:
    """Return whether a schedule has as many parts as the saved one, and so has each part."""
    if not isinstance(saved, Mapping) or (_PARTS in saved) != (_PARTS in own):
        return False
    saved_parts = saved.get(_PARTS, ())
    own_parts = own.get(_PARTS, ())
    return len(saved_parts) == len(own_parts) and all(map(_same_parts, saved_parts, own_parts))


def _kind(scheduler: LRScheduler) -> str:
    return type(given_schedule(scheduler)).__name__


def _named(kind: str | None) -> str:
    return "no scheduler" if kind is None else f"the scheduler {kind}"
