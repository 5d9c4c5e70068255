"""A batch of the user's own: tensors by the names of a module's parameters, from a file."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from mecha_exp.errors import ConfigError, did_you_mean

Batch = dict[str, Tensor]
FIRST = ""
"""The name of a tensor without one: it is the first argument."""
_KINDS = (".pt", ".npz", ".safetensors")


def read_batch(path: Path) -> Batch:
    """The tensors of a `.pt`, `.npz` or `.safetensors` file, by name; no code in it is run.

    A `.pt` file may hold a single tensor, which is the module's first argument.

    Raises:
        ConfigError: the file is of another type, cannot be read, holds other things than tensors, or its
            tensors do not have the same number of rows.
    """
    if path.suffix not in _KINDS:
        raise ConfigError(
            f"evaluator.data: {path}: expected a {', '.join(_KINDS[:-1])} or {_KINDS[-1]} file."
        )
    try:
        batch = _read(path)
    except ConfigError:
        raise
    except Exception as error:  # zipfile, pickle and safetensors raise many
        reason = "it would run code" if isinstance(error, pickle.UnpicklingError) else str(error)
        raise ConfigError(
            f"evaluator.data: {path} cannot be read as tensors alone: {reason.splitlines()[0]}. Write it "
            "with torch.save of a dict of tensors, numpy.savez, or safetensors."
        ) from None
    _check_rows(path, batch)
    return batch


def _read(path: Path) -> Batch:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            return {name: torch.from_numpy(array) for name, array in arrays.items()}
    content = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(content, Tensor):
        return {FIRST: content}
    if not isinstance(content, Mapping):
        kind = type(content).__name__
        raise ConfigError(
            f"evaluator.data: {path} holds a {kind}: expected a tensor, or a dict of tensors by name."
        )
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            kind = type(value).__name__
            raise ConfigError(f"evaluator.data: '{name}' in {path} is of type {kind}: expected a tensor.")
    return dict(content)


def _check_rows(path: Path, batch: Batch) -> None:
    if not batch:
        raise ConfigError(f"evaluator.data: {path} holds no tensor.")
    for name, tensor in batch.items():
        if tensor.ndim == 0 or not len(tensor):
            raise ConfigError(
                f"evaluator.data: the tensor '{name}' in {path} has shape {list(tensor.shape)}: its first "
                "axis must be the examples."
            )
    rows = {name: len(tensor) for name, tensor in batch.items()}
    if len(set(rows.values())) > 1:
        each = ", ".join(f"{name} {count}" for name, count in rows.items())
        raise ConfigError(f"evaluator.data: the tensors in {path} have different numbers of rows: {each}.")


def check_names(path: Path, batch: Batch, module: nn.Module) -> None:
    """Check that the tensors of a batch are arguments of a module, and that none is missing.

    Parameters that a module takes as `**kwargs` can have any name, but for modules of transformers, which
    ignore those that they do not know.

    Raises:
        ConfigError: a tensor is none of its parameters, or one of its arguments has no tensor.
    """
    parameters = inspect.signature(module.forward).parameters
    single = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = {name: p for name, p in parameters.items() if p.kind in single}
    needed = [name for name, p in known.items() if p.default is inspect.Parameter.empty]
    who = f"the forward of {type(module).__name__}"
    if FIRST in batch:
        lacking = needed[1:]
    else:
        lacking = [name for name in needed if name not in batch]
        is_open = any(p.kind is p.VAR_KEYWORD for p in parameters.values()) and not hasattr(module, "config")
        for name in batch:
            if name not in known and not is_open:
                raise ConfigError(
                    f"evaluator.data: {who} takes no '{name}', which is in {path}.{did_you_mean(name, known)}"
                )
    if lacking:
        raise ConfigError(f"evaluator.data: {who} needs '{lacking[0]}', which is not in {path}.")


def described(batch: Batch) -> str:
    """The names, shapes and dtypes of a batch, for errors."""
    parts = [
        f"{n or 'tensor'} {list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for n, t in batch.items()
    ]
    return ", ".join(parts)
