"""A rank of `data_memory.py`: trains on files of one kind, and reports the most memory of its processes.

Memory is anonymous (RssAnon): mapped files, and pages that the system has read ahead, are not a process's own.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import launches
import numpy as np
import psutil
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import cyxtrain as cx

WIDTH = 1024
_BATCH = 256
_SECONDS_BETWEEN = 0.02


class FileRows(Dataset[Any]):
    """Rows of an HDF5 file, which each process opens by itself."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._process = 0
        self._file: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_path": self._path, "_process": 0, "_file": None}

    def __len__(self) -> int:
        return len(self._opened()["y"])

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        file = self._opened()
        return torch.from_numpy(file["x"][row]), int(file["y"][row])

    def _opened(self) -> Any:
        # A loader's worker must not read from a file that the rank opened before it forked.
        if self._process != os.getpid():
            self._process = os.getpid()
            self._file = h5py.File(self._path)
        return self._file


@contextlib.contextmanager
def opened(kind: str, folder: Path) -> Iterator[tuple[Any, ...]]:
    """Yields the arguments of `fit`."""
    if kind == "parquet":
        # In the fit of the tiny file, too: the library's own memory does not count.
        import pyarrow.dataset
        import pyarrow.parquet

        yield (pyarrow.dataset.dataset(folder, format="parquet"),)
    elif kind == "npy":
        yield np.load(folder / "x.npy", mmap_mode="r"), np.load(folder / "y.npy")
    elif kind == "loader":
        yield (DataLoader(FileRows(folder / "rows.h5"), shuffle=True, num_workers=2),)
    else:
        with h5py.File(folder / "rows.h5") as file:
            yield file["x"], file["y"]


class MemoryWatch:
    """The most anonymous megabytes of this process, and of its children together, within."""

    def __init__(self) -> None:
        self.own = 0.0
        self.children = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        process = psutil.Process()
        while not self._is_over.wait(_SECONDS_BETWEEN):
            self.own = max(self.own, anonymous_megabytes(process.pid))
            children = [anonymous_megabytes(child.pid) for child in process.children(recursive=True)]
            self.children = max(self.children, sum(children))


def anonymous_megabytes(process_id: int) -> float:
    """Returns the anonymous memory of a process; 0 if it has ended."""
    try:
        status = Path(f"/proc/{process_id}/status").read_text(encoding="utf-8")
    except OSError:
        return 0.0
    found = status.partition("RssAnon:")[2].split()
    return int(found[0]) / 1024 if found else 0.0


def train(task: dict[str, Any]) -> dict[str, float]:
    """Trains on the files; returns the peaks of this rank and of its workers."""
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 10))
    trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), 0.01))
    settings: dict[str, Any] = {"epochs": 1, "effective_batch_size": _BATCH, "verbose": False}
    with opened(task["kind"], Path(task["folder"])) as data, MemoryWatch() as watch:
        trainer.fit(*data, readers=task["readers"], max_steps=task["steps"], **settings)
    return {"own": watch.own, "workers": watch.children}


def main() -> None:
    task = launches.given()
    torch.set_num_threads(1)
    with cx.init():
        found = train(task)
    launches.report(found)


if __name__ == "__main__":
    main()
