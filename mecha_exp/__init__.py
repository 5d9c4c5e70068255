"""mecha_exp: the lab bench for model-merge ablations, and the merge engine behind it.

The public names are loaded when they are first used, so that importing the package, and asking the command
line for help, costs next to nothing. A built-in merge method is an attribute too: `mecha_exp.slerp`; and
`from mecha_exp import *` brings all of them.
"""

import importlib
import pathlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mecha_exp.conversion import convert
    from mecha_exp.declaring import factor, merge_method, reduction
    from mecha_exp.engine import EngineOptions, Job, MergeReport, merge_many, plan
    from mecha_exp.errors import (
        CheckpointError,
        ConfigError,
        EvaluationError,
        MechaError,
        MergeError,
        RecipeError,
    )
    from mecha_exp.evaluation import evaluator
    from mecha_exp.merger import RecipeMerger, merge_and_save
    from mecha_exp.merging import Defaults, merge, set_log_level
    from mecha_exp.method import MergeMethod
    from mecha_exp.nodes import Node
    from mecha_exp.random import uniform
    from mecha_exp.recipe import (
        build_recipe,
        deserialize,
        deserialize_path,
        fill,
        parameter,
        serialize,
        serialize_and_save,
    )
    from mecha_exp.relations import KeyMapBuilder
    from mecha_exp.signature import Parameter, Return, StateDict, StateDictKeyError, Tile, skip_key
    from mecha_exp.spaces import MergeSpaceSymbol
    from mecha_exp.strengths import blocks, classes, default
    from mecha_exp.values import RecipeNode, RecipeNodeOrValue, literal, model, value_to_node

__version__ = "0.1.0"

_HOMES = {
    "mecha_exp.conversion": ["convert"],
    "mecha_exp.engine": ["EngineOptions", "Job", "MergeReport", "merge_many", "plan"],
    "mecha_exp.errors": [
        "CheckpointError",
        "ConfigError",
        "EvaluationError",
        "MechaError",
        "MergeError",
        "RecipeError",
    ],
    "mecha_exp.evaluation": ["evaluator"],
    "mecha_exp.merger": ["RecipeMerger", "merge_and_save"],
    "mecha_exp.merging": ["Defaults", "merge", "set_log_level"],
    "mecha_exp.declaring": ["factor", "merge_method", "reduction"],
    "mecha_exp.method": ["MergeMethod"],
    "mecha_exp.random": ["uniform"],
    "mecha_exp.nodes": ["Node"],
    "mecha_exp.values": ["RecipeNode", "RecipeNodeOrValue", "literal", "model", "value_to_node"],
    "mecha_exp.recipe": [
        "build_recipe",
        "deserialize",
        "deserialize_path",
        "fill",
        "parameter",
        "serialize",
        "serialize_and_save",
    ],
    "mecha_exp.relations": ["KeyMapBuilder"],
    "mecha_exp.signature": ["Parameter", "Return", "StateDict", "StateDictKeyError", "Tile", "skip_key"],
    "mecha_exp.spaces": ["MergeSpaceSymbol"],
    "mecha_exp.strengths": ["blocks", "classes", "default"],
}
_MODULES = {"extensions": "mecha_exp.extensions", "model_dirs": "mecha_exp.extensions.model_dirs"}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

if TYPE_CHECKING:
    __all__ = [
        "CheckpointError",
        "ConfigError",
        "Defaults",
        "EngineOptions",
        "EvaluationError",
        "Job",
        "KeyMapBuilder",
        "MechaError",
        "MergeError",
        "MergeMethod",
        "MergeReport",
        "MergeSpaceSymbol",
        "Node",
        "Parameter",
        "RecipeError",
        "RecipeMerger",
        "RecipeNode",
        "RecipeNodeOrValue",
        "Return",
        "StateDict",
        "StateDictKeyError",
        "Tile",
        "blocks",
        "build_recipe",
        "classes",
        "convert",
        "default",
        "deserialize",
        "deserialize_path",
        "evaluator",
        "factor",
        "fill",
        "literal",
        "merge",
        "merge_and_save",
        "merge_many",
        "merge_method",
        "model",
        "parameter",
        "plan",
        "reduction",
        "serialize",
        "serialize_and_save",
        "set_log_level",
        "skip_key",
        "uniform",
        "value_to_node",
    ]

# In a checkout conf/, methods/ and examples/ lie beside this package and belong to it, installed or not.
_checkout = pathlib.Path(__file__).parent.parent
if (_checkout / "pyproject.toml").is_file() and (_checkout / "conf").is_dir():
    __path__.append(str(_checkout))


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return _all()
    if name.startswith("_"):
        raise AttributeError(f"module 'mecha_exp' has no attribute '{name}'")
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    from mecha_exp.errors import RecipeError
    from mecha_exp.registry import resolve_method

    try:
        return resolve_method(name)
    except RecipeError as error:
        raise AttributeError(f"module 'mecha_exp' has no attribute '{name}': {error}") from None


def _all() -> list[str]:
    """What `from mecha_exp import *` brings: the public names and every built-in merge method."""
    from mecha_exp.registry import BUILTIN_METHODS, all_methods

    methods = [x.identifier for x in all_methods() if x.__wrapped__.__module__.startswith(BUILTIN_METHODS)]
    return sorted({*_HOME, *_MODULES, *methods})
