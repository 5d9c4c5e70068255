"""Writes recipes as lines of text: see `mecha_exp.recipe.text` for the format.

A recipe that sd-mecha 1.1.8 can express is written in its words. Equal lines are written once and defaults
are left out, so that equal recipes have equal texts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mecha_exp.errors import RecipeError
from mecha_exp.graph.by_key import ByKey, Scalar, Value, curve_words
from mecha_exp.graph.curves import Gradient, Preset
from mecha_exp.graph.nodes import InMemory, LiteralNode, MergeNode, ModelNode, Node, ParameterNode, walk
from mecha_exp.graph.selectors import mapping_of

OF_DELTAS = {"dropout_deltas": "dropout"}
"""Methods of deltas, and the name that sd-mecha has for both these and the method of weights."""

CONSTANTS: dict[str, Scalar] = {"null": None, "true": True, "false": False}

_SPECIAL = re.compile(r'[ "\\]')
_NEEDS_QUOTES = re.compile(r"[=\t\r\n]|^$")
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_ESCAPED = re.compile("|".join(map(re.escape, _ESCAPES)))


def write_lines(recipe: Node) -> list[str]:
    """The lines of a recipe after the version line.

    Raises:
        RecipeError: the recipe has an in-memory model.
    """
    lines: dict[str, int] = {}  # each line and its number
    words: dict[Node, str] = {}  # the text of each node where it is an argument
    for node in walk(recipe, children=_referenced):
        words[node] = _write(node, words, lines)
    if words[recipe] != f"&{len(lines) - 1}":  # a number, which has no line of its own
        _add(f"literal {words[recipe]}", lines)
    return list(lines)


def _referenced(node: Node) -> Sequence[Node]:
    """The nodes that the line of a node refers to."""
    choice = mapping_of(node)
    return node.children if choice is None else [v for v in choice[0].values() if isinstance(v, Node)]


def _write(node: Node, words: Mapping[Node, str], lines: dict[str, int]) -> str:
    if isinstance(node, LiteralNode):
        return _write_literal(node, lines)
    if isinstance(node, ModelNode):
        if isinstance(node.source, InMemory):
            raise RecipeError(f"{node.source} has no path, so the recipe cannot be written as text")
        config = write_scalar(node.config)
        return _add(
            f"model {quote(node.source)} model_config={config} merge_space={quote(node.space)}", lines
        )
    if isinstance(node, ParameterNode):
        constraints = {"merge_space": node.space, "model_config": node.config}
        suffix = "".join(f" {n}={quote(value)}" for n, value in constraints.items() if value is not None)
        return _add(f"parameter {quote(node.name)}{suffix}", lines)
    assert isinstance(node, MergeNode)
    if (choice := mapping_of(node)) is not None:
        return _write_choice(*choice, words, lines)
    return _add(" ".join(_words_of_call(node, words)), lines)


def _write_choice(
    mapping: Mapping[str, Any], config: str | None, words: Mapping[Node, str], lines: dict[str, int]
) -> str:
    values = {k: words[v] if isinstance(v, Node) else write_value(v) for k, v in mapping.items()}
    line = _add(f"dict {' '.join(f'{_write_name(name)}={value}' for name, value in values.items())}", lines)
    return line if config is None else _add(f"literal {line} model_config={quote(config)}", lines)


def _words_of_call(node: MergeNode, words: Mapping[Node, str]) -> list[str]:
    """The words of a call: required arguments by position until one is left out, the rest by name."""
    line = ["merge", quote(OF_DELTAS.get(node.method.identifier, node.method.identifier))]
    positional = True
    arguments = dict(node.arguments)
    for spec in node.method.signature.parameters:
        argument = arguments.get(spec.name)
        if isinstance(argument, tuple):
            listed = [words[child] for child in argument]
            line += listed if positional else [f"{spec.name}=[{','.join(listed)}]"]
            positional = False
        elif argument is None:
            positional = False
        elif positional and spec.required:
            line.append(words[argument])
        else:
            line.append(f"{spec.name}={words[argument]}")
            positional = False
    return line


def _write_literal(node: LiteralNode, lines: dict[str, int]) -> str:
    value, extra = node.value, ""
    if isinstance(value, ByKey):
        text = _add(f"dict {' '.join(f'{_write_name(k)}={write_value(v)}' for k, v in value.words)}", lines)
    elif isinstance(value, torch.Tensor):
        text = f"[{','.join(write_scalar(v) for v in value.reshape(-1).tolist())}]"
        dtype = str(value.dtype).removeprefix("torch.")
        extra = f' dtype="{dtype}" shape=[{",".join(map(str, value.shape))}]'
    else:
        text = write_value(value)
    if node.config is not None:
        return _add(
            f"literal {text} model_config={quote(node.config)} merge_space={quote(node.space)}", lines
        )
    if node.space == "param" and not extra:
        return text
    return _add(f"literal {text}{extra} merge_space={quote(node.space)}", lines)


def write_value(value: Value) -> str:
    """The text of a number, a string, a list, or a curve by its name or points."""
    plain = curve_words(value) if isinstance(value, Gradient | Preset) else value
    return f"[{','.join(map(write_scalar, plain))}]" if isinstance(plain, tuple) else write_scalar(plain)


def write_scalar(value: Scalar) -> str:
    """The text of a number, a string, true, false or null."""
    if isinstance(value, str):
        return quote(value)
    for word, constant in CONSTANTS.items():
        if value is constant:
            return word
    return repr(value)


def quote(text: str) -> str:
    """A string in quotes."""
    return f'"{_ESCAPED.sub(lambda match: _ESCAPES[match[0]], text)}"'


def _write_name(text: str) -> str:
    """The text of a dictionary's key: with a backslash before a space, as sd-mecha reads it, or in quotes."""
    return quote(text) if _NEEDS_QUOTES.search(text) else _SPECIAL.sub(r"\\\g<0>", text)


def _add(line: str, lines: dict[str, int]) -> str:
    return f"&{lines.setdefault(line, len(lines))}"
