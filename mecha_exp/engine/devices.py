# mypy: disable-error-code="no-untyped-call"
"""Where the arithmetic is done: the same program on a CPU or on a GPU. Not measured on a GPU yet.

On a GPU each worker has a stream of its own. It reads a tile into pinned memory, from where it is copied and
computed on without the others waiting: while one worker's tile is computed another's is copied. Passes run
eagerly there, whole tensors go to the device for their method alone, and sums are made in the same order,
but a GPU's own functions may round differently from a CPU's: the device is part of what a result is known by.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mecha_exp.errors import ConfigError

CPU = "cpu"


def check_device(name: str) -> None:
    """Raise ConfigError where there is no such device."""
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in (CPU, "cuda"):
        raise ConfigError(f"device: expected 'cpu', 'cuda' or 'cuda:N', got {name!r}")
    if device.type == CPU:
        return
    if not torch.cuda.is_available():
        built = "is built without CUDA" if torch.version.cuda is None else "finds no GPU"
        raise ConfigError(
            f"device: {name} is wanted, but this torch ({torch.__version__}) {built}. Use engine=cpu, or "
            "install torch for CUDA (https://pytorch.org/get-started/locally)."
        )
    if (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device: there is no {name}; {torch.cuda.device_count()} GPUs are found")


@contextmanager
def own_stream(name: str) -> Iterator[None]:
    """Give the calling thread a stream of its own, so that its work on a GPU does not wait for others."""
    device = torch.device(name)
    if device.type == CPU:
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield


def moved(value: Any, name: str) -> Any:
    """Move a tensor, or tuples and lists of tensors, to a device; other values are returned as they are."""
    if isinstance(value, torch.Tensor):
        return value.to(name)
    return type(value)(moved(part, name) for part in value) if type(value) in (tuple, list) else value


def wants_pinned(name: str) -> bool:
    """Whether the buffers of tiles are to be pinned, so that copies need not wait."""
    return torch.device(name).type == "cuda"
