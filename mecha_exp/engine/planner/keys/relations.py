"""Finds the keys of its arguments that a call needs for each key of its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mecha_exp.architectures import ModelConfig, resolve
from mecha_exp.engine.ir.calls import lines_of
from mecha_exp.engine.planner.keys.dependence import reads_other_keys
from mecha_exp.engine.planner.keys.unchanged_modules import OutputOfChanges, Unchanged
from mecha_exp.errors import MechaError, RecipeError
from mecha_exp.graph.nodes import MergeNode, Node
from mecha_exp.method_api.key_map import KeyMap, KeyRelation

if TYPE_CHECKING:
    from mecha_exp.engine.planner.keys.specialisation import PerKeyGraph


class Relations:
    """The key relations of calls: by `map_keys`, or else each key needs the same key.

    Attributes:
        unchanged: finds the keys that outputs lack.
    """

    def __init__(self, graph: PerKeyGraph) -> None:
        self.unchanged = Unchanged(graph)
        self._graph = graph
        self._maps: dict[MergeNode, KeyMap | None] = {}

    def at(self, node: MergeNode, key: str) -> KeyRelation | None:
        """The key relation of a call that gives a key; None if the call does not give that key."""
        key_map = self.key_map(node)
        arguments = dict(node.arguments)
        if key_map is None:
            # a method that reads no other keys is called only if all its arguments have the key
            gives_key = not reads_other_keys(node) or self._may_give(node, key)
            return KeyRelation((key,), dict.fromkeys(arguments, (key,))) if gives_key else None

        def has(name: str, input_key: str) -> bool:
            argument = arguments[name]
            nodes = argument if isinstance(argument, tuple) else (argument,)
            return all(self._graph.has(child, input_key) for child in nodes)

        return key_map.relation(key, has)

    def key_map(self, node: MergeNode) -> KeyMap | None:
        """The key map that the method's `map_keys` builds; None if the method has none."""
        if node not in self._maps:
            map_keys = node.method.map_keys
            self._maps[node] = key_map = None if map_keys is None else self._build(node, map_keys)
            if key_map is not None and isinstance(node, OutputOfChanges):
                relations = {r.outputs: r for key in key_map.keys() if (r := self.at(node, key))}
                left_out = self.unchanged.among(node, list(relations.values()))
                self._maps[node] = key_map.without(left_out)
        return self._maps[node]

    def _may_give(self, node: MergeNode, key: str) -> bool:
        """Whether a method without `map_keys` may give a key of its declared config, or of its arguments.

        A method of hyperparameters gives any key at which these have a value.
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
            spec = node.method.signature[name]
            if spec.is_tensor:
                inputs[name] = self._input_keys(child, spec.config)
                configs[name] = self._graph.configs.of(child)
        declared = node.method.signature.returned.config
        outputs = resolve(declared).keys() if declared else next(iter(inputs.values()), {})
        try:
            return KeyMap(map_keys, inputs, outputs, configs)
        except MechaError as error:
            raise RecipeError(f"{node.method.identifier}: {error}") from error
        except Exception as error:  # in the user's own lines
            raise RecipeError(
                f"{node.method.identifier}: map_keys failed: {type(error).__name__}: {error}\n"
                f"{lines_of(error, outside=2)}"
            ) from error

    def _input_keys(self, node: Node, config: str | None) -> Mapping[str, Any]:
        """The keys of a declared model config, or else the keys that a node has."""
        return resolve(config).keys() if config else dict.fromkeys(self._graph.candidates((node,)))


def hyperparameter_keys(node: MergeNode, relation: KeyRelation) -> tuple[str, ...]:
    """The keys at which hyperparameters are read: those of the inputs, if the result has other keys."""
    signature = node.method.signature
    inputs = tuple(dict.fromkeys(key for keys in relation.inputs.values() for key in keys))
    return inputs if signature.returned.config and inputs else relation.outputs


def hyperparameter_key(node: MergeNode, key: str, relation: KeyRelation) -> str:
    """The key at which a hyperparameter is read: any of those that are computed together."""
    keys = hyperparameter_keys(node, relation)
    return key if len(relation.outputs) == 1 or key in keys else keys[0]
