"""Parts of a configuration as plain data."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf


def resolved(part: Any) -> Any:
    """A part of a configuration as dictionaries and lists, references resolved; other values as they are."""
    return OmegaConf.to_container(part, resolve=True) if OmegaConf.is_config(part) else part


def as_written(part: Any) -> Any:
    """A part of a configuration as dictionaries and lists, with references such as `${alpha}` as texts."""
    return OmegaConf.to_container(part, resolve=False) if OmegaConf.is_config(part) else part
