"""Calls methods on tensors without values, which tells their keys, shapes and dtypes before a merge runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from mecha_exp.architectures.lora import ANY_SHAPE
from mecha_exp.checkpoint import TensorInfo, dtype_name, is_arithmetic, torch_dtype
from mecha_exp.engine.ir.program import DeferredCall
from mecha_exp.engine.planner.keys.dependence import varies_by_key
from mecha_exp.engine.planner.keys.method_calls import ArgumentView, call_method, result_at
from mecha_exp.engine.planner.keys.relations import Relations, hyperparameter_keys
from mecha_exp.errors import RecipeError, some
from mecha_exp.graph.nodes import MergeNode, ModelNode, Node, walk
from mecha_exp.method_api.key_map import KeyRelation
from mecha_exp.method_api.state_dict import StateDictKeyError
from mecha_exp.numbers import is_whole

if TYPE_CHECKING:
    from mecha_exp.engine.planner.keys.specialisation import PerKeyGraph


def arithmetic_dtype(info: TensorInfo, compute_dtype: torch.dtype) -> torch.dtype:
    """The dtype that a stored tensor has for a method: integers and booleans keep theirs."""
    return compute_dtype if is_arithmetic(info.dtype) else torch_dtype(info.dtype)


class DryRuns:
    """The shapes and dtypes of the nodes of some recipes, by key.

    Args:
        relations: the keys that calls need.
        dtype_at: (key) -> the dtype of the arithmetic there.
    """

    def __init__(
        self, graph: PerKeyGraph, relations: Relations, dtype_at: Callable[[str], torch.dtype]
    ) -> None:
        self._graph = graph
        self._relations = relations
        self._dtype_at = dtype_at
        self._infos: dict[tuple[Node, str], TensorInfo | None] = {}
        self._bytes_read: dict[tuple[MergeNode, str], int] = {}
        self._checked: dict[MergeNode, set[tuple[str, ...]]] = {}

    def info(self, node: Node, key: str) -> TensorInfo | None:
        """The shape of a node's value at a key, and the dtype to store it in; None if it has none."""
        if (node, key) not in self._infos:
            self._infos[node, key] = self._find_info(node, key)
        return self._infos[node, key]

    def bytes_read_for(self, node: MergeNode, key: str) -> int:
        """The bytes of the tensors that a call reads for a key, as far as it comes without their values."""
        self.info(node, key)
        return self._bytes_read.get((node, key), 0)

    def word(self, node: MergeNode, key: str) -> Any:
        """The result of a method that returns a string, from the stored dtypes and the shapes of tensors.

        Raises:
            StateDictKeyError: it has no value at the key.
        """
        relation = self._relations.at(node, key)
        if relation is None:
            raise StateDictKeyError(key)
        return self._run(node, key, relation, lambda info: torch_dtype(info.dtype))

    def _run(
        self, node: MergeNode, key: str, relation: KeyRelation, dtype_of: Callable[[TensorInfo], torch.dtype]
    ) -> Any:
        """The result of a call for tensors without values; hyperparameters are computed."""

        def value(child: Node, child_key: str) -> Any:
            if self._graph.is_constant(child):
                return self._graph.value(child, child_key)
            info = self.info(child, child_key)
            if info is None:
                raise StateDictKeyError(child_key)
            return torch.empty(info.shape, dtype=dtype_of(info), device="meta")

        def view(child: Node) -> ArgumentView:
            return ArgumentView(self._graph, child, value=value)

        cache: dict[str, Any] = {}
        result = call_method(node, key, relation, view, value, self._dtype_at(key), cache)
        return result_at(result, relation, key, node)

    def _find_info(self, node: Node, key: str) -> TensorInfo | None:
        if isinstance(node, DeferredCall):
            return self.info(node.call, key)
        if isinstance(node, ModelNode):
            return self._graph.sources[node].info(key)
        if isinstance(node, MergeNode) and varies_by_key(node):
            return self._try_out(node, key)
        specialised = self._graph.node_at(node, key)
        below = walk(specialised) if specialised else iter(())
        leaf = next((n for n in below if isinstance(n, ModelNode | DeferredCall)), None)
        return None if leaf is None else self.info(leaf, key)

    def _try_out(self, node: MergeNode, key: str) -> TensorInfo | None:
        """The info of a call: shapes by a dry run, the dtype of the first tensor that the method reads."""
        relation = self._relations.at(node, key)
        if relation is None:
            return None
        self._check_group(node, relation)
        inputs: list[TensorInfo] = []

        def dtype_of(info: TensorInfo) -> torch.dtype:
            inputs.append(info)
            dtype = arithmetic_dtype(info, self._dtype_at(key))
            nbytes = math.prod(info.shape) * dtype.itemsize
            self._bytes_read[node, key] = self._bytes_read.get((node, key), 0) + nbytes
            return dtype

        try:
            shape = tuple(self._run(node, key, relation, dtype_of).shape)
        except StateDictKeyError:
            return None
        except Exception:  # the method needs values
            shape = None
        shape = self._shape_without_run(node, key, inputs) if shape is None else shape
        dtype = inputs[0].dtype if inputs else dtype_name(self._dtype_at(key))
        return TensorInfo(dtype, shape, 0, 0)

    def _shape_without_run(self, node: MergeNode, key: str, inputs: list[TensorInfo]) -> tuple[int, ...]:
        """The shape that the config declares, or that of a tensor that was read, or that of an argument."""
        config = self._graph.configs.of(node)
        declared = config.keys().get(key) if config else None
        if declared and declared.shape != ANY_SHAPE:
            return declared.shape
        if inputs:
            return inputs[0].shape
        children = (child for child in node.children if not self._graph.is_constant(child))
        return next((info.shape for child in children if (info := self.info(child, key))), ())

    def _check_group(self, node: MergeNode, relation: KeyRelation) -> None:
        """Require equal hyperparameters for all keys that are computed together."""
        if len(relation.outputs) == 1 or relation.outputs in self._checked.setdefault(node, set()):
            return
        self._checked[node].add(relation.outputs)
        keys = hyperparameter_keys(node, relation)
        for name, child in node.arguments:
            spec = node.method.signature[name]
            if not isinstance(child, Node) or spec.is_state_dict or not self._graph.is_constant(child):
                continue
            values = {key: self._graph.value(child, key) for key in keys if self._graph.has(child, key)}
            first = {_number_text(value): key for key, value in reversed(values.items())}
            if len(first) > 1:
                listed = ", ".join(f"{text} at {key}" for text, key in reversed(first.items()))
                raise RecipeError(
                    f"{node.method.identifier}: {name}: {len(keys)} keys are made together, so they have one "
                    f"value, and not {listed}. The keys: {some(keys)}."
                )


def _number_text(value: Any) -> str:
    """A hyperparameter in a message; 2 and 2.0 have the same text."""
    return repr(float(value) if is_whole(value) else value)
