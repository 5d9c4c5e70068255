"""The conversion of a LoRA file into differences, as a merge method."""

from functools import cache, partial
from typing import Any

from torch import Tensor

from mecha_exp.architectures import AdapterConfig, ModelConfig, is_convertible, member_of, resolve, views
from mecha_exp.architectures.lora_deltas import Deltas
from mecha_exp.errors import CheckpointError, ConfigError
from mecha_exp.graph.nodes import MergeNode, ModelNode, Node
from mecha_exp.method_api.method import Kind, MergeMethod
from mecha_exp.method_api.parameters import Parameter, Return
from mecha_exp.method_api.state_dict import StateDict, StateDictKeyError
from mecha_exp.method_api.views import Reading, View
from mecha_exp.sources.lora import AdapterSource
from mecha_exp.sources.readers import readers
from mecha_exp.sources.source import Source

SCALES = "lora_adapter_metadata"
"""What diffusers calls the configurations of the adapters in a file: `transformer.lora_alpha` and others."""


class AdapterConversion(MergeMethod):
    """A conversion from the config of LoRA files to the differences that they stand for.

    A converted file is read as a view. For a converted merge the tensors of a module are computed first.

    Attributes:
        deltas: computes the differences.
    """

    def __init__(self, deltas: Deltas) -> None:
        source, target = deltas.config.identifier, deltas.target.identifier

        class by_modules:
            """The differences that LoRA modules stand for: up down alpha / rank, and their like."""

            def __call__(
                self,
                lora: Parameter(StateDict[Tensor], "weight", source),  # type: ignore[valid-type]
                **kwargs: Any,
            ) -> Return(Tensor, "delta", target):  # type: ignore[valid-type]
                key = kwargs["key"]
                if key not in deltas:
                    raise StateDictKeyError(key)
                return deltas.delta(key, lora.__contains__, lora.__getitem__)  # of a merge, without its base

        end = "base" if target == deltas.config.base.identifier else f"'{target}'"
        super().__init__(by_modules, f"convert_'{source}'_to_{end}", Kind.WHOLE, is_conversion=True)
        self.deltas = deltas

    def read(self, call: MergeNode, asked: MergeNode, reading: Reading) -> View | Node:
        """A view of a file as the differences that it stands for; of a merge the call itself.

        The base of `lora_delta` is read too, where modules depend on its tensors.
        """
        (lora,) = call.children
        if not isinstance(lora, ModelNode):
            return call
        source = _with_scales(reading.sources[lora])
        base = dict(asked.arguments).get("base")
        if not isinstance(base, ModelNode) or not self.deltas.reading(source.keys()):
            return View(call, partial(AdapterSource, source, self.deltas, reading.budget))
        known_by = MergeNode(self, (("lora", lora), ("base", base)), call.space)
        base_source = reading.sources[base]
        return View(known_by, partial(AdapterSource, source, self.deltas, reading.budget, base_source))


def _with_scales(source: Source) -> Source:
    """A LoRA file with the scales that its metadata names, by the reader that knows them.

    Raises:
        CheckpointError: it has such metadata, and there is no such reader.
    """
    if SCALES not in source.metadata:
        return source
    scaled = source
    for reader in readers():
        scaled = reader.with_scales(scaled)
    if scaled is source:
        raise CheckpointError(
            f"{source.name}: the scales of its modules are in its {SCALES}, which no package here reads."
        )
    return scaled


def adapter_conversion(
    source: str | ModelConfig, target: str | ModelConfig | None = None
) -> AdapterConversion | None:
    """The conversion of LoRA files into differences to the models of a config, or None.

    Args:
        source, target: configs or their identifiers; without a target it is the config that the files are
            for. Of a family the target decides the sizes.
    """
    try:
        config = resolve(source) if isinstance(source, str) else source
        if not isinstance(config, AdapterConfig):
            return None
        target = resolve(target) if isinstance(target, str) else target or config.base
    except ConfigError:
        return None
    config = config.on(member_of(config.base, target))
    is_own = config.base.identifier == target.identifier
    return _conversion(config, target) if is_own or is_convertible(config.base, target) else None


@cache
def _conversion(config: AdapterConfig, target: ModelConfig) -> AdapterConversion:
    conversion = None if config.base == target else views(config.base, target)
    return AdapterConversion(Deltas(config, target, conversion))
