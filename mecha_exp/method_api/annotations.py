"""Reads the declaration of a merge method from its function's annotations."""

from __future__ import annotations

import inspect
import os
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from mecha_exp.errors import RecipeError
from mecha_exp.method_api.parameters import SCALARS, Declared, Parameter, ParameterSpec, is_state_dict
from mecha_exp.method_api.state_dict import T, Tile

RESERVED = ("key", "key_relation", "cache", "output_reused")
"""Names that a method receives in its `**kwargs`; parameters cannot have them."""


@dataclass(frozen=True)
class Declaration:
    """The parameters and the result that a function declares.

    Attributes:
        parameters: in order.
        returned: the merge space, the symbol and the model config of the result.
        wants_tile: the name of the parameter that receives the `Tile`, or None.
        has_state: whether a reduction passes a state from one round to the next.
        wants_key: whether it takes `**kwargs`: the key, its relation to others, and a cache.
    """

    parameters: tuple[ParameterSpec, ...]
    returned: Declared
    wants_tile: str | None
    has_state: bool
    wants_key: bool


def read_declaration(function: Callable[..., Any], owner: str) -> Declaration:
    """Read the annotations of a function, or of a class with `__call__`.

    Raises:
        RecipeError: a parameter has no annotation, or a type that cannot be merged.
    """
    declared = inspect.signature(function.__call__ if inspect.isclass(function) else function, eval_str=True)
    parameters = list(declared.parameters.values())[1 if inspect.isclass(function) else 0 :]
    specs: list[ParameterSpec] = []
    tile, wants_key = None, False
    for parameter in parameters:
        if parameter.annotation is Tile:
            tile = parameter.name
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD and not isinstance(
            parameter.annotation, Declared
        ):
            wants_key = True
        elif parameter.name != "state":  # the state of a reduction
            specs.append(_read_parameter(parameter, owner))
    returned = declared.return_annotation
    if not isinstance(returned, Declared):
        returned = Declared(returned)
    if is_state_dict(returned.interface):
        returned = _of_several_keys(function, returned)
    _check_symbol(specs, returned, owner)
    return Declaration(tuple(specs), returned, tile, "state" in declared.parameters, wants_key)


def _of_several_keys(function: Callable[..., Any], returned: Declared) -> Declared:
    """The declaration of each value of a method that returns a dictionary of them."""
    if not hasattr(function, "map_keys"):
        raise RecipeError(
            "a merge method returns the value of one key: write Return(Tensor), not a StateDict. A class "
            "with map_keys returns a dictionary."
        )
    return replace(returned, interface=next(iter(typing.get_args(returned.interface)), torch.Tensor))


def _read_parameter(parameter: inspect.Parameter, owner: str) -> ParameterSpec:
    _check_annotated(parameter, owner)
    annotation = parameter.annotation
    declared = annotation if isinstance(annotation, Declared) else Declared(annotation)
    interface, is_state_dict = _interface(declared.interface, owner, parameter.name)
    return ParameterSpec(
        parameter.name,
        interface,
        _spaces(parameter, declared, interface, owner),
        os.fspath(parameter.default) if isinstance(parameter.default, Path) else parameter.default,
        declared.bounds,
        parameter.kind is inspect.Parameter.VAR_POSITIONAL,
        declared.symbol,
        declared.config,
        is_state_dict,
        declared.choices,
        declared.help,
        _is_optional(declared.interface),
    )


def _check_annotated(parameter: inspect.Parameter, owner: str) -> None:
    """Check that a parameter says what it is, and has a name that arguments can be given by."""
    if parameter.annotation is inspect.Parameter.empty:
        raise RecipeError(
            f"{owner}: the parameter '{parameter.name}' has no annotation. Write "
            f"`{parameter.name}: Parameter(Tensor)`."
        )
    if parameter.annotation is Parameter:
        raise RecipeError(
            f"{owner}: the parameter '{parameter.name}' is annotated with Parameter itself. Say of what: "
            f"`{parameter.name}: Parameter(Tensor)`."
        )
    if parameter.kind is inspect.Parameter.VAR_KEYWORD:
        raise RecipeError(
            f"the parameter '{parameter.name}' of '{owner}' takes any name. Name each argument."
        )
    if parameter.name in RESERVED:
        raise RecipeError(
            f"{owner}: '{parameter.name}' is reserved for `**kwargs`. Give the parameter another name."
        )


def _spaces(
    parameter: inspect.Parameter, declared: Declared, interface: Any, owner: str
) -> tuple[str, ...] | None:
    """The merge spaces of a parameter; what has a default, or is not a tensor, is a `param`."""
    has_default = parameter.default is not inspect.Parameter.empty
    spaces = declared.spaces
    if has_default and spaces not in (None, ("param",)) and parameter.default is not None:
        raise RecipeError(
            f"{owner}: the parameter '{parameter.name}' has the default {parameter.default!r}, so it is a "
            f"'param' and not a {' or '.join(spaces or ())}."
        )
    if spaces is None and (has_default or interface not in (torch.Tensor, object)):
        spaces = ("param",)
    return spaces


def _is_optional(annotation: Any) -> bool:
    return type(None) in typing.get_args(annotation)


def _interface(annotation: Any, owner: str, name: str) -> tuple[Any, bool]:
    """The type of a value, and whether the method receives it in a `StateDict`."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        kinds = [a for a in typing.get_args(annotation) if a is not type(None)]
        annotation = kinds[0] if len(kinds) == 1 else annotation
    if is_state_dict(annotation):
        (inner,) = typing.get_args(annotation) or (T,)
        return (object if isinstance(inner, TypeVar) else _interface(inner, owner, name)[0]), True
    if isinstance(annotation, TypeVar):
        return object, False
    if typing.get_origin(annotation) is list:
        if torch.Tensor in typing.get_args(annotation):
            raise RecipeError(
                f"{owner}: the parameter '{name}' is a list of tensors. Several models are given one by one: "
                f"*{name}: Parameter(Tensor)."
            )
        return list, False
    if annotation is torch.Tensor or annotation in SCALARS:
        return annotation, False
    raise RecipeError(
        f"{owner}: the parameter '{name}' is of type {annotation}, which is none of Tensor, float, int, "
        "bool, str, Path, list[float], a TypeVar, and StateDict of one of them."
    )


def _check_symbol(specs: Iterable[ParameterSpec], returned: Declared, owner: str) -> None:
    if returned.symbol is not None and all(spec.symbol is not returned.symbol for spec in specs):
        raise RecipeError(
            f"{owner}: the merge space of what is returned is a symbol that no parameter names, so nothing "
            "tells it. Name it in a Parameter(...)."
        )
