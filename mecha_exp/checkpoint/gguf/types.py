"""The types of tensors in GGUF files: plain numbers, and codes, which the package gguf dequantises."""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import version
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mecha_exp.errors import CheckpointError

Q8_0 = 8
BLOCK = 32
"""The numbers of a block of Q8_0, which share a scale."""
BLOCK_BYTES = 2 + BLOCK
"""A scale in float16, then a code of one byte for each number."""


class TensorType(NamedTuple):
    """A type of a tensor.

    Attributes:
        name: as llama.cpp has it; of plain numbers that in a safetensors file.
        block: the numbers of a block; 1 for plain numbers.
        nbytes: of a block in the file.
    """

    name: str
    block: int
    nbytes: int

    @property
    def dtype(self) -> str:
        """The dtype of what is read."""
        return self.name if self.block == 1 else "F32"


PLAIN = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    24: TensorType("I8", 1, 1),
    25: TensorType("I16", 1, 2),
    26: TensorType("I32", 1, 4),
    27: TensorType("I64", 1, 8),
    28: TensorType("F64", 1, 8),
    30: TensorType("BF16", 1, 2),
}
"""The types whose numbers lie in the file as they are, by their numbers."""

NUMBERS = {plain.name: number for number, plain in PLAIN.items()}
"""The number of the type of each dtype."""


@lru_cache
def type_of(number: int) -> TensorType:
    """The type with a number.

    Raises:
        CheckpointError: it is a type of codes, and the package gguf is not installed, does not know it, or
            cannot dequantise it.
    """
    if number in PLAIN:
        return PLAIN[number]
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    except ModuleNotFoundError:
        raise CheckpointError(
            "codes are read by the package gguf, which is not installed: pip install 'mecha_exp[gguf]'."
        ) from None
    release = f"gguf {version('gguf')}"
    try:
        kind = GGMLQuantizationType(number)
        found = TensorType(kind.name, *GGML_QUANT_SIZES[kind])
    except (ValueError, KeyError):
        raise CheckpointError(
            f"the type {number} is not known to {release}: pip install --upgrade gguf."
        ) from None
    try:
        dequantised(torch.zeros(found.nbytes, dtype=torch.uint8), number)
    except NotImplementedError:
        raise CheckpointError(
            f"{release} cannot dequantise the type {kind.name}. Get the model in another type, such as that "
            "which it was quantised from."
        ) from None
    return found


def bytes_of(count: int, kind: int) -> int:
    """The bytes of so many numbers of a type, in whole blocks."""
    known = type_of(kind)
    return count // known.block * known.nbytes


def dequantised(blocks: Tensor, kind: int) -> Tensor:
    """The numbers of blocks of codes, as the package gguf computes them.

    Args:
        blocks: uint8, one axis: whole blocks of the type.
        kind: the number of the type.

    Returns:
        float32, one axis.
    """
    from gguf import GGMLQuantizationType, dequantize

    with np.errstate(all="ignore"):  # scales of a damaged file may be infinite; what comes is checked later
        numbers = dequantize(blocks.numpy()[np.newaxis], GGMLQuantizationType(kind))
    return torch.from_numpy(numbers).view(-1)


def scales_of(blocks: Tensor) -> Tensor:
    """The scales of blocks of Q8_0.

    Args:
        blocks: uint8, [blocks, 34].

    Returns:
        float16, [blocks, 1].
    """
    return blocks[:, :2].contiguous().view(torch.float16)


def encode_q8_0(numbers: Tensor) -> Tensor:
    """The blocks of Q8_0 nearest to numbers: d = max(abs(x)) / 127, q = x / d rounded half away from zero.

    Codes are computed with d in float32, and d is stored in float16. A number is off by d / 2 at most, and by
    what the rounding of d to float16 adds: 2^-11 of its magnitude, or, where d is below 2^-14, 127 * 2^-25.
    Scales above 65504, the largest float16, become infinite.

    Args:
        numbers: float32, [32 * blocks].

    Returns:
        uint8, [blocks, 34].

    Source: `quantize_row_q8_0_ref` of ggml, and `Q8_0` of its package gguf.
    """
    blocks = numbers.reshape(-1, BLOCK)
    scales = blocks.abs().amax(dim=1, keepdim=True) / 127
    inverse = torch.where(scales == 0, 0.0, 1 / scales)
    scaled = blocks * inverse
    magnitudes = scaled.abs()
    whole = magnitudes.floor()
    rounded = scaled.sign() * (whole + (2 * (magnitudes - whole)).floor())
    codes = rounded.to(torch.int8).view(torch.uint8)
    return torch.cat([scales.to(torch.float16).view(torch.uint8), codes], dim=1)
