"""From one model config to another, as a table: each key there is a view of keys here.

A view is a tensor renamed, its trailing dimensions of one added or left out, a range of its rows, its
transpose, or several tensors one below the other. Nothing is computed, so nothing is lost, and it streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mecha_exp.architectures.components import Component, names_of
from mecha_exp.architectures.config import DEFAULT_CONVENTION, ModelConfig
from mecha_exp.architectures.library.registry import get_all, resolve
from mecha_exp.architectures.lora import AdapterConfig
from mecha_exp.architectures.rules import Link
from mecha_exp.errors import CheckpointError, ConfigError, some

Shape = tuple[int, ...]
BLOCKS = "blocks"
"""The component of a config whose keys are the blocks of its architecture: one weight for each."""


@dataclass(frozen=True, slots=True)
class View:
    """What a key is made of.

    Attributes:
        sources: the keys that are stacked along the rows; usually one.
        index, of: the one source's `index`-th of `of` equal ranges of rows.
        transposed: whether its rows and columns change places.
        ndim: how many dimensions it has: trailing ones are added or left out. None: as many as the source.
    """

    sources: tuple[str, ...]
    index: int = 0
    of: int = 1
    transposed: bool = False
    ndim: int | None = None

    def shape(self, shapes: Mapping[str, Shape]) -> Shape:
        """Its shape, from those of its sources; CheckpointError where they do not fit."""
        first, *rest = (shapes[key] for key in self.sources)
        if any(shape[1:] != first[1:] or not shape for shape in rest):
            listed = ", ".join(f"{key} {list(shapes[key])}" for key in self.sources)
            raise CheckpointError(f"these do not fit below each other: {listed}.")
        if self.transposed and len(first) != 2:
            raise CheckpointError(f"{self.sources[0]} is to be transposed and has the shape {list(first)}.")
        if self.of > 1 and (not first or first[0] % self.of):
            raise CheckpointError(
                f"{self.sources[0]} of shape {list(first)} does not split into {self.of} equal parts."
            )
        rows = sum(shape[0] for shape in (first, *rest)) // self.of if first else 0
        shape = first[::-1] if self.transposed else (rows, *first[1:]) if first else first
        return self._with_ndim(shape)

    def _with_ndim(self, shape: Shape) -> Shape:
        wanted = len(shape) if self.ndim is None else self.ndim
        if any(size != 1 for size in shape[wanted:]):
            raise CheckpointError(
                f"{self.sources[0]} of shape {list(shape)} cannot have {wanted} dimensions."
            )
        return shape[:wanted] + (1,) * (wanted - len(shape))


@dataclass(frozen=True)
class Views:
    """A conversion: the views of the target's keys, and what has no place there.

    Attributes:
        by_key: the view of each key of the target that the other config has something for.
        lost: keys of the other config that no view has.
    """

    by_key: Mapping[str, View]
    lost: tuple[str, ...] = ()

    def named(self, names: Mapping[str, str]) -> Views:
        """The same of a file that calls some keys otherwise: its names by the config's."""
        return Views(
            {
                key: replace(view, sources=tuple(names.get(source, source) for source in view.sources))
                for key, view in self.by_key.items()
            },
            tuple(names.get(key, key) for key in self.lost),
        )


def views(
    source: ModelConfig | str, target: ModelConfig | str, convention: str = DEFAULT_CONVENTION
) -> Views:
    """How a model of the config `source` is one of the config `target`.

    Components of the same name become each other, those that only one of them has are left out. A config of
    blocks gives each key of its architecture the value of its block, in the given convention.

    Raises:
        ConfigError: they have no component in common, no rules lead from the one's names to the other's, or a
            component is another one in spite of its name.
    """
    source = resolve(source) if isinstance(source, str) else source
    target = resolve(target) if isinstance(target, str) else target
    try:
        return _views(source, target, convention)
    except _NoConversion as error:
        reachable = targets_of(source)
        hint = f" It can become {some(reachable)}." if reachable else ""
        raise ConfigError(
            f"there is no conversion from {source.identifier} to {target.identifier}: {error}.{hint}"
        ) from None


class _NoConversion(Exception):
    """Why one config cannot become the other."""


