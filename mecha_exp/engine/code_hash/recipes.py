"""Hashes the code of the merge methods of a recipe."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from weakref import WeakKeyDictionary

from mecha_exp.engine.code_hash.data import content_of_files
from mecha_exp.engine.code_hash.functions import of_function, sources
from mecha_exp.engine.ir.expansion import expand
from mecha_exp.entry_points import announced, is_own_entry, load
from mecha_exp.errors import ConfigError, MechaError, Problems
from mecha_exp.graph.by_key import ByKey
from mecha_exp.graph.nodes import LiteralNode, MergeNode, Node, calls_of, walk
from mecha_exp.graph.rewrite import rewrite
from mecha_exp.method_api.method import MergeMethod
from mecha_exp.method_api.paths import missing_paths, path_arguments
from mecha_exp.sources.readers import GROUP

_METHODS: WeakKeyDictionary[Node, frozenset[MergeMethod]] = WeakKeyDictionary()
"""The methods of recipes: they are asked for several times for each point of a sweep."""


def code_hashes(recipe: Node) -> dict[str, str]:
    """Hash each merge method of a recipe: its code, and the content of the files that its arguments name.

    The methods that composites call are included, and the readers of other packages.

    Raises:
        ConfigError: a data file that a method declares, or that an argument names, does not exist.
    """
    methods = methods_of(recipe)
    contents: dict[MergeMethod, set[str]] = {method: set() for method in methods}
    for call in _calls_of(recipe) if any(method.signature.paths for method in methods) else ():
        contents[call.method].update(contents_of_paths(call).values())
    hashes = {method.identifier: _combined(code_hash(method), files) for method, files in contents.items()}
    return hashes | reader_hashes()


def reader_hashes() -> dict[str, str]:
    """Hash the code of each reader of another package."""
    kinds = [load(entry) for entry in announced(GROUP).values() if not is_own_entry(entry)]
    return {f"reader {kind.__module__}.{kind.__qualname__}": of_function(kind) for kind in kinds}


def contents_of_paths(call: MergeNode) -> dict[str, str]:
    """The content of the files and folders that the arguments of a call name, by their names in the recipe.

    Raises:
        ConfigError: one of them does not exist.
    """
    problems = Problems()
    problems.add_all(missing_paths([call]))
    problems.raise_as(ConfigError)
    return {str(path): content_of_files(path, name) for name, path in path_arguments(call)}


def _combined(code: str, contents: Iterable[str]) -> str:
    """The hash of code and files; that of the code where there are no files."""
    lines = sorted(contents)
    return hashlib.sha256("\n".join([code, *lines]).encode()).hexdigest() if lines else code


def code_hash(method: MergeMethod) -> str:
    """Hash the code of a merge method, and the data that it declares; see `of_function`."""
    return of_function(method)


def sources_of(recipe: Node) -> dict[Path, str]:
    """The source files that the merge methods of a recipe need; see `sources`."""
    files: dict[Path, str] = {}
    for method in methods_of(recipe):
        files |= sources(method)
    return dict(sorted(files.items()))


def methods_of(recipe: Node) -> frozenset[MergeMethod]:
    """The merge methods of a recipe, including those that its composites call."""
    methods = _METHODS.get(recipe)
    if methods is None:
        methods = _METHODS[recipe] = frozenset(call.method for call in _calls_of(recipe))
    return methods


def _calls_of(recipe: Node) -> list[MergeNode]:
    """The calls of a recipe, including those that its composites make."""
    try:
        expanded = expand(_variants(recipe))
    except MechaError:  # the merge reports it
        expanded = ()
    return calls_of(recipe, *expanded)


def _variants(recipe: Node) -> list[Node]:
    """Recipes without per-key values that together hold each of these values."""
    by_key = [n.value for n in walk(recipe) if isinstance(n, LiteralNode) and isinstance(n.value, ByKey)]

    def variant(index: int) -> Node:
        def choose(node: Node) -> Node:
            if not isinstance(node, LiteralNode) or not isinstance(node.value, ByKey):
                return node
            values = node.value.values
            return LiteralNode(values[min(index, len(values) - 1)], node.space)

        return rewrite([recipe], choose)[0]

    return [variant(index) for index in range(max([len(value.values) for value in by_key], default=1))]
