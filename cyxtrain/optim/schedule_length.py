"""A check, before the first step, that a schedule is as long as the fit that steps it."""

from __future__ import annotations

from functools import partial

from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
    StepLR,
)

from cyxtrain.environment import torch_compat
from cyxtrain.errors import ConfigError, counted, warn_together
from cyxtrain.optim.learning_rates import schedules_in, steps_taken
from cyxtrain.optim.schedule_classes import GivenSchedule, given_schedule

# the fraction of a rate that is left if a schedule for epochs is stepped per step
_NEXT_TO_NOTHING = 2e-5
# steps: some schedules are built for one less, some for one more
_TOLERATED = 1
# what a schedule is stepped after, by `scheduler_interval`
_UNITS = {"step": "optimizer step", "epoch": "epoch"}


def check_schedule(
    scheduler: LRScheduler | None, steps: int | None, interval: str, steps_per_epoch: int | None = None
) -> None:
    """Refuse a schedule that would raise or counts other units; warn if its length is not the fit's.

    `steps` remain; None: unknown. `steps_per_epoch` is None also if a fit continues: the schedule was stepped before.
    """
    steps = steps or 0
    unit = scheduler.interval if isinstance(scheduler, GivenSchedule) else None
    if unit not in (None, interval):
        raise ConfigError(
            f"the {type(given_schedule(scheduler)).__name__} counts {unit}s (t_in_epochs={unit == 'epoch'}), and "
            f'scheduler_interval="{interval}": set scheduler_interval="{unit}".'
        )
    if isinstance(scheduler, OneCycleLR) and scheduler.last_epoch + steps > scheduler.total_steps:
        raise ConfigError(
            f"OneCycleLR ends after {scheduler.total_steps:,} steps (in the program, or in the resumed checkpoint), "
            f"and this fit ends after {scheduler.last_epoch + steps:,}. It is stepped once per {_UNITS[interval]}: "
            "build it with as many total_steps."
        )
    _warn_of_length(scheduler, steps, interval, steps_per_epoch)


def _warn_of_length(scheduler: LRScheduler | None, steps: int, interval: str, steps_per_epoch: int | None) -> None:
    """Warn of a schedule that is longer or shorter than the fit, or counts epochs and is stepped per step.

    Schedules without an end (StepLR, ExponentialLR, CyclicLR, warm restarts) and custom functions are not checked.
    """
    if scheduler is None or steps <= 0:
        return
    if steps_per_epoch and interval == "step":
        for part in schedules_in(scheduler):
            if _seems_to_count_epochs(part, steps, steps_per_epoch):
                warn_together(
                    f"the {type(part).__name__} is stepped once per optimizer step, {steps_per_epoch:,} times in an "
                    "epoch, and seems to have been built for one step per epoch: the rate would soon be close to 0. "
                    f'Pass scheduler_interval="epoch", or build it with numbers of steps (2 * {steps_per_epoch:,} for '
                    "two epochs); or callbacks=[cx.callbacks.LearningRateScheduler(...)], which counts epochs."
                )
                return
    taken = steps_taken(scheduler)
    fit = f"this fit has {steps:,}"
    if taken:
        fit += f" after {taken:,}"
    mismatch = _mismatch(scheduler, taken + steps, fit)
    if mismatch:
        warn_together(
            f"{mismatch} A schedule is stepped once per {_UNITS[interval]}, on any number of ranks: build it with as "
            "many steps as the fit has (see cyxtrain.count_steps); or pass a function, scheduler=lambda optimizer, "
            'total_steps: ..., or a name such as "cosine".'
        )


def _mismatch(part: LRScheduler, end: int, fit: str) -> str:
    """Return how a schedule, or a part of it, misses the end of the fit; "" if it does not or may not."""
    length, afterwards = _length(part)
    if length is not None:
        has = f"the {type(part).__name__} has {counted(length, 'step')}, and {fit}"
        if length > end + _TOLERATED:
            return f"{has}: the learning rate does not come to the end of it."
        if afterwards and length < end - _TOLERATED:
            return f"{has}: {afterwards}"
    parts = torch_compat.parts_of_schedule(part)
    if parts and isinstance(part, SequentialLR):  # its last part begins at the last milestone
        left = end - (length or 0)
        return _mismatch(parts[-1], left, f"{fit}, {left:,} for it")
    return next(filter(None, (_mismatch(each, end, fit) for each in parts)), "")


def _length(part: LRScheduler) -> tuple[int | None, str]:
    """Return after how many steps a schedule ends, or None; and how steps after that go wrong, or "".

    After a warm-up, or the last milestone, any number of steps may follow.
    """
    stays = "the learning rate stays at its last value after them."
    if isinstance(part, OneCycleLR):
        return part.total_steps, stays
    if isinstance(part, CosineAnnealingLR):
        return part.T_max, "the learning rate rises again after them."
    if isinstance(part, PolynomialLR):
        return part.total_iters, "the learning rate is 0 after them."
    if isinstance(part, LinearLR):
        is_decay = part.end_factor < part.start_factor
        return part.total_iters, stays if is_decay else ""
    if isinstance(part, ConstantLR):
        return part.total_iters, ""
    if isinstance(part, MultiStepLR):
        return max(part.milestones, default=None), ""
    if isinstance(part, SequentialLR):
        return max(torch_compat.milestones_of(part), default=None), ""
    if isinstance(part, LambdaLR):
        return _length_of_lambdas(part), stays
    return None, ""


def _length_of_lambdas(schedule: LambdaLR) -> int | None:
    """Return the length of a schedule that Hugging Face's transformers has built; otherwise None."""
    for function in schedule.lr_lambdas:
        if isinstance(function, partial):
            steps = function.keywords.get("num_training_steps")
            if isinstance(steps, int):
                return steps
    return None


def _seems_to_count_epochs(part: LRScheduler, steps: int, steps_per_epoch: int) -> bool:
    if isinstance(part, StepLR):
        return bool(part.gamma ** (steps // part.step_size) < _NEXT_TO_NOTHING)
    if isinstance(part, ExponentialLR):
        return bool(part.gamma**steps < _NEXT_TO_NOTHING)
    decays = isinstance(part, (CosineAnnealingLR, PolynomialLR)) or (isinstance(part, MultiStepLR) and part.gamma < 1)
    length, _ = _length(part)
    return decays and length is not None and length < steps_per_epoch
