"""What a merge method declares of its parameters, and how arguments are checked against it.

The signature is the schema: recipes built in code, in YAML and from text all come through `Signature.bind`,
which reports everything that is wrong at once and names the nearest valid word.
"""

from __future__ import annotations

import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mecha_exp.errors import RecipeError, did_you_mean
from mecha_exp.nodes import (
    MERGE_SPACES,
    InMemory,
    LiteralNode,
    MergeNode,
    ModelNode,
    Node,
    ParameterNode,
    as_node,
)
from mecha_exp.weighting import ByKey

_SCALARS = {float: "a number", int: "a whole number", bool: "true or false", str: "a word"}


@dataclass(frozen=True)
class Tile:
    """Where a tile lies, for an elementwise method that has a parameter annotated `Tile`.

    The engine fills it in; it is no argument of the recipe.

    Attributes:
        key: the name of the tensor.
        start, stop: the elements of the flattened tensor that the tile holds.
        shape: of the tensor.
    """

    key: str
    start: int
    stop: int
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Declared:
    """What `Parameter(...)` and `Return(...)` put into an annotation."""

    interface: Any
    spaces: tuple[str, ...] | None
    bounds: Bounds | None = None
    choices: tuple[Any, ...] = ()
    help: str = ""


@dataclass(frozen=True)
class Bounds:
    """The range of a hyperparameter; None leaves that side open."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def __contains__(self, value: float) -> bool:
        return (
            (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )

    def __str__(self) -> str:
        low = f"[{self.ge:g}" if self.ge is not None else f"({self.gt:g}" if self.gt is not None else "(-inf"
        high = f"{self.le:g}]" if self.le is not None else f"{self.lt:g})" if self.lt is not None else "inf)"
        return f"{low}, {high}"


def Parameter(
    interface: Any,
    merge_space: str | Iterable[str] | None = None,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    choices: Iterable[bool | str] = (),
    help: str = "",
) -> Any:
    """Declare a parameter of a merge method, as the annotation of a function's parameter.

    What several methods share is declared once and used by name: `Density = Parameter(float, gt=0, le=1)`.

    Args:
        interface: `torch.Tensor`, `float`, `int`, `bool`, `str`, or `list[float]` (one number, or one for
            each model); optional by `... | None`.
        merge_space: what the tensor may be: `weight`, `delta`, `param`, or several. None: anything, but the
            same for every parameter that says nothing. A parameter with a default is a `param`.
        ge, gt, le, lt: the range of a hyperparameter, checked before any work.
        choices: the only words, or truth values, that a `str` parameter may be.
        help: what it means, for `python -m mecha_exp info methods NAME`.

    Raises:
        RecipeError: for a merge space that does not exist.
    """
    return _Declared(interface, _spaces(merge_space), Bounds(ge, gt, le, lt), tuple(choices), help)


def Return(interface: Any, merge_space: str | None = None) -> Any:
    """Declare what a merge method returns.

    Args:
        interface: `torch.Tensor`.
        merge_space: `weight`, `delta` or `param`; None: that of the parameters that say nothing.
    """
    return _Declared(interface, _spaces(merge_space))


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter of a merge method.

    Attributes:
        name: as written in the function.
        interface: `torch.Tensor`, a scalar type, or `list` for numbers.
        spaces: the merge spaces that it accepts; None follows the other parameters.
        default: its default value, or `inspect.Parameter.empty`.
        bounds: the range of a number.
        variadic: whether it takes any number of values (`*models`).
        choices: the only values that it may have, if there are any.
        help: what it means.
    """

    name: str
    interface: Any
    spaces: tuple[str, ...] | None
    default: Any
    bounds: Bounds
    variadic: bool
    choices: tuple[Any, ...] = ()
    help: str = ""

    @property
    def required(self) -> bool:
        """Whether a call must give it."""
        return self.default is inspect.Parameter.empty

    @property
    def is_tensor(self) -> bool:
        """Whether the method sees a tensor (otherwise a Python value)."""
        return self.interface is torch.Tensor

    @property
    def is_model(self) -> bool:
        """Whether a word given for it is a model's path: a tensor that is not a mere hyperparameter."""
        return self.is_tensor and self.spaces != ("param",)

    def check(self, value: Any) -> str | None:
        """What is wrong with a literal value, or None."""
        if isinstance(value, ByKey):
            return next((p for v in value.values if (p := self.check(v))), None)
        if isinstance(value, tuple):
            if self.interface is not list:
                return f"expected {self._expected()}, got a list: {list(value)}"
            return next((p for v in value if (p := self.check(v))), None)
        if value is None and not self.required and self.default is None:
            return None
        if isinstance(value, torch.Tensor):
            return None if self.is_tensor else f"expected {self._expected()}, got a tensor"
        if self.choices:
            known = any(
                value is choice or (isinstance(value, str) and value == choice) for choice in self.choices
            )
            return None if known else f"expected {self._expected()}, got {value!r}"
        if not self._accepts(value):
            return f"expected {self._expected()}, got {value!r}"
        if isinstance(value, int | float) and not isinstance(value, bool) and value not in self.bounds:
            return f"{value:g} is out of range {self.bounds}"
        return None

    def _accepts(self, value: Any) -> bool:
        if isinstance(value, bool) or self.interface is bool:
            return isinstance(value, bool) and self.interface is bool
        if self.interface is str:
            return isinstance(value, str)
        if self.interface is int:
            return isinstance(value, int)
        return isinstance(value, int | float) and not math.isnan(value)

    def _expected(self) -> str:
        if self.choices:
            return " or ".join(c if isinstance(c, str) else str(c).lower() for c in self.choices)
        return _SCALARS.get(self.interface, "a model" if self.is_model else "a number")


