"""The ways of calling `fit`: their types, for editors and mypy, and the one form of all of them."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, TypedDict, runtime_checkable

from torch.utils.data import Dataset

from cyxtrain.callbacks.callback import Callback, checked_callbacks
from cyxtrain.callbacks.step_trial import NUM_STEPS
from cyxtrain.config import AMPConfig, DDPConfig, DistributedConfig, DistributedTrainingConfig
from cyxtrain.config.settings import is_number, require, require_integer, unknown_name
from cyxtrain.data.sources.open import yields_batches
from cyxtrain.environment import process_env
from cyxtrain.environment.regular_files import path_or_url, url_of
from cyxtrain.errors import ConfigError, brief, counted


@runtime_checkable
class SupportsArray(Protocol):
    """A table or an array of another library, such as a data frame."""

    def __array__(self) -> Any: ...


@runtime_checkable
class LazyTable(Protocol):
    """A query whose result is a table: Polars' LazyFrame."""

    def collect_schema(self) -> Any:
        """Return the types of the result's columns."""


_Arrays: TypeAlias = SupportsArray | LazyTable | Mapping[Any, Any] | tuple[Any, ...] | list[Any]
# Not Iterable[Any], which would include the path of a file: a string is an iterable of strings.
_Functions: TypeAlias = Callable[[], Iterable[Any]] | Callable[[int, int], Iterable[Any]]
Data: TypeAlias = _Arrays | Dataset[Any] | Iterable[_Arrays] | _Functions
"""Arrays and tensors, one or several by name; datasets, DataLoaders and other iterables of batches."""


class FitSettings(TypedDict, total=False):
    """The fields of `DistributedTrainingConfig`, Keras's `verbose` and x, and `group_by_length`."""

    epochs: int
    batch_size: int
    effective_batch_size: int | None
    shuffle: bool
    seed: int
    verbose: bool | int | str
    log_every_n_batches: int
    checkpoint_every_n_epochs: int
    checkpoint_dir: str
    save_on_master_only: bool
    validation_split: float
    checkpoint_every_n_steps: int
    checkpoint_every_n_minutes: float
    max_time_seconds: float | None
    keep_last: int
    keep_best: str | None
    on_save_error: Literal["warn", "raise"]
    on_nonfinite: Literal["raise", "skip"]
    check_replicas_every_n_steps: int | None
    accumulation_steps: int
    clip_norm: float | Mapping[str, float] | None
    clip_value: float | Mapping[str, float] | None
    clip_adaptive: float | Mapping[str, float] | None
    precision: Literal["fp32", "bf16", "fp16"]
    amp: AMPConfig | None
    compile: bool | str
    sync_batchnorm: bool
    learning_rate_scaling: Literal["linear", "sqrt"] | None
    warmup_steps: int | float
    fused_optimizer: bool | str
    validation_freq: int | float | list[int]
    steps_per_epoch: int | None
    fast_dev_run: bool | int
    sharded_data: bool | None
    profile: bool | str
    validation_steps: int | None
    validation_batch_size: int | None
    num_processes: int | str | None
    scheduler_interval: Literal["step", "epoch"] | None
    drop_last: bool
    float32_precision: Literal["highest", "high", "medium"] | None
    channels_last: bool
    max_steps: int | None
    validate_every_n_steps: int
    validate_every_n_minutes: float
    log_every_n_steps: int
    validation_stratify: bool
    load_best: bool
    readers: int | None
    virtual_ranks: int | None
    num_threads: int | None
    log_hashes: int | None
    group_by_length: Any
    x: Data


