"""Averages of the weights over training, which often predict better than the weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from cyxtrain.callbacks.callback import Callback, Logs
from cyxtrain.callbacks.monitored_value import require_float
from cyxtrain.checkpoint.format.names import plain_name
from cyxtrain.config.settings import require, require_boolean, require_integer
from cyxtrain.environment import torch_compat
from cyxtrain.parallel.consistency.buffer_kinds import MEAN, kinds_of_buffers


class _Averaging(Callback):
    """Keeps an average of what is trained, the same on every rank, and puts it into the model where it is used."""

    belongs_on_all_ranks = True
    restored_with_best = True
    _averages_buffers = False

    def __init__(self, validates: bool, overwrites_at_end: bool) -> None:
        owner = type(self).__name__
        require_boolean(owner, "validates", validates)
        require_boolean(owner, "overwrites_at_end", overwrites_at_end)
        self.validates = self.validates_own_weights = validates
        self.overwrites_at_end = overwrites_at_end
        self._average: dict[str, Tensor] = {}
        self._followed: dict[str, Tensor] = {}
        self._own: dict[str, Tensor] | None = None

    def _present(self) -> dict[str, Tensor]:
        """Return what is averaged, as the model has it now, by name."""
        trained = self.trainer.trained
        found: list[tuple[str, Tensor]] = [*trained.named_parameters()]
        if self._averages_buffers:
            kinds = kinds_of_buffers(trained)
            found += [(name, each) for name, each in trained.named_buffers() if kinds.get(id(each)) == MEAN]
        return {plain_name(name): each for name, each in found if each.is_floating_point() or each.is_complex()}

    def _wide(self) -> list[Tensor]:
        """Return the same tensors, 16 bits as float32: what a step adds to an average is lost in 16 bits.

        The average has them, too, from now on: by object, because pruning renames a weight, or by name. What is new in
        the model, or has another shape, begins with its present value.
        """
        present = self._present()
        there = {id(each) for each in present.values()}
        before = {id(each): self._average[name] for name, each in self._followed.items()}
        replaced = {name: self._average[name] for name, each in self._followed.items() if id(each) not in there}
        self._average = {}
        self._followed = present
        wide = []
        for name, each in present.items():
            now = each.data.to(torch.promote_types(each.dtype, torch.float32))
            average = before.get(id(each), replaced.get(name))
            if average is None or average.shape != now.shape:
                average = now.clone()
            self._average[name] = average
            wide.append(now)
        return wide

    def _move(self, weight: float) -> None:
        wide = self._wide()
        torch_compat.lerp_all([*self._average.values()], wide, weight)

    def _at_end(self) -> dict[str, Tensor]:
        """Return what the model gets at the end of a fit."""
        return self._average

    def _at_present(self) -> dict[str, Tensor]:
        """Return what the model gets during a fit."""
        return self._average

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._average = {}
        self._followed = {}
        self._own = None
        self._wide()

    def on_test_begin(self, logs: Logs | None = None) -> None:
        if self.validates:
            self._swap_in()

    def on_test_end(self, logs: Logs | None = None) -> None:
        if self._own is not None:
            self._set(self._own)
            self._own = None

    def on_exception(self, exception: BaseException) -> None:
        self.on_test_end()

    def on_train_end(self, logs: Logs | None = None) -> None:
        # the best weights stay that were validated without the average
        if self.overwrites_at_end and (self.validates or not self.trainer.config.load_best):
            self._wide()
            self._set(self._at_end())

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the average within a `with` block, in or after a fit; for saving, say. All ranks do it.

        Raises:
            ConfigError: There has been no fit.
        """
        require(bool(self._average), f"{type(self).__name__} has no average yet: use applied() in a fit or after it.")
        if self._own is not None:  # in a validation that uses it
            yield
            return
        self._swap_in()
        try:
            yield
        finally:
            self.on_test_end()

    def _swap_in(self) -> None:
        self._wide()
        self._own = {name: each.data.clone() for name, each in self._followed.items()}
        self._set(self._at_present())

    def _set(self, values: dict[str, Tensor]) -> None:
        tensors = [each.data for each in self._followed.values()]
        torch_compat.copy_all(tensors, [values[name].data for name in self._followed])

    def state_dict(self) -> dict[str, Any]:
        if self._average:
            self._wide()  # the model may have changed since the last step
        return {"average": [*self._average.values()], "names": [*self._average]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._wide()
        saved = dict(zip(state.get("names", self._average), state["average"], strict=True))
        for name, average in self._average.items():
            if name in saved:
                average.copy_(saved[name])


class EMA(_Averaging):
    """Keep an exponential moving average: after each step, decay * average + (1 - decay) * parameters.

    Every rank keeps the same average; it is part of checkpoints. Buffers, such as running means, are not averaged.
    16-bit parameters are averaged in float32; the parameters of a trainable loss are averaged too. It follows the model
    if that changes: a new parameter begins with its present value. Cost: a copy of the parameters, read and written
    once per step.

    Source: Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging (1992).

    Args:
        decay: Between 0 and 1.
        start_step: Steps before averaging starts; until then the average equals the parameters.
        validates: Whether validation, and with it the choice of "best.ckpt", uses the average.
        overwrites_at_end: Whether the model gets the average when the fit is complete. `load_best` and
            `restore_best_weights` take precedence: the model gets the average of the best validation if that used it,
            and otherwise its weights.

    Raises:
        ConfigError: An argument is invalid.
    """

    def __init__(
        self, decay: float = 0.999, start_step: int = 0, validates: bool = True, overwrites_at_end: bool = True
    ) -> None:
        require_float("EMA", "decay", decay)
        require(0 < decay < 1, f"EMA.decay must be between 0 and 1, got {decay!r}.")
        require_integer("EMA", "start_step", start_step, 0)
        super().__init__(validates, overwrites_at_end)
        self.decay = decay
        self.start_step = start_step

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        weight = 1.0 - self.decay if self.trainer.step > self.start_step else 1.0
        self._move(weight)


class SWA(_Averaging):
    """Keep the mean of the weights at the ends of the last epochs: stochastic weight averaging.

    A high learning rate in these epochs, constant or cyclic, lets the weights differ. Every rank keeps the same mean;
    it is part of checkpoints. Running statistics, such as those of batch norm, are averaged too, and what a module's
    `averaged_buffers` names; other buffers stay as they are. Cost: a copy of what is averaged, read and written once
    per epoch.

    Source: Izmailov et al., Averaging Weights Leads to Wider Optima and Better Generalization (2018).

    Args:
        start_epoch: The first epoch whose weights count, from 0.
        validates: As in `EMA`, from that epoch on.
        overwrites_at_end: As in `EMA`.

    Raises:
        ConfigError: An argument is invalid.
    """

    _averages_buffers = True

    def __init__(self, start_epoch: int, validates: bool = True, overwrites_at_end: bool = True) -> None:
        require_integer("SWA", "start_epoch", start_epoch, 0)
        super().__init__(validates, overwrites_at_end)
        self.start_epoch = start_epoch
        self._count, self._counted_step = 0, -1

    def on_train_begin(self, logs: Logs | None = None) -> None:
        super().on_train_begin()
        self._count, self._counted_step = 0, -1

    def _at_end(self) -> dict[str, Tensor]:
        """Return the mean, or the weights if none count yet."""
        return self._average if self._count else self._followed

    def _at_present(self) -> dict[str, Tensor]:
        """Return the mean with the present weights: an epoch is validated before its end, where its weights count."""
        if self.trainer.step == self._counted_step or self.trainer.epoch < self.start_epoch:
            return self._at_end()
        wide = self._wide()
        mean = {name: each.clone() for name, each in self._average.items()}
        torch_compat.lerp_all([*mean.values()], wide, 1 / (self._count + 1))
        return mean

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if epoch >= self.start_epoch:
            self._count, self._counted_step = self._count + 1, self.trainer.step
            self._move(1 / self._count)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self._count, "step": self._counted_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._count, self._counted_step = state["count"], state["step"]
