"""What an experiment's sections are called, and overrides as words. It reads no YAML: OmegaConf takes time to load."""

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
    "optimizer",
    "scheduler",
    "metrics",
    "callbacks",
    "training",
    "distributed",
)
NAMED = ("model", "data", "loss_fn", "optimizer", "scheduler")
"""Sections of one thing that has a name, and settings of its own."""
_TRAINING = {field.name for field in dataclasses.fields(DistributedTrainingConfig)}

Values = dict[str, Any]
Overrides = Sequence[str] | Mapping[str, Any]


def words_of(overrides: Overrides) -> list[str]:
    """Returns overrides as words, also those of a dictionary.

    Raises:
        ConfigError: It is one word, not a list of them.
    """
    if isinstance(overrides, Mapping):
        return [f"{name}={json.dumps(value)}" for name, value in overrides.items()]
    if isinstance(overrides, str):
        raise ConfigError(f"overrides are a list, such as [{overrides!r}], or a dictionary; got {overrides!r}.")
    return list(overrides)


def with_names(values: Values) -> Values:
    """Returns settings in which a section that is only a name has it as its setting."""
    return {
        name: {"name": value} if name in NAMED and isinstance(value, str) else value for name, value in values.items()
    }


def check_section(owner: str, section: str, *more: str) -> None:
    """Refuses a section that does not exist.

    Args:
        owner: What has it, for messages.
        section: Its name.
        *more: What else may stand beside sections.

    Raises:
        ConfigError: With the nearest one that does.
    """
    if section in _TRAINING:
        raise ConfigError(f"{owner} has no section '{section}'. Did you mean 'training.{section}'?")
    if section not in SECTIONS:
        raise unknown_name(owner, section, [*SECTIONS, *more], "section")
