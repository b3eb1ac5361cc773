"""The data of a call: each rank opens its own; then ranks exchange what they must agree on."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.data.batches.tables import check_columns
from cyxtrain.data.sources.arrays import ArraySource
from cyxtrain.data.sources.open import open_source
from cyxtrain.data.sources.source import Source
from cyxtrain.data.sources.validation_rows import grouped_rows, stratified_rows, validation_rows
from cyxtrain.errors import ConfigError, on_all_ranks
from cyxtrain.metrics.loss import Loss
from cyxtrain.training.inputs.arguments import FitArguments
from cyxtrain.training.inputs.facts import config_facts
from cyxtrain.world.agreement import agree_on
from cyxtrain.world.world import World

Sources = tuple[Source, dict[str, Source]]
"""Samples to train on, and sets of samples to validate with, by name."""

_DEFAULT_BATCH_SIZE = DistributedTrainingConfig().batch_size


def open_fit(world: World, parse: Callable[[], FitArguments], loss_fn: Any, epoch: int) -> tuple[FitArguments, Sources]:
    """Return the arguments of a fit and its data from an `epoch`. All ranks call it, and raise alike."""

    def open_and_describe() -> tuple[tuple[FitArguments, Sources], dict[str, Any]]:
        arguments = parse()
        sources = _open_sources(world, arguments, loss_fn, epoch)
        facts = config_facts(arguments.config)
        facts["class_weight"] = sorted(
            f"{number}: {weight}" for number, weight in (arguments.class_weights or {}).items()
        )
        return (arguments, sources), {**facts, **_source_facts(sources)}

    (arguments, sources), facts_by_rank = agree_on(world, open_and_describe)
    config = arguments.config
    training = sources[0]
    training.must_be_shared = config.virtual_ranks is not None
    with raised_on_all_ranks():
        _reconcile(sources, facts_by_rank, world.rank, config.sharded_data)
        _check_batch_size(training, config)
    if training.batch_size is not None:
        config = dataclasses.replace(config, batch_size=training.batch_size)
    # A checkpoint has the order of these rows by this setting alone; other data have theirs in their digest.
    if isinstance(training, ArraySource) and training.shuffle is not None:
        config = dataclasses.replace(config, shuffle=training.shuffle)
    # Not before the batch size is known, which the training data may decide.
    validation = {name: _limited(source, config) for name, source in sources[1].items()}
    return dataclasses.replace(arguments, config=config), (training, validation)


def open_rows(
    world: World,
    data: tuple[Any, ...],
    batch_size: int | None,
    config: DistributedTrainingConfig,
    columns: Mapping[str, Sequence[str]],
) -> Source:
    """Return the samples of an evaluation or a prediction; `config`, `columns` of tables: of the latest fit."""
    inputs, targets, weights = (*data, None, None)[:3]
    config = dataclasses.replace(config, sharded_data=None)  # it was about the fit's data

    def open_and_describe() -> tuple[Sources, dict[str, Any]]:
        asked = config if batch_size is None else dataclasses.replace(config, batch_size=batch_size)
        sources: Sources = (open_source(inputs, targets, weights, asked, 0, world, trains=False), {})
        check_columns(columns, sources[0].columns)
        actual = sources[0].batch_size
        if actual is not None and batch_size not in (None, actual):
            raise ConfigError(f"batch_size={batch_size}, and X makes batches of {actual}: leave batch_size out.")
        return sources, _source_facts(sources)

    sources, facts_by_rank = agree_on(world, open_and_describe)
    marked = contextlib.nullcontext() if world.sends_nothing else raised_on_all_ranks()
    with marked:
        _reconcile(sources, facts_by_rank, world.rank, None)
    return sources[0]


@contextlib.contextmanager
def raised_on_all_ranks() -> Iterator[None]:
    """Mark a ConfigError within as one that all ranks raise."""
    try:
        yield
    except ConfigError as error:
        raise on_all_ranks(error) from error.__cause__


def _source_facts(sources: Sources) -> dict[str, Any]:
    """Return what ranks compare of their data: its kind, and a summary for `Source.reconcile`."""
    facts: dict[str, Any] = {"the validation data": [name or "given" for name in sources[1]]}
    for name, source in by_name(sources).items():
        summary = source.summary()
        facts |= {f"the kind of the {name} data": summary["kind"], f"_{name}": summary}
        facts |= {f"{setting} of the {name} data": value for setting, value in source.own_settings().items()}
        facts |= {f"the columns of {table} of the {name} data": names for table, names in source.columns.items()}
    return facts


def by_name(sources: Sources) -> dict[str, Source]:
    """Return the sources of a fit by their names in messages."""
    training, validation = sources
    return {"training": training, **{f"validation {name}".rstrip(): each for name, each in validation.items()}}


def _reconcile(sources: Sources, facts_by_rank: Sequence[Mapping[str, Any]], rank: int, sharded: bool | None) -> None:
    for name, source in by_name(sources).items():
        with naming_validation(name):
            source.reconcile([facts[f"_{name}"] for facts in facts_by_rank], rank, sharded=sharded)


def _open_sources(world: World, arguments: FitArguments, loss_fn: Any, epoch: int) -> Sources:
    """Return this rank's data of a fit; some of its samples validate, if validation_split is set."""
    config = arguments.config
    given = (arguments.inputs, arguments.targets, arguments.weights)
    source = open_source(*given, config, epoch, world, trains=True)
    _check_batch_size(source, config)
    validation = _open_validation(world, arguments)
    for name, each in validation.items():
        with naming_validation(f"validation {name}".rstrip()):
            check_columns(source.columns, each.columns)
    if arguments.group_by_length is not None and arguments.group_by_length is not False:
        source.group_by_length(arguments.group_by_length)
    if config.validation_split:
        if not isinstance(source, ArraySource):
            raise ConfigError(
                "validation_split divides arrays; for other data, give validation_data=, such as a second DataLoader."
            )
        source, held_out = _split(source, arguments)
        _check_validation_batch_size(held_out, config)
        validation[""] = held_out
    if arguments.class_weights is not None:  # they weight training alone, as in Keras
        source = weighted_by_class(source, arguments.class_weights, loss_fn)
    return source, validation


