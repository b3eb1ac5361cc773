"""A plain training loop over whole batches in one process: what a program without `fit` would come to."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

import cyxtrain as cx

from .models import make_loss
from .program import Job, Outcome, Program, as_array
from .rows import IGNORED, Part, dtype_of, first_of, identity_of, make_rows, row_weights, take
from .spec import PLAIN, Spec, words

_NAMED: dict[str, Any] = {
    "cross_entropy": F.cross_entropy,
    "mse": F.mse_loss,
    "bce_with_logits": F.binary_cross_entropy_with_logits,
}
PLAIN_DATA = ("tensors", "numpy", "tds", "mapds", "dictds", "loader")
PLAIN_SCHEDULES = (None, "linear", "cosine", "exp", "step", "lambda", "fn_poly", "constant")
_WATCHING = ("csv", "norm", "rate_monitor", "nan", "logs")
PLAIN_MODELS = words("mlp tied frozen unused branch complex twice scalar ln bn_eval conv embed lstm dict")
PLAIN_LOSSES = words(
    "ce nn_ce ce_w ce_ign ce_w_ign ce_ls ce_w_ls ce_ign_ls ce_sum ce_none f_ce fn_mean fn_rows mod_param mm mm_w own "
    "own_more mse nn_mse l1 huber smooth mse_sum mse_none mse_fn bce bce_pw bce_sum tok tok_ls own_items m"
)
STEPS_WITHOUT_WEIGHT = True
"""Whether a step in which nothing counts updates the parameters, with gradients of zero."""


def can_repeat(spec: Spec) -> bool:
    """Return whether the loop below knows all that the program does."""
    rows_and_model = (
        spec.data in PLAIN_DATA
        and spec.model in PLAIN_MODELS
        and spec.own_step is None
        and spec.group_by_length is None
        and all(name in _WATCHING for name, *_ in spec.callbacks)
    )
    loss = spec.loss in PLAIN_LOSSES and not spec.logs and not (spec.task == "multi" and spec.sample_weight)
    updates = (
        not spec.optimizer.startswith(("lbfgs", "name: "))
        and spec.scheduler in PLAIN_SCHEDULES
        and spec.learning_rate_scaling is None
        and not isinstance(spec.warmup_steps, float)
        and not (spec.warmup_steps and spec.scheduler_interval == "epoch")
        and not (spec.clip and spec.clip[0] == "adaptive")
        and spec.is_exact
    )
    one_fit = (
        spec.second_fit is None
        and not spec.load_best
        and spec.initial_epoch is None
        and not spec.batches_between
        and not spec.fast_dev_run
        and spec.validation in (None, "pair")
        and not spec.weighted_validation
    )
    return rows_and_model and loss and updates and one_fit


class _Objective:
    """The loss of rows, and what it weighs."""

    def __init__(self, program: Program) -> None:
        self.spec, self.model = program.spec, program.model
        loss = program.loss if isinstance(program.loss, nn.Module) else make_loss(self.spec)[0]
        self.loss: Any = _NAMED[loss] if isinstance(loss, str) else loss

    def __call__(
        self, inputs: Part, targets: Part | None, weights: Tensor | None = None, by_class: bool = False
    ) -> tuple[Tensor, float]:
        output = self.model(**inputs) if isinstance(inputs, dict) else self.model(inputs)
        count = len(first_of(inputs))
        if targets is None:
            counted = (inputs["labels"] != IGNORED).sum() if self.spec.task == "tok" else count
            return output["loss"], float(counted)
        if isinstance(self.loss, dict):
            terms = [_NAMED[loss](output[name], targets[name]) for name, loss in self.loss.items()]
            return torch.stack(terms).sum(), count
        weight = self._weight(targets, count)
        if weights is not None or by_class:
            return self._weighted(output, targets, weights, by_class, weight), weight
        found = self.loss(output, targets)
        return found.mean() if found.dim() else found, weight

    def of_nothing(self, inputs: Part) -> Any:
        """Return a loss with gradients of zero."""
        output = self.model(**inputs) if isinstance(inputs, dict) else self.model(inputs)
        return (output["logits"] if isinstance(output, dict) else output).sum() * 0

    def _weight(self, target: Tensor, count: int) -> float:
        kind = self.spec.loss
        if kind.startswith("tok"):
            return float((target != IGNORED).sum())
        if not kind.startswith(("ce_w", "ce_ign")):
            return count
        counted = (target != self.loss.ignore_index).double()
        return float((counted if self.loss.weight is None else counted * self.loss.weight[target]).sum())

    def _weighted(self, output: Tensor, target: Tensor, weights: Tensor | None, by_class: bool, weight: float) -> Any:
        """Return the loss with a factor for each row."""
        if isinstance(self.loss, nn.Module):
            each = copy.copy(self.loss)
            each.reduction = "none"  # type: ignore[assignment]
            losses = each(output, target)
        else:
            losses = self.loss(output, target, **({} if self.spec.loss == "fn_rows" else {"reduction": "none"}))
        losses = losses.reshape(len(output), -1)
        is_sum = self.spec.loss.endswith("_sum")
        is_mean_of_terms = self.spec.loss.startswith(("ce_w", "ce_ign", "tok"))
        losses = losses.sum(1) if is_sum or is_mean_of_terms else losses.mean(1)
        factor = torch.ones(len(output), dtype=dtype_of(self.spec))
        if weights is not None:
            factor = factor * weights
        if by_class:
            factor = factor * torch.tensor([0.5, 1.0, 3.0], dtype=factor.dtype)[target]
        return (losses * factor).sum() / (1 if is_sum else weight)


def repeat(spec: Spec, job: Job) -> Outcome:
    """Train by a plain loop; return parameters, losses, rows of each step, and the loss of the last validation."""
    program = Program(spec, job)
    objective = _Objective(program)
    optimizers = [*program.trainer.optimizers.values()]
    parameters = [*program.trainer.trained.parameters()]
    rows_per_step = spec.batch[1] * (1 if spec.batch[0] == "eff" else spec.accumulation_steps)
    steps_per_pass = spec.rows // rows_per_step if spec.drop_last else -(-spec.rows // rows_per_step)
    steps_per_epoch = spec.steps_per_epoch or steps_per_pass
    total = steps_per_epoch * spec.epochs
    if spec.max_steps is not None:
        total = spec.max_steps if spec.epochs == PLAIN.epochs else min(total, spec.max_steps)
    rates = _rates(spec, total, steps_per_epoch, optimizers)
    weights = row_weights(spec, spec.rows) if spec.sample_weight else None
    losses, by_step, sums, sum_of_weights = [], {}, 0.0, 0.0
    program.model.train()
    if spec.model == "bn_eval":
        program.model.body[2].eval()  # type: ignore[index, union-attr]
    for step, rows in enumerate(itertools.islice(_batches(spec, steps_per_pass, rows_per_step), total)):
        by_step[step] = sorted(program.noted.numbers[identity_of(row)] for row in first_of(program.inputs)[rows])
        rates(step)
        for each in parameters:
            each.grad = None
        targets = None if program.targets is None else take(program.targets, rows)
        inputs = take(program.inputs, rows)
        loss, weight = objective(inputs, targets, None if weights is None else weights[rows], spec.class_weight)
        if weight:
            sums += loss.item() * (1 if spec.loss.endswith("_sum") else weight)
            sum_of_weights += weight
        if weight or STEPS_WITHOUT_WEIGHT:
            (loss if weight else objective.of_nothing(inputs)).backward()
            _clip(spec, optimizers, parameters)
            for optimizer in optimizers:
                optimizer.step()
        if (step + 1) % steps_per_epoch == 0 or step + 1 == total:
            losses.append(sums if spec.loss.endswith("_sum") else _quotient(sums, sum_of_weights))
            sums, sum_of_weights = 0.0, 0.0
    named = program.trainer.trained.named_parameters()
    outcome: Outcome = {"params": {name: as_array(each) for name, each in named}, "losses": losses, "rows": by_step}
    if spec.validation == "pair":
        program.model.eval()
        with torch.no_grad():
            loss, weight = objective(*make_rows(spec, 1 + spec.rows // 3, salt=1))
        outcome["val_loss"] = loss.item() if weight else math.nan
    return outcome


def _quotient(total: float, weight: float) -> float:
    return total / weight if weight else math.nan


def _batches(spec: Spec, steps_per_pass: int, rows_per_step: int) -> Iterator[Tensor]:
    sampler = cx.DistributedSampler(spec.rows, shuffle=spec.shuffle, seed=spec.seed, rank=0, world_size=1, pad=False)
    for number in itertools.count():
        sampler.set_epoch(number)
        order = torch.from_numpy(np.array(sampler.global_indices()))
        for step in range(steps_per_pass):
            yield order[step * rows_per_step : (step + 1) * rows_per_step]


def _clip(spec: Spec, optimizers: list[Any], parameters: list[Any]) -> None:
    if spec.clip is None:
        return
    name, limit = spec.clip
    clipped = parameters
    if isinstance(limit, dict):  # of the first optimizer alone
        limit = limit["p"]
        clipped = [each for group in optimizers[0].param_groups for each in group["params"]]
    clip: Any = getattr(nn.utils, f"clip_grad_{name}_")
    clip(clipped, limit)


def _rates(spec: Spec, total: int, steps_per_epoch: int, optimizers: list[Any]) -> Callable[[int], None]:
    """Return what sets the learning rates of a step."""
    bases = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    warmup, in_epochs = int(spec.warmup_steps), spec.scheduler_interval == "epoch"
    length = max(1, -(-total // steps_per_epoch) if in_epochs else total - warmup)
    shapes: dict[str | None, Callable[[int], float]] = {
        "linear": lambda unit: 1 - min(unit / length, 1),
        "cosine": lambda unit: (1 + math.cos(math.pi * min(unit / length, 1))) / 2,
        "exp": lambda unit: 0.95**unit,
        "step": lambda unit: 0.7 ** (unit // 3),
        "lambda": lambda unit: 1 / (1 + 0.2 * unit),
        "fn_poly": lambda unit: (1 - min(unit / length, 1)) ** 2,
    }
    shape: Callable[[int], float] = shapes.get(spec.scheduler, lambda unit: 1.0)

    def set_rates(step: int) -> None:
        for number, optimizer in enumerate(optimizers):
            factor = shape(step // steps_per_epoch if in_epochs else max(0, step - warmup))
            if step < warmup:
                factor = (step + 1) / warmup
            elif number and spec.scheduler in ("linear", "cosine"):  # which only the first one has
                factor = 1.0
            for group, base in zip(optimizer.param_groups, bases[number], strict=True):
                is_tensor = isinstance(group["lr"], Tensor)
                group["lr"] = torch.tensor(base * factor) if is_tensor else base * factor

    return set_rates
