"""Binds values by key to the models that they are used with, before a merge is planned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from mecha_exp.architectures import DEFAULT_CONVENTION, StructuralConfig, resolve
from mecha_exp.architectures.anatomy import Anatomy
from mecha_exp.checkpoint import dtype_name, torch_dtype
from mecha_exp.checkpoint.dtypes import floating_dtype
from mecha_exp.conversion.inference import ConfigInference
from mecha_exp.engine.planner.keys.dependence import reads_other_keys
from mecha_exp.errors import MechaError
from mecha_exp.graph.by_key import DEFAULT, BlockValue, ByKey, by_key, effective_values, table
from mecha_exp.graph.nodes import LiteralNode, MergeNode, ModelNode, Node, calls_of, models_of, walk
from mecha_exp.graph.rewrite import rewrite
from mecha_exp.method_api.parameters import ParameterSpec
from mecha_exp.method_api.views import opened_views
from mecha_exp.recipe.keys import with_names
from mecha_exp.sources.inputs import open_sources
from mecha_exp.sources.quantised.view import with_plain_keys
from mecha_exp.sources.source import Source
from mecha_exp.system.texts import csv_text

_Owner: TypeAlias = "str | tuple[Node, ...]"
"""The owner of values by key: the identifier of a model config, or models."""

MERGED_BY = "merged by"
"""The name of choices between recipes in tables of values by block."""

INPUT = "input"
"""The name for the dtype that a key has in the first input."""


def parse_output_dtype(value: Any) -> torch.dtype | ByKey | None:
    """The dtype of an output: one for all keys, or a mapping by component, block or pattern of keys.

    >>> parse_output_dtype({"vae": "float32", "default": "bf16"})("first_stage_model.x")

    Args:
        value: a dtype or its name; `input` or None for that of the first input; or a mapping of selectors
            (see `ByKey`) to these, whose `default` is `input`.

    Raises:
        ConfigError: an unknown name of a dtype.
        RecipeError: an invalid selector.
    """
    if not isinstance(value, Mapping):
        name = _dtype_word(value)
        return None if name == INPUT else torch_dtype(name)
    names = {str(selector): _dtype_word(dtype) for selector, dtype in value.items()}
    dtypes = by_key({DEFAULT: INPUT, **names})
    return dtypes if isinstance(dtypes, ByKey) else parse_output_dtype(dtypes)


def output_dtype_words(dtype: torch.dtype | ByKey | None) -> str:
    """An output's dtype as text; equal dtypes have equal texts."""
    if isinstance(dtype, ByKey):
        return ", ".join(f"{selector}: {name}" for selector, name in dtype.words)
    return dtype_name(dtype) if dtype else INPUT


def _dtype_word(value: Any) -> str:
    if value is None or value == INPUT:
        return INPUT
    return dtype_name(floating_dtype(value if isinstance(value, torch.dtype) else str(value)))


