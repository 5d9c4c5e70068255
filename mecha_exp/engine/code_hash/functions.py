"""Hashes functions with all that they reach by name; see the package."""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import hashlib
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mecha_exp.engine.code_hash import modules, syntax
from mecha_exp.engine.code_hash.data import Data, content_of_data
from mecha_exp.engine.code_hash.values import NoValueError, encode_value
from mecha_exp.method_api.method import MergeMethod
from mecha_exp.method_api.views import ViewMethod

_OF_PYTHON = 1 << 9
"""The flag of classes that were made by Python code (`Py_TPFLAGS_HEAPTYPE`)."""


@dataclass(frozen=True)
class Reach:
    """The code and data that a function reaches.

    Attributes:
        text: all of it in a canonical form, without paths.
        modules: the modules that it was read from.
        data: the files and environment variables that decide what it computes.
        root: the module of the function.
    """

    text: str
    modules: tuple[types.ModuleType, ...]
    data: Data
    root: str


def of_function(function: Callable[..., Any] | MergeMethod) -> str:
    """Hash the code of a function, a class or a merge method: a SHA-256 in hex.

    Equal for equal code, wherever its files lie. Declared data (`depends=`) is read each time; a function
    itself is looked at once in a process.

    Raises:
        ConfigError: a declared data file does not exist.
    """
    reached = reach(function)
    text = f"{reached.text}\n{content_of_data(reached.data)}"
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()


