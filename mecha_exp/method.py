"""Merge methods: pure functions of tensors that a recipe calls by name.

    @merge_method(elementwise=True)
    def weighted_sum(
        a: Parameter(Tensor), b: Parameter(Tensor), alpha: Parameter(Tensor) = 0.5
    ) -> Return(Tensor):
        return torch.lerp(a, b, alpha)

    node = weighted_sum("a.safetensors", "b.safetensors", alpha=0.3)   # a node of a recipe, nothing is read

What a method declares of itself decides how the engine can run it (see `Kind`): whatever streams in tiles
needs no more memory for a large tensor than for a small one. The built-in methods use this very API.
"""

from __future__ import annotations

import enum
import functools
import importlib
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import torch

from mecha_exp.binding import Signature, read_signature
from mecha_exp.errors import RecipeError, did_you_mean
from mecha_exp.nodes import LiteralNode, MergeNode, Node

BUILTIN_METHODS = "mecha_exp.methods"
RowLength = Callable[[tuple[int, ...]], int]
"""How many consecutive entries are a row of a tensor of a shape."""

_BETWEEN_FORMATS = re.compile("convert '(.+)' to '(.+)'")


class Kind(enum.Enum):
    """How a method sees its tensors."""

    ELEMENTWISE = "elementwise"
    """output[i] depends on inputs[i] and on small values only: flat tiles of any size."""
    ROWWISE = "rowwise"
    """A row of the output (along the last axis, or of another length) depends on that row of the inputs:
    tiles of whole rows, of shape [rows, columns]."""
    REDUCTION = "reduction"
    """Tiles in, one small value per key out."""
    WHOLE = "whole"
    """Whole tensors in their own shape: any function."""
    FACTOR = "factor"
    """Whole tensors in, anything out: what whole-tensor methods share, such as a decomposition."""
    COMPOSITE = "composite"
    """Nodes in, a node out: a graph of other methods, built when a merge is planned."""
    CHOICE = "choice"
    """State dicts in, one of them out, for each key when a merge is planned: it costs nothing."""
    INTERFACE = "interface"
    """A name for several methods: the one that fits the model configs of the arguments is called."""


