# mypy: disable-error-code="no-untyped-call"
"""Records the calls of torch as a flat list of operations on one element.

The recorder sits between a merge method and torch. Operations on tiles become expressions; operations on
small values alone are kept aside, to be run by torch once a key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mecha_exp.engine.compiler.ops import NUMBERS, OPERATIONS, STORED
from mecha_exp.engine.compiler.primitives.rows import ROW_FUNCTIONS
from mecha_exp.engine.compiler.primitives.sorting import ranks
from mecha_exp.engine.compiler.trace import (
    DRAW,
    INPUT,
    RANKS,
    ROW_LENGTH,
    Argument,
    Computed,
    Expression,
    Given,
    Operand,
    Ref,
    Small,
    Trace,
    Untraceable,
    _pruned,
)
from mecha_exp.graph.nodes import MergeNode, Node

_READS_VALUES = {"tolist", "numpy", "__array__", "data_ptr", "untyped_storage", "__dlpack__"}
_READS_SIZES = {"numel", "nelement", "size", "stride", "__len__"}
_SIZES = (torch.Tensor.shape.__get__, torch.Tensor.nbytes.__get__)  # type: ignore[attr-defined]
_BY_ROWS = {**ROW_FUNCTIONS, ranks: RANKS}
_SAME_VALUE = {"detach", "alias", "clone", "view", "_unsafe_view", "expand", "lift_fresh"}


class Guard(TorchFunctionMode):
    """Refuses calls that read values without the recorder, and passes calls by rows on to it."""

    def __init__(self, recorder: Recorder, with_rows: bool) -> None:
        super().__init__()
        self._recorder, self._with_rows = recorder, with_rows

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(function, "__name__", "") in _READS_VALUES:
            raise Untraceable(f"it reads values ({function.__name__})")
        if self._with_rows and (function in _SIZES or getattr(function, "__name__", "") in _READS_SIZES):
            raise Untraceable("it reads the length of its rows")
        if function in _BY_ROWS:
            return self._recorder.of_rows(_BY_ROWS[function], args[0])
        return function(*args, **(kwargs or {}))


class Recorder(TorchDispatchMode):
    """Records the operations that torch is called for."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler, which takes a second

    def __init__(self, small: Mapping[Node, torch.Tensor], shape: tuple[int, int]) -> None:
        super().__init__()
        rows, columns = shape
        self._shape, self._row_shape = shape, (rows, 1)
        self._shapes = {(rows * columns,), shape, self._row_shape}
        self._expressions: dict[Expression, Ref] = {}
        self._nodes: dict[str, list[Node]] = {INPUT: [], DRAW: []}
        self._arguments: dict[Any, tuple[Argument, Small, torch.dtype]] = {}
        self._refs: dict[int, Ref] = {}
        self._small: dict[int, Small] = {id(value): Given(node) for node, value in small.items()}
        self._whole: dict[int, int | bool] = {}
        self._alive: list[Any] = [*small.values()]  # so that no other tensor gets an id that is in use

    def begins(self, operation: str, node: Node, value: torch.Tensor) -> None:
        """Record a tile that is not computed from others."""
        nodes = self._nodes[operation]
        nodes.append(node)
        self._note(operation, (len(nodes) - 1,), value, value.dtype)

    def of_rows(self, operation: str, value: torch.Tensor) -> torch.Tensor:
        """The length, the sum or the ranks of each row of a tile, or the root of such sums."""
        if operation == "row_length":
            length = torch.full((), self._shape[1], dtype=torch.float64)
            self._small[id(length)] = ROW_LENGTH
            self._alive.append(length)
            return length
        expected_shape = self._row_shape if operation == "root" else self._shape
        if tuple(value.shape) != expected_shape:
            raise Untraceable(f"it adds up or ranks rows of the shape {list(value.shape)}")
        if operation == RANKS and value.dtype is not torch.float32:
            raise Untraceable(f"it ranks rows of {value.dtype}")
        result = torch.full(expected_shape if operation == RANKS else self._row_shape, 0.5, dtype=value.dtype)
        self._note(operation, (self._ref(value),), result, value.dtype)
        return result

    def trace(
        self, outputs: Mapping[Node, torch.Tensor], terms: Sequence[tuple[MergeNode, list[torch.Tensor]]]
    ) -> Trace:
        """The recorded operations, without those that no output and no term needs."""
        return _pruned(
            Trace(
                tuple(self._expressions),
                tuple(self._nodes[INPUT]),
                tuple(node for node in self._nodes[DRAW] if isinstance(node, MergeNode)),
                tuple((small, dtype) for _, small, dtype in self._arguments.values()),
                tuple((node, self._ref(value)) for node, value in outputs.items()),
                tuple((node, tuple(self._ref(term) for term in each)) for node, each in terms),
            )
        )

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        if name == "_local_scalar_dense":
            raise Untraceable("it decides by a value")
        if function._schema.is_mutable:
            raise Untraceable(f"it writes into a tensor ({name})")
        result = function(*args, **kwargs)
        self._alive += [result, args]
        operands = [t for t in _flat([*args, *kwargs.values()]) if isinstance(t, torch.Tensor)]
        if any(id(t) in self._refs for t in operands):
            self._large(name, args, kwargs, result)
        else:
            self._compute(name, function, args, kwargs, result, operands)
        return result

    def _large(self, name: str, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        """Record an operation on tiles."""
        if not isinstance(result, torch.Tensor) or tuple(result.shape) not in self._shapes:
            raise Untraceable(f"'{name}' gives another shape")
        source = args[0]
        if name == "view" and isinstance(args[1], torch.dtype):
            name, args = "bits" if source.is_floating_point() else "number", (source,)
        elif name in _SAME_VALUE:
            self._refs[id(result)] = self._ref(source)
            return
        elif name in ("_to_copy", "zeros_like", "ones_like"):
            name, args = "cast" if name == "_to_copy" else name, (source,)
            if name == "cast" and source.is_floating_point() and not _is_real_or_truth(result.dtype):
                raise Untraceable("it converts fractions to whole numbers")
        elif any(value is not None for value in kwargs.values()):
            raise Untraceable(f"'{name}' with {', '.join(kwargs)} is not in the table of operations")
        self._apply(*_plain(name, args), result)

    def _apply(self, name: str, args: Sequence[Any], result: torch.Tensor) -> None:
        operation = OPERATIONS.get(name)
        reals = [t for t in args if isinstance(t, torch.Tensor) and t.dtype.is_floating_point]
        tensor_bound = name.startswith("clamp") and len(reals) > 1  # where NaN has other rules
        fits = operation is not None and operation.arity in (0, len(args)) and not tensor_bound
        if operation is None or not fits or (operation.whole and reals):
            raise Untraceable(f"'{name}' is not in the table of operations")
        narrow = [t.dtype for t in [*reals, result] if t.dtype in STORED]
        if result.dtype not in NUMBERS or (narrow and name != "cast"):
            raise Untraceable(f"'{name}' computes in {narrow[0] if narrow else result.dtype}")
        self._note(
            name, tuple(self._operand(a) for a in args[: operation.arity]), result, _common(name, args)
        )

    def _note(
        self, operation: str, operands: tuple[Operand, ...], result: torch.Tensor, common: torch.dtype
    ) -> None:
        expression = Expression(operation, operands, result.dtype, common)
        self._refs[id(result)] = self._expressions.setdefault(expression, Ref(len(self._expressions)))
        self._alive.append(result)

    def _compute(
        self,
        name: str,
        function: Any,
        args: Any,
        kwargs: Mapping[str, Any],
        result: Any,
        operands: Sequence[torch.Tensor],
    ) -> None:
        """Record an operation on small values, which torch computes once a key."""
        is_sequence = isinstance(result, list | tuple)
        if name == "scalar_tensor" and isinstance(args[0], int):
            self._whole[id(result)] = args[0]
        if not any(id(t) in self._small for t in operands):
            return  # a constant
        for index, value in enumerate(result if is_sequence else [result]):
            self._small[id(value)] = Computed(
                function,
                tuple(self._origin(a) for a in args),
                {k: self._origin(v) for k, v in kwargs.items()},
                index if is_sequence else None,
            )

    def _origin(self, value: Any) -> Any:
        """An argument of an operation on small values, with small values replaced by where they come from."""
        if isinstance(value, list | tuple):
            return [self._origin(v) for v in value]
        return self._small.get(id(value), value) if isinstance(value, torch.Tensor) else value

    def _ref(self, value: torch.Tensor) -> Ref:
        try:
            return self._refs[id(value)]
        except KeyError:
            raise Untraceable("it returns what does not depend on its tiles") from None

    def _operand(self, value: Any) -> Operand:
        if isinstance(value, torch.Tensor):
            if id(value) in self._refs:
                return self._refs[id(value)]
            if id(value) in self._whole:
                return self._whole[id(value)]
            if value.ndim:
                raise Untraceable("it takes a tensor that is none of its tiles")
            return self._argument(id(value), self._small.get(id(value), value), value.dtype)
        if isinstance(value, int):
            return value
        if isinstance(value, float):
            constant = torch.tensor(value, dtype=torch.float64)
            return self._argument(id(constant), constant, torch.float64)
        raise Untraceable(f"it gives an operation {value!r}")

    def _argument(self, key: Any, small: Small, dtype: torch.dtype) -> Argument:
        self._alive.append(small)
        if isinstance(small, Given | Computed):
            key = small
        if key not in self._arguments:
            self._arguments[key] = (Argument(len(self._arguments)), small, dtype)
        return self._arguments[key][0]


def _plain(name: str, args: Sequence[Any]) -> tuple[str, Sequence[Any]]:
    """The name and the operands under which an operation stands in the table."""
    if name == "pow" and isinstance(args[1], int | float) and args[1] == 2:
        return "square", args[:1]
    if name == "clamp" and None in args[1:] and not any(isinstance(a, torch.Tensor) for a in args[1:]):
        return ("clamp_max", (args[0], args[2])) if args[1] is None else ("clamp_min", args[:2])
    return name, args


def _common(name: str, args: Sequence[Any]) -> torch.dtype:
    """The dtype that operands are converted to before they are compared."""
    numbers = [a for a in args if isinstance(a, torch.Tensor | int | float)]
    if name in ("where",):
        numbers = numbers[1:]
    if len(numbers) < 2:
        return numbers[0].dtype if numbers and isinstance(numbers[0], torch.Tensor) else torch.float32
    return torch.result_type(numbers[0], numbers[1])


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def _is_real_or_truth(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype is torch.bool
