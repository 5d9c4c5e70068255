"""The declaration of a merge method's parameters and of its result.

    @merge_method
    def blend(a: Parameter(Tensor), b: Parameter(Tensor), alpha: Parameter(Tensor) = 0.5) -> Return(Tensor):

The signature is the schema: `binding` checks arguments against it.
"""

from __future__ import annotations

import inspect
import math
import typing
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from mecha_exp.errors import RecipeError, brief
from mecha_exp.graph.by_key import ByKey
from mecha_exp.graph.literals import config_and_space
from mecha_exp.graph.spaces import MergeSpaceSymbol, checked_spaces, is_space
from mecha_exp.method_api.state_dict import StateDict
from mecha_exp.numbers import is_number

SCALARS: dict[Any, str] = {
    float: "a number", int: "a whole number", bool: "true or false", str: "a word", Path: "a path",
}  # fmt: skip


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


@dataclass(frozen=True)
class Declared:
    """The annotation that `Parameter(...)` and `Return(...)` make.

    Attributes:
        spaces: the allowed merge spaces; None where none are declared.
        symbol: the symbol of a merge space that parameters share.
        config: the identifier of a model config.
        bounds, choices, help: see `Parameter`.
    """

    interface: Any
    spaces: tuple[str, ...] | None = None
    symbol: MergeSpaceSymbol | None = None
    config: str | None = None
    bounds: Bounds = Bounds()
    choices: tuple[Any, ...] = ()
    help: str = ""


def Parameter(
    interface: Any,
    merge_space: Any = None,
    model_config: Any = None,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    choices: Iterable[bool | str] = (),
    help: str = "",
) -> Any:
    """Declare a parameter of a merge method, as the annotation of a function's parameter.

    A declaration can be shared by several methods: `Density = Parameter(float, gt=0, le=1)`.

    Args:
        interface: `torch.Tensor`, `float`, `int`, `bool`, `str`, `Path` (a file or folder, whose content
            decides the result), `list[float]` (one number, or one for each model), a `TypeVar` (any of them),
            or `StateDict[...]` of one of these; optional by `... | None`.
        merge_space: the allowed spaces: `weight`, `delta`, `param`, several, or a `MergeSpaceSymbol`. None:
            any, but the same for all parameters without one. A parameter with a default is a `param`. A model
            config may be passed here too.
        model_config: the model config of a `StateDict`, or its identifier.
        ge, gt, le, lt: the range of a hyperparameter, checked before any work.
        choices: the only strings, or bools, that a `str` parameter accepts.
        help: its meaning, for `python -m mecha_exp info methods NAME`.

    Raises:
        RecipeError: the merge space does not exist.
    """
    declared = _declared(interface, merge_space, model_config)
    return replace(declared, bounds=Bounds(ge, gt, le, lt), choices=tuple(choices), help=help)


def Return(interface: Any, merge_space: Any = None, model_config: Any = None) -> Any:
    """Declare the result of a merge method.

    Args:
        interface: `torch.Tensor`, a scalar type, or a `TypeVar` that a parameter has too; a `StateDict` of
            one of these where a class with `map_keys` makes several keys at once.
        merge_space: one space, or the `MergeSpaceSymbol` of a parameter; None: that of the parameters without
            one. A model config may be passed here too.
        model_config: the model config of the result's keys, or its identifier.

    Raises:
        RecipeError: it has several spaces.
    """
    declared = _declared(interface, merge_space, model_config)
    if declared.symbol is None and declared.spaces and len(declared.spaces) > 1:
        raise RecipeError(
            f"Return: what is returned is of one merge space, not of {', '.join(declared.spaces)}. "
            "Use a MergeSpaceSymbol that a parameter names too."
        )
    return declared


