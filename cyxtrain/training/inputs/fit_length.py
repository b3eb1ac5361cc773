"""How long a fit is, and when it validates: arithmetic on its settings and on the steps of an epoch."""

from __future__ import annotations

from typing import NamedTuple

from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.data.feed import Feed
from cyxtrain.errors import ConfigError
from cyxtrain.optim.learning_rates import LearningRates
from cyxtrain.training.state import Position


class FitLength(NamedTuple):
    """The steps and epochs of a fit, as its settings limit them.

    Attributes:
        steps_per_epoch: Optimizer steps of an epoch, at most; None: unknown until its batches end.
        has_validation: Whether there are samples to validate with.
    """

    config: DistributedTrainingConfig
    steps_per_epoch: int | None
    has_validation: bool

    @property
    def all_steps(self) -> int | None:
        """Steps of the whole fit; None: unknown."""
        return all_steps(self.config, self.steps_per_epoch)

    @property
    def epochs(self) -> int:
        """Epochs of the fit, at most."""
        most = self.config.max_steps
        steps = self.steps_per_epoch
        if most is None or not steps:
            return self.config.epochs
        return min(self.config.epochs, _ceil_div(most, steps))

    @property
    def knows_epochs(self) -> bool:
        """Whether the number of epochs is known; with `max_steps` alone, it may be just a bound."""
        # Then it is `max_steps`: each epoch has a step at least.
        return self.steps_per_epoch is not None or self.config.epochs != self.config.max_steps

    def steps_left(self, position: Position) -> int | None:
        """Return the steps until `max_steps`; None: it is not set."""
        most = self.config.max_steps
        return None if most is None else max(0, most - (position.step - position.first_step))

    def end_of_epoch(self, position: Position, steps: int | None) -> int | None:
        """Return the step after which the running epoch ends if its limit is `steps`; None: unknown."""
        left = self.steps_left(position)
        return steps if left is None else _least(steps, position.epoch_steps + left)

    def validates_at(self, position: Position) -> bool:
        """Return whether a validation is due after the latest step, in its epoch."""
        return self.config.validates_at(position.step, position.epoch_steps, self.steps_per_epoch)

    def validates_epoch(self, position: Position) -> bool:
        """Return whether a validation is due at the end of the running epoch."""
        epoch = position.epoch + 1
        is_last = epoch >= position.first_epoch + self.config.epochs or self._has_ended(position)
        return self.has_validation and self.config.validates_after(epoch, is_last=is_last)

    def ends_early(self, position: Position) -> bool:
        """Return whether the running epoch ends or is validated here only because the fit is not longer."""
        # A longer fit continues before such an end: the rest of the epoch would otherwise never be trained.
        if self.steps_left(position) == 0:
            return True
        epoch = position.epoch + 1
        steps = self.steps_per_epoch or position.epoch_steps
        is_last = epoch >= position.first_epoch + self.config.epochs and position.epoch_steps == steps
        is_validated = self.config.validates_after(epoch, is_last=is_last)
        is_due = self.config.validates_after(epoch, is_last=False)
        return self.has_validation and is_validated and not is_due

    @property
    def warmup_steps(self) -> int:
        """Steps of the warm-up; raises ConfigError for a fraction of a fit of unknown length."""
        asked = self.config.warmup_steps
        if asked == 0 or asked >= 1:
            return int(asked)
        if self.all_steps is None:
            raise ConfigError(
                f"warmup_steps={asked} is a fraction of the fit, and the number of batches is unknown: "
                "set steps_per_epoch, or give a number of steps."
            )
        return round(asked * self.all_steps)

    def scheduled(self, rates: LearningRates) -> int | None:
        """Return how often the fit, from its beginning, steps a schedule; None: unknown."""
        warmup_steps = self.warmup_steps if rates.warms_up_first else 0
        return self.schedule_steps(warmup_steps)

    def schedule_steps(self, warmup_steps: int, position: Position | None = None) -> int | None:
        """Return how often the fit, from a position, steps its schedule; None: unknown.

        The schedule begins after the `warmup_steps` that are still to be taken.
        """
        epochs = self.config.epochs
        done = 0
        left = self.config.max_steps
        if position is not None:
            epochs = position.first_epoch + epochs - position.epoch
            done = position.epoch_steps
            left = self.steps_left(position)
        if self.config.scheduler_interval == "epoch":
            return self._schedule_epochs(warmup_steps, epochs, done, left)
        to_come = left
        if self.steps_per_epoch is not None:
            to_come = _least(epochs * self.steps_per_epoch - done, left)
        return None if to_come is None else max(0, to_come - warmup_steps)

    def _schedule_epochs(self, warmup_steps: int, epochs: int, done: int, left: int | None) -> int | None:
        """Return how many of the remaining `epochs` end after the warm-up; None: unknown.

        `done`: steps of the running epoch so far; `left`: steps until `max_steps`, if it is set.
        """
        steps = self.steps_per_epoch
        if steps is None:
            if left is not None:
                return None
            return max(0, epochs)
        divisor = max(steps, 1)
        if left is not None:
            epochs = min(epochs, _ceil_div(done + left, divisor))
        after_this_epoch = max(0, warmup_steps - (steps - done))
        return max(0, epochs - _ceil_div(after_this_epoch, divisor))

    def is_over(self, position: Position) -> bool:
        """Return whether the last epoch is complete, or a callback or `max_steps` has ended the fit."""
        last = position.first_epoch + self.config.epochs
        return position.epoch >= last or (position.samples == 0 and self._has_ended(position))

    def _has_ended(self, position: Position) -> bool:
        return position.stopped > 0 or self.steps_left(position) == 0


def requested_steps(config: DistributedTrainingConfig) -> int | None:
    """Return the limit of steps of an epoch that the config sets."""
    return _least(int(config.fast_dev_run) or None, config.steps_per_epoch)


def steps_per_epoch(config: DistributedTrainingConfig, feed: Feed) -> int | None:
    """Return how many optimizer steps an epoch has, at most; None: unknown until its batches end."""
    if config.steps_per_epoch is not None:
        return requested_steps(config)  # an epoch may pass more than once through shorter data
    return _least(requested_steps(config), feed.steps_per_epoch)


def all_steps(config: DistributedTrainingConfig, steps_per_epoch: int | None) -> int | None:
    """Return how many optimizer steps a fit has; None: unknown."""
    if steps_per_epoch is None:
        return config.max_steps
    return _least(config.max_steps, config.epochs * steps_per_epoch)


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)
