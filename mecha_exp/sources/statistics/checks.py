"""Checks that calls receive the statistics of their own models, in the order of the models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mecha_exp.errors import RecipeError, counted
from mecha_exp.graph.nodes import LiteralNode, MergeNode, ModelNode, Node
from mecha_exp.method_api.method import ALONG_MERGE, SCALED, spread
from mecha_exp.sources.source import Source
from mecha_exp.sources.statistics.header import (
    ACTIVATIONS,
    ALPHA,
    BASE_FINGERPRINT,
    EXPERT_FINGERPRINT,
    MERGED_FINGERPRINTS,
    SCALE,
    fingerprint,
)

if TYPE_CHECKING:
    from mecha_exp.sources.statistics.view import StatisticsSource


def check_call(call: MergeNode, files: Sequence[ModelNode], sources: Mapping[ModelNode, Source]) -> None:
    """Check the statistics that a call receives as its argument `statistics`.

    Calls of other points of a sweep read the same files, so what fits is remembered with these.

    Args:
        call: of a method on models that are read.
        files: the statistics.
        sources: the opened models, and the views of them.

    Raises:
        RecipeError: there are more or fewer than models, they are of another model, or a model is not read.
        CheckpointError: their keys, dtypes or shapes are not those of such statistics.
    """
    _Checks(call, sources).check([sources[file] for file in files])  # type: ignore[misc]


class _Checks:
    def __init__(self, call: MergeNode, sources: Mapping[ModelNode, Source]) -> None:
        self._call, self._sources = call, sources
        self._name, self._measured = call.method.identifier, call.method.measured

    def check(self, files: list[StatisticsSource]) -> None:
        """Check that the files are of the call's models."""
        kind = files[0].kind if files else None  # one call reads one kind
        needed = self._call.method.statistics
        if needed is not None and kind is not None and needed != kind:
            raise RecipeError(
                f"{self._name}: it needs the statistics {needed}, got {kind}. Set kind: {needed}."
            )
        models = _models_of(self._call)
        if len(files) != len(models):
            raise RecipeError(
                f"{self._name}: statistics of {counted(len(files), 'model')} are given for "
                f"{counted(len(models), 'model')}. Give one file for each model, in the same order."
            )
        self._require_fitting(models, files)
        if self._measured == ALONG_MERGE:
            self._require_along(_value_of(self._call, "alpha"), models, files)
        for other in files[1:] if kind == ACTIVATIONS else ():
            files[0].require_same_examples(other)

    def _require_fitting(self, models: Sequence[Node], files: Sequence[StatisticsSource]) -> None:
        """Check each file against its model, the base and the scale of the model."""
        base = dict(self._call.arguments).get("base")
        base = base if isinstance(base, Node) else None
        scales = self._scales(len(models)) if self._measured == SCALED else None
        for index, (model, file) in enumerate(zip(models, files, strict=True)):
            scale = scales[index] if scales else None
            facts = (base, model, self._name, scale)
            if facts not in file.fitting:
                self._require_of_model(index, model, file)
                self._require_of_base(base, file)
                self._require_of_scale(scale, file)
                file.fitting.add(facts)

    def _require_of_model(self, index: int, model: Node, statistics: StatisticsSource) -> None:
        """Check that a file holds statistics of the model at an index of a call's models."""
        caller, needed = self._name, self._measured
        if not isinstance(model, ModelNode):
            raise RecipeError(
                f"{caller}: models[{index}] is {model!r}, and {statistics.name} holds statistics of a model "
                "that is read. Merge to a file first, and calibrate that."
            )
        source, header = self._sources[model], statistics.header
        measured_for = MERGED_FINGERPRINTS if needed == ALONG_MERGE else EXPERT_FINGERPRINT
        if needed is not None and measured_for not in header.settings:
            raise RecipeError(
                f"{caller}: {statistics.name} holds statistics of {header.model} by itself, and {caller} "
                f"needs those that belong to the merge. recipe={caller} measures them."
            )
        if needed != ALONG_MERGE and MERGED_FINGERPRINTS in header.settings:
            raise RecipeError(
                f"{caller}: {statistics.name} was measured along a merge by regmean_plus_plus, and is for "
                f"that alone. Make statistics of {source.name} by itself: python -m mecha_exp calibrate."
            )
        of_model = header.settings[EXPERT_FINGERPRINT] if needed == SCALED else header.fingerprint
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
                f"{self._name}: {statistics.name} was measured at the scale {measured}, and the call has "
                f"{scale}. recipe={self._name} measures each scale."
            )

    def _require_along(
        self, alpha: object, models: Sequence[Node], statistics: Sequence[StatisticsSource]
    ) -> None:
        """Check that Gram matrices were measured along the merge of these models, with this alpha."""
        merged = [fingerprint(self._sources[model]) for model in models if isinstance(model, ModelNode)]
        for each in statistics:
            settings = each.header.settings
            if settings[MERGED_FINGERPRINTS] != merged:
                raise RecipeError(
                    f"{self._name}: {each.name} was measured along the merge of other models, or of these "
                    f"in another order. recipe={self._name} measures each merge."
                )
            if settings[ALPHA] != alpha:
                raise RecipeError(
                    f"{self._name}: {each.name} was measured with alpha={settings[ALPHA]}, and the call has "
                    f"{alpha!r}. recipe={self._name} measures each alpha, which is one number for all keys."
                )

    def _require_of_base(self, base: Node | None, statistics: StatisticsSource) -> None:
        """Check that what is measured of a task vector is of one from the base of a call."""
        settings = statistics.header.settings
        if BASE_FINGERPRINT not in settings or base is None:
            return
        if not isinstance(base, ModelNode):
            raise RecipeError(
                f"{self._name}: the base is {base!r}, and {statistics.name} belongs to a task vector from a "
                "model that is read. Merge to a file first, and measure with that."
            )
        source = self._sources[base]
        if settings[BASE_FINGERPRINT] != fingerprint(source):
            from_base = settings.get("base", "another base")
            raise RecipeError(
                f"{self._name}: {statistics.name} belongs to a task vector from {from_base}, whose content "
                f"is not that of the base, {source.name}. Give that base, or measure again."
            )

    def _scales(self, models: int) -> list[float]:
        """The scale of each model in a call of a method on scaled experts.

        Raises:
            RecipeError: they are not numbers, or there are more or fewer than models.
        """
        value = _value_of(self._call, "scales")
        if not isinstance(value, int | float | list | tuple):
            raise RecipeError(
                f"{self._name}: scales is {value!r}: expected a number, or a list of one for each model."
            )
        return spread(value, models)


def _value_of(call: MergeNode, name: str) -> object:
    """The value of a hyperparameter of a call; what is not a number is returned as its node."""
    (spec,) = (spec for spec in call.method.signature.parameters if spec.name == name)
    argument = dict(call.arguments).get(name, spec.default)
    return argument.value if isinstance(argument, LiteralNode) else argument


def _models_of(call: MergeNode) -> list[Node]:
    """The models of a call with statistics: its `models`, or else `a` and `ref`."""
    arguments = dict(call.arguments)
    values = [arguments[name] for name in ("models", "a", "ref") if name in arguments]
    return [model for value in values for model in (value if isinstance(value, tuple) else (value,))]
