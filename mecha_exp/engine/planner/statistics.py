"""Statistics of models on data in recipes: which files hold them, and whether they belong to their models."""

from __future__ import annotations

from collections.abc import Mapping

from mecha_exp.errors import RecipeError
from mecha_exp.graph.nodes import LiteralNode, MergeNode, ModelNode, Node, walk
from mecha_exp.sources.source import Source
from mecha_exp.sources.statistics import (
    ACTIVATIONS,
    BASE_FINGERPRINT,
    FISHER,
    GRAM,
    MASK,
    StatisticsSource,
    fingerprint,
)

STATISTICS = "statistics"
"""The method that reads statistics of models, and the argument of the methods that need them."""

NEEDED = {
    "fisher": FISHER,
    "regmean": GRAM,
    "rebasin_by_activations": ACTIVATIONS,
    "stitch": MASK,
    "zipit": ACTIVATIONS,
}
"""The kind of statistics that a method needs."""


def statistics_in(*recipes: Node) -> set[Node]:
    """The files of statistics that recipes read, which are not models."""
    calls = (n for n in walk(*recipes) if isinstance(n, MergeNode) and n.method.identifier == STATISTICS)
    return {child for call in calls for child in call.children if isinstance(child, ModelNode)}


class StatisticsChecks:
    """Checks that calls receive the statistics of their own models, in the order of the models.

    Calls of other points of a sweep read the same files, so what fits is remembered.

    Args:
        sources: the opened models, and the views of them; more may be added later.
    """

    def __init__(self, sources: Mapping[ModelNode, Source]) -> None:
        self._sources = sources
        self._fitting: set[tuple[Node | None, Node, Node]] = set()

    def check(self, call: MergeNode) -> None:
        """Check the statistics that a call receives, if it receives any.

        Raises:
            RecipeError: there are more or fewer than models, they are of another model, or a model is not
                read.
            CheckpointError: their keys, dtypes or shapes are not those of such statistics.
        """
        arguments = dict(call.arguments)
        argument = arguments.get(STATISTICS)
        identifier = call.method.identifier
        needed = NEEDED.get(identifier)
        if needed is not None and isinstance(argument, LiteralNode):
            raise RecipeError(
                f"{identifier}: statistics is {argument!r}, and not statistics(FILE, FILE, kind={needed}) of "
                "files that calibrate wrote."
            )
        if not isinstance(argument, MergeNode) or argument.method.identifier != STATISTICS:
            return
        files = [child for child in argument.children if isinstance(child, ModelNode)]
        statistics = [self._statistics(file) for file in files]
        kind = statistics[0].kind if statistics else None  # one call reads one kind
        if needed is not None and kind is not None and needed != kind:
            raise RecipeError(
                f"{identifier}: it needs the statistics {needed}, got {kind}. Set kind: {needed}."
            )
        models = _models_of(call)
        if len(files) != len(models):
            raise RecipeError(
                f"{identifier}: statistics of {len(files)} models are given for {len(models)} models. Give "
                "one file for each model, in the same order."
            )
        base = arguments.get("base")
        base = base if isinstance(base, Node) else None
        for index, (model, file) in enumerate(zip(models, files, strict=True)):
            if (base, model, file) not in self._fitting:
                self._require_of_model(identifier, index, model, statistics[index])
                self._require_of_base(identifier, base, statistics[index])
                self._fitting.add((base, model, file))
        for other in statistics[1:] if kind == ACTIVATIONS else ():
            statistics[0].require_same_examples(other)

    def _statistics(self, file: ModelNode) -> StatisticsSource:
        statistics = self._sources[file]
        assert isinstance(statistics, StatisticsSource)
        return statistics

    def _require_of_model(self, caller: str, index: int, model: Node, statistics: StatisticsSource) -> None:
        """Check that a file holds statistics of the model at an index of a call's models."""
        if not isinstance(model, ModelNode):
            raise RecipeError(
                f"{caller}: models[{index}] is {model!r}, and {statistics.name} holds statistics of a model "
                "that is read. Merge to a file first, and calibrate that."
            )
        source = self._sources[model]
        if fingerprint(source) != statistics.header.fingerprint:
            raise RecipeError(
                f"{caller}: {statistics.name} holds statistics of {statistics.header.model}, whose content "
                f"is not that of models[{index}], {source.name}. Give the files in the order of the models, "
                f"or make them: python -m mecha_exp calibrate {source.name} data=FILE "
                f"kind={statistics.kind} output=FILE.safetensors"
            )
        statistics.require_fit(source)

    def _require_of_base(self, caller: str, base: Node | None, statistics: StatisticsSource) -> None:
        """Check that a mask is of a task vector from the base of a call."""
        settings = statistics.header.settings
        if BASE_FINGERPRINT not in settings or base is None:
            return
        if not isinstance(base, ModelNode):
            raise RecipeError(
                f"{caller}: the base is {base!r}, and {statistics.name} holds the mask of a task vector from "
                "a model that is read. Merge to a file first, and train the mask with that."
            )
        source = self._sources[base]
        if settings[BASE_FINGERPRINT] != fingerprint(source):
            raise RecipeError(
                f"{caller}: {statistics.name} holds the mask of a task vector from {settings.get('base')}, "
                f"whose content is not that of the base, {source.name}. Give that base, or train the mask "
                "again."
            )


def _models_of(call: MergeNode) -> list[Node]:
    """The models of a call with statistics: its `models`, or else `a` and `ref`."""
    arguments = dict(call.arguments)
    values = [arguments[name] for name in ("models", "a", "ref") if name in arguments]
    return [model for value in values for model in (value if isinstance(value, tuple) else (value,))]
