"""Binding values by key to the models that they are used with, before a merge is planned."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from mecha_exp.architectures import DEFAULT_CONVENTION, ModelConfig, candidates, resolve
from mecha_exp.architectures.anatomy import Anatomy
from mecha_exp.checkpoint import TensorInfo, dtype_name, parse_dtype, torch_dtype
from mecha_exp.engine.planner.keys.dependence import reads_other_keys
from mecha_exp.errors import MechaError
from mecha_exp.graph.by_key import DEFAULT, BlockValue, ByKey, by_key, effective_values
from mecha_exp.graph.nodes import LiteralNode, MergeNode, ModelNode, Node, models_of, walk
from mecha_exp.graph.rewrite import rewrite
from mecha_exp.method_api.parameters import ParameterSpec
from mecha_exp.sources.inputs import open_sources
from mecha_exp.sources.source import Source, infos_of

_Whose: TypeAlias = "str | tuple[ModelNode, ...]"
"""The name of a model config, or models."""


INPUT = "input"
"""The word for the dtype that a key has in the first input."""


def parse_output_dtype(value: Any) -> torch.dtype | ByKey | None:
    """The dtype of an output: one for all keys, or a mapping by component, block or pattern of keys.

    >>> parse_output_dtype({"vae": "float32", "default": "bf16"})("first_stage_model.x")

    Args:
        value: a dtype or its name; `input` or None for that of the first input; or a mapping of selectors
            (see `ByKey`) to these, whose `default` is `input`.

    Raises:
        ConfigError: a name that is no dtype.
        RecipeError: a selector that makes no sense.
    """
    if not isinstance(value, Mapping):
        name = _dtype_word(value)
        return None if name == INPUT else torch_dtype(name)
    words = {str(selector): _dtype_word(dtype) for selector, dtype in value.items()}
    wanted = by_key({DEFAULT: INPUT, **words})
    return wanted if isinstance(wanted, ByKey) else parse_output_dtype(wanted)


def output_dtype_words(dtype: torch.dtype | ByKey | None) -> str:
    """An output's dtype in words, the same for the same."""
    if isinstance(dtype, ByKey):
        return ", ".join(f"{selector}: {name}" for selector, name in dtype.words)
    return dtype_name(dtype) if dtype else INPUT


def _dtype_word(value: Any) -> str:
    if value is None or value == INPUT:
        return INPUT
    return dtype_name(value if isinstance(value, torch.dtype) else parse_dtype(str(value)))


