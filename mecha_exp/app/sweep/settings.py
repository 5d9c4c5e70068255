"""Checks of settings that several modes of `sweep` have."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from mecha_exp.app.config.jobs import NUMBERED
from mecha_exp.app.words.plain_data import as_written
from mecha_exp.errors import ConfigError
from mecha_exp.numbers import is_whole


def checked_count(key: str, value: Any, least: int = 1) -> int:
    """A whole number.

    Raises:
        ConfigError: the value of `key` is not a whole number, or is less than `least`.
    """
    if not is_whole(value, least):
        raise ConfigError(f"{key}={value}: expected a whole number, {least} or more.")
    return value


def require_numbered_folders(config: DictConfig, who: str) -> None:
    """Check that the folder of each point is its number.

    Args:
        config: of a point.
        who: finds points by their folders; for the message.

    Raises:
        ConfigError: hydra.sweep.subdir names another folder.
    """
    if as_written(config.hydra.sweep)["subdir"] != NUMBERED:
        raise ConfigError(f"hydra.sweep.subdir: {who} finds its points by their numbers. Leave it out.")
