"""Learning-rate schedules: PyTorch's, stepped once per optimizer step, and kept in checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    StepLR,
)

from cyxtrain.errors import CheckpointError, ConfigError, warn
from cyxtrain.settings import unknown_name
from cyxtrain.training.calling import takes
from cyxtrain.training.rates import Cosine, schedules_in
from cyxtrain.training.saving.tree import encode_tree

_PARTS = "_schedulers"
"""Where PyTorch keeps the state of schedules within a schedule."""

_PROGRESS = {
    *("last_epoch", "T_cur", "T_i", "_step_count", "_last_lr", "_is_initial", "_get_lr_called_within_step"),
    *("base_lrs", _PARTS, "_schedule_phases", "lr_lambdas", "_scale_fn_custom"),
}
"""What of a state tells how far a schedule is, or has been said elsewhere, or is no setting."""

_NEXT_TO_NOTHING = 1e-6
"""Of a rate: what is left of it where a schedule for epochs goes by steps."""

SchedulerLike = LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler] | str | None
SCHEDULERS = {"cosine": Cosine}


def make_scheduler(scheduler: SchedulerLike, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
    """Returns a scheduler of the optimizer, or None.

    Args:
        scheduler: One of `torch.optim.lr_scheduler` that is built, a function of the optimizer that builds one, or
            "cosine": to zero over each fit.
        optimizer: Whose learning rate it sets.

    Raises:
        ConfigError: It is none, of another optimizer, or wants something else than steps.
    """
    if scheduler is None:
        return None
    if isinstance(scheduler, str) and scheduler not in SCHEDULERS:
        raise unknown_name("cyxtrain", scheduler, list(SCHEDULERS), "scheduler")
    if isinstance(scheduler, type) and not takes(scheduler, 1):
        name = scheduler.__name__
        raise ConfigError(
            f"scheduler is the class {name}, which wants more than the optimizer; give a schedule, or a function: "
            f"lambda optimizer: {name}(optimizer, ...)."
        )
    made: Any = SCHEDULERS[scheduler](optimizer) if isinstance(scheduler, str) else scheduler
    if not isinstance(made, LRScheduler):
        made = scheduler(optimizer) if callable(scheduler) else None
    if not isinstance(made, LRScheduler):
        raise ConfigError(
            "scheduler must be one of torch.optim.lr_scheduler, or a function that makes one of the optimizer, got "
            f"{scheduler!r}."
        )
    if isinstance(made, ReduceLROnPlateau):
        raise ConfigError(
            "ReduceLROnPlateau looks at a number after each epoch, and schedulers are stepped once per optimizer step: "
            "give the trainer callbacks=[cx.callbacks.ReduceLROnPlateau(...)] instead."
        )
    if made.optimizer is not optimizer:
        raise ConfigError(f"the scheduler {type(made).__name__} is of another optimizer: build it of the trainer's.")
    return made


def check_schedule(scheduler: LRScheduler | None, steps: int) -> None:
    """Refuses a schedule that ends before the fit does.

    Args:
        scheduler: Of the fit.
        steps: That are still to be taken.

    Raises:
        ConfigError: With the number of steps that it should have.
    """
    if isinstance(scheduler, OneCycleLR) and scheduler.last_epoch + steps > scheduler.total_steps:
        raise ConfigError(
            f"OneCycleLR ends after {scheduler.total_steps:,} steps (as it was built, or as the checkpoint that is "
            "resumed has it), and this fit would end after "
            f"{scheduler.last_epoch + steps:,}. It is stepped once per optimizer step: build it with as many "
            "total_steps."
        )


def warn_of_epochs(scheduler: LRScheduler | None, steps: int | None, steps_per_epoch: int | None) -> None:
    """Warns of a schedule that seems to count epochs: stepped once per optimizer step, it leaves nothing of the rate.

    Args:
        scheduler: Of the fit.
        steps: Of the fit; None, as `steps_per_epoch`: nobody knows.
        steps_per_epoch: Of an epoch.
    """
    for part in schedules_in(scheduler) if steps and steps_per_epoch else ():
        if _seems_to_count_epochs(part, steps or 0, steps_per_epoch or 0):
            name = type(part).__name__
            warn(
                f"the {name} is stepped once per optimizer step, {steps_per_epoch:,} times in an epoch, and seems to "
                "have been built to be stepped once per epoch: little would be left of the rate, and soon. "
                f"Build it with numbers of steps (2 * {steps_per_epoch:,} for two epochs), or give the trainer "
                "callbacks=[cx.callbacks.LearningRateScheduler(...)], which goes by epochs."
            )
            return


def _seems_to_count_epochs(part: LRScheduler, steps: int, steps_per_epoch: int) -> bool:
    if isinstance(part, StepLR):
        return bool(part.gamma ** (steps // part.step_size) < _NEXT_TO_NOTHING)
    if isinstance(part, ExponentialLR):
        return bool(part.gamma**steps < _NEXT_TO_NOTHING)
    if isinstance(part, MultiStepLR):
        return bool(part.gamma < 1 and max(part.milestones, default=steps) < steps_per_epoch)
    if isinstance(part, CosineAnnealingLR):
        return bool(part.T_max < steps_per_epoch)
    return isinstance(part, PolynomialLR) and bool(part.total_iters < steps_per_epoch)


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
    if scheduler is not None and not _same_parts(saved.get("state"), scheduler.state_dict()):
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