_Set: TypeAlias = tuple[Any, Any, Any]
"""One set of validation data: X_val, y_val, and weights or None."""
_LIKE_AUTO = ("auto", "latest", "last", "newest")
_FIELDS = [field.name for field in dataclasses.fields(DistributedTrainingConfig)]
_NAME_THE_REST = "Name the rest: validation_data=(X_val, y_val) or a DataLoader, epochs=3, callbacks=[...]."
_FAST_DEV_RUN: dict[str, Any] = {
    "epochs": 1,
    "max_steps": None,
    "validation_freq": 1,
    "validate_every_n_steps": 0,
    "validate_every_n_minutes": 0.0,
    "checkpoint_every_n_epochs": 0,
    "checkpoint_every_n_steps": 0,
    "checkpoint_every_n_minutes": 0.0,
    "keep_last": 0,
    "keep_best": None,
    "load_best": False,
    "log_hashes": None,
}
"""The settings that fast_dev_run overrides."""
_WRITING = ("checkpoint_every_n_epochs", "checkpoint_every_n_steps", "checkpoint_every_n_minutes", "keep_last")
_REPLAY: dict[str, Any] = {
    **{name: _FAST_DEV_RUN[name] for name in (*_WRITING, "keep_best", "load_best")},
    "profile": False,
    "max_time_seconds": None,
}
"""The settings that `cyxtrain replay` overrides: none that changes the numbers of a step."""
_TRIAL: dict[str, Any] = {
    **_FAST_DEV_RUN,
    "fast_dev_run": False,
    "steps_per_epoch": NUM_STEPS,
    "warmup_steps": 0,
    "learning_rate_scaling": None,
    "max_time_seconds": None,
    "profile": False,
    "verbose": False,
}
"""The settings that `cyxtrain doctor` overrides: steps in one epoch, with nothing between them."""


@dataclass
class FitArguments:
    """The arguments of `fit`, in one form; a validation set without a name has the name ""."""

    inputs: Any
    targets: Any
    weights: Any
    class_weights: Mapping[int, float] | None
    validation: Mapping[str, _Set]
    config: DistributedTrainingConfig
    resume: str | None = None
    callbacks: Sequence[Callback] = ()
    initial_epoch: int | None = None
    groups: Any = None
    group_by_length: Any = None


def parse_fit(
    X: Any = None,  # noqa: N803
    y: Any = None,
    *more: Any,
    X_val: Any = None,  # noqa: N803
    y_val: Any = None,
    config: Any = None,
    validation_data: Any = None,
    validation_groups: Any = None,
    sample_weight: Any = None,
    class_weight: Any = None,
    callbacks: Any = None,
    initial_epoch: Any = None,
    resume: Any = None,
    **settings: Any,
) -> FitArguments:
    """Return normalized arguments of `fit`; raise ConfigError for arguments that contradict each other."""
    given = [X, y, *more]
    config = _config_of(given, config)
    arrays = _arrays(given, [X_val, y_val], settings)
    lengths = settings.pop("group_by_length", None)
    validation = _validation_of(arrays, validation_data)
    is_mapping = class_weight is None or isinstance(class_weight, Mapping)
    require(is_mapping, f"class_weight must be a dictionary, as dict(enumerate(weights)), got {brief(class_weight)}.")
    checked = _with_epochs_left(_settings(config, settings), initial_epoch)
    checked, path = _with_checkpoint(checked, _checkpoint_path(resume))
    return FitArguments(
        inputs=arrays[0],
        targets=arrays[1],
        weights=sample_weight,
        class_weights=class_weight,
        validation=_validation_sets(validation, checked, validation_groups, arrays),
        config=checked,
        resume=path,
        callbacks=checked_callbacks(callbacks),
        initial_epoch=initial_epoch,
        groups=validation_groups,
        group_by_length=lengths,
    )


def _config_of(given: list[Any], config: Any) -> Any:
    """Return the config, by position or by name; one among the arrays is taken out of `given`."""
    for place, array in enumerate(given):
        if isinstance(array, DistributedTrainingConfig):
            require(config is None, "fit got two configs: one by position, one by name.")
            given[place] = None
            config = array
    return config


def _arrays(given: list[Any], named: list[Any], settings: dict[str, Any]) -> list[Any]:
    """Return X, y, X_val and y_val, by position (`given`) or by name; None for missing ones."""
    if "x" in settings:  # Keras's name
        require(given[0] is None, "fit got X twice.")
        given[0] = settings.pop("x")
    more = [array for array in given[2:] if array is not None]
    named = [array for array in named if array is not None]
    require(not more or not named, "fit got X_val and y_val twice: by position and by name.")
    arrays = [*given[:2], *(more or named or (None, None))]
    _refuse_settings(arrays)
    count = counted(sum(array is not None for array in arrays), "array")
    is_complete = arrays[0] is not None and len(arrays) == 4
    require(is_complete, f"fit takes (X, y, config) or (X, y, X_val, y_val, config); it got {count}. {_NAME_THE_REST}")
    return arrays


