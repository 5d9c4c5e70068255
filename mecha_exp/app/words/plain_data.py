"""Parts of a configuration as plain data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from omegaconf import MISSING, OmegaConf

REFERENCE = re.compile(r"\$\{([\w.]+)\}")
"""A reference to another key, as written."""


def resolved(part: Any) -> Any:
    """A part of a configuration as dictionaries and lists, references resolved; other values as they are."""
    return OmegaConf.to_container(part, resolve=True) if OmegaConf.is_config(part) else part


def as_written(part: Any) -> Any:
    """A part of a configuration as dictionaries and lists, with references such as `${alpha}` as texts."""
    return OmegaConf.to_container(part, resolve=False) if OmegaConf.is_config(part) else part


def filled(part: Any, whole: Any) -> Any:
    """A copy of a part of plain data with the values that references such as `${alpha}` stand for.

    Args:
        part: as `as_written` gives it.
        whole: all of the data, which references refer to.

    Raises:
        LookupError: a reference of another form, or one to nothing, which OmegaConf reads or refuses.
    """
    if isinstance(part, dict):
        return {key: filled(value, whole) for key, value in part.items()}
    if isinstance(part, list):
        return [filled(value, whole) for value in part]
    if not isinstance(part, str) or ("${" not in part and part != MISSING):
        return part
    reference = REFERENCE.fullmatch(part)
    if reference is None:
        raise LookupError(part)
    value = whole
    for word in reference[1].split("."):
        value = entry(filled(value, whole) if isinstance(value, str) else value, word)
    return filled(value, whole)


def entry(part: Any, word: str) -> Any:
    """The entry of a dictionary or a list by its name or its number; LookupError where there is none."""
    if isinstance(part, Mapping):
        return part[word]
    if isinstance(part, list) and word.isdecimal():
        return part[int(word)]
    raise LookupError(word)
