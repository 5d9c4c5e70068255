"""Merging for programs that hold tensors and torch modules, and no files."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mecha_exp.api import merge
from mecha_exp.checkpoint import open_stored, round_to
from mecha_exp.engine import EngineOptions
from mecha_exp.errors import CheckpointError, MergeError, Problems, RecipeError, counted, did_you_mean, some
from mecha_exp.graph.nodes import InMemory, ModelNode, Node
from mecha_exp.method_api.method import MergeMethod
from mecha_exp.method_api.parameters import ParameterSpec
from mecha_exp.sources import search_path
from mecha_exp.sources.search import find_model

Module = TypeVar("Module", bound=nn.Module)

KEY = "tensor"
"""The key of the only tensor of a model that is made of a tensor."""


def eager(method: MergeMethod) -> Callable[..., Tensor]:
    """A function of tensors that computes what a merge method says, of any kind: a composite, too.

    The arithmetic is that of a merge: float32, or float64 where a tensor has it. The result has the dtype and
    the device of the first tensor. No gradient flows. Hyperparameters are those of the method.

    Raises:
        RecipeError: arguments that the method does not take, or tensors that are not floating point.
        CheckpointError: tensors whose shapes differ.

    >>> eager(ties_sum)(a, b, k=0.5)
    """

    @functools.wraps(method.function)
    def called(*args: Any, **kwargs: Any) -> Tensor:
        named = method.signature.by_name(args, kwargs)
        tensors: list[Tensor] = []
        for spec in method.signature.parameters:
            if spec.is_model and spec.name in named:
                named[spec.name] = _as_models(spec, named[spec.name], tensors)
        if not tensors and method.empty is not None:
            return torch.tensor(method.empty)
        _check_tensors(method, tensors)
        node, problems = method.bind(named)
        if node is None:
            raise RecipeError("; ".join(f"{method.identifier}: {problem}" for problem in problems))
        options = EngineOptions(on_nonfinite="keep", workers=1)
        merged = merge(node, options=options, strict_merge_space=None, check_finite_output=False)
        assert not isinstance(merged, os.PathLike)
        return merged[KEY].to(tensors[0].device)

    return called


def _as_models(spec: ParameterSpec, value: Any, tensors: list[Tensor]) -> Any:
    """Models of one key in the place of tensors, which are added to the list."""
    if isinstance(value, list | tuple):
        return [_as_models(spec, each, tensors) for each in value]
    if not isinstance(value, Tensor):
        return value
    tensors.append(value)
    space = spec.spaces[0] if spec.spaces else "weight"
    return ModelNode(InMemory({KEY: value.detach().cpu()}, f"{spec.name} {list(value.shape)}"), space)


def _check_tensors(method: MergeMethod, tensors: Sequence[Tensor]) -> None:
    if not tensors:
        raise RecipeError(f"{method.identifier}: give one tensor at least.")
    if other := [tensor.dtype for tensor in tensors if not tensor.is_floating_point()]:
        raise RecipeError(
            f"{method.identifier}: {other[0]} is not merged: whole numbers are copied. Give tensors of "
            "floating point: tensor.float()."
        )


def merge_modules(recipe_of: Callable[..., Any], modules: Sequence[Module], **keywords: Any) -> Module:
    """A module of the same class with merged values; the modules that are given stay as they are.

    Frozen parameters stay frozen, tied ones tied, and every tensor keeps its dtype and device of the first
    module. Buffers are merged as in files: counters are taken from the first, and other whole numbers that
    differ are an error (`EngineOptions.on_integers`).

    Args:
        recipe_of: (one node for each module) -> the recipe; a merge method is one.
        modules: of one architecture.
        keywords: of `merge`.

    Raises:
        RecipeError: no modules, something else than modules, or an output.
        MechaError: see `merge`, and `load_into`.

    >>> merge_modules(lambda a, b: slerp(a, b, alpha=0.3), [first, second])
    """
    if not modules:
        raise RecipeError("merge_modules: give one module at least.")
    if other := [type(module).__name__ for module in modules if not isinstance(module, nn.Module)]:
        raise RecipeError(f"merge_modules: expected torch modules, got {some(other)}.")
    if "output" in keywords:
        raise RecipeError("merge_modules: it returns a module. To write a file, merge state dicts: m.merge.")
    nodes = [
        ModelNode(InMemory(_state_dict(module), f"module {number}")) for number, module in enumerate(modules)
    ]
    recipe = recipe_of(*nodes)
    if not isinstance(recipe, Node):
        raise RecipeError(
            f"merge_modules: recipe_of returned {type(recipe).__name__}, not a recipe. It receives a node "
            "for each module: lambda a, b: weighted_sum(a, b, alpha=0.3)."
        )
    merged = merge(recipe, **keywords)
    assert not isinstance(merged, os.PathLike)
    return load_into(copy.deepcopy(modules[0]), merged)


def load_into(module: Module, source: Any) -> Module:
    """Write a merged model into a torch module, in place, and return the module.

    Unlike `load_state_dict` it rounds once to the dtype of each parameter, takes a file that stores tied
    tensors once, and refuses one that would give tied tensors different values. `requires_grad`, devices and
    ties stay as they are.

    Args:
        module: with the keys of the model.
        source: a path or a name, a recipe, or a state dict.

    Raises:
        CheckpointError: keys, shapes or kinds of numbers that differ, all of them at once, or a module on the
            meta device, which holds no values; nothing is written then.
        MergeError: tied tensors of the module have different values in the source.

    >>> load_into(model, "merged.safetensors")
    """
    tensors = _tensors_of(source)
    own = _state_dict(module)
    groups = _tied(own)
    _check_fits(own, groups, tensors)
    with torch.no_grad():
        for names in groups:
            present = [name for name in names if name in tensors]
            target = own[present[0]]
            value = tensors[present[0]]
            target.copy_(round_to(value, target.dtype) if target.is_floating_point() else value)
    return module


def _tensors_of(source: Any) -> Mapping[str, Tensor]:
    if isinstance(source, Node):
        merged = merge(source, strict_merge_space="weight")
        assert not isinstance(merged, os.PathLike)
        return merged
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, str | os.PathLike):
        raise RecipeError(
            f"load_into: expected a path, a recipe or a state dict, got {type(source).__name__}. That of a "
            "module is module.state_dict()."
        )
    with open_stored(find_model(os.fspath(source), search_path.get_all())) as model:
        return {key: model.read(key) for key in model.keys()}


def _state_dict(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of a module, which share its memory."""
    state = module.state_dict(keep_vars=False)
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}


