"""Names of an experiment's sections; overrides. Without OmegaConf, which takes time to import."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.config.settings import unknown_name
from cyxtrain.errors import ConfigError

SECTIONS = (
    "imports",
    "model",
    "data",
    "loss_fn",
    "loss_weights",
    "optimizer",
    "optimizers",
    "scheduler",
    "schedulers",
    "metrics",
    "callbacks",
    "training",
    "distributed",
    "train_step",
    "test_step",
    "predict_step",
)
NAMED = ("model", "data", "loss_fn", "optimizer", "scheduler")
"""Sections of one object with a name and settings."""
_TRAINING = {field.name for field in dataclasses.fields(DistributedTrainingConfig)}

Values = dict[str, Any]
Overrides = Sequence[str] | Mapping[str, Any]


def words_of(overrides: Overrides) -> list[str]:
    """Return overrides as a list of "name=value"; raise a ConfigError for a single string."""
    if isinstance(overrides, Mapping):
        return [f"{name}={json.dumps(value)}" for name, value in overrides.items()]
    if isinstance(overrides, str):
        raise ConfigError(f"overrides are a list, such as [{overrides!r}], or a dictionary; got {overrides!r}.")
    return list(overrides)


def with_names(values: Values) -> Values:
    """Return settings in which sections that are only a name become {"name": ...}."""
    return {
        name: {"name": value} if name in NAMED and isinstance(value, str) else value for name, value in values.items()
    }


def check_section(owner: str, section: str, *more: str) -> None:
    """Raise a ConfigError, with the nearest name, unless a section exists or is one of `more`."""
    if section in _TRAINING:
        raise ConfigError(f"{owner} has no section '{section}'. Did you mean 'training.{section}'?")
    if section not in SECTIONS:
        raise unknown_name(owner, section, [*SECTIONS, *more], "section")