class MergeMethod:
    """A merge method: call it with nodes, paths and numbers to get a node of a recipe.

    Attributes:
        identifier: the name that recipes know it by.
        kind: how it sees its tensors.
        signature: its parameters, their types, ranges and merge spaces.
        is_conversion: whether `convert` may use it to get from one model config to another.
        implementations: of an interface, the methods to choose from.
        columns: (shape) -> how many consecutive entries of a tensor are a row; None if it has no rows.
        __wrapped__: the function itself, to be called with tensors; or a class with `__call__`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        identifier: str,
        kind: Kind,
        is_conversion: bool = False,
        cache_factory: Callable[[], Any] = dict,
        columns: RowLength | None = None,
    ) -> None:
        if inspect.isclass(function) and "__call__" not in vars(function):
            raise RecipeError(f"{identifier}: a class of a merge method needs a method `__call__`")
        functools.update_wrapper(self, function, updated=())
        self.__wrapped__ = function
        self.identifier = identifier
        self.kind = kind
        self.signature: Signature = read_signature(function)
        self.is_conversion = is_conversion
        self.columns = columns
        self.implementations: list[MergeMethod] = []
        self.create_cache = cache_factory
        self._check()

    def instantiate(self) -> Callable[..., Any]:
        """What is called with tensors: the function, or a new object of the class."""
        wrapped: Any = self.__wrapped__
        function: Callable[..., Any] = wrapped() if isinstance(wrapped, type) else wrapped
        return function

    @property
    def map_keys(self) -> Callable[[Any], None] | None:
        """What says which keys of the arguments each key of the result needs; see `relations`."""
        found: Callable[[Any], None] | None = getattr(self.__wrapped__, "map_keys", None)
        return found

    def _check(self) -> None:
        signature = self.signature
        if signature.reads_other_keys and self.kind not in (Kind.WHOLE, Kind.CHOICE, Kind.INTERFACE):
            raise RecipeError(
                f"{self.identifier}: a method with a StateDict parameter sees whole tensors of any key, so "
                f"it is not {self.kind.value}"
            )
        if not self.is_conversion:
            return
        sources = [p.config for p in signature.parameters if p.required]
        if len(sources) != 1 or not sources[0] or not signature.returned.config:
            raise RecipeError(
                f"{self.identifier}: a conversion has one argument, and says from and to which model config "
                "it leads: `a: Parameter(StateDict[T], 'one-config')` and `Return(T, 'another-config')`"
            )

    def __call__(self, /, *args: Any, **kwargs: Any) -> MergeNode:
        """A node that applies this method.

        Raises:
            RecipeError: everything that is wrong with the arguments.
        """
        try:
            named = self.signature.by_name(args, kwargs)
        except RecipeError as error:
            raise RecipeError(f"{self.identifier}: {error}") from None
        node, problems = self.bind(named)
        if node is None:
            raise RecipeError("; ".join(f"{self.identifier}: {p}" for p in problems))
        return node

    def bind(self, named: Mapping[str, Any]) -> tuple[MergeNode | None, list[str]]:
        """As a call with arguments by name, but returns the problems instead of raising."""
        arguments, space, problems = self.signature.bind(named)
        return (None if problems else MergeNode(self, arguments, space)), problems

    def __repr__(self) -> str:
        return f"<merge method '{self.identifier}' ({self.kind.value})>"


class Reduction(MergeMethod):
    """A method whose result for a key is one small value, made from partial results of fixed blocks.

    Most are told entry by entry, and then the engine can fuse the function with whatever makes its
    arguments: with `sums` the function returns what each entry adds to a sum (or a tuple, for several sums),
    with `histogram` the number of the bin in which each entry is counted. Any other function gets a block of
    each tensor as a flat tile and returns a tensor of any small shape.

    The engine adds everything up in a fixed order, so that the result has the same bits whatever the tiles
    and threads. With several rounds the function also gets `state`: None in the first round, then what
    `finish` made of the round before.

    With `rowwise` a block has whole rows, of shape [rows, columns].

    Attributes:
        sums: whether the function returns terms of sums. The total is a number or, for a tuple, a vector.
        rank: (count, **hyperparameters) -> the rank of the entry that is wanted, 1 being the smallest. The
            result is its value, exactly: the order statistic. What is not a number (NaN) is not counted, so
            that a function can leave entries out; of a rank above `count` the result is infinity.
        rounds: how often the data is looked at, given the dtype of the arithmetic.
        finish: (total, state, count, dtype, **hyperparameters) -> the next state or, in the last round, the
            value; `count` is the number of elements of the key, `dtype` that of the arithmetic.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        identifier: str,
        rounds: Callable[[torch.dtype], int],
        finish: Callable[..., torch.Tensor] | None,
        sums: bool = False,
        rank: Callable[..., int] | None = None,
        columns: RowLength | None = None,
    ) -> None:
        super().__init__(function, identifier, Kind.REDUCTION, columns=columns)
        self.sums = sums
        self.rank = rank
        self.rounds = rounds
        self.finish = finish


class Factor(MergeMethod):
    """What whole-tensor methods need of a key and is dear to find: a decomposition, a rotation, an order.

    Its value may have any form: a tensor of any shape, a tuple of some. It is kept until its key is done, and
    as equal nodes are one node, all methods and all points of a sweep that need it share it.

    Attributes:
        elements: (shape, **arguments) -> how many numbers it holds for a tensor of a shape, for the memory
            budget; arguments are those of the function that it names as keywords.
    """

    def __init__(self, function: Callable[..., Any], identifier: str, elements: Callable[..., int]) -> None:
        super().__init__(function, identifier, Kind.FACTOR)
        self.elements = elements
        named = inspect.signature(elements).parameters.values()
        self._named = [p.name for p in named if p.kind is p.KEYWORD_ONLY and p.name in self.signature.names]

    def size(self, shape: tuple[int, ...], arguments: Mapping[str, Any]) -> int:
        """How many numbers it holds for a tensor of a shape."""
        return self.elements(shape, **{name: arguments[name] for name in self._named})


_registry: dict[str, MergeMethod] = {}


