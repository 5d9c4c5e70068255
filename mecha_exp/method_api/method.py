"""Merge methods: pure functions of tensors that a recipe calls by name.

    @merge_method(elementwise=True)
    def weighted_sum(
        a: Parameter(Tensor), b: Parameter(Tensor), alpha: Parameter(Tensor) = 0.5
    ) -> Return(Tensor):
        return torch.lerp(a, b, alpha)

    node = weighted_sum("a.safetensors", "b.safetensors", alpha=0.3)   # a node of a recipe, nothing is read

The declaration of a method decides how the engine runs it (see `Kind`): a method that streams in tiles needs
no more memory for a large tensor than for a small one. The built-in methods use the same API.
"""

from __future__ import annotations

import enum
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from mecha_exp.errors import ArgumentError, RecipeError, counted
from mecha_exp.graph.nodes import LiteralNode, MergeNode, Node
from mecha_exp.method_api.binding import MethodSignature, read_signature

if TYPE_CHECKING:
    from mecha_exp.architectures import ModelConfig
    from mecha_exp.method_api.views import Reading, Reads, View

_IN_TORCH = "mecha_exp.in_torch"

RowLength = Callable[[tuple[int, ...]], int]
"""(shape) -> the number of consecutive elements that are a row of a tensor."""


Choose: TypeAlias = "Callable[[Mapping[str, Sequence[ModelConfig]]], MergeMethod]"
"""(possible model configs by argument) -> the method to call."""


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
    """State dicts in, one of them out, for each key at planning time: it costs nothing."""
    INTERFACE = "interface"
    """A name for several methods, chosen by the model configs of the arguments."""
    VIEW = "view"
    """Opened models in, a source out that reads them otherwise: under other keys, in other places."""


class Arranges(enum.Enum):
    """What a method settles itself about the models that it takes."""

    NOTHING = "nothing"
    KEYS = "keys"
    """Which keys are read as which: `on_prefix` leaves them as they are."""
    ROWS = "rows"
    """The keys, and the rows of tokens: the models of its first parameter may have tokens of their own."""


_OF_STATE_DICTS = (Kind.WHOLE, Kind.CHOICE, Kind.INTERFACE, Kind.VIEW)


BASE = "base"
"""The parameter for the model that the others were made from, by default."""

STATISTICS = "statistics"
"""The argument for statistics of the models on data, of methods that need them."""

SCALED, ALONG_MERGE = "scaled", "along_merge"
"""How statistics of one merge are measured: of base + scale (expert - base), or along the merge."""


