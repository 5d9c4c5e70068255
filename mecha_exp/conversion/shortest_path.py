"""From one model config to another: the shortest way over conversions of formats and those of methods."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mecha_exp.architectures import AdapterConfig, ModelConfig, candidates, detect, get_all, resolve
from mecha_exp.architectures.keys import HasShape
from mecha_exp.architectures.lora import other_kind
from mecha_exp.architectures.structural import STRUCTURAL
from mecha_exp.architectures.views import BLOCKS
from mecha_exp.conversion.formats import format_conversion
from mecha_exp.conversion.lora import adapter_conversion
from mecha_exp.errors import CheckpointError, RecipeError, some
from mecha_exp.graph.by_key import CONVENTION, DEFAULT, ByKey
from mecha_exp.graph.literals import as_node, node_by_key
from mecha_exp.graph.nodes import InMemory, LiteralNode, MergeNode, ModelNode, Node
from mecha_exp.graph.selectors import mapping_of
from mecha_exp.method_api.method import MergeMethod
from mecha_exp.method_api.registry import conversions
from mecha_exp.sources import search_path
from mecha_exp.sources.inputs import open_sources
from mecha_exp.sources.source import infos_of


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
    choice = mapping_of(node)
    sources = _configs_of(node) if choice is None else _configs_with(choice[0])
    for source in sources:
        path = _shortest_path(source, wanted)
        if path is not None:
            if choice is not None:
                node = node_by_key(choice[0], source)
            elif isinstance(node, ModelNode) and len(sources) > 1:  # nothing else tells what it is
                node = ModelNode(node.source, node.space, source)
            for method in path:
                node = method(node)
            return node
    named = " or ".join(map(repr, sources)) or "these keys"
    raise RecipeError(
        f"no conversions lead from {named} to '{wanted}'.{_unknown_keys(node, sources)} A conversion of your "
        "own is a method declared with `@merge_method(is_conversion=True)`."
    )


def _unknown_keys(node: Node, sources: Sequence[str]) -> str:
    """What is said of a model that is of no known config."""
    if not isinstance(node, ModelNode) or list(sources) != [STRUCTURAL]:
        return ""
    keys = _infos_of(node)
    return f" Its keys ({some(keys, 3)}) are of no known model config.{other_kind(keys)}"


def identifier_of(node: Node) -> str | None:
    """The model config of a node, as far as it can be told without merging; None for plain values.

    Raises:
        RecipeError: a model's file is not where it is looked for, so that nothing tells.
    """
    told_by = _told_by(node)
    if isinstance(told_by, MergeMethod):
        return told_by.signature.returned.config
    if isinstance(told_by, ModelNode) and told_by.config is None:
        return detect(_infos_of(told_by)).config.identifier
    return getattr(told_by, "config", None)


def _told_by(node: Node) -> MergeMethod | Node | None:
    """What tells the config of a node: the method that makes it, if that says, or else the first model."""
    while isinstance(node, MergeNode):
        if node.method.choose is not None:
            return _chosen(node)
        if node.method.signature.returned.config:
            return node.method
        children = [child for child in node.children if not isinstance(child, LiteralNode)]
        if not children:
            return None
        node = children[0]
    return node


def _chosen(node: MergeNode) -> MergeMethod:
    """The method that an interface stands for, as far as it can be told without merging."""
    assert node.method.choose is not None
    configs = {
        name: [resolve(found) for found in _configs_of(child)]
        for name, child in node.arguments
        if isinstance(child, Node) and node.method.signature[name].is_state_dict
    }
    return node.method.choose(configs)


def _infos_of(node: ModelNode) -> Mapping[str, HasShape]:
    """The keys of a model, and their shapes."""
    if isinstance(node.source, InMemory):
        return node.source.state_dict
    try:
        with open_sources([node], search_path.get_all()) as sources:
            return infos_of(sources[node])
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


def _configs_of(node: Node) -> list[str]:
    """What a node may be: for a dictionary of values every config that has its keys and leads somewhere.

    Names of modules may be the same for several models, so that a LoRA of few is of several configs.
    """
    if isinstance(node, LiteralNode) and node.config is None:
        if not isinstance(node.value, ByKey):
            raise RecipeError(
                f"convert: {node.value!r} is the same for every key: nothing is to be converted"
            )
        return _configs_with(dict(node.value.patterns))
    told_by = _told_by(node)
    if isinstance(told_by, ModelNode) and told_by.config is None:
        fitting = [found.config for found in candidates(_infos_of(told_by))]
        if len(fitting) > 1 and all(isinstance(config, AdapterConfig) for config in fitting):
            return [config.identifier for config in fitting]
    found = identifier_of(node)
    return [] if found is None else [found]


def _configs_with(named: Iterable[str]) -> list[str]:
    """The model configs that lead somewhere and have all of these keys."""
    keys = set(named) - {DEFAULT, CONVENTION}
    blocks = [config.identifier for config in get_all() if [p.name for p in config.parts] == [BLOCKS]]
    starts = dict.fromkeys([*(_source_of(method) for method in conversions()), *blocks])
    having = [start for start in starts if keys <= resolve(start).keys().keys()]
    if not having:
        raise RecipeError(
            f"convert: no conversion starts from a model config with the keys {', '.join(sorted(keys))}"
        )
    return having


def _source_of(method: MergeMethod) -> str:
    return next(p.config for p in method.signature.parameters if p.config)


def _shortest_path(source: str, target: str) -> list[MergeMethod] | None:
    """The fewest conversions that lead from one config to another, or None."""
    methods = conversions()
    waiting, paths = deque([source]), {source: list[MergeMethod]()}
    stops = dict.fromkeys([target, *map(_source_of, methods)])  # where a conversion of formats may be of use
    while waiting:
        at = waiting.popleft()
        if at == target:
            return paths[at]
        own = [(method.signature.returned.config, method) for method in methods if _source_of(method) == at]
        formats = [(stop, format_conversion(at, stop)) for stop in stops]
        for end, method in (*own, *_to_the_base(at), *formats):
            if end is not None and method is not None and end not in paths:
                paths[end] = [*paths[at], method]
                waiting.append(end)
    return None


def _to_the_base(source: str) -> list[tuple[str, MergeMethod]]:
    """The conversion of LoRA files to differences to the models that they are for."""
    method = adapter_conversion(source)
    return [] if method is None else [(method.deltas.target.identifier, method)]
