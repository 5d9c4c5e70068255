"""Model configs: the keys of architectures; see `mecha_exp.architectures`."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import yaml

from mecha_exp.architectures import (
    AdapterConfig,
    KeyInfo,
    ModelConfig,
    StructuralConfig,
    detect,
    from_yaml,
    register,
    resolve,
    to_yaml,
)
from mecha_exp.architectures import get_all as get_all_base
from mecha_exp.architectures import get_all_adapters as get_all_aux

__all__ = [
    "AdapterConfig",
    "KeyInfo",
    "KeyMetadata",
    "ModelComponent",
    "ModelConfig",
    "ModelConfigImpl",
    "StructuralConfig",
    "detect",
    "from_yaml",
    "get_all",
    "get_all_aux",
    "get_all_base",
    "register",
    "resolve",
    "to_yaml",
]


def get_all() -> list[ModelConfig]:
    """Every known config, including those of LoRA files."""
    return [*get_all_base(), *get_all_aux()]


def KeyMetadata(
    shape: Sequence[int], dtype: torch.dtype | str, aliases: Sequence[str] = (), optional: bool = False
) -> dict[str, Any]:
    """A key of a model config, as sd-mecha declares one: its shape, its dtype, its other names in files."""
    name = str(dtype).removeprefix("torch.")
    return {"shape": list(shape), "dtype": name, "aliases": list(aliases), "optional": optional}


def ModelComponent(keys: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """A component of a model config, as sd-mecha declares one: its keys, each of `KeyMetadata`."""
    return dict(keys)


def ModelConfigImpl(
    identifier: str, components: Mapping[str, Mapping[str, Mapping[str, Any]]]
) -> ModelConfig:
    """A model config, as sd-mecha declares one: components of `ModelComponent`, by their names.

    Raises:
        ConfigError: everything that is wrong in it; see `from_yaml`.
    """
    content = {"identifier": identifier, "components": {k: {"keys": dict(v)} for k, v in components.items()}}
    return from_yaml(yaml.safe_dump(content, sort_keys=False))