def _validation_of(arrays: list[Any], named: Any) -> Any:
    """Return the validation data, passed by position or by name; a second loader is taken out of `arrays`."""
    if yields_batches(arrays[0]) and arrays[2] is None and yields_batches(arrays[1]):  # fit(loader, val_loader, config)
        require(named is None, "fit got validation data twice: by position, and as validation_data.")
        loader = arrays[1]
        arrays[1] = None
        return loader
    if arrays[2] is not None:
        require(named is None, "fit got validation data twice: X_val and y_val, and as validation_data.")
        return arrays[2], arrays[3]
    return named


def _refuse_settings(arrays: Sequence[Any]) -> None:
    """Refuse settings that were passed by position, where arrays belong."""
    for array in arrays:
        if isinstance(array, (DDPConfig, AMPConfig, DistributedConfig, type)):
            what = f"the class {array.__name__}" if isinstance(array, type) else f"a {type(array).__name__}"
            raise ConfigError(f"fit got {what}: besides arrays it takes a DistributedTrainingConfig(...).")
    for array in arrays:
        if isinstance(array, dict) and array and array.keys() <= set(_FIELDS):
            raise ConfigError(
                "fit got a dict: settings go by name, fit(X, y, epochs=3), or as DistributedTrainingConfig(**settings)."
            )
    for array in arrays[1:]:
        if is_number(array) or isinstance(array, (str, Callback)):
            raise ConfigError(f"fit got {brief(array)} by position. {_NAME_THE_REST}")


def _settings(config: DistributedTrainingConfig | None, keywords: dict[str, Any]) -> DistributedTrainingConfig:
    """Return the valid settings of a fit; `keywords` take precedence over `config`."""
    if config is not None and not isinstance(config, DistributedTrainingConfig):
        raise ConfigError(f"config must be a DistributedTrainingConfig, got {type(config).__name__}.")
    for name in keywords:
        if name not in _FIELDS:
            raise unknown_name("fit", name, [*_FIELDS, *_ARGUMENTS], "argument")
    if keywords.get("verbose") in (0, 1, 2, "auto"):
        keywords["verbose"] = keywords["verbose"] != 0  # Keras counts
    if "batch_size" in keywords and "effective_batch_size" not in keywords:
        keywords["effective_batch_size"] = None  # the latest setting takes precedence
    settings = dataclasses.replace(config or DistributedTrainingConfig(), **keywords)
    settings.validate()
    if settings.fast_dev_run:
        return dataclasses.replace(settings, **_FAST_DEV_RUN)
    return settings


def _with_epochs_left(settings: DistributedTrainingConfig, initial_epoch: int | None) -> DistributedTrainingConfig:
    """Return settings with the number of epochs to train: Keras's `epochs` is the number of the last one."""
    last = int(settings.epochs)
    if initial_epoch is not None:
        require_integer("fit", "initial_epoch", initial_epoch, 0)
    if settings.max_steps is not None and not settings.has_own_epochs:
        return dataclasses.replace(settings, epochs=settings.max_steps)  # each epoch has a step at least
    if initial_epoch is None:
        return dataclasses.replace(settings, epochs=last)
    is_before = initial_epoch < last
    require(is_before, f"fit.initial_epoch={initial_epoch}: epochs={last} is the last one, and must be above it.")
    return dataclasses.replace(settings, epochs=last - initial_epoch)