def _declared(interface: Any, space: Any, config: Any) -> Declared:
    if (isinstance(space, str) and not is_space(space) and "-" in space) or (
        space is not None and hasattr(space, "components")
    ):  # the identifier of a config has a hyphen
        space, config = None, space
    identifier, _ = config_and_space(config, None)
    symbol = space if isinstance(space, MergeSpaceSymbol) else None
    return Declared(interface, checked_spaces(space) if space else None, symbol, identifier)


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter of a merge method.

    Attributes:
        name: as written in the function.
        interface: `torch.Tensor`, a scalar type, `list` for numbers, or `object` for any value.
        spaces: the merge spaces that it accepts; None: that of the other parameters.
        default: its default value, or `inspect.Parameter.empty`.
        bounds: the range of a number.
        variadic: whether it takes any number of values (`*models`).
        symbol: the symbol of the merge space that it shares with others.
        config: the identifier of the model config that a `StateDict` must have.
        is_state_dict: whether the method receives a `StateDict` rather than the value of the key.
        choices: the only values that it accepts; empty for any.
        help: its meaning.
        optional: whether it may be None, which is its default.
    """

    name: str
    interface: Any
    spaces: tuple[str, ...] | None
    default: Any
    bounds: Bounds
    variadic: bool
    symbol: MergeSpaceSymbol | None = None
    config: str | None = None
    is_state_dict: bool = False
    choices: tuple[Any, ...] = ()
    help: str = ""
    optional: bool = False

    @cached_property
    def required(self) -> bool:
        """Whether a call must have the argument."""
        return self.default is inspect.Parameter.empty

    @cached_property
    def is_tensor(self) -> bool:
        """Whether the method receives tensors rather than Python values."""
        return self.interface in (torch.Tensor, object)

    @cached_property
    def is_model(self) -> bool:
        """Whether a string argument is a model's path: it is a tensor and not a hyperparameter."""
        return self.is_tensor and self.spaces != ("param",)

    @cached_property
    def is_number(self) -> bool:
        """Whether one number is expected."""
        return self.interface in (float, int) or (self.is_tensor and not self.is_model)

    def check(self, value: Any) -> str | None:
        """Describe what is wrong with a literal value; None if it is valid."""
        if isinstance(value, ByKey):
            if self.interface is Path:
                return "expected one path for all keys, got values by key"
            return next((p for v in value.values if (p := self.check(v))), None)
        if isinstance(value, tuple):
            if self.interface is not list:
                return f"expected {self.expected}, got a list: {list(value)}"
            return next((p for v in value if (p := self.check(v))), None)
        if value is None and not self.required and self.default is None:
            return None
        if isinstance(value, torch.Tensor):
            return None if self.is_tensor else f"expected {self.expected}, got a tensor"
        if self.choices:
            known = any(
                value is choice or (isinstance(value, str) and value == choice) for choice in self.choices
            )
            return None if known else f"expected {self.expected}, got {brief(value)}"
        if isinstance(value, float) and math.isinf(value) and not self._defaults_to_infinity:
            return f"expected a finite number, got {value!r}"
        if not self._accepts(value):
            return f"expected {self.expected}, got {brief(value)}"
        if is_number(value) and value not in self.bounds:
            return f"{value:g} is out of range {self.bounds}"
        return None

    @property
    def _defaults_to_infinity(self) -> bool:
        return isinstance(self.default, float) and math.isinf(self.default)

    def _accepts(self, value: Any) -> bool:
        if self.interface is object:
            return value is not None
        if isinstance(value, bool) or self.interface is bool:
            return isinstance(value, bool) and self.interface is bool
        if self.interface in (str, Path):
            return isinstance(value, str)
        if self.interface is int:
            return isinstance(value, int) and is_number(value)
        return is_number(value) and not math.isnan(value)

    @property
    def expected(self) -> str:
        """The accepted values in words, for messages."""
        if self.choices:
            return " or ".join(c if isinstance(c, str) else str(c).lower() for c in self.choices)
        return SCALARS.get(self.interface, "a model" if self.is_model else "a number")

    @property
    def range(self) -> str:
        """The choices, or the bounds as an interval; empty where any value goes."""
        return self.expected if self.choices else str(self.bounds) if self.bounds != Bounds() else ""


def is_state_dict(annotation: Any) -> bool:
    """Whether an annotation is `StateDict`, or one of some type."""
    return annotation is StateDict or typing.get_origin(annotation) is StateDict
