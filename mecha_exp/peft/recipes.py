"""PEFT adapters in recipes: which base a bare adapter stands on, and what an adapter's delta is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mecha_exp.architectures.lora import LORA_DELTA
from mecha_exp.errors import RecipeError
from mecha_exp.graph.nodes import MergeNode, ModelNode, Node, call, is_call, models_of, walk
from mecha_exp.graph.rewrite import rewrite
from mecha_exp.peft.config import config_of, is_adapter
from mecha_exp.peft.vocabulary import IS_ADAPTER, resized_lines, with_vocabulary
from mecha_exp.sources.inputs import open_sources
from mecha_exp.sources.source import Source

AS_THEY_ARE = frozenset({LORA_DELTA})
"""Methods that take an adapter itself and not the model that it stands for."""


@dataclass(frozen=True)
class Expanded:
    """Recipes whose adapters are models.

    Attributes:
        recipes: the graphs.
        lines: about each adapter the model that it was added to, and about rows of tokens that a base gets.
    """

    recipes: tuple[Node, ...]
    lines: tuple[str, ...]


def with_bases(recipes: Sequence[Node], sources: Mapping[ModelNode, Source]) -> Expanded:
    """Replace each adapter that stands for a model by its base plus what it adds.

    The base is the argument `base` of the call that takes the adapter, and otherwise the only model beside
    the adapters of the recipe.

    Raises:
        RecipeError: nothing tells the base of an adapter.
        CheckpointError: the configuration of an adapter cannot be read.
    """
    if not any(map(is_adapter, sources.values())):
        return Expanded(tuple(recipes), ())
    lines: dict[str, None] = {}
    expanded = tuple(_expand(recipe, sources, lines) for recipe in recipes)
    for base, adapters in _adapters_by_base(expanded, sources).items():
        lines.update(dict.fromkeys(resized_lines(sources[base], adapters)))
    return Expanded(expanded, tuple(lines))


def _expand(recipe: Node, sources: Mapping[ModelNode, Source], lines: dict[str, None]) -> Node:
    models = [model for model in models_of(recipe) if not is_adapter(sources.get(model))]
    only = models[0] if len(models) == 1 else None

    def on_base(adapter: Node, base: Node | None) -> Node:
        if not isinstance(adapter, ModelNode) or not is_adapter(sources.get(adapter)):
            return adapter
        base = base or only
        if base is None:
            config = config_of(sources[adapter])
            trained = f" It was trained on {config.base}." if config and config.base else ""
            raise RecipeError(
                f"{adapter.source} is an adapter, and {len(models)} models of the recipe could be its base: "
                f"say which one, as in `base + lora_delta(adapter, base)`.{trained}"
            )
        name = base.source if isinstance(base, ModelNode) else repr(base)
        lines[f"{adapter.source}{IS_ADAPTER}read as {name} with what it adds"] = None
        return base + call(LORA_DELTA, adapter, base)

    def replace(node: Node) -> Node:
        if not isinstance(node, MergeNode) or node.method.identifier in AS_THEY_ARE:
            return node
        named = dict(node.arguments)
        base = named.get("base")
        base = base if isinstance(base, Node) and not is_adapter(sources.get(base)) else None  # type: ignore[call-overload]
        new = {child: on_base(child, base) for child in node.children}
        return node if all(a is b for a, b in new.items()) else node.with_children(new)

    (expanded,) = rewrite([recipe], replace)
    return on_base(expanded, None)


def untied(
    recipes: Sequence[Node], sources: Mapping[ModelNode, Source], on_tied: str
) -> dict[ModelNode, Source]:
    """The sources, whose bases have the output layers and the rows of tokens that their adapters need."""
    adapters = _adapters_by_base(recipes, sources)
    return {**sources, **{b: with_vocabulary(sources[b], own, on_tied) for b, own in adapters.items()}}


def _adapters_by_base(
    recipes: Sequence[Node], sources: Mapping[ModelNode, Source]
) -> dict[ModelNode, list[Source]]:
    adapters: dict[ModelNode, dict[ModelNode, Source]] = {}
    for adapter, base in adapter_calls(recipes, sources):
        adapters.setdefault(base, {})[adapter] = sources[adapter]
    return {base: list(own.values()) for base, own in adapters.items()}


def bases_of_adapters(recipe: Node, model_dirs: Sequence[Path]) -> dict[ModelNode, ModelNode]:
    """Each adapter of a recipe with the model that it is added to."""
    with open_sources(models_of(recipe), model_dirs) as sources:
        return dict(adapter_calls(with_bases([recipe], sources).recipes, sources))


def adapter_calls(
    recipes: Sequence[Node], sources: Mapping[ModelNode, Source]
) -> Iterator[tuple[ModelNode, ModelNode]]:
    """Each adapter of PEFT that a recipe reads as a difference, with the model that it is a difference to."""
    for node in walk(*recipes):
        if (pair := adapter_call(node, sources)) is not None:
            yield pair


def adapter_call(node: Node, sources: Mapping[ModelNode, Source]) -> tuple[ModelNode, ModelNode] | None:
    """The adapter and the base of a call of `lora_delta`; None for all other nodes.

    Raises:
        RecipeError: the base is a merge, whose tensors the difference may depend on.
    """
    if not is_call(node, LORA_DELTA):
        return None
    adapter, base = node.children
    if not isinstance(adapter, ModelNode) or not is_adapter(sources.get(adapter)):
        return None
    if not isinstance(base, ModelNode):
        raise RecipeError(
            f"lora_delta: {adapter.source} is a difference to a model that is read, and its base is "
            f"{base!r}. Name the model that it was trained on, and add the difference to the merge."
        )
    return adapter, base
