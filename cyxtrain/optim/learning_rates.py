"""The learning rate of each step: scaled with the batch size, warmed up, then scheduled."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, LRScheduler, OneCycleLR

from cyxtrain.checkpoint.validation import is_rates
from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.config.settings import is_number, require
from cyxtrain.environment import torch_compat
from cyxtrain.errors import CheckpointError, ConfigError, counted
from cyxtrain.optim.optimizers import ONLY
from cyxtrain.optim.schedule_classes import FitSchedule, GivenSchedule, OneCycle, given_schedule

# makes a schedule for an optimizer and a number of times that the fit steps the schedule
ScheduleMaker = Callable[[torch.optim.Optimizer, int], LRScheduler]

_OWN_RATES = (OneCycleLR, CyclicLR, GivenSchedule)
_RATES = ("lr", "initial_lr")
LEARNING_RATE = "learning_rate"
"""The name in the history, as in Keras."""


class LearningRates:
    """The learning rates of an optimizer's groups, step by step."""

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | ScheduleMaker | None) -> None:
        self.scheduler: LRScheduler | None = None
        self._make: ScheduleMaker | None = None  # makes the schedule of each fit
        if isinstance(scheduler, LRScheduler):
            self.scheduler = scheduler
        else:
            self._make = scheduler
        self._made_for = 0  # the length of the schedule that `_make` has made
        self._first: list[float] = []  # the program's rates, from which `_make` makes each schedule
        self.factor = 1.0  # by which the program's rates have been multiplied
        self.interval = "step"  # after which the schedule is stepped: "step" or "epoch"
        self.optimizer = optimizer
        self.warmup_steps = 0  # before the schedule
        self._warm_steps = 0  # of the warm-up, that are complete
        # Callbacks may add groups to the ones that the optimizer had when the latest fit began.
        self.built_groups = len(optimizer.param_groups)
        self._num_groups = self.built_groups
        self._targets: list[float] = []  # the rates after the warm-up; empty once it is complete
        self._noted: list[float] = []  # the rates when the latest fit ended
        self._used: list[torch.Tensor | float] = []  # the rates of the latest step, if the next ones are set already

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore attributes, and PyTorch's wrapper of `optimizer.step`, which pickling drops."""
        vars(self).update(state)
        if self.scheduler is not None:
            # Schedules count steps by the wrapper. Making any schedule wraps again, and sets its own rates.
            restore = _snapshot(self.optimizer.param_groups)
            LambdaLR(self.optimizer, lambda _: 1.0)
            restore()

    @property
    def warmup_steps_left(self) -> int:
        """Steps until the warm-up ends."""
        if not self._targets:
            return 0
        return self.warmup_steps - self._warm_steps

    @property
    def differ_from_program(self) -> bool:
        """Whether the rates differ from the program's."""
        return self.factor != 1 or bool(self.warmup_steps) or self.scheduler is not None

    @property
    def ends_with_fit(self) -> bool:
        """Whether the schedule depends on the number of steps of a fit."""
        return self._make is not None or isinstance(self.scheduler, FitSchedule)

    @property
    def warms_up_first(self) -> bool:
        """Whether the schedule follows the warm-up; one-cycle includes it."""
        return not isinstance(self.scheduler, OneCycle)

    @property
    def moved_options(self) -> set[str]:
        """Other options of an optimizer that its schedule changes."""
        sets_others = any(isinstance(part, _OWN_RATES) for part in schedules_in(self.scheduler))
        return {"momentum", "betas"} if sets_others else set()

    def explain(self, scaling: str) -> str:
        """Return a description for the header; `scaling` describes the scaling, if any."""
        # The planned rates, not the present ones: the same if a fit is resumed.
        parts = [f"{rate * self.factor:g}" for rate in dict.fromkeys(self.program_rates())]
        if self.factor != 1:
            parts.append(f"{self.factor:g} times what was given ({scaling})")
        if self.warmup_steps:
            parts.append(f"after a warm-up of {counted(self.warmup_steps, 'step')}")
        if self.scheduler is not None:
            parts.append(f"then by {_name_of(self.scheduler)}, each {self.interval}")
        return ", ".join(parts)

    def begin(self, factor: float, warmup_steps: int, steps: int | None, schedule_steps: int | None) -> None:
        """Start a fit."""
        self.built_groups = len(self.optimizer.param_groups)
        # Before the targets: a rate of the warm-up is what the latest fit noted, and its target is not.
        self._adopt_program_rates()
        if self._targets:  # an earlier fit ended before its warm-up
            self._set(self._targets)
        self._scale(factor / self.factor)
        self.factor = factor
        self._used = []
        if isinstance(self.scheduler, OneCycle):
            self.scheduler.rise_in(warmup_steps, steps)
            warmup_steps = 0
        total_steps = max(1, schedule_steps or 0)
        if isinstance(self.scheduler, FitSchedule):
            self.scheduler.begin(total_steps)
        elif self._make is not None:
            self.scheduler = self._new_schedule(total_steps)
        self.warmup_steps = warmup_steps
        self._warm_steps = 0
        self._targets = []
        if warmup_steps:
            self._targets = self.now()
            self._warm()

    def schedule_for(self, schedule_steps: int | None) -> LRScheduler | None:
        """Return the schedule of a fit that steps it so many times, without changing anything."""
        if self._make is None or schedule_steps is None:
            return self.scheduler
        with contextlib.ExitStack() as stack:
            stack.callback(_snapshot(self.optimizer.param_groups))
            return self._make(self.optimizer, max(1, schedule_steps))

    def as_saved(self, state: Mapping[str, Any]) -> LRScheduler | None:
        """Return the schedule that can load a checkpoint's state, without changing anything."""
        if self._make is None:
            return self.scheduler
        return self.schedule_for(state.get("made_for") or None)

    def _new_schedule(self, schedule_steps: int) -> LRScheduler:
        assert self._make is not None
        self._first += self.now()[len(self._first) :]
        for group in self.optimizer.param_groups:
            group.pop("initial_lr", None)
        self._set(self._first)
        self._made_for = schedule_steps
        return self._make(self.optimizer, schedule_steps)

    def now(self) -> list[float]:
        """Return the rate of each group."""
        return rates_of(self.optimizer)

    def note_rates(self) -> None:
        """Note the rates at the end of a fit or a load, to see later which ones the program has set."""
        self._noted = self.now()
        self._used = []

    def continue_schedule(self, schedule_steps: int | None) -> str:
        """Continue a fit with a checkpoint's rates; return how the schedule has changed, or ""."""
        if not self.ends_with_fit or self.scheduler is None or schedule_steps is None:
            return ""
        scheduler = self.scheduler
        total = max(1, schedule_steps)
        before = scheduler.total_steps if isinstance(scheduler, FitSchedule) else self._made_for
        if before == total:
            return ""
        rates = self.now()
        if isinstance(scheduler, FitSchedule):
            scheduler.stretch(total)
        else:
            self.scheduler = self._new_schedule(total)
            torch_compat.note_step(self.optimizer)  # it has stepped before the fit was resumed
            for _ in range(min(steps_taken(scheduler), total)):
                self.scheduler.step()
        if self._targets:  # the warm-up sets the rates
            self._set(rates)
        warmup = self.warmup_steps if self.interval == "step" else 0
        return (
            f"the {_name_of(scheduler)} ends with {self.interval} {warmup + total:,}, as epochs are now "
            f"(with {warmup + before:,} in the checkpoint)"
        )

    def follow_groups(self) -> None:
        """Schedule groups that callbacks have added, from their present rates."""
        known = self._num_groups
        self._num_groups = len(self.optimizer.param_groups)
        for number in range(known, self._num_groups):
            self._follow_group(number)

    def _follow_group(self, number: int) -> None:
        """Schedule a new group like the one before it, in proportion to their present rates."""
        group = self.optimizer.param_groups[number]
        like = self.optimizer.param_groups[number - 1]
        ratio = 1.0
        if like["lr"] > 0:
            ratio = float(group["lr"]) / float(like["lr"])
        for name in ("initial_lr", "max_lr", "min_lr"):
            if name in like:
                group.setdefault(name, like[name] * ratio)
        for name in like.keys() - group.keys():  # schedules' own options, such as base_momentum
            group[name] = like[name]
        parts = list(schedules_in(self.scheduler))
        for rates in (self._targets, self._first, *_lists(parts, "base_lrs", "max_lrs")):
            if 0 < len(rates) <= number:
                rates.append(rates[-1] * ratio)
        for values in _lists(parts, "lr_lambdas", "base_momentums", "max_momentums"):
            if len(values) <= number:
                values += values[-1:]

    def step(self) -> None:
        """Set the rates of the next step."""
        if len(self.optimizer.param_groups) != self._num_groups:
            self.follow_groups()
        self._used = []
        if self._targets or (self.scheduler is not None and self.interval == "step"):
            self._used = [_rate_in(group) for group in self.optimizer.param_groups]
        if self._targets:
            self._warm_steps += 1
            self._warm()
        elif self.scheduler is not None and self.interval == "step":
            self.scheduler.step()

    def by_name(self) -> dict[str, float]:
        """Return the rate of the latest step as "learning_rate", and different rates by the group's number."""
        first, *others = [float(rate) for rate in self._used] or self.now()
        different = {f"{LEARNING_RATE}_{number}": rate for number, rate in enumerate(others, 1) if rate != first}
        return {LEARNING_RATE: first, **different}

    def keep(self) -> Callable[[], None]:
        """Return a function that restores the present rates and schedule."""
        return _snapshot([vars(self), *map(vars, schedules_in(self.scheduler)), *self.optimizer.param_groups])

    def end_epoch(self) -> None:
        """Set the rates of the next epoch, if the schedule is stepped per epoch and the warm-up is complete."""
        if self.scheduler is not None and self.interval == "epoch" and not self._targets:
            torch_compat.note_step(self.optimizer)  # perhaps before the fit was resumed
            self.scheduler.step()

    def program_rates(self) -> list[float]:
        """Return the program's rates, before scaling and scheduling."""
        rates = self._first
        if not rates:
            groups = self.optimizer.param_groups[: self._num_groups]
            present = self._targets or [group["lr"] for group in groups]
            # Schedules store the initial rates.
            rates = [float(group.get("initial_lr", rate)) for group, rate in zip(groups, present, strict=True)]
        # Rounded, because scaling and dividing may change the last bits.
        found = [float(f"{rate / self.factor:.12g}") for rate in rates]
        # Groups that the program has added since the latest fit have not been scaled.
        return found + self.now()[self._num_groups :]

    def state_dict(self) -> dict[str, Any]:
        """Return the rates' part of a checkpoint, besides the scheduler's own state."""
        return {
            "factor": self.factor,
            "warmup_steps": self.warmup_steps,
            "warm_steps": self._warm_steps,
            "targets": list(self._targets),
            "made_for": self._made_for,
            "first": list(self._first),
            "used": [float(rate) for rate in self._used],
        }

    def load_state_dict(self, state: Mapping[str, Any], source: str) -> None:
        """Continue from a checkpoint; the optimizer has its own rates from it."""
        groups = len(self.optimizer.param_groups)
        first = state.get("first", [])
        if not is_rates(state) or not {len(state["targets"]), len(first)} <= {0, groups}:
            raise CheckpointError(f"Cannot load {source}: its learning rates are {dict(state)}.")
        self.factor = state["factor"]
        self._targets = list(state["targets"])
        self._first = list(first)
        self.warmup_steps = state["warmup_steps"]
        self._warm_steps = state["warm_steps"]
        self._made_for = state.get("made_for", 0)
        self.note_rates()
        self._used = [float(rate) for rate in state.get("used", ())]

    def _adopt_program_rates(self) -> None:
        """Start from rates and groups that the program has set between two fits, before any scaling."""
        known = self._num_groups
        self.follow_groups()
        now = self.now()
        changed = [number for number, rate in enumerate(self._noted[:known]) if now[number] != rate]
        for number in (*changed, *range(known, len(now))):
            self._adopt(number, now[number] * self.factor)

    def _adopt(self, number: int, rate: float) -> None:
        """Start a group from a rate of the program's, after any scaling."""
        for name in _RATES:
            if name in self.optimizer.param_groups[number]:
                self._put(number, name, rate)
        for rates in self._initial_rates():
            rates[number] = rate
        if self._targets:
            self._targets[number] = rate

    def _initial_rates(self) -> list[list[float]]:
        """Return the lists of the groups' initial rates, except of schedules with their own rates."""
        parts = [part for part in schedules_in(self.scheduler) if not isinstance(part, _OWN_RATES)]
        return [rates for rates in (self._first, *_lists(parts, "base_lrs")) if rates]

    def _warm(self) -> None:
        """Set the rates of the next step of the warm-up; end it with its last one."""
        fraction = min((self._warm_steps + 1) / self.warmup_steps, 1.0)
        self._set([rate * fraction for rate in self._targets])
        if self._warm_steps >= self.warmup_steps:
            self._targets = []

    def _set(self, rates: Sequence[float]) -> None:
        for number, rate in enumerate(rates):
            self._put(number, "lr", rate)

    def _put(self, number: int, name: str, rate: float) -> None:
        group = self.optimizer.param_groups[number]
        if isinstance(group[name], torch.Tensor):
            group[name].fill_(rate)
        else:
            group[name] = rate

    def _scale(self, ratio: float) -> None:
        if ratio == 1:
            return
        for group in self.optimizer.param_groups:
            for name in _RATES:
                if name in group:
                    group[name] = group[name] * ratio
        for rates in self._initial_rates():
            rates[:] = [rate * ratio for rate in rates]


