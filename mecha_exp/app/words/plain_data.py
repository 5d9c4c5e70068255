"""Parts of a configuration as plain data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

REFERENCE = re.compile(r"\$\{([\w.]+)\}")
"""A reference to another key, as written."""


def resolved(part: Any) -> Any:
    """A part of a configuration as dictionaries and lists, references resolved; other values as they are."""
    return OmegaConf.to_container(part, resolve=True) if OmegaConf.is_config(part) else part


def as_written(part: Any) -> Any:
    """A part of a configuration as dictionaries and lists, with references such as `${alpha}` as texts."""
    return OmegaConf.to_container(part, resolve=False) if OmegaConf.is_config(part) else part


def entry(part: Any, word: str) -> Any:
    """The entry of a dictionary or a list by its name or its number; LookupError where there is none."""
    if isinstance(part, Mapping):
        return part[word]
    if isinstance(part, list) and word.isdecimal():
        return part[int(word)]
    raise LookupError(word)