def _with_checkpoint(
    settings: DistributedTrainingConfig, path: str | None
) -> tuple[DistributedTrainingConfig, str | None]:
    """Return the settings, and the checkpoint to continue from: the program's, or that of `cyxtrain replay`.

    `cyxtrain doctor` begins without a checkpoint.
    """
    trial = process_env.trial()
    if trial is not None:
        settings = dataclasses.replace(settings, **_TRIAL)
        if trial.effective_batch_size is not None:
            settings = dataclasses.replace(
                settings,
                effective_batch_size=trial.effective_batch_size,
                virtual_ranks=trial.virtual_ranks,
                accumulation_steps=trial.accumulation_steps,
            )
        return settings, None
    if settings.fast_dev_run:
        return settings, None  # a trial run neither writes nor reads checkpoints
    replay = process_env.replay()
    if replay is None:
        return settings, path
    own = {**_REPLAY, "log_hashes": replay.every, "checkpoint_dir": replay.folder}
    return dataclasses.replace(settings, **own), replay.checkpoint or None


def _checkpoint_path(resume: Any) -> str | None:
    """Return "auto", the path of the checkpoint to resume from, or None."""
    if resume is None:
        return None
    is_path = isinstance(resume, (str, os.PathLike)) or bool(url_of(resume))
    if not is_path or resume == "":
        hint = ' Did you mean "auto", the newest in checkpoint_dir?' if resume is True else ""
        raise ConfigError(f'resume must be "auto", the path of a checkpoint or None, got {resume!r}.{hint}')
    if isinstance(resume, str) and resume != "auto" and resume.lower() in _LIKE_AUTO:
        raise ConfigError(f'resume is {resume!r}: did you mean "auto"? For a file of that name, give "./{resume}".')
    return path_or_url("fit.resume", resume)


def _validation_sets(
    validation: Any, settings: DistributedTrainingConfig, groups: Any, arrays: Sequence[Any]
) -> dict[str, _Set]:
    """Return the sets of validation data by name, "" for a set without a name."""
    if arrays[1] is None and isinstance(validation, (SupportsArray, LazyTable)):  # X without y
        validation = (validation, None)
    is_one_iterator = isinstance(arrays[0], Iterator) and validation is arrays[0]
    if is_one_iterator and settings.steps_per_epoch is None:
        raise ConfigError("fit got one iterator to train on and to validate, and it gives each batch once: give two.")
    if groups is not None:
        require(bool(settings.validation_split), "validation_groups needs validation_split, such as 0.1: set both.")
        twice = "validation_stratify and validation_groups are set. Samples are held out in one way: set one."
        require(not settings.validation_stratify, twice)
    if validation is None:
        return {}
    if settings.validation_split:
        raise ConfigError("fit got validation data and validation_split: give one of them.")
    if isinstance(validation, Mapping):
        return _sets_by_name(validation)
    return {"": _validation_set("validation_data", validation)}


def _sets_by_name(validation: Mapping[Any, Any]) -> dict[str, _Set]:
    """Return the sets of a mapping; a mapping of arrays is one set, with inputs by name."""
    without_y = [name for name, each in validation.items() if not _is_set(each)]
    if validation and len(without_y) == len(validation):
        return {"": (validation, None, None)}
    if not validation:
        what = "no set"
    elif without_y:
        what = f"{', '.join(map(repr, without_y))} with no y"
    elif not all(isinstance(name, str) and name for name in validation):
        what = ", ".join(map(repr, validation))
    else:
        return {name: _validation_set(f"validation_data[{name!r}]", each) for name, each in validation.items()}
    raise ConfigError(
        f"validation_data has {what}: give each set its y and a name, as in "
        '{"near": (X_val, y_val), "far": loader}; or give the arrays of a single set.'
    )


def _is_set(given: Any) -> bool:
    """Return whether a value of a mapping is a whole validation set, not one of a set's inputs."""
    return isinstance(given, (tuple, Mapping)) or yields_batches(given)


def _validation_set(name: str, given: Any) -> _Set:
    """Return (X_val, y_val, weights or None) of one set; `name` is for errors."""
    if yields_batches(given) or isinstance(given, Mapping):
        return given, None, None
    if not isinstance(given, (tuple, list)) or len(given) not in (2, 3):
        raise ConfigError(
            f"{name} must be (X_val, y_val) or (X_val, y_val, sample_weight), without y (X_val, None); or an iterable "
            "of batches, such as a DataLoader; or several of these by name."
        )
    weights = given[2] if len(given) == 3 else None
    return given[0], given[1], weights


_ARGUMENTS = [name for name in inspect.signature(parse_fit).parameters if name not in ("more", "settings")]
