"""Reads the lines of a recipe text, and reports mistakes with line and column.

A `Dialect` gives the commands their meaning: version 0.1.0 is here, the older one in `text_legacy`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from mecha_exp.architectures.structural import STRUCTURAL
from mecha_exp.checkpoint import parse_dtype
from mecha_exp.errors import MechaError, RecipeError, counted, did_you_mean
from mecha_exp.graph.by_key import by_key
from mecha_exp.graph.literals import as_node, node_by_key
from mecha_exp.graph.nodes import LiteralNode, ModelNode, Node, ParameterNode
from mecha_exp.graph.selectors import has_nodes
from mecha_exp.method_api.method import MergeMethod
from mecha_exp.method_api.registry import resolve_method
from mecha_exp.numbers import number_in
from mecha_exp.recipe.text_writer import CONSTANTS, OF_DELTAS

MAX_LINES = 20_000
"""The most lines of a recipe: each is a node. Recipes of models have some hundreds."""

MAX_WORDS = 40_000
"""The most values in one line."""

MAX_PATH = 4096
"""The most characters in the path of a model."""

SHOWN_COLUMNS = 160
"""The most columns of a line that a message shows."""

SINGLE, SPREAD = "singleton-mecha", "convert_singleton"
"""sd-mecha's words for a value that is the same for all keys: a model of one key, and its conversion."""

_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}


@dataclass
class Arguments:
    """The arguments of a command.

    Attributes:
        values: those without a name, in order.
        named: the others.
        columns: the first column of each named one.
    """

    values: list[Any] = field(default_factory=list)
    named: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, int] = field(default_factory=dict)

    def word(self, expected: str) -> str:
        """Remove and return the first value, which must be a string."""
        if not self.values or not isinstance(self.values[0], str):
            raise RecipeError(f"expected {expected}")
        return str(self.values.pop(0))

    def take(self, *known: str) -> dict[str, Any]:
        """The arguments by name; those without a name take the `known` names in order."""
        for name in self.named:
            if name not in known:
                raise _Misplaced(f"unknown word '{name}'.{did_you_mean(name, known)}", self.columns[name])
        if (more := len(self.values) - len(known)) > 0:
            raise RecipeError(f"{counted(more, 'word')} too many")
        positional = dict(zip(known, self.values, strict=False))
        for name in self.named:
            if name in positional:
                raise _Misplaced(f"'{name}' is given twice", self.columns[name])
        return positional | self.named


