"""Prepares the opened inputs of a merge: one format, one vocabulary, and no keys that are left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mecha_exp.architectures import AdapterConfig, Detection, ModelConfig, Views, views
from mecha_exp.conversion.inference import ConfigInference
from mecha_exp.engine.configurations import different_settings
from mecha_exp.engine.options import EngineOptions
from mecha_exp.engine.planner.batches import OMIT_NON_FINITE
from mecha_exp.engine.planner.keys.extra_keys import drop_extra_keys
from mecha_exp.engine.planner.vocabulary import models_merged, unify_vocabularies
from mecha_exp.engine.report import Notice
from mecha_exp.errors import ConfigError, RecipeError, counted, some
from mecha_exp.graph.nodes import ModelNode, Node, calls_of, is_call, models_of, walk
from mecha_exp.method_api.method import Arranges
from mecha_exp.sources.format_view import ConvertedSource
from mecha_exp.sources.quantised.view import is_decoded, notes_on
from mecha_exp.sources.source import Source
from mecha_exp.sources.views.channels import with_first_channels
from mecha_exp.sources.views.finite_keys import FiniteSource
from mecha_exp.sources.views.names import in_other_names
from mecha_exp.sources.views.positions import with_whole_positions
from mecha_exp.sources.views.prefixes import prefixes_between


@dataclass(frozen=True)
class Inputs:
    """The models of a merge as it reads them.

    Attributes:
        sources: the models, some of them seen in another format or with another vocabulary.
        configs: infers the model configs of the sources.
        dropped: keys that are left out of the outputs, because no model config has them.
        decoded: the models that are stored as codes.
        notices: what was changed or left out.
    """

    sources: Mapping[ModelNode, Source]
    configs: ConfigInference
    dropped: frozenset[str]
    decoded: frozenset[ModelNode]
    notices: tuple[Notice, ...]


def prepare_inputs(
    recipes: Sequence[Node], opened: Mapping[ModelNode, Source], options: EngineOptions
) -> Inputs:
    """Apply the options about formats, extra keys, values that are not finite, and vocabularies.

    Raises:
        CheckpointError: inputs that do not fit each other, where that is an error.
        RecipeError: `omit_non_finite` of a node that is not a model.
    """
    decoded = frozenset(model for model, source in opened.items() if is_decoded(source))
    opened, prefixed = with_one_prefix(recipes, opened, options)
    configs = ConfigInference.over(opened)
    sources, lines = in_one_format(recipes, opened, configs)
    dropped, notices = drop_extra_keys(opened, sources, configs, options)
    scanned = set(sources) if options.on_nonfinite == "skip" else _only_finite(recipes)
    finite = {model: FiniteSource(sources[model]) for model in scanned}
    whole, positions = with_whole_positions(sources | finite)
    if options.on_channels == "base":
        models = [model for model in models_merged(recipes) if model in whole]
        whole, channels = with_first_channels(models, whole)
        positions += channels
    lines = [*notes_on(opened.values()), *prefixed, *lines]
    lines += different_settings(sources[model] for model in models_merged(recipes) if model in sources)
    notices = [*map(Notice, lines), *notices, *map(Notice, [*_spoilt_lines(finite.values()), *positions])]
    sources = unify_vocabularies(recipes, whole, options)
    return Inputs(sources, configs.over_views(sources), dropped, decoded, tuple(notices))


def with_one_prefix(
    recipes: Sequence[Node], sources: Mapping[ModelNode, Source], options: EngineOptions
) -> tuple[Mapping[ModelNode, Source], list[str]]:
    """With `on_prefix=match`, the inputs under the keys of the first one, where they differ by prefixes.

    Also a line about each that is read so. A model of whose keys the recipe says itself how they are read,
    such as a LoRA file, is left as it is.
    """
    if options.on_prefix == "error":
        return sources, []
    calls = (call for call in calls_of(*recipes) if call.method.arranges is not Arranges.NOTHING)
    own = set(models_of(*calls))
    models = [model for model in models_of(*recipes) if model not in own]
    matched, lines = dict(sources), []
    for model in models[1:]:
        source, reference = sources[model], sources[models[0]]
        if found := prefixes_between(source, reference):
            matched[model] = in_other_names(source, found.rules)
            lines.append(
                f"{source.name}: {found.shared} of its {counted(len(found.names), 'key')}, {found}, are read "
                f"under the names that they have in {reference.name}"
            )
    return matched, lines


def in_one_format(
    recipes: Sequence[Node], sources: Mapping[ModelNode, Source], configs: ConfigInference | None = None
) -> tuple[dict[ModelNode, Source], list[str]]:
    """The inputs of a merge with the keys of one of them, if one architecture is there in several formats.

    The format is that of the first input that all others convert to without a loss. Inputs stay as they are
    if their config is declared, if a method that takes them declares one, if they are of no known config, or
    if there is no such format: where that is wrong, the merge reports it by their keys.

    Args:
        configs: infers the configs of the sources.

    Returns:
        the sources, and a line about each that is read as another format.
    """
    free = [model for model in sources if model.config is None and model not in _in_declared_config(recipes)]
    if len({frozenset(sources[model].keys()) for model in free}) < 2:
        return dict(sources), []
    configs = configs or ConfigInference.over(sources)
    models = {model: fits for model in free if (fits := configs.fits(model)) and not _is_adapter(fits)}
    for fits in models.values():
        target = fits[0].config
        conversions = _conversions_into(target, models) if len(fits) == 1 else None
        if conversions is not None:
            readers = {model: ConvertedSource(sources[model], table) for model, table in conversions.items()}
            formats = {model: models[model][0].config.identifier for model in readers}
            notes = [f"{readers[m].name} is {formats[m]}: read as {target.identifier}" for m in readers]
            return {**sources, **readers}, notes
    return dict(sources), []


def _is_adapter(fits: Sequence[Detection]) -> bool:
    """Whether a file is a LoRA, which is not a model in another format."""
    return all(isinstance(fit.config, AdapterConfig) for fit in fits)


def _conversions_into(
    target: ModelConfig, models: Mapping[ModelNode, Sequence[Detection]]
) -> dict[ModelNode, Views] | None:
    """The conversion of each model of another config; None if one of them has none.

    Args:
        models: the configs that each model fits.
    """
    conversions: dict[ModelNode, Views] = {}
    for model, fits in models.items():
        if any(fit.config == target and not fit.renamed for fit in fits):
            continue
        tables = (_lossless(fit, target) for fit in fits)
        conversion = next((table for table in tables if table is not None), None)
        if conversion is None:
            return None
        conversions[model] = conversion
    return conversions


def _in_declared_config(recipes: Sequence[Node]) -> set[ModelNode]:
    """The models that some method takes in a declared config."""
    return {
        child
        for call in calls_of(*recipes)
        if any(p.config for p in call.method.signature.parameters)
        for child in call.children
        if isinstance(child, ModelNode)
    }


def _lossless(fit: Detection, target: ModelConfig) -> Views | None:
    """The conversion to a config; None if there is none, or if it loses keys that the model requires."""
    try:
        conversion = views(fit.config, target)
    except ConfigError:
        return None
    if any(not fit.config.keys()[key].optional for key in conversion.lost):
        return None
    return conversion.named({name: key for key, name in fit.renamed.items()})


def _only_finite(recipes: Sequence[Node]) -> set[ModelNode]:
    """The models that a recipe reads without their keys that are not finite."""
    models = set()
    for node in walk(*recipes):
        if is_call(node, OMIT_NON_FINITE):
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
        f"{source.name}: {counted(len(source.spoilt), 'key counts', 'keys count')} as missing, with "
        f"values that are not finite: {some(sorted(source.spoilt))}"
        for source in sorted(sources, key=lambda source: str(source.name))
        if source.spoilt
    ]
