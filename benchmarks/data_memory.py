"""How much memory a fit needs for files on disk, above the same fit of a tiny file.

    python benchmarks/data_memory.py [--megabytes 2048] [--group-megabytes 64] [--ranks 1 2] [--kinds ...]
        [--steps 300] [--folder DIR] [--floors] [--json results.json]

Writes each kind of file to a temporary folder, trains a small network on it, and on a file of 4,096 rows. The figures
are the peaks of anonymous memory (RssAnon in /proc, so Linux alone) of the rank and of its loader's workers that need
most, less the same of the tiny file. Parquet is read to its end, in row groups of the given size; others for some
steps.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from launches import launch, save_results
from text_tables import Table

WIDTH = 1024
_TINY_ROWS = 4096
_ROWS_AT_ONCE = 16384
MOST_ROW_GROUPS = 3
MOST_MEGABYTES = 200
"""The most that a fit may need: of Parquet, and of others."""

KINDS: dict[str, tuple[str, int | None]] = {
    "Parquet, 2 readers": ("parquet", 2),
    "Parquet, 8 readers": ("parquet", 8),
    "HDF5": ("hdf5", None),
    "memory map": ("npy", None),
    "DataLoader of HDF5, 2 workers": ("loader", None),
}
"""By name: the kind of file for `memory_ranks.py`, and the readers."""


def blocks(rows: int, at_once: int) -> Iterator[tuple[int, Any, Any]]:
    """Yields the first row of each block of rows, their numbers, and their classes."""
    generator = np.random.default_rng(0)
    for first in range(0, rows, at_once):
        count = min(at_once, rows - first)
        yield first, generator.random((count, WIDTH), dtype=np.float32), generator.integers(0, 10, count)


def write_parquet(folder: Path, rows: int, rows_per_group: int) -> None:
    import pyarrow
    from pyarrow import parquet

    kind = pyarrow.list_(pyarrow.float32(), WIDTH)
    schema = pyarrow.schema([("input", kind), ("label", pyarrow.int64())])
    with parquet.ParquetWriter(folder / "rows.parquet", schema, use_dictionary=False) as writer:
        for _, values, targets in blocks(rows, rows_per_group):
            inputs = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(values.reshape(-1)), WIDTH)
            table = pyarrow.table([inputs, pyarrow.array(targets)], schema=schema)
            writer.write_table(table, row_group_size=rows_per_group)


def write_hdf5(folder: Path, rows: int) -> None:
    import h5py

    with h5py.File(folder / "rows.h5", "w") as file:
        x = file.create_dataset("x", (rows, WIDTH), "float32", chunks=(16, WIDTH))
        y = file.create_dataset("y", (rows,), "int64")
        for first, values, targets in blocks(rows, _ROWS_AT_ONCE):
            x[first : first + len(values)] = values
            y[first : first + len(values)] = targets


def write_npy(folder: Path, rows: int) -> None:
    x = np.lib.format.open_memmap(folder / "x.npy", "w+", np.float32, (rows, WIDTH))
    y = np.empty(rows, np.int64)
    for first, values, targets in blocks(rows, _ROWS_AT_ONCE):
        x[first : first + len(values)] = values
        y[first : first + len(values)] = targets
    x.flush()
    np.save(folder / "y.npy", y)


def write(kind: str, folder: Path, rows: int, rows_per_group: int) -> None:
    """Writes the files of a kind."""
    folder.mkdir()
    if kind == "parquet":
        write_parquet(folder, rows, rows_per_group)
    elif kind == "npy":
        write_npy(folder, rows)
    else:
        write_hdf5(folder, rows)


def measure(name: str, folder: Path, ranks: int, steps: int) -> dict[str, Any]:
    """Returns how many megabytes a fit of the large file needs above one of the tiny file, on the worst rank."""
    kind, readers = KINDS[name]
    task = {"kind": kind, "readers": readers, "steps": None if kind == "parquet" else steps}
    tiny = launch("memory_ranks.py", ranks, task | {"folder": str(folder / "tiny")})
    large = launch("memory_ranks.py", ranks, task | {"folder": str(folder / "large")})
    above = {
        part: max(found[part] - least[part] for found, least in zip(large, tiny, strict=True)) for part in large[0]
    }
    return {"kind": name, "ranks": ranks, "tiny": tiny, "large": large, **above}


def falls_short(row: dict[str, Any], group_megabytes: int) -> bool:
    """Returns whether a rank, or its workers, needed more than they may."""
    most = MOST_MEGABYTES
    if row["kind"].startswith("Parquet"):
        most = MOST_ROW_GROUPS * group_megabytes
    return bool(max(row["own"], row["workers"]) > most)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=2048, help="size of the large file")
    parser.add_argument("--group-megabytes", type=int, default=64, help="size of a row group of Parquet")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--kinds", nargs="+", default=[*KINDS], choices=[*KINDS])
    parser.add_argument("--steps", type=int, default=300, help="steps of 256 rows, except for Parquet")
    parser.add_argument("--folder", type=Path, help="where the files are written; default: the system's for such")
    parser.add_argument("--floors", action="store_true", help="fail if a fit needs more than it may")
    parser.add_argument("--json", type=Path, help="where the figures go")
    given = parser.parse_args()
    rows_per_megabyte = (1 << 20) // (4 * WIDTH)
    rows: list[dict[str, Any]] = []
    for kind in dict.fromkeys(KINDS[name][0] for name in given.kinds):
        with tempfile.TemporaryDirectory(dir=given.folder) as name:
            folder = Path(name)
            write(kind, folder / "tiny", _TINY_ROWS, _TINY_ROWS // 8)
            rows_of_group = given.group_megabytes * rows_per_megabyte
            write(kind, folder / "large", given.megabytes * rows_per_megabyte, rows_of_group)
            names = [each for each in given.kinds if KINDS[each][0] == kind]
            rows += [measure(each, folder, ranks, given.steps) for each in names for ranks in given.ranks]
    title = f"MB that a fit of {given.megabytes:,} MB needs above one of {_TINY_ROWS:,} rows"
    table = Table(title, ["data", "ranks", "a rank", "its workers"], names=1)
    for row in rows:
        mark = " !" if given.floors and falls_short(row, given.group_megabytes) else ""
        table.add([row["kind"], str(row["ranks"]), f"{row['own']:.0f}{mark}", f"{row['workers']:.0f}"])
    table.show()
    save_results(given.json, rows)
    return int(given.floors and any(falls_short(row, given.group_megabytes) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
