"""The ways of calling `fit`, brought to one form."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cyxtrain.callbacks.callback import Callback, checked_callbacks
from cyxtrain.config import AMPConfig, DDPConfig, DistributedConfig, DistributedTrainingConfig
from cyxtrain.config.settings import require, require_integer, unknown_name
from cyxtrain.data.sources.open import gives_batches
from cyxtrain.errors import ConfigError

# Keras's own letter for X is small.
_ARRAYS = {"X": 0, "x": 0, "y": 1, "X_val": 2, "y_val": 3}
_LIKE_AUTO = ("auto", "latest", "last", "newest")
_NOT_HERE = {
    "learning_rate": "the optimizer has it, as in torch.optim.Adam(model.parameters(), lr=0.01)",
    "lr": "the optimizer has it, as in torch.optim.Adam(model.parameters(), lr=0.01)",
    "workers": "a DataLoader has it, as num_workers",
    "num_workers": "a DataLoader has it, as in fit(DataLoader(dataset, num_workers=4))",
    "pin_memory": "a DataLoader has it, and rows go to a GPU from pinned memory by themselves",
    "accelerator": "DistributedTrainer(device=...) has it, and takes a visible GPU by itself",
    "gradient_checkpointing": "call trainer.enable_gradient_checkpointing() before it",
}
_FIELDS = [field.name for field in dataclasses.fields(DistributedTrainingConfig)]


_TRIED: dict[str, Any] = {
    "epochs": 1,
    "validation_freq": 1,
    "checkpoint_every_n_epochs": 0,
    "checkpoint_every_n_steps": 0,
    "checkpoint_every_n_minutes": 0.0,
    "keep_last": 0,
    "keep_best": None,
}
"""What fast_dev_run leaves of a config."""
_OTHERS = ("validation_data", "sample_weight", "class_weight", "initial_epoch", "config", "resume", "callbacks")


@dataclass
class FitArguments:
    """What `fit` was asked for.

    Attributes:
        inputs: X.
        targets: y, or None.
        weights: How much each row counts, or None.
        class_weights: How much the rows of a class count, by its number, or None.
        validation: (X_val, y_val, weights or None), or None.
        config: Complete and valid.
        resume: "auto", the path of a checkpoint, or None.
        callbacks: For this fit.
        initial_epoch: Epochs that count as complete, or None: those that the trainer has seen.
    """

    inputs: Any
    targets: Any
    weights: Any
    class_weights: Mapping[int, float] | None
    validation: tuple[Any, Any, Any] | None
    config: DistributedTrainingConfig
    resume: str | None = None
    callbacks: Sequence[Callback] = ()
    initial_epoch: int | None = None


def parse_fit(positional: tuple[Any, ...], keywords: dict[str, Any]) -> FitArguments:
    """Returns one form of `fit(X, y, config)`, `fit(X, y, X_val, y_val, config)` and Keras's keywords.

    Raises:
        ConfigError: An unknown argument (with the nearest known one), or ones that do not go together.
    """
    config = keywords.pop("config", None)
    given = list(positional)
    if given and isinstance(given[-1], DistributedTrainingConfig):
        if config is not None:
            raise ConfigError("fit got two configs: one by position, one by name.")
        config = given.pop()
    _refuse_settings(given)
    arrays = _arrays(given, keywords)
    validation = keywords.pop("validation_data", None)
    if gives_batches(arrays[0]) and len(arrays) == 2 and gives_batches(arrays[1]):  # fit(loader, val_loader, config)
        require(validation is None, "fit got validation data twice: by position, and as validation_data.")
        validation = arrays.pop()
    resume = _path(keywords.pop("resume", None))
    callbacks = checked_callbacks(keywords.pop("callbacks", None))
    if len(arrays) == 4:
        if validation is not None:
            raise ConfigError("fit got validation data twice: X_val and y_val, and as validation_data.")
        validation = (arrays[2], arrays[3])
    weights, of_classes = keywords.pop("sample_weight", None), keywords.pop("class_weight", None)
    wrong = of_classes is not None and not isinstance(of_classes, Mapping)
    require(not wrong, f"class_weight must be a dictionary such as {{0: 1.0, 1: 5.0}}, got {of_classes!r}.")
    initial_epoch = keywords.pop("initial_epoch", None)
    settings = _from_initial(initial_epoch, _settings(config, keywords))
    return FitArguments(
        inputs=arrays[0],
        targets=arrays[1] if len(arrays) > 1 else None,
        weights=weights,
        class_weights=of_classes,
        validation=_validation(validation, settings),
        config=settings,
        resume=None if settings.fast_dev_run else resume,
        callbacks=callbacks,
        initial_epoch=initial_epoch,
    )


def _refuse_settings(given: Sequence[Any]) -> None:
    """Refuses what is no array, and was meant as one config or another."""
    wrong = next((each for each in given if isinstance(each, (DDPConfig, AMPConfig, DistributedConfig, type))), None)
    if wrong is not None:
        what = f"the class {wrong.__name__}" if isinstance(wrong, type) else f"a {type(wrong).__name__}"
        raise ConfigError(f"fit got {what}: beside arrays it takes a DistributedTrainingConfig(...).")
    if any(isinstance(array, dict) and array and array.keys() <= set(_FIELDS) for array in given):
        raise ConfigError(
            "fit got a dict: settings go by name, fit(X, y, epochs=3), or as DistributedTrainingConfig(**settings)."
        )


def _arrays(positional: list[Any], keywords: dict[str, Any]) -> list[Any]:
    """Returns X; X and y; or X, y, X_val and y_val, given by position or by name."""
    arrays = dict(enumerate(positional))
    for name, position in _ARRAYS.items():
        if name in keywords:
            if position in arrays:
                raise ConfigError(f"fit got {name} twice.")
            arrays[position] = keywords.pop(name)
    if sorted(arrays) not in ([0], [0, 1], [0, 1, 2, 3]):
        raise ConfigError(f"fit takes (X, y, config) or (X, y, X_val, y_val, config); it got {len(arrays)} arrays.")
    return [arrays[position] for position in sorted(arrays)]


def _settings(config: DistributedTrainingConfig | None, keywords: dict[str, Any]) -> DistributedTrainingConfig:
    if config is not None and not isinstance(config, DistributedTrainingConfig):
        raise ConfigError(f"config must be a DistributedTrainingConfig, got {type(config).__name__}.")
    for name in keywords:
        if name in _NOT_HERE:
            raise ConfigError(f"fit has no argument '{name}': {_NOT_HERE[name]}.")
        if name not in _FIELDS:
            raise unknown_name("fit", name, [*_FIELDS, *_ARRAYS, *_OTHERS], "argument")
    if keywords.get("verbose") in (0, 1, 2, "auto"):
        keywords["verbose"] = keywords["verbose"] != 0  # Keras counts
    if "batch_size" in keywords and "effective_batch_size" not in keywords:
        keywords["effective_batch_size"] = None  # the one that was asked for last rules
    settings = dataclasses.replace(config or DistributedTrainingConfig(), **keywords)
    settings.validate()
    return dataclasses.replace(settings, **_TRIED) if settings.fast_dev_run else settings


def _from_initial(epoch: int | None, settings: DistributedTrainingConfig) -> DistributedTrainingConfig:
    """Returns how many epochs there are to train: Keras's `epochs` is the number of the last one."""
    if epoch is None:
        return settings
    require_integer("fit", "initial_epoch", epoch, 0)
    last = settings.epochs
    require(epoch < last, f"fit.initial_epoch={epoch}: epochs={last} is the last one, and must be above it.")
    return dataclasses.replace(settings, epochs=last - epoch)


def _path(resume: Any) -> str | None:
    if resume is not None and (not isinstance(resume, (str, os.PathLike)) or resume == ""):
        raise ConfigError(f'resume must be "auto", the path of a checkpoint or None, got {resume!r}.')
    if isinstance(resume, str) and resume != "auto" and resume.lower() in _LIKE_AUTO:
        raise ConfigError(f'resume is {resume!r}: did you mean "auto"? For a file of that name, give "./{resume}".')
    return None if resume is None else os.fspath(resume)


def _validation(validation: Any, settings: DistributedTrainingConfig) -> tuple[Any, Any, Any] | None:
    if validation is None:
        return None
    if settings.validation_split:
        raise ConfigError("fit got validation data and validation_split: give one of them.")
    if gives_batches(validation):
        return validation, None, None
    if not isinstance(validation, (tuple, list)) or len(validation) not in (2, 3):
        raise ConfigError(
            "validation_data must be (X_val, y_val) or (X_val, y_val, sample_weight); or what gives them, such as a "
            "DataLoader."
        )
    return validation[0], validation[1], validation[2] if len(validation) == 3 else None
