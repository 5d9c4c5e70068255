"""From one model config to another: the shortest way over the registered conversions."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from mecha_exp.architectures import ModelConfig, detect, resolve
from mecha_exp.errors import CheckpointError, RecipeError
from mecha_exp.method import MergeMethod, conversions
from mecha_exp.nodes import InMemory, LiteralNode, MergeNode, ModelNode, Node, as_node
from mecha_exp.weighting import ByKey


def convert(recipe: Any, config: str | ModelConfig | Node) -> Node:
    """A recipe in another model config.

    Args:
        recipe: a node, a model's path, a state dict, or a dictionary of values by the keys of some config,
            such as the weights of blocks.
        config: the wanted model config, its identifier, or a node that has it.

    Returns:
        calls of as few conversions as lead there; the recipe itself where nothing is to be done. They may be
        looked up in other files: the header of a model without a declared config is read.

    Raises:
        RecipeError: no conversions lead there, or it cannot be told what the recipe is.

    >>> weighted_sum(a, b, alpha=convert({"IN00": 0.3, "OUT08": 0.7}, a))
    """
    node = as_node(recipe)
    wanted = _config_of_target(config)
    sources = _configs_of(node, wanted)
    for source in sources:
        path = _shortest_path(source, wanted)
        if path is not None:
            for method in path:
                node = method(node)
            return node
    reachable = ", ".join(sorted({f"'{name}'" for source in sources for name in _reachable(source)}))
    raise RecipeError(
        f"no conversions lead from {' or '.join(map(repr, sources)) or 'these keys'} to '{wanted}'. "
        f"{'Within reach: ' + reachable if reachable else 'None begin there'}. A conversion of your own is a "
        "`@merge_method(is_conversion=True)`."
    )


def identifier_of(node: Node) -> str | None:
    """The model config of a node, as far as it can be told without merging; None for plain values.

    Raises:
        RecipeError: a model's file is not where it is looked for, so that nothing tells.
    """
    while isinstance(node, MergeNode):
        declared = node.method.signature.returned.config
        if declared:
            return declared
        children = [child for child in node.children if not isinstance(child, LiteralNode)]
        if not children:
            return None
        node = children[0]
    if isinstance(node, ModelNode) and node.config is None:
        return _detected(node)
    return getattr(node, "config", None)


def _detected(node: ModelNode) -> str:
    """The config that the keys of a model tell."""
    from mecha_exp.engine.inputs import open_sources
    from mecha_exp.extensions import model_dirs

    if isinstance(node.source, InMemory):
        return detect(node.source.state_dict).config.identifier
    try:
        with open_sources([node], model_dirs.get_all()) as sources:
            source = sources[node]
            return detect({key: source.info(key) for key in source.keys()}).config.identifier
    except CheckpointError as error:
        raise RecipeError(
            f"convert: the model config of '{node.source}' cannot be told, since {error} Say which it is: "
            f"model('{node.source}', 'sdxl-sgm')."
        ) from error


def _config_of_target(config: str | ModelConfig | Node) -> str:
    if isinstance(config, Node):
        found = identifier_of(config)
        if found is None:
            raise RecipeError(
                f"convert: {config!r} has no model config that the recipe could be converted to"
            )
        return found
    return resolve(config).identifier if isinstance(config, str) else config.identifier


def _configs_of(node: Node, wanted: str) -> list[str]:
    """What a node may be: for a dictionary of values every config that has its keys."""
    if isinstance(node, LiteralNode) and node.config is None:
        if not isinstance(node.value, ByKey):
            raise RecipeError(
                f"convert: {node.value!r} is the same for every key: there is nothing to convert"
            )
        keys = {pattern for pattern, _ in node.value.patterns}
        starts = {method: source for source, _, method in _edges()}
        having = [
            source for source in dict.fromkeys(starts.values()) if keys <= resolve(source).keys().keys()
        ]
        if not having:
            raise RecipeError(
                f"convert: no conversion starts from a model config with the keys {', '.join(sorted(keys))}"
            )
        return having
    found = identifier_of(node)
    return [] if found is None else [found]


def _edges() -> Iterator[tuple[str, str, MergeMethod]]:
    """(from, to, conversion) of every registered conversion."""
    for method in conversions():
        source = next(p.config for p in method.signature.parameters if p.required)
        target = method.signature.returned.config
        assert source is not None and target is not None
        yield source, target, method


def _shortest_path(source: str, target: str) -> list[MergeMethod] | None:
    return _reachable(source).get(target)


def _reachable(source: str) -> Mapping[str, list[MergeMethod]]:
    """Every config within reach, nearest first, with the conversions that lead there."""
    by_source: dict[str, list[tuple[str, MergeMethod]]] = {}
    for start, end, method in _edges():
        by_source.setdefault(start, []).append((end, method))
    paths: dict[str, list[MergeMethod]] = {source: []}
    waiting = deque([source])
    while waiting:
        at = waiting.popleft()
        for end, method in by_source.get(at, ()):
            if end not in paths:
                paths[end] = [*paths[at], method]
                waiting.append(end)
    return paths
