"""A store of files on this disk, as fsspec reaches others, whose uploads can fail, wait, or kill the process.

Its files are written in small parts under the name that they are given, as on an SFTP server: not atomically.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import torch
from fitting import fingerprint, flat, make_model, make_rows
from fsspec.implementations.local import LocalFileSystem
from refusals import warning_texts

import cyxtrain as cx

PART_BYTES = 500
ROWS = 24


class Shelf(LocalFileSystem):  # type: ignore[misc]
    """The store of URLs like "shelf:///tmp/store"."""

    protocol = "shelf"
    before: ClassVar[Callable[[str], None]]
    """Called before each listing ("ls"), each small file ("pipe") and each part of an upload ("part")."""

    def ls(self, path: str, detail: bool = False, **keywords: Any) -> Any:
        Shelf.before("ls")
        return super().ls(path, detail=detail, **keywords)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **keywords: Any) -> Any:
        Shelf.before("pipe")
        return super().pipe_file(path, value, mode, **keywords)

    def put_file(self, path1: str, path2: str, callback: Any = None, **keywords: Any) -> None:
        with open(path1, "rb") as source, open(path2, "wb") as target:
            while content := source.read(PART_BYTES):
                Shelf.before("part")
                target.write(content)
                target.flush()


def nothing(_: str) -> None:
    """What a store in order does before its calls."""


def killing(count: int) -> Callable[[str], None]:
    """Return what kills this process before a part of an upload: number `count` of all, from 0."""
    left = [count]

    def before(call: str) -> None:
        if call == "part":
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1

    return before


def forbidding(_: str) -> None:
    """Refuse, as a store does with a wrong key."""
    raise PermissionError("Forbidden")


def silent(_: str) -> None:
    """Take longer than a fit waits."""
    time.sleep(5.0)


def stuck(call: str) -> None:
    """Never send a part of an upload."""
    if call == "part":
        time.sleep(60.0)


def dying(parts: int) -> Callable[[str], None]:
    """Return what refuses everything after so many parts of uploads."""
    left = [parts]

    def before(call: str) -> None:
        left[0] -= call == "part"
        if left[0] < 0:
            raise ConnectionError("the store is gone")

    return before


Shelf.before = staticmethod(nothing)
fsspec.register_implementation("shelf", Shelf, clobber=True)


def fit(folder: str, staging: str, before: Sequence[Any] = (nothing,), settings: Any = None) -> dict[str, Any]:
    """Fit with checkpoints in a folder, which may be a URL; return what came of it, and what was warned of.

    `before`: one of the functions above, for this process; or one that returns it, and the number that it takes.
    """
    os.environ["CYXTRAIN_STAGING_DIR"] = staging
    function, *numbers = before
    Shelf.before = staticmethod(function(*numbers) if numbers else function)
    given: dict[str, Any] = {"epochs": 3, "effective_batch_size": 6, "verbose": False, "checkpoint_every_n_epochs": 1}
    given |= settings or {}
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), given.pop("rate", 0.1), momentum=0.9)
    trainer = cx.DistributedTrainer(model, "cross_entropy", optimizer)
    steps = Steps()
    more = given.pop("more", [])
    if "terminate_at" in given:
        more = [*more, Terminate(given.pop("terminate_at"))]
    if function is nothing:
        more = [*more, Pace(folder)]
    began = time.monotonic()
    try:
        with warning_texts() as told:
            trainer.fit(*make_rows(ROWS), checkpoint_dir=folder, callbacks=[steps, *more], **given)
    finally:
        Shelf.before = staticmethod(nothing)
    return {
        "bits": fingerprint(model),
        "parameters": flat(model.parameters()),
        "epochs": trainer.epoch,
        "losses": trainer.history.history["loss"],
        "steps": steps.count,
        "told": told,
        "seconds": time.monotonic() - began,
    }


def fit_in_a_world(*arguments: Any) -> dict[str, Any]:
    """As `fit`, on a rank that has to join first."""
    with cx.init():
        return fit(*arguments)


def move(folder: str, url: str) -> list[Any]:
    """Save a checkpoint and weights to a store, and load them; return the bits before and after, and the epoch."""
    os.environ["CYXTRAIN_STAGING_DIR"] = f"{folder}/staging"
    model = make_model()
    trainer = cx.DistributedTrainer(model, "cross_entropy", "sgd")
    trainer.fit(*make_rows(ROWS), epochs=2, verbose=False)
    trainer.save_checkpoint(f"{url}/own/mine.ckpt")
    if cx.is_master():
        cx.save_weights(model, f"{url}/own/model.safetensors")
    cx.barrier()
    found = [fingerprint(model)]
    other = make_model()
    cx.load_weights(other, f"{url}/own/model.safetensors")
    found.append(fingerprint(other))
    other = make_model()
    cx.load_weights(other, f"{url}/own/mine.ckpt")
    found.append(fingerprint(other))
    loaded = cx.DistributedTrainer(make_model(), "cross_entropy", "sgd")
    loaded.load_checkpoint(f"{url}/own/mine.ckpt")
    return [*found, fingerprint(loaded.model), loaded.epoch]


class Steps(cx.callbacks.Callback):
    """Counts the steps that a fit takes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.count += 1


class Terminate(cx.callbacks.Callback):
    """Sends SIGTERM to this process after a step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.trainer.step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


class Pace(cx.callbacks.Callback):
    """Waits before an epoch until the store has the checkpoint of the one before, so that none is left out."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.folder = Path(url.removeprefix("shelf://"))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        deadline = time.monotonic() + 5.0
        while epoch and not [*self.folder.glob(f"epoch-{epoch:04d}*.ckpt")] and time.monotonic() < deadline:
            time.sleep(0.002)


def kept(folder: Path) -> set[str]:
    """Return the names of the files in a folder, hidden ones too."""
    return {path.name for path in folder.iterdir()}
