"""Model configs: what the keys of an architecture are, by name; see `mecha_exp.architectures`."""

from mecha_exp.architectures import (
    KeyInfo,
    ModelConfig,
    StructuralConfig,
    detect,
    from_yaml,
    get_all,
    register,
    resolve,
    to_yaml,
)

__all__ = [
    "KeyInfo",
    "ModelConfig",
    "StructuralConfig",
    "detect",
    "from_yaml",
    "get_all",
    "register",
    "resolve",
    "to_yaml",
]
