"""Merge spaces: what a tensor means, and symbols for methods whose result means what their arguments do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mecha_exp.errors import RecipeError, brief, did_you_mean


class MergeSpace(str):
    """The name of a merge space; `MergeSpace("weight") == "weight"`."""

    __slots__ = ()

    @property
    def identifier(self) -> str:
        """The name of the merge space."""
        return str(self)


class MergeSpaceSymbol:
    """A merge space that a call decides: it is equal for all parameters that name this symbol.

    >>> S = MergeSpaceSymbol("weight", "delta")
    >>> @merge_method
    ... def blend(a: Parameter(Tensor, S), b: Parameter(Tensor, S)) -> Return(Tensor, S): ...

    Two weights give a weight, two deltas a delta, and one of each is an error.
    """

    def __init__(self, *merge_spaces: str) -> None:
        self.merge_spaces = checked_spaces(merge_spaces)

    def __iter__(self) -> Iterator[str]:
        return iter(self.merge_spaces)

    def __contains__(self, space: object) -> bool:
        return space in self.merge_spaces


_registry: dict[str, MergeSpace] = {name: MergeSpace(name) for name in ("weight", "delta", "param")}


def register_merge_space(identifier: str) -> None:
    """Register a further merge space, for methods whose tensors are not weights, deltas or parameters.

    Raises:
        RecipeError: the name is registered already.
    """
    if identifier in _registry:
        raise RecipeError(f"there is a merge space '{identifier}' already")
    _registry[identifier] = MergeSpace(identifier)


def resolve(identifier: str) -> MergeSpace:
    """The merge space of a name.

    Raises:
        RecipeError: the name is unknown; the message suggests the nearest.
    """
    if not isinstance(identifier, str) or identifier not in _registry:
        raise RecipeError(
            f"unknown merge space {brief(identifier)}.{did_you_mean(str(identifier), _registry)}"
        )
    return _registry[identifier]


def get_all() -> list[MergeSpace]:
    """Every merge space, the built-in ones first.

    These are `weight` (a parameter), `delta` (a difference of two) and `param` (a hyperparameter).
    """
    return list(_registry.values())


def get_identifiers(merge_space: Iterable[str]) -> list[str]:
    """The names of several merge spaces, or of those that a symbol allows.

    Raises:
        RecipeError: one of them is unknown, or it is one name instead of several.
    """
    if isinstance(merge_space, str):
        raise RecipeError(
            f"expected a MergeSpaceSymbol or several merge spaces, got the one name '{merge_space}'"
        )
    return list(checked_spaces(merge_space))


def checked_spaces(spaces: str | Iterable[str]) -> tuple[str, ...]:
    """One name or several as a tuple of registered names.

    Raises:
        RecipeError: one of them is unknown.
    """
    names = (spaces,) if isinstance(spaces, str) else spaces
    return tuple(resolve(name).identifier for name in names)


def is_space(name: object) -> bool:
    """Whether a value is the name of a merge space."""
    return isinstance(name, str) and name in _registry
