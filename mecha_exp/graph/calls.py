"""Calls a merge method by its name, so that the graph need not know the methods."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mecha_exp.graph.nodes import MergeNode

_REGISTRY = "mecha_exp.method_api.registry"


def call(method: str, *args: Any, **kwargs: Any) -> MergeNode:
    """A call of the registered merge method of that name.

    The registry is loaded by name, as it loads the built-in methods itself: it lies above the graph.

    Raises:
        RecipeError: there is no such method, or it does not take these arguments.
    """
    node: MergeNode = importlib.import_module(_REGISTRY).resolve_method(method)(*args, **kwargs)
    return node
