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
from cyxtrain.checkpoint.live_marker import LiveMarker

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
        # The probe at the start, and the marker of the live run.
        is_probe = method == "put_object" and len(keywords.get("Body", b"")) < 1000
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
    names = [name for name in remote_files.list_files(url) if name.endswith(".ckpt")]
    return [read_checkpoint(f"{url}/{name}").position["epoch"] for name in names]


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
    """Fit in a world; return the error's class, message and traceback, and the seconds that it took."""
    import time
    import traceback

    began = time.monotonic()
    try:
        fit_in_a_world(url, endpoint, staging, {})
    except cx.CyxtrainError as error:
        shown = "".join(traceback.format_exception(error))
        return type(error).__name__, str(error), shown, time.monotonic() - began
    return None


def mark_twice(url: str, endpoint: str, staging: str) -> list[Any]:
    """Mark two runs as live, one after the other and the second again; return what each was told, and the requests."""
    import s3fs

    prepare(endpoint, staging)
    original = s3fs.S3FileSystem._call_s3
    conditions: list[Any] = []

    async def call(self: Any, method: str, *arguments: Any, **keywords: Any) -> Any:
        if method == "put_object":
            conditions.append(keywords.get("IfNoneMatch"))
        return await original(self, method, *arguments, **keywords)

    s3fs.S3FileSystem._call_s3 = call
    runs = [{"id": str(number) * 16, "started": 1.0} for number in range(2)]
    first, second, again = [LiveMarker(url, run, print) for run in (*runs, runs[1])]
    told = [first.claim(), second.claim()]
    first.close()
    told.append(again.claim())
    again.close()
    s3fs.S3FileSystem._call_s3 = original
    return [told, conditions, [*remote_files.list_files(url)]]


def write_and_read(url: str, endpoint: str, staging: str) -> dict[str, bool]:
    """Write a log, a history, a plot, settings and predictions to a store on a rank; return whether they are right."""
    prepare(endpoint, staging)
    with cx.init():
        rows, classes = make_rows(24)
        model = make_large_model()
        trainer = cx.DistributedTrainer(model, "cross_entropy", "sgd")
        log = cx.callbacks.CSVLogger(f"{url}/log.csv")
        history = trainer.fit(rows, classes, epochs=2, verbose=False, callbacks=[log])
        found = {}
        if cx.is_master():
            lines = remote_files.read_text_of(f"{url}/log.csv").splitlines()
            found["log"] = [line.split(",")[1] for line in lines[1:]] == [*map(repr, history.history["loss"])]
            history.to_json(f"{url}/history.json")
            history.to_csv(f"{url}/history.csv")
            history.plot(f"{url}/history.png")
            found["history"] = cx.TrainingHistory.from_json(f"{url}/history.json") == history
            found["csv"] = remote_files.read_text_of(f"{url}/history.csv") == history.to_csv()
            found["plot"] = remote_files.read_remote(f"{url}/history.png", "plot").startswith(b"\x89PNG")
            remote_files.write_remote(f"{url}/base.yaml", b"training: {epochs: 3}")
            remote_files.write_remote(f"{url}/own/own.yaml", b"_base_: ../base.yaml")
            found["settings"] = cx.Config.from_file(f"{url}/own/own.yaml").training.epochs == 3
        predicted = trainer.predict(rows, batch_size=4, output_dir=f"{url}/predictions")
        found["predictions"] = torch.equal(predicted[:], trainer.predict(rows, batch_size=4))
        found["again"] = torch.equal(cx.open_predictions(f"{url}/predictions")[[20, 3]], predicted[[20, 3]])
        return found
