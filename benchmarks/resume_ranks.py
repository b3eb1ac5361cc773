"""A rank of `data_kinds.py --resume`: counts the rows that it reads in an epoch, and to resume near the epoch's end.

Data that continue from a state also resume with their state hidden: then all is read again. A row is decompressed,
which takes as long as to decode a tiny image.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import launches
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import cyxtrain as cx

_WIDTH = 3072
_BATCH = 32
_READERS = 4
_PACKED = zlib.compress(np.random.default_rng(0).integers(0, 16, _WIDTH).astype(np.float32).tobytes())


class Rows(Dataset[Any]):
    """Rows by their number. Counts those that are decoded, also in a loader's workers."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.read = torch.zeros(1, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        self.read += 1
        values = np.frombuffer(zlib.decompress(_PACKED), np.float32).copy()
        values[0] = row % 16
        return torch.from_numpy(values), row % 10


class Stream(IterableDataset[Any]):
    """Each so manyth row in turn, which continues from a state."""

    def __init__(self, rows: Rows, first: int = 0, step: int = 1) -> None:
        self._rows = rows
        self._numbers = range(first, len(rows), step)
        self._given = 0

    def __iter__(self) -> Iterator[Any]:
        while self._given < len(self._numbers):
            self._given += 1
            yield self._rows[self._numbers[self._given - 1]]
        self._given = 0

    def state_dict(self) -> dict[str, int]:
        """Returns the place."""
        return {"given": self._given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues from a place."""
        self._given = state["given"]


class Batches:
    """The batches of other data, whose state is hidden."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Any]:
        return iter(self._data)


class Samples(Batches, IterableDataset[Any]):
    """The samples of other data, whose state is hidden."""


def make_dataset(rows: Rows) -> Any:
    return DataLoader(rows, _BATCH, shuffle=True)


def make_stateful_loader(rows: Rows) -> Any:
    library: Any = importlib.import_module("torchdata.stateful_dataloader")
    return library.StatefulDataLoader(rows, _BATCH, shuffle=True)


def make_stateful_stream(rows: Rows) -> Any:
    library: Any = importlib.import_module("torchdata.stateful_dataloader")
    return library.StatefulDataLoader(Stream(rows), _BATCH)


def make_stateful_worker(rows: Rows) -> Any:
    library: Any = importlib.import_module("torchdata.stateful_dataloader")
    return library.StatefulDataLoader(Stream(rows), _BATCH, num_workers=1)


def make_hugging_face(rows: Rows) -> Any:
    datasets: Any = importlib.import_module("datasets")

    def decoded(sample: dict[str, Any]) -> dict[str, Any]:
        inputs, label = rows[sample["row"]]
        return {"input": inputs.numpy(), "label": label}

    numbers = datasets.Dataset.from_dict({"row": [*range(len(rows))]})
    stream = numbers.to_iterable_dataset(num_shards=_READERS).map(decoded, remove_columns=["row"])
    return stream.with_format("torch")


def make_readers(rows: Rows) -> Any:
    return lambda reader, readers: Stream(rows, reader, readers)


def make_plain_readers(rows: Rows) -> Any:
    return lambda reader, readers: (rows[row] for row in range(reader, len(rows), readers))


def make_generator(rows: Rows) -> Any:
    return lambda: iter(DataLoader(rows, _BATCH))


class Kind(NamedTuple):
    """A kind of data."""

    make: Callable[[Rows], Any]
    settings: dict[str, Any]
    hidden: Callable[[Rows], Any] | None = None  # the same data without their state: all is read again
    package: str = ""  # that it needs


SHARED: dict[str, Any] = {"sharded_data": False}
IN_PARTS: dict[str, Any] = {"readers": _READERS}
KINDS = {
    "`DataLoader` of a `Dataset`": Kind(make_dataset, {}),
    "`StatefulDataLoader` of a `Dataset`": Kind(make_stateful_loader, {}, package="torchdata"),
    "`StatefulDataLoader` of an iterable": Kind(
        make_stateful_stream, SHARED, lambda rows: Batches(make_stateful_stream(rows)), "torchdata"
    ),
    "the same with a worker": Kind(
        make_stateful_worker, SHARED, lambda rows: Batches(make_stateful_worker(rows)), "torchdata"
    ),
    "`IterableDataset` of Hugging Face": Kind(
        make_hugging_face, SHARED, lambda rows: Samples(make_hugging_face(rows)), "datasets"
    ),
    "`IterableDataset` with a `state_dict`": Kind(Stream, SHARED, lambda rows: Samples(Stream(rows))),
    "readers with a `state_dict`": Kind(make_readers, IN_PARTS, make_plain_readers),
    "a generator": Kind(make_generator, SHARED, make_generator),
}
"""By name. A generator has no state to hide."""


class Watch(cx.callbacks.Callback):
    """Saves after a step; notes when the first step has ended, and how many rows were read by then."""

    def __init__(self, rows: Rows, path: Path, at: int) -> None:
        super().__init__()
        self._rows = rows
        self._path = path
        self._at = at
        self._began = time.perf_counter()
        self.first: dict[str, float] = {}

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Notes the first step, and saves after the chosen one."""
        if not self.first:
            self.first = {"rows": int(self._rows.read), "seconds": time.perf_counter() - self._began}
        if self.trainer.step == self._at:
            self.trainer.save_checkpoint(self._path)


def fit(kind: Kind, make: Callable[[Rows], Any], count: int, path: Path, resume: Path | None) -> dict[str, float]:
    """Returns the rows that this rank has read in all, and what it took until the first step had ended."""
    rows = Rows(count)
    torch.manual_seed(0)
    model = nn.Linear(_WIDTH, 10)
    trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), 0.01))
    data = make(rows)
    steps = count // (_BATCH * cx.get_world_size())
    cx.barrier()
    watch = Watch(rows, path, steps * 9 // 10)
    settings = {"epochs": 1, "batch_size": _BATCH, "verbose": False, "resume": resume, **kind.settings}
    trainer.fit(data, callbacks=[watch], **settings)
    return {**watch.first, "all": int(rows.read)}


def measure(name: str, count: int, folder: Path) -> dict[str, Any]:
    """Returns the rows of an epoch, and the rows and seconds to resume: from the state, and reading all again."""
    kind = KINDS[name]
    path = folder / f"{[*KINDS].index(name)}.ckpt"
    found: dict[str, Any] = {"kind": name, "epoch": fit(kind, kind.make, count, path, None)["all"]}
    if kind.hidden is not kind.make:
        found["resumed"] = fit(kind, kind.make, count, path, path)
    if kind.hidden is not None:
        fit(kind, kind.hidden, count, path, None)
        found["again"] = fit(kind, kind.hidden, count, path, path)
    return found


def main() -> None:
    task = launches.given()
    torch.set_num_threads(1)
    names = [name for name, kind in KINDS.items() if not kind.package or importlib.util.find_spec(kind.package)]
    with cx.init():
        found = [measure(name, task["rows"], Path(task["folder"])) for name in names]
    launches.report(found)


if __name__ == "__main__":
    main()
