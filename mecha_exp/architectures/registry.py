"""The known model configs: the built-in ones, and those a user registers."""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from mecha_exp.architectures.config import ModelConfig
from mecha_exp.architectures.schema import from_yaml
from mecha_exp.errors import ConfigError, did_you_mean

_REGISTERED: dict[str, ModelConfig] = {}


def register(config: ModelConfig) -> ModelConfig:
    """Make a config known by its identifier, for `resolve` and for detection.

    Raises:
        ConfigError: another config has that identifier.
    """
    if config.identifier in _builtin() or _REGISTERED.get(config.identifier, config) is not config:
        raise ConfigError(
            f"there is a model config {config.identifier!r} already. Name this one differently."
        )
    _REGISTERED[config.identifier] = config
    return config


def resolve(identifier: str) -> ModelConfig:
    """The config of that identifier; ConfigError where there is none."""
    if identifier in _REGISTERED:
        return _REGISTERED[identifier]
    try:
        return _builtin()[identifier]()
    except KeyError:
        known = [*_REGISTERED, *_builtin()]
        raise ConfigError(
            f"unknown model config {identifier!r}.{did_you_mean(identifier, known)} "
            "'python -m mecha_exp info' lists them."
        ) from None


def get_all() -> list[ModelConfig]:
    """Every known config, by identifier."""
    known = {**{name: load() for name, load in _builtin().items()}, **_REGISTERED}
    return [known[name] for name in sorted(known)]


@cache
def _builtin() -> dict[str, Callable[[], ModelConfig]]:
    """A loader for each built-in config: its file is named by its identifier and read when it is needed."""
    folder = importlib.resources.files("mecha_exp.model_configs")
    files = [Path(str(entry)) for entry in folder.iterdir() if entry.name.endswith(".yaml")]
    return {path.stem: cache(partial(_load, path)) for path in sorted(files)}


def _load(path: Path) -> ModelConfig:
    config = from_yaml(path.read_text(encoding="utf-8"), str(path))
    if config.identifier != path.stem:
        raise ConfigError(f"{path} has the identifier {config.identifier!r}: name the file by it.")
    return config
