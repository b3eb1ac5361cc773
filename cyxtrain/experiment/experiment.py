"""From settings to a trainer with its data, and what is done with them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from cyxtrain import callbacks, runtime
from cyxtrain.config import AMPConfig, DDPConfig, DistributedConfig, DistributedTrainingConfig
from cyxtrain.errors import ConfigError
from cyxtrain.experiment.config import Config
from cyxtrain.experiment.data import Data, as_validation, open_data
from cyxtrain.experiment.naming import find, is_path, make, section_of
from cyxtrain.experiment.reading import SECTIONS, with_names
from cyxtrain.models import get_model
from cyxtrain.settings import unknown_name
from cyxtrain.training.callbacks import Callback
from cyxtrain.training.evaluation import Evaluation
from cyxtrain.training.history import TrainingHistory
from cyxtrain.training.loss import LOSSES
from cyxtrain.training.optimizers import OPTIMIZERS
from cyxtrain.training.saving.checkpoint import read_checkpoint
from cyxtrain.training.schedules import SCHEDULERS
from cyxtrain.training.trainer import DistributedTrainer

_KEY = "experiment"
"""Under which a checkpoint's metadata have the settings."""


class Experiment:
    """A trainer and its data, as a file of settings has them.

    The model's first weights are drawn from `training.seed`, alike on every rank. Checkpoints keep the settings.

    Args:
        config: Settings in the sections `model data loss_fn optimizer scheduler metrics callbacks training
            distributed`; all but `model` and `data` may be missing.
        source: What they are, for messages: the file.

    Attributes:
        config: The settings.
        trainer: A `DistributedTrainer`.
        data: What it is trained, validated and tested on.

    Raises:
        ConfigError: A section, a setting or a name that does not exist, with the nearest one that does; or one that
            cannot be. Nothing has started.
    """

    def __init__(self, config: Mapping[str, Any], source: str = "the config") -> None:
        self.config = Config(with_names(Config(config).to_dict()))
        values = self.config.to_dict()
        with _naming(source):
            for section in values:
                if section not in SECTIONS:
                    raise unknown_name("the config", section, list(SECTIONS), "section")
            self._training = _training(values)
            self._distributed, ddp_config = _distributed(values)
            model = _model(values, self._training.seed)
            optimizer = _optimizer(values, model)
            self.trainer = DistributedTrainer(
                model,
                _loss(values),
                optimizer,
                metrics=values.get("metrics"),
                scheduler=_scheduler(values, optimizer),
                callbacks=_callbacks(values),
                ddp_config=ddp_config,
            )
            self.data: Data = open_data(values)
        self.trainer.metadata[_KEY] = values

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Experiment:
        """Returns the experiment of a YAML file.

        Args:
            path: As in `Config.from_file`.
            overrides: As in `Config.from_file`.

        Raises:
            ConfigError: As `Config.from_file`, and the class.
        """
        return cls(Config.from_file(path, overrides), os.fspath(path))

    @classmethod
    def from_checkpoint(cls, path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Experiment:
        """Returns the experiment of a checkpoint that one has written; the checkpoint is not yet loaded.

        It runs no code but this package's and PyTorch's: one with names of other modules is refused.

        Args:
            path: Of the checkpoint.
            overrides: As in `Config.from_file`.

        Raises:
            CheckpointError: There is none, or it is damaged.
            ConfigError: It is of no experiment, or names code that it cannot bring along.
        """
        values = read_checkpoint(path).metadata.get(_KEY)
        if not isinstance(values, Mapping):
            raise ConfigError(f"{path} was not made by an experiment: it has no settings. Give its file by --config.")
        config = Config(values).with_overrides(*overrides)
        foreign = [name for name in _names_in(config.to_dict()) if is_path(name)]
        if foreign:
            raise ConfigError(
                f"{path} names code that is not cyxtrain's, {', '.join(foreign)}, and a checkpoint runs none: give the "
                "file of its settings by --config."
            )
        return cls(config, f"checkpoint {path}")

    def join(self) -> None:
        """Joins the world, as the section `distributed` and the environment say; harmless twice."""
        if self._distributed is None:
            runtime.join_if_nobody_has()
        else:
            runtime.init(self._distributed)

    def fit(self, resume: str | None = None) -> TrainingHistory:
        """Trains, as the section `training` says. All ranks call it.

        Args:
            resume: As in `DistributedTrainer.fit`.

        Raises:
            CyxtrainError: As `DistributedTrainer.fit`.
        """
        self.join()
        validation = self.data.validation
        given = {"validation_data": as_validation(validation)} if validation else {}
        return self.trainer.fit(*self.data.train, self._training, resume=resume, **given)

    def evaluate(self) -> Evaluation | None:
        """Returns the measures of the test data; None where there are none. All ranks call it.

        Raises:
            CyxtrainError: As `DistributedTrainer.evaluate`.
        """
        self.join()
        return self.trainer.evaluate(*self.data.test) if self.data.test else None


@contextlib.contextmanager
def _naming(source: str) -> Iterator[None]:
    """Lets errors begin with the file that is wrong."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def _settings_of(values: Mapping[str, Any], section: str, *kinds: type) -> dict[str, Any]:
    """Returns the settings of a section, all of which must be fields of some classes of settings."""
    found = values.get(section) or {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"the section '{section}' must have settings by name, got {found!r}.")
    fields = [field.name for kind in kinds for field in dataclasses.fields(kind)]
    for name in found:
        if name not in fields:
            raise unknown_name(f"the section '{section}'", name, fields, "setting")
    return dict(found)


def _training(values: Mapping[str, Any]) -> DistributedTrainingConfig:
    found = _settings_of(values, "training", DistributedTrainingConfig)
    if isinstance(found.get("amp"), Mapping):
        found["amp"] = AMPConfig(**found["amp"])
    training = DistributedTrainingConfig(**found)
    training.validate()
    return training


def _distributed(values: Mapping[str, Any]) -> tuple[DistributedConfig | None, DDPConfig | None]:
    """Returns how ranks find each other, and how gradients travel; None where nothing is said of it."""
    found = _settings_of(values, "distributed", DistributedConfig, DDPConfig)
    made: list[Any] = []
    for kind in (DistributedConfig, DDPConfig):
        own = {name: found[name] for name in found if name in {field.name for field in dataclasses.fields(kind)}}
        made.append(kind(**own) if own else None)
        if own:
            made[-1].validate()
    return made[0], made[1]


def _model(values: Mapping[str, Any], seed: int) -> nn.Module:
    name, settings = section_of(values, "model")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make(f"the model '{name}'", find("model", name, {}), settings) if is_path(name) else None
        model = get_model(name)(values) if model is None else model
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the model '{name}' must be a torch.nn.Module, got {type(model).__name__}.")
    return model


def _loss(values: Mapping[str, Any]) -> Any:
    """Returns the loss function; None: the model computes its own."""
    if values.get("loss_fn") is None:
        return None
    name, settings = section_of(values, "loss_fn")
    # Weights of classes are tensors to PyTorch, and lists in YAML.
    given = {key: torch.tensor(value) if isinstance(value, list) else value for key, value in settings.items()}
    found = find("loss", name, LOSSES, nn, nn.modules.loss._Loss)
    if is_path(name) and not settings and not isinstance(found, type):
        return found  # a function of (output, target)
    return make(f"the loss '{name}'", found, given)


def _optimizer(values: Mapping[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    name, settings = section_of({"optimizer": "adam", **values}, "optimizer")
    maker = find("optimizer", name, OPTIMIZERS, torch.optim, torch.optim.Optimizer)
    optimizer: torch.optim.Optimizer = make(f"the optimizer '{name}'", maker, settings, model.parameters())
    return optimizer


def _scheduler(values: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> Any:
    if values.get("scheduler") is None:
        return None
    name, settings = section_of(values, "scheduler")
    maker = find("scheduler", name, SCHEDULERS, lr_scheduler, lr_scheduler.LRScheduler)
    return make(f"the scheduler '{name}'", maker, settings, optimizer)


def _callbacks(values: Mapping[str, Any]) -> list[Callback]:
    sections = values.get("callbacks") or []
    if not isinstance(sections, list):
        raise ConfigError(f"the section 'callbacks' must be a list, such as '- name: EarlyStopping', got {sections!r}.")
    made = []
    for each in sections:
        name, settings = section_of({"callbacks": each}, "callbacks")
        made.append(make(f"the callback '{name}'", find("callback", name, {}, callbacks, Callback), settings))
    return made


def _names_in(values: Mapping[str, Any]) -> Iterator[str]:
    """Gives every name of something that an experiment makes."""
    for value in (*values.values(), *(values.get("callbacks") or [])):
        if isinstance(value, Mapping) and isinstance(value.get("name"), str):
            yield value["name"]
