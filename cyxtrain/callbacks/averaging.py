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
    """Average of the trained tensors, the same on every rank, which the model gets where it is used."""

    belongs_on_all_ranks = True
    # Otherwise the end of a fit with `load_best` would put the last average over the best weights.
    restored_with_best = True
    _averages_buffers = False

    def __init__(self, validates: bool, overwrites_at_end: bool) -> None:
        owner = type(self).__name__
        require_boolean(owner, "validates", validates)
        require_boolean(owner, "overwrites_at_end", overwrites_at_end)
        self.validates = validates
        self.validates_own_weights = validates
        self.overwrites_at_end = overwrites_at_end
        self._average: dict[str, Tensor] = {}
        self._followed: dict[str, Tensor] = {}
        self._own: dict[str, Tensor] | None = None

    def _tensors_to_average(self) -> dict[str, Tensor]:
        """Return the parameters and buffers that are averaged, as the model has them now, by name."""
        trained = self.trainer.trained
        found: list[tuple[str, Tensor]] = list(trained.named_parameters())
        if self._averages_buffers:
            kinds = kinds_of_buffers(trained)
            found += [(name, buffer) for name, buffer in trained.named_buffers() if kinds.get(id(buffer)) == MEAN]
        return {plain_name(name): each for name, each in found if each.is_floating_point() or each.is_complex()}

    def _follow_model(self) -> list[Tensor]:
        """Match the average to the model's present tensors; return their values, 16-bit ones as float32.

        A tensor keeps its average by object, because pruning renames a weight, or else by name. One that is new in the
        model, or whose shape has changed, begins with its present value. Averages of 16-bit tensors are kept as
        float32, because one step's change would be lost in 16 bits.
        """
        present = self._tensors_to_average()
        present_ids = {id(tensor) for tensor in present.values()}
        by_object = {id(tensor): self._average[name] for name, tensor in self._followed.items()}
        # A name counts only if its tensor is gone: a layer inserted before one of the same shape takes its name.
        replaced = {name: self._average[name] for name, old in self._followed.items() if id(old) not in present_ids}
        self._average = {}
        self._followed = present
        values = []
        for name, tensor in present.items():
            value = tensor.data.to(torch.promote_types(tensor.dtype, torch.float32))
            average = by_object.get(id(tensor), replaced.get(name))
            if average is None or average.shape != value.shape:
                average = value.clone()
            self._average[name] = average
            values.append(value)
        return values

    def _move(self, weight: float) -> None:
        """Move the average towards the present values by a weight from 0 to 1."""
        values = self._follow_model()
        torch_compat.lerp_all(list(self._average.values()), values, weight)

    def _at_end(self) -> dict[str, Tensor]:
        """Return the values that the model gets at the end of a fit."""
        return self._average

    def _during_fit(self) -> dict[str, Tensor]:
        """Return the values that the model gets during a fit."""
        return self._average

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._average = {}
        self._followed = {}
        self._own = None
        self._follow_model()

    def on_test_begin(self, logs: Logs | None = None) -> None:
        if self.validates:
            self._swap_in()

    def on_test_end(self, logs: Logs | None = None) -> None:
        if self._own is not None:
            self._set(self._own)
            self._own = None

    def on_exception(self, exception: BaseException) -> None:
        self.on_test_end()  # an error in a validation must not leave the average in the model

    def on_train_end(self, logs: Logs | None = None) -> None:
        # Best weights that were validated without the average stay.
        keeps_best_weights = self.trainer.config.load_best and not self.validates
        if self.overwrites_at_end and not keeps_best_weights:
            self._follow_model()
            self._set(self._at_end())

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the average within a `with` block, in or after a fit; all ranks must call it.

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
        self._follow_model()
        self._own = {name: tensor.data.clone() for name, tensor in self._followed.items()}
        self._set(self._during_fit())

    def _set(self, values: dict[str, Tensor]) -> None:
        tensors = [tensor.data for tensor in self._followed.values()]
        torch_compat.copy_all(tensors, [values[name].data for name in self._followed])

    def state_dict(self) -> dict[str, Any]:
        if self._average:
            self._follow_model()  # the model may have changed since the last step
        return {"average": list(self._average.values()), "names": list(self._average)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._follow_model()
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
        weight = 1.0
        if self.trainer.step > self.start_step:
            weight = 1.0 - self.decay
        self._move(weight)


class SWA(_Averaging):
    """Keep the mean of the weights at the ends of the last epochs: stochastic weight averaging.

    A high learning rate in these epochs, constant or cyclic, lets the weights differ. Every rank keeps the same mean;
    it is part of checkpoints. Running statistics, such as batch norm's, are averaged too, and what a module's
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
        self._count = 0
        self._counted_step = -1

    def on_train_begin(self, logs: Logs | None = None) -> None:
        super().on_train_begin()
        self._count = 0
        self._counted_step = -1

    def _at_end(self) -> dict[str, Tensor]:
        """Return the mean, or the weights if none count yet."""
        return self._average if self._count else self._followed

    def _during_fit(self) -> dict[str, Tensor]:
        """Return the mean as if the present weights already counted."""
        # An epoch is validated before its end, where its weights are added to the mean.
        if self.trainer.step == self._counted_step or self.trainer.epoch < self.start_epoch:
            return self._at_end()
        values = self._follow_model()
        mean = {name: average.clone() for name, average in self._average.items()}
        torch_compat.lerp_all(list(mean.values()), values, 1 / (self._count + 1))
        return mean

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if epoch >= self.start_epoch:
            self._count += 1
            self._counted_step = self.trainer.step
            self._move(1 / self._count)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self._count, "step": self._counted_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._count = state["count"]
        self._counted_step = state["step"]
