"""Hashes the source that decides what a merge method computes.

A hash covers the file of the method and the files of its own package that this file imports, directly or
through others: for a plugin the modules and packages beside it, for a built-in method its siblings in
`mecha_exp.methods`. It covers neither comments and docstrings, nor installed packages, nor the rest of
mecha_exp: what the API and the engine compute is covered by `lab.signature.FORMAT`.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

from mecha_exp.engine.ir.expansion import expand
from mecha_exp.errors import MechaError
from mecha_exp.graph.by_key import ByKey
from mecha_exp.graph.nodes import LiteralNode, MergeNode, Node, walk
from mecha_exp.graph.rewrite import rewrite
from mecha_exp.method_api.method import MergeMethod
from mecha_exp.method_api.registry import BUILTIN_METHODS


def code_hashes(recipe: Node) -> dict[str, str]:
    """Hash the code of each merge method of a recipe, including the methods that its composites call."""
    try:
        expanded = expand(_variants(recipe))
    except MechaError:  # the merge reports it
        expanded = ()
    methods = {node.method for node in walk(recipe, *expanded) if isinstance(node, MergeNode)}
    return {method.identifier: code_hash(method) for method in methods}


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


@cache
def code_hash(method: MergeMethod) -> str:
    """Hash the code of a merge method: its file and what that imports from its package.

    A method without a source file is hashed by its byte code.
    """
    try:
        path = inspect.getsourcefile(method.__wrapped__)
        if path and Path(path).is_file():
            text = "\n".join(_parse(file).text for file in files_of_code(Path(path)))
        else:
            text = normalised_source(inspect.getsource(method.__wrapped__))
        return hashlib.sha256(text.encode()).hexdigest()
    except (OSError, TypeError):  # typed at a prompt
        return hashlib.sha256(repr(_byte_code(method.instantiate())).encode()).hexdigest()


def files_of_code(path: Path) -> list[Path]:
    """The files that the hash of a method in `path` covers: `path`, then the others by their names."""
    files, pending = {path}, [path]
    while pending:
        new = _parse(pending.pop()).imports - files
        files |= new
        pending += new
    return [path, *sorted(files - {path})]


class _Source(NamedTuple):
    """The normalised text of a file, and the files of its package that it imports."""

    text: str
    imports: frozenset[Path]


def _parse(path: Path) -> _Source:
    status = path.stat()
    return _parse_version(path, status.st_mtime_ns, status.st_size)


@cache
def _parse_version(path: Path, mtime_ns: int, size: int) -> _Source:
    """Parse a file, once for each version of it."""
    source = path.read_text(encoding="utf-8")
    try:
        tree = ast.parse(source)
    except SyntaxError:  # its import reports it
        return _Source(source, frozenset())
    imports = frozenset(file for name in _imported_names(tree) if (file := _resolve(name, path)))
    return _Source(_normalised(tree), imports - {path})


def _imported_names(tree: ast.Module) -> set[str]:
    """What a file imports, by dotted names; relative ones begin with their dots."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (f"{node.module}." if node.module else "")
            names |= {module + alias.name for alias in node.names}
    return names


def _resolve(name: str, importer: Path) -> Path | None:
    """The file of the importer's package that an imported name comes from, if there is one."""
    folder = importer.parent
    if name.startswith("."):
        module = name.lstrip(".")
        root = [folder, *folder.parents][len(name) - len(module) - 1]
        return _module_file(root, module.split(".")) or _existing(root / "__init__.py")
    if name.startswith(f"{BUILTIN_METHODS}."):
        name = name.removeprefix(f"{BUILTIN_METHODS}.")
    elif name.split(".")[0] == "mecha_exp":
        return None
    parts = name.split(".")
    packages = [parent.parent for parent in (folder, *folder.parents) if parent.name == parts[0]]
    files = (_module_file(root, parts) for root in (folder, *packages))
    return next((file for file in files if file is not None), None)


def _module_file(root: Path, parts: Sequence[str]) -> Path | None:
    """The file of a dotted name below a folder; its last part is a module, or a name in a module."""
    modules = [root.joinpath(*parts[:count]) for count in (len(parts), len(parts) - 1) if count]
    files = ((module.with_name(f"{module.name}.py"), module / "__init__.py") for module in modules)
    return next((file for pair in files for file in pair if _existing(file)), None)


def _existing(file: Path) -> Path | None:
    return file if file.is_file() else None


def _byte_code(function: Any) -> tuple[Any, ...]:
    """The byte code of a function or a callable object, without file names and line numbers."""
    called = function if inspect.isfunction(function) else type(function).__call__
    return _parts_of_code(called.__code__)


def _parts_of_code(code: CodeType) -> tuple[Any, ...]:
    constants = [_parts_of_code(c) if isinstance(c, CodeType) else c for c in code.co_consts]
    return code.co_code, constants, code.co_names


def normalised_source(source: str) -> str:
    """The source without comments, layout and docstrings, none of which changes what it computes."""
    try:
        return _normalised(ast.parse(textwrap.dedent(source)))
    except SyntaxError:
        return source


def _normalised(tree: ast.Module) -> str:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and body and _is_docstring(body[0]):
            node.body = body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
