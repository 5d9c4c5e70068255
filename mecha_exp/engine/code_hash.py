"""What the code of merge methods is: the same hash where the same is computed."""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
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


def code_hashes(recipe: Node) -> dict[str, str]:
    """The hash of the code of each merge method of a recipe, and of those that its composites are made of."""
    try:
        expanded = expand(_for_keys(recipe))
    except MechaError:  # which the merge will say
        expanded = ()
    called = {node.method for node in walk(recipe, *expanded) if isinstance(node, MergeNode)}
    return {method.identifier: code_hash(method) for method in called}


def _for_keys(recipe: Node) -> list[Node]:
    """The recipe with the first of all values by key, with the second ones, and so on."""
    by_key = [n.value for n in walk(recipe) if isinstance(n, LiteralNode) and isinstance(n.value, ByKey)]

    def at(number: int) -> Node:
        def value(node: Node) -> Node:
            if not isinstance(node, LiteralNode) or not isinstance(node.value, ByKey):
                return node
            values = node.value.values
            return LiteralNode(values[min(number, len(values) - 1)], node.space)

        return rewrite([recipe], value)[0]

    return [at(number) for number in range(max([len(value.values) for value in by_key], default=1))]


@cache
def code_hash(method: MergeMethod) -> str:
    """The hash of the file that a method is in, for it may call what stands there, and of what it imports."""
    try:
        path = inspect.getsourcefile(method.__wrapped__)
        if path and Path(path).is_file():
            text = "\n".join(_code_in(file).meaning for file in files_of_code(Path(path)))
        else:
            text = normalised_source(inspect.getsource(method.__wrapped__))
        return hashlib.sha256(text.encode()).hexdigest()
    except (OSError, TypeError):  # typed at a prompt
        return hashlib.sha256(repr(_compiled(method.instantiate())).encode()).hexdigest()


def files_of_code(path: Path) -> list[Path]:
    """A program's file, then those in its folder that it imports, and that these import, by their names."""
    found, waiting = {path}, [path]
    while waiting:
        new = _code_in(waiting.pop()).imported - found
        found |= new
        waiting += new
    return [path, *sorted(found - {path})]


class _Code(NamedTuple):
    """What a file says: its text without what changes nothing, and the files that it imports."""

    meaning: str
    imported: frozenset[Path]


def _code_in(path: Path) -> _Code:
    status = path.stat()
    return _read(path, status.st_mtime_ns, status.st_size)


@cache
def _read(path: Path, changed: int, size: int) -> _Code:
    """The code in a file, once for each time that it was changed."""
    source = path.read_text(encoding="utf-8")
    try:
        tree = ast.parse(source)
    except SyntaxError:  # which its import will say
        return _Code(source, frozenset())
    return _Code(_meaning(tree), _imported_by(tree, path.parent))


def _imported_by(tree: ast.Module, folder: Path) -> frozenset[Path]:
    """The files in a folder that a program imports: `x.y` is `x/y.py` there or, as in a package, `y.py`."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module or ''}.{alias.name}" for alias in node.names} | {node.module or ""}
    parts = [name.strip(".").split(".") for name in names]
    tails = ["/".join(part[start:]) for part in parts for start in range(len(part))]
    return frozenset(file for tail in tails if tail and (file := folder / f"{tail}.py").is_file())


def _compiled(function: Any) -> tuple[Any, ...]:
    """What a function, or an object that is called, was compiled to, without the place where that was."""
    called = function if inspect.isfunction(function) else type(function).__call__
    return _parts_of(called.__code__)


def _parts_of(code: CodeType) -> tuple[Any, ...]:
    constants = [_parts_of(c) if isinstance(c, CodeType) else c for c in code.co_consts]
    return code.co_code, constants, code.co_names


def normalised_source(source: str) -> str:
    """A program's text without comments, layout and docstrings, none of which changes what it computes."""
    try:
        return _meaning(ast.parse(textwrap.dedent(source)))
    except SyntaxError:
        return source


def _meaning(tree: ast.Module) -> str:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and body and _is_text(body[0]):
            node.body = body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
