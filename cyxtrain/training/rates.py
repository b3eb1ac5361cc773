"""The learning rate of each step: scaled with the size of a step, warmed up, and then as the schedule has it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, LRScheduler, OneCycleLR

from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.errors import CheckpointError, ConfigError, counted
from cyxtrain.settings import is_number, require

_OWN_RATES = (OneCycleLR, CyclicLR)
_RATES = ("lr", "initial_lr")


class Cosine(LRScheduler):
    """Lets the learning rate fall to zero along half a cosine, over the steps of a fit, and begins anew with the next.

    Source: Loshchilov and Hutter, SGDR: Stochastic Gradient Descent with Warm Restarts (2017), equation 5, without
    restarts.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.total_steps = 0
        super().__init__(optimizer)

    def begin(self, total_steps: int) -> None:
        """Begins again, with so many steps until the rate is zero."""
        self.last_epoch = 0
        self.stretch(total_steps)

    def stretch(self, total_steps: int) -> None:
        """Goes on where it is, on the way of so many steps."""
        self.total_steps = total_steps
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate

    def get_lr(self) -> list[float | torch.Tensor]:
        """Returns the rate of each group."""
        part = min(self.last_epoch / self.total_steps, 1.0) if self.total_steps else 0.0
        return [rate * (1 + math.cos(math.pi * part)) / 2 for rate in self.base_lrs]