@dataclass(frozen=True)
class Dialect:
    """The commands and the syntax of a format.

    Attributes:
        commands: by name, a function from arguments to a node or a dictionary.
        escapes: whether a backslash escapes the next character.
    """

    commands: Mapping[str, Callable[[Arguments], Any]]
    escapes: bool = True

    @cached_property
    def _string(self) -> str:
        return r'"(?:[^"\\]|\\.)*"' if self.escapes else r'"[^"]*"'

    @cached_property
    def _token(self) -> re.Pattern[str]:
        name = r'(?:[^ \t="\\]|\\.)+' if self.escapes else r'[^ \t="]+'
        value = rf'{self._string}|\[(?:{self._string}|[^"\]])*\]|[^ \t"\[][^ \t"]*'
        return re.compile(rf"(?:(?P<name>{name}|{self._string})=)?(?P<value>{value})")

    @cached_property
    def _item(self) -> re.Pattern[str]:
        return re.compile(rf'[ \t]*(?P<item>{self._string}|[^ \t,"]+)[ \t]*(?:,|$)')

    def arguments(self, line: str, column: int, results: Sequence[Any]) -> Arguments:
        """Parse the arguments from a column on."""
        arguments = Arguments()
        while column < len(line):
            match = self._token.match(line, column)
            if match is None:
                raise _Misplaced("a quote or a bracket is not closed", column)
            try:
                value = self._value(match["value"], results)
            except RecipeError as error:
                raise _Misplaced(str(error), column) from None
            if match["name"] is None:
                arguments.values.append(value)
            elif (name := self._plain(match["name"])) in arguments.named:
                raise _Misplaced(f"'{name}' is given twice", column)
            else:
                arguments.named[name], arguments.columns[name] = value, column
            if len(arguments.values) + len(arguments.named) > MAX_WORDS:
                raise _Misplaced(f"a line has at most {MAX_WORDS:,} values", column)
            column = _next_word(line, match.end())
        return arguments

    def _value(self, token: str, results: Sequence[Any]) -> Any:
        if token in CONSTANTS:
            return CONSTANTS[token]
        if token.startswith("&"):
            index = int(token[1:]) if token[1:].isdecimal() else -1
            if not 0 <= index < len(results):
                raise RecipeError(f"{token} refers to a line that does not come before this one")
            return results[index]
        if token.startswith('"'):
            return self._plain(token)
        if token.startswith("["):
            return [self._value(item, results) for item in self._items(token[1:-1].rstrip())]
        return _number(token)

    def _items(self, listed: str) -> Iterator[str]:
        end = 0
        while end < len(listed):
            match = self._item.match(listed, end)
            if match is None:
                raise RecipeError(f"expected values with commas between them, found [{listed}]")
            yield match["item"]
            end = match.end()

    def _plain(self, token: str) -> str:
        """A token without its quotes and backslashes."""
        plain = token[1:-1] if token.startswith('"') else token
        return re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[1]), plain) if self.escapes else plain


class _Misplaced(RecipeError):
    """A mistake at a column of a line."""

    def __init__(self, message: str, column: int) -> None:
        super().__init__(message)
        self.column = column


def read(lines: Iterable[str], dialect: Dialect) -> Node:
    """Read all lines; the last one is the recipe.

    Raises:
        RecipeError: a line is not valid; the message has the line, its number and the column.
    """
    results: list[Any] = []
    for number, line in enumerate(lines, 1):
        if has_content(line):
            if len(results) == MAX_LINES:
                raise RecipeError(f"line {number}: a recipe has at most {MAX_LINES:,} lines")
            results.append(_read_line(line, number, results, dialect))
    if not results:
        raise RecipeError("the recipe has no line after its version")
    return as_node(as_argument(results[-1]))


def has_content(line: str) -> bool:
    """Whether a line is neither blank nor a comment."""
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _read_line(line: str, number: int, results: Sequence[Any], dialect: Dialect) -> Any:
    start = _next_word(line, 0)
    try:
        command = re.split(r"[ \t]", line[start:], maxsplit=1)[0]
        if command not in dialect.commands:
            *most, last = dialect.commands
            raise RecipeError(f"unknown command '{command}': expected {', '.join(most)} or {last}")
        arguments = dialect.arguments(line, _next_word(line, start + len(command)), results)
        return dialect.commands[command](arguments)
    except (
        MechaError,
        ValueError,
        TypeError,
        RuntimeError,
        OverflowError,
    ) as error:  # the last two: torch
        column = error.column if isinstance(error, _Misplaced) else start
        raise RecipeError(f"line {number}, column {column + 1}: {error}\n{_excerpt(line, column)}") from None


