"""Tells which modules a hash of code looks into, and what stands for the others."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from mecha_exp.engine.code_hash.syntax import imports, read
from mecha_exp.method_api.registry import BUILTIN_METHODS

_OWN = "mecha_exp"
_EVALUATORS = "mecha_exp.evaluators"
_LEFT_OUT = frozenset({"torch", "numpy", "builtins", "typing_extensions", *sys.stdlib_module_names}) - {
    "__main__"
}
_INSTALLED = ("site-packages", "dist-packages")


@cache
def label_of(module: str | None, root: str) -> str | None:
    """What stands for a module in the hash of a function; None where the hash looks into the module.

    Args:
        module: its name.
        root: the module of the function.
    """
    if module is None:
        return "builtins"
    top = module.partition(".")[0]
    if top in _LEFT_OUT:
        return top
    if module == root or f"{module}.".startswith((f"{BUILTIN_METHODS}.", f"{_EVALUATORS}.")):
        return None
    if top == _OWN:
        return top
    return None if top == root.partition(".")[0] else _installed(top)


@cache
def _installed(top: str) -> str | None:
    """A package in `site-packages` with the hash of its code; None for one that lies elsewhere."""
    spec = None
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # such as a plugin, which is loaded from a file
        return None
    places = [spec.origin or "", *(spec.submodule_search_locations or ())] if spec else []
    if not any(part in Path(place).parts for place in places for part in _INSTALLED):
        return None
    distribution = _distribution(top)
    if distribution is None:
        return None
    files = [f"{f} {f.hash.value}" for f in distribution.files or () if f.hash and f.suffix != ".pyc"]
    code = sorted(line for line in files if ".dist-info" not in line)
    digest = hashlib.sha256("\n".join(code).encode()).hexdigest()[:16]
    return f"{top} {distribution.version} {digest}"


def _distribution(top: str) -> importlib.metadata.Distribution | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.distribution(top)
    for name in importlib.metadata.packages_distributions().get(top, ()):  # reads all of them: a second
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.distribution(name)
    return None


def imported(statement: ast.Import | ast.ImportFrom, package: str, root: str) -> dict[str, object]:
    """What an import statement within a function binds, by name: modules, and what it takes out of them.

    A module that the hash does not look into is its label in place of the module, and is not imported.
    """
    bound: dict[str, object] = {}
    for alias in statement.names:
        try:
            if isinstance(statement, ast.Import):
                first = alias.name.partition(".")[0]
                module = _import(alias.name, root)
                whole = alias.asname is not None or isinstance(module, str)
                bound[alias.asname or first] = module if whole else sys.modules[first]
            else:
                name = importlib.util.resolve_name("." * statement.level + (statement.module or ""), package)
                bound[alias.asname or alias.name] = _member(name, alias.name, root)
        except Exception as error:  # as it will fail when the function runs, if it runs so far
            bound[alias.asname or alias.name] = f"{type(error).__name__} on import"
    return bound


def _member(module: str, name: str, root: str) -> object:
    imported_module = _import(module, root)
    if isinstance(imported_module, str):
        return f"{imported_module}:{name}"
    if hasattr(imported_module, name):
        return getattr(imported_module, name)
    return _import(f"{module}.{name}", root)


def _import(name: str, root: str) -> ModuleType | str:
    return label_of(name, root) or importlib.import_module(name)


def source_path(module: ModuleType) -> Path | None:
    """The source file of a module."""
    file = getattr(module, "__file__", None)
    return Path(file) if file and file.endswith(".py") and Path(file).is_file() else None


def with_imported(modules: list[ModuleType], root: str) -> list[ModuleType]:
    """Modules with all that they need to be imported: their packages, and what they import, transitively."""
    needed = {module.__name__: module for module in modules}
    pending = list(modules)
    while pending:
        module = pending.pop()
        for name in _needed_names(module):
            other = sys.modules.get(name)
            if other is not None and name not in needed and label_of(name, root) is None:
                needed[name] = other
                pending.append(other)
    return list(needed.values())


def _needed_names(module: ModuleType) -> set[str]:
    names = {module.__name__}
    path = source_path(module)
    source = read(path) if path else None
    package = module.__package__ or ""
    for statement in imports(source.tree) if source else ():
        if isinstance(statement, ast.Import):
            names |= {alias.name for alias in statement.names}
        elif not statement.level or package:
            name = importlib.util.resolve_name("." * statement.level + (statement.module or ""), package)
            names |= {name, *(f"{name}.{alias.name}" for alias in statement.names)}
    parts = [name.split(".") for name in names]
    return {".".join(words[:count]) for words in parts for count in range(1, len(words) + 1)}