@overload
def merge_method(function: Callable[..., Any], /) -> MergeMethod: ...
@overload
def merge_method(
    *,
    identifier: str | None = None,
    elementwise: bool = False,
    rowwise: bool | RowLength = False,
    composite: bool = False,
    choice: bool = False,
    register: bool = True,
    is_conversion: bool = False,
    is_interface: bool = False,
    implements: str | MergeMethod | None = None,
    reuse_outputs: bool = True,
    cache_factory: Callable[[], Any] = dict,
) -> Callable[[Callable[..., Any]], MergeMethod]: ...
def merge_method(
    function: Callable[..., Any] | None = None,
    /,
    *,
    identifier: str | None = None,
    elementwise: bool = False,
    rowwise: bool | RowLength = False,
    composite: bool = False,
    choice: bool = False,
    register: bool = True,
    is_conversion: bool = False,
    is_interface: bool = False,
    implements: str | MergeMethod | None = None,
    reuse_outputs: bool = True,
    cache_factory: Callable[[], Any] = dict,
) -> MergeMethod | Callable[[Callable[..., Any]], MergeMethod]:
    """Make a merge method of a function, or of a class with `__call__`, and register it under its name.

    Args:
        function: a pure function of tensors; its parameters are annotated with `Parameter`, what it returns
            with `Return`. It must not write into its inputs. With `**kwargs` it is told the `key`, its
            `key_relation` to the keys of the arguments, and a `cache` (see `merge`).
        identifier: its name in recipes; the function's name by default.
        elementwise: `Kind.ELEMENTWISE`. Tensors come as flat tiles in the dtype of the arithmetic, small
            values as zero-dimensional tensors.
        rowwise: `Kind.ROWWISE`; true for rows along the last axis, or (shape) -> the length of a row.
        composite: `Kind.COMPOSITE`: the function gets nodes for tensors (None for those left out) and
            returns a node.
        choice: `Kind.CHOICE`: the function returns one of the state dicts that it gets, or skips the key.
        register: whether recipes can find it by name.
        is_conversion: whether `convert` may use it; it says from and to which model config it leads.
        is_interface: whether it is a mere name for several methods, which say `implements=` it; the one whose
            model configs are those of the arguments is called. The function's body is not used.
        implements: the interface that it is a case of.
        reuse_outputs: is accepted for the sake of methods written for sd-mecha, and changes nothing.
        cache_factory: makes what `MergeNode.create_cache` gives.

    Raises:
        RecipeError: a parameter without a usable annotation, a name that is taken by another function, or
            options that exclude each other.
    """
    kinds = {
        Kind.ELEMENTWISE: elementwise,
        Kind.ROWWISE: bool(rowwise),
        Kind.COMPOSITE: composite,
        Kind.CHOICE: choice,
        Kind.INTERFACE: is_interface,
    }
    chosen = [kind for kind, wanted in kinds.items() if wanted] or [Kind.WHOLE]
    if len(chosen) > 1:
        raise RecipeError(f"a merge method is one of {', '.join(k.value for k in chosen)}, not several")
    if not register and (is_conversion or is_interface or implements):
        raise RecipeError("a conversion, an interface and what implements one must be registered")

    def decorate(fn: Callable[..., Any]) -> MergeMethod:
        columns = _row_length(rowwise)
        made = MergeMethod(fn, identifier or fn.__name__, chosen[0], is_conversion, cache_factory, columns)
        if implements is not None:
            _implement(made, implements)
        return _registered(made, register)

    return decorate if function is None else decorate(function)


@overload
def reduction(function: Callable[..., Any], /) -> Reduction: ...
@overload
def reduction(
    *,
    sums: bool = False,
    rank: Callable[..., int] | None = None,
    rounds: Callable[[torch.dtype], int] = ...,
    finish: Callable[..., torch.Tensor] | None = None,
    rowwise: bool | RowLength = False,
    register: bool = True,
) -> Callable[[Callable[..., Any]], Reduction]: ...
def reduction(
    function: Callable[..., Any] | None = None,
    /,
    *,
    sums: bool = False,
    rank: Callable[..., int] | None = None,
    rounds: Callable[[torch.dtype], int] = lambda _: 1,
    finish: Callable[..., torch.Tensor] | None = None,
    rowwise: bool | RowLength = False,
    register: bool = True,
) -> Reduction | Callable[[Callable[..., Any]], Reduction]:
    """Make a reduction of a function of entries or of blocks; see `Reduction` and, for rows, `merge_method`.

    >>> @reduction(sums=True)
    ... def dot(a: Parameter(Tensor), b: Parameter(Tensor)) -> Return(Tensor, "param"):
    ...     return a.double() * b.double()

    Raises:
        RecipeError: as `merge_method`; or both `sums` and `rank` are given, or `rank` and `finish`, or rows
            for what is told entry by entry.
    """
    if rank and (sums or finish):
        raise RecipeError("a reduction by rank gives the entry of that rank: it has no sums and no finish")
    if rowwise and (rank or sums):
        raise RecipeError("a reduction by rows gets blocks of rows: it has no sums and no rank of entries")

    def decorate(fn: Callable[..., Any]) -> Reduction:
        made = Reduction(fn, fn.__name__, rounds, finish, sums, rank, _row_length(rowwise))
        _registered(made, register)
        return made

    return decorate if function is None else decorate(function)


