"""The source for what a user passes as data: arrays, a Dataset, a DataLoader, or a stream of batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.data.batches.collate import check_weights
from cyxtrain.data.batches.structure import fields_of
from cyxtrain.data.order import SeededOrder, order_of
from cyxtrain.data.sources.arrays import ArraySource
from cyxtrain.data.sources.dataset_source import DatasetSource
from cyxtrain.data.sources.fetching import SplitOverWorkers, needs_split
from cyxtrain.data.sources.parts import Parts, is_arrow_dataset, no_parts, parts_of
from cyxtrain.data.sources.readers import ReaderSource
from cyxtrain.data.sources.source import Source
from cyxtrain.data.sources.stateful import as_plain_loader
from cyxtrain.data.sources.stream import StreamSource
from cyxtrain.environment import torch_compat
from cyxtrain.errors import ConfigError
from cyxtrain.world.world import World


@runtime_checkable
class _Numbered(Protocol):
    """Rows by number, with a length."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any) -> Any: ...


def yields_batches(data: Any) -> bool:
    """Return whether data include their targets: a dataset, a DataLoader, or a stream of batches."""
    is_table = callable(getattr(data, "__array__", None))  # such as pandas'
    if is_table or isinstance(data, (Tensor, np.ndarray, Mapping, list, tuple, str, bytes, type)):
        return False
    return isinstance(data, (DataLoader, Dataset, _Numbered, Iterable)) or callable(data) or is_arrow_dataset(data)


def open_source(
    inputs: Any,
    targets: Any,
    weights: Any,
    config: DistributedTrainingConfig,
    number: int,
    world: World,
    *,
    trains: bool,
) -> Source:
    """Return a user's data as rows; a stream is likely to be read from epoch `number` on."""
    _refuse_several(inputs)
    parts = _parts_to_read(inputs, config, world, trains=trains)
    if not yields_batches(inputs):
        return _open_arrays(inputs, targets, weights, is_divided=trains and bool(config.sharded_data))
    name = type(inputs).__name__
    _check_alone(inputs, targets, weights)
    if parts is not None:
        return ReaderSource(parts, config, number, world, trains=trains)
    if isinstance(inputs, DataLoader):
        return _open_loader(as_plain_loader(inputs), config, number, world)
    if isinstance(inputs, IterableDataset):
        return _stream_of(DataLoader(inputs, batch_size=config.batch_size), name, config, number, world)
    if isinstance(inputs, Iterator):
        return StreamSource(lambda: inputs, name, config, number, world, once=True)
    has_numbers = isinstance(inputs, (Dataset, _Numbered))
    if has_numbers and config.sharded_data:
        loader = DataLoader(inputs, batch_size=config.batch_size, shuffle=trains and config.shuffle)
        return _stream_of(loader, name, config, number, world)
    if has_numbers:
        tensors = _tensors(inputs)
        return DatasetSource(inputs, None, config) if tensors is None else ArraySource(*tensors)
    name = getattr(inputs, "__name__", name)
    return StreamSource(_iterable_of(inputs), name, config, number, world, once=False, parts=[inputs])


def _parts_to_read(inputs: Any, config: DistributedTrainingConfig, world: World, *, trains: bool) -> Parts | None:
    """Return data as parts that readers read, or None; raise ConfigError if they need `readers`, or have no parts."""
    parts = parts_of(inputs, trains=trains)
    if config.readers is not None:
        if parts is None and trains:
            raise no_parts(inputs, config.readers)
        return parts
    if parts is None or not parts.needs_readers:
        return None
    if trains:
        raise ConfigError(
            f"X is {parts.what}, which readers share: set readers, such as readers={max(8, world.size)}. Their number "
            "decides which samples a step has, and must be at least the number of ranks."
        )
    return parts


def _check_alone(inputs: Any, targets: Any, weights: Any) -> None:
    """Raise ConfigError if targets or weights are given apart from data that include them."""
    name = type(inputs).__name__
    if callable(getattr(inputs, "toarray", None)):  # SciPy's sparse matrices, which NumPy takes for single objects
        raise ConfigError(f"X is a {name}, which cannot be divided into samples: give X.toarray().")
    for what, given in (("y", targets), ("sample_weight", weights)):
        if given is not None:
            raise ConfigError(
                f"X is a {name}, which gives {what} itself, as (x, y) or (x, y, sample_weight). To validate, give "
                "validation_data=(X_val, y_val)."
            )


