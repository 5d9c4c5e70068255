"""The types of tensors in GGUF files: plain numbers, and the blocks of Q8_0."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

Q8_0 = 8
BLOCK = 32
"""The numbers of a block of Q8_0, which share a scale."""
BLOCK_BYTES = 2 + BLOCK
"""A scale in float16, then a code of one byte for each number."""


class PlainType(NamedTuple):
    """A type whose numbers lie in the file as they are.

    Attributes:
        dtype: the name in a safetensors file.
        nbytes: of a number.
    """

    dtype: str
    nbytes: int


PLAIN = {
    0: PlainType("F32", 4),
    1: PlainType("F16", 2),
    24: PlainType("I8", 1),
    25: PlainType("I16", 2),
    26: PlainType("I32", 4),
    27: PlainType("I64", 8),
    28: PlainType("F64", 8),
    30: PlainType("BF16", 2),
}
"""The plain types by their numbers."""

NUMBERS = {plain.dtype: number for number, plain in PLAIN.items()}
"""The number of the type of each dtype."""

_CODED = {
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    Q8_0: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
}


def bytes_of(count: int, kind: int) -> int:
    """The bytes of so many numbers of a type; of Q8_0 a multiple of `BLOCK`."""
    return count // BLOCK * BLOCK_BYTES if kind == Q8_0 else count * PLAIN[kind].nbytes


def type_name(number: int) -> str:
    """The name of a type, for messages."""
    return PLAIN[number].dtype if number in PLAIN else _CODED.get(number, f"of the unknown type {number}")


def scales_of(blocks: Tensor) -> Tensor:
    """The scales of blocks of Q8_0.

    Args:
        blocks: uint8, [blocks, 34].

    Returns:
        float16, [blocks, 1].
    """
    return blocks[:, :2].contiguous().view(torch.float16)


def decode_q8_0(blocks: Tensor) -> Tensor:
    """The numbers d * q of blocks of Q8_0, in float32.

    Args:
        blocks: uint8, [blocks, 34]: the scale d in float16, then the codes q in int8.

    Returns:
        float32, [32 * blocks].

    Source: `dequantize_row_q8_0` of ggml, and `Q8_0` of its package gguf.
    """
    codes = blocks[:, 2:].contiguous().view(torch.int8)
    return (codes.float() * scales_of(blocks).float()).flatten()


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
