"""Prepares the opened inputs of a merge: one format, one vocabulary, and no keys that are left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mecha_exp.conversion.inference import ConfigInference
from mecha_exp.engine.options import EngineOptions
from mecha_exp.engine.planner.batches import OMIT_NON_FINITE
from mecha_exp.engine.planner.formats import in_one_format
from mecha_exp.engine.planner.keys.extra_keys import drop_extra_keys
from mecha_exp.engine.planner.vocabulary import unify_vocabularies
from mecha_exp.engine.report import Notice
from mecha_exp.errors import RecipeError, some
from mecha_exp.graph.nodes import MergeNode, ModelNode, Node, walk
from mecha_exp.sources.finite_keys import FiniteSource
from mecha_exp.sources.quantised.view import notes_on
from mecha_exp.sources.source import Source


@dataclass(frozen=True)
class Inputs:
    """The models of a merge as it reads them.

    Attributes:
        sources: the models, some of them seen in another format or with another vocabulary.
        configs: infers the model configs of the sources.
        dropped: keys that are left out of the outputs, because no model config has them.
        notices: what was changed or left out.
    """

    sources: Mapping[ModelNode, Source]
    configs: ConfigInference
    dropped: frozenset[str]
    notices: tuple[Notice, ...]


def prepare_inputs(
    recipes: Sequence[Node], opened: Mapping[ModelNode, Source], options: EngineOptions
) -> Inputs:
    """Apply the options about formats, extra keys, values that are not finite, and vocabularies.

    Raises:
        CheckpointError: inputs that do not fit each other, where that is an error.
        RecipeError: `omit_non_finite` of a node that is not a model.
    """
    configs = ConfigInference.over(opened)
    sources, lines = in_one_format(recipes, opened, configs)
    dropped, notices = drop_extra_keys(opened, sources, configs, options)
    scanned = set(sources) if options.on_nonfinite == "skip" else _only_finite(recipes)
    finite = {model: FiniteSource(sources[model]) for model in scanned}
    lines = [*notes_on(opened.values()), *lines]
    notices = [*map(Notice, lines), *notices, *map(Notice, _spoilt_lines(finite.values()))]
    sources = unify_vocabularies(recipes, sources | finite, options)
    return Inputs(sources, configs.over_views(sources), dropped, tuple(notices))


def _only_finite(recipes: Sequence[Node]) -> set[ModelNode]:
    """The models that a recipe reads without their keys that are not finite."""
    models = set()
    for node in walk(*recipes):
        if isinstance(node, MergeNode) and node.method.identifier == OMIT_NON_FINITE:
            (child,) = node.children
            if not isinstance(child, ModelNode):
                raise RecipeError(
                    f"{OMIT_NON_FINITE}: expected a model that is read, got {child!r}, whose values are "
                    "known only when the output is laid out already. Apply it to the models below."
                )
            models.add(child)
    return models


def _spoilt_lines(sources: Iterable[FiniteSource]) -> list[str]:
    """A line about each input with keys that count as missing."""
    return [
        f"{source.name}: {len(source.spoilt)} keys count as missing, since they have values that are not "
        f"finite: {some(sorted(source.spoilt))}"
        for source in sorted(sources, key=lambda source: str(source.name))
        if source.spoilt
    ]
