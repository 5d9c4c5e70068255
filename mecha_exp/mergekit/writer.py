"""Recipes as configurations of mergekit, where one means the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mecha_exp.checkpoint.model import ADAPTER_CONFIG
from mecha_exp.errors import MechaError
from mecha_exp.graph.by_key import ByKey
from mecha_exp.graph.curves import Gradient, Preset
from mecha_exp.graph.nodes import LiteralNode, MergeNode, ModelNode, Node
from mecha_exp.mergekit.methods import METHODS, REQUIRED, SEED, SHARED, Method
from mecha_exp.mergekit.recipe import from_mergekit
from mecha_exp.sources.search import find_model

_OURS = {"lambda": "scale", "weight": "weights"}
"""Parameters of mergekit that our methods have under another name."""
_OURS_IN = {"slerp": {"t": "alpha"}}
"""Names that differ in one method alone."""
_BY_KEY = (ByKey, Gradient, Preset, torch.Tensor)
"""Values that are not numbers, which configurations would say in many ways."""
_FOR_EACH = ("weights", "density", "gamma", "epsilon")
"""Our parameters that take one number for all models, or one for each."""


def to_mergekit(
    recipe: Node, dtype: torch.dtype | ByKey | None = None, folders: Sequence[Path] = ()
) -> dict[str, Any] | None:
    """The configuration of mergekit that means the same as a recipe; None where there is none.

    It is one call of a method on stored models, with numbers for hyperparameters. A configuration is given
    only if `from_mergekit` reads it as a call with the same arguments. Adapters have none: mergekit takes
    them only beside the model that they change.

    Args:
        recipe: its graph.
        dtype: of the output; None keeps the dtype that each key has in the first input.
        folders: where models are looked for, after the current folder.
    """
    if not isinstance(recipe, MergeNode) or isinstance(dtype, ByKey):
        return None
    models = [node for node in recipe.children if not isinstance(node, LiteralNode)]
    paths = [m.source for m in models if isinstance(m, ModelNode) and isinstance(m.source, str)]
    has_curves = any(isinstance(value, _BY_KEY) for value in _arguments(recipe).values())
    if not paths or len(paths) < len(models) or has_curves or any(_is_adapter(p, folders) for p in paths):
        return None
    target = recipe if dtype is None else recipe.to(dtype=dtype)
    for name, method in METHODS.items():
        for config in _candidates(name, method, _arguments(recipe), paths):
            if dtype is not None:
                config["dtype"] = str(dtype).removeprefix("torch.")
            if _is_read_as(config, target, folders):
                return config
    return None


def _is_adapter(source: str, folders: Sequence[Path]) -> bool:
    return (find_model(source, folders) / ADAPTER_CONFIG).is_file()


def _candidates(
    name: str, method: Method, arguments: Mapping[str, Any], paths: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """The configurations of a method that could mean a call with these arguments."""
    has_base = method.base == REQUIRED
    others = paths[1:] if has_base else paths
    shared: dict[str, Any] = {}
    each: list[dict[str, Any]] = [{} for _ in others]
    for word, parameter in method.parameters.items():
        value = arguments.get(_OURS_IN.get(name, {}).get(word, _OURS.get(word, word)), parameter.default)
        if value is None or word == SEED:  # which gives other numbers there
            continue
        if parameter.scope == SHARED:
            shared[word] = value
            continue
        numbers = value if isinstance(value, tuple) else (value,) * len(others)
        for own, number in zip(each, numbers, strict=False):
            own[word] = number
    models = [
        {"model": path} | ({"parameters": own} if own else {}) for path, own in zip(others, each, strict=True)
    ]
    config: dict[str, Any] = {"merge_method": name}
    if has_base:
        config |= {"base_model": paths[0]}
        models = [{"model": paths[0]}, *models]
    config["models"] = models
    # our methods say by other words whether what agrees is divided by the weights
    for choice in ({"normalize": True}, {"normalize": False}) if "normalize" in shared else ({},):
        yield config | ({"parameters": shared | choice} if shared else {})


def _is_read_as(config: Mapping[str, Any], recipe: Node, folders: Sequence[Path]) -> bool:
    try:
        return bool(_meaning(from_mergekit(config, model_dirs=folders)) == _meaning(recipe))
    except MechaError:
        return False


def _meaning(node: Node) -> Any:
    """What two nodes have in common that compute the same: the method, and its arguments spelt out."""
    if not isinstance(node, MergeNode):
        return node
    arguments = _arguments(node)
    children = [_meaning(child) for child in node.children if not isinstance(child, LiteralNode)]
    return node.method.identifier, children, arguments


def _arguments(node: MergeNode) -> dict[str, Any]:
    """The values of a call's hyperparameters, with one for each model, and with the defaults that matter."""
    values = node.literals
    models = sum(name == "models" for name, _ in node.named_children)
    for spec in node.method.signature.parameters:
        if spec.name in _FOR_EACH and spec.interface is list:
            value = values.get(spec.name, spec.default)
            values[spec.name] = value if isinstance(value, tuple) else (value,) * models
    if node.method.identifier == "ties" and "variant" not in values:
        values.setdefault("combine", "mean")  # as the variant of mergekit, which is the default, has it
    return values
