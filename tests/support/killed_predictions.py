"""What ranks do in test_prediction_folders.py: they predict to a folder, and die in the middle; no pytest here."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from fitting import adam, make_model, make_rows

import cyxtrain as cx

ROWS, BATCH = 200, 2


class Counting(torch.nn.Module):
    """Counts its batches; before the one of a number, it kills its process."""

    def __init__(self, dies_at: int) -> None:
        super().__init__()
        self.body, self.dies_at = make_model(), dies_at
        self.batches: list[float] = []

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.batches.append(float(rows[0, 0]))
        if len(self.batches) == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        scores: torch.Tensor = self.body(rows)
        return scores


def predict(folder: str, kind: str, dies_at: int, victim: int = -1) -> list[float]:
    """Predicts to a folder; returns the first number of each batch; the rows that are tried leave no trace."""
    with cx.init():
        model = Counting(dies_at if victim in (-1, cx.get_rank()) else 0)
        trainer = cx.DistributedTrainer(model, "mse", adam(model))
        rows = make_rows(ROWS)[0]
        data: Any = rows if kind == "arrays" else lambda: iter(rows.split(BATCH))
        found = trainer.predict(data, batch_size=BATCH if kind == "arrays" else None, output_dir=folder)
        assert len(found) == ROWS
        return model.batches
