"""The callbacks, metrics and training steps of random programs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

import cyxtrain as cx

from .rows import Part, first_of, identity_of
from .spec import Spec

callbacks = cx.callbacks


class NotedRows(callbacks.Callback):
    """Notes which rows the model sees in each training step."""

    def __init__(self, inputs: Part) -> None:
        super().__init__()
        self.numbers = {identity_of(row): number for number, row in enumerate(first_of(inputs))}
        self.by_step: dict[int, list[int]] = {}
        self._is_in_step = False

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._is_in_step = True
        self.by_step[self.trainer.step] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._is_in_step = False

    def before_forward(self, module: nn.Module, arguments: Any, keywords: Any) -> None:
        if self._is_in_step and torch.is_grad_enabled() and module.training:
            given = [*arguments, *keywords.values()]
            rows = next(each for each in given if isinstance(each, Tensor) and each.dim())
            self.by_step[self.trainer.step] += [self.numbers.get(identity_of(row), -1) for row in rows]


class StopAt(callbacks.Callback):
    """Stops at the end of a step or an epoch, or presses Ctrl-C on one rank."""

    def __init__(self, how: str, when: int, rank: int = 0) -> None:
        self.how, self.when, self.rank = how, when, rank

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.trainer.step != self.when or cx.get_rank() != self.rank:
            return
        if self.how == "step":
            self.trainer.stop_training = True
        elif self.how == "ctrl_c":
            os.kill(os.getpid(), signal.SIGINT)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.how == "epoch" and epoch == self.when and cx.get_rank() == self.rank:
            self.trainer.stop_training = True


class LogsNumbers(callbacks.Callback):
    """Logs numbers in every reduction, in batches, epochs or both."""

    def __init__(self, where: str) -> None:
        self.where = where

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if "batch" in self.where:
            self.trainer.log("batch_last", float(self.trainer.step), reduce="last")
            self.trainer.log("batch_mean", float(batch % 3))
            self.trainer.log("batch_max", self.trainer.step % 5 + 1 / 3, reduce="max")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if "epoch" in self.where:
            size = sum(each.detach().abs().sum().item() for each in self.model.parameters())
            self.trainer.log("epoch_size", size, larger_is_better=False)
            self.trainer.log("epoch_min", size, reduce="min")


class Unfreeze(callbacks.Callback):
    """Trains the first layer, too, from an epoch on."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == self.epoch:
            layers: Any = self.model.body
            layers[0].requires_grad_(True)
            optimizer = self.trainer.optimizer
            known = {id(each) for group in optimizer.param_groups for each in group["params"]}
            new = [each for each in layers[0].parameters() if id(each) not in known]
            if new:
                optimizer.add_param_group({"params": new, "lr": 0.02})


def _slower(epoch: int, rate: float) -> float:
    return rate * 0.8


def _made_callbacks(folder: Path) -> dict[str, Callable[..., callbacks.Callback]]:
    return {
        "ema": lambda decay, start, validates, overwrites: callbacks.EMA(
            decay, start_step=start, validates=validates, overwrites_at_end=overwrites
        ),
        "swa": lambda epoch, validates, overwrites: callbacks.SWA(
            epoch, validates=validates, overwrites_at_end=overwrites
        ),
        "early": lambda monitor, patience, restores, delta: callbacks.EarlyStopping(
            monitor, patience=patience, restore_best_weights=restores, min_delta=delta
        ),
        "plateau": lambda monitor, patience, cooldown: callbacks.ReduceLROnPlateau(
            monitor, factor=0.5, patience=patience, cooldown=cooldown
        ),
        "rates": lambda: callbacks.LearningRateScheduler(_slower),
        "checkpoint": lambda monitor: callbacks.ModelCheckpoint(
            str(folder / "best_of_callback.ckpt"), monitor=monitor, save_best_only=True
        ),
        "csv": lambda: callbacks.CSVLogger(str(folder / "log.csv"), append=True),
        "norm": callbacks.GradientNormMonitor,
        "nan": callbacks.TerminateOnNaN,
        "logs": LogsNumbers,
        "unfreeze": Unfreeze,
        "stop_at": StopAt,
        "rate_monitor": lambda: callbacks.LearningRateMonitor(1),
    }


def make_callbacks(spec: Spec, folder: Path) -> list[callbacks.Callback]:
    made = _made_callbacks(folder)
    return [made[name](*arguments) for name, *arguments in spec.callbacks]


def of_each(output: Tensor, target: Tensor) -> Tensor:
    """A metric with a number for each row."""
    if target.dtype is torch.int64:
        return (output.argmax(1) - target).abs().to(output.dtype)
    return (output - target).abs().mean(1)


def of_all(output: Tensor, target: Tensor) -> Tensor:
    """A metric that is a mean over rows."""
    return output.mean()


def whole(outputs: Any, targets: Any) -> float:
    """A metric of all rows, which depends on their order."""
    sums = np.asarray(outputs, dtype=np.float64).reshape(len(outputs), -1).sum(1)
    others = np.asarray(targets, dtype=np.float64).reshape(len(targets), -1).sum(1)
    return float((sums * np.cos(np.arange(len(sums)))).sum() + (sums * others).sum())


