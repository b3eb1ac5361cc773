"""One rank of `checkpoint.py` that trains: a whole `fit`, with checkpoints or without."""

from __future__ import annotations

import hashlib
import itertools
import shutil
import time
from pathlib import Path
from typing import Any

import launches
import torch
from torch import Tensor, nn

import cyxtrain as cx
from cyxtrain.checkpoint.checkpoint_file import read_checkpoint
from cyxtrain.checkpoint.folder import CheckpointFolder

_FEATURES, _CLASSES = 64, 10
_WARM_STEPS = 20
HIDDEN = {"small": (512, 512), "large": (2048, 2304)}
"""Widths of the layers between: models of 0.3 and of 4.9 million parameters."""


def make_model(name: str) -> nn.Module:
    """Returns an MLP of `HIDDEN`, the same on every rank and in every launch."""
    torch.manual_seed(0)
    widths = (_FEATURES, *HIDDEN[name])
    layers = [part for pair in itertools.pairwise(widths) for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(widths[-1], _CLASSES))


def make_data(rows: int) -> tuple[Tensor, Tensor]:
    """Returns learnable data: classes are those of a random linear map."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(rows, _FEATURES, generator=generator)
    return inputs, (inputs @ torch.randn(_FEATURES, _CLASSES, generator=generator)).argmax(1)


def digest_of(model: nn.Module) -> str:
    """Returns a hash of the parameters."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def train(task: dict[str, Any]) -> dict[str, Any]:
    """Trains from the beginning; returns how long `fit` took, how much of it outside epochs, and a hash of the weights.

    Args:
        task: "model", "batch_size" per rank, "steps" per epoch, "epochs", "folder" (None: no checkpoints) and
            "check_replicas_every_n_steps".

    Raises:
        AssertionError: The checkpoints are not one for each epoch, or the last does not hold the weights.
    """
    model, folder = make_model(task["model"]), task["folder"]
    config = cx.DistributedTrainingConfig(
        epochs=task["epochs"],
        batch_size=task["batch_size"],
        verbose=False,
        check_replicas_every_n_steps=task["check_replicas_every_n_steps"],
    )
    if folder is not None:
        config.checkpoint_every_n_epochs, config.checkpoint_dir, config.on_save_error = 1, folder, "raise"
    data = make_data(task["steps"] * task["batch_size"] * cx.get_world_size())
    trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters()))
    cx.barrier()
    began = time.perf_counter()
    history = trainer.fit(*data, config)
    seconds = time.perf_counter() - began
    if folder is not None and cx.is_master():
        check_checkpoints(CheckpointFolder(folder), model, task["epochs"])
        shutil.rmtree(folder)
    return {"seconds": seconds, "outside_seconds": seconds - history.total_time_seconds, "digest": digest_of(model)}


def check_checkpoints(folder: CheckpointFolder, model: nn.Module, epochs: int) -> None:
    """Fails unless each epoch has a checkpoint, and the last one holds the model."""
    expected = [folder.file(f"epoch-{epoch + 1:04d}") for epoch in range(epochs)]
    if sorted(folder.path.iterdir()) != expected:
        raise AssertionError(f"other files than {expected}: {sorted(folder.path.iterdir())}")
    saved = read_checkpoint(Path(expected[-1])).model
    if not all(torch.equal(saved[name], value) for name, value in model.state_dict().items()):
        raise AssertionError(f"{expected[-1]} does not hold the model that was trained")


def main() -> None:
    task = launches.given()
    torch.set_num_threads(1)
    with cx.init():
        train(task | {"steps": _WARM_STEPS, "epochs": 1, "folder": None})
        found = train(task)
    launches.report([found])


if __name__ == "__main__":
    main()