def is_own(value: object) -> bool:
    """Whether a class or a function is one of mecha_exp, whose version stands for its code."""
    return str(getattr(value, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]


def sources(function: Callable[..., Any] | MergeMethod) -> dict[Path, str]:
    """The source files that a function needs, as they stand: what it reaches, and what these files import."""
    files: dict[Path, str] = {}
    for module in source_modules(function):
        path = modules.source_path(module)
        source = syntax.read(path) if path else None
        if path and source:
            files[path.absolute()] = source.text
    return dict(sorted(files.items()))


def source_modules(function: Callable[..., Any] | MergeMethod) -> list[types.ModuleType]:
    """The modules of `sources`."""
    reached = reach(function)
    return modules.with_imported(list(reached.modules), reached.root)


@functools.cache
def reach(function: Callable[..., Any] | MergeMethod) -> Reach:
    """Follow all names from a function, a class or a merge method."""
    inner = function.function if isinstance(function, MergeMethod) else function
    walk = _Walk(getattr(inner, "__module__", None) or "builtins")
    walk.encode(function)
    return Reach("\n".join(walk.lines), tuple(walk.modules.values()), walk.data, walk.root)


class _Walk:
    """A walk over objects, which are numbered as they are met, so that names of modules do not matter."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.lines: list[str] = []
        self.modules: dict[str, types.ModuleType] = {}
        self.data = Data()
        self._numbers: dict[int, int] = {}
        self._places: list[tuple[str, str]] = []
        self._sources: dict[str, syntax.Source | None] = {}
        self._alive: list[object] = []  # an `id` holds as long as its object lives

    def encode(self, value: object) -> str:
        """The text that stands for an object: its value, or the number of its line.

        Raises:
            NoValueError: it has neither a value nor code that could be told.
        """
        describe = self._describer(value)
        if describe is None:
            return encode_value(value, self)
        return self.numbered(value, lambda: describe(value))

    def numbered(self, value: object, describe: Callable[[], str]) -> str:
        """The number of an object, which is described when it is met first."""
        if id(value) in self._numbers:
            return f"#{self._numbers[id(value)]}"
        number = self._numbers[id(value)] = len(self.lines)
        self._alive.append(value)
        self.lines.append("")
        try:
            self.lines[number] = f"#{number} {describe()}"
        except NoValueError:
            del self._numbers[id(value)]  # its line stays empty
            raise
        return f"#{number}"

    def text(self, word: str) -> str:
        """A string constant; a path beside the code is relative to it, so that the folder may move."""
        for place, stand_in in self._places:
            if word == place or word.startswith(place + os.sep):
                return stand_in + word.removeprefix(place)
        return word

    def _describer(self, value: object) -> Callable[[Any], str] | None:
        if isinstance(value, MergeMethod):
            return self._method
        if isinstance(value, types.FunctionType):
            return self._function
        if isinstance(value, types.ModuleType):
            return self._module
        if isinstance(value, type):
            return self._class
        if inspect.isroutine(getattr(value, "__wrapped__", None)) and not isinstance(value, types.MethodType):
            return self._wrapper
        return None

    def _wrapper(self, wrapper: Any) -> str:
        """A callable around a function, such as `functools.cache` makes it."""
        return (
            f"{type(wrapper).__module__}:{type(wrapper).__qualname__} of {self.encode(wrapper.__wrapped__)}"
        )

    def _method(self, method: MergeMethod) -> str:
        """A merge method: its function, and what its decorator was given."""
        self.data.add(method.depends, method.variables, f"the merge method '{method.identifier}'")
        more = ("rounds", "finish", "sums", "rank", "elements", "columns", "choose", "create_cache")
        parts = [f"{name}={self._or_name(getattr(method, name, None))}" for name in more]
        parts += ["of_model"] if getattr(method, "of_model", False) else []
        if isinstance(method, ViewMethod):
            parts.append(f"arranges={method.arranges.value} reads_rows={self._or_name(method.reads_rows)}")
        if method.reads is not None and not is_own(method.reads):
            parts.append(f"reads={self._or_name(method.reads)}")
        parts += [f"without={self._or_name(method.without)}"] if method.without else []
        parts += [self.encode(m) for m in sorted(method.implementations, key=lambda m: m.identifier)]
        return f"{method.kind.value} {self._code_of(method.function)} {' '.join(parts)}"

    def _code_of(self, wrapped: Any) -> str:
        """The function or the class of a merge method, which is looked into wherever it is defined."""
        describe = self._describer(wrapped)
        if getattr(wrapped, "__module__", None) and modules.label_of(wrapped.__module__, self.root):
            before, self.root = self.root, wrapped.__module__
            try:
                return self.numbered(wrapped, lambda: describe(wrapped) if describe else repr(wrapped))
            finally:
                self.root = before
        return self.encode(wrapped)

    def _or_name(self, value: object) -> str:
        try:
            return self.encode(value)
        except NoValueError:
            return type(value).__qualname__

    def _module(self, module: types.ModuleType) -> str:
        """A whole module, where it is used as a value."""
        if label := modules.label_of(module.__name__, self.root):
            return f"module {label}"
        source = self._source(module.__name__)
        if source is None:
            return "module without a file"
        return (
            f"module {syntax.unparse(source.tree)}\n{self._names(syntax.chains(source.tree), vars(module))}"
        )

    def _function(self, function: types.FunctionType) -> str:
        typed = function.__module__ in (None, "builtins")  # at a prompt, or by `exec`
        if not typed and (label := modules.label_of(function.__module__, self.root)):
            return f"{label}:{function.__name__}"
        source = self._source(function.__module__, function.__code__.co_filename)
        nodes = syntax.function_syntax(source, function.__code__) if source else []
        scope = _scope(function)
        if nodes:
            body = "\n".join(syntax.unparse(node) for node in nodes)
            local = self._imported(nodes, function.__globals__)
            names = self._names(
                [c for node in nodes for c in syntax.chains(node)], {**scope, **local}, source
            )
        else:  # typed at a prompt, or the file has changed since
            body = repr(syntax.byte_code(function.__code__))
            names = self._names([syntax.Chain(n, ()) for n in _global_names(function.__code__)], scope)
        values = self._attributes(
            {"defaults": function.__defaults__, "keywords": function.__kwdefaults__, **vars(function)}
        )
        return f"function {body}\n{names}\n{values}"

    def _class(self, cls: type) -> str:
        typed = cls.__module__ == "builtins" and bool(cls.__flags__ & _OF_PYTHON)
        if not typed and (label := modules.label_of(cls.__module__, self.root)):
            return f"{label}:{cls.__qualname__}"
        source = self._source(cls.__module__)
        nodes = syntax.class_syntax(source, cls.__qualname__) if source else []
        bases = " ".join(self.encode(base) for base in cls.__bases__)
        members = self._attributes(
            {name: _unwrapped(value) for name, value in vars(cls).items() if _has_code(value)}
        )
        if not nodes:
            plain = {n: v for n, v in vars(cls).items() if not _has_code(v) and not n.startswith("__")}
            return f"class {bases}\n{members}\n{self._attributes(plain)}"
        scope = vars(sys.modules[cls.__module__])
        body = "\n".join(syntax.unparse(node) for node in nodes)
        names = self._names([c for node in nodes for c in syntax.chains(node)], scope, source)
        return f"class {bases}\n{body}\n{names}\n{members}"

    def _attributes(self, values: Mapping[str, object]) -> str:
        return "\n".join(
            f"{name}={self._or_name(value)}" for name, value in values.items() if value is not None
        )

    def _imported(self, nodes: Iterable[ast.AST], scope: Mapping[str, Any]) -> dict[str, Any]:
        """The names that the import statements of a function bind."""
        package = scope.get("__package__") or ""
        bound: dict[str, Any] = {}
        for node in nodes:
            for statement in syntax.imports(node):
                bound |= modules.imported(statement, package, self.root)
        return bound

    def _names(
        self, chains: Iterable[syntax.Chain], scope: Mapping[str, Any], source: syntax.Source | None = None
    ) -> str:
        """The values of names: a line for each name that is not a builtin or local."""
        lines = {}
        for chain in chains:
            if chain.root in scope:
                name, value = self._resolve(chain, scope[chain.root])
                if name not in lines:
                    lines[name] = self._global(name, value, scope, source)
            elif chain.root == "__file__":
                lines[chain.root] = "<file>"
        return "\n".join(f"{name} = {text}" for name, text in lines.items())

    def _resolve(self, chain: syntax.Chain, value: object) -> tuple[str, object]:
        """Follow the attributes of modules that the hash looks into."""
        name = chain.root
        for attribute in chain.attributes:
            if not isinstance(value, types.ModuleType) or modules.label_of(value.__name__, self.root):
                break
            if not hasattr(value, attribute):
                break
            self._source(value.__name__)
            name, value = f"{name}.{attribute}", getattr(value, attribute)
        return name, value

    def _global(
        self, name: str, value: object, scope: Mapping[str, Any], source: syntax.Source | None
    ) -> str:
        """The value of a global or, where it has none that could be told, the statements that make it."""
        if name in ("__name__", "__file__", "__builtins__", "__spec__", "__loader__"):
            return "<module>"
        if value is getattr(builtins, name, self):
            return "builtin"
        if source is None or name not in syntax.assigned_within(source.tree):  # else it is a state
            with contextlib.suppress(NoValueError):
                return self.encode(value)
        statements = syntax.bindings(source.tree, name) if source else []
        if not statements:
            return self.numbered(value, lambda: f"a {type(value).__qualname__}")

        def describe() -> str:
            used = [c for s in statements for c in syntax.chains(s) if c.root != name]
            return f"{'; '.join(map(syntax.unparse, statements))}\n{self._names(used, scope, source)}"

        return self.numbered(statements[0], describe)

    def _source(self, name: str, file: str | None = None) -> syntax.Source | None:
        """The source of a module, which is remembered as looked into.

        Args:
            name: of the module.
            file: where its code was loaded from, which counts more: another module may have the name by now.
        """
        place = file or name
        if place not in self._sources:
            module = sys.modules.get(name)
            path = Path(file) if file else modules.source_path(module) if module else None
            self._sources[place] = syntax.read(path) if path else None
            if path and self._sources[place]:
                self._places += [(name, "<module>"), (str(path.absolute().parent), "<folder>")]
                if module:
                    self.modules[name] = module
        return self._sources[place]


def _scope(function: types.FunctionType) -> dict[str, Any]:
    """The globals of a function, and what it has taken from the functions around it."""
    scope = dict(function.__globals__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            scope[name] = cell.cell_contents
        except ValueError:  # not bound yet
            scope.pop(name, None)
    return scope


def _global_names(code: types.CodeType) -> list[str]:
    names = [*code.co_names, *code.co_freevars]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _global_names(constant)
    return list(dict.fromkeys(names))


def _has_code(value: object) -> bool:
    return isinstance(
        value, types.FunctionType | staticmethod | classmethod | property | functools.cached_property
    )


def _unwrapped(value: Any) -> object:
    """The functions of a member of a class."""
    if isinstance(value, property):
        return tuple(f for f in (value.fget, value.fset, value.fdel) if f is not None)
    if isinstance(value, functools.cached_property):
        return value.func
    return getattr(value, "__func__", value)