def rates_of(*optimizers: torch.optim.Optimizer) -> list[float]:
    """Return the present learning rate of each group."""
    return [float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]


def rates_by_name(parts: Mapping[str, LearningRates]) -> dict[str, float]:
    """Return the rates of the latest step by name in the history, with the names of several optimizers."""
    if parts.keys() == {ONLY}:
        return parts[ONLY].by_name()
    found = {}
    for optimizer, part in parts.items():
        for name, rate in part.by_name().items():
            found[name.replace(LEARNING_RATE, f"{LEARNING_RATE}_{optimizer}")] = rate
    return found


def set_rates(parts: Collection[LearningRates], rates: Sequence[float]) -> None:
    """Set the rate of each group of several optimizers, as a user passes them."""
    groups = sum(len(part.optimizer.param_groups) for part in parts)
    are_valid = len(rates) == groups and all(is_number(rate) and 0 <= rate < math.inf for rate in rates)
    require(are_valid, f"set_learning_rates takes a number of at least 0 for each of {groups} groups, got {rates!r}.")
    left = iter(rates)
    for part in parts:
        part._set([next(left) for _ in part.optimizer.param_groups])


def scaling_of(config: DistributedTrainingConfig, effective_batch_size: int) -> float:
    """Return the factor of the learning rate, which is meant for one rank's samples of a step.

    Source: Goyal et al., Accurate, Large Minibatch SGD (2017), section 2.1; for "sqrt", Krizhevsky, One weird trick for
    parallelizing convolutional neural networks (2014), section 5.
    """
    ratio = effective_batch_size / (config.batch_size * config.accumulation_steps)
    return {None: 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[config.learning_rate_scaling]


def check_rates(
    rates: LearningRates, config: DistributedTrainingConfig, schedule_steps: int | None
) -> LRScheduler | None:
    """Return the schedule of a fit; refuse to scale a schedule with its own rates, and an unknown end."""
    if schedule_steps is None and rates.ends_with_fit:
        raise ConfigError(
            "the scheduler ends with the last step of the fit, and the data do not say how many batches they give: "
            "set steps_per_epoch."
        )
    scheduler = rates.schedule_for(schedule_steps)
    setting_rates = [part for part in schedules_in(scheduler) if isinstance(part, _OWN_RATES)]
    if config.learning_rate_scaling and setting_rates:
        name = type(given_schedule(setting_rates[0])).__name__
        raise ConfigError(
            f"learning_rate_scaling={config.learning_rate_scaling!r} scales the optimizer's rate, and {name} sets "
            "rates itself: build it with larger ones."
        )
    return scheduler


def _snapshot(owners: Iterable[dict[str, Any]]) -> Callable[[], None]:
    """Return a function that restores attributes of objects or options of groups, tensor rates in place."""
    kept = []
    for own in owners:
        values = dict(own)
        for name, value in own.items():
            if isinstance(value, (list, dict)):
                values[name] = copy.copy(value)  # it may be changed in place
        kept.append((own, values, _rate_in(own)))

    def restore() -> None:
        for own, values, rate in kept:
            own.clear()
            own.update(values)
            if isinstance(rate, torch.Tensor):
                own["lr"].copy_(rate)

    return restore


def _rate_in(options: Mapping[str, Any]) -> Any:
    """Return the rate among a group's options, if it has one."""
    rate = options.get("lr")
    # A copy, as steps change a rate in a tensor in place.
    return rate.clone() if isinstance(rate, torch.Tensor) else rate


def steps_taken(scheduler: LRScheduler) -> int:
    """Return how many times a schedule has been stepped."""
    return next(part.last_epoch for part in schedules_in(scheduler) if "last_epoch" in vars(part))


def schedules_in(scheduler: Any) -> Iterator[LRScheduler]:
    """Yield a scheduler and its parts."""
    if scheduler is not None:
        yield scheduler
        for part in torch_compat.parts_of_schedule(scheduler):
            yield from schedules_in(part)


def _lists(parts: Iterable[Any], *names: str) -> list[list[Any]]:
    """Return the lists that schedules have under some names, each with a value per group."""
    found = []
    for part in parts:
        found += [vars(part)[name] for name in names if name in vars(part)]
    return found


def _name_of(schedule: LRScheduler) -> str:
    return schedule.label if isinstance(schedule, FitSchedule) else type(given_schedule(schedule)).__name__
