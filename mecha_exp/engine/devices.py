# mypy: disable-error-code="no-untyped-call"
"""Where the arithmetic is done: the same program on a CPU or on a GPU.

On a GPU each worker has a stream of its own. It reads a tile into pinned memory, from where it is copied and
computed on without the others waiting: while one worker's tile is computed another's is copied. Passes run
eagerly there, whole tensors stay on the device, and sums are made in the same order, but a GPU's own
functions may round differently from a CPU's: the device is part of what a result is known by.

A worker waits for its stream after each step, before others learn of what it made (`Scratch.settle`). So a
tensor on the device can go from one worker to another, and its memory to the next, without further care.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from mecha_exp.errors import ConfigError, MergeError
from mecha_exp.system.cores import available_cores

CPU = "cpu"

WORKERS = (4, 8)
"""The least and the most workers of a GPU.

While one reads a tile another's is computed and a third writes. On an H200 with 16 cores a weighted sum took
0.77 to 1.6 s with four, 0.90 to 0.97 with eight and 0.92 to 1.13 with twelve, which wait for the interpreter.
"""


BYTES_OF_ENTRY = 128
"""What a GPU holds for an element of a tile, about: TIES of three experts took 104, SLERP 54 on an H200."""


MOST_KEPT = 0.25
"""The share of a GPU's memory that may stay with torch after a merge."""


def check_device(name: str) -> None:
    """Raise ConfigError where there is no such device."""
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError, ValueError):  # ValueError: a number that is too large
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
def own_stream(name: str) -> Iterator[Callable[[], None]]:
    """Give the calling thread a stream of its own, so that its work on a GPU does not wait for others.

    Yields a function that waits until the device has done all that the thread asked of it.
    """
    device = torch.device(name)
    if device.type == CPU:
        yield lambda: None
        return
    with _LOADING:
        _load_linalg(device)
        idle = _IDLE.setdefault(device, [])
        stream = idle.pop() if idle else torch.cuda.Stream(device)
    try:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            yield stream.synchronize
    finally:
        idle.append(stream)


_IDLE: dict[torch.device, list[torch.cuda.Stream]] = {}
"""Streams that no thread has now. torch keeps memory for each, which the next merge takes again."""


@cache
def _load_linalg(device: torch.device) -> None:
    """Load torch's linear algebra for GPUs, which fails where two threads are the first to need it."""
    torch.linalg.eigh(torch.eye(2, device=device))


_LOADING = threading.Lock()


def free_bytes(name: str) -> int:
    """The bytes that are free on a GPU; of another device more than there are."""
    return torch.cuda.mem_get_info(torch.device(name))[0] if is_cuda(name) else 1 << 60


def give_back(name: str) -> None:
    """Give memory of a GPU that is free again back to other programs, such as evaluators, if it is much.

    torch keeps what it has freed, for each stream by itself: little of it is wanted back at once, and all of
    it costs the next merge half a second.
    """
    if is_cuda(name):
        device = torch.device(name)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if kept > torch.cuda.mem_get_info(device)[1] * MOST_KEPT:
            torch.cuda.empty_cache()


def explained(error: BaseException, name: str) -> BaseException:
    """An error of a worker; one that tells of too little memory on a GPU says what helps."""
    if not isinstance(error, torch.OutOfMemoryError):
        return error
    return MergeError(
        f"{name} has too little memory: {str(error).splitlines()[0]} Use fewer workers (engine.workers=2), "
        "smaller tiles (engine.tile_size=1048576), a smaller engine.memory_budget, or engine=cpu."
    )


def moved(value: Any, name: str) -> Any:
    """Move a tensor, or tuples and lists of tensors, to a device; other values are returned as they are."""
    if isinstance(value, torch.Tensor):
        return value.to(name)
    return type(value)(moved(part, name) for part in value) if type(value) in (tuple, list) else value


def default_workers(name: str) -> int:
    """The workers of a device: one for each core, and of a GPU as many as keep it busy."""
    cores = available_cores()
    return cores if name == CPU else min(max(cores, WORKERS[0]), WORKERS[1])


def default_tile(name: str) -> int:
    """The elements of a tile: fewer calls on a GPU, whose memory has room for the values of all workers.

    The size does not depend on what is free: sums along a row may round differently in tiles of another size.
    """
    if not is_cuda(name):
        return 1 << 19
    memory = torch.cuda.get_device_properties(torch.device(name)).total_memory
    fits = memory // (2 * WORKERS[1] * BYTES_OF_ENTRY)
    return min(max(1 << fits.bit_length() - 1, 1 << 20), 1 << 24)


def is_cuda(name: str) -> bool:
    """Whether a device is a GPU, whose buffers of tiles are pinned so that copies need not wait."""
    return torch.device(name).type == "cuda"
