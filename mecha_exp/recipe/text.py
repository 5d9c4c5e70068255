"""The text form of a recipe, `.mecha` version 0.1.0 as sd-mecha writes it.

One line a node that others refer to, `&N` being the N-th line after the version; the last line is the
recipe:

    version 0.1.0
    model "a.safetensors" model_config=null merge_space="weight"
    model "b.safetensors" model_config=null merge_space="weight"
    merge "weighted_sum" &0 &1 alpha=0.3

Beyond sd-mecha it can say lists (`[0.3,0.7]`), infinities, tensors, and dictionary keys in quotes. Reading a
recipe never runs code and opens no file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from mecha_exp.checkpoint import parse_dtype
from mecha_exp.errors import MechaError, RecipeError, did_you_mean
from mecha_exp.method import resolve_method
from mecha_exp.nodes import (
    InMemory,
    LiteralNode,
    MergeNode,
    ModelNode,
    Node,
    as_node,
    walk,
)
from mecha_exp.weighting import ByKey, Scalar, by_key

VERSION_LINE = "version 0.1.0"
_CONSTANTS: dict[str, Scalar] = {"null": None, "true": True, "false": False}
_QUOTED = r'"(?:[^"\\]|\\.)*"'
_TOKEN = re.compile(
    rf'\s*(?:(?P<name>[^\s="]+|{_QUOTED})=)?(?P<value>{_QUOTED}|\[(?:{_QUOTED}|[^"\]])*\]|[^\s"\[][^\s"]*)'
)
_ITEM = re.compile(rf"\s*(?P<item>{_QUOTED}|[^,]+?)\s*(?:,|$)")
_BARE = re.compile(r'[^\s="\\]+')
_COMMANDS = {
    "literal": ("a value", ("model_config", "merge_space", "dtype", "shape")),
    "model": ("a path in quotes", ("model_config", "merge_space")),
    "merge": ("the name of a method in quotes", ()),
}
_SINGLE, _SPREAD = "singleton-mecha", "convert_singleton"
"""How sd-mecha writes a value that is the same for all keys: a model of one key, and its conversion."""
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}


def serialize(recipe: Node) -> str:
    """The text of a recipe; equal recipes have equal texts.

    Raises:
        RecipeError: the recipe has an in-memory model, which a text cannot name.
    """
    lines: dict[str, int] = {}  # a line and its number: equal lines are one
    references: dict[Node, str] = {}
    for node in walk(recipe):
        references[node] = _write_node(node, references, lines)
    if references[recipe] != f"&{len(lines) - 1}":  # a number, which has no line where it is an argument
        _add(f"literal {references[recipe]}", lines)
    return "\n".join([VERSION_LINE, *lines])


def deserialize(text: str) -> Node:
    """The recipe that a text describes.

    Raises:
        RecipeError: with the line, the column and the line's text.
    """
    lines = text.split("\n")  # a path may hold the other characters that splitlines() splits at
    if lines[0].strip() != VERSION_LINE:
        found = repr(lines[0]) if text else "an empty text"
        raise RecipeError(f"line 1: expected '{VERSION_LINE}', found {found}")
    results: list[Any] = []
    for number, line in enumerate(lines[1:], 2):
        if line.strip() and not line.lstrip().startswith("#"):
            results.append(_read_line(line, number, results))
    if not results:
        raise RecipeError("the recipe has no line after its version")
    return as_node(results[-1])


def _write_node(node: Node, references: Mapping[Node, str], lines: dict[str, int]) -> str:
    if isinstance(node, LiteralNode):
        return _write_literal(node, lines)
    if isinstance(node, ModelNode):
        if isinstance(node.source, InMemory):
            raise RecipeError(f"{node.source} has no path, so the recipe cannot be written as text")
        return _add(f"model {_quote(node.source)} model_config=null merge_space={_quote(node.space)}", lines)
    assert isinstance(node, MergeNode)
    words = ["merge", _quote(node.method.identifier)]
    by_name = []
    positional = True
    arguments = dict(node.arguments)
    for spec in node.method.signature.parameters:
        given = arguments.get(spec.name)
        if isinstance(given, tuple):
            listed = [references[child] for child in given]
            words += listed if positional else [f"{spec.name}=[{','.join(listed)}]"]
            positional = False
        elif given is None:
            positional = False
        elif positional and spec.required:
            words.append(references[given])
        else:
            by_name.append(f"{spec.name}={references[given]}")
            positional = False
    return _add(" ".join(words + by_name), lines)


def _write_literal(node: LiteralNode, lines: dict[str, int]) -> str:
    value = node.value
    if isinstance(value, ByKey):
        pairs = [*value.patterns, *([] if value.default is None else [("default", value.default)])]
        written = _add("dict " + " ".join(f"{_name(k)}={_write_scalar(v)}" for k, v in pairs), lines)
    elif isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        numbers = ",".join(_write_scalar(v) for v in value.reshape(-1).tolist())
        shape = ",".join(map(str, value.shape))
        return _add(f'literal [{numbers}] dtype="{dtype}" shape=[{shape}] merge_space="{node.space}"', lines)
    elif isinstance(value, tuple):
        written = "[" + ",".join(_write_scalar(v) for v in value) + "]"
    else:
        written = _write_scalar(value)
    return written if node.space == "param" else _add(f'literal {written} merge_space="{node.space}"', lines)


def _write_scalar(value: Scalar) -> str:
    if isinstance(value, str):
        return _quote(value)
    for word, constant in _CONSTANTS.items():
        if value is constant:
            return word
    return repr(value)


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + escaped.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t") + '"'


def _name(text: str) -> str:
    return text if _BARE.fullmatch(text) else _quote(text)


def _add(line: str, lines: dict[str, int]) -> str:
    return f"&{lines.setdefault(line, len(lines))}"


def _read_line(line: str, number: int, results: list[Any]) -> Any:
    start = column = _next(line, 0)
    try:
        command = line.split(maxsplit=1)[0]
        column = _next(line, start + len(command))
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        while column < len(line):
            match = _TOKEN.match(line, column)
            if match is None:
                raise RecipeError("a quote or a bracket is not closed")
            value = _read_value(match["value"], results)
            if match["name"] is None:
                args.append(value)
            elif (name := _unquote(match["name"])) in kwargs:
                raise RecipeError(f"'{name}' is given twice")
            else:
                kwargs[name] = value
            column = _next(line, match.end())
        column = start
        return _run_line(command, args, kwargs)
    except (MechaError, ValueError, TypeError, RuntimeError) as error:  # the last two are torch's
        raise RecipeError(f"line {number}, column {column + 1}: {error}\n    {line}") from None


def _next(line: str, column: int) -> int:
    """Where the next word begins, or the end of the line."""
    return len(line) - len(line[column:].lstrip())


def _run_line(command: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if command == "dict":
        if args or not kwargs:
            raise RecipeError("expected pairs of a key pattern and a value, such as conv1=0.3")
        return by_key(kwargs)
    if command not in _COMMANDS:
        raise RecipeError(f"unknown command '{command}': expected dict, literal, model or merge")
    if not args or (command in ("model", "merge") and not isinstance(args[0], str)):
        raise RecipeError(f"expected {_COMMANDS[command][0]} after '{command}'")
    if command == "merge":
        is_plain = args[0] == _SPREAD and len(args) == 2 and not kwargs
        return args[1] if is_plain else resolve_method(args[0])(*args[1:], **kwargs)
    _, known = _COMMANDS[command]
    for name in kwargs:
        if name not in known:
            raise RecipeError(f"unknown word '{name}'.{did_you_mean(name, known)}")
    for name, value in zip(known, args[1:], strict=False):
        kwargs.setdefault(name, value)
    if command == "model":
        return ModelNode(args[0], kwargs.get("merge_space") or "weight")
    return _read_literal(args[0], kwargs)


def _read_literal(value: Any, words: Mapping[str, Any]) -> Node:
    if isinstance(value, Node):
        return value
    if isinstance(value, ByKey) and words.get("model_config") == _SINGLE:
        value = value("key")
    if "dtype" in words:
        value = torch.tensor(value, dtype=parse_dtype(words["dtype"])).reshape(words.get("shape", [-1]))
    return LiteralNode(value, words.get("merge_space") or "param")


def _read_value(token: str, results: list[Any]) -> Any:
    if token in _CONSTANTS:
        return _CONSTANTS[token]
    if token.startswith("&"):
        index = int(token[1:]) if token[1:].isdecimal() else -1
        if not 0 <= index < len(results):
            raise RecipeError(f"{token} refers to a line that does not come before this one")
        return results[index]
    if token.startswith('"'):
        return _unquote(token)
    if token.startswith("["):
        return [_read_value(part["item"], results) for part in _ITEM.finditer(token[1:-1].strip())]
    return _read_number(token)


def _read_number(token: str) -> float | int:
    try:
        return int(token)
    except ValueError:
        pass
    try:
        return float(token)
    except ValueError:
        raise RecipeError(f"expected a value, found {token!r}. Words are written in quotes.") from None


def _unquote(token: str) -> str:
    if not token.startswith('"'):
        return token
    return re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[1]), token[1:-1], flags=re.DOTALL)
