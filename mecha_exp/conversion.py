"""From one model config to another: the shortest way over conversions of formats and those of methods."""

from collections import deque
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, TypeVar

import torch

from mecha_exp.architectures import ModelConfig, View, Views, detect, get_all, resolve, views
from mecha_exp.architectures.conversions import BLOCKS
from mecha_exp.choosing import mapping_of, node_by_key
from mecha_exp.errors import CheckpointError, ConfigError, RecipeError
from mecha_exp.method import Kind, MergeMethod
from mecha_exp.nodes import InMemory, LiteralNode, MergeNode, ModelNode, Node
from mecha_exp.registry import conversions
from mecha_exp.relations import KeyMapBuilder
from mecha_exp.signature import Parameter, Return, StateDict
from mecha_exp.values import as_node
from mecha_exp.weighting import CONVENTION, DEFAULT, ByKey

T = TypeVar("T")


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
            for method in path:
                node = method(node)
            return node
    raise RecipeError(
        f"no conversions lead from {' or '.join(map(repr, sources)) or 'these keys'} to '{wanted}'. A "
        "conversion of your own is a method declared with `@merge_method(is_conversion=True)`."
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


def _configs_of(node: Node) -> list[str]:
    """What a node may be: for a dictionary of values every config that has its keys and leads somewhere."""
    if isinstance(node, LiteralNode) and node.config is None:
        if not isinstance(node.value, ByKey):
            raise RecipeError(
                f"convert: {node.value!r} is the same for every key: nothing is to be converted"
            )
        return _configs_with(dict(node.value.patterns))
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
        for end, method in (*own, *formats):
            if end is not None and method is not None and end not in paths:
                paths[end] = [*paths[at], method]
                waiting.append(end)
    return None


class FormatConversion(MergeMethod):
    """A conversion that computes nothing: each key is a view of other keys; see `architectures.conversions`.

    Of a model it is read as such, tile by tile; of a merge the keys that a view needs are computed first.

    Attributes:
        source, target: the identifiers of the model configs.
    """

    def __init__(self, source: str, target: str, table: Views) -> None:
        class by_views:
            """Rows of tensors, one below the other, transposed or of another number of dimensions."""

            @staticmethod
            def map_keys(b: KeyMapBuilder) -> None:
                for key, view in table.by_key.items():
                    b[key] = b.a.keys[view.sources]

            def __call__(
                self,
                a: Parameter(StateDict[T], source),  # type: ignore[valid-type]
                **kwargs: Any,
            ) -> Return(T, target):  # type: ignore[valid-type]
                view = table.by_key[kwargs["key"]]
                return viewed(view, [a[key] for key in view.sources])

        super().__init__(by_views, f"convert '{source}' to '{target}'", Kind.WHOLE, is_conversion=True)
        self.source = source
        self.target = target


@cache
def format_conversion(source: str, target: str) -> FormatConversion | None:
    """The conversion between two formats, or None where there is none."""
    if source == target:
        return None
    try:
        return FormatConversion(source, target, views(source, target))
    except ConfigError:
        return None


def viewed(view: View, values: Sequence[Any]) -> Any:
    """What a view makes of the values of its sources; a number stays what it is."""
    if not isinstance(values[0], torch.Tensor):
        return values[0]
    joined = values[0] if len(values) == 1 else torch.cat(list(values))
    if view.of > 1:
        joined = joined.chunk(view.of)[view.index]
    if view.transposed:
        joined = joined.T
    shapes = {key: tuple(value.shape) for key, value in zip(view.sources, values, strict=True)}
    return joined.reshape(view.shape(shapes))
