"""Model configs: the keys of architectures; see `mecha_exp.architectures`."""

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
    "ModelConfig",
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
