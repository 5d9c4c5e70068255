"""A node for every merge method, made from its signature."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, ClassVar

from mecha_exp.comfyui.widgets import BLOCKS, RECIPE, argument_of, takes_blocks, widget_of
from mecha_exp.graph.nodes import Node
from mecha_exp.method_api.method import STATISTICS, MergeMethod
from mecha_exp.method_api.parameters import ParameterSpec
from mecha_exp.method_api.registry import all_methods

MOST_MODELS = 12
"""How many sockets a node has for any number of models; those that are not connected are left out."""

_BY_BLOCK = "_by_block"


class MethodNode:
    """A node that calls a merge method; the subclass of each method names it."""

    METHOD: ClassVar[MergeMethod]
    TITLE: ClassVar[str]
    CATEGORY: ClassVar[str]
    DESCRIPTION: ClassVar[str]
    RETURN_TYPES = (RECIPE,)
    RETURN_NAMES = ("recipe",)
    FUNCTION = "call"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, dict[str, Any]]:
        """The sockets and widgets, by name."""
        required: dict[str, Any] = {}
        optional: dict[str, Any] = {}
        for spec in cls.METHOD.signature.parameters:
            if _is_socket(spec):
                names = _sockets(spec)
                socket = (RECIPE, {"tooltip": spec.help})
                (required if spec.required else optional)[names[0]] = socket
                optional |= dict.fromkeys(names[1:], socket)
                continue
            required[spec.name] = widget_of(spec)
            if takes_blocks(spec):
                about = {"tooltip": f"values of {spec.name} by block, over that of the other blocks"}
                optional[spec.name + _BY_BLOCK] = (BLOCKS, about)
        return {"required": required, "optional": optional}

    def call(self, **inputs: Any) -> tuple[Node]:
        """The recipe that calls the method with what is connected and set.

        Raises:
            RecipeError: an argument is not what the method takes.
        """
        positional: list[Any] = []
        named: dict[str, Any] = {}
        specs = self.METHOD.signature.parameters
        is_before_models = any(spec.variadic for spec in specs)
        for spec in specs:
            values = list(_given(spec, inputs))
            if is_before_models:
                positional += values
            elif values:
                [named[spec.name]] = values
            is_before_models = is_before_models and not spec.variadic
        return (self.METHOD(*positional, **named),)


def _given(spec: ParameterSpec, inputs: dict[str, Any]) -> Iterator[Any]:
    """The values of a parameter: several for any number of models, none where nothing is connected."""
    if _is_socket(spec):
        yield from (inputs[name] for name in _sockets(spec) if inputs.get(name) is not None)
        return
    value = argument_of(spec, inputs[spec.name])
    blocks = inputs.get(spec.name + _BY_BLOCK)
    yield {**blocks, "default": value} if blocks else value


def _is_socket(spec: ParameterSpec) -> bool:
    return spec.is_model or spec.name == STATISTICS


def _sockets(spec: ParameterSpec) -> list[str]:
    if not spec.variadic:
        return [spec.name]
    return [f"{spec.name.removesuffix('s')}_{number}" for number in range(1, MOST_MODELS + 1)]


def _node_of(method: MergeMethod) -> type[MethodNode]:
    title = method.identifier.replace("_", " ")
    text = (inspect.getdoc(method) or "").partition("\n\n")[0]
    family = method.__wrapped__.__module__.rpartition(".")[2]
    members = {
        "METHOD": method,
        "TITLE": f"Mecha {title}",
        "CATEGORY": f"mecha/{family}",
        "DESCRIPTION": " ".join(text.split()),
    }
    return type(f"Mecha_{method.identifier}", (MethodNode,), members)


METHOD_NODES = {
    f"mecha_exp.{method.identifier}": _node_of(method)
    for method in all_methods()
    if method.signature.returned.interface is not str  # a dtype or a device, which no socket takes
}
"""The node of each merge method, by the name that workflows keep."""
