"""From settings to a trainer with its data, and what is done with them."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from cyxtrain import callbacks
from cyxtrain.callbacks.callback import Callback
from cyxtrain.checkpoint.checkpoint_file import read_checkpoint
from cyxtrain.config import AMPConfig, DDPConfig, DistributedConfig, DistributedTrainingConfig
from cyxtrain.config.settings import check_arguments, is_number, unknown_name
from cyxtrain.environment import torch_compat
from cyxtrain.errors import ConfigError
from cyxtrain.experiment.by_name import Names, is_path, make, named, section_of
from cyxtrain.experiment.experiment_config import Config
from cyxtrain.experiment.experiment_data import Data, as_validation, open_data
from cyxtrain.experiment.sections import Overrides, check_section, with_names, words_of
from cyxtrain.metrics.loss import LOSSES
from cyxtrain.models.registry import ModelMaker, get_model
from cyxtrain.optim.named_schedules import SCHEDULERS
from cyxtrain.optim.optimizers import OPTIMIZERS, parameters_for
from cyxtrain.optim.schedules import wants_total_steps
from cyxtrain.progress.history import TrainingHistory
from cyxtrain.training.evaluation import Evaluation
from cyxtrain.training.trainer import DistributedTrainer
from cyxtrain.world import runtime

_KEY = "experiment"
"""Under which a checkpoint's metadata have the settings."""


class Experiment:
    """A trainer and its data, as a file of settings has them.

    The model's first weights are drawn from `training.seed`, alike on every rank. Checkpoints keep the settings.

    Args:
        config: Settings in the sections `imports model data loss_fn optimizer scheduler metrics callbacks training
            distributed`; all but `model` and `data` may be missing.
        source: What they are, for messages: the file.
        own_code: Whether they may name code of one's own, in `imports` or as "module:name"; False: they come from
            somebody else.

    Attributes:
        config: The settings.
        trainer: A `DistributedTrainer`.
        data: What it is trained, validated and tested on.

    Raises:
        ConfigError: A section, a setting or a name that does not exist, with the nearest one that does; or one that
            cannot be. Nothing has started.
    """

    def __init__(self, config: Mapping[str, Any], source: str = "the config", *, own_code: bool = True) -> None:
        self.config = Config(with_names(Config(config).to_dict()))
        values = self.config.to_dict()
        names = Names(own_code)
        with _naming(source):
            for section in values:
                check_section("the config", section)
            self._training = _training(values)
            self._distributed, ddp_config = _distributed(values)
            _import(values, names)
            model = _model(values, names, self._training.seed)
            optimizer = _optimizer(values, names, model)
            self.trainer = DistributedTrainer(
                model,
                _loss(values, names),
                optimizer,
                metrics=_metrics(values, names),
                scheduler=_scheduler(values, names, optimizer),
                callbacks=_callbacks(values, names),
                ddp_config=ddp_config,
            )
            self.data: Data = open_data(values, names)
        self.trainer.metadata[_KEY] = values

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], overrides: Overrides = ()) -> Experiment:
        """Returns the experiment of a YAML file.

        Args:
            path: As in `Config.from_file`.
            overrides: As in `Config.from_file`.

        Raises:
            ConfigError: As `Config.from_file`, and the class.
        """
        with_overrides = f" with {' '.join(words_of(overrides))}" if overrides else ""
        return cls(Config.from_file(path, overrides), f"{os.fspath(path)}{with_overrides}")

    @classmethod
    def from_checkpoint(cls, path: str | os.PathLike[str], overrides: Overrides = ()) -> Experiment:
        """Returns the experiment of a checkpoint that one has written; the checkpoint is not yet loaded.

        It runs no code but this package's and PyTorch's, and connects to nobody: what names other modules is refused,
        and the sections `callbacks` and `distributed` are left out.

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
        kept = {name: value for name, value in values.items() if name not in ("callbacks", "distributed")}
        return cls(Config(kept).with_overrides(overrides), f"checkpoint {path}", own_code=False)

    def join(self) -> None:
        """Joins the world, as the section `distributed` and the environment say; harmless twice."""
        if self._distributed is None:
            runtime.join_for_all()
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
        inputs, targets = (*self.data.train, None)[:2]
        given = as_validation(validation) if validation else None
        return self.trainer.fit(inputs, targets, config=self._training, resume=resume, validation_data=given)

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
    try:
        training.validate()
    except ConfigError as error:
        raise ConfigError(str(error).replace("DistributedTrainingConfig.", "training.")) from error
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


def _import(values: Mapping[str, Any], names: Names) -> None:
    """Imports the modules in which an experiment's models are registered."""
    modules = values.get("imports") or []
    if not isinstance(modules, list) or not all(isinstance(each, str) and each for each in modules):
        raise ConfigError(f"the section 'imports' must be a list of modules, such as [my_models], got {modules!r}.")
    for module in modules:
        names.module(f"the module '{module}'", module)


