"""The recipe graph: immutable nodes, where equal sub-graphs are one and the same object.

A leaf is a model (`ModelNode`) or a value (`LiteralNode`); an inner node calls a merge method
(`MergeNode`). Nodes are hash-consed: building the same node twice returns the first one, so comparing two
graphs is comparing two pointers, and results per node are shared by all graphs that contain it.
"""

from __future__ import annotations

import importlib
import os
import threading
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import torch

from mecha_exp.errors import brief, counted
from mecha_exp.graph.by_key import ByKey, Scalar
from mecha_exp.graph.curves import Gradient, Preset
from mecha_exp.graph.spaces import resolve

if TYPE_CHECKING:
    from mecha_exp.architectures import ModelConfig
    from mecha_exp.method_api.method import MergeMethod

Literal: TypeAlias = "Scalar | tuple[Scalar, ...] | Gradient | Preset | torch.Tensor | ByKey"

_nodes: weakref.WeakValueDictionary[tuple[Any, ...], Node] = weakref.WeakValueDictionary()
_lock = threading.Lock()
_REGISTRY = "mecha_exp.method_api.registry"


class _Interned(type):
    """Makes a constructor return the living node of the same identity, if there is one."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        node = super().__call__(*args, **kwargs)
        with _lock:
            return _nodes.setdefault((cls, *node.identity()), node)


@dataclass(frozen=True, eq=False)
class Node(metaclass=_Interned):
    """A node of a recipe: immutable, hashable by identity, with a merge space.

    The operators build graphs: `a + d` and `a - d` add and subtract a delta (or take the difference of two
    weights), `2 * d` scales one, `a | b` is a where it has the key and b elsewhere.
    """

    def identity(self) -> tuple[Any, ...]:
        """The values that identify this node; nodes with equal identities are the same object."""
        raise NotImplementedError

    @property
    def merge_space(self) -> str:
        """What the tensors mean: `weight`, `delta`, `param`, or one that is registered."""
        raise NotImplementedError

    @property
    def children(self) -> tuple[Node, ...]:
        """The nodes that this one needs, in the order of its arguments."""
        return ()

    @property
    def model_config(self) -> ModelConfig | None:
        """The declared model config, or None."""
        from mecha_exp.architectures import resolve as resolve_config

        name = self.declared_config
        return None if name is None else resolve_config(name)

    @property
    def declared_config(self) -> str | None:
        """The name of the declared model config, or None."""
        return getattr(self, "config", None)

    def __contains__(self, node: object) -> bool:
        return any(below is node for below in walk(self))

    def __iter__(self) -> Iterator[Node]:
        """Every node of the graph once, this one last."""
        return walk(self)

    def __copy__(self) -> Node:
        return self

    def __deepcopy__(self, memo: object) -> Node:
        return self

    def __add__(self, other: Any) -> MergeNode:
        return call("add_difference", self, other)

    def __radd__(self, other: Any) -> MergeNode:
        return call("add_difference", other, self)

    def __sub__(self, other: Any) -> MergeNode:
        return _difference(self, other)

    def __rsub__(self, other: Any) -> MergeNode:
        return _difference(other, self)

    def __mul__(self, alpha: Any) -> MergeNode:
        return call("scale", self, alpha=alpha)

    __rmul__ = __mul__

    def __or__(self, other: Any) -> MergeNode:
        return call("fallback", self, other)

    def __ror__(self, other: Any) -> MergeNode:
        return call("fallback", other, self)

    def to(self, *, dtype: torch.dtype | str | Node | None = None, device: object = None) -> Node:
        """A node with the same values rounded to a dtype.

        Args:
            dtype: a floating one, such as `torch.float16` or "bfloat16", or `get_dtype` of a model.
            device: accepted and ignored, for scripts written for sd-mecha: the device is an option of the
                engine, not part of the recipe.
        """
        if dtype is None:
            return self
        name = dtype if isinstance(dtype, Node) else str(dtype).removeprefix("torch.")
        return call("cast", self, dtype=name)


@dataclass(frozen=True, eq=False)
class ModelNode(Node):
    """A leaf: the state dict in a file, named by its path as the user wrote it, or held in memory.

    Attributes:
        source: a path (resolved against the model folders when the merge is planned), or a state dict.
        space: `weight` for a checkpoint, `delta` for a file of differences.
        config: the name of its model config; None is the one that its keys fit.
    """

    source: str | InMemory
    space: str = "weight"
    config: str | None = None

    def __post_init__(self) -> None:
        resolve(self.space)

    def identity(self) -> tuple[Any, ...]:
        return (self.source, self.space, self.config)

    @property
    def merge_space(self) -> str:
        return self.space

    def __repr__(self) -> str:
        return f"model({self.source!r})"


@dataclass(frozen=True, eq=False)
class InMemory:
    """A state dict as the source of a leaf; it is equal only to itself.

    Attributes:
        state_dict: its tensors.
        name: for messages.
        is_made: whether the reader of a configuration made the tensors, so that they belong to no file.
    """

    state_dict: Mapping[str, torch.Tensor]
    name: str = "in-memory model"
    is_made: bool = False

    def __repr__(self) -> str:
        return f"<{self.name}, {counted(len(self.state_dict), 'key')}>"


@dataclass(frozen=True, eq=False)
class LiteralNode(Node):
    """A leaf: a number, a string, a list of numbers, a tensor, or a value by key (`ByKey`).

    Attributes:
        value: the value.
        space: `param` for a hyperparameter.
        config: the name of the model config whose keys a `ByKey` has; None is that of the models beside it.
    """

    value: Literal
    space: str = "param"
    config: str | None = None

    def __post_init__(self) -> None:
        resolve(self.space)
        if isinstance(self.value, list):
            object.__setattr__(self, "value", tuple(self.value))

    def identity(self) -> tuple[Any, ...]:
        return (_literal_identity(self.value), self.space, self.config)

    @property
    def merge_space(self) -> str:
        return self.space

    def __repr__(self) -> str:
        return brief(self.value)


@dataclass(frozen=True, eq=False)
class ParameterNode(Node):
    """A placeholder leaf: a model, a recipe or a number that is filled in before the merge.

    See `mecha_exp.recipe.templates` for making and filling them.

    Attributes:
        name: the name of the parameter.
        space: the merge space that its value must have; None is any that fits its place.
        config: the model config that its value must have, or None.
    """

    name: str
    space: str | None = None
    config: str | None = None

    def __post_init__(self) -> None:
        if self.space is not None:
            resolve(self.space)

    def identity(self) -> tuple[Any, ...]:
        return (self.name, self.space, self.config)

    @property
    def merge_space(self) -> str:
        return self.space or "weight"

    def __repr__(self) -> str:
        return f"parameter({self.name!r})"


@dataclass(frozen=True, eq=False)
class MergeNode(Node):
    """An inner node: a merge method applied to arguments.

    Attributes:
        method: the merge method.
        arguments: (parameter name, node or tuple of nodes) in the order of the signature. Parameters with
            their default are absent, so that passing the default and omitting it gives the same node.
        space: the merge space of the result.
    """

    method: MergeMethod
    arguments: tuple[tuple[str, Node | tuple[Node, ...]], ...]
    space: str = "weight"

    def identity(self) -> tuple[Any, ...]:
        return (self.method, self.arguments, self.space)

    @property
    def merge_space(self) -> str:
        return self.space

    @cached_property
    def named_children(self) -> tuple[tuple[str, Node], ...]:
        """(parameter name, node) of each child; a parameter that takes several nodes has several pairs."""
        return tuple(
            (name, child)
            for name, value in self.arguments
            for child in (value if isinstance(value, tuple) else (value,))
        )

    @cached_property
    def children(self) -> tuple[Node, ...]:  # graphs are walked many times
        return tuple(child for _, child in self.named_children)

    @property
    def literals(self) -> dict[str, Any]:
        """The values of the arguments that are literals, by their names; of several of a name the last."""
        return {name: child.value for name, child in self.named_children if isinstance(child, LiteralNode)}

    @property
    def declared_config(self) -> str | None:
        return self.method.signature.returned.config

    def with_children(self, new: Mapping[Node, Node]) -> MergeNode:
        """A copy of the call with new nodes in place of its children."""
        arguments = tuple(
            (name, tuple(new[v] for v in value) if isinstance(value, tuple) else new[value])
            for name, value in self.arguments
        )
        return MergeNode(self.method, arguments, self.space)

    def create_cache(self) -> Any:
        """A new cache for the method, to pass to `merge(..., cache={node: cache})`."""
        return self.method.create_cache()

    def __repr__(self) -> str:
        return f"{self.method.identifier}({', '.join(name for name, _ in self.arguments)})"


def call(method: str, *args: Any, **kwargs: Any) -> MergeNode:
    """A call of the registered merge method of a name.

    The registry is imported by name here, because it lies above the graph.

    Raises:
        RecipeError: there is no such method, or it does not take these arguments.
    """
    node: MergeNode = importlib.import_module(_REGISTRY).resolve_method(method)(*args, **kwargs)
    return node


def children_of(node: Node) -> tuple[Node, ...]:
    """The nodes that a node needs."""
    return node.children


def walk(
    *roots: Node, skip: Container[Node] = (), children: Callable[[Node], Sequence[Node]] = children_of
) -> Iterator[Node]:
    """Every node of the graphs once, children before parents. Iterative: graphs may be deep.

    Nodes in `skip` are left out, with all that only they need; `skip` may grow during the walk. `children`
    gives the nodes below a node.
    """
    seen: set[Node] = set()
    stack: list[Node | None] = [*reversed(roots)]
    while stack:
        node = stack.pop()
        if node is None:  # what follows has had its children
            node = stack.pop()
            if node is None or node in seen or node in skip:
                continue
        elif node in seen or node in skip:
            continue
        elif below := children(node):
            stack += (node, None)
            stack += [child for child in reversed(below) if child not in seen]
            continue
        seen.add(node)
        yield node


def models_of(*roots: Node, children: Callable[[Node], Sequence[Node]] = children_of) -> list[ModelNode]:
    """The models that the recipes read, in the order of their arguments; `children` as for `walk`."""
    return [node for node in walk(*roots, children=children) if isinstance(node, ModelNode)]


def calls_of(*roots: Node) -> list[MergeNode]:
    """The calls of the recipes, arguments before their users."""
    return [node for node in walk(*roots) if isinstance(node, MergeNode)]


def is_call(node: object, *methods: str) -> TypeGuard[MergeNode]:
    """Whether a node is a call of one of these methods."""
    return isinstance(node, MergeNode) and node.method.identifier in methods


def _literal_identity(value: Literal) -> Any:
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous()
        return ("tensor", data.dtype, tuple(data.shape), data.view(-1).view(torch.uint8).numpy().tobytes())
    if isinstance(value, tuple):
        return tuple(_literal_identity(v) for v in value)
    if isinstance(value, ByKey):
        patterns = tuple((name, _literal_identity(v)) for name, v in value.patterns)
        return (patterns, _literal_identity(value.default), value.convention, id(value.anatomy))
    return (type(value), repr(value))  # 1, 1.0 and True differ, as do 0.0 and -0.0; nan is itself


def _difference(a: Any, b: Any) -> MergeNode:
    """`a - b`: the difference of two weights, or `a` with a delta taken away."""
    if _space_of(a) == _space_of(b) == "weight":
        return call("subtract", a, b)
    return call("add_difference", a, b, alpha=-1.0)


def _space_of(operand: Any) -> str:
    """The merge space of an operand: a path or a state dict is a model, anything else a hyperparameter."""
    if isinstance(operand, Node):
        return operand.merge_space
    return "weight" if isinstance(operand, str | os.PathLike | Mapping) else "param"
