"""Where networks compute, in which dtype, and whether there is room."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mecha_exp.checkpoint import open_stored
from mecha_exp.errors import ConfigError, did_you_mean
from mecha_exp.evaluation.context import Context
from mecha_exp.evaluation.declaration import Shapes

AUTO, CUDA = "auto", "cuda"
DTYPES = (AUTO, "float32", "float16", "bfloat16", "float64")


def chosen_device(name: str) -> torch.device:
    """A device by its name: `cpu`, `cuda`, `cuda:1`, `mps`; `auto` is the first GPU, or else the CPU.

    Raises:
        ConfigError: it is unknown, or not there.
    """
    if name == AUTO:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(
            f"evaluator.device={name}: unknown device.{did_you_mean(name, ('cpu', 'cuda', 'mps'))}"
        ) from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        there = torch.cuda.device_count()
        raise ConfigError(
            f"evaluator.device={name}: torch sees {there or 'no'} GPU{'s' if there > 1 else ''} here. Use "
            "evaluator.device=cpu, or evaluator.device=auto for a GPU where there is one."
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(
            f"evaluator.device={name}: torch sees no such device here. Use evaluator.device=cpu."
        )
    return device


def chosen_dtype(name: str, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> torch.dtype:
    """The dtype of a network; `auto` is that of the weights, or of the configuration where they differ.

    Raises:
        ConfigError: it is unknown.
    """
    if name not in DTYPES:
        raise ConfigError(f"evaluator.dtype={name}: unknown dtype.{did_you_mean(name, DTYPES)}")
    if name == AUTO:
        dtypes = {tensor.dtype for tensor in weights.values() if tensor.is_floating_point()}
        if len(dtypes) == 1:
            return dtypes.pop()
        name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    return getattr(torch, name, torch.float32)


def check_memory(device: torch.device, needed: int, workers: Sequence[str] = ()) -> None:
    """Check that so many bytes of weights fit a GPU, and those of each worker on its GPU.

    Args:
        device: the evaluator's own.
        needed: bytes of one model.
        workers: the device of each worker, which is the evaluator's own where the name is empty.

    Raises:
        ConfigError: they do not.
    """
    if device.type != CUDA:
        return
    places = Counter({CUDA: f"{CUDA}:0"}.get(name, name) or str(device) for name in workers or ("",))
    for place, copies in places.items():
        if not place.startswith(CUDA) or (torch.device(place).index or 0) >= torch.cuda.device_count():
            continue  # what is not there is refused where the devices are read
        free, _ = torch.cuda.mem_get_info(torch.device(place))
        if copies * needed > free:
            key = "device" if place == str(device) else "devices"
            these = "the weights" if copies == 1 else f"the weights of {copies} workers"
            fewer = "" if copies == 1 else "fewer workers (evaluator.workers), "
            raise ConfigError(
                f"evaluator.{key}={place}: {these} need {copies * needed:,} bytes, and {free:,} are free "
                f"there. Use {fewer}evaluator.dtype=bfloat16, another device, or evaluator.device=cpu."
            )


def check_room(name: str, shapes: Shapes, dtype: str, context: Context) -> None:
    """Check before a merge that weights of these shapes fit the devices; reads headers alone.

    Args:
        name: of the device.
        shapes: of the weights by key.
        dtype: of the network; `auto` counts the bytes that the first input has for them.
        context: the inputs, and the devices of workers.

    Raises:
        ConfigError: a device is not there, or too small.
    """
    device = chosen_device(name)
    if device.type == "cpu":
        return
    if dtype != AUTO or not context.inputs:
        each = getattr(torch, dtype, torch.float32).itemsize
        needed = sum(math.prod(shape) for shape in shapes.values()) * each
    else:
        with open_stored(next(iter(context.inputs.values()))) as model:
            needed = sum(model.info(key).nbytes for key in shapes.keys() & set(model.keys()))
    check_memory(device, needed, context.devices)
