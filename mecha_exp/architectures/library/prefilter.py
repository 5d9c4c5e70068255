"""What tells at a glance that a file is not of a config, so that the config need not be read.

Reading every built-in config takes 0.1 s, as long as a small merge, and a file is of one or two of them.
Their outlines lie in the user's cache folder, under the hash of the configs' texts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from mecha_exp.architectures.components import Beginnings
from mecha_exp.architectures.config import ModelConfig
from mecha_exp.architectures.keys import HasShape
from mecha_exp.architectures.lora import AdapterConfig
from mecha_exp.system.cache import cache_folder, read_checksummed, write_checksummed

ENOUGH = 0.8
"""The share of a component's keys that a file must have for it to be that component with keys missing."""

FORMAT = 1
"""Raised when outlines change."""


class Outline(NamedTuple):
    """What tells that a file is not of a config.

    Attributes:
        parts: what the components begin with that make a model one of this config.
        prefix: of the modules of LoRA files; None for models.
    """

    parts: Sequence[Beginnings]
    prefix: str | None = None


Outlines: TypeAlias = Mapping[str, Outline]
"""By identifier."""


def outline_of(config: ModelConfig) -> Outline:
    """That of a config."""
    if isinstance(config, AdapterConfig):
        return Outline((), config.prefix)
    return Outline([part.beginnings for part in config.parts if part.optional is not True])


def may_match(keys: Mapping[str, HasShape], outline: Outline) -> bool:
    """Whether a file may be of the config with that outline."""
    if outline.prefix is not None:
        return is_adapter(keys, outline.prefix)
    return any(starts_like(keys, beginnings) for beginnings in outline.parts)


def is_adapter(keys: Iterable[str], prefix: str) -> bool:
    """Whether most keys are of modules with that prefix."""
    ours = [key.startswith(f"{prefix}_") for key in keys]
    return 2 * sum(ours) > len(ours)


def starts_like(keys: Mapping[str, HasShape], beginnings: Beginnings) -> bool:
    """Whether the file has much of what a component begins with: enough to look closer, cheaply."""
    may_lack = len(beginnings) - ENOUGH / 2 * len(beginnings)
    lacking = 0
    for dimensions, names in beginnings:
        name = first_in(keys, names)
        lacking += name is None
        if lacking > may_lack or (name is not None and len(keys[name].shape) != dimensions):
            return False
    return True


def first_in(keys: Mapping[str, HasShape], names: Iterable[str]) -> str | None:
    """The first of the names that the file has, if it has one."""
    return next((name for name in names if name in keys), None)


def outlines_of(texts: Iterable[Path], configs: Callable[[], Iterable[ModelConfig]]) -> Outlines:
    """The outlines of configs, which are read only where none are kept for the same texts.

    Args:
        texts: the files that the configs are made of.
        configs: reads them.
    """
    folder = cache_folder()
    content = [FORMAT, *((path.name, path.read_text(encoding="utf-8")) for path in sorted(texts))]
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    path = folder / f"configs-{digest[:32]}.json" if folder else None
    kept = read_checksummed(path) if path else None
    if kept is not None:
        return {name: Outline(*outline) for name, outline in json.loads(kept).items()}
    outlines = {config.identifier: outline_of(config) for config in configs()}
    if path:
        write_checksummed(path, json.dumps(outlines).encode())
    return outlines
