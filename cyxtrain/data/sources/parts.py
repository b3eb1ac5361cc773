"""Data in parts that readers share: a function of (reader, readers), Hugging Face's streams, Parquet by row groups."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from cyxtrain.errors import ConfigError, counted

_KINDS = (
    "a function of (reader, readers) that returns that reader's samples, an IterableDataset of Hugging Face, or a "
    "pyarrow Dataset"
)


class Parts(NamedTuple):
    """Data that readers share.

    Attributes:
        what: The name of the data in messages.
        read: Returns the samples of a reader, for its number and the number of readers. Each pass calls it.
        needs_readers: Whether the data can be read by readers alone.
        count: How many parts there are; None: as many as readers.
        unit: What each part is called.
        digest: Recognizes the parts; "" if nothing is known of them.
    """

    what: str
    read: Callable[[int, int], Iterable[Any]]
    needs_readers: bool
    count: int | None = None
    unit: str = ""
    digest: str = ""

    def check(self, readers: int, world_size: int) -> None:
        """Raise ConfigError if so many readers cannot share the parts, or so many ranks the readers."""
        if self.count is not None and self.count < readers:
            raise ConfigError(
                f"readers={readers}, and X has {counted(self.count, self.unit)}: some readers would have nothing to "
                f"read. Set readers={max(self.count, 1)} or less, or write the data in more parts."
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
        f"readers={readers} is for data in parts, and X is {name}, which has none: leave readers out, or give {_KINDS}."
    )


def parts_of(data: Any, *, trains: bool) -> Parts | None:
    """Return data in parts; None: these are not. A function that needs no arguments has parts only if it `trains`."""
    name = getattr(data, "__name__", type(data).__name__)
    if is_arrow_dataset(data):
        return _row_groups(data, name)
    if _is_instance(data, "datasets.iterable_dataset", "IterableDataset"):
        shards: int = data.num_shards

        def read(reader: int, readers: int) -> Iterable[Any]:
            found: Iterable[Any] = data.shard(num_shards=readers, index=reader)
            return found

        return Parts(name, read, needs_readers=False, count=shards, unit="shard", digest=str(shards))
    if isinstance(data, (Iterable, type)) or not callable(data) or not _takes(data, 0, 1):
        return None
    needs_readers = not _takes(data)
    if not needs_readers and not trains:
        return None
    return Parts(name, data, needs_readers)


def is_arrow_dataset(data: Any) -> bool:
    """Return whether this is a `pyarrow.dataset.Dataset`."""
    return _is_instance(data, "pyarrow.dataset", "Dataset")


def _is_instance(data: Any, module: str, name: str) -> bool:
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
        raise ConfigError(
            f"X is a pyarrow Dataset whose files cannot be read one by one: {error} Filter in a function of (reader, "
            "readers) instead."
        ) from error
    groups: list[Any] = []
    for file in files:
        split = getattr(file, "split_by_row_group", None)
        groups += [file] if split is None else split()
    schema = data.schema
    # Ranks may see the same files under different folders.
    names = [f"{str(getattr(each, 'path', '')).split('/')[-2:]} {getattr(each, 'row_groups', '')}" for each in groups]
    digest = xxhash.xxh3_64_hexdigest("\n".join(names).encode())

    def read(reader: int, readers: int) -> Iterator[dict[str, Any]]:
        # One group after the other: a reader has only one in memory.
        return itertools.chain.from_iterable(_samples(group, schema) for group in groups[reader::readers])

    return Parts(name, read, needs_readers=True, count=len(groups), unit="row group", digest=digest)


def _samples(group: Any, schema: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a row group as dictionaries by column."""
    for batch in group.to_batches(schema=schema):
        columns = {name: _column(batch.column(name), name) for name in schema.names}
        for row in range(batch.num_rows):
            yield {name: column[row] for name, column in columns.items()}


def _column(values: Any, name: str) -> Sequence[Any]:
    """Return a value per row of an Arrow array of numbers, booleans, strings, or lists of numbers."""
    from pyarrow import compute, types

    kind = values.type
    if types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind):
        found: Sequence[Any] = values.to_pylist()
        return found
    if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
        return _numbers(values, name)
    _refuse_missing(values, name)
    ends = np.cumsum(compute.list_value_length(values).to_numpy(zero_copy_only=False))
    pieces: list[Any] = np.split(_numbers(values.flatten(), name), ends[:-1])
    return pieces


def _numbers(values: Any, name: str) -> Any:
    """Return an Arrow array of numbers or booleans as a NumPy array; NaN for missing floats."""
    from pyarrow import types

    kind = values.type
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        raise ConfigError(
            f"column {name!r} of X holds {kind}; it must hold numbers, booleans, or lists of numbers. Give the columns "
            "to read, X.replace_schema(schema), or convert this one in a function of (reader, readers)."
        )
    if not types.is_floating(kind):
        _refuse_missing(values, name)
    return values.to_numpy(zero_copy_only=False)


def _refuse_missing(values: Any, name: str) -> None:
    if values.null_count:
        raise ConfigError(
            f"column {name!r} of X holds {values.type} and has missing values: fill them, or write the column as "
            "floats, where they become NaN."
        )
