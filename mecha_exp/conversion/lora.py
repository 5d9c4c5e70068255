"""The conversion of a LoRA file into differences, as a merge method."""

from functools import cache
from typing import Any

from torch import Tensor

from mecha_exp.architectures import AdapterConfig, ModelConfig, resolve, views
from mecha_exp.architectures.lora_deltas import Deltas
from mecha_exp.errors import ConfigError
from mecha_exp.method_api.method import Kind, MergeMethod
from mecha_exp.method_api.parameters import Parameter, Return
from mecha_exp.method_api.state_dict import StateDict, StateDictKeyError


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
                return deltas.delta(key, lora.__contains__, lora.__getitem__)

        end = "base" if target == deltas.config.base.identifier else f"'{target}'"
        super().__init__(by_modules, f"convert_'{source}'_to_{end}", Kind.WHOLE, is_conversion=True)
        self.deltas = deltas


def adapter_conversion(source: str, target: str | None = None) -> AdapterConversion | None:
    """The conversion of LoRA files into differences to the models of a config, or None.

    Args:
        source, target: identifiers; without a target it is the config that the files are for.
    """
    try:
        config = resolve(source)
        if not isinstance(config, AdapterConfig):
            return None
        return _conversion(config, config.base if target is None else resolve(target))
    except ConfigError:
        return None


@cache
def _conversion(config: AdapterConfig, target: ModelConfig) -> AdapterConversion:
    conversion = None if config.base == target else views(config.base, target)
    return AdapterConversion(Deltas(config, target, conversion))