class MergeMethod:
    """A merge method: call it with nodes, paths and numbers to get a node of a recipe.

    Attributes:
        identifier: its name in recipes.
        kind: how it sees its tensors.
        signature: its parameters, their types, ranges and merge spaces.
        is_conversion: whether `convert` may use it between model configs.
        implementations: the methods of an interface.
        choose: the function of an interface that chooses a method, in place of their declared configs.
        columns: (shape) -> the number of consecutive elements that are a row; None without rows.
        without: (nodes of the arguments) -> the graph that stands for a call where its factors make nothing.
        skip_unchanged: whether an output of it lacks the keys that are made of what did not change.
        depends: the files and folders that the function reads.
        variables: the names of environment variables that it reads.
        arranges: what it settles itself about its models.
        reads: how each of its models is read, where that is not as it is stored; see `Reads`.
        statistics: the kind of statistics that it needs as its argument `statistics`.
        measured: `SCALED` or `ALONG_MERGE` for statistics that belong to one merge.
        paper_keys: what the code of the method's authors gives keys of which kind; see `for_keys`.
        empty: its value of no tensors.
        title: its name in papers, where a recipe that is made of its signature is one to choose; or empty.
        base: the parameter that this recipe gives `models.base`.
        function: the function that was declared, or a class with `__call__`: of tensors, and of a composite
            of nodes.
        __wrapped__: the function of tensors; for a composite it computes its graph (see `in_torch.eager`).
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
        self.function = function
        self.__wrapped__ = _of_tensors(self) if kind is Kind.COMPOSITE else function
        self.identifier = identifier
        self.kind = kind
        self.signature: MethodSignature = read_signature(function)
        self.is_conversion = is_conversion
        self.columns = columns
        self.implementations: list[MergeMethod] = []
        self.choose: Choose | None = None
        self.without: Callable[..., Node] | None = None
        self.skip_unchanged = False
        self.depends: tuple[Path, ...] = ()
        self.variables: tuple[str, ...] = ()
        self.arranges = Arranges.NOTHING
        self.reads: Reads | None = None
        self.statistics: str | None = None
        self.measured: str | None = None
        self.paper_keys: Mapping[str, str] | None = None
        self.empty: float | None = None
        self.title = ""
        self.base = BASE
        self.create_cache = cache_factory
        self._check()

    def instantiate(self) -> Callable[..., Any]:
        """The callable for tensors: the function, or a new object of the class."""
        declared: Any = self.function
        function: Callable[..., Any] = declared() if isinstance(declared, type) else declared
        return function

    @property
    def map_keys(self) -> Callable[[Any], None] | None:
        """The function that maps each key of the result to keys of the arguments; see `key_map`."""
        function: Callable[[Any], None] | None = getattr(self.function, "map_keys", None)
        return function

    def read(self, call: MergeNode, asked: MergeNode, reading: Reading) -> View | Node:
        """How a call is read in place of being computed, or the call that is computed.

        Args:
            call: of this method.
            asked: the call of the interface that it implements, or the same call.
            reading: the opened models.
        """
        return call

    def _check(self) -> None:
        signature = self.signature
        if signature.reads_other_keys and self.kind not in _OF_STATE_DICTS:
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
        """A node that calls this method.

        Raises:
            ArgumentError: every mistake in the arguments.
        """
        try:
            named = self.signature.by_name(args, kwargs)
        except RecipeError as error:
            raise ArgumentError(f"{self.identifier}: {error}") from None
        node, problems = self.bind(named)
        if node is None:
            raise ArgumentError("; ".join(f"{self.identifier}: {p}" for p in problems))
        return node

    def bind(self, named: Mapping[str, Any]) -> tuple[MergeNode | None, list[str]]:
        """Call by argument names; returns the mistakes instead of raising them."""
        arguments, space, problems = self.signature.bind(named)
        return (None if problems else MergeNode(self, arguments, space)), problems

    def __repr__(self) -> str:
        return f"<merge method '{self.identifier}' ({self.kind.value})>"


def _of_tensors(method: MergeMethod) -> Callable[..., Any]:
    """The function of tensors of a composite, which says what it does by a graph of nodes.

    What computes the graph lies above this layer, and is imported by name.
    """

    @functools.wraps(method.function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return importlib.import_module(_IN_TORCH).eager(method)(*args, **kwargs)

    return called


class Reduction(MergeMethod):
    """A method whose result for a key is one small value, combined from partial results of fixed blocks.

    With `sums` the function returns the term that each element adds to a sum (or a tuple, for several sums),
    and the engine can fuse it with the computation of its arguments. Any other function receives a block of
    each tensor as a flat tile and returns a tensor of any small shape.

    The engine adds in float64 and in a fixed order, so that the result has the same bits for any tiles and
    threads. Terms of float32 are added 32 at a time in float32, twice as fast; return `double()` where that
    is not exact enough. With several rounds the function also receives `state`: None in the first round, then
    the result of `finish` of the round before.

    With `rowwise` a block has whole rows, of shape [rows, columns].

    A reduction of the whole model (see `whole_model`) is over all keys that a recipe merges by the method
    that asks for it: one number, the same at each key.

    Attributes:
        of_model: whether it is over all keys of a model, rather than over one tensor.
        sums: whether the function returns terms of sums. The total is a number or, for a tuple, a vector.
        rank: (count, **hyperparameters) -> the rank of the requested element, 1 being the smallest. The
            result is its exact value, the order statistic. NaN is not counted, so that a function can leave
            elements out. A rank above `count` gives infinity.
        rounds: (dtype of the arithmetic) -> the number of passes over the data.
        finish: (total, state, count, dtype, **hyperparameters) -> the next state or, in the last round, the
            value; `count` is the number of elements of the key or the model, `dtype` that of the arithmetic.
    """

    of_model = False

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
    """An expensive result that whole-tensor methods share at a key: a decomposition, a rotation, an order.

    Its value may be a tensor of any shape, or a tuple of tensors. It is kept until its key is finished. Equal
    nodes are one node, so all methods and all points of a sweep share it.

    Attributes:
        elements: (shape, **arguments) -> the number of elements of the value, for the memory budget;
            arguments are those of the method that it names as keywords. None where nothing is made of such a
            shape: then the method is not called, and its value is (), as is that of each factor of it.
    """

    def __init__(
        self, function: Callable[..., Any], identifier: str, elements: Callable[..., int | None]
    ) -> None:
        super().__init__(function, identifier, Kind.FACTOR)
        self.elements = elements
        named = inspect.signature(elements).parameters.values()
        self._named = [p.name for p in named if p.kind is p.KEYWORD_ONLY and p.name in self.signature.names]

    def size(self, shape: tuple[int, ...], arguments: Mapping[str, Any]) -> int | None:
        """The number of elements of the value for a tensor of a shape; None where nothing is made of it."""
        return self.elements(shape, **{name: arguments[name] for name in self._named})


def is_constant(node: Node, value: float) -> bool:
    """Whether a node is a literal of this number.

    A composite uses it to leave out calls that a strength of 0 or 1 makes unnecessary.
    """
    return (
        isinstance(node, LiteralNode) and isinstance(node.value, int | float) and float(node.value) == value
    )


def spread(weights: float | Sequence[float], count: int) -> list[float]:
    """One weight for each of `count` models, from a number for all of them or a list.

    Raises:
        RecipeError: the list has another length.
    """
    if isinstance(weights, int | float):
        return [float(weights)] * count
    if len(weights) != count:
        raise RecipeError(
            f"{counted(len(weights), 'weight is', 'weights are')} given for {counted(count, 'model')}. "
            f"Give one number, or {count}."
        )
    return [float(w) for w in weights]