class Binder:
    """Binds the values by key of recipes: each to the keys of the models that are merged beside it."""

    def __init__(self, sources: Mapping[ModelNode, Source]) -> None:
        self._sources = sources
        self._anatomies: dict[tuple[object, str], Anatomy] = {}

    def bind(self, roots: Sequence[Node], new: dict[Node, Node] | None = None) -> tuple[Node, ...]:
        """The graphs with every value bound; `new` is told what became of each node."""
        if not any(map(is_by_key, walk(*roots))):
            return tuple(roots)
        everything = self._beside(roots)
        return rewrite(roots, lambda node: self._bind_arguments(node, everything), new)

    def bind_beside(self, value: ByKey, roots: Sequence[Node]) -> ByKey:
        """A value bound to the models of recipes."""
        return value.over(self._anatomy(self._beside(roots), value.convention))

    def _bind_arguments(self, node: Node, everything: _Whose) -> Node:
        if not isinstance(node, MergeNode) or not any(map(is_by_key, node.children)):
            return node
        beside = self._beside(node.children) or everything

        def bound(child: Node, spec: ParameterSpec) -> Node:
            if not isinstance(child, LiteralNode) or not isinstance(child.value, ByKey):
                return child
            if reads_other_keys(node) and spec.is_state_dict and not (child.config or spec.config):
                return child  # the method asks it for keys of its own
            whose = child.config or spec.config or beside
            return replace(child, value=child.value.over(self._anatomy(whose, child.value.convention)))

        arguments = tuple(
            (
                name,
                tuple(bound(one, node.method.signature[name]) for one in value)
                if isinstance(value, tuple)
                else bound(value, node.method.signature[name]),
            )
            for name, value in node.arguments
        )
        return replace(node, arguments=arguments)

    def _beside(self, nodes: Sequence[Node]) -> _Whose:
        """The model config that nodes are converted to, or else the models that they read."""
        found: dict[ModelNode, None] = {}
        waiting = list(reversed(nodes))
        while waiting:
            node = waiting.pop()
            if isinstance(node, ModelNode):
                found[node] = None
            elif isinstance(node, MergeNode):
                if (declared := self._declared(node)) is None:
                    waiting.extend(reversed(node.children))
                elif not found:
                    return declared
        return tuple(found)

    def _declared(self, node: MergeNode) -> str | None:
        """The config that a call says it gives; where the method depends on the models', that of theirs."""
        if node.method.choose is None:
            return node.method.signature.returned.config
        whose = {
            name: self._beside([child])
            for name, child in node.arguments
            if isinstance(child, Node) and node.method.signature[name].is_state_dict
        }
        try:
            chosen = node.method.choose({name: self._configs(them) for name, them in whose.items()})
        except MechaError:
            return None  # which the plan says
        return chosen.signature.returned.config

    def _configs(self, whose: _Whose) -> list[ModelConfig]:
        """What models may be, by the first of them."""
        if isinstance(whose, str):
            return [resolve(whose)]
        if not whose:
            return []
        first = whose[0]
        if first.config is not None:
            return [resolve(first.config)]
        return [found.config for found in candidates(infos_of(self._sources[first]))]

    def _anatomy(self, whose: _Whose, convention: str | None) -> Anatomy:
        wanted = (whose, convention or DEFAULT_CONVENTION)
        if wanted not in self._anatomies:
            self._anatomies[wanted] = self._make_anatomy(*wanted)
        return self._anatomies[wanted]

    def _make_anatomy(self, whose: _Whose, convention: str) -> Anatomy:
        if isinstance(whose, str):
            config = resolve(whose)
            config.blocks(convention)  # which says what is wrong with a convention
            return Anatomy(tuple(config.keys()), config, convention)
        infos: dict[str, TensorInfo] = {}
        for source in (self._sources[model] for model in whose):
            for key in source.keys():
                infos.setdefault(key, source.info(key))
        return Anatomy.of(infos, convention)


def is_by_key(node: Node) -> bool:
    """Whether a node is a value by key."""
    return isinstance(node, LiteralNode) and isinstance(node.value, ByKey)


def effective_values_in(recipe: Node, folders: Sequence[Path]) -> dict[str, list[BlockValue]]:
    """`effective_values_of` a recipe whose models are opened for that; nothing where it has no value by key.

    Raises:
        CheckpointError: a model cannot be opened.
    """
    if not any(map(is_by_key, walk(recipe))):
        return {}
    with open_sources(models_of(recipe), folders) as sources:
        (bound,) = Binder(sources).bind([recipe])
        return effective_values_of(bound)


def values_table(values: Mapping[str, Sequence[BlockValue]]) -> str:
    """Effective values as CSV: a line for each hyperparameter and block."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["hyperparameter", "component", "block", "keys", "value"])
    for name, blocks in values.items():
        for block in blocks:
            said = " ".join(map(str, block.values))
            rows.writerow([name, block.component, block.block, block.keys, said])
    return text.getvalue()


def effective_values_of(bound: Node) -> dict[str, list[BlockValue]]:
    """What each value by key of a bound recipe comes to, block by block.

    They are called after the method and the argument: `slerp.alpha`; where several calls have different ones
    they are numbered.
    """
    found: dict[str, list[BlockValue]] = {}
    for name, value in _named_values(bound):
        values = effective_values(value)
        number = 1
        label = name
        while label in found and found[label] != values:
            number += 1
            label = f"{name} ({number})"
        found[label] = values
    return found


def _named_values(recipe: Node) -> Iterator[tuple[str, ByKey]]:
    for node in walk(recipe):
        if isinstance(node, MergeNode):
            for name, child in node.named_children:
                if isinstance(child, LiteralNode) and isinstance(child.value, ByKey):
                    yield f"{node.method.identifier}.{name}", child.value
