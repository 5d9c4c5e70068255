"""The registry of merge methods: built-in ones, those of packages and plugins, and conversions of formats."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mecha_exp.entry_points import announced, load
from mecha_exp.errors import RecipeError, did_you_mean

if TYPE_CHECKING:
    from mecha_exp.method_api.method import MergeMethod

BUILTIN_METHODS = "mecha_exp.methods"
GROUP = "mecha_exp.methods"
"""The entry points by which packages announce methods: the name of each, and its module."""
PROVIDERS = ("mecha_exp.conversion.formats",)
"""Modules whose `method_named(identifier)` makes methods on demand; each is imported at its first use."""

_registry: dict[str, MergeMethod] = {}


def register_method(method: MergeMethod) -> None:
    """Register a method under its name, for recipes.

    Raises:
        RecipeError: the name is taken by another function.
    """
    other = _registry.get(method.identifier)
    if other is not None and _origin(other) != _origin(method):
        raise RecipeError(
            f"the name '{method.identifier}' of {_origin(method)} is taken by {_origin(other)} in "
            f"{inspect.getfile(other.function)}. Give another `identifier=`."
        )
    _registry[method.identifier] = method


def resolve_method(identifier: str) -> MergeMethod:
    """The registered method of that name.

    Raises:
        RecipeError: no method has the name; the message suggests the nearest.
    """
    importlib.import_module(BUILTIN_METHODS)
    if identifier not in _registry and identifier in announced(GROUP):
        load(announced(GROUP)[identifier])
    try:
        return _registry[identifier]
    except KeyError:
        for provider in map(importlib.import_module, PROVIDERS):
            method: MergeMethod | None = provider.method_named(identifier)
            if method is not None:
                return method
        raise RecipeError(
            f"unknown merge method '{identifier}'.{did_you_mean(identifier, _registry)} A method of your own "
            "must be loaded first: plugins=[mine.py] or --plugin mine.py."
        ) from None


@contextmanager
def isolated() -> Iterator[None]:
    """Forget at the end which methods the block has registered, but for those of mecha_exp."""
    before = dict(_registry)
    try:
        yield
    finally:
        ours = {name: m for name, m in _registry.items() if m.function.__module__.startswith("mecha_exp.")}
        _registry.clear()
        _registry.update(ours | before)


def all_methods() -> list[MergeMethod]:
    """Every registered method, by name."""
    for entry in announced(GROUP).values():
        load(entry)
    return [_registry[name] for name in sorted(_registry)]


def conversions() -> list[MergeMethod]:
    """Every registered method that converts between model configs."""
    return [method for method in all_methods() if method.is_conversion]


def _origin(method: MergeMethod) -> str:
    function = method.function
    return f"{function.__module__}.{function.__qualname__}"
