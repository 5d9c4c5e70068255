"""Builds the node of a slice: inputs that are merged with each other, with every parameter by key."""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import torch

from mecha_exp.architectures.lora import LORA_DELTA
from mecha_exp.checkpoint import TensorInfo, dtype_name, is_arithmetic, torch_dtype
from mecha_exp.errors import CheckpointError, ConfigError
from mecha_exp.graph.nodes import ModelNode, Node, call
from mecha_exp.mergekit.methods import IGNORED, OTHER, Arguments, Values
from mecha_exp.mergekit.reader import Configuration, Slice
from mecha_exp.mergekit.references import Reference, StoredModel
from mecha_exp.mergekit.settings import Setting, first_value
from mecha_exp.mergekit.vocabulary import RowsOf, Vocabulary
from mecha_exp.sources.layers import NONE, Layers, Span, renamed_keys
from mecha_exp.sources.vocabulary import with_tokens


@dataclass(frozen=True)
class SliceBuilder:
    """Builds the node of the inputs that are merged with each other."""

    configuration: Configuration
    part: Slice
    models: Mapping[Reference, StoredModel]
    spans: Mapping[Reference, Span]
    vocabulary: Vocabulary | None

    def node(self) -> Node:
        """The merge of the inputs, with every parameter as one value or as a value by key."""
        method = self.configuration.method
        base = None if method.base == IGNORED else self.part.base
        others = [entry.reference for entry in self.part.inputs if entry.reference != base]
        node = method.build(
            self._leaf(base) if base else None, list(map(self._leaf, others)), self._arguments()
        )
        dtype = None if self.configuration.dtype else self._common_dtype()
        return node if dtype is None else node.to(dtype=dtype)

    def infos(self) -> dict[str, TensorInfo]:
        """The dtype and the shape of every key that the merge of the slice has where it is written."""
        infos: dict[str, TensorInfo] = {}
        declared = self.configuration.dtype
        dtype = dtype_name(getattr(torch, declared)) if declared else self._common_dtype()
        for reference, names in self._names.items():
            for key, original in names.items():
                if key not in infos:
                    info = self.models[reference].infos[original]
                    axis = self.models[reference].token_axes.get(original)
                    infos[key] = self._info(info, dtype if is_arithmetic(info.dtype) else None, axis)
        return infos

    def _info(self, info: TensorInfo, dtype: str | None, tokens: int | None) -> TensorInfo:
        """The dtype and the shape of a key where it is written; `tokens` is the axis of its tokens."""
        shape = info.shape
        if self.vocabulary is not None and tokens is not None:
            shape = with_tokens(shape, tokens, self.vocabulary.count)
        return TensorInfo.made(dtype or info.dtype, shape)

    @cached_property
    def rows(self) -> Mapping[Reference, RowsOf]:
        """The rows of tokens that inputs get; none for those whose rows stay as they are."""
        return self.vocabulary.rows_of(self.part, self.models) if self.vocabulary else {}

    def _leaf(self, reference: Reference) -> Node:
        """A model, or the layers and rows of it that the slice takes; with what its adapter adds to these."""
        model, *deltas = self._parts(reference)
        rows = self.rows.get(reference)
        if rows is None or self._has_no_rest(reference):
            return reduce(operator.add, [model, *deltas])
        for each in (reference, *rows.others):
            self.models[each].require_movable_rows()
        others = [self._parts(other)[0] for other in rows.others]
        model = call("take_rows", model, *others, rows=str(rows.table))
        return reduce(operator.add, [model, *(call("take_rows", d, rows=str(rows.own)) for d in deltas)])

    def _parts(self, reference: Reference) -> list[Node]:
        """A model and the difference that its adapter makes, or the layers of them."""
        stored, span = self.models[reference], self.spans.get(reference)
        parts = [stored.recipe or ModelNode(stored.source)]
        if stored.lora:
            parts.append(call(LORA_DELTA, ModelNode(stored.lora), *parts))
        if span is not None and stored.recipe:
            raise ConfigError(
                f"{self.part.where}: takes layers of {reference}, a merge of this file, and layers are taken "
                "of models that are read. Put that merge into a file of its own, and merge it first."
            )
        if span is not None:
            parts = [call("take_layers", part, **dataclasses.asdict(span)) for part in parts]
        return parts

    def _has_no_rest(self, reference: Reference) -> bool:
        """Whether a slice takes layers of a model alone, without its embedding."""
        return reference in self.spans and self.spans[reference].rest == NONE

    def _arguments(self) -> Arguments:
        """The hyperparameters of the call: one value each, or a mapping of selectors to values."""
        settings = [setting for place in self._places(None) for setting in place.values()]
        settings += [setting for entry in self.part.inputs for setting in entry.settings.values()]
        if not any(setting.varies for setting in settings):
            return self._at("", 0.0)
        layers = self._layers(bool(self.spans) or any(setting.has_gradient for setting in settings))
        keys = dict.fromkeys(key for names in self._names.values() for key in names)
        by_key = {key: self._at(key, self._depth(key, layers)) for key in keys}
        names = next(iter(by_key.values())).keys()
        return {name: _by_key({key: each[name] for key, each in by_key.items()}, layers) for name in names}

    @cached_property
    def _names(self) -> Mapping[Reference, Mapping[str, str]]:
        """By input the keys that it has in the output, each with its key in the model."""
        names = {}
        for reference in (entry.reference for entry in self.part.inputs):
            model, span = self.models[reference], self.spans.get(reference)
            whole = {key: key for key in model.infos}
            names[reference] = (
                renamed_keys(model.infos, model.layers, span, model.source) if span is not None else whole
            )
        return names

    def _layers(self, are_needed: bool) -> Layers | None:
        """The layers of the inputs, which have equally many."""
        try:
            layers = [self.models[entry.reference].layers for entry in self.part.inputs]
        except CheckpointError:
            if are_needed:
                raise
            return None
        if are_needed and not self.spans and len(set(layers)) > 1:
            counts = ", ".join(
                f"{entry.reference} has {each.count}"
                for entry, each in zip(self.part.inputs, layers, strict=True)
            )
            raise CheckpointError(f"{self.part.where}: the models differ in their layers: {counts}.")
        return layers[0]

    def _depth(self, key: str, layers: Layers | None) -> float:
        """0 at the first layer, 1 at the last; as in mergekit 1 for a single one, and 0 outside of them."""
        index = layers.index(key) if layers else None
        if index is None or layers is None:
            return 0.0
        span = next(iter(self.spans.values()), Span(0, layers.count))
        count = span.end - span.first
        return (index - span.at) / (count - 1) if count > 1 else 1.0

    def _at(self, key: str, depth: float) -> Arguments:
        """The hyperparameters at a key."""
        method = self.configuration.method
        shared: dict[str, Any] = {}
        each: dict[str, list[Any]] = {}
        for name, parameter in method.parameters.items():
            inputs = [
                entry for entry in self.part.inputs if not self._is_exempt(entry.reference, parameter.scope)
            ]
            if parameter.scope == "shared":
                shared[name] = self._value(name, None, key, depth)
            else:
                each[name] = [
                    self._value(name, entry.settings, self._names[entry.reference].get(key, key), depth)
                    for entry in inputs
                ]
        try:
            return method.arguments(Values(shared, each))
        except ConfigError as error:
            at = f" (at the key '{key}')" if key else ""
            raise ConfigError(f"{self.part.where}: {error}{at}") from None

    def _is_exempt(self, reference: Reference, scope: str) -> bool:
        """Whether an input is the base, and the parameter has no value for it."""
        return scope == OTHER and reference == self.part.base

    def _value(self, name: str, own: Mapping[str, Setting] | None, key: str, depth: float) -> Any:
        parameter = self.configuration.method.parameters[name]
        settings = [place[name] for place in self._places(own) if name in place]
        value = first_value(settings, key, depth)
        if value is None and parameter.default is None and not parameter.may_lack:
            at = f" at the key '{key}'" if key and settings else ""
            raise ConfigError(
                f"{self.part.where}: {self.configuration.method_name} needs the parameter '{name}'{at}. Give "
                f"it under the parameters of each model, or of the whole."
            )
        return parameter.default if value is None else value

    def _places(self, own: Mapping[str, Setting] | None) -> Iterator[Mapping[str, Setting]]:
        """Where a value is looked for, what is nearest to an input first."""
        if own is not None:
            yield own
        yield self.part.settings
        yield self.configuration.settings

    def _common_dtype(self) -> str | None:
        """The dtype that mergekit promotes inputs of different dtypes to; None where it is that of the first.

        Raises:
            ConfigError: keys would have different dtypes.
        """
        by_key: dict[str, set[torch.dtype]] = {}
        for reference, names in self._names.items():
            for key, original in names.items():
                dtype = self.models[reference].infos[original].dtype
                if is_arithmetic(dtype):
                    by_key.setdefault(key, set()).add(torch_dtype(dtype))
        is_read = not any(self.models[reference].recipe for reference in self._names)
        if is_read and all(len(dtypes) == 1 for dtypes in by_key.values()):
            return None
        promoted = {reduce(torch.promote_types, dtypes) for dtypes in by_key.values()}
        if len(promoted) > 1:
            raise ConfigError(
                "dtype: the models have several dtypes. Say that of the output: dtype: bfloat16"
            )
        return dtype_name(promoted.pop())


def _by_key(values: Mapping[str, Any], layers: Layers | None) -> Any:
    """One value, or a mapping of selectors to values: layers where all their keys agree, else keys."""
    counts = Counter(map(repr, values.values()))
    if len(counts) == 1:
        return next(iter(values.values()))
    most = counts.most_common(1)[0][0]
    default = next(value for value in values.values() if repr(value) == most)
    groups: dict[int | None, dict[str, Any]] = {}
    for key, value in values.items():
        groups.setdefault(layers.index(key) if layers else None, {})[key] = value
    selected: dict[str, Any] = {}
    for index, group in groups.items():
        if layers and index is not None and len(set(map(repr, group.values()))) == 1:
            group = {f"{layers.stack}{index}.*": next(iter(group.values()))}
        selected |= {name: value for name, value in group.items() if repr(value) != most}
    return {**selected, "default": default}
