"""Register models by name, for settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import nn

from cyxtrain.config.settings import make, names_checked, unknown_name
from cyxtrain.errors import ConfigError

_Maker = TypeVar("_Maker", bound=Callable[..., nn.Module])
_MODELS: dict[str, Callable[..., nn.Module]] = {}


class ModelMaker:
    """Creates models of one name by a class or function."""

    def __init__(self, name: str, make: Callable[..., nn.Module]) -> None:
        self.name = name
        self.make = make

    def _takes_config(self) -> bool:
        try:
            return next(iter(inspect.signature(self.make).parameters), None) == "config"
        except ValueError:  # some C functions have no signature
            return False

    def __call__(self, config: Mapping[str, Any] | None = None, /, **settings: Any) -> nn.Module:
        """Return a model.

        Args:
            config: Settings with a section `model`, such as `Config.from_file(...)`, or this section itself; its "name"
                is ignored.
            **settings: Single settings, which take precedence.

        Raises:
            ConfigError: A setting is unknown, with the nearest one, missing or invalid.
        """
        owner = f"the model '{self.name}'"
        if config is None:
            config = {}
        if not isinstance(config, Mapping):
            raise ConfigError(f"{owner} takes a Config or settings by name, got {config!r}.")
        if self._takes_config():
            model = make(owner, self.make, settings, config)
        else:
            section = config.get("model", config)
            if not isinstance(section, Mapping):
                raise ConfigError(f"the section 'model' must have settings by name, got {section!r}.")
            given = {key: value for key, value in section.items() if key != "name"}
            model = make(owner, self.make, {**given, **settings})
        if not isinstance(model, nn.Module):
            raise ConfigError(f"{owner} must be a torch.nn.Module, but {self.make!r} returned {type(model).__name__}.")
        return model


@names_checked
def register_model(name: str) -> Callable[[_Maker], _Maker]:
    """Register a class, or a function that returns a model, by name: `@register_model("mlp")`.

    Its keyword arguments are the settings of the section `model`; if its first argument is called `config`, it gets the
    whole config.

    Args:
        name: Unique; the same module may register it again, as a notebook's cell does.

    Raises:
        ConfigError: Another module has registered that name.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(f'register_model takes a name, as in @cx.register_model("mlp"), got {name!r}.')

    def register(make: _Maker) -> _Maker:
        there = _MODELS.get(name)
        if there is not None and there.__module__ != make.__module__:
            raise ConfigError(f"the model '{name}' is already {there!r}: register {make!r} under a different name.")
        _MODELS[name] = make
        return make

    return register


@names_checked
def get_model(name: str) -> ModelMaker:
    """Return a function that creates a model: `get_model("mlp")(config)` or `get_model("mlp")(inputs=64, outputs=10)`.

    Args:
        name: One of `list_models()`.

    Raises:
        ConfigError: No model has that name, with the nearest name.
    """
    if name not in _MODELS:
        raise unknown_name("cyxtrain", str(name), list_models(), "model")
    return ModelMaker(name, _MODELS[name])


def list_models() -> list[str]:
    """Return the names of all models, sorted."""
    return sorted(_MODELS)