class Binder:
    """Binds the values by key of recipes: each to the keys of the models that are merged beside it."""

    def __init__(self, sources: Mapping[ModelNode, Source], configs: ConfigInference | None = None) -> None:
        self._models = sources
        self._sources: dict[Any, Source] = dict(sources)  # of models, and of views of them
        self._configs = configs or ConfigInference.over(sources)
        self._anatomies: dict[tuple[object, str], Anatomy] = {}

    def bind(self, roots: Sequence[Node], new: dict[Node, Node] | None = None) -> tuple[Node, ...]:
        """The graphs with every value bound; `new` is filled with the new node of each node."""
        if not any(map(is_by_key, walk(*roots))):
            return tuple(roots)
        self._see_views(roots)
        everything = self._owner_of(roots)
        return rewrite(roots, lambda node: self._bind_arguments(node, everything), new)

    def bind_beside(self, value: ByKey, roots: Sequence[Node]) -> ByKey:
        """A value bound to the models of recipes."""
        self._see_views(roots)
        return value.over(self._anatomy(self._owner_of(roots), value.convention))

    def _see_views(self, roots: Sequence[Node]) -> None:
        """Add the views of models: values beside them are by their keys, such as the new numbers of layers.

        Rows of tokens do not matter to them: where these are arranged, the model tells its config.
        """
        self._sources |= opened_views(roots, self._models, of_rows=False)

    def _bind_arguments(self, node: Node, everything: _Owner) -> Node:
        """A call whose values by key are bound to the models among its arguments, or else to `everything`."""
        if not isinstance(node, MergeNode) or not any(map(is_by_key, node.children)):
            return node
        beside = self._owner_of(node.children) or everything

        def bound(child: Node, spec: ParameterSpec) -> Node:
            if not isinstance(child, LiteralNode) or not isinstance(child.value, ByKey):
                return child
            if reads_other_keys(node) and spec.is_state_dict and not (child.config or spec.config):
                return child  # the method reads it at keys of its own choice
            owner = child.config or spec.config or beside
            return replace(child, value=child.value.over(self._anatomy(owner, child.value.convention)))

        def bound_argument(name: str, value: Node | tuple[Node, ...]) -> Node | tuple[Node, ...]:
            spec = node.method.signature[name]
            return tuple(bound(v, spec) for v in value) if isinstance(value, tuple) else bound(value, spec)

        arguments = tuple((name, bound_argument(name, value)) for name, value in node.arguments)
        return replace(node, arguments=arguments)

    def _owner_of(self, nodes: Sequence[Node]) -> _Owner:
        """The model config that nodes are converted to, or else the models that they read."""
        models: dict[Node, None] = {}
        stack = list(reversed(nodes))
        while stack:
            node = stack.pop()
            if node in self._sources and self._sources[node].is_adapter:
                continue  # its keys are those of its base
            if isinstance(node, ModelNode) or node in self._sources:
                models[node] = None
            elif isinstance(node, MergeNode) and node.method.reads is None:
                if (declared := self._declared(node)) is None:
                    stack.extend(reversed(node.children))
                elif not models:
                    return declared
        return tuple(models)

    def _declared(self, node: MergeNode) -> str | None:
        """The config that the result of a call declares; for an interface, that of the chosen method."""
        try:
            method = node.method if node.method.choose is None else self._configs.chosen(node)
        except MechaError:  # planning reports it
            return None
        return method.signature.returned.config

    def _anatomy(self, owner: _Owner, convention: str | None) -> Anatomy:
        owner_and_convention = (owner, convention or DEFAULT_CONVENTION)
        if owner_and_convention not in self._anatomies:
            self._anatomies[owner_and_convention] = self._make_anatomy(*owner_and_convention)
        return self._anatomies[owner_and_convention]

    def _make_anatomy(self, owner: _Owner, convention: str) -> Anatomy:
        infos: dict[str, Any] = {}
        if isinstance(owner, str):
            config = resolve(owner)
            infos |= config.keys()
        else:
            for source in (self._sources[model] for model in owner):
                for key in source.keys():
                    infos.setdefault(key, source.info(key))
            fits = self._configs.fits_of_keys(infos)
            config = fits[0].config if len(fits) == 1 else StructuralConfig(infos)
        config.blocks(convention)  # raises for a convention that the config does not have
        return Anatomy(infos, config, convention)


def is_by_key(node: Node) -> bool:
    """Whether a node is a value by key."""
    return isinstance(node, LiteralNode) and isinstance(node.value, ByKey)


def effective_values_in(recipe: Node, folders: Sequence[Path]) -> dict[str, list[BlockValue]]:
    """Open the models of a recipe for its `effective_values_of`; empty if it has no value by key.

    Raises:
        CheckpointError: a model cannot be opened.
    """
    if not any(map(is_by_key, walk(recipe))):
        return {}
    with open_sources(models_of(recipe), folders) as sources:
        plain = {model: with_plain_keys(source) for model, source in sources.items()}
        (bound,) = Binder(plain).bind([recipe])
        return effective_values_of(bound)


def values_table(values: Mapping[str, Sequence[BlockValue]]) -> str:
    """Effective values as CSV: a line for each hyperparameter and block."""
    rows = [
        [name, block.component, block.block, block.keys, " ".join(map(str, block.values))]
        for name, blocks in values.items()
        for block in blocks
    ]
    return csv_text([["hyperparameter", "component", "block", "keys", "value"], *rows])


def effective_values_of(bound: Node) -> dict[str, list[BlockValue]]:
    """The values of each hyperparameter by key of a bound recipe, block by block.

    Their names are the method and the argument: `slerp.alpha`; different ones of several calls are numbered.
    Choices between recipes are named `MERGED_BY`, and have the method or the policy of each block.
    """
    by_name: dict[str, list[BlockValue]] = {}
    for name, value in _named_values(bound):
        values = effective_values(value)
        number = 1
        label = name
        while label in by_name and by_name[label] != values:
            number += 1
            label = f"{name} ({number})"
        by_name[label] = values
    return by_name


def choices_of(bound: Node) -> dict[str, int]:
    """How many keys each recipe of a bound choice by key has, by policy or method; empty without a choice."""
    counts: dict[str, int] = {}
    for call in calls_of(bound):
        if (choice := with_names(call)) is not None:
            for name, keys in table(choice):
                counts[str(name)] = counts.get(str(name), 0) + len(keys)
    return counts


def _named_values(recipe: Node) -> Iterator[tuple[str, ByKey]]:
    for call in calls_of(recipe):
        if (choice := with_names(call)) is not None:
            yield MERGED_BY, choice
            continue
        for name, child in call.named_children:
            if isinstance(child, LiteralNode) and isinstance(child.value, ByKey):
                yield f"{call.method.identifier}.{name}", child.value
