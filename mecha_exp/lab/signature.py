"""The signature of a point: same signature, same bytes.

It is the hash of a text that holds the recipe with its hyperparameters in full precision, the content of
every input, the code of every merge method with the data that it declares, and the settings that change bits.
Blocks and presets are in it as the numbers of keys, model configs as hashes of their content. Paths,
threads, tiles, launchers, evaluators and tracking are not in it, so a result is found again from another
folder or machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mecha_exp.engine.code_hash import code_hashes, contents_of_paths
from mecha_exp.engine.options import SETTINGS, EngineOptions
from mecha_exp.engine.planner.meaning import Meaning
from mecha_exp.errors import RecipeError
from mecha_exp.graph.nodes import InMemory, LiteralNode, MergeNode, ModelNode, Node, models_of
from mecha_exp.graph.rewrite import rewrite
from mecha_exp.lab.content_hash import is_hash
from mecha_exp.recipe import serialize
from mecha_exp.system.texts import json_hash

FORMAT = 2
"""Raise it when the engine gives other bytes for the same recipe: all signatures change."""


@dataclass(frozen=True)
class Signature:
    """Everything that decides a result's bytes.

    Attributes:
        recipe: as text, each input named by its content.
        inputs: the content of each input, in the order of the recipe's arguments; see `content_of`.
        methods: the hash of each merge method's code, and of the data that it declares.
        configs: the SHA-256 of each model config that plays a part.
        settings: of the engine and of the output, as text.
    """

    recipe: str
    inputs: tuple[str, ...]
    methods: Mapping[str, str]
    settings: Mapping[str, str]
    configs: Mapping[str, str] = field(default_factory=dict)

    @property
    def parts(self) -> dict[str, Any]:
        """The content of the hash. Comparing two of these shows why two points differ."""
        return {
            "format": FORMAT,
            "recipe": self.recipe,
            "inputs": list(self.inputs),
            "methods": dict(sorted(self.methods.items())),
            "settings": dict(sorted(self.settings.items())),
            "configs": dict(sorted(self.configs.items())),
        }

    @property
    def digest(self) -> str:
        """The SHA-256 of all parts, in hex."""
        return json_hash(self.parts, sort_keys=True)


def signature_of(
    recipe: Node,
    contents: Mapping[ModelNode, str],
    options: EngineOptions,
    output: Mapping[str, str],
    meaning: Meaning | None = None,
) -> Signature:
    """The signature of a recipe.

    Args:
        recipe: without models in memory.
        contents: of each of its models; see `content_of`.
        options: of the engine.
        output: what is decided about the output's tensors, such as its dtype.
        meaning: what the recipe's names mean, where its models can be opened.

    Raises:
        RecipeError: a model in memory, which has no content to name.
    """
    models = models_of(recipe)
    if any(isinstance(model.source, InMemory) for model in models):
        raise RecipeError("a recipe with a model in memory has no signature: save the model to a file first")

    def by_content(node: Node) -> Node:
        if isinstance(node, ModelNode):
            content = contents[node]
            return ModelNode(f"sha256:{content}" if is_hash(content) else content, node.space, node.config)
        return _with_contents(node) if isinstance(node, MergeNode) and node.method.signature.paths else node

    settings = {name: str(getattr(options, name)) for name in SETTINGS}
    settings |= {f"output.{name}": value for name, value in output.items()}
    text = serialize(*rewrite([meaning.recipe if meaning else recipe], by_content))
    configs = meaning.configs if meaning else {}
    return Signature(text, tuple(contents[m] for m in models), code_hashes(recipe), settings, configs)


def _with_contents(call: MergeNode) -> MergeNode:
    """A call whose arguments name files by their content."""
    files = contents_of_paths(call)
    names = {spec.name for spec in call.method.signature.paths}

    def named(value: Node) -> Node:
        if not isinstance(value, LiteralNode) or not isinstance(value.value, str):
            return value
        return LiteralNode(f"sha256:{files[str(Path(value.value).expanduser())]}", value.space)

    arguments = tuple(
        (
            name,
            (tuple(map(named, value)) if isinstance(value, tuple) else named(value))
            if name in names
            else value,
        )
        for name, value in call.arguments
    )
    return replace(call, arguments=arguments)
