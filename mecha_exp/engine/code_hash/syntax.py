"""Reads source files: definitions without what changes nothing, and the names that they use."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple, TypeAlias

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Definition: TypeAlias = Function | ast.ClassDef
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)

_PLANNED = ("arranges", "reads", "reads_rows", "statistics", "measured", "paper_keys", "empty")
_DROPPED = {"Parameter": ("help",), "merge_method": (*_PLANNED, "title", "base"), "factor": _PLANNED}
"""Keywords of declarations that change no number; what a view arranges is hashed with the view."""


class Source(NamedTuple):
    """A source file.

    Attributes:
        text: as it stands there.
        tree: its syntax, without docstrings and help texts.
        definitions: the functions and classes, by the first line and the name.
        codes: what they compile to, by the same.
    """

    text: str
    tree: ast.Module
    definitions: dict[tuple[int, str], list[Definition]]
    codes: dict[tuple[int, str], list[tuple[Any, ...]]]


class Chain(NamedTuple):
    """A name with the attributes that are read of it: `numpy.linalg.norm`."""

    root: str
    attributes: tuple[str, ...]


def read(path: Path) -> Source | None:
    """A source file, parsed once for each version; None where it cannot be read."""
    try:
        status = path.stat()
        return _read(path, status.st_mtime_ns, status.st_size)
    except (OSError, SyntaxError, ValueError):
        return None


@lru_cache(maxsize=1000)
def _read(path: Path, mtime_ns: int, size: int) -> Source:
    text = path.read_text(encoding="utf-8")
    codes: dict[tuple[int, str], list[tuple[Any, ...]]] = {}
    for code in _codes(compile(text, str(path), "exec", dont_inherit=True)):
        codes.setdefault((code.co_firstlineno, code.co_name), []).append(byte_code(code))
    tree = ast.parse(text)
    definitions: dict[tuple[int, str], list[Definition]] = {}
    for node in ast.walk(tree):
        if isinstance(node, _DEFINITIONS):
            definitions.setdefault((_first_line(node), getattr(node, "name", "<lambda>")), []).append(node)
    return Source(text, strip(tree), definitions, codes)


def function_syntax(source: Source, code: CodeType) -> list[Definition]:
    """The definition of a function; empty where the file has changed since the function was loaded.

    Several lambdas of one line cannot be told apart, and are all given.
    """
    place = (code.co_firstlineno, code.co_name)
    return source.definitions.get(place, []) if byte_code(code) in source.codes.get(place, []) else []


def class_syntax(source: Source, name: str) -> list[Definition]:
    """The definitions of a class, by its qualified name."""
    nodes: list[ast.AST] = [source.tree]
    for part in name.replace(".<locals>", "").split("."):
        below = [child for node in nodes for child in _named_below(node)]
        nodes = [node for node in below if node.name == part]
    return [node for node in nodes if isinstance(node, ast.ClassDef)]


def _named_below(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child
        else:
            yield from _named_below(child)


def byte_code(code: CodeType) -> tuple[Any, ...]:
    """The byte code of a function, without file names, line numbers and docstrings."""
    document = code.co_consts[0] if code.co_consts and isinstance(code.co_consts[0], str) else None
    constants = [
        byte_code(c) if isinstance(c, CodeType) else repr(c)
        for c in code.co_consts
        if c is None or c is not document
    ]
    return code.co_code, tuple(constants), code.co_names, code.co_freevars


def strip(tree: ast.Module) -> ast.Module:
    """Remove docstrings, help texts and what is declared for planning alone; returns the tree."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and body:
            node.body = [statement for statement in body if not _is_text(statement)] or [ast.Pass()]
        if isinstance(node, ast.Call):
            dropped = _DROPPED.get(getattr(node.func, "id", getattr(node.func, "attr", "")), ())
            node.keywords = [keyword for keyword in node.keywords if keyword.arg not in dropped]
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.decorator_list = [_without_brackets(each) for each in node.decorator_list]
    return tree


def _without_brackets(decorator: ast.expr) -> ast.expr:
    """`@merge_method()` as `@merge_method`, which is the same."""
    return decorator.func if ast.unparse(decorator) == "merge_method()" else decorator  # type: ignore[attr-defined]


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


@cache
def unparse(node: ast.AST) -> str:
    """The text of a node, in one layout."""
    return ast.unparse(node)


@cache
def chains(node: ast.AST) -> list[Chain]:
    """Every name that is read, with its attributes, in the order of the text."""
    return list(dict.fromkeys(_chains(node)))


def _chains(node: ast.AST) -> Iterator[Chain]:
    attributes: list[str] = []
    inner = node
    while isinstance(inner, ast.Attribute):
        attributes.insert(0, inner.attr)
        inner = inner.value
    if isinstance(inner, ast.Global):  # `count += 1` reads what it assigns
        yield from (Chain(name, ()) for name in inner.names)
    if isinstance(inner, ast.Name):
        if not isinstance(inner.ctx, ast.Store):
            yield Chain(inner.id, tuple(attributes))
        return
    for child in ast.iter_child_nodes(inner):
        yield from _chains(child)


@cache
def imports(tree: ast.AST) -> list[ast.Import | ast.ImportFrom]:
    """Every import statement, those within functions included."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def bindings(tree: ast.Module, name: str) -> list[ast.stmt]:
    """The statements of a module, outside its functions, that give a name its value."""
    statements: list[ast.stmt] = []
    pending: list[ast.AST] = [tree]
    while pending:
        for child in ast.iter_child_nodes(pending.pop(0)):
            if isinstance(child, ast.stmt) and name in _bound(child):
                statements.append(child)
            elif not isinstance(child, _DEFINITIONS):
                pending.append(child)
    return statements


@cache
def assigned_within(tree: ast.Module) -> frozenset[str]:
    """The globals that functions of a module assign (`global name`)."""
    return frozenset(name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names)


def _bound(statement: ast.stmt) -> set[str]:
    """The names that a simple statement binds."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in statement.names}
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.For | ast.With):
        return {
            node.id
            for node in ast.walk(statement)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
    return set()


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _first_line(node: Definition) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])