def _views(source: ModelConfig, target: ModelConfig, convention: str) -> Views:
    if isinstance(source, AdapterConfig) or isinstance(target, AdapterConfig):
        raise _NoConversion("a LoRA is a difference to a model, computed when it is merged: see docs/lora.md")
    if [part.name for part in source.parts] == [BLOCKS]:
        return _views_of_blocks(source, target, convention)
    ours = {part.name: part for part in source.parts}
    shared = [(ours[part.name], part) for part in target.parts if part.name in ours]
    found: dict[str, View] = {}
    for here, there in shared:
        found |= _views_of_part(source, here, target, there)
    if not found:
        raise _NoConversion("they have no component in common")
    _check_shapes(source, target, found)
    used = {name for view in found.values() for name in view.sources}
    return Views(found, tuple(key for key in source.keys() if key not in used))


def targets_of(source: ModelConfig) -> list[str]:
    """The identifiers of the configs that a model of this config can be converted into."""
    if isinstance(source, AdapterConfig):
        return [source.base.identifier, *targets_of(source.base)]
    found = []
    for config in get_all():
        try:
            if config.identifier != source.identifier and _views(source, config, DEFAULT_CONVENTION).by_key:
                found.append(config.identifier)
        except _NoConversion:
            continue
    return found


def _views_of_part(
    source: ModelConfig, here: Component, target: ModelConfig, there: Component
) -> dict[str, View]:
    ours, theirs = names_of(here, source.sizes), names_of(there, target.sizes)
    infos = target.keys()
    stacks: dict[str, list[Link]] = {}
    for link in _links(source, target, here, there, ours, theirs):
        if link.here in ours and link.there in theirs:
            stacks.setdefault(theirs[link.there], []).append(link)
    found: dict[str, View] = {}
    for key, links in stacks.items():
        links.sort(key=lambda link: link.index)
        first = links[0]
        whole = len(links) == first.of and first.of > 1  # all of its parts, one below the other
        found[key] = View(
            tuple(ours[link.here] for link in links),
            index=0 if whole else first.index,
            of=1 if whole else first.of,
            transposed=first.transposed,
            ndim=len(infos[key].shape),
        )
    return found


def _links(
    source: ModelConfig,
    target: ModelConfig,
    here: Component,
    there: Component,
    ours: Iterable[str],
    theirs: Iterable[str],
) -> list[Link]:
    """From names here to names there; the rules of a conversion are written for one way and hold for both."""
    if here.layout is there.layout:
        return [Link(name, name) for name in ours]
    one, other = here.layout, there.layout
    if one is not None and other is not None and other.name in one.conversions:
        return one.conversions[other.name].links(ours, here.all_sizes(source.sizes))
    if one is not None and other is not None and one.name in other.conversions:
        back = other.conversions[one.name].links(theirs, there.all_sizes(target.sizes))
        return [replace(link, here=link.there, there=link.here) for link in back]
    raise _NoConversion(f"no rules lead from the names of the one's {here.name} to those of the other's")


def _check_shapes(source: ModelConfig, target: ModelConfig, found: Mapping[str, View]) -> None:
    if source.sizes or target.sizes:
        return  # families: the sizes are the file's
    shapes = {key: info.shape for key, info in source.keys().items()}
    for key, view in found.items():
        given, wanted = view.shape(shapes), target.keys()[key].shape
        if given != wanted:
            raise _NoConversion(
                f"their {target.component_of(key)} differ, as in {key}: {list(given)} in the one and "
                f"{list(wanted)} in the other"
            )


def _views_of_blocks(source: ModelConfig, target: ModelConfig, convention: str) -> Views:
    blocks = source.keys()
    if source.architecture != target.architecture:
        raise _NoConversion(
            f"these are blocks of {source.architecture}, while {target.architecture} has "
            f"{some(target.blocks(convention), 30)}"
        )
    by_key = {key: target.block_of(key, convention) for key in target.keys()}
    return Views({key: View((block,)) for key, block in by_key.items() if block in blocks})


def viewed(view: View, values: Sequence[Any]) -> Any:
    """What a view makes of the values of its sources; a number stays what it is."""
    if not isinstance(values[0], torch.Tensor):
        return values[0]
    joined = values[0] if len(values) == 1 else torch.cat(list(values))
    if view.of > 1:
        joined = joined.chunk(view.of)[view.index]
    if view.transposed:
        joined = joined.T
    shapes = {key: tuple(value.shape) for key, value in zip(view.sources, values, strict=True)}
    return joined.reshape(view.shape(shapes))
