"""Merge methods that ask for other keys: state dicts that are computed when a method looks into them.

A method with `StateDict` parameters is run as a whole, once a key, by plain torch. What it asks for is made
then and there: a model's tensor is read, a merge below it is computed for that one key - by the same methods,
in the same blocks and so with the same bits as a pass would - and kept as long as the memory budget allows.

Before anything is written every such method is tried on tensors without values, which tells whether it gives
the key, and of what shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from mecha_exp.architectures import ModelConfig, StructuralConfig
from mecha_exp.architectures.lora import ANY_SHAPE
from mecha_exp.checkpoint import TensorInfo, dtype_name, is_arithmetic, torch_dtype
from mecha_exp.conversion.lora import AdapterConversion
from mecha_exp.engine.ir.calls import changed_shape, run_method, skipped_too_late
from mecha_exp.engine.ir.expansion import expand
from mecha_exp.engine.ir.interpreter import run_eagerly
from mecha_exp.engine.ir.program import DeferredCall, Program, compile_program
from mecha_exp.engine.options import EngineOptions
from mecha_exp.engine.planner.keys.dependence import MISSING, reads_other_keys, varies_by_key
from mecha_exp.engine.planner.keys.relations import Relations, asked_at, keys_of_group
from mecha_exp.errors import MergeError, RecipeError, some
from mecha_exp.graph.nodes import LiteralNode, MergeNode, ModelNode, Node, walk
from mecha_exp.method_api.key_map import KeyRelation
from mecha_exp.method_api.state_dict import StateDict, StateDictKeyError
from mecha_exp.system.byte_cache import ByteCache

if TYPE_CHECKING:
    from mecha_exp.engine.planner.keys.specialisation import PerKeyGraph


class ArgumentView(StateDict[Any]):
    """What a method sees of an argument: its keys, and its values when it asks for them."""

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
        """The model config of the argument; a structural one where none is known."""
        return self._graph.configs.of(self._node) or StructuralConfig({})


class StateDictCalls:
    """Runs the methods with `StateDict` parameters of some recipes.

    Attributes:
        graph: the recipes.
        budget: how many bytes of results are kept.
    """

    def __init__(self, graph: PerKeyGraph, options: EngineOptions) -> None:
        self.graph = graph
        self._options = options
        self._relations = Relations(graph)
        self._infos: dict[tuple[Node, str], TensorInfo | None] = {}
        self._checked: dict[MergeNode, set[tuple[str, ...]]] = {}
        self._programs: dict[Node, Program] = {}
        self.budget = options.memory_budget // 4
        self._kept = ByteCache(self.budget)

    # when a merge is planned

    def answer(self, node: MergeNode, key: str) -> Any:
        """What a call is at a key: the value of a hyperparameter, elsewhere whether there is one."""
        if self.is_settled(node):
            try:
                return self.run(node, key) if self.graph.is_constant(node) else self._said_of(node, key)
            except StateDictKeyError:
                return MISSING
        return MISSING if self.info(node, key) is None else True

    def is_settled(self, node: MergeNode) -> bool:
        """Whether a call is known when a merge is planned: no model is read for it."""
        says_a_word = node.method.signature.returned.interface is str
        return reads_other_keys(node) and (says_a_word or self.graph.is_constant(node))

    def _said_of(self, node: MergeNode, key: str) -> Any:
        """What a method says of tensors that have no values, but the dtypes of those in the files."""
        relation = self._relations.at(node, key)
        if relation is None:
            raise StateDictKeyError(key)

        def value(child: Node, wanted: str) -> Any:
            if self.graph.is_constant(child):
                return self.value(child, wanted)
            info = self._known_info(child, wanted)
            return torch.empty(info.shape, dtype=torch_dtype(info.dtype), device="meta")

        return _picked(self._call(node, key, relation, ArgumentView, value, {}), relation, key, node)

    def _known_info(self, node: Node, key: str) -> TensorInfo:
        info = self.info(node, key)
        if info is None:
            raise StateDictKeyError(key)
        return info

    def keys_of(self, node: MergeNode) -> list[str]:
        """The keys that a call may give, of its own accord."""
        if isinstance(node.method, AdapterConversion):
            return node.method.deltas.changed(self.graph.keys_of(node.children[0]))
        relations = self._relations.key_map(node)
        if relations is not None:
            return list(relations.keys())
        declared = node.method.signature.returned.config
        if declared:
            config = self.graph.configs.of(node)
            assert config is not None
            return list(config.keys())
        return self.graph.candidates(node.children)

    def info(self, node: Node, key: str) -> TensorInfo | None:
        """The shape of a node's value at a key, and the dtype to store it in; None where it has none."""
        if (node, key) not in self._infos:
            self._infos[node, key] = self._find_info(node, key)
        return self._infos[node, key]

    def _find_info(self, node: Node, key: str) -> TensorInfo | None:
        if isinstance(node, DeferredCall):
            return self.info(node.call, key)
        if isinstance(node, ModelNode):
            return self.graph.sources[node].info(key)
        if isinstance(node, MergeNode) and varies_by_key(node):
            return self._try_out(node, key)
        left = self.graph.at((node,), key).roots[0]
        leaf = (
            next((n for n in walk(left) if isinstance(n, ModelNode | DeferredCall)), None) if left else None
        )
        return self.info(leaf, key) if leaf is not None else None

    def _try_out(self, node: MergeNode, key: str) -> TensorInfo | None:
        """Call a method with tensors that have no values."""
        relation = self._relations.at(node, key)
        if relation is None:
            return None
        self._check_group(node, relation)
        asked: list[TensorInfo] = []

        def value(child: Node, wanted: str) -> Any:
            if self.graph.is_constant(child):
                return self.value(child, wanted)
            info = self._known_info(child, wanted)
            asked.append(info)
            return torch.empty(info.shape, dtype=self._dtype(info), device="meta")

        try:
            result = self._call(node, key, relation, ArgumentView, value, {})
            shape = tuple(_picked(result, relation, key, node).shape)
        except StateDictKeyError:
            return None
        except Exception:  # it needs values: its shape is what is declared, or what goes in
            shape = None
        return self._as_info(node, key, shape, asked)

    def _check_group(self, node: MergeNode, relation: KeyRelation) -> None:
        """See that hyperparameters are the same for all keys that are made together."""
        if len(relation.outputs) == 1 or relation.outputs in self._checked.setdefault(node, set()):
            return
        self._checked[node].add(relation.outputs)
        for name, child in node.arguments:
            spec = node.method.signature[name]
            if not isinstance(child, Node) or spec.is_state_dict or not self.graph.is_constant(child):
                continue
            keys = keys_of_group(node, relation)
            values = {key: self.value(child, key) for key in keys if self.graph.has(child, key)}
            if len(set(map(_said, values.values()))) > 1:
                first = {_said(value): key for key, value in reversed(values.items())}
                listed = ", ".join(f"{value} at {key}" for value, key in reversed(first.items()))
                raise RecipeError(
                    f"{node.method.identifier}: {name}: {len(keys)} keys are made together, so they have one "
                    f"value, and not {listed}. The keys: {some(keys)}."
                )

    def _as_info(
        self, node: MergeNode, key: str, shape: tuple[int, ...] | None, asked: list[TensorInfo]
    ) -> TensorInfo:
        if shape is None:
            config = self.graph.configs.of(node)
            declared = config.keys().get(key) if config else None
            known = (
                declared.shape
                if declared and declared.shape != ANY_SHAPE
                else next((i.shape for i in asked), None)
            )
            same = [i for c in node.children if not self.graph.is_constant(c) and (i := self.info(c, key))]
            shape = known if known is not None else next((i.shape for i in same), ())
        dtype = asked[0].dtype if asked else dtype_name(self._options.compute_dtype)
        return TensorInfo(dtype, shape, 0, 0)

    # when it is run

    def value(self, node: Node, key: str) -> Any:
        """The value of a node at a key: a tensor in its own shape, or a number or word."""
        left = self.graph.at((node,), key).roots[0]
        if left is None:
            raise StateDictKeyError(key)
        if isinstance(left, LiteralNode):
            return left.value
        if isinstance(left, ModelNode):
            return self._read(left, key)
        return self._kept.get((left, key), lambda: self._compute(left, key))

    def run(self, node: MergeNode, key: str) -> Any:
        """The result of a method with `StateDict` parameters for a key."""
        relation = self._relations.at(node, key)
        if relation is None:
            raise StateDictKeyError(key)
        if len(relation.outputs) == 1:
            return self._picked_run(node, key, relation)
        group = self._kept.get(
            (node, relation.outputs),
            lambda: self._call(node, key, relation, ArgumentView, None, self._cache(node)),
        )
        return _picked(group, relation, key, node)

    def whole(
        self, node: DeferredCall, key: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The result of a lazy node; one number stands for a tensor of the key's shape.

        Args:
            dtype: of the result; None is that of the arithmetic.

        Raises:
            MergeError: it is of another shape, or no tensor.
        """
        try:
            result = self.run(node.call, key)
        except StateDictKeyError:
            raise skipped_too_late(node.method, key) from None
        if not isinstance(result, torch.Tensor | int | float):
            raise MergeError(f"'{node.method.identifier}' returned {type(result).__name__}, not a tensor")
        tensor = torch.as_tensor(result, dtype=dtype or self._options.compute_dtype)
        tensor = tensor.reshape(()).repeat(shape) if tensor.numel() == 1 else tensor
        if tuple(tensor.shape) != shape:
            raise changed_shape(node.method, key, shape, tuple(tensor.shape))
        return tensor

    def _picked_run(self, node: MergeNode, key: str, relation: KeyRelation) -> Any:
        result = self._call(node, key, relation, ArgumentView, None, self._cache(node))
        return _picked(result, relation, key, node)

    def _compute(self, left: Node, key: str) -> Any:
        if isinstance(left, DeferredCall):
            return self.run(left.call, key)
        if left not in self._programs:
            self._programs[left] = compile_program(
                expand([left]), self._options.compute_dtype, self.graph.caches
            )
        program = self._programs[left]
        info = self.info(left, key)
        shape = info.shape if info is not None else ()
        leaves: dict[Node, torch.Tensor] = {
            node: self._read(node, key) if isinstance(node, ModelNode) else self.whole(node, key, shape)
            for node in program.extents
            if isinstance(node, ModelNode | DeferredCall)
        }
        return run_eagerly(program, key, shape, leaves, self._options.compute_dtype)

    def _read(self, node: ModelNode, key: str) -> torch.Tensor:
        source = self.graph.sources[node]
        info = source.info(key)
        stored = torch.empty(info.shape, dtype=torch_dtype(info.dtype))
        if stored.numel():
            source.read_into(key, 0, stored.view(-1))
        if is_arithmetic(info.dtype) and self._options.on_nonfinite == "error" and not _is_finite(stored):
            raise MergeError(
                f"{source.name}: the key '{key}' has values that are not finite. on_nonfinite=keep merges "
                "them as they are."
            )
        return stored.to(self._dtype(info))

    def _dtype(self, info: TensorInfo) -> torch.dtype:
        """Whole numbers stay what they are; all others have the dtype of the arithmetic."""
        return self._options.compute_dtype if is_arithmetic(info.dtype) else torch_dtype(info.dtype)

    def _cache(self, node: Node) -> Any:
        return self.graph.caches.get(node)

    # both

    def call(self, node: MergeNode, key: str, views: Mapping[Node, Any]) -> Any:
        """Call a choice with these views for its state dicts."""
        relation = KeyRelation((key,), {})
        return self._call(node, key, relation, lambda graph, child, **_: views[child], None, None)

    def _call(
        self,
        node: MergeNode,
        key: str,
        relation: KeyRelation,
        view: Callable[..., Any],
        value: Callable[[Node, str], Any] | None,
        cache: Any,
    ) -> Any:
        method = node.method
        given = dict(node.arguments)

        def argument(spec: Any, child: Any) -> Any:
            if isinstance(child, tuple):
                return tuple(argument(spec, one) for one in child)
            if child is None:
                return () if spec.variadic else _as_tensor(spec, spec.default, self._options.compute_dtype)
            if spec.is_state_dict:
                return view(self.graph, child, value=value)
            where = asked_at(node, key, relation)
            return _as_tensor(spec, (value or self.value)(child, where), self._options.compute_dtype)

        values = {spec.name: argument(spec, given.get(spec.name)) for spec in method.signature.parameters}
        extra: dict[str, Any] = {}
        if method.signature.wants_key:
            extra = {"key": key, "key_relation": relation, "cache": cache}
        return run_method(method, values, key, extra)


def _picked(result: Any, relation: KeyRelation, key: str, node: MergeNode) -> Any:
    """The value of one key of what a method returned: itself, or one of those that it makes together."""
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
    """A number where a tensor is declared."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return torch.tensor(value, dtype=dtype) if spec.interface is torch.Tensor and is_number else value


def _is_finite(values: torch.Tensor) -> bool:
    return bool((values if values.dtype.itemsize > 1 else values.float()).isfinite().all())


def _said(value: Any) -> str:
    """A hyperparameter for a message; 2 and 2.0 are the same one."""
    return repr(float(value) if isinstance(value, int) and not isinstance(value, bool) else value)
