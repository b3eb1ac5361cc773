"""Ranks decide at random moments to stop, to skip and to save: all do the same at one step, and none waits for ever."""

from __future__ import annotations

import os
import random
import signal
import sys
from typing import Any

import pytest
import torch
from fitting import CLASSES, FEATURES, fingerprint, make_rows, seeded
from markers import by_night
from rank_processes import run_ranks, values
from torch import nn

import cyxtrain as cx

pytestmark = [
    pytest.mark.usefixtures("rank_server"),
    pytest.mark.skipif(os.name == "nt", reason="ranks get POSIX signals here"),
]
ROWS, BATCH, EPOCHS = 40, 8, 4
STEPS = ROWS // BATCH * EPOCHS
DECISIONS = ("nan", "inf", "stop", "stop at the end", "SIGTERM", "SIGINT", "evaluate")


class Deciding(cx.callbacks.Callback):
    """Decides on this rank alone, at steps that were drawn for it alone."""

    def __init__(self, draw: random.Random, few: bool) -> None:
        self.steps = 0
        steps = draw.sample(range(1, STEPS + 1), draw.randrange(2 if few else 5))
        self.plan = {step: draw.choice(DECISIONS) for step in steps}
        signals = [step for step, decision in self.plan.items() if decision.startswith("SIG")]
        for step in signals[1:]:  # the second would not wait for the step
            del self.plan[step]
        self.stops = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        decision = self.plan.get(self.steps)
        if decision in ("SIGTERM", "SIGINT"):
            os.kill(os.getpid(), getattr(signal, decision))
        self.stops |= decision == "stop at the end"
        if decision == "stop":
            self.trainer.stop_training = True
        if decision == "evaluate":
            self.trainer.evaluate(*make_rows(5), distributed=False)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.stops:
            self.trainer.stop_training = True


class Model(nn.Module):
    """Gives NaN or infinity when it was decided."""

    def __init__(self, deciding: Deciding) -> None:
        super().__init__()
        with seeded():
            layers = nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, CLASSES)
            self.layers = nn.Sequential(*layers)
        self.deciding = deciding

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(rows)
        decision = self.deciding.plan.get(self.deciding.steps + 1) if torch.is_grad_enabled() else None
        return output * float(decision) if decision in ("nan", "inf") else output


def decide(seed: int, folder: str) -> list[Any]:
    """Fits with random decisions, again and again until it is complete; returns how each of them ended."""
    own = random.Random(1000 * seed + int(os.environ["RANK"]))
    common = random.Random(seed)
    validation = common.choice([None, make_rows(10, seed=2)])
    ends = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with cx.init():
        for attempt in range(20):
            deciding = Deciding(own, few=attempt > 2)
            model = Model(deciding)
            trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.Adam(model.parameters(), 1e-2))
            ends.append(
                [fit(trainer, deciding, common, folder, validation), trainer._state.position, fingerprint(model)]
            )
            if ends[-1][0] == "complete":
                break
    return ends


def fit(trainer: cx.DistributedTrainer, deciding: Deciding, common: random.Random, folder: str, validation: Any) -> str:
    """Returns how a fit ended."""
    settings = {
        "max_time_seconds": common.choice([None, None, 0.01, 0.05]),
        "checkpoint_every_n_minutes": common.choice([0.0, 1e-5, 1e-4]),
        "checkpoint_every_n_steps": common.choice([0, 1, 3]),
        "checkpoint_every_n_epochs": 1,
        "keep_last": common.choice([0, 2]),
        "check_replicas_every_n_steps": common.choice([None, 1, 4]),
        "on_nonfinite": common.choice(["skip", "skip", "raise"]),
    }
    try:
        trainer.fit(
            *make_rows(ROWS),
            epochs=EPOCHS,
            effective_batch_size=BATCH,
            validation_data=validation,
            callbacks=[deciding],
            checkpoint_dir=folder,
            resume="auto",
            verbose=False,
            **settings,
        )
    except (SystemExit, KeyboardInterrupt, cx.NonFiniteError) as error:
        return type(error).__name__
    position = trainer._state.position
    return "complete" if position.stopped or position.epoch == EPOCHS else "time is over"


@pytest.mark.parametrize("seed", [0, *map(by_night, range(1, 102))])
def test_whatever_ranks_decide_all_do_the_same_and_none_hangs(seed, tmp_path):
    first, *others = values(run_ranks(2 + seed % 3, decide, seed, str(tmp_path), seconds=90.0))
    assert first[-1][0] == "complete", first
    for together in zip(first, *others, strict=True):
        kinds = {kind for kind, _, _ in together}
        # Where another rank's NaN ends the fit in the very step of a signal, the signal still does what it does.
        assert len(kinds) == 1 or "NonFiniteError" in kinds, together
        assert all(each[1:] == together[0][1:] for each in together), together
