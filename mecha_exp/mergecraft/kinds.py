"""The kinds of models that are given and given back: modules, pipelines, state dicts, and names."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mecha_exp.checkpoint import round_to
from mecha_exp.checkpoint.remote import is_address
from mecha_exp.errors import CheckpointError, ConfigError, RecipeError, brief, did_you_mean, some
from mecha_exp.sources import search_path
from mecha_exp.sources.search import find_model


def parameters_of(model: Any, **keywords: Any) -> dict[str, Tensor]:
    """The tensors that are merged: of a module and of a pipeline its parameters that are not frozen.

    Raises:
        RecipeError: it is not a model of any kind.
    """
    if isinstance(model, str | os.PathLike):
        model = pipeline_of(os.fspath(model), **keywords)
    module = module_of(model)
    if module is not None:
        return {key: value.detach() for key, value in module.named_parameters() if value.requires_grad}
    if isinstance(model, Mapping):
        return {key: tensor.detach() for key, tensor in model.items()}
    raise RecipeError(
        f"cannot merge {brief(model)} of type {type(model).__name__}. Give torch modules, transformers "
        "pipelines, state dicts, or names of models."
    )


def module_of(model: Any) -> nn.Module | None:
    """The module that a model is, or that a pipeline has; None for all else."""
    if isinstance(model, nn.Module):
        return model
    inner = getattr(model, "model", None)
    return inner if isinstance(inner, nn.Module) else None


def with_values(model: Any, values: Mapping[str, Tensor], **keywords: Any) -> Any:
    """A copy of a model with other values, or the pipeline of a name with them.

    Parameters that are frozen, or that `values` does not have, are those of the model.

    Raises:
        RecipeError: values that are not of a parameter of the model, by their key or by their shape.
    """
    if isinstance(model, str | os.PathLike):
        result = pipeline_of(os.fspath(model), **keywords)
    elif isinstance(model, Mapping):
        return values
    else:
        result = copy.deepcopy(model)
    module = module_of(result)
    if module is None:
        raise RecipeError(f"cannot write into {brief(model)} of type {type(model).__name__}.")
    parameters = dict(module.named_parameters(remove_duplicate=False))
    _check_fits(parameters, values)
    with torch.no_grad():
        for key, parameter in parameters.items():
            if key in values:
                parameter.copy_(round_to(values[key], parameter.dtype))
    return result


def _check_fits(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    if unknown := [key for key in values if key not in parameters]:
        hint = did_you_mean(unknown[0], parameters)
        raise RecipeError(f"the model has no parameters {some(unknown, 3)}.{hint}")
    for key, value in values.items():
        if value.shape != parameters[key].shape:
            shapes = f"{list(parameters[key].shape)} in the model and {list(value.shape)} in the values"
            raise RecipeError(f"{key} is {shapes}.")


def pipeline_of(name: str, task: str | None = None, **_: Any) -> Any:
    """The transformers pipeline of a model on this machine: a folder, or a name in the hub's cache.

    Raises:
        ConfigError: transformers is not installed.
        CheckpointError: the model is not there; the message says how to fetch it.
    """
    if is_address(name):
        raise CheckpointError(
            f"{name} lies elsewhere, and transformers reads files of this machine only. Download the model, "
            "and name the copy."
        )
    folder = find_model(name, search_path.get_all(), offline=True)
    try:
        from transformers import pipeline
    except ImportError:
        raise ConfigError(
            "a model by its name is loaded with transformers, which is not installed: "
            "pip install transformers"
        ) from None
    return pipeline(task, model=str(folder), device="cpu")
