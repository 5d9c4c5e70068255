"""Conversions from one model config to another as tables: each key of the target is a view of source keys.

A view renames a tensor, adds or drops trailing dimensions of size one, takes a range of rows, exchanges their
halves, transposes, or stacks several tensors along the rows. Nothing is computed, so it is exact, and it
streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mecha_exp.architectures.components import Component, names_of
from mecha_exp.architectures.config import DEFAULT_CONVENTION, ModelConfig
from mecha_exp.architectures.keys import KeyInfo
from mecha_exp.architectures.library.detection import sized_for
from mecha_exp.architectures.library.registry import get_all, resolve
from mecha_exp.architectures.lora import AdapterConfig
from mecha_exp.architectures.rules import SAME, Link, Way
from mecha_exp.errors import CheckpointError, ConfigError, some

Shape = tuple[int, ...]
BLOCKS = "blocks"
"""The component of a config whose keys are blocks: one weight for each block of its architecture."""


@dataclass(frozen=True, slots=True)
class View:
    """The tensors that a key is made of, and how.

    Attributes:
        sources: the keys of the tensors, stacked along the rows; usually one.
        way: the rows that are taken of a single source, and whether they change places.
        ndim: the number of dimensions: trailing ones are added or dropped. None: that of the source.
    """

    sources: tuple[str, ...]
    way: Way = SAME
    ndim: int | None = None

    @property
    def transposed(self) -> bool:
        """Whether rows and columns are exchanged."""
        return self.way.transposed

    def ranges(self) -> list[tuple[int, int, int]]:
        """The rows of each source, in order: `count` of `of` equal ranges from the `index`-th on."""
        return [(1, 1, 2), (0, 1, 2)] if self.way.swapped else [(self.way.index, self.way.count, self.way.of)]

    def shape(self, shapes: Mapping[str, Shape]) -> Shape:
        """The shape of the view, from its sources' shapes; CheckpointError where they do not fit."""
        first, *rest = (shapes[key] for key in self.sources)
        if any(shape[1:] != first[1:] or not shape for shape in rest):
            listed = ", ".join(f"{key} {list(shapes[key])}" for key in self.sources)
            raise CheckpointError(f"these do not fit below each other: {listed}.")
        if self.transposed and len(first) != 2:
            raise CheckpointError(f"{self.sources[0]} is to be transposed and has the shape {list(first)}.")
        of = 2 if self.way.swapped else self.way.of
        if of > 1 and (not first or first[0] % of):
            raise CheckpointError(
                f"{self.sources[0]} of shape {list(first)} does not split into {of} equal parts."
            )
        rows = sum(shape[0] for shape in (first, *rest)) * self.way.count // self.way.of if first else 0
        shape = first[::-1] if self.transposed else (rows, *first[1:]) if first else first
        return self._with_ndim(shape)

    def _with_ndim(self, shape: Shape) -> Shape:
        ndim = len(shape) if self.ndim is None else self.ndim
        if any(size != 1 for size in shape[ndim:]):
            raise CheckpointError(f"{self.sources[0]} of shape {list(shape)} cannot have {ndim} dimensions.")
        return shape[:ndim] + (1,) * (ndim - len(shape))


