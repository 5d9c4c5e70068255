"""Groups jobs that can share a pass, since each gives the same bytes as it does alone.

A pass has the keys of its models, in their order and with their shapes. Jobs over different models share it
if these models have equal keys, orders and shapes, as experts of one base mostly do. If they differ (an
inpainting model, one more counter, another format), only jobs that read the same models in one order share a
pass.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from mecha_exp.checkpoint import is_arithmetic
from mecha_exp.engine.options import EngineOptions
from mecha_exp.engine.planner.keys.dependence import reads_other_keys
from mecha_exp.errors import MechaError
from mecha_exp.graph.nodes import MergeNode, ModelNode, Node, calls_of, models_of
from mecha_exp.method_api.method import Kind
from mecha_exp.sources.inputs import open_sources
from mecha_exp.sources.quantised.view import require_plain
from mecha_exp.sources.source import Source

OMIT_NON_FINITE = "omit_non_finite"
"""The method whose model is read without its keys that are not finite."""


def batches(recipes: Sequence[Node], options: EngineOptions) -> list[tuple[int, ...]]:
    """The indices of recipes, grouped by the pass that they can share, in order of the first of each."""
    groups: Sequence[Hashable] = [_own(recipe) for recipe in recipes]
    if len(set(groups)) > 1:
        try:
            with open_sources(models_of(*recipes), options.model_dirs) as sources:
                plain = require_plain(sources, options.on_quantised)
                groups = groups_of(recipes, plain, options)
        except MechaError:  # planning reports it
            pass
    indices: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        indices.setdefault(group, []).append(index)
    return [tuple(group) for group in indices.values()]


def groups_of(
    recipes: Sequence[Node], sources: Mapping[ModelNode, Source], options: EngineOptions
) -> list[Hashable]:
    """A grouping key per recipe: recipes with equal keys can share a pass."""
    if len({_own(recipe) for recipe in recipes}) < 2:  # the headers do not matter
        return [None] * len(recipes)
    forms = {model: _form(model, source) for model, source in sources.items()}
    return [_group(recipe, forms, options) for recipe in recipes]


def _group(recipe: Node, forms: Mapping[ModelNode, Hashable], options: EngineOptions) -> Hashable:
    own = _own(recipe)
    models, methods = own
    different = {forms[model] for model in models}
    return own if methods or len(different) != 1 or options.on_nonfinite == "skip" else different.pop()


def _own(recipe: Node) -> tuple[tuple[ModelNode, ...], tuple[str, ...]]:
    """The models, and the methods if these decide about keys: recipes with equal ones can share a pass."""
    calls = calls_of(recipe)
    decides = any(_decides_keys(node) for node in calls)
    return tuple(models_of(recipe)), tuple(n.method.identifier for n in calls) if decides else ()


def _decides_keys(node: MergeNode) -> bool:
    """Whether the result of a call may have other keys than its models, or another order."""
    is_interface = node.method.kind is Kind.INTERFACE  # what implements it may read other keys
    return reads_other_keys(node) or is_interface or node.method.identifier == OMIT_NON_FINITE


def _form(model: ModelNode, source: Source) -> Hashable:
    """The declared config of a model, and its keys with their shapes and kinds of dtypes."""
    keys = ((key, source.info(key)) for key in source.keys())
    return model.config, tuple((k, i.shape, _kind(i.dtype)) for k, i in keys)


def _kind(dtype: str) -> tuple[bool, bool]:
    """The kind of arithmetic on a dtype: float64 has one of its own, integers are copied."""
    return is_arithmetic(dtype), dtype == "F64"
