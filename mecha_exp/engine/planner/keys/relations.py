"""What calls are about: the keys that one gives, and those that it needs for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mecha_exp.architectures import ModelConfig, resolve
from mecha_exp.engine.planner.keys.dependence import reads_other_keys
from mecha_exp.errors import MechaError, RecipeError
from mecha_exp.graph.nodes import MergeNode, Node
from mecha_exp.method_api.key_map import KeyMap, KeyRelation

if TYPE_CHECKING:
    from mecha_exp.engine.planner.keys.specialisation import PerKeyGraph


class Relations:
    """The key relations of the calls in some recipes: by `map_keys`, elsewhere a key needs the same key."""

    def __init__(self, graph: PerKeyGraph) -> None:
        self._graph = graph
        self._maps: dict[MergeNode, KeyMap | None] = {}

    def at(self, node: MergeNode, key: str) -> KeyRelation | None:
        """What a call is about that gives a key; None where it gives no such key."""
        relations = self.key_map(node)
        given = dict(node.arguments)
        if relations is None:
            names = {name: (key,) for name, child in given.items()}
            gives = not reads_other_keys(node) or self._may_give(
                node, key
            )  # others are asked when all below is there
            return KeyRelation((key,), names) if gives else None

        def has(name: str, wanted: str) -> bool:
            child = given[name]
            return all(self._graph.has(c, wanted) for c in (child if isinstance(child, tuple) else (child,)))

        return relations.relation(key, has)

    def key_map(self, node: MergeNode) -> KeyMap | None:
        """What the method's `map_keys` says; None where it has none."""
        if node not in self._maps:
            map_keys = node.method.map_keys
            self._maps[node] = None if map_keys is None else self._build(node, map_keys)
        return self._maps[node]

    def _may_give(self, node: MergeNode, key: str) -> bool:
        """Without `map_keys` a method gives the keys of its declared config, or those of its arguments.

        One of hyperparameters gives any key that it finds a value for.
        """
        signature = node.method.signature
        plain = [child for name, child in node.named_children if not signature[name].is_state_dict]
        if not all(self._graph.has(child, key) for child in plain):
            return False
        if signature.returned.config:
            config = self._graph.configs.of(node)
            return config is not None and key in config.keys()
        others = [child for child in node.children if child not in plain] or plain
        return self._graph.is_constant(node) or any(self._graph.has(child, key) for child in others)

    def _build(self, node: MergeNode, map_keys: Callable[[Any], None]) -> KeyMap:
        inputs: dict[str, Mapping[str, Any]] = {}
        configs: dict[str, ModelConfig | None] = {}
        for name, value in node.arguments:
            child = value[0] if isinstance(value, tuple) else value
            if node.method.signature[name].is_tensor:
                inputs[name] = self._known_keys(child, node.method.signature[name].config)
                configs[name] = self._graph.configs.of(child)
        outputs = self._known_keys(node, node.method.signature.returned.config, inputs)
        try:
            return KeyMap(map_keys, inputs, outputs, configs)
        except MechaError as error:
            raise RecipeError(f"{node.method.identifier}: {error}") from error

    def _known_keys(
        self, node: Node, config: str | None, inputs: Mapping[str, Mapping[str, Any]] | None = None
    ) -> Mapping[str, Any]:
        """The keys of a declared model config, or those that are there."""
        if config:
            return resolve(config).keys()
        if inputs is not None:
            return next(iter(inputs.values()), {})
        return dict.fromkeys(self._graph.candidates((node,)))


def keys_of_group(node: MergeNode, relation: KeyRelation) -> tuple[str, ...]:
    """The keys that hyperparameters have values for: those of the models, where the result has others."""
    signature = node.method.signature
    inputs = tuple(dict.fromkeys(key for keys in relation.inputs.values() for key in keys))
    return inputs if signature.returned.config and inputs else relation.outputs


def asked_at(node: MergeNode, key: str, relation: KeyRelation) -> str:
    """The key at which a hyperparameter is asked for: any of those that are made together."""
    keys = keys_of_group(node, relation)
    return key if len(relation.outputs) == 1 or key in keys else keys[0]