@dataclass(frozen=True)
class Views:
    """A conversion: the views of the target's keys, and the source keys that it drops.

    Attributes:
        by_key: the view of each key of the target that the source can fill.
        lost: source keys that no view reads.
    """

    by_key: Mapping[str, View]
    lost: tuple[str, ...] = ()

    def named(self, names: Mapping[str, str]) -> Views:
        """The conversion for a file that renames keys; `names` are the file's, by the config's."""
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
    """The conversion of models of the config `source` to the config `target`.

    Components of the same name are converted, those of only one config are left out. A config of blocks gives
    each key of its architecture the value of its block in the convention.

    Raises:
        ConfigError: they share no component, no rules lead from one layout to the other, or components of the
            same name differ in shapes.
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


def is_convertible(source: ModelConfig, target: ModelConfig) -> bool:
    """Whether models of a config have a conversion to another."""
    try:
        return bool(_views(source, target, DEFAULT_CONVENTION).by_key)
    except _NoConversion:
        return False


def member_of(family: ModelConfig, model: ModelConfig) -> ModelConfig:
    """The member of a family that a model of another config becomes; other configs stay as they are."""
    if not family.sizes or family.identifier == model.identifier:
        return family.sized_like(model)
    shapes = {key: info.shape for key, info in model.keys().items()}
    family = family.sized_like(model)
    try:
        views = _views_of_parts(model, family)
        return sized_for({key: KeyInfo(view.shape(shapes), "") for key, view in views.items()}, family)
    except (_NoConversion, CheckpointError):  # no rules, or tensors that do not split
        return family


class _NoConversion(Exception):
    """The reason why one config cannot be converted to another."""


def _views(source: ModelConfig, target: ModelConfig, convention: str) -> Views:
    if isinstance(source, AdapterConfig) or isinstance(target, AdapterConfig):
        raise _NoConversion("a LoRA is a difference to a model, computed when it is merged: see docs/lora.md")
    if [part.name for part in source.parts] == [BLOCKS]:
        return _views_of_blocks(source, target, convention)
    by_key = _views_of_parts(source, target.sized_like(source))
    _check_shapes(source, member_of(target, source), by_key)
    used = {name for view in by_key.values() for name in view.sources}
    return Views(by_key, tuple(key for key in source.keys() if key not in used))


def _views_of_parts(source: ModelConfig, target: ModelConfig) -> dict[str, View]:
    """The views of the components that both have, whatever their shapes."""
    ours = {part.name: part for part in source.parts}
    by_key: dict[str, View] = {}
    for part in target.parts:
        if part.name in ours:
            by_key |= _views_of_part(source, ours[part.name], target, part)
    if not by_key:
        raise _NoConversion("they have no component in common")
    return by_key


def targets_of(source: ModelConfig) -> list[str]:
    """The identifiers of the configs all of whose keys, but optional ones, a model of this config has."""
    if isinstance(source, AdapterConfig):
        return [source.base.identifier, *targets_of(source.base)]
    targets = []
    for config in get_all():
        try:
            views = _views(source, config, DEFAULT_CONVENTION).by_key
        except _NoConversion:
            continue
        is_whole = all(key in views for key, info in config.keys().items() if not info.optional)
        if config.identifier != source.identifier and is_whole:
            targets.append(config.identifier)
    return targets


def _views_of_part(
    source: ModelConfig, here: Component, target: ModelConfig, there: Component
) -> dict[str, View]:
    ours, theirs = names_of(here, source.sizes), names_of(there, target.sizes)
    infos = target.keys()
    stacks: dict[str, list[Link]] = {}
    for link in _links(source, target, here, there, ours, theirs):
        if link.here in ours and link.there in theirs:
            stacks.setdefault(theirs[link.there], []).append(link)
    by_key: dict[str, View] = {}
    for key, links in stacks.items():
        links.sort(key=lambda link: link.way.index)
        way = links[0].way
        if len(links) > 1 and sum(link.way.count for link in links) == way.of:
            way = SAME  # all of its parts, one below the other
        by_key[key] = View(tuple(ours[link.here] for link in links), way, len(infos[key].shape))
    return by_key


def _links(
    source: ModelConfig,
    target: ModelConfig,
    here: Component,
    there: Component,
    ours: Iterable[str],
    theirs: Iterable[str],
) -> list[Link]:
    """Links from names here to names there; rules are written for one direction and hold for both."""
    if here.layout is there.layout:
        return [Link(name, name, SAME) for name in ours]
    one, other = here.layout, there.layout
    if one is not None and other is not None and other.name in one.conversions:
        return one.conversions[other.name].links(ours, here.all_sizes(source.sizes))
    if one is not None and other is not None and one.name in other.conversions:
        back = other.conversions[one.name].links(theirs, there.all_sizes(target.sizes))
        return [replace(link, here=link.there, there=link.here) for link in back]
    raise _NoConversion(f"no rules lead from the names of the one's {here.name} to those of the other's")


def _check_shapes(source: ModelConfig, target: ModelConfig, by_key: Mapping[str, View]) -> None:
    shapes = {key: info.shape for key, info in source.keys().items()}
    for key, view in by_key.items():
        expected = target.keys()[key].shape
        try:
            shape = view.shape(shapes)
        except CheckpointError as error:
            raise _NoConversion(str(error).removesuffix(".")) from None
        if shape != expected:
            raise _NoConversion(
                f"their {target.component_of(key)} differ, as in {key}: {list(shape)} in the one and "
                f"{list(expected)} in the other"
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
    """Apply a view to the values of its sources; a number is returned unchanged."""
    if not isinstance(values[0], torch.Tensor):
        return values[0]
    joined = values[0] if len(values) == 1 else torch.cat(list(values))
    if view.way.swapped:
        joined = torch.cat(joined.chunk(2)[::-1])
    if view.way.of > 1:
        rows = joined.shape[0] // view.way.of
        joined = joined[view.way.index * rows : (view.way.index + view.way.count) * rows]
    if view.transposed:
        joined = joined.T
    shapes = {key: tuple(value.shape) for key, value in zip(view.sources, values, strict=True)}
    return joined.reshape(view.shape(shapes))
