"""What the methods that read other keys see of a recipe: the graph by key, and its nodes as state dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from mecha_exp.architectures import ModelConfig, StructuralConfig
from mecha_exp.conversion.inference import ConfigInference
from mecha_exp.graph.nodes import ModelNode, Node
from mecha_exp.method_api.state_dict import StateDict
from mecha_exp.sources.source import Source


class KeyGraph(Protocol):
    """The recipes of a merge, seen by key."""

    @property
    def configs(self) -> ConfigInference:
        """Infers the model configs of the nodes."""

    @property
    def sources(self) -> Mapping[ModelNode, Source]:
        """The opened models."""

    @property
    def caches(self) -> Mapping[Node, Any]:
        """The caches of methods, by node."""

    def node_at(self, node: Node, key: str) -> Node | None:
        """The graph of a node at a key, or None if it has no value there."""

    def has(self, node: Node, key: str) -> bool:
        """Whether a node has a value at a key."""

    def value(self, node: Node, key: str) -> Any:
        """The value of a node at a key, computed now; StateDictKeyError if it has none."""

    def keys_of(self, node: Node) -> list[str]:
        """The keys at which a node has a value, in order."""

    def candidates(self, roots: tuple[Node, ...]) -> list[str]:
        """The keys at which graphs may have a value, in the order of their models."""

    def is_constant(self, node: Node) -> bool:
        """Whether no model is read for a node."""


class ArgumentView(StateDict[Any]):
    """An argument of a method as a state dict, whose values are computed when the method reads them."""

    def __init__(
        self,
        graph: KeyGraph,
        node: Node,
        has: Callable[[Node, str], bool] | None = None,
        value: Callable[[Node, str], Any] | None = None,
    ) -> None:
        self._graph = graph
        self._node = node
        self._has = has or graph.has
        self._value = value or graph.value

    def __getitem__(self, key: str) -> Any:
        return self._value(self._node, key)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._has(self._node, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._graph.keys_of(self._node))

    def __len__(self) -> int:
        return len(self._graph.keys_of(self._node))

    @property
    def model_config(self) -> ModelConfig:
        """The model config of the argument; a structural one if none is known."""
        return self._graph.configs.of(self._node) or StructuralConfig({})
