"""The signature of a point: same signature, same bytes.

It is the hash of a text that names the recipe with its hyperparameters in full precision, the content of
every input, the code of every merge method, and the settings that change bits. Paths, threads, tiles,
launchers, evaluators and tracking are not in it, so a result is found again from another folder or machine.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mecha_exp.engine.options import EngineOptions
from mecha_exp.engine.rewriting import expand, rewrite
from mecha_exp.errors import MechaError, RecipeError
from mecha_exp.method import MergeMethod
from mecha_exp.nodes import InMemory, LiteralNode, MergeNode, ModelNode, Node, models_of, walk
from mecha_exp.recipe import serialize
from mecha_exp.weighting import ByKey

ENGINE_SETTINGS = (
    "device",
    "compute_dtype",
    "on_missing",
    "on_extra",
    "on_nonfinite",
    "on_tied",
    "resize_embeddings",
)
"""The options of the engine that change bits; the others change only how fast they are made."""

FORMAT = 1
"""Changes when the same recipe is to have another signature: when the engine gives other bytes."""


@dataclass(frozen=True)
class Signature:
    """What decides a result's bytes.

    Attributes:
        recipe: as text, each input named by its content.
        inputs: the SHA-256 of each input, in the order of the recipe's arguments.
        methods: the hash of each merge method's code.
        settings: of the engine and of the output, as text.
    """

    recipe: str
    inputs: tuple[str, ...]
    methods: Mapping[str, str]
    settings: Mapping[str, str]

    @property
    def parts(self) -> dict[str, Any]:
        """Everything that goes into the hash; comparing two of these tells why two points differ."""
        return {
            "format": FORMAT,
            "recipe": self.recipe,
            "inputs": list(self.inputs),
            "methods": dict(sorted(self.methods.items())),
            "settings": dict(sorted(self.settings.items())),
        }

    @property
    def digest(self) -> str:
        """The SHA-256 of it all, in hex."""
        return hashlib.sha256(json.dumps(self.parts, sort_keys=True).encode()).hexdigest()


def signature_of(
    recipe: Node, contents: Mapping[ModelNode, str], options: EngineOptions, output: Mapping[str, str]
) -> Signature:
    """The signature of a recipe.

    Args:
        recipe: without models in memory.
        contents: the SHA-256 of each of its models.
        options: of the engine.
        output: what is decided about the output's tensors, such as its dtype.

    Raises:
        RecipeError: a model in memory, which has no content to name.
    """
    models = models_of(recipe)
    if any(isinstance(model.source, InMemory) for model in models):
        raise RecipeError("a recipe with a model in memory has no signature: save the model to a file first")

    def by_content(node: Node) -> Node:
        return (
            ModelNode(f"sha256:{contents[node]}", node.space, node.config)
            if isinstance(node, ModelNode)
            else node
        )

    settings = {name: str(getattr(options, name)) for name in ENGINE_SETTINGS}
    settings |= {f"output.{name}": value for name, value in output.items()}
    text = serialize(*rewrite([recipe], by_content))
    return Signature(text, tuple(contents[m] for m in models), methods_of(recipe), settings)


def methods_of(recipe: Node) -> dict[str, str]:
    """The hash of the code of each merge method of a recipe, and of those that its composites are made of."""
    try:
        expanded = expand(_for_keys(recipe))
    except MechaError:  # which the merge will say
        expanded = ()
    called = {node.method for node in walk(recipe, *expanded) if isinstance(node, MergeNode)}
    return {method.identifier: _code(method) for method in called}


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
def _code(method: MergeMethod) -> str:
    """The hash of the file that a method is in, for it may call what stands beside it."""
    try:
        path = inspect.getsourcefile(method.__wrapped__)
        text = Path(path).read_text(encoding="utf-8") if path and Path(path).is_file() else ""
        return hashlib.sha256(meaning_of(text or inspect.getsource(method.__wrapped__)).encode()).hexdigest()
    except (OSError, TypeError):  # typed at a prompt
        return hashlib.sha256(method.__wrapped__.__code__.co_code).hexdigest()


def meaning_of(source: str) -> str:
    """A program's text without comments, layout and docstrings, none of which changes what it computes."""
    try:
        tree = ast.parse(textwrap.dedent(source))
    except SyntaxError:
        return source
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and body and _is_text(body[0]):
            node.body = body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