def make_metrics(spec: Spec) -> Any:
    if not spec.metrics:
        return None
    if spec.metrics == ("by_output",):
        return {"c": ["accuracy", "f1"], "r": ["mae"]}
    own: dict[str, Any] = {"of_each": of_each, "of_all": of_all}
    own["whole"] = cx.metrics.WholeSet(whole, higher_is_better=True)
    return [own.get(name, name) for name in spec.metrics]


# --- steps of the user's own ------------------------------------------------------------------------------------------

Trainer = cx.DistributedTrainer


def _losses(trainer: Trainer, batch: Any) -> tuple[Tensor, Tensor]:
    """Return the loss of each row, and the output."""
    inputs, target = (batch["x"], batch["labels"]) if isinstance(batch, dict) else batch[:2]
    output = trainer.model(inputs)
    if target.dtype is torch.int64:
        return F.cross_entropy(output, target, reduction="none"), output
    return (output - target).square().mean(1), output


def _counted_pair(trainer: Trainer, batch: Any) -> tuple[Tensor, Tensor]:
    losses, output = _losses(trainer, batch)
    counted = (output.detach()[:, 0] > -0.2).to(losses.dtype)
    return (losses * counted).sum(), counted.sum()


def step_with_loss(trainer: Trainer, batch: Any) -> Any:
    return _losses(trainer, batch)[0].mean()


def step_with_pair(trainer: Trainer, batch: Any) -> Any:
    total, count = _counted_pair(trainer, batch)
    targets = batch["labels"] if isinstance(batch, dict) else batch[1]
    return {"loss": (total, count), "counted": (count.detach(), len(targets))}


def step_with_dictionary(trainer: Trainer, batch: Any) -> Any:
    losses, output = _losses(trainer, batch)
    found = output.detach()
    result = {"loss": losses.mean(), "output": output, "large": (found > 0).double().mean()}
    if trainer.step % 2:
        result["odd"] = found.abs().mean()
    trainer.log("in_step", found.sum(), reduce="sum")
    return result


def step_that_draws(trainer: Trainer, batch: Any) -> Any:
    losses, _ = _losses(trainer, batch)
    return (losses * torch.rand(len(losses))).mean()


def step_that_optimizes(trainer: Trainer, batch: Any) -> Any:
    return {"shown": trainer.optimize(_losses(trainer, batch)[0].mean())}


def step_that_optimizes_a_pair(trainer: Trainer, batch: Any) -> Any:
    return {"shown": trainer.optimize(_counted_pair(trainer, batch))}


def step_of_two_optimizers(trainer: Trainer, batch: Any) -> Any:
    first = trainer.optimize(_losses(trainer, batch)[0].mean(), "p")
    losses, output = _losses(trainer, batch)
    return {"a": first, "b": trainer.optimize((losses + 0.1 * output.square().mean(1)).mean(), "q")}


def step_of_optimizers_in_turns(trainer: Trainer, batch: Any) -> Any:
    return {"a": trainer.optimize(_losses(trainer, batch)[0].mean(), "p" if trainer.step % 2 else "q")}


def step_that_retains_the_graph(trainer: Trainer, batch: Any) -> Any:
    return {"a": trainer.optimize(_losses(trainer, batch)[0].mean(), "p", retain_graph=True)}


def step_with_closure(trainer: Trainer, batch: Any) -> Any:
    return {"shown": trainer.optimize(lambda: _losses(trainer, batch)[0].mean())}


class AddsPenalty(Trainer):
    def train_step(self, batch: Any) -> Any:
        found = super().train_step(batch)
        found["penalty"] = found["output"].square().mean()
        return {**found, "loss": found["loss"] + 0.02 * found["penalty"]}


class OptimizesBuiltIn(Trainer):
    def train_step(self, batch: Any) -> Any:
        found = super().train_step(batch)
        self.optimize(found["loss"])
        return found


class TestsItself(Trainer):
    train_step = step_with_loss

    def test_step(self, batch: Any) -> Any:
        losses, output = _losses(self, batch)
        return {"loss": losses.mean(), "output": output, "half": losses.mean() / 2}


CLASSES_WITH_STEPS: dict[str, type[Trainer]] = {
    "penalty": AddsPenalty,
    "built_in_optimize": OptimizesBuiltIn,
    "test_step": TestsItself,
}
STEPS: dict[str, Callable[[Trainer, Any], Any]] = {
    "loss": step_with_loss,
    "pair": step_with_pair,
    "dict": step_with_dictionary,
    "draws": step_that_draws,
    "optimize": step_that_optimizes,
    "optimize_pair": step_that_optimizes_a_pair,
    "two": step_of_two_optimizers,
    "in_turns": step_of_optimizers_in_turns,
    "retain_graph": step_that_retains_the_graph,
    "closure": step_with_closure,
}
"""Given as a function, or as a method of a class: see `make_trainer`."""


def trainer_class(spec: Spec) -> tuple[type[Trainer], dict[str, Any]]:
    """Return a class of trainers, and keywords; every other program has its step as a function."""
    if spec.own_step is None:
        return Trainer, {}
    if spec.own_step in CLASSES_WITH_STEPS:
        return CLASSES_WITH_STEPS[spec.own_step], {}
    step = STEPS[spec.own_step]
    if spec.data_seed % 2:
        return Trainer, {"train_step": step}
    return type("OwnStep", (Trainer,), {"train_step": step}), {}