def _tied(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """The keys in groups that are one tensor."""
    groups: dict[object, list[str]] = {}
    for key, tensor in tensors.items():
        is_empty = tensor.numel() == 0
        place = (tensor.data_ptr(), tensor.device, tensor.shape, tensor.stride())
        groups.setdefault(key if is_empty else place, []).append(key)
    return list(groups.values())


def _check_fits(
    own: Mapping[str, Tensor], groups: Sequence[Sequence[str]], tensors: Mapping[str, Tensor]
) -> None:
    problems = Problems()
    missing = [names[0] for names in groups if not any(name in tensors for name in names)]
    if missing:
        problems.add(f"the source lacks {counted(len(missing), 'key')} of the module: {some(missing, 5)}.")
    if more := [key for key in tensors if key not in own]:
        hint = did_you_mean(more[0], own)
        problems.add(f"the module lacks {counted(len(more), 'key')} of the source: {some(more, 5)}.{hint}")
    if empty := [key for key, tensor in own.items() if tensor.is_meta]:
        count = counted(len(empty), "tensor of the module is", "tensors of the module are")
        problems.add(
            f"{count} on the meta device, without values: {some(empty, 5)}. Give it memory first: "
            "module.to_empty(device='cpu')."
        )
    for key, tensor in own.items():
        if key in tensors and (fault := _fault_of(tensor, tensors[key])):
            problems.add(f"{key} is {fault}.")
    problems.raise_as(CheckpointError)
    for names in groups:
        present = [name for name in names if name in tensors]
        if any(not torch.equal(tensors[present[0]], tensors[name]) for name in present[1:]):
            raise MergeError(
                f"{some(present)} are one tensor in the module and have different values in the source. "
                "Untie them in the module, or merge them alike: blocks and random masks go by key."
            )


def _fault_of(own: Tensor, other: Any) -> str:
    """How a tensor of a module and the one of a source differ, or an empty string."""
    if not isinstance(other, Tensor):
        return f"a tensor in the module and {type(other).__name__} in the source"
    if own.shape != other.shape:
        return f"{list(own.shape)} in the module and {list(other.shape)} in the source"
    if own.is_floating_point() != other.is_floating_point():
        return f"{own.dtype} in the module and {other.dtype} in the source"
    return ""
