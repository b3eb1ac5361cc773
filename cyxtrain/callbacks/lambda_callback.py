"""LambdaCallback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cyxtrain.callbacks.callback import Callback
from cyxtrain.config.settings import unknown_name
from cyxtrain.errors import ConfigError


class LambdaCallback(Callback):
    """A callback made of functions; Keras's arguments.

    Args:
        **hooks: A function for each hook, by the hook's name and with its arguments.

    Raises:
        ConfigError: There is no such hook, or a value is not a function.
    """

    def __init__(self, **hooks: Callable[..., Any]) -> None:
        known = [name for name in dir(Callback) if name.startswith("on_")]
        for name, function in hooks.items():
            if name not in known:
                raise unknown_name("LambdaCallback", name, known, "hook named")
            if not callable(function):
                raise ConfigError(f"LambdaCallback.{name} must be a function, got {function!r}.")
            setattr(self, name, function)
