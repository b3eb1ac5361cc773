"""Create a trainer and its data from settings, and train, resume or evaluate it."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from cyxtrain import callbacks
from cyxtrain.callbacks.callback import Callback
from cyxtrain.checkpoint.checkpoint_file import read_checkpoint
from cyxtrain.config import AMPConfig, DDPConfig, DistributedConfig, DistributedTrainingConfig
from cyxtrain.config.other_names import meanings
from cyxtrain.config.settings import check_arguments, is_number, make, names_checked, require, unknown_name
from cyxtrain.environment import torch_compat
from cyxtrain.errors import ConfigError
from cyxtrain.experiment.by_name import (
    SECTIONS,
    Overrides,
    Resolver,
    check_section,
    is_path,
    override_strings,
    split_name,
    split_section,
    with_names,
)
from cyxtrain.experiment.config import Config
from cyxtrain.experiment.data import Data, as_validation, open_data
from cyxtrain.metrics.named_losses import LOSSES
from cyxtrain.models.registry import ModelMaker, get_model
from cyxtrain.optim.optimizers import ONLY, OPTIMIZERS, parameters_for
from cyxtrain.optim.schedule_classes import SCHEDULERS
from cyxtrain.optim.schedules import wants_total_steps
from cyxtrain.progress.history import TrainingHistory
from cyxtrain.training.evaluation import Evaluation
from cyxtrain.training.trainer import DistributedTrainer
from cyxtrain.world import runtime

# The key of the settings in a checkpoint's metadata.
_KEY = "experiment"


@names_checked
class Experiment:
    """A trainer and its data, created from settings.

    The model's weights are initialized from `training.seed`, the same on every rank. Checkpoints save the settings.

    Args:
        config: Settings in the sections `imports model data loss_fn loss_weights optimizer optimizers scheduler
            schedulers metrics callbacks training distributed train_step test_step predict_step`; only `model` and
            `data` are required.
        source: Names the settings in errors: the file.
        own_code: Whether they may run your own code, in `imports` or as "module:name"; False for settings that
            somebody else wrote.

    Attributes:
        config: The settings.
        trainer: A `DistributedTrainer`.
        data: Training, validation and test data.

    Raises:
        ConfigError: A section, setting or name is unknown, with the nearest one, or invalid. Nothing has started.
    """

    def __init__(self, config: Mapping[str, Any], source: str = "the config", *, own_code: bool = True) -> None:
        self.config = Config(with_names(Config(config).to_dict()))
        values = self.config.to_dict()
        resolver = Resolver(own_code)
        with _naming(source):
            for section in values:
                check_section("the config", section)
            self._training = _training(values)
            self._distributed, ddp_config = _distributed(values)
            _import(values, resolver)
            model = _model(values, resolver, self._training.seed)
            self.trainer = DistributedTrainer(
                model,
                **_optimizers_and_schedulers(values, resolver, model),
                loss_fn=_loss(values, resolver),
                loss_weights=values.get("loss_weights"),
                metrics=_metrics(values, resolver),
                callbacks=_callbacks(values, resolver),
                ddp_config=ddp_config,
                **_steps(values, resolver),
            )
            self.data: Data = open_data(values, resolver)
        self.trainer.metadata[_KEY] = values

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], overrides: Overrides = ()) -> Experiment:
        """Return the experiment of a YAML file.

        Args:
            path: As in `Config.from_file`.
            overrides: As in `Config.from_file`.

        Raises:
            ConfigError: As in `Config.from_file` and `Experiment`.
        """
        source = str(path)
        if overrides:
            source += f" with {' '.join(override_strings(overrides))}"
        return cls(Config.from_file(path, overrides), source)

    @classmethod
    def from_checkpoint(cls, path: str | os.PathLike[str], overrides: Overrides = ()) -> Experiment:
        """Return the experiment whose settings a checkpoint holds, without loading the weights.

        It runs only code of this package and PyTorch and opens no connection: names of other modules raise an error,
        and the sections `callbacks` and `distributed` are ignored.

        Args:
            path: The checkpoint.
            overrides: As in `Config.from_file`.

        Raises:
            CheckpointError: The checkpoint does not exist or is corrupt.
            ConfigError: The checkpoint has no settings, or they name code of other modules.
        """
        values = read_checkpoint(path).metadata.get(_KEY)
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"{path} was not saved by an experiment: it has no settings. Pass the experiment's file with --config."
            )
        # A checkpoint may be somebody else's: it runs no foreign code and connects to nothing.
        kept = {name: value for name, value in values.items() if name not in ("callbacks", "distributed")}
        return cls(Config(kept).with_overrides(overrides), f"checkpoint {path}", own_code=False)

    def join(self) -> None:
        """Join the ranks, by the section `distributed` and the environment; a second call does nothing."""
        if self._distributed is None:
            runtime.join_for_all()
        else:
            runtime.init(self._distributed)

    def fit(self, resume: str | None = None) -> TrainingHistory:
        """Train with the settings of the section `training`. All ranks call it.

        Args:
            resume: As in `DistributedTrainer.fit`.

        Raises:
            CyxtrainError: As in `DistributedTrainer.fit`.
        """
        self.join()
        inputs, targets = (*self.data.train, None)[:2]  # None: the data has its own targets
        validation = None
        if self.data.validation:
            validation = as_validation(self.data.validation)
        return self.trainer.fit(inputs, targets, config=self._training, resume=resume, validation_data=validation)

    def evaluate(self) -> Evaluation | None:
        """Return the metrics of the test data; None without test data. All ranks call it.

        Raises:
            CyxtrainError: As in `DistributedTrainer.evaluate`.
        """
        self.join()
        return self.trainer.evaluate(*self.data.test) if self.data.test else None


@contextlib.contextmanager
def _naming(source: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def _settings_of(
    values: Mapping[str, Any], section: str, known: Collection[str] | None, by: str = "name", what: str = "setting"
) -> dict[str, Any]:
    """Return the settings of a section after checking that all are `known` (None: any name is)."""
    found = values.get(section) or {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"the section '{section}' must have settings by {by}, got {found!r}.")
    for name in found:
        if known is None or name in known:
            continue
        if what == "setting":
            home = _section_of(str(name))
            require(not home, f"the section '{section}' has no setting '{name}': it belongs to the section {home}.")
        raise unknown_name(f"the section '{section}'", str(name), [*known], what)
    return dict(found)


def _section_of(name: str) -> str:
    """Return the section to which a misplaced setting belongs; "": unknown."""
    if any(remark.startswith("The optimizer has it") for _, remark in meanings(name, "argument", [])):
        return "'optimizer', as in optimizer: {name: adam, lr: 0.01}"
    if name in _fields(DistributedTrainingConfig):
        return "'training'"
    if name in _fields(DistributedConfig) or name in _fields(DDPConfig):
        return "'distributed'"
    return repr(name) if name in SECTIONS and name not in ("training", "distributed") else ""


def _by_optimizer(values: Mapping[str, Any], section: str, known: Collection[str] | None) -> dict[str, Any]:
    return _settings_of(values, section, known, "the optimizers' names", "optimizer")


def _fields(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _training(values: Mapping[str, Any]) -> DistributedTrainingConfig:
    found = _settings_of(values, "training", _fields(DistributedTrainingConfig))
    if isinstance(found.get("amp"), Mapping):
        found["amp"] = AMPConfig(**found["amp"])
    training = DistributedTrainingConfig(**found)
    try:
        training.validate()
    except ConfigError as error:
        raise ConfigError(str(error).replace("DistributedTrainingConfig.", "training.")) from error
    return training


def _distributed(values: Mapping[str, Any]) -> tuple[DistributedConfig | None, DDPConfig | None]:
    """Return the settings of joining and of gradient averaging; None for a config without settings."""
    found = _settings_of(values, "distributed", [*_fields(DistributedConfig), *_fields(DDPConfig)])
    return _config_of(DistributedConfig, found), _config_of(DDPConfig, found)


def _config_of(kind: type[Any], settings: Mapping[str, Any]) -> Any:
    """Return a validated config from the settings that are its fields; None without such settings."""
    own = {name: value for name, value in settings.items() if name in _fields(kind)}
    if not own:
        return None
    config = kind(**own)
    config.validate()
    return config


def _import(values: Mapping[str, Any], resolver: Resolver) -> None:
    modules = values.get("imports") or []
    if not isinstance(modules, list) or not all(isinstance(each, str) and each for each in modules):
        raise ConfigError(f"the section 'imports' must be a list of modules, such as [my_models], got {modules!r}.")
    for module in modules:
        resolver.module(f"the module '{module}'", module)


def _model(values: Mapping[str, Any], resolver: Resolver, seed: int) -> nn.Module:
    name, _ = split_section(values, "model")
    maker = ModelMaker(name, resolver.imported("model", name)) if is_path(name) else get_model(name)
    # The program's own random numbers stay the same; models are created on the CPU, so GPUs need no seed.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return maker(Config(values))


def _loss(values: Mapping[str, Any], resolver: Resolver) -> Any:
    """Return the loss function, or several by output name; None: the model computes its own."""
    found = values.get("loss_fn")
    if found is None:
        return None
    if isinstance(found, Mapping) and "name" not in found:
        return {output: _loss({"loss_fn": each}, resolver) for output, each in found.items()}
    name, settings = split_section(values, "loss_fn")
    maker = resolver.find("loss", name, LOSSES, nn, torch_compat.LossModule)
    if not is_path(name):
        return make(f"the loss '{name}'", maker, _with_tensors(settings))
    if not settings and not isinstance(maker, type):
        return maker  # a function of (output, target)
    return make(f"the loss '{name}'", maker, settings)


def _with_tensors(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with tensors for lists of numbers, such as the class weights of PyTorch's losses."""
    found = dict(settings)
    for name, value in settings.items():
        if isinstance(value, list) and all(map(is_number, value)):
            found[name] = torch.tensor([float(each) for each in value], device="cpu")
    return found