def factor(
    *, elements: Callable[..., int] = math.prod, register: bool = False
) -> Callable[[Callable[..., Any]], Factor]:
    """Make a factor of a function of whole tensors; see `Factor`. Whole-tensor methods take it as a `param`.

    >>> @factor(elements=lambda shape: 2 * math.prod(shape))
    ... def decomposition(a: Parameter(Tensor)) -> Return(Tensor, "param"):
    ...     return torch.linalg.svd(a.flatten(1), full_matrices=False)

    Raises:
        RecipeError: as `merge_method`.
    """

    def decorate(fn: Callable[..., Any]) -> Factor:
        made = Factor(fn, fn.__name__, elements)
        _registered(made, register)
        return made

    return decorate


def resolve_method(identifier: str) -> MergeMethod:
    """The registered method of that name.

    Raises:
        RecipeError: there is none; the message names the nearest.
    """
    importlib.import_module(BUILTIN_METHODS)
    try:
        return _registry[identifier]
    except KeyError:
        if formats := _BETWEEN_FORMATS.fullmatch(identifier):
            from mecha_exp.conversion import format_conversion

            if (method := format_conversion(*formats.groups())) is not None:
                return method
        raise RecipeError(
            f"unknown merge method '{identifier}'.{did_you_mean(identifier, _registry)} A method of your own "
            "has to be loaded first: plugins=[mine.py] or --plugin mine.py."
        ) from None


def all_methods() -> list[MergeMethod]:
    """Every registered method, by name."""
    importlib.import_module(BUILTIN_METHODS)
    return [_registry[name] for name in sorted(_registry)]


def conversions() -> list[MergeMethod]:
    """Every registered method that leads from one model config to another."""
    return [method for method in all_methods() if method.is_conversion]


def is_constant(node: Node, value: float) -> bool:
    """Whether a node is that very number, known before any data is read.

    A composite asks it to leave out what a strength of 0 or 1 makes needless.
    """
    return (
        isinstance(node, LiteralNode) and isinstance(node.value, int | float) and float(node.value) == value
    )


def spread(weights: float | Sequence[float], count: int) -> list[float]:
    """One weight for each of `count` models, given one for all or a list.

    Raises:
        RecipeError: a list of another length.
    """
    if isinstance(weights, int | float):
        return [float(weights)] * count
    if len(weights) != count:
        raise RecipeError(
            f"{len(weights)} weights are given for {count} models. Give one number, or {count}."
        )
    return [float(w) for w in weights]


def _row_length(rowwise: bool | RowLength) -> RowLength | None:
    return rowwise if callable(rowwise) else _last_axis if rowwise else None


def _last_axis(shape: tuple[int, ...]) -> int:
    return shape[-1] if shape else 1


def _implement(method: MergeMethod, interface: str | MergeMethod) -> None:
    """Make a method one of those that an interface stands for."""
    known = resolve_method(interface) if isinstance(interface, str) else interface
    if known.kind is not Kind.INTERFACE:
        raise RecipeError(f"{method.identifier}: '{known.identifier}' is no interface (`is_interface=True`)")
    if method.signature.names != known.signature.names:
        raise RecipeError(
            f"{method.identifier}: the parameters of '{known.identifier}' are "
            f"{', '.join(known.signature.names)}; what implements it has the same"
        )
    others = [m for m in known.implementations if m.identifier != method.identifier]
    known.implementations = [*others, method]


def _registered(method: MergeMethod, register: bool) -> MergeMethod:
    if not register:
        return method
    other = _registry.get(method.identifier)
    if other is not None and _origin(other) != _origin(method):
        raise RecipeError(
            f"the name '{method.identifier}' of {_origin(method)} is taken by {_origin(other)}. "
            "Give another `identifier=`."
        )
    _registry[method.identifier] = method
    return method


def _origin(method: MergeMethod) -> str:
    function = method.__wrapped__
    return f"{function.__module__}.{function.__qualname__}"
