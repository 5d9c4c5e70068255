"""Recipe parameters: the variables of a recipe template, filled before it is merged.

    template = add_difference(parameter("a"), parameter("b"), parameter("c"), alpha=parameter("alpha"))
    recipe = fill(template, {"a": "a.safetensors", "b": "b.safetensors", "c": "c.safetensors", "alpha": 0.5})

What fills a parameter is checked against the place where it stands, as if it had been written there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any

from mecha_exp.errors import Problems, RecipeError, did_you_mean
from mecha_exp.graph.literals import as_node
from mecha_exp.graph.nodes import MergeNode, ModelNode, Node, ParameterNode, walk
from mecha_exp.graph.selectors import simplified
from mecha_exp.method_api.binding import UNKNOWN


def parameter(name: str, merge_space: str | None = None, config: Any = None) -> ParameterNode:
    """A variable of a recipe, to be filled with a model, a recipe or a number; see `fill`.

    Args:
        name: what it is filled by. The same name is the same parameter wherever it stands.
        merge_space: of what may fill it: `weight`, `delta` or `param`; None: whatever fits its place.
        config: the model config (or its name) of the models that may fill it.

    Raises:
        RecipeError: no name, or a merge space that does not exist.
    """
    if not name:
        raise RecipeError("a parameter needs a name")
    return ParameterNode(name, merge_space, getattr(config, "identifier", config))


def parameters_of(*roots: Node) -> list[ParameterNode]:
    """The parameters of the recipes that are not filled, in the order of their arguments."""
    return [node for node in walk(*roots) if isinstance(node, ParameterNode)]


def fill(recipe: Node, arguments: Mapping[str, Any]) -> Node:
    """The recipe with parameters replaced; those without an argument stay.

    Args:
        recipe: a graph with parameters.
        arguments: by the name of the parameter a node, a path, a number, or whatever else may stand in its
            place. A list fills a place among any number of models with all of its values.

    Raises:
        RecipeError: a name that the recipe does not have, or a value that does not fit; all at once.
    """
    problems = Problems()
    known = {node.name for node in parameters_of(recipe)}
    for name in arguments:
        if name not in known:
            has = "" if known else " It has no parameters."
            problems.add(f"the recipe has no parameter '{name}'.{did_you_mean(name, known)}{has}")
    new: dict[Node, Any] = {}
    for node in walk(recipe):
        if isinstance(node, ParameterNode) and node.name in arguments:
            new[node] = _value(node, arguments[node.name], problems)
        elif isinstance(node, MergeNode) and any(new[child] is not child for child in node.children):
            new[node] = _called_again(node, new, problems)
        else:
            new[node] = node
    problems.raise_as(RecipeError)
    return as_node(new[recipe])


def require_filled(roots: Iterable[Node]) -> None:
    """Check that nothing is left to be filled.

    Raises:
        RecipeError: naming every parameter that is left.
    """
    left = parameters_of(*roots)
    if left:
        raise RecipeError(
            f"the recipe has {len(left)} unfilled parameter{'s' if len(left) > 1 else ''}: "
            f"{', '.join(describe(p) for p in left)}. Fill each one: `-p NAME VALUE` with the verbs merge, "
            "plan and compose, `NAME=VALUE` beside recipe=mecha, or `fill(recipe, {NAME: VALUE})` in Python."
        )


def describe(parameter: ParameterNode) -> str:
    """A parameter with what it asks for: 'a' (weight, sdxl-sgm)."""
    asks = ", ".join(filter(None, (parameter.space, parameter.config)))
    return f"'{parameter.name}'" + (f" ({asks})" if asks else "")


def _value(parameter: ParameterNode, value: Any, problems: Problems) -> Any:
    """What stands for a parameter: a path with its merge space and model config, all else as it is."""
    space = parameter.space
    if isinstance(value, Node):
        unlike = space is not None and value.merge_space != space and not isinstance(value, ParameterNode)
        if unlike:
            problems.add(
                f"the parameter {describe(parameter)} is filled with a {value.merge_space}: {value!r}"
            )
        return UNKNOWN if unlike else value
    is_path = isinstance(value, PurePath) or (isinstance(value, str) and space in ("weight", "delta"))
    if is_path or (isinstance(value, str) and parameter.config is not None):
        return ModelNode(os.fspath(value), space or "weight", parameter.config)
    return value


def _called_again(node: MergeNode, new: Mapping[Node, Any], problems: Problems) -> Node:
    """The call of a method on what its arguments have become, with everything checked anew."""
    arguments: dict[str, Any] = {}
    for name, value in node.arguments:
        if isinstance(value, tuple):
            arguments[name] = [one for child in value for one in _as_list(new[child])]
        else:
            arguments[name] = new[value]
    called, found = node.method.bind(arguments)
    problems.add_all(f"{node.method.identifier}: {problem}" for problem in found)
    return simplified(called) if called else UNKNOWN


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