def _excerpt(line: str, column: int) -> str:
    """The line, or the part of a long one around the column, with a mark below the column."""
    first = max(0, min(column - SHOWN_COLUMNS // 2, len(line) - SHOWN_COLUMNS))
    shown = line[first : first + SHOWN_COLUMNS].replace("\t", " ")
    return f"    {shown}\n    {' ' * (column - first)}^"


_WORD = re.compile(r"[^ \t]")


def _next_word(line: str, column: int) -> int:
    """The column of the next word, or the end of the line."""
    match = _WORD.search(line, column)
    return match.start() if match else len(line)


def _number(token: str) -> float | int:
    number = number_in(token)
    if number is None:
        raise RecipeError(f"expected a value, found {token!r}. Words are written in quotes.")
    return number


def read_dict(arguments: Arguments, of: type | tuple[type, ...] = ()) -> Mapping[str, Any]:
    """Read a dictionary; its meaning depends on the line that refers to it.

    Args:
        of: types that values may have besides numbers and strings.
    """
    if arguments.values or not arguments.named:
        raise RecipeError("expected pairs of a key pattern and a value, such as conv1=0.3")
    for name, value in arguments.named.items():
        listed = value if isinstance(value, list) else [value]
        if not isinstance(value, of) and any(isinstance(v, Node | Mapping | list) for v in listed):
            others = "another dictionary" if of else "another line"
            message = f"the value of '{name}' must be numbers or a word, not {others}"
            raise _Misplaced(message, arguments.columns[name])
    return arguments.named


def call(method: MergeMethod, arguments: Arguments, named: Mapping[str, Any]) -> Node:
    """Call a merge method with the arguments of a line."""
    values = map(as_argument, arguments.values)
    return method(*values, **{name: as_argument(value) for name, value in named.items()})


def as_argument(value: Any) -> Any:
    """A dictionary as a value by key, or as a node where it has nodes; all else as it is."""
    if not isinstance(value, Mapping):
        return value
    return node_by_key(value) if has_nodes(value) else by_key(value)


def _model(arguments: Arguments) -> Node:
    path = arguments.word("a path in quotes after 'model'")
    if len(path) > MAX_PATH:
        raise RecipeError(f"the path of a model has at most {MAX_PATH:,} characters, this one {len(path):,}")
    words = arguments.take("model_config", "merge_space")
    return ModelNode(path, _space(words) or "weight", _config(words))


def _parameter(arguments: Arguments) -> Node:
    name = arguments.word("a name in quotes after 'parameter'")
    words = arguments.take("merge_space", "model_config")
    return ParameterNode(name, _space(words), _config(words))


def _literal(arguments: Arguments) -> Node:
    if not arguments.values:
        raise RecipeError("expected a value after 'literal'")
    value = arguments.values.pop(0)
    words = arguments.take("model_config", "merge_space", "dtype", "shape")
    if isinstance(value, Node):
        return value
    config = _config(words)
    if has_nodes(value):
        return node_by_key(value, config)
    if isinstance(value, Mapping):
        is_single = config == SINGLE and list(value) == ["key"]
        value, config = (value["key"], None) if is_single else (by_key(value), config)
    if "dtype" in words:
        value = torch.tensor(value, dtype=parse_dtype(words["dtype"])).reshape(words.get("shape", [-1]))
    return LiteralNode(value, _space(words) or "param", config)


def _merge(arguments: Arguments) -> Any:
    name = arguments.word("the name of a method in quotes after 'merge'")
    if name == SPREAD and len(arguments.values) == 1 and not arguments.named:
        return arguments.values[0]
    first = arguments.values[0] if arguments.values else None
    for ours, theirs in OF_DELTAS.items():
        if name == theirs and isinstance(first, Node) and first.merge_space == "delta":
            name = ours
    return call(resolve_method(name), arguments, arguments.named)


def _config(words: Mapping[str, Any]) -> str | None:
    config = _word(words, "model_config")
    return None if config == STRUCTURAL else config


def _space(words: Mapping[str, Any]) -> str | None:
    return _word(words, "merge_space")


def _word(words: Mapping[str, Any], name: str) -> str | None:
    word = words.get(name)
    if word is not None and not isinstance(word, str):
        raise RecipeError(f"{name}: expected a word in quotes or null, found {word!r}")
    return word


DIALECT = Dialect(
    {
        "dict": lambda arguments: read_dict(arguments, Node),
        "literal": _literal,
        "model": _model,
        "parameter": _parameter,
        "merge": _merge,
    }
)
"""Version 0.1.0."""
