"""An epoch of fit over each kind of data, and a plain loop over PyTorch's DataLoader of the same data.

    python benchmarks/data_kinds.py [--rows 20000] [--launches 7] [--resume] [--json results.json]

Both train the same small network on one process, in turns, with the same batches of 64 rows. The ratio is the median
over rounds of fit's seconds, with its checks, by the loop's. Kinds whose package is missing are left out.

With --resume instead: how many rows each of two ranks reads in an epoch, and how many rows and seconds a fit needs
until its first step has ended when it resumes after nine tenths of the epoch, from the data's state and without it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from launches import launch, paired_quartiles, save_results, take_turns
from text_tables import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import cyxtrain as cx

WIDTH = 64
BATCH_SIZE = 64


class Rows(Dataset[Any]):
    """Rows of arrays by their number: what one writes for a memory map, too."""

    def __init__(self, inputs: Any, targets: Any) -> None:
        self._inputs = inputs
        self._targets = targets

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return torch.from_numpy(np.array(self._inputs[row])), int(self._targets[row])


class Stream(IterableDataset[Any]):
    """The same rows one after the other."""

    def __init__(self, inputs: Any, targets: Any) -> None:
        self._inputs = inputs
        self._targets = targets

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        for row in range(len(self._inputs)):
            yield torch.from_numpy(self._inputs[row]), int(self._targets[row])


class Data:
    """The rows, in memory and in files of a folder."""

    def __init__(self, folder: Path, rows: int) -> None:
        generator = np.random.default_rng(0)
        self.folder = folder
        self.inputs = generator.standard_normal((rows, WIDTH), dtype=np.float32)
        self.targets = generator.integers(0, 10, rows)
        np.save(folder / "inputs.npy", self.inputs)


# Each returns the arguments of fit, and what a plain loop reads the same batches from.
Opened = tuple[tuple[Any, ...], Iterable[Any]]


def open_arrays(data: Data) -> Opened:
    tensors = TensorDataset(torch.from_numpy(data.inputs), torch.from_numpy(data.targets))
    return (data.inputs, data.targets), DataLoader(tensors, BATCH_SIZE, shuffle=True)


def open_table(data: Data) -> Opened:
    pandas: Any = importlib.import_module("pandas")
    table = pandas.DataFrame(data.inputs)
    return (table, pandas.Series(data.targets)), open_arrays(data)[1]


def open_memory_map(data: Data) -> Opened:
    mapped = np.load(data.folder / "inputs.npy", mmap_mode="r")
    return (mapped, data.targets), DataLoader(Rows(mapped, data.targets), BATCH_SIZE, shuffle=True)


def open_dataset(data: Data) -> Opened:
    dataset = Rows(data.inputs, data.targets)
    return (dataset,), DataLoader(dataset, BATCH_SIZE, shuffle=True)


def open_loader(data: Data) -> Opened:
    loaders = [DataLoader(Rows(data.inputs, data.targets), BATCH_SIZE, shuffle=True, num_workers=1) for _ in range(2)]
    return (loaders[0],), loaders[1]


def open_hugging_face(data: Data) -> Opened:
    datasets: Any = importlib.import_module("datasets")
    rows = datasets.Dataset.from_dict({"input": data.inputs, "labels": data.targets}).with_format("torch")
    return (rows,), DataLoader(rows, BATCH_SIZE, shuffle=True)


def open_stream(data: Data) -> Opened:
    return (Stream(data.inputs, data.targets),), DataLoader(Stream(data.inputs, data.targets), BATCH_SIZE)


def open_generator(data: Data) -> Opened:
    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for first in range(0, len(data.inputs), BATCH_SIZE):
            last = first + BATCH_SIZE
            yield torch.from_numpy(data.inputs[first:last]), torch.from_numpy(data.targets[first:last])

    return (batches,), Again(batches)


class Again:
    """An iterable that calls a function for each pass."""

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin = begin

    def __iter__(self) -> Iterator[Any]:
        return self._begin()


KINDS: dict[str, tuple[str, Callable[[Data], Opened]]] = {
    "arrays": ("", open_arrays),
    "tables (pandas)": ("pandas", open_table),
    "memory maps": ("", open_memory_map),
    "Dataset": ("", open_dataset),
    "DataLoader, 1 worker": ("", open_loader),
    "datasets.Dataset": ("datasets", open_hugging_face),
    "IterableDataset": ("", open_stream),
    "generator of batches": ("", open_generator),
}
"""By kind: the package that it needs, and how to open it."""


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, 10))


def fit(opened: Opened) -> float:
    """Returns the seconds of an epoch of `fit`, with its checks."""
    model = make_model()
    trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), 0.01))
    began = time.perf_counter()
    trainer.fit(*opened[0], epochs=1, batch_size=BATCH_SIZE, verbose=False)
    return time.perf_counter() - began


def loop(opened: Opened) -> float:
    """Returns the seconds of an epoch of a plain loop that also keeps loss and accuracy, as fit does."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    total_loss = 0.0
    correct = 0
    began = time.perf_counter()
    for batch in opened[1]:
        inputs, targets = batch.values() if isinstance(batch, dict) else batch
        outputs = model(inputs)
        loss = nn.functional.cross_entropy(outputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total_loss += loss.item() * len(targets)
        correct += int((outputs.argmax(1) == targets).sum())
    return time.perf_counter() - began


WAYS = {"fit": fit, "loop": loop}


def compare(data: Data, kind: str, rounds: int) -> dict[str, Any]:
    """Returns the seconds of both ways by round, and the quartiles of their ratios."""
    opened = KINDS[kind][1](data)
    fit(opened)  # what is done once in a process
    found = take_turns([*WAYS], rounds, lambda way: WAYS[way](opened))
    return {"kind": kind, **found, "ratio": paired_quartiles(found["fit"], found["loop"])}


def compare_kinds(rows: int, rounds: int) -> list[dict[str, Any]]:
    """Compares all kinds with a loop, and prints the table."""
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, cx.init(cx.DistributedConfig(rank=0, world_size=1)):
        data = Data(Path(folder), rows)
        for kind, (package, _) in KINDS.items():
            if not package or importlib.util.find_spec(package) is not None:
                found.append(compare(data, kind, rounds))
    table = Table("an epoch of each kind of data", ["data", "fit, rows/s", "loop, rows/s", "fit / loop", "quartiles"])
    for row in found:
        rates = [f"{rows / statistics.median(row[way]):,.0f}" for way in WAYS]
        lower, median, upper = row["ratio"]
        table.add([row["kind"], *rates, f"{median:.2f}", f"{lower:.2f}-{upper:.2f}"])
    table.show()
    return found


RESUMED = {"resumed": "from the state", "again": "read again"}


def resume_kinds(rows: int) -> list[dict[str, Any]]:
    """Resumes with all kinds on two ranks, and prints the table: of each figure the larger one of the ranks."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = launch("resume_ranks.py", 2, {"rows": rows, "folder": folder})
    headings = [f"{way}, {unit}" for way in RESUMED.values() for unit in ("rows", "s")]
    table = Table(f"two ranks resume in an epoch of {rows:,} rows", ["data", "a rank's rows", *headings], names=1)
    found: list[dict[str, Any]] = []
    for of_ranks in zip(*ranks, strict=True):
        row = {"kind": of_ranks[0]["kind"], "epoch": max(each["epoch"] for each in of_ranks)}
        cells = [row["kind"], f"{row['epoch']:,}"]
        for way in RESUMED:
            figures = [each[way] for each in of_ranks if way in each]
            if not figures:
                cells += ["-", "-"]
                continue
            row[way] = {unit: max(each[unit] for each in figures) for unit in ("rows", "seconds")}
            cells += [f"{row[way]['rows']:,}", f"{row[way]['seconds']:.2f}"]
        table.add(cells)
        found.append(row)
    table.show()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--launches", type=int, default=7, help="rounds, in which both take turns")
    parser.add_argument("--resume", action="store_true", help="measure what it takes to resume instead")
    parser.add_argument("--json", type=Path, help="where the figures go")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = resume_kinds(given.rows) if given.resume else compare_kinds(given.rows, given.launches)
    save_results(given.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