def weighted_by_class(source: Source, class_weights: Mapping[Any, Any], loss_fn: Any) -> Source:
    """Return a source whose samples have their classes' weights; a class that the loss ignores needs none."""
    ignored = getattr(Loss(loss_fn).function, "ignore_index", None)
    return source.weighted_by_class(class_weights, ignored)


def _open_validation(world: World, arguments: FitArguments) -> dict[str, Source]:
    """Return the sets of validation data that a fit was given, by name."""
    config = arguments.config
    own_config = dataclasses.replace(config, batch_size=config.validation_batch_size or config.batch_size)
    found: dict[str, Source] = {}
    for name, (inputs, targets, weights) in arguments.validation.items():
        with naming_validation(f"validation {name}".rstrip()):
            source = open_source(inputs, targets, weights, own_config, 0, world, trains=False)
            if source.reads_once and (config.epochs > 1 or config.validates_within_epochs):
                raise ConfigError(
                    "it gives its batches once, and each epoch is validated: give the function that makes it, without "
                    "calling it, or a DataLoader."
                )
            _check_validation_batch_size(source, config)
            found[name] = source
    return found


def _split(source: ArraySource, arguments: FitArguments) -> tuple[ArraySource, ArraySource]:
    """Return the samples to train on and those held out: by class, by group, or the last ones."""
    config = arguments.config
    first = validation_rows(len(source), config.validation_split)
    count = len(source) - first
    if config.validation_stratify:
        held_out = stratified_rows(source.targets, count, config.seed)
    elif arguments.groups is not None:
        held_out = grouped_rows(arguments.groups, len(source), count, config.seed)
    else:
        return source.part(0, first), source.part(first, len(source))
    return source.chosen(~held_out), source.chosen(held_out)


def _check_batch_size(source: Source, config: DistributedTrainingConfig) -> None:
    if source.batch_size is not None and config.batch_size not in (_DEFAULT_BATCH_SIZE, source.batch_size):
        raise ConfigError(
            f"batch_size={config.batch_size}, and X makes batches of {source.batch_size}: leave batch_size out, or "
            "give the same."
        )


def _check_validation_batch_size(validation: Source, config: DistributedTrainingConfig) -> None:
    size = config.validation_batch_size
    actual = validation.batch_size
    if size is not None and actual not in (None, size):
        raise ConfigError(f"validation_batch_size={size}, and the DataLoader makes batches of {actual}: give one.")


def size_of_validation(validation: Source, config: DistributedTrainingConfig) -> int:
    """Return how many samples a rank evaluates at once; `config` has the batch size of the training data."""
    return validation.batch_size or config.validation_batch_size or config.batch_size


def _limited(validation: Source, config: DistributedTrainingConfig) -> Source:
    limits = [limit for limit in (int(config.fast_dev_run), config.validation_steps) if limit]
    if not limits:
        return validation
    return validation.shortened(min(limits), size_of_validation(validation, config))


@contextlib.contextmanager
def naming_validation(name: str) -> Iterator[None]:
    """Prefix a ConfigError about validation data within; `name`: "training", "validation near"."""
    kind, _, own = name.partition(" ")
    try:
        yield
    except ConfigError as error:
        if kind != "validation":
            raise
        prefix = f"validation data {own!r}" if own else "validation data"
        raise ConfigError(f"{prefix}: {error}") from error
