"""An epoch of fit over a chunked HDF5 file, and a plain loop over a Dataset that reads the same rows, sorted.

    python benchmarks/stored_rows.py [--rows 8000] [--launches 5] [--floors] [--json results.json]

Both train the same small network on one process, shuffled, from the same file, in turns. The Dataset is as fast as one
gets with PyTorch's means: it is asked for whole batches, reads the rows of each in one call, sorted, and puts them into
order. The ratio is the median over rounds of fit's seconds by the loop's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from launches import paired_quartiles, save_results, take_turns
from text_tables import Table
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

import cyxtrain as cx

WIDTH = 1024
CEILING = 1.2
"""What the ratio must not exceed for a chunked file; a contiguous one is read so fast that the start of fit shows."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "chunks of 16 rows": {"chunks": (16, WIDTH)},
    "chunks of 64 rows, lzf": {"chunks": (64, WIDTH), "compression": "lzf"},
    "chunks of 64 rows, gzip": {"chunks": (64, WIDTH), "compression": "gzip", "compression_opts": 1},
    "contiguous": {},
}


class SortedRows(Dataset[Any]):
    """Batches of a file's rows by their numbers."""

    def __init__(self, file: Any) -> None:
        self._x = file["x"]
        self._y = torch.from_numpy(file["y"][:])

    def __len__(self) -> int:
        return len(self._y)

    def __getitem__(self, rows: list[int]) -> tuple[Tensor, Tensor]:
        wanted = np.array(rows)
        order = np.argsort(wanted)
        found = self._x[wanted[order]]
        batch = np.empty_like(found)
        batch[order] = found
        return torch.from_numpy(batch), self._y[wanted]


def write(path: Path, rows: int) -> None:
    """Writes the rows, once per layout."""
    generator = np.random.default_rng(0)
    values = generator.integers(0, 64, (rows, WIDTH)).astype("float32")
    targets = generator.integers(0, 10, rows)
    with h5py.File(path, "w") as file:
        for name, layout in LAYOUTS.items():
            group = file.create_group(name)
            group.create_dataset("x", data=values, **layout)
            group["y"] = targets


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 10))


def fit(file: Any, batch_size: int) -> float:
    """Returns the seconds of an epoch of `fit`, with its checks."""
    model = make_model()
    trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), 0.01))
    began = time.perf_counter()
    trainer.fit(file["x"], file["y"], epochs=1, batch_size=batch_size, verbose=False)
    return time.perf_counter() - began


def loop(file: Any, batch_size: int) -> float:
    """Returns the seconds of an epoch of a plain loop."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    began = time.perf_counter()
    dataset = SortedRows(file)
    batches = BatchSampler(RandomSampler(dataset), batch_size, drop_last=False)
    for inputs, targets in DataLoader(dataset, batch_size=None, sampler=batches):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return time.perf_counter() - began


WAYS = {"fit": fit, "loop": loop}


def compare(file: Any, name: str, batch_size: int, rounds: int) -> dict[str, Any]:
    """Returns the seconds of both ways by round, and the quartiles of their ratios."""
    group = file[name]
    fit(group, batch_size)  # what is done once in a process
    found = take_turns([*WAYS], rounds, lambda way: WAYS[way](group, batch_size))
    return {"layout": name, "batch_size": batch_size, **found, "ratio": paired_quartiles(found["fit"], found["loop"])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8000)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--launches", type=int, default=5, help="rounds, in which both take turns")
    parser.add_argument("--floors", action="store_true", help=f"fail if a chunked file's ratio is above {CEILING}")
    parser.add_argument("--json", type=Path, help="where the figures go")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, cx.init(cx.DistributedConfig(rank=0, world_size=1)):
        path = Path(folder) / "rows.h5"
        write(path, given.rows)
        with h5py.File(path) as file:
            for name in LAYOUTS:
                rows += [compare(file, name, size, given.launches) for size in given.batch_sizes]
    table = Table("an epoch of an HDF5 file", ["layout", "batch", "fit, s", "loop, s", "fit / loop", "quartiles"])
    for row in rows:
        medians = [f"{statistics.median(row[way]):.2f}" for way in WAYS]
        lower, median, upper = row["ratio"]
        table.add([row["layout"], str(row["batch_size"]), *medians, f"{median:.2f}", f"{lower:.2f}-{upper:.2f}"])
    table.show()
    save_results(given.json, rows)
    chunked = [row for row in rows if "chunks" in LAYOUTS[row["layout"]]]
    return int(given.floors and any(row["ratio"][1] > CEILING for row in chunked))


if __name__ == "__main__":
    sys.exit(main())
