"""State dicts with arithmetic, and functions of tensors that are applied key by key."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mecha_exp.errors import RecipeError, some
from mecha_exp.mergecraft import kinds


class StateDict(dict[str, Tensor]):
    """Named tensors that are added, subtracted, multiplied and divided key by key.

    The other operand is a number, a tensor, or named tensors with the same keys. Keys that only one of two
    has are an error (mergecraft leaves them out).

    >>> (StateDict(a) + StateDict(b)) / 2
    """

    @staticmethod
    def from_model(model: nn.Module) -> StateDict:
        """The parameters of a module."""
        return StateDict(model.named_parameters())

    @staticmethod
    def from_hf(name: str, **keywords: Any) -> StateDict:
        """The parameters of the model of a transformers pipeline, by its folder or its name in the cache."""
        return StateDict.from_model(kinds.pipeline_of(name, **keywords).model)

    @staticmethod
    def zeros_like(item: Any, **keywords: Any) -> StateDict:
        """Zeros in the shapes of a module, of named tensors, or of a model by its name."""
        if isinstance(item, str):
            return StateDict.from_hf(item, **keywords) * 0
        return (StateDict.from_model(item) if isinstance(item, nn.Module) else StateDict(item)) * 0

    def __add__(self, other: Any) -> StateDict:
        return self._with(other, operator.add)

    __radd__ = __add__

    def __sub__(self, other: Any) -> StateDict:
        return self._with(other, operator.sub)

    def __rsub__(self, other: Any) -> StateDict:
        return self._with(other, lambda own, its: its - own)

    def __mul__(self, other: Any) -> StateDict:
        return self._with(other, operator.mul)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> StateDict:
        return self._with(other, operator.truediv)

    def _with(self, other: Any, operation: Callable[[Any, Any], Tensor]) -> StateDict:
        if isinstance(other, nn.Module):
            other = StateDict.from_model(other)
        if not isinstance(other, Mapping):
            return StateDict({key: operation(tensor, other) for key, tensor in self.items()})
        require_same_keys([self, other])
        return StateDict({key: operation(tensor, other[key]) for key, tensor in self.items()})

    def to(self, device: torch.device | str) -> StateDict:
        """The tensors on a device."""
        return StateDict({key: tensor.to(device) for key, tensor in self.items()})

    def filter_values(self, condition: Callable[[Tensor], bool]) -> StateDict:
        """The tensors for which a condition holds."""
        return StateDict({key: tensor for key, tensor in self.items() if condition(tensor)})

    def remove(self, keys: Iterable[str]) -> StateDict:
        """The tensors without those of some keys."""
        dropped = set(keys)
        return StateDict({key: tensor for key, tensor in self.items() if key not in dropped})

    def subset(self, keys: Iterable[str]) -> StateDict:
        """The tensors of some keys."""
        return StateDict({key: self[key] for key in keys})

    def copy(self) -> StateDict:
        """Copies of the tensors."""
        return StateDict({key: tensor.clone() for key, tensor in self.items()})

    def to_model(self, model: Any, verbose: bool = False, **keywords: Any) -> Any:
        """A copy of a module or a pipeline, or the pipeline of a name, with these values."""
        return kinds.with_values(model, self, **keywords)


def dict_map(
    function_or_names: Callable[..., Tensor] | Sequence[str] | None = None,
    *,
    names: Sequence[str] | None = None,
) -> Callable[..., Any]:
    """Make a function of lists of tensors one of lists of state dicts, which is called for each key.

    It receives the key as `layer_name`. A function of no such parameter is called without it.

    Args:
        function_or_names: the function, or the parameters that are lists of state dicts (the first).
        names: the same parameters, as a keyword.
    """
    if callable(function_or_names):
        return _mapped(function_or_names, names)
    chosen = names if function_or_names is None else function_or_names
    return lambda function: _mapped(function, chosen)


def _mapped(function: Callable[..., Tensor], names: Sequence[str] | None) -> Callable[..., StateDict]:
    signature = inspect.signature(function)
    parameters = signature.parameters
    takes_more = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    mapped = list(names) if names is not None else list(parameters)[:1]
    if unknown := [name for name in mapped if name not in parameters]:
        raise RecipeError(f"dict_map: {function.__name__} has no parameter {some(unknown)}.")

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> StateDict:
        arguments = {**signature.bind_partial(*args).arguments, **kwargs}
        lists = {name: list(arguments.pop(name)) for name in mapped if name in arguments}
        if missing := [name for name in mapped if name not in lists]:
            raise RecipeError(f"{function.__name__}: the list of state dicts {some(missing)} is missing.")
        require_same_keys([each for several in lists.values() for each in several])
        named = takes_more or "layer_name" in parameters
        first = next(iter(lists.values()))[0]
        with torch.no_grad():
            return StateDict(
                (
                    key,
                    function(
                        **{name: [each[key] for each in several] for name, several in lists.items()},
                        **({"layer_name": key} if named else {}),
                        **arguments,
                    ),
                )
                for key in first
            )

    return called


def require_same_keys(state_dicts: Sequence[Mapping[str, Any]]) -> None:
    """Raise RecipeError unless all have the same keys and shapes; mergecraft merges keys that all have."""
    if not state_dicts:
        raise RecipeError("give one model at least.")
    keys = state_dicts[0].keys()
    for number, other in enumerate(state_dicts[1:], 1):
        if other.keys() != keys:
            differing = sorted(keys ^ other.keys())
            raise RecipeError(
                f"model {number} has other keys than model 0: {some(differing, 5)}. Give models of one "
                "architecture, or the keys that all have: StateDict(model).subset(keys)."
            )
        for key, tensor in state_dicts[0].items():
            if tensor.shape != other[key].shape:
                raise RecipeError(
                    f"{key} is {list(tensor.shape)} in model 0 and {list(other[key].shape)} in model "
                    f"{number}. Give models of one architecture."
                )
