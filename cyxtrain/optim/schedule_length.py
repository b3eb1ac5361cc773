"""Whether a schedule is as long as the fit that steps it; warns before the first step if not."""

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


def check_schedule(
    scheduler: LRScheduler | None, steps: int | None, interval: str, steps_per_epoch: int | None = None
) -> None:
    """Refuse a schedule that would raise, or counts other units; warn if its length differs from the fit's.

    `steps` remain; None: unknown. `steps_per_epoch` is None also if a fit continues: the schedule was stepped before.
    """
    steps = steps or 0
    own = scheduler.interval if isinstance(scheduler, GivenSchedule) else None
    if own not in (None, interval):
        raise ConfigError(
            f"the {type(given_schedule(scheduler)).__name__} counts {own}s (t_in_epochs={own == 'epoch'}), and "
            f'scheduler_interval="{interval}": set scheduler_interval="{own}".'
        )
    if isinstance(scheduler, OneCycleLR) and scheduler.last_epoch + steps > scheduler.total_steps:
        once = "optimizer step" if interval == "step" else "epoch"
        raise ConfigError(
            f"OneCycleLR ends after {scheduler.total_steps:,} steps (in the program, or in the resumed checkpoint), "
            f"and this fit ends after {scheduler.last_epoch + steps:,}. It is stepped once per {once}: build it "
            "with as many total_steps."
        )
    _warn_of_length(scheduler, steps, interval, steps_per_epoch)


def _warn_of_length(scheduler: LRScheduler | None, steps: int, interval: str, steps_per_epoch: int | None) -> None:
    """Warn of a schedule that is longer or shorter than the fit, or seems to count epochs and is stepped per step.

    Schedules without an end (StepLR, ExponentialLR, CyclicLR, warm restarts) and custom functions are not checked.
    """
    if scheduler is None or steps <= 0:
        return
    for part in schedules_in(scheduler) if steps_per_epoch and interval == "step" else ():
        if _seems_to_count_epochs(part, steps, steps_per_epoch or 0):
            name = type(part).__name__
            warn_together(
                f"the {name} is stepped once per optimizer step, {steps_per_epoch:,} times in an epoch, and seems to "
                "have been built for one step per epoch: the rate would soon be close to 0. "
                f'Pass scheduler_interval="epoch", or build it with numbers of steps (2 * '
                f"{steps_per_epoch:,} for two epochs); or callbacks=[cx.callbacks.LearningRateScheduler(...)], which "
                "counts epochs."
            )
            return
    taken = steps_taken(scheduler)
    found = _mismatch(scheduler, taken + steps, f"this fit has {steps:,}" + (f" after {taken:,}" if taken else ""))
    if found:
        once = "optimizer step" if interval == "step" else "epoch"
        warn_together(
            f"{found} A schedule is stepped once per {once}, on any number of ranks: build it with as many steps as "
            "the fit has (see cyxtrain.count_steps); or pass a function, scheduler=lambda optimizer, total_steps: "
            '..., or a name such as "cosine".'
        )


def _mismatch(part: LRScheduler, end: int, fit: str) -> str:
    """Return how a schedule, or a part of it, misses the end of the fit; "" if it does not, or that is unknown."""
    length, after = _length(part)
    if length is not None and (length > end + _TOLERATED or (after and length < end - _TOLERATED)):
        then = after if length < end else "the learning rate does not come to the end of it."
        return f"the {type(part).__name__} has {counted(length, 'step')}, and {fit}: {then}"
    parts = torch_compat.parts_of_schedule(part)
    if parts and isinstance(part, SequentialLR):  # its last part begins at the last milestone
        return _mismatch(parts[-1], end - (length or 0), f"{fit}, {end - (length or 0):,} for it")
    return next(filter(None, (_mismatch(each, end, fit) for each in parts)), "")


def _length(part: LRScheduler) -> tuple[int | None, str]:
    """Return after how many steps a schedule ends, or None; and what is wrong with steps after that, or "".

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
        return part.total_iters, stays if part.end_factor < part.start_factor else ""
    if isinstance(part, ConstantLR):
        return part.total_iters, ""
    if isinstance(part, (MultiStepLR, SequentialLR)):
        milestones = part.milestones if isinstance(part, MultiStepLR) else torch_compat.milestones_of(part)
        return max(milestones, default=None), ""
    for function in part.lr_lambdas if isinstance(part, LambdaLR) else ():
        if isinstance(function, partial) and isinstance(function.keywords.get("num_training_steps"), int):
            return function.keywords["num_training_steps"], stays  # as Hugging Face's transformers builds them
    return None, ""


def _seems_to_count_epochs(part: LRScheduler, steps: int, steps_per_epoch: int) -> bool:
    if isinstance(part, StepLR):
        return bool(part.gamma ** (steps // part.step_size) < _NEXT_TO_NOTHING)
    if isinstance(part, ExponentialLR):
        return bool(part.gamma**steps < _NEXT_TO_NOTHING)
    length, _ = _length(part)
    decays = isinstance(part, (CosineAnnealingLR, PolynomialLR)) or (isinstance(part, MultiStepLR) and part.gamma < 1)
    return decays and length is not None and length < steps_per_epoch
