"""A recipe as a tree of text, and as plain data.

A shared node is drawn once, with a mark (`&1`), and only named at its other uses, so the tree is as long as
the recipe. The lines are made one by one, so that a large recipe can be piped into `head`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from mecha_exp.graph.by_key import ByKey
from mecha_exp.graph.nodes import InMemory, LiteralNode, MergeNode, ModelNode, Node, ParameterNode, walk
from mecha_exp.recipe.keys import with_names
from mecha_exp.recipe.templates import describe as describe_parameter

DEEPEST = 60
"""The number of levels that are drawn; below, the tree shows how many nodes are left out."""

SHOWN_PATTERNS = 4


def tree_of(recipe: Node) -> Iterator[str]:
    """The lines of a recipe's tree, from the result down to the models."""
    shared = _shared(recipe)
    marks: dict[Node, str] = {}
    waiting: list[tuple[Node, str, str, str]] = [(recipe, "", "", "")]
    while waiting:
        node, name, here, below = waiting.pop()
        if node in marks:
            yield f"{here}{name}{marks[node]}(above)"
            continue
        mark = f"&{len(marks) + 1} " if node in shared else ""
        if mark:
            marks[node] = mark
        if len(below) // 3 >= DEEPEST and node.children:
            yield f"{here}{name}{mark}{len(list(walk(node)))} nodes, too deep to draw"
            continue
        yield f"{here}{name}{mark}{describe(node)}"
        branches = _branches(node)
        for i, (label, child) in reversed(list(enumerate(branches))):
            last = i == len(branches) - 1
            here_too, below_too = ("└─ ", "   ") if last else ("├─ ", "│  ")
            waiting.append((child, f"{label}: ", below + here_too, below + below_too))


def data_of(recipe: Node) -> dict[str, Any]:
    """A recipe as plain data: its nodes, children before their parents; the last one is the result."""
    ids = {node: number for number, node in enumerate(walk(recipe))}
    return {
        "nodes": [{"id": number, **_data(node, ids)} for node, number in ids.items()],
        "result": ids[recipe],
    }


def describe(node: Node) -> str:
    """A node as one line of text: a model's path, or a method with its hyperparameters."""
    if isinstance(node, ModelNode):
        extra = [word for word in (node.space if node.space != "weight" else None, node.config) if word]
        source = node.source.name if isinstance(node.source, InMemory) else node.source
        return f"{source} ({', '.join(extra)})" if extra else source
    if isinstance(node, ParameterNode):
        return f"parameter {describe_parameter(node)}"
    if isinstance(node, LiteralNode):
        return _value(node)
    assert isinstance(node, MergeNode)
    if (choice := with_names(node)) is not None:
        return f"{node.method.identifier}  keys={_value(LiteralNode(choice))}"
    values = [f"{name}={_value(value)}" for name, value in node.arguments if isinstance(value, LiteralNode)]
    return "  ".join([node.method.identifier, *values])


def _branches(node: Node) -> list[tuple[str, Node]]:
    """The arguments that are drawn below a call: all but literals."""
    branches: list[tuple[str, Node]] = []
    for name, value in node.arguments if isinstance(node, MergeNode) else ():
        if isinstance(value, tuple):
            branches += [(f"{name}[{index}]", child) for index, child in enumerate(value)]
        elif not isinstance(value, LiteralNode):
            branches.append((name, value))
    return branches


def _shared(recipe: Node) -> set[Node]:
    """The inner nodes that are used more than once."""
    uses = Counter(child for node in walk(recipe) for _, child in _branches(node))
    return {node for node, count in uses.items() if count > 1 and node.children}


def _value(node: LiteralNode) -> str:
    value = node.value
    if isinstance(value, ByKey):
        pairs = [f"{pattern}: {number}" for pattern, number in value.patterns[:SHOWN_PATTERNS]]
        if len(value.patterns) > SHOWN_PATTERNS:
            pairs.append(f"{len(value.patterns) - SHOWN_PATTERNS} more")
        if value.default is not None:
            pairs.append(f"default: {value.default}")
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, torch.Tensor):
        return f"tensor{list(value.shape)}"
    return str(list(value) if isinstance(value, tuple) else value)


def _data(node: Node, ids: Mapping[Node, int]) -> dict[str, Any]:
    if isinstance(node, ModelNode):
        source = node.source.name if isinstance(node.source, InMemory) else node.source
        return {"model": source, "merge_space": node.space, "model_config": node.config}
    if isinstance(node, ParameterNode):
        return {"parameter": node.name, "merge_space": node.space, "model_config": node.config}
    if isinstance(node, LiteralNode):
        return {"value": _plain(node.value), "merge_space": node.space}
    assert isinstance(node, MergeNode)
    arguments = {
        name: [ids[child] for child in value] if isinstance(value, tuple) else ids[value]
        for name, value in node.arguments
    }
    return {"method": node.method.identifier, "merge_space": node.space, "arguments": arguments}


def _plain(value: Any) -> Any:
    if isinstance(value, ByKey):
        return {**dict(value.patterns), **({} if value.default is None else {"default": value.default})}
    return value.tolist() if isinstance(value, torch.Tensor) else value
