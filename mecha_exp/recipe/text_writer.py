"""Recipes as lines of text: see `mecha_exp.recipe.text` for the format.

A recipe that sd-mecha 1.1.8 can express is written in its words. Equal lines are one, and whatever is left at
its default is left out, so that equal recipes have equal texts.
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
"""Methods that sd-mecha has under the name of another one of ours, told apart as they take deltas."""

CONSTANTS: dict[str, Scalar] = {"null": None, "true": True, "false": False}

_SPECIAL = re.compile(r'[ "\\]')
_NEEDS_QUOTES = re.compile(r"[=\t\r\n]|^$")
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_ESCAPED = re.compile("|".join(map(re.escape, _ESCAPES)))


def write_lines(recipe: Node) -> list[str]:
    """The lines of a recipe after the version, one for each node that needs one.

    Raises:
        RecipeError: the recipe has an in-memory model.
    """
    lines: dict[str, int] = {}  # a line and its number: equal lines are one
    words: dict[Node, str] = {}  # how each node is said where it is an argument
    for node in walk(recipe, children=_said_before):
        words[node] = _write(node, words, lines)
    if words[recipe] != f"&{len(lines) - 1}":  # a number, which has no line where it is an argument
        _add(f"literal {words[recipe]}", lines)
    return list(lines)


def _said_before(node: Node) -> Sequence[Node]:
    """What a line refers to."""
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
        said = {"merge_space": node.space, "model_config": node.config}
        given = "".join(f" {name}={quote(value)}" for name, value in said.items() if value is not None)
        return _add(f"parameter {quote(node.name)}{given}", lines)
    assert isinstance(node, MergeNode)
    if (choice := mapping_of(node)) is not None:
        return _write_choice(*choice, words, lines)
    return _add(" ".join(_words_of_call(node, words)), lines)


def _write_choice(
    mapping: Mapping[str, Any], config: str | None, words: Mapping[Node, str], lines: dict[str, int]
) -> str:
    said = {k: words[v] if isinstance(v, Node) else write_value(v) for k, v in mapping.items()}
    line = _add(f"dict {' '.join(f'{_write_name(name)}={value}' for name, value in said.items())}", lines)
    return line if config is None else _add(f"literal {line} model_config={quote(config)}", lines)


def _words_of_call(node: MergeNode, words: Mapping[Node, str]) -> list[str]:
    """A call: what must be given by position as long as nothing before it is left out, the rest by name."""
    said = ["merge", quote(OF_DELTAS.get(node.method.identifier, node.method.identifier))]
    positional = True
    arguments = dict(node.arguments)
    for spec in node.method.signature.parameters:
        given = arguments.get(spec.name)
        if isinstance(given, tuple):
            listed = [words[child] for child in given]
            said += listed if positional else [f"{spec.name}=[{','.join(listed)}]"]
            positional = False
        elif given is None:
            positional = False
        elif positional and spec.required:
            said.append(words[given])
        else:
            said.append(f"{spec.name}={words[given]}")
            positional = False
    return said


def _write_literal(node: LiteralNode, lines: dict[str, int]) -> str:
    value, extra = node.value, ""
    if isinstance(value, ByKey):
        said = _add(f"dict {' '.join(f'{_write_name(k)}={write_value(v)}' for k, v in value.words)}", lines)
    elif isinstance(value, torch.Tensor):
        said = f"[{','.join(write_scalar(v) for v in value.reshape(-1).tolist())}]"
        dtype = str(value.dtype).removeprefix("torch.")
        extra = f' dtype="{dtype}" shape=[{",".join(map(str, value.shape))}]'
    else:
        said = write_value(value)
    if node.config is not None:
        return _add(
            f"literal {said} model_config={quote(node.config)} merge_space={quote(node.space)}", lines
        )
    if node.space == "param" and not extra:
        return said
    return _add(f"literal {said}{extra} merge_space={quote(node.space)}", lines)


def write_value(value: Value) -> str:
    """A number or a word, a list of numbers, or a curve by its name or points."""
    said = curve_words(value) if isinstance(value, Gradient | Preset) else value
    return f"[{','.join(map(write_scalar, said))}]" if isinstance(said, tuple) else write_scalar(said)


def write_scalar(value: Scalar) -> str:
    """A number, a word, true, false or null."""
    if isinstance(value, str):
        return quote(value)
    for word, constant in CONSTANTS.items():
        if value is constant:
            return word
    return repr(value)


def quote(text: str) -> str:
    """A word in quotes."""
    return f'"{_ESCAPED.sub(lambda match: _ESCAPES[match[0]], text)}"'


def _write_name(text: str) -> str:
    """A dictionary's key: with a backslash before a space, as sd-mecha reads it, or else in quotes."""
    return quote(text) if _NEEDS_QUOTES.search(text) else _SPECIAL.sub(r"\\\g<0>", text)


def _add(line: str, lines: dict[str, int]) -> str:
    return f"&{lines.setdefault(line, len(lines))}"
