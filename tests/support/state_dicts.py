"""Small models in every shape and dtype that is known for trouble, and how to compare them."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from mecha_exp.architectures import resolve
from mecha_exp.checkpoint import open_stored

StateDict = dict[str, Tensor]

SHAPES: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = {
    "conv.weight": ((8, 4, 3, 3), torch.float32),
    "norm.scale": ((16,), torch.bfloat16),
    "proj.weight": ((24, 10), torch.float16),
    "column": ((7, 1), torch.float32),
    "one": ((1,), torch.float32),
    "scalar": ((), torch.float32),
    "empty": ((0, 3), torch.float32),
    "double": ((5, 3), torch.float64),
}
"""The floating-point tensors of a `random_model`; there is an integer `step` besides."""


def random_model(seed: int, **more: tuple[tuple[int, ...], torch.dtype]) -> StateDict:
    """A state dict with the tensors of `SHAPES`, and `more`, drawn from a normal distribution."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {
        key: torch.randn(shape, generator=generator).to(dtype)
        for key, (shape, dtype) in {**SHAPES, **more}.items()
    }
    return drawn | {"step": torch.tensor([3, 4])}


def floating(state_dict: StateDict) -> StateDict:
    """The tensors that are computed."""
    return {key: tensor for key, tensor in state_dict.items() if tensor.is_floating_point()}


def as_bytes(tensor: Tensor) -> bytes:
    """The memory of a tensor: unlike `==` it tells -0.0 from 0.0, and NaN from nothing."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether two state dicts have equal tensors under the same keys."""
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def numbers_of(path: Path) -> StateDict:
    """The tensors of a model on a disk, in whatever format."""
    with open_stored(path) as model:
        return {key: model.read(key) for key in model.keys()}


def contents(state_dict: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    """A state dict in a form that is compared bit for bit."""
    return {key: (t.dtype, tuple(t.shape), as_bytes(t)) for key, t in state_dict.items()}


def write_holes(path: Path, identifier: str) -> None:
    """A checkpoint of full size that takes no room: its header, and a hole."""
    header, end = {}, 0
    for key, info in resolve(identifier).keys().items():
        if not info.optional:
            size = 2 * torch.Size(info.shape).numel()
            header[key] = {"dtype": "F16", "shape": info.shape, "data_offsets": [end, end + size]}
            end += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
