"""Statistics of models on data in recipes: which files hold them, and whether they belong to their models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mecha_exp.errors import RecipeError, counted
from mecha_exp.graph.nodes import LiteralNode, MergeNode, ModelNode, Node, is_call, walk
from mecha_exp.method_api.method import spread
from mecha_exp.sources.source import Source
from mecha_exp.sources.statistics import (
    ACTIVATIONS,
    ALPHA,
    BASE_FINGERPRINT,
    EXPERT_FINGERPRINT,
    FISHER,
    GRAM,
    MASK,
    MERGED_FINGERPRINTS,
    SCALE,
    StatisticsSource,
    fingerprint,
)

STATISTICS = "statistics"
"""The method that reads statistics of models, and the argument of the methods that need them."""

SCALED, ALONG_MERGE = "df_merge", "regmean_plus_plus"
"""The methods of statistics that are measured for one merge: of scaled experts, or along the merge."""

NEEDED = {
    SCALED: FISHER,
    "fisher": FISHER,
    "regmean": GRAM,
    ALONG_MERGE: GRAM,
    "rebasin_by_activations": ACTIVATIONS,
    "stitch": MASK,
    "zipit": ACTIVATIONS,
}
"""The kind of statistics that a method needs."""


def statistics_in(*recipes: Node) -> set[Node]:
    """The files of statistics that recipes read, which are not models."""
    calls = (node for node in walk(*recipes) if is_call(node, STATISTICS))
    return {child for call in calls for child in call.children if isinstance(child, ModelNode)}


class StatisticsChecks:
    """Checks that calls receive the statistics of their own models, in the order of the models.

    Calls of other points of a sweep read the same files, so what fits is remembered.

    Args:
        sources: the opened models, and the views of them; more may be added later.
    """

    def __init__(self, sources: Mapping[ModelNode, Source]) -> None:
        self._sources = sources
        self._fitting: set[tuple[object, ...]] = set()

    def check(self, call: MergeNode) -> None:
        """Check the statistics that a call receives, if it receives any.

        Raises:
            RecipeError: there are more or fewer than models, they are of another model, or a model is not
                read.
            CheckpointError: their keys, dtypes or shapes are not those of such statistics.
        """
        files = _files_of(call)
        if files is None:
            return
        identifier = call.method.identifier
        statistics = [self._statistics(file) for file in files]
        kind = statistics[0].kind if statistics else None  # one call reads one kind
        needed = NEEDED.get(identifier)
        if needed is not None and kind is not None and needed != kind:
            raise RecipeError(
                f"{identifier}: it needs the statistics {needed}, got {kind}. Set kind: {needed}."
            )
        models = _models_of(call)
        if len(files) != len(models):
            raise RecipeError(
                f"{identifier}: statistics of {counted(len(files), 'model')} are given for "
                f"{counted(len(models), 'model')}. Give one file for each model, in the same order."
            )
        self._require_fitting(call, models, files)
        if identifier == ALONG_MERGE:
            self._require_along(_value_of(call, "alpha"), models, statistics)
        for other in statistics[1:] if kind == ACTIVATIONS else ():
            statistics[0].require_same_examples(other)

    def _require_fitting(self, call: MergeNode, models: Sequence[Node], files: Sequence[ModelNode]) -> None:
        """Check each file against its model, the base and the scale of the model."""
        identifier = call.method.identifier
        base = dict(call.arguments).get("base")
        base = base if isinstance(base, Node) else None
        scales = _scales_of(call, len(models)) if identifier == SCALED else None
        for index, (model, file) in enumerate(zip(models, files, strict=True)):
            scale = scales[index] if scales else None
            facts = (base, model, file, identifier, scale)
            if facts not in self._fitting:
                statistics = self._statistics(file)
                self._require_of_model(identifier, index, model, statistics)
                self._require_of_base(identifier, base, statistics)
                self._require_of_scale(scale, statistics)
                self._fitting.add(facts)

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
        source, header = self._sources[model], statistics.header
        measured_for = MERGED_FINGERPRINTS if caller == ALONG_MERGE else EXPERT_FINGERPRINT
        if caller in (SCALED, ALONG_MERGE) and measured_for not in header.settings:
            raise RecipeError(
                f"{caller}: {statistics.name} holds statistics of {header.model} by itself, and {caller} "
                f"needs those that belong to the merge. recipe={caller} measures them."
            )
        if caller != ALONG_MERGE and MERGED_FINGERPRINTS in header.settings:
            raise RecipeError(
                f"{caller}: {statistics.name} was measured along a merge by {ALONG_MERGE}, and is for that "
                f"alone. Make statistics of {source.name} by itself: python -m mecha_exp calibrate."
            )
        of_model = header.settings[EXPERT_FINGERPRINT] if caller == SCALED else header.fingerprint
        if fingerprint(source) != of_model:
            raise RecipeError(
                f"{caller}: {statistics.name} holds statistics of {header.model}, whose content "
                f"is not that of models[{index}], {source.name}. Give the files in the order of the models, "
                f"or make them: python -m mecha_exp calibrate {source.name} data=FILE "
                f"kind={statistics.kind} output=FILE.safetensors"
            )
        statistics.require_fit(source)

    def _require_of_scale(self, scale: float | None, statistics: StatisticsSource) -> None:
        """Check that statistics of a scaled expert are of the scale of a call."""
        measured = statistics.header.settings.get(SCALE)
        if scale is not None and measured != scale:
            raise RecipeError(
                f"{SCALED}: {statistics.name} was measured at the scale {measured}, and the call has "
                f"{scale}. recipe={SCALED} measures each scale."
            )

    def _require_along(self, alpha: object, models: list[Node], statistics: list[StatisticsSource]) -> None:
        """Check that Gram matrices were measured along the merge of these models, with this alpha."""
        merged = [fingerprint(self._sources[model]) for model in models if isinstance(model, ModelNode)]
        for each in statistics:
            settings = each.header.settings
            if settings[MERGED_FINGERPRINTS] != merged:
                raise RecipeError(
                    f"{ALONG_MERGE}: {each.name} was measured along the merge of other models, or of these "
                    f"in another order. recipe={ALONG_MERGE} measures each merge."
                )
            if settings[ALPHA] != alpha:
                raise RecipeError(
                    f"{ALONG_MERGE}: {each.name} was measured with alpha={settings[ALPHA]}, and the call has "
                    f"{alpha!r}. recipe={ALONG_MERGE} measures each alpha, which is one number for all keys."
                )

    def _require_of_base(self, caller: str, base: Node | None, statistics: StatisticsSource) -> None:
        """Check that what is measured of a task vector is of one from the base of a call."""
        settings = statistics.header.settings
        if BASE_FINGERPRINT not in settings or base is None:
            return
        if not isinstance(base, ModelNode):
            raise RecipeError(
                f"{caller}: the base is {base!r}, and {statistics.name} belongs to a task vector from a "
                "model that is read. Merge to a file first, and measure with that."
            )
        source = self._sources[base]
        if settings[BASE_FINGERPRINT] != fingerprint(source):
            from_base = settings.get("base", "another base")
            raise RecipeError(
                f"{caller}: {statistics.name} belongs to a task vector from {from_base}, whose content is "
                f"not that of the base, {source.name}. Give that base, or measure again."
            )


def _files_of(call: MergeNode) -> list[ModelNode] | None:
    """The files of statistics that a call receives; None if it receives none."""
    argument = dict(call.arguments).get(STATISTICS)
    identifier = call.method.identifier
    needed = NEEDED.get(identifier)
    if needed is not None and isinstance(argument, LiteralNode):
        raise RecipeError(
            f"{identifier}: statistics is {argument!r}, and not statistics(FILE, FILE, kind={needed}) of "
            "files that calibrate wrote."
        )
    if not is_call(argument, STATISTICS):
        return None
    return [child for child in argument.children if isinstance(child, ModelNode)]


def _value_of(call: MergeNode, name: str) -> object:
    """The value of a hyperparameter of a call; what is not a number is returned as its node."""
    (spec,) = (spec for spec in call.method.signature.parameters if spec.name == name)
    argument = dict(call.arguments).get(name, spec.default)
    return argument.value if isinstance(argument, LiteralNode) else argument


def _scales_of(call: MergeNode, models: int) -> list[float]:
    """The scale of each model in a call of `df_merge`.

    Raises:
        RecipeError: they are not numbers, or there are more or fewer than models.
    """
    value = _value_of(call, "scales")
    if not isinstance(value, int | float | list | tuple):
        raise RecipeError(
            f"{SCALED}: scales is {value!r}: expected a number, or a list of one for each model."
        )
    return spread(value, models)


def _models_of(call: MergeNode) -> list[Node]:
    """The models of a call with statistics: its `models`, or else `a` and `ref`."""
    arguments = dict(call.arguments)
    values = [arguments[name] for name in ("models", "a", "ref") if name in arguments]
    return [model for value in values for model in (value if isinstance(value, tuple) else (value,))]
