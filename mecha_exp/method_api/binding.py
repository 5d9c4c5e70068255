"""Checks arguments against a merge method's signature and turns them into nodes.

Recipes from code, YAML and text all use `MethodSignature.bind`, which reports every mistake at once with the
nearest valid name.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

import torch

from mecha_exp.errors import RecipeError, did_you_mean
from mecha_exp.graph.by_key import ByKey, as_curve
from mecha_exp.graph.literals import as_node
from mecha_exp.graph.nodes import InMemory, LiteralNode, MergeNode, ModelNode, Node, ParameterNode, models_of
from mecha_exp.method_api.annotations import Declaration, read_declaration
from mecha_exp.method_api.parameters import ParameterSpec
from mecha_exp.numbers import is_number

Bound = tuple[tuple[str, Node | tuple[Node, ...]], ...]
"""Arguments in the form of `MergeNode.arguments`."""


@dataclass(frozen=True, eq=False)
class _Unknown(Node):
    def identity(self) -> tuple[Any, ...]:
        return ()

    @property
    def merge_space(self) -> str:
        return "param"


UNKNOWN = _Unknown()
"""Replaces an argument whose mistakes are reported already, so that it causes no further ones."""


@dataclass(frozen=True)
class MethodSignature(Declaration):
    """The parameters of a merge method in order, and its result."""

    def __getitem__(self, name: str) -> ParameterSpec:
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> Mapping[str, ParameterSpec]:
        return {p.name: p for p in self.parameters}

    @cached_property
    def names(self) -> list[str]:
        """The names of the parameters, in order."""
        return [p.name for p in self.parameters]

    @cached_property
    def variadic(self) -> ParameterSpec | None:
        """The `*parameter`, if there is one."""
        return next((p for p in self.parameters if p.variadic), None)

    @cached_property
    def reads_other_keys(self) -> bool:
        """Whether the method receives a `StateDict`, and so may read any key."""
        return any(p.is_state_dict for p in self.parameters)

    def by_name(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a Python call under their names, varargs as a list.

        A hyperparameter in the place of an optional model is taken for the next parameter: the third argument
        of `add_difference(a, d, 0.5)` is alpha, since a number cannot be the model c.

        Raises:
            RecipeError: there are too many positional arguments, or one is given twice.
        """
        named: dict[str, Any] = {}
        rest = list(args)
        for spec in self.parameters:
            if spec.variadic and rest:
                named[spec.name], rest = rest, []
            elif rest and not self._after_variadic(spec):
                if spec.is_model and spec.default is None and _is_hyperparameter(rest[0]):
                    continue
                named[spec.name] = rest.pop(0)
        if rest:
            raise RecipeError(f"takes {len(self.names)} arguments at most ({', '.join(self.names)})")
        for name, value in kwargs.items():
            if name in named:
                raise RecipeError(f"the argument '{name}' is given twice")
            named[name] = value
        return named

    @cached_property
    def paths(self) -> tuple[ParameterSpec, ...]:
        """The parameters that name files; a recipe holds them as strings."""
        return tuple(spec for spec in self.parameters if spec.interface is Path)

    def arrange(self, values: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Values by name as the positional and keyword arguments of a call of the function."""
        if self.paths:
            values = {**values, **{spec.name: _as_path(values[spec.name]) for spec in self.paths}}
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

    def bind(self, named: Mapping[str, Any]) -> tuple[Bound, str, list[str]]:
        """Check arguments and turn them into nodes.

        Returns:
            the bound arguments (see `MergeNode.arguments`), the merge space of the result, and every mistake.
        """
        problems = [
            f"{name}: there is no such argument.{did_you_mean(name, self.names)}"
            for name in named
            if name not in self.names
        ]
        bound: list[tuple[str, Node | tuple[Node, ...]]] = []
        for spec in self.parameters:
            try:
                value = self._bind_argument(spec, named, problems)
            except RecipeError as error:
                problems.append(f"{spec.name}: {error}")
                continue
            if value is not None:
                bound.append((spec.name, value))
        return tuple(bound), self._space(tuple(bound), problems), problems

    def _bind_argument(
        self, spec: ParameterSpec, named: Mapping[str, Any], problems: list[str]
    ) -> Node | tuple[Node, ...] | None:
        if spec.name not in named or (spec.variadic and not named[spec.name]):
            if spec.required:
                what = (
                    "at least one value is needed" if spec.variadic else "it has no default and must be given"
                )
                problems.append(f"{spec.name}: {what}" + (f" ({spec.help})" if spec.help else ""))
            return None
        value = _without_path(named[spec.name]) if spec.interface is Path else named[spec.name]
        value = _as_declared(spec, value)
        if spec.optional and not spec.required and (value is None or value is as_node(None)):
            return None
        if spec.variadic:
            values = value if isinstance(value, list | tuple) else [value]
            nodes = tuple(as_node(v, model=spec.is_model) for v in values)
            for index, node in enumerate(nodes):
                _check_node(spec, node, f"{spec.name}[{index}]", problems)
            return nodes
        node = _with_curves(spec, as_node(value, model=spec.is_model))
        _check_node(spec, node, spec.name, problems)
        if not spec.required and node is as_node(spec.default, model=False):
            return None
        if isinstance(node, LiteralNode) and same_number(node.value, spec.default):
            return None
        return node

    def _after_variadic(self, spec: ParameterSpec) -> bool:
        variadic = self.variadic
        return variadic is not None and self.parameters.index(spec) > self.parameters.index(variadic)

    def _space(self, bound: Bound, problems: list[str]) -> str:
        """The result's merge space: the declared one, or that of its symbol.

        Parameters without a space share one unnamed symbol. A tensor literal takes the space of the other
        arguments, and a recipe parameter counts as a weight.
        """
        groups: dict[object, dict[str, tuple[str, Node]]] = {}
        unfilled: set[object] = set()
        for name, value in bound:
            spec = self[name]
            if spec.spaces is not None and spec.symbol is None:
                continue
            group = groups.setdefault(spec.symbol, {})
            for index, node in enumerate(value if isinstance(value, tuple) else (value,)):
                if _is_open(node):
                    unfilled.add(spec.symbol)
                elif not _is_flexible(node):
                    where = f"{name}[{index}]" if isinstance(value, tuple) else name
                    group.setdefault(node.merge_space, (where, node))
        for group in groups.values():
            if len(group) > 1:
                problems.append(_conflict(group))
        if self.returned.symbol is None and self.returned.spaces:
            return self.returned.spaces[0]
        if self.returned.symbol not in groups:
            return "weight"
        default = "weight" if self.returned.symbol in unfilled else "param"
        return next(iter(groups[self.returned.symbol]), default)


def read_signature(function: Callable[..., Any]) -> MethodSignature:
    """Read the signature from the annotations of a function, or of a class with `__call__`.

    Raises:
        RecipeError: a parameter has no annotation, or a type that cannot be merged.
    """
    declaration = read_declaration(function, getattr(function, "__name__", "merge method"))
    return MethodSignature(**vars(declaration))


def _as_declared(spec: ParameterSpec, value: Any) -> Any:
    """A number as the declared type where no digit is lost: 2.0 as 2, a tensor of one number as that."""
    if spec.interface not in (int, float):
        return value
    if isinstance(value, Mapping):
        return {name: _as_declared(spec, each) for name, each in value.items()}
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    is_whole = isinstance(value, float) and value.is_integer()
    return int(value) if spec.interface is int and is_whole else value


def _as_path(value: Any) -> Any:
    """A string of a recipe as the path that a method receives; of several, each."""
    if isinstance(value, list | tuple):
        return tuple(map(_as_path, value))
    return Path(value).expanduser() if isinstance(value, str) else value


def _without_path(value: Any) -> Any:
    """A path as a string, which recipes hold; of several, each."""
    if isinstance(value, list | tuple):
        return [_without_path(item) for item in value]
    return os.fspath(value) if isinstance(value, PurePath) else value


def _with_curves(spec: ParameterSpec, node: Node) -> Node:
    """Read a list in the place of a number as a gradient over depth, and a string as a preset of blocks."""
    if not spec.is_number or not isinstance(node, LiteralNode):
        return node
    value = node.value
    if isinstance(value, ByKey):
        return LiteralNode(value.with_curves(), node.space, node.config)
    if isinstance(value, str | tuple) and (curve := as_curve(value)) is not value:
        return LiteralNode(ByKey((), curve), node.space, node.config)
    return node


def _is_hyperparameter(value: Any) -> bool:
    if isinstance(value, Node):
        return value.merge_space == "param"
    if isinstance(value, Mapping):
        return not any(isinstance(v, torch.Tensor) for v in value.values())
    return isinstance(value, int | float)


def _is_flexible(node: Node) -> bool:
    """Whether a node fits any merge space: a tensor literal without one."""
    return isinstance(node, LiteralNode) and node.space == "param" and isinstance(node.value, torch.Tensor)


def _is_open(node: Node) -> bool:
    """Whether the merge space of a node is unknown so far."""
    return node is UNKNOWN or (isinstance(node, ParameterNode) and node.space is None)


def _is_known_in_time(node: Node, spec: ParameterSpec) -> bool:
    """Whether a node has a plain value for each key at planning time, without reading a model."""
    if not isinstance(node, MergeNode):
        return False
    returns_text = node.method.signature.returned.interface is str
    return spec.interface is str if returns_text else not models_of(node)


def _check_node(spec: ParameterSpec, node: Node, where: str, problems: list[str]) -> None:
    if _is_open(node) or (isinstance(node, ParameterNode) and node.space == "param" and not spec.is_model):
        return
    if isinstance(node, LiteralNode):
        mistake = spec.check(node.value)
        if mistake:
            problems.append(f"{where}: {mistake}")
        if mistake or not spec.is_tensor or node.value is None:
            return
    if not spec.is_tensor:
        if not _is_known_in_time(node, spec):
            problems.append(f"{where}: expected {spec.expected}, got {_describe(node)}")
    elif spec.spaces is None or (spec.symbol is not None and _is_flexible(node)):
        return
    elif node.merge_space not in spec.spaces:
        hint = (
            " Take the difference to a base first: subtract(model, base). Models themselves are averaged by "
            "linear(a, b, weights=[0.5, 0.5]) or weighted_sum(a, b, alpha=0.5)."
            if spec.spaces == ("delta",)
            else ""
        )
        problems.append(
            f"{where}: expected a {' or '.join(spec.spaces)}, got the {node.merge_space} "
            f"{_describe(node)}.{hint}"
        )


def _conflict(group: Mapping[str, tuple[str, Node]]) -> str:
    """Describe arguments of different merge spaces that must share one."""
    _, (odd, _), *_ = group.values()
    listed = ", ".join(
        f"'{where}' is a {space} ({_describe(node)})" for space, (where, node) in group.items()
    )
    cure = ""
    if group.keys() == {"weight", "delta"}:
        cure = ". Take the difference of the weight to a base (model - base), or add the delta to one"
    return f"{odd}: the models must share one merge space, but {listed}{cure}"


def _describe(node: Node) -> str:
    if isinstance(node, ModelNode):
        return f"model '{node.source.name if isinstance(node.source, InMemory) else node.source}'"
    return f"result of '{node.method.identifier}'" if isinstance(node, MergeNode) else repr(node)


def same_number(value: Any, default: Any) -> bool:
    """Whether a value equals the default: 1 and 1.0 make the same recipe."""
    numbers = is_number(value) and is_number(default)
    return numbers and float(value) == float(default) and math.copysign(1, value) == math.copysign(1, default)