@dataclass(frozen=True)
class Signature:
    """The parameters of a merge method in order, and the merge space that it returns."""

    parameters: tuple[ParameterSpec, ...]
    space: str | None
    wants_tile: str | None
    has_state: bool

    def __getitem__(self, name: str) -> ParameterSpec:
        return next(p for p in self.parameters if p.name == name)

    @property
    def names(self) -> list[str]:
        """The names of the parameters, in order."""
        return [p.name for p in self.parameters]

    @property
    def variadic(self) -> ParameterSpec | None:
        """The `*parameter`, if there is one."""
        return next((p for p in self.parameters if p.variadic), None)

    def by_name(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a Python call under their names, varargs as a list.

        Raises:
            RecipeError: too many positional arguments, or one given twice.
        """
        named: dict[str, Any] = {}
        rest = list(args)
        for spec in self.parameters:
            if spec.variadic and rest:
                named[spec.name], rest = rest, []
            elif rest and not self._after_variadic(spec):
                named[spec.name] = rest.pop(0)
        if rest:
            raise RecipeError(f"takes {len(self.names)} arguments at most ({', '.join(self.names)})")
        for name, value in kwargs.items():
            if name in named:
                raise RecipeError(f"the argument '{name}' is given twice")
            named[name] = value
        return named

    def arrange(self, values: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Values by name as the positional and keyword arguments of a call of the function."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        before = self.variadic is not None
        for spec in self.parameters:
            if spec.variadic:
                args.extend(values[spec.name])
                before = False
            elif before:
                args.append(values[spec.name])
            else:
                kwargs[spec.name] = values[spec.name]
        return args, kwargs

    def bind(
        self, named: Mapping[str, Any]
    ) -> tuple[tuple[tuple[str, Node | tuple[Node, ...]], ...], str, list[str]]:
        """Check arguments and turn them into nodes.

        Returns:
            the bound arguments (see `MergeNode.arguments`), the merge space of the result, and everything
            that is wrong.
        """
        problems = [
            f"{name}: there is no such argument.{did_you_mean(name, self.names)}"
            for name in named
            if name not in self.names
        ]
        bound: list[tuple[str, Node | tuple[Node, ...]]] = []
        for spec in self.parameters:
            try:
                value = self._bind_one(spec, named, problems)
            except RecipeError as error:
                problems.append(f"{spec.name}: {error}")
                continue
            if value is not None:
                bound.append((spec.name, value))
        return tuple(bound), self._space(bound, problems), problems

    def _bind_one(
        self, spec: ParameterSpec, named: Mapping[str, Any], problems: list[str]
    ) -> Node | tuple[Node, ...] | None:
        if spec.name not in named or (spec.variadic and not named[spec.name]):
            if spec.required:
                what = (
                    "at least one value is needed" if spec.variadic else "it has no default and must be given"
                )
                problems.append(f"{spec.name}: {what}")
            return None
        value = named[spec.name]
        if spec.variadic:
            values = value if isinstance(value, list | tuple) else [value]
            nodes = tuple(as_node(v, model=spec.is_model) for v in values)
            for index, node in enumerate(nodes):
                _check_node(spec, node, f"{spec.name}[{index}]", problems)
            return nodes
        node = as_node(value, model=spec.is_model)
        _check_node(spec, node, spec.name, problems)
        if not spec.required and node is as_node(spec.default, model=False):
            return None
        if isinstance(node, LiteralNode) and _same_number(node.value, spec.default):
            return None
        return node

    def _after_variadic(self, spec: ParameterSpec) -> bool:
        variadic = self.variadic
        return variadic is not None and self.parameters.index(spec) > self.parameters.index(variadic)

    def _space(self, bound: list[tuple[str, Node | tuple[Node, ...]]], problems: list[str]) -> str:
        """The result's merge space: the declared one, or the one that the undeclared parameters share."""
        shared: dict[str, str] = {}
        for name, value in bound:
            if self[name].spaces is None:
                many = isinstance(value, tuple)
                for index, node in enumerate(value if isinstance(value, tuple) else (value,)):
                    if not _is_open(node):
                        shared.setdefault(node.merge_space, f"{name}[{index}]" if many else name)
        if len(shared) > 1:
            _, odd, *_ = shared.values()
            listed = ", ".join(f"'{name}' has a {space}" for space, name in shared.items())
            problems.append(f"{odd}: the models must share one merge space, but {listed}")
        return self.space or next(iter(shared), "weight")


@dataclass(frozen=True, eq=False)
class _Unknown(Node):
    def identity(self) -> tuple[Any, ...]:
        return ()

    @property
    def merge_space(self) -> str:
        return "param"


UNKNOWN = _Unknown()
"""Stands for an argument whose own problems are already reported, so that nothing more is said of it."""


def read_signature(function: Callable[..., Any]) -> Signature:
    """The `Signature` that a function's annotations declare.

    Raises:
        RecipeError: a parameter without an annotation, or of a type that cannot be merged.
    """
    declared = inspect.signature(function, eval_str=True)
    specs: list[ParameterSpec] = []
    tile = None
    for parameter in declared.parameters.values():
        if parameter.annotation is Tile:
            tile = parameter.name
        elif parameter.name != "state":  # what a reduction hands from one round to the next
            specs.append(_read_parameter(parameter, getattr(function, "__name__", "merge method")))
    returned = declared.return_annotation
    spaces = returned.spaces if isinstance(returned, _Declared) else None
    has_state = "state" in declared.parameters
    return Signature(tuple(specs), spaces[0] if spaces else None, tile, has_state)


def _read_parameter(parameter: inspect.Parameter, owner: str) -> ParameterSpec:
    annotation = parameter.annotation
    if annotation is inspect.Parameter.empty:
        raise RecipeError(
            f"{owner}: the parameter '{parameter.name}' has no annotation. Write "
            f"`{parameter.name}: Parameter(Tensor)`."
        )
    if parameter.kind is inspect.Parameter.VAR_KEYWORD:
        raise RecipeError(
            f"the parameter '{parameter.name}' of '{owner}' takes any name. Name each argument."
        )
    declared = annotation if isinstance(annotation, _Declared) else _Declared(annotation, None, Bounds())
    variadic = parameter.kind is inspect.Parameter.VAR_POSITIONAL
    spaces = declared.spaces
    interface = _interface(declared.interface, owner, parameter.name)
    has_default = parameter.default is not inspect.Parameter.empty
    if spaces is None and (has_default or interface is not torch.Tensor):
        spaces = ("param",)
    return ParameterSpec(
        parameter.name,
        interface,
        spaces,
        parameter.default,
        declared.bounds or Bounds(),
        variadic,
        declared.choices,
        declared.help,
    )


def _interface(annotation: Any, owner: str, name: str) -> Any:
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        kinds = [a for a in typing.get_args(annotation) if a is not type(None)]
        annotation = kinds[0] if len(kinds) == 1 else annotation
    if typing.get_origin(annotation) is list:
        return list
    if annotation is torch.Tensor or annotation in _SCALARS:
        return annotation
    raise RecipeError(
        f"{owner}: the parameter '{name}' is of type {annotation}, which is none of Tensor, float, int, "
        "bool, str and list[float]."
    )


def _is_open(node: Node) -> bool:
    """Whether nothing can be said of a node yet."""
    return node is UNKNOWN or (isinstance(node, ParameterNode) and node.space is None)


def _check_node(spec: ParameterSpec, node: Node, where: str, problems: list[str]) -> None:
    if _is_open(node) or (isinstance(node, ParameterNode) and node.space == "param" and not spec.is_model):
        return
    if isinstance(node, LiteralNode):
        wrong = spec.check(node.value)
        if wrong:
            problems.append(f"{where}: {wrong}")
        if wrong or not spec.is_tensor or node.value is None:
            return
    if not spec.is_tensor:
        problems.append(f"{where}: expected {spec._expected()}, got {_describe(node)}")
    elif spec.spaces is not None and node.merge_space not in spec.spaces:
        hint = (
            " Take the difference to a base first: subtract(model, base)."
            if spec.spaces == ("delta",)
            else ""
        )
        problems.append(
            f"{where}: expected a {' or '.join(spec.spaces)}, got the {node.merge_space} "
            f"{_describe(node)}.{hint}"
        )


def _describe(node: Node) -> str:
    if isinstance(node, ModelNode):
        return f"model '{node.source.name if isinstance(node.source, InMemory) else node.source}'"
    return f"result of '{node.method.identifier}'" if isinstance(node, MergeNode) else repr(node)


def _same_number(value: Any, default: Any) -> bool:
    """Whether 1 stands for the default 1.0, which is one and the same recipe."""
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (value, default))
    return numbers and float(value) == float(default) and math.copysign(1, value) == math.copysign(1, default)


def _spaces(merge_space: str | Iterable[str] | None) -> tuple[str, ...] | None:
    if merge_space is None:
        return None
    spaces = (merge_space,) if isinstance(merge_space, str) else tuple(merge_space)
    for space in spaces:
        if space not in MERGE_SPACES:
            raise RecipeError(f"unknown merge space '{space}'.{did_you_mean(space, MERGE_SPACES)}")
    return spaces