def _optimizers_and_schedulers(values: Mapping[str, Any], resolver: Resolver, model: nn.Module) -> dict[str, Any]:
    """Return the trainer's arguments for one optimizer with its schedule, or for several by name."""
    optimizers = _optimizers(values, resolver, model)
    schedulers = {}
    for own, section in _by_optimizer(values, "schedulers", optimizers).items():
        schedulers[own] = _scheduler(section, f"schedulers.{own}", resolver, optimizers[own])
    if ONLY not in optimizers:
        return {"optimizers": optimizers, "schedulers": schedulers}
    if schedulers:
        raise ConfigError(
            "the section 'schedulers' is for several 'optimizers'; for one, give the section 'scheduler'."
        )
    only = optimizers[ONLY]
    return {"optimizer": only, "scheduler": _scheduler(values.get("scheduler"), "scheduler", resolver, only)}


def _optimizers(values: Mapping[str, Any], resolver: Resolver, model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers by name; the section 'optimizer' makes the only one."""
    if values.get("optimizers") is None:
        return {ONLY: _optimizer(*split_section(values, "optimizer", default="adam"), resolver, model)}
    for section in ("optimizer", "scheduler"):
        if values.get(section) is not None:
            raise ConfigError(f"the sections '{section}' and 'optimizers' are given: leave one out, or set it to null.")
    made = {}
    for own, each in _by_optimizer(values, "optimizers", None).items():
        name, settings = split_name(each, f"optimizers.{own}", f"{own}: {{name: adam, modules: ...}}")
        modules = _submodules(model, settings.pop("modules", None), own)
        made[own] = _optimizer(name, settings, resolver, modules)
    return made


def _submodules(model: nn.Module, given: Any, own: str) -> nn.ModuleList:
    paths = [given] if isinstance(given, str) else given
    try:
        return nn.ModuleList([model.get_submodule(path) for path in paths])
    except (AttributeError, TypeError) as error:
        has = ", ".join(name for name, _ in model.named_children())
        raise ConfigError(
            f"optimizers.{own}.modules must name modules of the model, such as one of {has}, got {given!r}."
        ) from error


def _optimizer(name: str, settings: Mapping[str, Any], resolver: Resolver, model: nn.Module) -> torch.optim.Optimizer:
    maker = resolver.find("optimizer", name, OPTIMIZERS, torch.optim, torch.optim.Optimizer)
    parameters = parameters_for(name, model)
    optimizer: torch.optim.Optimizer = make(f"the optimizer '{name}'", maker, settings, parameters)
    return optimizer


def _scheduler(section: Any, owner: str, resolver: Resolver, optimizer: torch.optim.Optimizer) -> Any:
    if section is None:
        return None
    name, settings = split_name(section, f"the section '{owner}'", f"{owner}: {{name: ...}}")
    maker = resolver.find("scheduler", name, SCHEDULERS, lr_scheduler, lr_scheduler.LRScheduler)
    owner = f"the scheduler '{name}'"
    if not wants_total_steps(partial(maker, **settings)):
        return make(owner, maker, settings, optimizer)
    # `fit` passes the number of steps: by name, or after the optimizer.
    if "total_steps" in inspect.signature(maker).parameters:
        check_arguments(owner, maker, {**settings, "total_steps": 0}, taken=1)
    else:
        check_arguments(owner, maker, settings, taken=2)
    return partial(maker, **settings)


def _metrics(values: Mapping[str, Any], resolver: Resolver) -> Any:
    """Return the trainer's metrics: names, and functions or classes of "module:name"; or these by output."""
    found = values.get("metrics") or []
    if isinstance(found, Mapping) and "name" not in found:
        return {output: _metrics({"metrics": each}, resolver) for output, each in found.items()}
    if isinstance(found, (str, Mapping)):
        found = [found]
    if not isinstance(found, list):
        raise ConfigError(f"the section 'metrics' must be a list, such as [f1, mae], got {found!r}.")
    return [_metric(each, resolver) for each in found]


def _metric(each: Any, resolver: Resolver) -> Any:
    name, settings = split_name(each, "each of 'metrics'", "f1")
    if not is_path(name):
        return each
    maker = resolver.imported("metric", name)
    if not settings and not isinstance(maker, type):
        return maker  # a function of (output, target)
    return make(f"the metric '{name}'", maker, settings)


def _steps(values: Mapping[str, Any], resolver: Resolver) -> dict[str, Any]:
    """Return the steps of the user's own, functions of (trainer, batch)."""
    given = {name: values[name] for name in ("train_step", "test_step", "predict_step") if values.get(name)}
    for name, path in given.items():
        if not isinstance(path, str):
            raise ConfigError(f"the section '{name}' must be the name of a function, module:name, got {path!r}.")
    return {name: resolver.imported(name, path) for name, path in given.items()}


def _callbacks(values: Mapping[str, Any], resolver: Resolver) -> list[Callback]:
    sections = values.get("callbacks") or []
    if not isinstance(sections, list):
        raise ConfigError(f"the section 'callbacks' must be a list, such as '- name: EarlyStopping', got {sections!r}.")
    made = []
    for each in sections:
        name, settings = split_name(each, "each of 'callbacks'", "- {name: EarlyStopping, patience: 3}")
        made.append(make(f"the callback '{name}'", resolver.find("callback", name, {}, callbacks, Callback), settings))
    return made
