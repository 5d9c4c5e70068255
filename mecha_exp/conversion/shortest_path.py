"""Converts recipes between model configs, by the shortest path over conversions of formats and methods."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mecha_exp.architectures import AdapterConfig, ModelConfig, get_all, resolve
from mecha_exp.architectures.lora import LORA_DELTA, other_kind
from mecha_exp.architectures.structural import STRUCTURAL
from mecha_exp.architectures.views import BLOCKS
from mecha_exp.conversion.formats import format_conversion
from mecha_exp.conversion.inference import ConfigInference, Keys
from mecha_exp.conversion.lora import adapter_conversion
from mecha_exp.errors import CheckpointError, RecipeError, some
from mecha_exp.graph.by_key import CONVENTION, DEFAULT, ByKey
from mecha_exp.graph.literals import as_node, node_by_key
from mecha_exp.graph.nodes import InMemory, LiteralNode, ModelNode, Node, call
from mecha_exp.graph.selectors import mapping_of
from mecha_exp.method_api.method import MergeMethod
from mecha_exp.method_api.registry import conversions
from mecha_exp.sources import search_path
from mecha_exp.sources.inputs import open_sources
from mecha_exp.sources.quantised.view import with_plain_keys
from mecha_exp.sources.source import infos_of


def convert(recipe: Any, config: str | ModelConfig | Node) -> Node:
    """A recipe in another model config.

    Args:
        recipe: a node, a model's path, a state dict, or a dictionary of values by the keys of some config,
            such as the weights of blocks.
        config: the target: a model config, its identifier, or a node that has it.

    Returns:
        calls of as few conversions as lead there; the recipe itself where nothing needs conversion. The
        header of a model without a declared config is read.

    Raises:
        RecipeError: no conversions lead there, or the config of the recipe is unknown.

    >>> weighted_sum(a, b, alpha=convert({"IN00": 0.3, "OUT08": 0.7}, a))
    """
    node = as_node(recipe)
    configs = ConfigInference(_keys_of)
    target = _target_of(config, configs)
    mapping = mapping_of(node)
    starts = _starts_of(node, configs) if mapping is None else _starts_with(mapping[0])
    if isinstance(config, Node) and _is_adapter_of_family(starts):
        return call(LORA_DELTA, node, config)  # the sizes are those of the model
    for start in starts:
        path = _shortest_path(start, target)
        if path is None:
            continue
        if mapping is not None:
            node = node_by_key(mapping[0], start)
        elif isinstance(node, ModelNode) and len(starts) > 1:  # the path is what decides between them
            node = ModelNode(node.source, node.space, start)
        for method in path:
            node = method(node)
        return node
    named = " or ".join(map(repr, starts)) or "these keys"
    raise RecipeError(
        f"no conversions lead from {named} to '{target}'.{_unknown_keys(node, starts)} A conversion of your "
        "own is a method declared with `@merge_method(is_conversion=True)`."
    )


def _is_adapter_of_family(starts: Sequence[str]) -> bool:
    """Whether configs are those of LoRA files for models of any size."""
    configs = [resolve(start) for start in starts if start != STRUCTURAL]
    return bool(configs) and all(isinstance(c, AdapterConfig) and c.base.sizes for c in configs)


def _unknown_keys(node: Node, starts: Sequence[str]) -> str:
    """A sentence about the keys of a model without a known config; empty for all others."""
    if not isinstance(node, ModelNode) or list(starts) != [STRUCTURAL]:
        return ""
    keys = _keys_of(node)
    return f" Its keys ({some(keys, 3)}) are of no known model config.{other_kind(keys)}"


def _keys_of(model: ModelNode) -> Keys:
    """The keys and shapes of a model, read from its header."""
    if isinstance(model.source, InMemory):
        return model.source.state_dict
    try:
        with open_sources([model], search_path.get_all()) as sources:
            return infos_of(with_plain_keys(sources[model]))
    except CheckpointError as error:
        raise RecipeError(
            f"convert: the model config of '{model.source}' cannot be told, since {error} Say which it is: "
            f"model('{model.source}', 'sdxl-sgm')."
        ) from error


def _target_of(config: str | ModelConfig | Node, configs: ConfigInference) -> str:
    """The identifier of the config to convert to."""
    if not isinstance(config, Node):
        return resolve(config).identifier if isinstance(config, str) else config.identifier
    identifier = _identifier_of(config, configs)
    if identifier is None:
        raise RecipeError(f"convert: {config!r} has no model config that the recipe could be converted to")
    return identifier


def _identifier_of(node: Node, configs: ConfigInference) -> str | None:
    possible = configs.possible(node)
    if len(possible) == 1:
        return possible[0]
    config = configs.of(node)
    return config.identifier if config else None


def _starts_of(node: Node, configs: ConfigInference) -> list[str]:
    """The configs that a node may have; for a dictionary of values all that have its keys.

    Models may share names of modules, so a LoRA of few modules fits several configs.
    """
    if isinstance(node, LiteralNode) and node.config is None:
        if not isinstance(node.value, ByKey):
            raise RecipeError(
                f"convert: {node.value!r} is the same for every key: nothing is to be converted"
            )
        return _starts_with(dict(node.value.patterns))
    possible = configs.possible(node)
    if len(possible) > 1 and all(isinstance(resolve(name), AdapterConfig) for name in possible):
        return possible
    identifier = _identifier_of(node, configs)
    return [] if identifier is None else [identifier]


def _starts_with(selectors: Iterable[str]) -> list[str]:
    """The model configs that some conversion starts from and that have all of these keys."""
    keys = set(selectors) - {DEFAULT, CONVENTION}
    blocks = [config.identifier for config in get_all() if [p.name for p in config.parts] == [BLOCKS]]
    sources = dict.fromkeys([*(_source_of(method) for method in conversions()), *blocks])
    starts = [source for source in sources if keys <= resolve(source).keys().keys()]
    if not starts:
        raise RecipeError(
            f"convert: no conversion starts from a model config with the keys {', '.join(sorted(keys))}"
        )
    return starts


def _source_of(method: MergeMethod) -> str:
    return next(p.config for p in method.signature.parameters if p.config)


def _shortest_path(source: str, target: str) -> list[MergeMethod] | None:
    """The fewest conversions that lead from one config to another, or None."""
    queue, paths = deque([source]), {source: list[MergeMethod]()}
    stops = dict.fromkeys([target, *map(_source_of, conversions())])
    while queue:
        config = queue.popleft()
        if config == target:
            return paths[config]
        for end, method in _steps_from(config, stops):
            if end not in paths:
                paths[end] = [*paths[config], method]
                queue.append(end)
    return None


def _steps_from(source: str, stops: Iterable[str]) -> Iterator[tuple[str, MergeMethod]]:
    """The conversions from a config, each with the config that it leads to.

    Args:
        stops: the configs where a conversion of formats may lead.
    """
    for method in conversions():
        if _source_of(method) == source and method.signature.returned.config:
            yield method.signature.returned.config, method
    if adapter := adapter_conversion(source):
        yield adapter.deltas.target.identifier, adapter
    for stop in stops:
        if conversion := format_conversion(source, stop):
            yield stop, conversion