def _open_arrays(inputs: Any, targets: Any, weights: Any, *, is_divided: bool) -> ArraySource:
    """Return arrays as rows; `is_divided`: the fit has sharded_data=True."""
    if targets is None and _are_pairs(inputs):
        raise ConfigError(
            "X is a list of (x, y) pairs, one per sample: give DataLoader(pairs, batch_size=64, shuffle=True) as X, "
            "or X and y separately: X, y = map(numpy.stack, zip(*pairs))."
        )
    if is_divided:
        raise ConfigError(
            "sharded_data=True is for data that give batches, and X is arrays: give each rank's own as "
            "DataLoader(TensorDataset(X, y), batch_size=64, shuffle=True)."
        )
    return ArraySource(inputs, targets, weights)


def _refuse_several(inputs: Any) -> None:
    """Refuse several loaders or datasets, in a list or by name."""
    parts = fields_of(inputs) or {}
    if isinstance(inputs, (tuple, list)):
        parts = dict(enumerate(inputs[:2]))
    if any(map(yields_batches, parts.values())):
        raise ConfigError(
            f"X is a {type(inputs).__name__} of DataLoaders, or of other data that give batches: give one as X, and "
            "one as validation_data; to train on all, join their datasets with torch.utils.data.ConcatDataset."
        )


def _are_pairs(inputs: Any) -> bool:
    """Return whether a list holds an array and a number for each sample."""
    if not isinstance(inputs, list) or not inputs:
        return False
    first = inputs[0]
    if not isinstance(first, tuple) or len(first) != 2:
        return False
    return isinstance(first[0], (Tensor, np.ndarray)) and np.ndim(first[1]) == 0


def _iterable_of(given: Any) -> Callable[[], Iterable[Any]]:
    """Return a function that returns an iterable of batches: what is given, or what a function returns."""
    if isinstance(given, Iterable):
        return lambda: given

    def begin() -> Iterable[Any]:
        made = given()
        if not isinstance(made, Iterable):
            raise ConfigError(
                f"X is the function {getattr(given, '__name__', given)}, which returned a {type(made).__name__}: it "
                "must return an iterable of batches, such as a generator."
            )
        return made

    return begin


def _open_loader(loader: DataLoader[Any], config: DistributedTrainingConfig, number: int, world: World) -> Source:
    has_numbers = loader.batch_sampler is not None and not isinstance(loader.dataset, IterableDataset)
    # What a subclass with an __iter__ of its own yields is up to it.
    own_way = type(loader).__iter__ is not DataLoader.__iter__
    if not has_numbers or own_way or config.sharded_data:
        return _stream_of(copy.copy(loader), type(loader).__name__, config, number, world)
    tensors = _tensors(loader.dataset)
    batches = loader.batch_sampler
    if tensors is not None and loader.collate_fn is default_collate and type(batches) is BatchSampler:
        order = order_of(loader, len(tensors[0]), config.seed)
        # Rows in memory: to load each by itself would only cost time.
        if isinstance(order, SeededOrder) and not batches.drop_last:
            source = ArraySource(*tensors)
            source.batch_size = batches.batch_size
            source.shuffle = order.shuffle
            return source
    return DatasetSource(loader.dataset, loader, config)


def _stream_of(
    loader: DataLoader[Any], name: str, config: DistributedTrainingConfig, number: int, world: World
) -> StreamSource:
    """Return the batches of a loader that no one else iterates."""
    # A loader with persistent workers keeps its iterator, which the user's own loader, or another source, may be using.
    torch_compat.forget_iterator(loader)
    # PyTorch refuses to set these attributes of a loader; this one is a copy. A persistent worker would neither get
    # the dataset that `set_epoch` has changed, nor be seeded again; all ranks must get shared batches in one order.
    settings = vars(loader)
    settings["persistent_workers"] = False
    settings["in_order"] = True
    dataset = loader.dataset
    note = ""
    if needs_split(loader):
        settings["dataset"] = SplitOverWorkers(dataset)
        note = f", each sample by one of {loader.num_workers} workers"
    batches: Any = loader.batch_sampler
    parts = [loader, dataset, loader.sampler, batches, getattr(batches, "sampler", None)]
    return StreamSource(
        lambda: loader,
        name,
        config,
        number,
        world,
        once=False,
        parts=parts,
        batch_size=loader.batch_size,
        note=note,
    )


def _tensors(dataset: Any) -> tuple[Tensor, ...] | None:
    """Return the tensors of a plain TensorDataset: x; x and y; or x, y and sample_weight."""
    if type(dataset) is not TensorDataset or len(dataset.tensors) > 3:
        return None
    if len(dataset.tensors) == 3:
        try:
            check_weights(dataset.tensors[2])
        except ConfigError:
            return None  # a step of the user's own may take it
    return dataset.tensors
