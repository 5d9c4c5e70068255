"""Merge methods that ask for other keys: state dicts that are computed when a method looks into them.

A method with `StateDict` parameters runs as a whole, once a key, by plain torch. What it reads is computed
then: a model's tensor is read, and a merge below it is computed for that one key - by the same methods, in
the same blocks and so with the same bits as in a pass. Results are cached within the memory budget.

Before anything is written every such method is called on tensors without values (see `dry_runs`), which tells
whether it gives a key, and in what shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from mecha_exp.checkpoint import TensorInfo, is_arithmetic, torch_dtype
from mecha_exp.conversion.lora import AdapterConversion
from mecha_exp.engine.ir.calls import changed_shape, skipped_too_late
from mecha_exp.engine.ir.expansion import expand
from mecha_exp.engine.ir.interpreter import run_eagerly
from mecha_exp.engine.ir.layout import compile_program
from mecha_exp.engine.ir.program import DeferredCall, Program
from mecha_exp.engine.options import EngineOptions
from mecha_exp.engine.planner.keys.dependence import MISSING, reads_other_keys
from mecha_exp.engine.planner.keys.dry_runs import DryRuns, arithmetic_dtype
from mecha_exp.engine.planner.keys.method_calls import ArgumentView, call_method, result_at
from mecha_exp.engine.planner.keys.relations import Relations
from mecha_exp.engine.planner.keys.stacked_experts import Stacks, doubt
from mecha_exp.errors import MergeError, RecipeError
from mecha_exp.graph.nodes import LiteralNode, MergeNode, ModelNode, Node
from mecha_exp.method_api.key_map import KeyRelation
from mecha_exp.method_api.state_dict import StateDictKeyError, Tile
from mecha_exp.system.byte_cache import ByteCache

if TYPE_CHECKING:
    from mecha_exp.engine.planner.keys.specialisation import PerKeyGraph


class StateDictCalls:
    """Runs the methods with `StateDict` parameters of some recipes.

    Attributes:
        budget: how many bytes of results are cached.
        stacks: decides which keys are computed expert by expert.
    """

    def __init__(self, graph: PerKeyGraph, options: EngineOptions) -> None:
        self.budget = options.memory_budget // 4
        self.stacks = Stacks(graph.configs, options.stacked_experts)
        self._graph = graph
        self._options = options
        self._relations = Relations(graph)
        self._dry_runs = DryRuns(graph, self._relations, self.dtype_at)
        self._programs: dict[tuple[Node, torch.dtype], Program] = {}
        self._known: dict[tuple[MergeNode, str], Any] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._cache = ByteCache(self.budget)

    # planning

    def answer(self, node: MergeNode, key: str) -> Any:
        """The value of a call that is known when a merge is planned; True for any other, or MISSING."""
        if not self.is_known(node):
            return MISSING if self.info(node, key) is None else True
        if (node, key) not in self._known:
            run = self.run if self._graph.is_constant(node) else self._dry_runs.word
            try:
                self._known[node, key] = run(node, key)
            except StateDictKeyError:
                self._known[node, key] = MISSING
        return self._known[node, key]

    @property
    def notices(self) -> Iterator[str]:
        """Sentences about the keys that outputs lack."""
        return self._relations.unchanged.notices

    def is_known(self, node: MergeNode) -> bool:
        """Whether the value of a call is known when a merge is planned: no tensor is read for it."""
        returns_word = node.method.signature.returned.interface is str
        return reads_other_keys(node) and (returns_word or self._graph.is_constant(node))

    def keys_of(self, node: MergeNode) -> list[str]:
        """The keys that the result of a call may have."""
        if isinstance(node.method, AdapterConversion):
            return node.method.deltas.changed(self._graph.keys_of(node.children[0]))
        key_map = self._relations.key_map(node)
        if key_map is not None:
            return list(key_map.keys())
        if node.method.signature.returned.config:
            config = self._graph.configs.of(node)
            assert config is not None
            return list(config.keys())
        return self._graph.candidates(node.children)

    def info(self, node: Node, key: str) -> TensorInfo | None:
        """The shape of a node's value at a key, and the dtype to store it in; None if it has none."""
        if isinstance(node, ModelNode):
            return self._graph.sources[node].info(key)
        return self._dry_runs.info(node, key)

    def bytes_read_for(self, call: MergeNode, key: str) -> int:
        """The bytes of the tensors that a call reads for a key, in the dtype of the arithmetic."""
        return self._dry_runs.bytes_read_for(call, key)

    def dtype_at(self, key: str) -> torch.dtype:
        """The dtype of the arithmetic at a key."""
        if key not in self._dtypes:
            sources = self._graph.sources.values()
            self._dtypes[key] = self._options.arithmetic([s.info(key).dtype for s in sources if key in s])
        return self._dtypes[key]

    # running

    def value(self, node: Node, key: str, dtype: torch.dtype | None = None) -> Any:
        """The value of a node at a key: a tensor in its own shape, or a number or string.

        Args:
            dtype: of the arithmetic; None is that of the key.
        """
        dtype = dtype or self.dtype_at(key)
        specialised = self._graph.node_at(node, key)
        if specialised is None:
            raise StateDictKeyError(key)
        if isinstance(specialised, LiteralNode):
            return specialised.value
        if isinstance(specialised, ModelNode):
            return self._read(specialised, key, dtype)
        return self._cache.get((specialised, key, dtype), lambda: self._compute(specialised, key, dtype))

    def run(self, node: MergeNode, key: str, dtype: torch.dtype | None = None) -> Any:
        """The result of a method with `StateDict` parameters for a key.

        Args:
            dtype: of the arithmetic; None is the widest of the keys that are made together. What the method
                reads at other keys has it too, so that it can be computed with.
        """
        relation = self._relations.at(node, key)
        if relation is None:
            raise StateDictKeyError(key)
        dtype = dtype or max(map(self.dtype_at, relation.outputs), key=lambda each: each.itemsize)
        if len(relation.outputs) == 1:
            result = self._call(node, key, relation, dtype)
        else:
            cache_key = (node, relation.outputs, dtype)
            result = self._cache.get(cache_key, lambda: self._call(node, key, relation, dtype))
        return result_at(result, relation, key, node)

    def whole(
        self,
        node: DeferredCall,
        key: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
        expert: int | None = None,
    ) -> torch.Tensor:
        """The result of a deferred call; a single number fills a tensor of the key's shape.

        Args:
            dtype: of the result; None is that of the arithmetic.
            expert: the expert of a stack that is wanted; all of the key is computed once for them.

        Raises:
            MergeError: the result has another shape, or is not a tensor.
        """
        if expert is not None:
            stack = (node, key, shape, dtype)
            result: torch.Tensor = self._cache.get(stack, lambda: self._whole(*stack))[expert]
            return result
        return self._whole(node, key, shape, dtype)

    def _whole(
        self, node: DeferredCall, key: str, shape: tuple[int, ...], dtype: torch.dtype | None
    ) -> torch.Tensor:
        try:
            result = self.run(node.call, key)
        except StateDictKeyError:
            raise skipped_too_late(node.method, key) from None
        if not isinstance(result, torch.Tensor | int | float):
            raise MergeError(f"'{node.method.identifier}' returned {type(result).__name__}, not a tensor")
        tensor = torch.as_tensor(result, dtype=dtype or self.dtype_at(key))
        tensor = tensor.reshape(()).repeat(shape) if tensor.numel() == 1 else tensor
        if tuple(tensor.shape) != shape:
            raise changed_shape(node.method, key, shape, tuple(tensor.shape))
        return tensor

    def choose(self, node: MergeNode, key: str, views: dict[Node, ArgumentView]) -> Any:
        """The view that the method of a choice returns for a key."""
        relation = KeyRelation((key,), {})
        return call_method(node, key, relation, views.__getitem__, self.value, self.dtype_at(key))

    def _call(self, node: MergeNode, key: str, relation: KeyRelation, dtype: torch.dtype) -> Any:
        def value(child: Node, child_key: str) -> Any:
            return self.value(child, child_key, dtype)

        def view(child: Node) -> ArgumentView:
            return ArgumentView(self._graph, child, value=value)

        cache = self._graph.caches.get(node)
        return call_method(node, key, relation, view, value, dtype, cache)

    def _compute(self, node: Node, key: str, dtype: torch.dtype) -> Any:
        """The value of a specialised graph at a key."""
        if isinstance(node, DeferredCall):
            return self.run(node.call, key, dtype)
        if (node, dtype) not in self._programs:
            self._programs[node, dtype] = compile_program(expand([node]), dtype, self._graph.caches)
        program = self._programs[node, dtype]
        info = self.info(node, key)
        shape = info.shape if info is not None else ()
        leaves: dict[Node, torch.Tensor] = {
            leaf: self._read(leaf, key, dtype)
            if isinstance(leaf, ModelNode)
            else self.whole(leaf, key, shape, dtype)
            for leaf in program.extents
            if isinstance(leaf, ModelNode | DeferredCall)
        }
        return self._run(program, key, shape, leaves, dtype)

    def _run(
        self,
        program: Program,
        key: str,
        shape: tuple[int, ...],
        leaves: Mapping[Node, torch.Tensor],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Run a program on the tensors of a key, or on those of each expert that it holds."""
        model = next((leaf for leaf in leaves if isinstance(leaf, ModelNode)), None)
        experts = self.stacks.experts_at(key, shape, model, program, program.roots)
        if key in self.stacks.doubtful:
            raise RecipeError(doubt([key]))
        if experts is None:
            return run_eagerly(program, Tile(key, 0, math.prod(shape), shape), leaves, dtype)
        numel = math.prod(shape[1:])
        results = [
            run_eagerly(
                program,
                Tile(key, 0, numel, shape[1:], expert),
                {leaf: tensor[expert] for leaf, tensor in leaves.items()},
                dtype,
            )
            for expert in range(experts)
        ]
        return torch.stack(results) if results else torch.empty(shape, dtype=dtype)

    def _read(self, model: ModelNode, key: str, dtype: torch.dtype) -> torch.Tensor:
        source = self._graph.sources[model]
        info = source.info(key)
        stored = torch.empty(info.shape, dtype=torch_dtype(info.dtype))
        if stored.numel():
            source.read_into(key, 0, stored.view(-1))
        if is_arithmetic(info.dtype) and self._options.on_nonfinite == "error" and not _is_finite(stored):
            raise MergeError(
                f"{source.name}: the key '{key}' has values that are not finite. on_nonfinite=keep merges "
                "them as they are."
            )
        return stored.to(arithmetic_dtype(info, dtype))


def _is_finite(values: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite, found without another tensor of that size."""
    if not values.numel():
        return True
    extremes = torch.aminmax(values if values.dtype.itemsize > 1 else values.float())
    return bool(torch.stack(extremes).isfinite().all())
