"""Data in parts that readers share: functions of (reader, readers), Hugging Face's streams, Parquet by row groups."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import xxhash

from cyxtrain.errors import ConfigError, counted

_BYTES_AT_ONCE = 2 << 20
_ROWS_AT_ONCE = 1 << 16  # of columns that are tiny in the file, because they repeat


class Parts(NamedTuple):
    """Data that readers share: `read(reader, readers)` returns the samples of one of them, in each pass."""

    what: str  # in messages
    read: Callable[[int, int], Iterable[Any]]
    needs_readers: bool = True  # whether nothing else can read them
    number: int | None = None  # how many parts there are; None: as many as readers
    unit: str = ""  # what a part is
    digest: str = ""  # recognizes the parts

    def check(self, readers: int, world_size: int) -> None:
        """Raise ConfigError if so many readers cannot share the parts, or so many ranks the readers."""
        if self.number is not None and self.number < readers:
            raise ConfigError(
                f"readers={readers}, and X has {counted(self.number, self.unit)}: some readers would have nothing to "
                f"read. Set readers={max(self.number, 1)} or less, or write the data in more parts."
            )
        if world_size > readers:
            raise ConfigError(
                f"readers={readers}, and there are {world_size} ranks: some ranks would have nothing to read. Set "
                f"readers={world_size} or a multiple of it, or start fewer ranks."
            )


def no_parts(data: Any, readers: int) -> ConfigError:
    """Return the error for data without parts, given to a fit with `readers`."""
    name = getattr(data, "__name__", type(data).__name__)
    return ConfigError(
        f"readers={readers} is for data in parts, and X is {name}, which has none: leave readers out, or give a "
        "function of (reader, readers) that returns that reader's samples, an IterableDataset of Hugging Face, or a "
        "pyarrow Dataset."
    )


def parts_of(data: Any, *, trains: bool) -> Parts | None:
    """Return data in parts, otherwise None. A function that needs no arguments has parts only if it `trains`."""
    name = getattr(data, "__name__", type(data).__name__)
    if is_arrow_dataset(data):
        return _row_groups(data, name)
    if is_hugging_face(data):
        return _shards(data, name)
    if isinstance(data, (Iterable, type)) or not callable(data) or not _takes(data, 0, 1):
        return None
    needs_readers = not _takes(data)
    if not needs_readers and not trains:
        return None
    return Parts(name, data, needs_readers)


def _shards(data: Any, name: str) -> Parts:
    # Ranks whose generators differ would have other orders of the shards: `shuffle` needs a seed.
    generators = [getattr(each, "generator", None) for each in inside_of(data)]
    digest = _digest([each.bit_generator.state for each in generators if isinstance(each, np.random.Generator)])
    return Parts(name, lambda reader, readers: data.shard(readers, reader), False, data.num_shards, "shard", digest)


def is_hugging_face(data: Any) -> bool:
    """Return whether this is an IterableDataset of Hugging Face."""
    return is_instance(data, "datasets.iterable_dataset", "IterableDataset")


def inside_of(data: Any) -> Iterator[Any]:
    """Yield the iterables of which a stream of Hugging Face is made, the outermost first; none of other data."""
    inner = getattr(data, "_ex_iterable", None)
    while inner is not None:
        yield inner
        inner = getattr(inner, "ex_iterable", None)


def is_arrow_dataset(data: Any) -> bool:
    """Return whether this is a `pyarrow.dataset.Dataset`."""
    return is_instance(data, "pyarrow.dataset", "Dataset")


def is_instance(data: Any, module: str, name: str) -> bool:
    """Return whether this is an instance of another library's class."""
    # Nobody has one who has not imported its module.
    found = sys.modules.get(module)
    return found is not None and isinstance(data, getattr(found, name, ()))


def _takes(function: Callable[..., Any], *arguments: Any) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except (TypeError, ValueError):  # ValueError: a function in C, whose arguments are unknown
        return False
    return True


def _row_groups(data: Any, name: str) -> Parts:
    """Return the row groups of Parquet files, or the files of other formats, as parts."""
    try:
        files = [*data.get_fragments()]
    except ValueError as error:  # of a filtered dataset
        raise ConfigError(f"X is a pyarrow Dataset whose files cannot be read one by one: {error}") from error
    groups: list[Any] = []
    for file in files:
        split = getattr(file, "split_by_row_group", None)
        groups += split() if split else [file]
    # Ranks may see the same files under different folders.
    names = [(str(getattr(each, "path", "")).split("/")[-2:], getattr(each, "row_groups", ())) for each in groups]

    def read(reader: int, readers: int) -> Iterator[Any]:
        for part in groups[reader::readers]:
            yield from _samples(part, data.schema)

    return Parts(name, read, True, len(groups), "row group", _digest(names))


def _digest(value: Any) -> str:
    return xxhash.xxh3_64_hexdigest(str(value).encode())


def _samples(part: Any, schema: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a part as dictionaries by column."""
    for batch in _batches(part, schema):
        columns = [batch.column(name).to_numpy(zero_copy_only=False) for name in schema.names]
        for values in zip(*columns, strict=True):
            yield dict(zip(schema.names, values, strict=True))


def _batches(part: Any, schema: Any) -> Iterator[Any]:
    """Yield the rows of a part in batches, which are freed afterwards: a few megabytes of a row group at once."""
    groups = getattr(part, "row_groups", ())
    # A scan decodes whole row groups. Only it adds columns that are in the names of folders, and converts types.
    if not groups or not {*schema} <= {*part.physical_schema}:
        yield from part.to_batches(schema=schema)
        return
    from pyarrow import parquet

    [group] = groups
    rows = min(group.num_rows * _BYTES_AT_ONCE // max(group.total_byte_size, 1), _ROWS_AT_ONCE)
    buffer_size = max(_BYTES_AT_ONCE // max(len(schema), 1), 1 << 16)
    with part.open() as opened:
        file = parquet.ParquetFile(opened, metadata=part.metadata, buffer_size=buffer_size, pre_buffer=False)
        yield from file.iter_batches(max(rows, 1), [group.id], schema.names)
