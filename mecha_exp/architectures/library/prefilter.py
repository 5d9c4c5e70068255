"""Outlines of configs: a cheap test that rules out most configs of a file without reading them.

Reading every built-in config takes 0.1 s, as long as a small merge, and a file fits one or two of them. The
outlines are in the user's cache folder, under a hash of the configs' texts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from mecha_exp.architectures.components import Beginnings
from mecha_exp.architectures.config import ModelConfig
from mecha_exp.architectures.keys import HasShape
from mecha_exp.architectures.lora import AdapterConfig, is_key_of
from mecha_exp.system.cache import made_of

ENOUGH = 0.8
"""The share of a component's keys above which a file has the component, with keys missing."""

FORMAT = 2
"""Raised when outlines change."""


class Outline(NamedTuple):
    """The keys that a file of a config begins its components with.

    Attributes:
        parts: the beginnings of every component that is not optional.
        modules: the beginnings of modules in LoRA files; none for models.
    """

    parts: Sequence[Beginnings]
    modules: Sequence[str] = ()


Outlines: TypeAlias = Mapping[str, Outline]
"""Outlines by the identifier of the config."""


def outline_of(config: ModelConfig) -> Outline:
    """The outline of a config."""
    if isinstance(config, AdapterConfig):
        return Outline((), config.beginnings)
    return Outline([part.beginnings for part in config.parts if part.optional is not True])


def plausible(keys: Mapping[str, HasShape], outlines: Outlines) -> list[str]:
    """The identifiers of the configs that a file may fit, sorted."""
    modules = tuple({beginning for outline in outlines.values() for beginning in outline.modules})
    may_be_adapter = 2 * len(_beginning_so(keys, modules)) > len(keys)
    return [
        name
        for name, outline in sorted(outlines.items())
        if (may_be_adapter or not outline.modules) and may_match(keys, outline)
    ]


def may_match(keys: Mapping[str, HasShape], outline: Outline) -> bool:
    """Whether a file may fit the config with this outline."""
    if outline.modules:
        return is_adapter(keys, outline.modules)
    return any(starts_like(keys, beginnings) for beginnings in outline.parts)


def is_adapter(keys: Collection[str], beginnings: Sequence[str]) -> bool:
    """Whether most keys belong to modules whose names begin so."""
    likely = _beginning_so(keys, tuple(beginnings))
    matches = (any(is_key_of(beginning, key) for beginning in beginnings) for key in likely)
    return 2 * len(likely) > len(keys) and 2 * sum(matches) > len(keys)


def _beginning_so(keys: Iterable[str], beginnings: tuple[str, ...]) -> list[str]:
    """The keys with one of some beginnings; a model of a hundred thousand keys is looked through at once."""
    return [key for key in keys if key.startswith(beginnings)]


def starts_like(keys: Mapping[str, HasShape], beginnings: Beginnings) -> bool:
    """Whether a file has enough of a component's first keys to be compared in full."""
    allowed = len(beginnings) - ENOUGH / 2 * len(beginnings)
    missing = 0
    for dimensions, names in beginnings:
        name = first_in(keys, names)
        missing += name is None
        if missing > allowed or (name is not None and len(keys[name].shape) != dimensions):
            return False
    return True


def first_in(keys: Mapping[str, HasShape], names: Iterable[str]) -> str | None:
    """The first of the names that is a key of the file, or None."""
    return next((name for name in names if name in keys), None)


def outlines_of(texts: Iterable[Path], configs: Callable[[], Iterable[ModelConfig]]) -> Outlines:
    """The outlines of configs, from the cache if it has those of the same texts.

    Args:
        texts: the files of the configs and layouts.
        configs: reads all configs.
    """
    made = made_of(
        texts, f"configs-{FORMAT}", lambda: {each.identifier: outline_of(each) for each in configs()}
    )
    return {name: Outline(*outline) for name, outline in made.items()}
