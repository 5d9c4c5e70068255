"""PEFT adapters in recipes: which base a bare adapter stands on, and what an adapter's delta is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mecha_exp.architectures.lora import LORA_DELTA
from mecha_exp.errors import CheckpointError, RecipeError
from mecha_exp.graph.nodes import MergeNode, ModelNode, Node, call, is_call, models_of, walk
from mecha_exp.graph.rewrite import rewrite
from mecha_exp.method_api.views import Reading, View
from mecha_exp.peft.config import LOHA, LOKR, LORA, PeftConfig, config_of, read_config
from mecha_exp.peft.deltas import PeftDeltas
from mecha_exp.peft.metadata import with_alphas
from mecha_exp.peft.modules import MAGNITUDE, sorted_modules
from mecha_exp.peft.vocabulary import IS_ADAPTER, resized_lines, with_vocabulary
from mecha_exp.sources.inputs import open_sources
from mecha_exp.sources.readers import Prepared, Reader
from mecha_exp.sources.source import Source


class AdapterReader(Reader):
    """Reads adapters of PEFT: as models by themselves, and as differences to their bases."""

    def prepare(self, prepared: Prepared, on_tied: str) -> Prepared:
        """The recipes whose adapters are models, and bases with the rows and output layers these need."""
        whole, sources = with_bases(prepared.recipes, prepared.sources), prepared.sources
        adapters = _adapters_by_base(whole.recipes, sources)
        wider = {base: with_vocabulary(sources[base], own, on_tied) for base, own in adapters.items()}
        return Prepared(whole.recipes, {**sources, **wider}, (*prepared.lines, *whole.lines))

    def read(self, call: MergeNode, reading: Reading) -> View | None:
        """A view of an adapter as the differences that it makes to its base."""
        pair = adapter_call(call, reading.sources)
        if pair is None:
            return None
        adapter, base = (reading.sources[model] for model in pair)
        fit = reading.configs.only_fit(pair[1])
        return View(call, partial(PeftDeltas, adapter, base, reading.budget), fit.identifier if fit else None)

    def bases(self, recipe: Node, model_dirs: Sequence[Path]) -> Mapping[ModelNode, ModelNode]:
        """Each adapter of a recipe with the model that it is added to."""
        with open_sources(models_of(recipe), model_dirs) as sources:
            return dict(adapter_calls(with_bases([recipe], sources).recipes, sources))

    def with_scales(self, source: Source) -> Source:
        """A LoRA file of diffusers with the scales of its modules."""
        return with_alphas(source)

    def describe(self, source: Source) -> Mapping[str, Any] | None:
        """What an adapter is, and why it cannot be read if so."""
        if source.path is None or not source.is_adapter:
            return None
        try:
            config = read_config(source.path)
            factors, whole = sorted_modules(source.keys(), str(source.path))
        except CheckpointError as error:
            return {"kind": "of PEFT", "fault": str(error)}
        has_magnitudes = any(MAGNITUDE in suffixes for suffixes in factors.values())
        return {
            "kind": "DoRA" if has_magnitudes else _name_of(config),
            "base": config.base,
            "modules": len(factors),
            "ranks": sorted({config.rank_of(module) for module in factors}),
            "scales": sorted({config.scale_of(module) for module in factors}),
            "whole": sorted(whole),
            "fault": "",
        }


def with_bases(recipes: Sequence[Node], sources: Mapping[ModelNode, Source]) -> Prepared:
    """Replace each adapter that stands for a model by its base plus what it adds.

    The base is the argument `base` of the call that takes the adapter, and otherwise the only model beside
    the adapters of the recipe.

    Raises:
        RecipeError: nothing tells the base of an adapter.
        CheckpointError: the configuration of an adapter cannot be read.
    """
    if not any(source.is_adapter for source in sources.values()):
        return Prepared(tuple(recipes), sources)
    lines: dict[str, None] = {}
    expanded = tuple(_expand(recipe, sources, lines) for recipe in recipes)
    for base, adapters in _adapters_by_base(expanded, sources).items():
        lines.update(dict.fromkeys(resized_lines(sources[base], adapters)))
    return Prepared(expanded, sources, tuple(lines))


def _is_adapter(node: Node, sources: Mapping[ModelNode, Source]) -> bool:
    return isinstance(node, ModelNode) and node in sources and sources[node].is_adapter


def _expand(recipe: Node, sources: Mapping[ModelNode, Source], lines: dict[str, None]) -> Node:
    models = [model for model in models_of(recipe) if not _is_adapter(model, sources)]
    only = models[0] if len(models) == 1 else None

    def on_base(adapter: Node, base: Node | None) -> Node:
        if not isinstance(adapter, ModelNode) or not _is_adapter(adapter, sources):
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
        if not isinstance(node, MergeNode) or is_call(node, LORA_DELTA):
            return node
        named = dict(node.arguments)
        base = named.get("base")
        base = base if isinstance(base, Node) and not _is_adapter(base, sources) else None
        new = {child: on_base(child, base) for child in node.children}
        return node if all(a is b for a, b in new.items()) else node.with_children(new)

    (expanded,) = rewrite([recipe], replace)
    return on_base(expanded, None)


def _adapters_by_base(
    recipes: Sequence[Node], sources: Mapping[ModelNode, Source]
) -> dict[ModelNode, list[Source]]:
    adapters: dict[ModelNode, dict[ModelNode, Source]] = {}
    for adapter, base in adapter_calls(recipes, sources):
        adapters.setdefault(base, {})[adapter] = sources[adapter]
    return {base: list(own.values()) for base, own in adapters.items()}


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
    if not isinstance(adapter, ModelNode) or not _is_adapter(adapter, sources):
        return None
    if not isinstance(base, ModelNode):
        raise RecipeError(
            f"lora_delta: {adapter.source} is a difference to a model that is read, and its base is "
            f"{base!r}. Name the model that it was trained on, and add the difference to the merge."
        )
    return adapter, base


def _name_of(config: PeftConfig) -> str:
    names = {LORA: "rsLoRA" if config.is_rank_stabilised else "LoRA", LOHA: "LoHa", LOKR: "LoKr"}
    return names[config.kind]
