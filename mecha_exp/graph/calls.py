"""Calls a merge method by its name, so that the graph does not import the methods."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mecha_exp.graph.nodes import MergeNode

_REGISTRY = "mecha_exp.method_api.registry"


def call(method: str, *args: Any, **kwargs: Any) -> MergeNode:
    """A call of the registered merge method of a name.

    The registry is imported by name here, because it lies above the graph.

    Raises:
        RecipeError: there is no such method, or it does not take these arguments.
    """
    node: MergeNode = importlib.import_module(_REGISTRY).resolve_method(method)(*args, **kwargs)
    return node
