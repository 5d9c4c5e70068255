"""What a checkpoint is a checkpoint of: model configs, their components and blocks, and detection."""

from mecha_exp.architectures.blocks import infer_blocks
from mecha_exp.architectures.config import (
    DEFAULT_CONVENTION,
    Component,
    KeyInfo,
    KeyPattern,
    ModelConfig,
)
from mecha_exp.architectures.detection import Detection, candidates, detect
from mecha_exp.architectures.registry import get_all, register, resolve
from mecha_exp.architectures.schema import from_yaml, to_yaml
from mecha_exp.architectures.structural import StructuralConfig

__all__ = [
    "DEFAULT_CONVENTION",
    "Component",
    "Detection",
    "KeyInfo",
    "KeyPattern",
    "ModelConfig",
    "StructuralConfig",
    "candidates",
    "detect",
    "from_yaml",
    "get_all",
    "infer_blocks",
    "register",
    "resolve",
    "to_yaml",
]
