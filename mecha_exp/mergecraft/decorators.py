"""`model_merge` and `layer_merge`: merge functions that take and give back models of any kind."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from mecha_exp.errors import RecipeError, did_you_mean, some
from mecha_exp.mergecraft.arithmetic import StateDict, dict_map, require_same_keys
from mecha_exp.mergecraft.kinds import parameters_of, with_values

_FOR_ALL = ("task", "base_index")
"""Keywords that each function takes, whether it uses them or not."""


def model_merge(function: Callable[..., Mapping[str, Tensor]]) -> Callable[..., Any]:
    """Make a function of state dicts one of models of any kind, which gives the kind of the last model back.

    Args:
        function: (list of `StateDict`, ...) -> the merged one.

    The function that is made takes beside the arguments of `function`:
        passthrough_layers: keys that are not merged by the function: they are the mean of the models but for
            the base, which `base_index` names, be it given or a default. `passthrough` is another name.
        verbose: accepted; there is nothing to tell.
        task: of the pipelines of models that are given by name.

    Any other keyword that the function does not take is a RecipeError.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def merged(
        models: Sequence[Any],
        *args: Any,
        passthrough_layers: Iterable[str] = (),
        passthrough: Iterable[str] = (),
        verbose: bool = False,
        **keywords: Any,
    ) -> Any:
        models = list(models)
        if not models:
            raise RecipeError(f"{function.__name__}: give one model at least.")
        state_dicts = [StateDict(parameters_of(model, **keywords)) for model in models]
        require_same_keys(state_dicts)
        own = _taken(function.__name__, signature, keywords)
        bound = signature.bind_partial(state_dicts, *args, **own)
        bound.apply_defaults()
        base_index = keywords.get("base_index", bound.arguments.get("base_index"))
        passed = _passed(state_dicts, [*passthrough_layers, *passthrough], base_index)
        rest = [state_dict.remove(passed) for state_dict in state_dicts]
        values = {**(function(rest, *args, **own) if any(rest) else {}), **passed}
        ordered = StateDict({key: values[key] for key in state_dicts[-1] if key in values})
        return with_values(models[-1], ordered, **keywords)

    return merged


def layer_merge(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """Make a function of a list of tensors one of models of any kind: `model_merge` of `dict_map`.

    >>> @layer_merge
    ... def median(models, **_):
    ...     return torch.stack(models).median(dim=0).values
    """
    return model_merge(dict_map(function))


def _taken(name: str, signature: inspect.Signature, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords that a function takes; RecipeError for those that nothing takes."""
    parameters = signature.parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(keywords)
    if unknown := [word for word in keywords if word not in {*parameters, *_FOR_ALL}]:
        hint = did_you_mean(unknown[0], parameters)
        raise RecipeError(f"{name}: there is no argument {some(unknown)}.{hint}")
    return {word: value for word, value in keywords.items() if word in parameters}


def _passed(state_dicts: Sequence[StateDict], keys: Sequence[str], base_index: int | None) -> StateDict:
    """The means of the layers that a function does not merge."""
    if unknown := [key for key in keys if key not in state_dicts[0]]:
        hint = did_you_mean(unknown[0], state_dicts[0])
        raise RecipeError(f"passthrough_layers: the models have no {some(unknown, 3)}.{hint}")
    base = None if base_index is None else base_index % len(state_dicts)
    own = [each.subset(keys) for number, each in enumerate(state_dicts) if number != base]
    if not own and keys:
        raise RecipeError("passthrough_layers: there is no model beside the base to take them from.")
    return functools.reduce(StateDict.__add__, own) / len(own) if keys else StateDict()
