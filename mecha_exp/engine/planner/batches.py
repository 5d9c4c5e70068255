"""Which jobs can share a pass: those of which each comes to the same bytes as it does alone.

The keys of a pass, their order and their shapes are those of its models. Jobs over other models share it
where all of these have the same keys, in one order, of the same shapes: experts of one base, as they mostly
are. Where models differ in that - an inpainting model, a counter more, another format - jobs have to read the
same ones in the same order.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from mecha_exp.checkpoint import is_arithmetic
from mecha_exp.conversion.formats import FormatConversion
from mecha_exp.conversion.lora import AdapterConversion
from mecha_exp.engine.options import EngineOptions
from mecha_exp.engine.planner.keys.dependence import reads_other_keys
from mecha_exp.errors import MechaError
from mecha_exp.graph.nodes import MergeNode, ModelNode, Node, models_of, walk
from mecha_exp.method_api.method import Kind
from mecha_exp.sources.inputs import open_sources
from mecha_exp.sources.source import Source

OMIT_NON_FINITE = "omit_non_finite"
"""The method whose model is read without the keys that are not finite there."""


def batches(recipes: Sequence[Node], options: EngineOptions) -> list[tuple[int, ...]]:
    """The numbers of the recipes, those together that can share a pass, in the order of the first of each."""
    groups: Sequence[Hashable] = [_own(recipe) for recipe in recipes]
    if len(set(groups)) > 1:
        try:
            with open_sources(models_of(*recipes), options.model_dirs) as sources:
                groups = groups_of(recipes, sources, options)
        except MechaError:  # whoever plans the recipe says what is wrong with its file
            pass
    found: dict[Hashable, list[int]] = {}
    for number, group in enumerate(groups):
        found.setdefault(group, []).append(number)
    return [tuple(numbers) for numbers in found.values()]


def groups_of(
    recipes: Sequence[Node], sources: Mapping[ModelNode, Source], options: EngineOptions
) -> list[Hashable]:
    """Of each recipe what it has in common with all that can share a pass with it, and with no other."""
    if len({_own(recipe) for recipe in recipes}) < 2:  # nothing needs to be looked at
        return [None] * len(recipes)
    forms = {model: _form(model, source) for model, source in sources.items()}
    return [_group(recipe, forms, options) for recipe in recipes]


def _group(recipe: Node, forms: Mapping[ModelNode, Hashable], options: EngineOptions) -> Hashable:
    own = _own(recipe)
    models, methods = own
    different = {forms[model] for model in models}
    return own if methods or len(different) != 1 or options.on_nonfinite == "skip" else different.pop()


def _own(recipe: Node) -> tuple[tuple[ModelNode, ...], tuple[str, ...]]:
    """The models, and the methods where these decide about keys: what has both in common can share a pass."""
    calls = [node for node in walk(recipe) if isinstance(node, MergeNode)]
    decides = any(_decides_keys(node) for node in calls)
    return tuple(models_of(recipe)), tuple(n.method.identifier for n in calls) if decides else ()


def _decides_keys(node: MergeNode) -> bool:
    """Whether a call may give other keys than its models have, or in another order."""
    method = node.method
    if reads_other_keys(node) or method.kind is Kind.INTERFACE or method.identifier == OMIT_NON_FINITE:
        return True
    return isinstance(method, FormatConversion | AdapterConversion)


def _form(model: ModelNode, source: Source) -> Hashable:
    """The keys of a model with their shapes, whether they are numbers to compute with, and its config."""
    keys = ((key, source.info(key)) for key in source.keys())
    return model.config, tuple((k, i.shape, is_arithmetic(i.dtype) or i.dtype) for k, i in keys)
