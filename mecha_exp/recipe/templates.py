"""Recipe parameters: the variables of a recipe template, filled before it is merged.

    template = add_difference(parameter("a"), parameter("b"), parameter("c"), alpha=parameter("alpha"))
    recipe = fill(template, {"a": "a.safetensors", "b": "b.safetensors", "c": "c.safetensors", "alpha": 0.5})

An argument is checked as if it had been written in the place of the parameter.
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
        name: the name of its argument. Parameters of the same name are one parameter.
        merge_space: the merge space of its argument: `weight`, `delta` or `param`; None: any that fits.
        config: the model config of its argument, or its identifier.

    Raises:
        RecipeError: the name is empty, or the merge space does not exist.
    """
    if not name:
        raise RecipeError("a parameter needs a name")
    return ParameterNode(name, merge_space, getattr(config, "identifier", config))


def parameters_of(*roots: Node) -> list[ParameterNode]:
    """The unfilled parameters of recipes, in the order of arguments."""
    return [node for node in walk(*roots) if isinstance(node, ParameterNode)]


def fill(recipe: Node, arguments: Mapping[str, Any]) -> Node:
    """Replace parameters by arguments; a parameter without one remains.

    Args:
        recipe: a graph with parameters.
        arguments: by the name of a parameter a node, a path, a number or another valid value. A list in the
            place of a variadic argument adds all of its values.

    Raises:
        RecipeError: every name that the recipe does not have, and every value that does not fit.
    """
    problems = Problems()
    names = {node.name for node in parameters_of(recipe)}
    for name in arguments:
        if name not in names:
            has = "" if names else " It has no parameters."
            problems.add(f"the recipe has no parameter '{name}'.{did_you_mean(name, names)}{has}")
    replaced: dict[Node, Any] = {}
    for node in walk(recipe):
        if isinstance(node, ParameterNode) and node.name in arguments:
            replaced[node] = _value(node, arguments[node.name], problems)
        elif isinstance(node, MergeNode) and any(replaced[child] is not child for child in node.children):
            replaced[node] = _rebound(node, replaced, problems)
        else:
            replaced[node] = node
    problems.raise_as(RecipeError)
    return as_node(replaced[recipe])


def require_filled(roots: Iterable[Node]) -> None:
    """Check that the recipes have no unfilled parameters.

    Raises:
        RecipeError: some parameters are unfilled; the message names them.
    """
    unfilled = parameters_of(*roots)
    if unfilled:
        raise RecipeError(
            f"the recipe has {len(unfilled)} unfilled parameter{'s' if len(unfilled) > 1 else ''}: "
            f"{', '.join(map(describe, unfilled))}. Fill each one: `-p NAME VALUE` with the verbs merge, "
            "plan and compose, `NAME=VALUE` beside recipe=mecha, or `fill(recipe, {NAME: VALUE})` in Python."
        )


def describe(parameter: ParameterNode) -> str:
    """A parameter with its merge space and model config: 'a' (weight, sdxl-sgm)."""
    expected = ", ".join(filter(None, (parameter.space, parameter.config)))
    return f"'{parameter.name}'" + (f" ({expected})" if expected else "")


def _value(parameter: ParameterNode, value: Any, problems: Problems) -> Any:
    """The value for a parameter: a path as a model of its merge space and config, all else as it is."""
    space = parameter.space
    if isinstance(value, Node):
        if space is None or value.merge_space == space or isinstance(value, ParameterNode):
            return value
        problems.add(f"the parameter {describe(parameter)} is filled with a {value.merge_space}: {value!r}")
        return UNKNOWN
    is_path = isinstance(value, PurePath) or (isinstance(value, str) and space in ("weight", "delta"))
    if is_path or (isinstance(value, str) and parameter.config is not None):
        return ModelNode(os.fspath(value), space or "weight", parameter.config)
    return value


def _rebound(node: MergeNode, replaced: Mapping[Node, Any], problems: Problems) -> Node:
    """The call of a method with replaced arguments, all checked again."""
    arguments: dict[str, Any] = {}
    for name, value in node.arguments:
        if isinstance(value, tuple):
            arguments[name] = [item for child in value for item in _as_list(replaced[child])]
        else:
            arguments[name] = replaced[value]
    call, mistakes = node.method.bind(arguments)
    problems.add_all(f"{node.method.identifier}: {mistake}" for mistake in mistakes)
    return simplified(call) if call else UNKNOWN


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
