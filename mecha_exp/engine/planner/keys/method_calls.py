"""Calls single merge methods at a key, with state dicts and values for their arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from mecha_exp.architectures import ModelConfig, StructuralConfig
from mecha_exp.engine.ir.calls import run_method
from mecha_exp.engine.planner.keys.relations import hyperparameter_key
from mecha_exp.errors import MergeError
from mecha_exp.graph.nodes import MergeNode, ModelNode, Node
from mecha_exp.method_api.key_map import KeyRelation
from mecha_exp.method_api.method import Kind
from mecha_exp.method_api.state_dict import StateDict
from mecha_exp.numbers import is_number

if TYPE_CHECKING:
    from mecha_exp.engine.planner.keys.specialisation import PerKeyGraph


class ArgumentView(StateDict[Any]):
    """An argument of a method as a state dict, whose values are computed when the method reads them."""

    def __init__(
        self,
        graph: PerKeyGraph,
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

    @property
    def parts(self) -> tuple[StateDict[Any], ...]:
        """One state dict for each model that a factor puts together; of any other argument itself."""
        node = self._node
        if not isinstance(node, MergeNode) or node.method.kind is not Kind.FACTOR:
            return (self,)
        models = [child for child in node.children if isinstance(child, ModelNode)]
        return tuple(ArgumentView(self._graph, model, self._has, self._value) for model in models)


def call_method(
    node: MergeNode,
    key: str,
    relation: KeyRelation,
    view: Callable[[Node], Any],
    value: Callable[[Node, str], Any],
    dtype: torch.dtype,
    cache: Any = None,
) -> Any:
    """The result of a call.

    Args:
        relation: the keys that are computed together, and the keys they need.
        view: the state dict for an argument.
        value: the value of any other argument at a key.
        dtype: of numbers that stand for tensors.
        cache: passed to methods that take one.
    """
    arguments = dict(node.arguments)

    def argument(spec: Any, child: Any) -> Any:
        if isinstance(child, tuple):
            return tuple(argument(spec, element) for element in child)
        if child is None:
            return () if spec.variadic else _as_tensor(spec, spec.default, dtype)
        if spec.is_state_dict:
            return view(child)
        return _as_tensor(spec, value(child, hyperparameter_key(node, key, relation)), dtype)

    values = {s.name: argument(s, arguments.get(s.name)) for s in node.method.signature.parameters}
    extra: dict[str, Any] = {}
    if node.method.signature.wants_key:
        extra = {"key": key, "key_relation": relation, "cache": cache}
    return run_method(node.method, values, key, extra)


def result_at(result: Any, relation: KeyRelation, key: str, node: MergeNode) -> Any:
    """The value of one key of a result: the result itself, or an element of the dictionary of several keys.

    Raises:
        MergeError: the result is not a dictionary of the keys that the relation promises.
    """
    if not isinstance(result, Mapping):
        if len(relation.outputs) > 1:
            raise MergeError(
                f"the merge method '{node.method.identifier}' makes {len(relation.outputs)} keys at once, so "
                f"it returns a dictionary of them, not {type(result).__name__}"
            )
        return result
    if set(result) != set(relation.outputs):
        raise MergeError(
            f"the merge method '{node.method.identifier}' returned the keys {sorted(result)} where its "
            f"`map_keys` promises {sorted(relation.outputs)}"
        )
    return result[key]


def _as_tensor(spec: Any, value: Any, dtype: torch.dtype) -> Any:
    """A tensor or a float, if a number is passed where one is declared; any other value as it is."""
    if not is_number(value):
        return value
    if spec.interface is float:
        return float(value)
    return torch.tensor(value, dtype=dtype) if spec.interface is torch.Tensor else value
