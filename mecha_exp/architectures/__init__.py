"""Model configs, their components and blocks, and the detection of a checkpoint's config."""

from mecha_exp.architectures.blocks import infer_blocks
from mecha_exp.architectures.components import Component, Layout
from mecha_exp.architectures.config import DEFAULT_CONVENTION, ModelConfig
from mecha_exp.architectures.keys import KeyInfo, KeyPattern
from mecha_exp.architectures.library.detection import (
    Detection,
    NearMiss,
    candidates,
    closest,
    detect,
    sized_for,
)
from mecha_exp.architectures.library.registry import (
    from_yaml,
    get_all,
    get_all_adapters,
    register,
    resolve,
    small_files,
)
from mecha_exp.architectures.library.yaml_writer import to_yaml
from mecha_exp.architectures.lora import AdapterConfig
from mecha_exp.architectures.structural import StructuralConfig
from mecha_exp.architectures.symmetries import OUTPUTS, AxisSlice, Symmetry, linked
from mecha_exp.architectures.views import View, Views, is_convertible, member_of, targets_of, views

__all__ = [
    "DEFAULT_CONVENTION",
    "OUTPUTS",
    "AdapterConfig",
    "AxisSlice",
    "Component",
    "Detection",
    "KeyInfo",
    "KeyPattern",
    "Layout",
    "ModelConfig",
    "NearMiss",
    "StructuralConfig",
    "Symmetry",
    "View",
    "Views",
    "candidates",
    "closest",
    "detect",
    "from_yaml",
    "get_all",
    "get_all_adapters",
    "infer_blocks",
    "is_convertible",
    "linked",
    "member_of",
    "register",
    "resolve",
    "sized_for",
    "small_files",
    "targets_of",
    "to_yaml",
    "views",
]
