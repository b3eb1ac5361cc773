"""What ranks do in test_kills.py: they fit, and die at a moment that was drawn; no pytest here."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from fitting import CLASSES, FEATURES, fingerprint, make_rows, seeded
from torch import nn

import cyxtrain as cx

ROWS, BATCH, EPOCHS = 55, 5, 3


@dataclass(frozen=True)
class Moment:
    """When ranks are killed.

    Attributes:
        victims: Which ranks.
        where: "training": in the n-th forward of a step; "validation": in the first forward of the n-th validation;
            "save": at the n-th call of fsync or rename.
        count: The n.
    """

    victims: tuple[int, ...]
    where: str
    count: int


class Model(nn.Module):
    """Draws random numbers, notes which rows it is trained on, and calls somebody before each forward."""

    def __init__(self, before: Callable[[str], None]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 16), nn.Dropout(0.3), nn.Linear(16, CLASSES))
        self.before = before
        self.seen: list[float] = []
        self.has_begun = self.validates = False  # what is tried before a fit is no step

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            if self.has_begun:
                self.before("training")
                self.seen += rows[:, 0].tolist()
            rows = rows + 0.1 * random.random() + 0.1 * np.random.rand()
        elif self.validates:
            self.validates = False
            self.before("validation")
        scores: torch.Tensor = self.layers(rows)
        return scores


class BeginRecorder(cx.callbacks.Callback):
    """Tells the model that what comes is no trial."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.own = model

    def on_train_begin(self, logs: Any = None) -> None:
        self.own.has_begun = True

    def on_test_begin(self, logs: Any = None) -> None:
        self.own.validates = True


def fit(folder: str, seed: int, moment: Moment | None) -> dict[str, Any]:
    """Fits, from the newest checkpoint on, and dies at the moment, if it comes."""
    counts = dict.fromkeys(("training", "validation", "save"), 0)
    found = [torch.zeros(1, dtype=torch.int64) for _ in range(cx.get_world_size())]
    cx.all_gather(found, torch.tensor([os.getpid()]))
    processes = [int(process) for process in found]

    def before(where: str) -> None:
        counts[where] += 1
        if moment is None or (where, counts[where]) != (moment.where, moment.count):
            return
        if where == "save" and cx.is_master():  # the only one that saves
            for victim in sorted(moment.victims, reverse=True):
                os.kill(processes[victim], signal.SIGKILL)
        elif where != "save" and cx.get_rank() in moment.victims:
            os.kill(os.getpid(), signal.SIGKILL)

    for name in ("fsync", "replace"):
        setattr(os, name, _called_first(getattr(os, name), lambda: before("save")))
    with seeded():
        model = Model(before)
    # Where a process begins must not matter.
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), 1e-2))
    history = trainer.fit(
        *make_rows(ROWS),
        epochs=EPOCHS,
        batch_size=BATCH,
        validation_data=make_rows(20, seed=1),
        checkpoint_every_n_steps=2,
        checkpoint_every_n_epochs=1,
        keep_last=3,
        checkpoint_dir=folder,
        resume="auto",
        verbose=False,
        callbacks=[BeginRecorder(model)],
    )
    return {"bits": fingerprint(model), "history": history.history, "epochs": history.epochs, "seen": model.seen}


def _called_first(original: Callable[..., Any], before: Callable[[], None]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        before()
        return original(*arguments)

    return call


def fit_in_a_world(folder: str, seed: int, moment: Moment | None) -> dict[str, Any]:
    """The same, in its own world."""
    with cx.init():
        return fit(folder, seed, moment)
