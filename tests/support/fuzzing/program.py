"""Runs a random program on this rank, and notes all that it comes to."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import cyxtrain as cx

from .hooks import NotedRows, StopAt, make_callbacks, make_metrics, trainer_class
from .models import LoggedLoss, make_loss, make_model, make_optimizers, make_schedule
from .rows import Rows, container, first_of, length_of, lengths_of, make_rows, row_weights, take
from .spec import ARRAYS, PLAIN, Spec, words

Outcome = dict[str, Any]
ROWS_PER_GIVEN_BATCH = 6
"""Batches that a step has where they are given whole: divisible by 1, 2 and 3 ranks."""
_AS_IN_FIT = words(
    "max_steps steps_per_epoch validation_steps validation_batch_size learning_rate_scaling warmup_steps drop_last "
    "check_replicas_every_n_steps validate_every_n_steps load_best log_every_n_steps fast_dev_run fused_optimizer "
    "precision keep_best initial_epoch"
)
_TIMES = ("total_time_seconds", "samples_per_second", "world_size")


@dataclasses.dataclass(frozen=True)
class Job:
    """How a program is run.

    Attributes:
        world_size: Of the world that runs it.
        folder: For checkpoints; absolute.
        fit: More settings of `fit`.
        stop_at: Arguments of StopAt.
        is_whole: Whether it evaluates and trains on batches between the fits, if the program does.
        evaluates: Whether it evaluates and predicts at the end.
    """

    world_size: int
    folder: str
    fit: dict[str, Any] = dataclasses.field(default_factory=dict)
    stop_at: tuple[Any, ...] | None = None
    is_whole: bool = False
    evaluates: bool = True


class Program:
    """A trainer and its data."""

    def __init__(self, spec: Spec, job: Job) -> None:
        self.spec, self.job = spec, job
        self.inputs, self.targets = make_rows(spec, spec.rows)
        self.model = make_model(spec)
        self.loss, weights = make_loss(spec)
        optimizers = make_optimizers(spec, self.model, self.loss)
        more: dict[str, Any] = optimizers | make_schedule(spec, optimizers)
        if spec.scheduler_interval != "step":
            more["scheduler_interval"] = spec.scheduler_interval
        if spec.ddp:
            more["ddp_config"] = cx.DDPConfig(**spec.ddp)
        made, step = trainer_class(spec)
        loss = LoggedLoss(self.loss) if spec.logs else self.loss
        self.trainer = made(self.model, loss, loss_weights=weights, metrics=make_metrics(spec), **more, **step)
        if isinstance(loss, LoggedLoss):
            loss.trainer = self.trainer
        if spec.recomputes:
            self.trainer.enable_gradient_checkpointing()
        self.noted = NotedRows(self.inputs)
        if spec.notes_rows:
            self.model.register_forward_pre_hook(self.noted.before_forward, with_kwargs=True)

    def fit(self, second: bool = False) -> Any:
        data, more = container(self.spec, self.job.world_size, self.inputs, self.targets)
        callbacks = make_callbacks(self.spec, Path(self.job.folder))
        if self.spec.notes_rows:
            callbacks.append(self.noted)
        if self.job.stop_at is not None:
            callbacks.append(StopAt(*self.job.stop_at))
        return self.trainer.fit(*data, callbacks=callbacks, **{**self.settings(second), **more})

    def settings(self, second: bool) -> dict[str, Any]:
        """Return the settings of a fit."""
        spec = self.spec
        found: dict[str, Any] = {"verbose": False, "seed": spec.seed, "checkpoint_dir": self.job.folder}
        found |= {name: getattr(spec, name) for name in _AS_IN_FIT if getattr(spec, name) != getattr(PLAIN, name)}
        found |= self._batch_sizes()
        if spec.data in ARRAYS:
            found["shuffle"] = spec.shuffle
        if spec.max_steps is None or spec.epochs != PLAIN.epochs:
            found["epochs"] = spec.epochs
        if spec.clip:
            found[f"clip_{spec.clip[0]}"] = spec.clip[1]
        if spec.class_weight:
            found["class_weight"] = {0: 0.5, 1: 1.0, 2: 3.0}
        if spec.group_by_length:
            forms = {"true": True, "function": length_of}
            found["group_by_length"] = forms.get(spec.group_by_length, lengths_of(self.inputs))
        found |= self._validation() | self.job.fit
        if second and spec.second_fit is not None:
            found.pop("initial_epoch", None)
            if "max_steps" in found and "epochs" in spec.second_fit:
                del found["max_steps"]
            found |= spec.second_fit
        return found

    def _batch_sizes(self) -> dict[str, int]:
        spec, world_size = self.spec, self.job.world_size
        if spec.has_lists:
            return {"accumulation_steps": ROWS_PER_GIVEN_BATCH // world_size}
        found = {"accumulation_steps": spec.accumulation_steps}
        name, size = spec.batch
        if name == "eff":
            found["effective_batch_size"] = size
        elif not spec.data.startswith("loader"):  # a loader has its own
            found["batch_size"] = size // world_size
        return found

    def _validation(self) -> dict[str, Any]:
        spec = self.spec
        if spec.validation is None:
            return {}
        found: dict[str, Any] = {"validation_freq": spec.validation_freq}
        if spec.validation.startswith("split"):
            found["validation_split"] = 0.25
            if spec.validation == "split_stratified":
                found["validation_stratify"] = True
            if spec.validation == "split_groups":
                found["validation_groups"] = [row // 3 for row in range(spec.rows)]
            return found
        inputs, targets = make_rows(spec, 1 + spec.rows // 3, salt=1)
        if spec.validation == "loader":
            return found | {"validation_data": DataLoader(Rows(inputs, targets), batch_size=3)}
        if spec.validation == "named":
            return found | {"validation_data": {"near": (inputs, targets), "far": make_rows(spec, 5, salt=2)}}
        if spec.weighted_validation:
            weights = row_weights(spec, len(first_of(inputs)), period=3)
            return found | {"validation_data": (inputs, targets, weights)}
        return found | {"validation_data": (inputs, targets)}

    def evaluate(self) -> dict[str, Any]:
        inputs, targets = make_rows(self.spec, 17, salt=3)
        size = self.spec.evaluation_batch
        if self.spec.evaluates_loader:
            return self.trainer.evaluate(DataLoader(Rows(inputs, targets), batch_size=size or 4)).to_dict()
        more: dict[str, Any] = {} if size is None else {"batch_size": size}
        return self.trainer.evaluate(inputs, targets, **more).to_dict()

    def predict(self, name: str) -> dict[str, Any]:
        inputs, _ = make_rows(self.spec, 13, salt=4)
        if self.spec.computes_loss:
            del inputs["labels"]
        size = self.spec.evaluation_batch
        more: dict[str, Any] = {} if size is None else {"batch_size": size}
        if self.spec.predicts_to_folder:
            more["output_dir"] = f"{self.job.folder}/predicted_{name}"
        found = self.trainer.predict(inputs, **more)
        found = found[0:13] if self.spec.predicts_to_folder else found
        if isinstance(found, dict):
            return {key: as_array(each) for key, each in found.items()}
        parts = found if isinstance(found, tuple | list) else [found]
        return {str(number): as_array(each) for number, each in enumerate(parts)}

    def train_on_batches(self) -> list[Any]:
        found = []
        for number in range(self.spec.batches_between):
            rows = torch.arange(number, min(self.spec.rows, number + 5))
            targets = None if self.targets is None else take(self.targets, rows)
            logs = self.trainer.train_on_batch(take(self.inputs, rows), targets, return_dict=True)
            found.append(sorted(logs.items()))
        return found

    def state(self) -> Outcome:
        """Return parameters, buffers, optimizer state and position."""
        trainer = self.trainer
        optimizer: dict[str, Any] = {}
        for name, each in trainer.optimizers.items():
            for number, values in each.state_dict()["state"].items():
                tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
                optimizer |= {f"{name} {number} {key}": as_array(value) for key, value in tensors.items()}
            optimizer |= {f"{name} rate {number}": float(group["lr"]) for number, group in enumerate(each.param_groups)}
        trained = trainer.trained
        named = dict(trained.named_parameters())
        return {
            "params": {name: as_array(each) for name, each in named.items()},
            "buffers": {name: as_array(each) for name, each in trained.named_buffers()},
            "optimizer": optimizer,
            "frozen": [name for name, each in named.items() if not each.requires_grad],
            "step": trainer.step,
            "epoch": trainer.epoch,
            "rows": self.noted.by_step,
        }


def as_array(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return np.asarray(value)
    dense = value.detach().to_dense() if value.is_sparse else value.detach()
    return dense.resolve_conj().numpy().copy()


def run_program(spec: Spec, job: Job) -> Outcome:
    """Run a program on this rank; return what it comes to."""
    program = Program(spec, job)
    outcome: Outcome = {}
    if spec.evaluates_between and job.is_whole:
        outcome["before"] = {"evaluate": program.evaluate(), "predict": program.predict("before")}
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    try:
        with _nothing_changes(program.model, outcome):
            history = program.fit()
        outcome["history"] = _comparable(history)
        if job.is_whole and spec.batches_between:
            outcome["batches"] = program.train_on_batches()
        if job.is_whole and spec.evaluates_between:
            outcome["between"] = program.evaluate()
        if spec.second_fit is not None:
            outcome["second_history"] = _comparable(program.fit(second=True))
    except KeyboardInterrupt:
        return outcome | program.state() | {"is_stopped": True}
    outcome |= program.state() | {"is_stopped": False}
    if job.evaluates:
        outcome |= {"evaluate": program.evaluate(), "predict": program.predict("after")}
    return outcome


@contextlib.contextmanager
def _nothing_changes(model: nn.Module, outcome: Outcome) -> Iterator[None]:
    """Note in the outcome if the block leaves random generators or modes of modules changed."""

    def now() -> tuple[Any, ...]:
        generators = (torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate())
        return *generators, [module.training for module in model.modules()]

    before = now()
    try:
        yield
    finally:
        if now() != before:
            outcome["note"] = "the fit did not restore the random generators or the modes of modules"


def _comparable(history: Any) -> dict[str, Any]:
    return {name: value for name, value in history.to_dict().items() if name not in _TIMES}
