"""Settings of a YAML file: `config.training.epochs`. The YAML libraries are imported only when they are used."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from cyxtrain.config.settings import names_checked, nearest
from cyxtrain.environment import process_env
from cyxtrain.errors import ConfigError
from cyxtrain.experiment.by_name import Overrides, with_names


@names_checked
class Config(Mapping[str, Any]):
    """Settings by name, with dots or brackets: `config.training.epochs`, `config["training"]["epochs"]`.

    Each section is a `Config` too; lists are lists. In a file a section that is only a name (`optimizer: adam`) means
    `{"name": "adam"}`.

    Args:
        values: A dictionary of settings, possibly nested; it is copied unchanged.

    Raises:
        ConfigError: `values` is not a dictionary.
    """

    _values: dict[str, Any]

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        if values is not None and not isinstance(values, Mapping):
            raise ConfigError(f"Config takes settings by name, such as a dictionary, got {values!r}.")
        # Our own __setattr__ sets a setting.
        object.__setattr__(self, "_values", _copied(values or {}))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], overrides: Overrides = ()) -> Config:
        """Return the settings of a YAML file.

        `_base_: base.yaml` (or a list of files, relative to this one) inherits settings, and this file overrides them
        one by one; a section with another `name` replaces the whole section. `${DATA_DIR}` is an environment variable,
        `${DATA_DIR:./data}` has a default, and `${training.seed}` is another setting. `1e-3` is a number.

        Args:
            path: Of the file, or its URL.
            overrides: Settings that take precedence, such as ["training.epochs=3", "model.hidden=[64, 64]"] or
                {"scheduler": None}; the value after "=" is YAML.

        Raises:
            ConfigError: The file does not exist or is not valid YAML; bases are circular; a variable is not set; a
                section is unknown, with the nearest name.
            CheckpointError: A store does not answer.
        """
        from cyxtrain.experiment.reading import merged, read_file, resolved

        return cls(resolved(merged(read_file(path), overrides), process_env.to_pass_on(), str(path)))

    def with_overrides(self, overrides: Overrides) -> Config:
        """Return a copy with other settings: `config.with_overrides(["training.epochs=3"])`.

        Args:
            overrides: As in `from_file`.

        Raises:
            ConfigError: As in `from_file`.
        """
        from cyxtrain.experiment.reading import literal, merged, resolved

        values = merged(with_names(literal(self.to_dict())), overrides)
        return Config(resolved(values, process_env.to_pass_on(), "the config"))

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of all settings as dictionaries."""
        return dict(_copied(self._values))

    def to_yaml(self) -> str:
        """Return the settings as YAML."""
        from cyxtrain.experiment.reading import to_yaml

        return to_yaml(self._values)

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        if not isinstance(value, dict):
            return value
        section = Config()
        object.__setattr__(section, "_values", value)  # shared: setting a value there sets it here
        return section

    def __setitem__(self, name: str, value: Any) -> None:
        self._values[name] = _copied(value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self._values:
            raise AttributeError(f"the config has no {name!r}. {nearest(name, list(self._values))}")
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in dir(type(self)) or name == "_values":
            raise AttributeError(f"{name!r} is a method of Config: write config[{name!r}] = ...")
        self[name] = value

    def __delitem__(self, name: str) -> None:
        del self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._values]

    def __repr__(self) -> str:
        return f"Config({self._values!r})"

    def __getstate__(self) -> dict[str, Any]:
        return self._values

    def __setstate__(self, values: dict[str, Any]) -> None:
        object.__setattr__(self, "_values", values)


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _copied(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copied(each) for each in value]
    return value