class Rates:
    """The learning rates of an optimizer's groups, step by step.

    Args:
        optimizer: Whose.
        scheduler: What they follow after the warm-up, or None.

    Attributes:
        optimizer: It.
        scheduler: It.
        factor: What the rates that the program gave have been multiplied by.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None) -> None:
        self.scheduler = scheduler
        self.factor = 1.0
        self.optimizer = optimizer
        self._warmup_steps = self._warm_steps = 0
        self._targets: list[float] = []
        self._left: list[float] = []

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Comes out of a pickle; an optimizer leaves the wrapper there by which schedulers see that it has stepped."""
        vars(self).update(state)
        if self.scheduler is not None:
            groups = [dict(group) for group in self.optimizer.param_groups]
            rates = self.now()
            LambdaLR(self.optimizer, lambda _: 1.0)  # wraps it, and has set rates of its own
            for group, before, rate in zip(self.optimizer.param_groups, groups, rates, strict=True):
                group.clear()
                group.update(before)
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(rate)

    @property
    def warmup_steps_left(self) -> int:
        """Steps until the rates have their values."""
        return self._warmup_steps - self._warm_steps if self._targets else 0

    @property
    def are_moving(self) -> bool:
        """Whether they are not simply those that the program gave."""
        return self.factor != 1 or bool(self._warmup_steps) or self.scheduler is not None

    @property
    def moved_options(self) -> set[str]:
        """Other options of an optimizer that its schedule sets from step to step."""
        sets_others = any(isinstance(part, _OWN_RATES) for part in schedules_in(self.scheduler))
        return {"momentum", "betas"} if sets_others else set()

    def explain(self, scaling: str) -> str:
        """Returns what becomes of them, for people.

        Args:
            scaling: How they have been scaled, where they have been.
        """
        # What the plan makes of them, not what they are just now: the same where a fit goes on.
        words = [", ".join(f"{rate * self.factor:g}" for rate in dict.fromkeys(self.given()))]
        words += [f"{self.factor:g} times what was given ({scaling})"] if self.factor != 1 else []
        words += [f"after a warm-up of {counted(self._warmup_steps, 'step')}"] if self._warmup_steps else []
        words += [f"then by {type(self.scheduler).__name__}"] if self.scheduler is not None else []
        return ", ".join(words)

    def begin(self, factor: float, warmup_steps: int, steps: int | None) -> None:
        """Begins a fit.

        Args:
            factor: What the rates that the program gave are to be multiplied by.
            warmup_steps: Steps until they have their values.
            steps: Of the fit, or None: nobody knows.
        """
        if self._targets:  # an earlier fit ended before its warm-up
            self._set(self._targets)
        self._take_what_was_set()
        self._scale(factor / self.factor)
        self.factor = factor
        if isinstance(self.scheduler, Cosine):
            self.scheduler.begin(max(1, (steps or 0) - warmup_steps))
        self._warmup_steps, self._warm_steps, self._targets = warmup_steps, 0, []
        if warmup_steps:
            self._targets = self.now()
            self._warm()

    def now(self) -> list[float]:
        """Returns the rate of each group."""
        return rates_of(self.optimizer)

    def set_all(self, rates: Sequence[float]) -> None:
        """Sets the rate of each group."""
        if list(rates) != self.now():
            self._set(rates)

    def set_checked(self, rates: Sequence[float]) -> None:
        """Sets the rate of each group, as a user gives them.

        Raises:
            ConfigError: They are no rates, or not as many.
        """
        groups = len(self.optimizer.param_groups)
        right = len(rates) == groups and all(is_number(rate) and 0 <= rate < math.inf for rate in rates)
        require(right, f"set_learning_rates takes a number of at least 0 for each of {groups} groups, got {rates!r}.")
        self.set_all(rates)

    def leave(self) -> None:
        """A fit is over, or a checkpoint was loaded: what other rates there are from now on, the program has given."""
        self._left = self.now()

    def go_on(self, steps: int | None) -> str:
        """Goes on with a fit, whose rates are a checkpoint's; returns, in words, what is not as it was there, or "".

        Args:
            steps: Of the whole fit, which may have more or fewer epochs now, or None: nobody knows.
        """
        scheduler, total = self.scheduler, max(1, (steps or 0) - self._warmup_steps)
        if steps is None or not isinstance(scheduler, Cosine) or scheduler.total_steps == total:
            return ""
        before, warm = scheduler.total_steps + self._warmup_steps, self.now()
        scheduler.stretch(total)
        if self._targets:
            self._set(warm)
        return f"the cosine ends with step {steps:,}, as epochs are now (with {before:,} in the checkpoint)"

    def step(self) -> None:
        """Goes on to the rates of the next step."""
        if self._targets:
            self._warm_steps += 1
            self._warm()
        elif self.scheduler is not None:
            self.scheduler.step()

    def given(self) -> list[float]:
        """Returns the rates that the program gave, before anything was done to them."""
        groups = self.optimizer.param_groups
        rates = self._targets or [group["lr"] for group in groups]
        # A schedule remembers with what it began. Scaled and divided again, the last bits may be others.
        began = [float(group.get("initial_lr", rate)) for group, rate in zip(groups, rates, strict=True)]
        return [float(f"{rate / self.factor:.12g}") for rate in began]

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint holds of them, beside the scheduler's own state."""
        return {
            "factor": self.factor,
            "warmup_steps": self._warmup_steps,
            "warm_steps": self._warm_steps,
            "targets": list(self._targets),
        }

    def load_state_dict(self, state: Mapping[str, Any], source: str) -> None:
        """Goes on from a checkpoint; the optimizer has its own rates from there.

        Raises:
            CheckpointError: That is no such state.
        """
        factor, targets = state.get("factor"), state.get("targets")
        whole, done = state.get("warmup_steps"), state.get("warm_steps")
        if (
            not isinstance(factor, float)
            or not 0 < factor < math.inf
            or not isinstance(targets, list)
            or not all(isinstance(rate, float) for rate in targets)
            or len(targets) not in (0, len(self.optimizer.param_groups))
            or not isinstance(whole, int)
            or not isinstance(done, int)
            or not 0 <= done <= whole
        ):
            raise CheckpointError(f"Cannot load {source}: its learning rates are {dict(state)}.")
        self.factor, self._warmup_steps, self._warm_steps, self._targets = factor, whole, done, list(targets)
        self.leave()

    def _take_what_was_set(self) -> None:
        """Begins with the rates that the program has set between two fits: as it gives them, before any scaling."""
        for number, (left, now) in enumerate(zip(self._left, self.now(), strict=False)):
            if now == left:
                continue
            for name in _RATES:
                if name in self.optimizer.param_groups[number]:
                    self._put(number, name, now * self.factor)
            for part in _with_base_rates(self.scheduler):
                if not isinstance(part, _OWN_RATES):
                    part.base_lrs[number] = now * self.factor

    def _warm(self) -> None:
        part = min((self._warm_steps + 1) / self._warmup_steps, 1.0)
        self._set([rate * part for rate in self._targets])
        if self._warm_steps >= self._warmup_steps:
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
        for scheduler in _with_base_rates(self.scheduler):
            scheduler.base_lrs = [rate * ratio for rate in scheduler.base_lrs]


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    """Returns the learning rate of each group, as it is now."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def scaling_of(config: DistributedTrainingConfig, effective_batch_size: int) -> float:
    """Returns what the learning rate is multiplied by: it is given for one rank's samples of a step.

    Source: Goyal et al., Accurate, Large Minibatch SGD (2017), section 2.1; for "sqrt", Krizhevsky, One weird trick for
    parallelizing convolutional neural networks (2014), section 5.
    """
    ratio = effective_batch_size / (config.batch_size * config.accumulation_steps)
    return {None: 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[config.learning_rate_scaling]


def check_rates(scheduler: LRScheduler | None, config: DistributedTrainingConfig, steps: int | None) -> None:
    """Refuses to scale what has rates of its own, and to end with a step that nobody knows.

    Args:
        scheduler: Or None.
        config: Of the fit.
        steps: Of the fit; None: nobody knows.

    Raises:
        ConfigError: With its name.
    """
    if steps is None and isinstance(scheduler, Cosine):
        raise ConfigError(
            'scheduler="cosine" ends with the last step of the fit, and nobody knows how many batches the data '
            "will give: say steps_per_epoch."
        )
    own = next((type(part).__name__ for part in schedules_in(scheduler) if isinstance(part, _OWN_RATES)), None)
    if config.learning_rate_scaling and own:
        raise ConfigError(
            f"learning_rate_scaling={config.learning_rate_scaling!r} scales the optimizer's rate, and {own} has rates "
            "of its own: build it with larger ones."
        )


def schedules_in(scheduler: Any) -> Iterator[LRScheduler]:
    """Gives a scheduler and those that it is made of."""
    if scheduler is not None:
        yield scheduler
        for part in getattr(scheduler, "_schedulers", ()):
            yield from schedules_in(part)


def _with_base_rates(scheduler: LRScheduler | None) -> Iterator[LRScheduler]:
    """Gives those that remember with what rates they began: PyTorch's that are made of others do not."""
    return (part for part in schedules_in(scheduler) if "base_lrs" in vars(part))
