"""Finds the meanings of the names in a recipe: numbers for values by key, contents for model configs.

Blocks, presets and conventions are names whose meanings lie outside the recipe: in model configs and in
formulas. A signature and the journal of a merge need the meanings.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from mecha_exp.architectures import resolve
from mecha_exp.architectures.keys import is_known_stack
from mecha_exp.architectures.library.registry import registered
from mecha_exp.conversion.inference import ConfigInference
from mecha_exp.engine.options import EngineOptions
from mecha_exp.engine.planner.by_key import INPUT, Binder, output_dtype_words
from mecha_exp.engine.planner.inputs import in_one_format, with_one_prefix
from mecha_exp.engine.planner.vocabulary import unify_vocabularies
from mecha_exp.errors import ConfigError, MechaError
from mecha_exp.graph.by_key import ByKey, table
from mecha_exp.graph.nodes import LiteralNode, MergeNode, ModelNode, Node, calls_of, models_of, walk
from mecha_exp.graph.rewrite import rewrite
from mecha_exp.method_api.binding import same_number
from mecha_exp.sources.format_view import ConvertedSource
from mecha_exp.sources.inputs import open_sources
from mecha_exp.sources.source import Source


@dataclass(frozen=True)
class Meaning:
    """The meanings of a recipe's names.

    Attributes:
        recipe: with numbers in place of the values by key.
        dtype: of the output, in words, with keys in place of blocks.
        configs: the SHA-256 of each model config that plays a part, by the model or by the identifier.
    """

    recipe: Node
    dtype: str
    configs: Mapping[str, str]


def meaning_of(
    recipe: Node,
    dtype: torch.dtype | ByKey | None,
    files: Mapping[ModelNode, Path],
    options: EngineOptions,
) -> Meaning:
    """Read what the names in a recipe mean from the headers of its models, once for all points of a sweep.

    Where a model config or the models do not allow it, names stay as they are: planning raises the error.

    Args:
        recipe: the graph.
        dtype: of the output.
        files: the file of each model of the recipe.
        options: of the engine.
    """
    methods = frozenset(call.method for call in calls_of(recipe))
    versions = tuple(_version(path) for path in files.values())
    settings = (options.on_tied, options.on_prefix, options.resize_embeddings)
    headers = _headers(tuple(files), methods, versions, settings, registered())
    try:
        with contextlib.ExitStack() as stack:
            if headers.binder is None:
                opened = stack.enter_context(open_sources(models_of(recipe), options.model_dirs))
                headers.read(recipe, opened, options)
            return headers.meaning(recipe, dtype)
    except MechaError as error:
        return Meaning(recipe, output_dtype_words(dtype), {"error": str(error)})


class _Headers:
    """The keys of models as a merge of them sees them, and their configs; the files are closed."""

    def __init__(self) -> None:
        self.binder: Binder | None = None
        self._configs: dict[str, str] = {}

    def read(self, recipe: Node, opened: Mapping[ModelNode, Source], options: EngineOptions) -> None:
        """Read the keys of opened models."""
        opened, _ = with_one_prefix([recipe], opened, options)
        configs = ConfigInference.over(opened)
        sources, _ = in_one_format([recipe], opened, configs)
        self._configs = config_digests([recipe], sources, configs)
        sources = unify_vocabularies([recipe], sources, options)
        for source in sources.values():
            for key in source.keys():
                source.info(key)
        self.binder = Binder(sources, configs.over_views(sources))

    def meaning(self, recipe: Node, dtype: torch.dtype | ByKey | None) -> Meaning:
        """The meaning of a recipe of these models."""
        assert self.binder is not None
        (bound,) = self.binder.bind([recipe])
        words = output_dtype_words(dtype)
        if isinstance(dtype, ByKey):
            words = in_numbers(
                replace(self.binder.bind_beside(dtype, [recipe]), default=dtype.default or INPUT)
            )
        return Meaning(recipe_in_numbers(bound), words, self._configs)


@lru_cache(maxsize=16)
def _headers(*key: Any) -> _Headers:
    """The headers of some models; the key says which, and what decides how they are seen."""
    return _Headers()


def _version(path: Path) -> tuple[Any, ...]:
    """A value that changes when a file, or a file in a folder, is replaced."""
    status = path.stat()
    return str(path), status.st_size, status.st_mtime_ns, status.st_ino


def config_digests(
    recipes: Sequence[Node], sources: Mapping[ModelNode, Source], configs: ConfigInference
) -> dict[str, str]:
    """The SHA-256 of each config that decides how recipes are merged.

    Args:
        recipes: the graphs.
        sources: its models as they are read, some of them in another format.
        configs: infers the configs of the models as they are stored.
    """
    digests: dict[str, str] = {}
    for number, model in enumerate(models_of(*recipes)):
        parts = [fit.config.digest for fit in configs.fits(model)]
        source = sources.get(model)
        if isinstance(source, ConvertedSource):
            parts.append(f"read as {source.digest}")
        if source is not None and (stacks := _stacks_in(source)):
            parts.append(f"stacks {hashlib.sha256(' '.join(stacks).encode()).hexdigest()}")
        digests[f"model {number}"] = " ".join(parts) or "its own keys"
    for identifier in sorted(_declared(walk(*recipes))):
        with contextlib.suppress(ConfigError):  # planning reports it
            digests[identifier] = resolve(identifier).digest
    return digests


def _stacks_in(source: Source) -> list[str]:
    """The keys that are merged expert by expert because of their names."""
    return sorted(key for key, info in source.infos().items() if is_known_stack(key, info.shape))


def _declared(nodes: Iterable[Node]) -> set[str]:
    """The configs that nodes and methods name."""
    names: set[str | None] = set()
    for node in nodes:
        names.add(getattr(node, "config", None))
        if isinstance(node, MergeNode):
            signature = node.method.signature
            names |= {signature.returned.config, *(p.config for p in signature.parameters)}
    return {name for name in names if name}


def recipe_in_numbers(bound: Node) -> Node:
    """A bound recipe with one number for values by key that are equal for all keys, else with their table."""

    def plain(node: Node) -> Node:
        if isinstance(node, MergeNode):
            return _without_defaults(node)
        if (
            not isinstance(node, LiteralNode)
            or not isinstance(node.value, ByKey)
            or node.value.anatomy is None
        ):
            return node
        groups = table(node.value)
        if len(groups) == 1:
            return LiteralNode(groups[0][0], node.space)
        return LiteralNode(in_numbers(node.value), node.space)

    return rewrite([bound], plain)[0]


def _without_defaults(node: MergeNode) -> MergeNode:
    """A call without the arguments that are defaults anyway, as one that never had values by key."""
    defaults = {spec.name: spec.default for spec in node.method.signature.parameters}
    arguments = tuple(
        (name, value)
        for name, value in node.arguments
        if not isinstance(value, LiteralNode) or not same_number(value.value, defaults[name])
    )
    return node if arguments == node.arguments else replace(node, arguments=arguments)


def in_numbers(value: ByKey) -> str:
    """A bound value by key as text: each value with the number and the hash of its keys."""
    return ", ".join(f"{value!r} for {_keys_text(keys)}" for value, keys in table(value))


def _keys_text(keys: Sequence[str]) -> str:
    digest = hashlib.sha256("\n".join(sorted(keys)).encode()).hexdigest()
    return f"{len(keys)} keys {digest[:16]}"