def _model(values: Mapping[str, Any], names: Names, seed: int) -> nn.Module:
    name, _ = section_of(values, "model")
    maker = ModelMaker(name, names.imported("model", name)) if is_path(name) else get_model(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return maker(Config(values))


def _loss(values: Mapping[str, Any], names: Names) -> Any:
    """Returns the loss function; None: the model computes its own."""
    if values.get("loss_fn") is None:
        return None
    name, settings = section_of(values, "loss_fn")
    found = names.find("loss", name, LOSSES, nn, torch_compat.LossModule)
    if is_path(name) and not settings and not isinstance(found, type):
        return found  # a function of (output, target)
    if not is_path(name):  # weights of classes are tensors to PyTorch, and lists in YAML
        settings = {key: _as_tensor(value) for key, value in settings.items()}
    return make(f"the loss '{name}'", found, settings)


def _as_tensor(value: Any) -> Any:
    return (
        torch.tensor([float(each) for each in value], device="cpu")
        if isinstance(value, list) and all(map(is_number, value))
        else value
    )


def _optimizer(values: Mapping[str, Any], names: Names, model: nn.Module) -> torch.optim.Optimizer:
    name, settings = section_of(values, "optimizer", default="adam")
    maker = names.find("optimizer", name, OPTIMIZERS, torch.optim, torch.optim.Optimizer)
    parameters = parameters_for(name, model)
    optimizer: torch.optim.Optimizer = make(f"the optimizer '{name}'", maker, settings, parameters)
    return optimizer


def _scheduler(values: Mapping[str, Any], names: Names, optimizer: torch.optim.Optimizer) -> Any:
    if values.get("scheduler") is None:
        return None
    name, settings = section_of(values, "scheduler")
    maker = names.find("scheduler", name, SCHEDULERS, lr_scheduler, lr_scheduler.LRScheduler)
    owner = f"the scheduler '{name}'"
    if not wants_total_steps(partial(maker, **settings)):
        return make(owner, maker, settings, optimizer)
    by_name = "total_steps" in inspect.signature(maker).parameters
    check_arguments(owner, maker, {**settings, **({"total_steps": 0} if by_name else {})}, 1 if by_name else 2)
    return partial(maker, **settings)


def _metrics(values: Mapping[str, Any], names: Names) -> Any:
    """Returns what the trainer takes: names; and functions or classes of a user's own, by theirs."""
    found = values.get("metrics") or []
    found = [found] if isinstance(found, (str, Mapping)) else found
    if not isinstance(found, list):
        raise ConfigError(f"the section 'metrics' must be a list, such as [f1, mae], got {found!r}.")
    return [_metric(each, names) for each in found]


def _metric(each: Any, names: Names) -> Any:
    name, settings = named(each, "each of 'metrics'", "f1")
    if not is_path(name):
        return each
    maker = names.imported("metric", name)
    return make(f"the metric '{name}'", maker, settings) if settings or isinstance(maker, type) else maker


def _callbacks(values: Mapping[str, Any], names: Names) -> list[Callback]:
    sections = values.get("callbacks") or []
    if not isinstance(sections, list):
        raise ConfigError(f"the section 'callbacks' must be a list, such as '- name: EarlyStopping', got {sections!r}.")
    made = []
    for each in sections:
        name, settings = named(each, "each of 'callbacks'", "- {name: EarlyStopping, patience: 3}")
        made.append(make(f"the callback '{name}'", names.find("callback", name, {}, callbacks, Callback), settings))
    return made
