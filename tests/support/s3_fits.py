"""Fits with checkpoints in an S3 server, killed at a call of an upload; no pytest here."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np
import shelf
import torch
from fitting import CLASSES, FEATURES, Floats, flat, make_rows, seeded
from torch import nn

import cyxtrain as cx
from cyxtrain.checkpoint import remote_files

WRITING = ("create_multipart_upload", "upload_part", "complete_multipart_upload", "put_object", "copy_object")
WIDTH = 640


def prepare(endpoint: str, staging: str) -> None:
    """Set what a user would set, in this process."""
    os.environ |= {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "CYXTRAIN_STAGING_DIR": staging,
    }


def kill_at(count: int, *, after: bool) -> None:
    """Kill this process before, or after, the n-th call that uploads a part of a checkpoint, from 1."""
    import s3fs

    original = s3fs.S3FileSystem._call_s3
    seen = 0

    async def call(self: Any, method: str, *arguments: Any, **keywords: Any) -> Any:
        nonlocal seen
        is_probe = method == "put_object" and len(keywords.get("Body", b"")) < 100
        is_counted = method in WRITING and not is_probe
        seen += is_counted
        is_it = is_counted and seen == count
        if is_it and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = await original(self, method, *arguments, **keywords)
        if is_it:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    s3fs.S3FileSystem._call_s3 = call


def make_large_model() -> nn.Module:
    """Return a model whose checkpoint, with an optimizer's state of the same size, has three parts of 8 MiB."""
    with seeded():
        return nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4096), nn.Linear(4096, CLASSES))


def fit(url: str, endpoint: str, staging: str, settings: dict[str, Any]) -> tuple[Floats, int, int]:
    """Fit with checkpoints; return the parameters, the epochs, and the steps that this process has taken."""
    prepare(endpoint, staging)
    model = make_large_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    trainer = cx.DistributedTrainer(model, "cross_entropy", optimizer)
    steps = shelf.Steps()
    given: dict[str, Any] = {
        "epochs": 3,
        "effective_batch_size": 6,
        "verbose": False,
        "checkpoint_every_n_epochs": 1,
        "keep_last": 1,
    }
    trainer.fit(*make_rows(24), checkpoint_dir=url, callbacks=[steps], **(given | settings))
    return flat(model.parameters()), trainer.epoch, steps.count


def fit_in_a_world(
    url: str, endpoint: str, staging: str, settings: dict[str, Any], count: int = 0, after: bool = False
) -> tuple[Floats, int, int]:
    """As `fit`, on a rank that has to join first; rank 0 is killed at a call, unless that is 0."""
    prepare(endpoint, staging)
    if count and os.environ["RANK"] == "0":
        kill_at(count, after=after)
    with cx.init():
        return fit(url, endpoint, staging, settings)


def epochs_in(url: str, endpoint: str, staging: str) -> list[int]:
    """Return the epochs of the checkpoints in a store, each read whole; an object that is not intact is an error."""
    from cyxtrain.checkpoint.checkpoint_file import read_checkpoint

    prepare(endpoint, staging)
    return [read_checkpoint(f"{url}/{name}").position["epoch"] for name in remote_files.list_files(url)]


def make_bucket(endpoint: str, name: str) -> None:
    """Make a bucket."""
    import fsspec

    prepare(endpoint, "")
    fsspec.filesystem("s3").mkdir(name)


def upload_large(url: str, endpoint: str, folder: str) -> tuple[int, bool]:
    """Upload a file of 400 MB; return how many bytes of memory that took, and whether it came back the same."""
    prepare(endpoint, folder)
    path = Path(folder, "large")
    content = np.random.default_rng(0).bytes(1 << 20)
    with path.open("wb") as file:
        for _ in range(400):
            file.write(content)
    (Path(folder) / "small").write_bytes(b"1")
    remote_files.upload(Path(folder) / "small", f"{url}/small")  # imports and connects
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    remote_files.upload(path, f"{url}/large")
    taken = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return taken, remote_files.read_remote(f"{url}/large", "file") == content * 400


def fit_into(url: str, endpoint: str, staging: str) -> Any:
    """Fit in a world; return the error's class and message, and the seconds that it took."""
    import time

    began = time.monotonic()
    try:
        fit_in_a_world(url, endpoint, staging, {})
    except cx.CyxtrainError as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return None
