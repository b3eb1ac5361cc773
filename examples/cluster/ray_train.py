"""Ray Train starts the ranks, Cyxtrain's ring averages the gradients, and a killed worker costs at most one epoch.

Run it on one machine, or on any machine of a Ray cluster that shares FOLDER (tested with Ray 2.60, on one machine):

    pip install 'ray[default,train]'
    RAY_DEDUP_LOGS=0 python examples/cluster/ray_train.py FOLDER

Expect one line from each of two workers, with its rank and its process, ten epochs, and `test accuracy: 0.97..` in the
last line, after a minute, most of which Ray needs. (RAY_DEDUP_LOGS=0 lets Ray print similar lines, too.) Kill one of
the two processes during the run: Ray starts two new workers, `fit` continues from the newest checkpoint in FOLDER, and
the accuracy is the same.
"""

from __future__ import annotations

import importlib
import os
import secrets
import sys
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer

import cyxtrain as cx


class RingBackend(TorchConfig().backend_cls):  # Ray's own class has no public name
    """Create the workers' process group as Ray does, after each has imported Cyxtrain, which registers "ring"."""

    def on_start(self, worker_group: Any, backend_config: TorchConfig) -> None:
        worker_group.execute(lambda: bool(importlib.import_module("cyxtrain")))
        super().on_start(worker_group, backend_config)


class RingConfig(TorchConfig):
    @property
    def backend_cls(self) -> type[RingBackend]:
        return RingBackend


class ReportToRay(cx.callbacks.Callback):
    """Report each epoch to Ray from every worker. Ray accepts one report every two seconds."""

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        ray.train.report({"epoch": epoch, **(logs or {})})


def train(settings: dict[str, Any]) -> float:
    """Train on one worker; the driver gets rank 0's result."""
    (x_train, y_train), (x_test, y_test) = cx.datasets.load_digits()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with cx.init():  # uses the group that Ray has created, and leaves it to Ray to destroy it
        print(f"rank {cx.get_rank()} of {cx.get_world_size()} is process {os.getpid()}")
        trainer = cx.DistributedTrainer(model, "cross_entropy", optimizer, callbacks=[ReportToRay()])
        trainer.fit(x_train, y_train, **settings)
        return trainer.evaluate(x_test, y_test).accuracy


if __name__ == "__main__":
    folder = Path(sys.argv[1]).resolve()  # each worker has its own working folder
    # Only processes with this run's secret may join. Without the second variable, Ray prints each worker's lines twice.
    variables = {"CYXTRAIN_SECRET": secrets.token_hex(32), "RAY_TRAIN_ENABLE_PRINT_PATCH": "0"}
    ray.init(runtime_env={"env_vars": variables})
    settings = {
        "epochs": 10,
        "effective_batch_size": 32,  # over all workers: the training is the same with more of them
        "checkpoint_dir": str(folder / "checkpoints"),
        "checkpoint_every_n_epochs": 1,
        "resume": "auto",
    }
    failures = ray.train.FailureConfig(max_failures=3)  # Ray restarts all workers up to three times
    result = TorchTrainer(
        train,
        train_loop_config=settings,
        torch_config=RingConfig(backend="ring"),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(storage_path=str(folder), failure_config=failures),
    ).fit()
    ray.shutdown()  # waits until the output of the workers is printed
    print(f"test accuracy: {result.return_value:.4f}")
