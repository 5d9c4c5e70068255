"""The dtypes of safetensors files: names, sizes, torch dtypes, and which of them take part in arithmetic."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import torch

from mecha_exp.errors import CheckpointError, ConfigError, did_you_mean

Layout: TypeAlias = Mapping[str, tuple[str, tuple[int, ...]]]
"""The dtype (by its name in a header) and the shape of each key."""


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """A dtype of the format. `torch` is None where torch lacks it: then only its bytes can be copied."""

    bits: int
    torch: torch.dtype | None
    arithmetic: bool


def _float(bits: int, dtype: torch.dtype) -> NumberFormat:
    return NumberFormat(bits, dtype, arithmetic=True)


def _copied(bits: int, dtype: torch.dtype | None) -> NumberFormat:
    return NumberFormat(bits, dtype, arithmetic=False)


FORMATS = {
    "F64": _float(64, torch.float64),
    "F32": _float(32, torch.float32),
    "F16": _float(16, torch.float16),
    "BF16": _float(16, torch.bfloat16),
    "F8_E4M3": _float(8, torch.float8_e4m3fn),
    "F8_E5M2": _float(8, torch.float8_e5m2),
    "F8_E4M3FNUZ": _float(8, torch.float8_e4m3fnuz),
    "F8_E5M2FNUZ": _float(8, torch.float8_e5m2fnuz),
    "F8_E8M0": _copied(8, getattr(torch, "float8_e8m0fnu", None)),  # scales of other tensors; torch >= 2.7
    "F6_E2M3": _copied(6, None),
    "F6_E3M2": _copied(6, None),
    "F4": _copied(4, None),
    "C64": _copied(64, torch.complex64),
    "I64": _copied(64, torch.int64),
    "I32": _copied(32, torch.int32),
    "I16": _copied(16, torch.int16),
    "I8": _copied(8, torch.int8),
    "U64": _copied(64, torch.uint64),
    "U32": _copied(32, torch.uint32),
    "U16": _copied(16, torch.uint16),
    "U8": _copied(8, torch.uint8),
    "BOOL": _copied(8, torch.bool),
}

_NAMES = {entry.torch: name for name, entry in FORMATS.items() if entry.torch is not None}


def number_format(name: str) -> NumberFormat:
    """Look up a dtype by its name in a header."""
    try:
        return FORMATS[name]
    except KeyError:
        raise CheckpointError(f"unknown dtype {name!r}.{did_you_mean(name, FORMATS)}") from None


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a safetensors dtype: `"BF16"` is `torch.bfloat16`."""
    dtype = number_format(name).torch
    if dtype is None:
        raise CheckpointError(f"torch has no dtype for {name}: its bytes can be copied, not computed with.")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors name of a torch dtype: `torch.bfloat16` is `"BF16"`."""
    try:
        return _NAMES[dtype]
    except KeyError:
        raise CheckpointError(f"{dtype} cannot be stored in a safetensors file.") from None


def round_to(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values in a floating dtype, rounded once to the nearest, ties to even.

    Torch rounds float64 to float32 first and then to a narrower dtype, so 1 + 2^-8 + 2^-40 becomes 1.0 in
    bfloat16 although 1.0078125 is nearer. Here the step to float32 rounds to odd: what is cut off leaves its
    mark in the last bit, and the second step is right (Boldo & Melquiond 2008).
    """
    if values.dtype is not torch.float64 or dtype.itemsize >= torch.float32.itemsize:
        return values.to(dtype)
    nearest = values.to(torch.float32)
    back = nearest.to(torch.float64)
    bits = nearest.view(torch.int32)
    bits = bits - (back.abs() > values.abs()).to(torch.int32)
    bits = bits | ((back < values) | (back > values)).to(torch.int32)  # and not for NaN
    return bits.view(torch.float32).to(dtype)


def is_arithmetic(name: str) -> bool:
    """Whether merges compute on this dtype (floating point). All other dtypes are copied."""
    return number_format(name).arithmetic


@lru_cache(maxsize=1 << 12)
def stored_bytes(name: str, shape: tuple[int, ...]) -> int:
    """The size of a tensor in a file, in bytes. A tensor of a packed dtype must fill whole bytes."""
    bits = math.prod(shape) * number_format(name).bits
    if bits % 8:
        raise CheckpointError(f"{name} of shape {list(shape)} is {bits} bits, which is not whole bytes.")
    return bits // 8


def _spellings() -> dict[str, torch.dtype]:
    spellings = {"half": torch.float16, "float": torch.float32, "double": torch.float64}
    for dtype, name in _NAMES.items():
        long = str(dtype).removeprefix("torch.")
        spellings |= dict.fromkeys((long, long.replace("float", "fp"), name.lower()), dtype)
    return spellings | {"bf16": torch.bfloat16}


_SPELLINGS = _spellings()


def dtype_word(dtype: torch.dtype | str) -> str:
    """A dtype in a record: its safetensors name; a word such as `auto` as it is."""
    return dtype if isinstance(dtype, str) else dtype_name(dtype)


def parse_dtype(text: str) -> torch.dtype:
    """Parse a dtype: torch's name, the usual short name, or the name in a header, in any case.

    >>> parse_dtype("fp16"), parse_dtype("bfloat16"), parse_dtype("F8_E4M3")
    (torch.float16, torch.bfloat16, torch.float8_e4m3fn)
    """
    name = str(text).strip().lower().removeprefix("torch.")
    try:
        return _SPELLINGS[name]
    except KeyError:
        raise ConfigError(f"unknown dtype {text!r}.{_dtype_meant(name)}") from None


def _dtype_meant(name: str) -> str:
    """The hint for an unknown dtype; several are meant by `fp8`."""
    if re.fullmatch(r"(fp|f|float)_?8", name):
        return (
            " f8_e4m3 and f8_e5m2 store values as they are; output.quantize=fp8_scaled stores them with a "
            "scale for each tensor, which loses less, and is what ComfyUI reads."
        )
    return did_you_mean(name, _SPELLINGS)


def floating_dtype(value: torch.dtype | str) -> torch.dtype:
    """The dtype of merged values: a floating one, or its name.

    Raises:
        ConfigError: the name is unknown, or of integers, truth values, complex numbers or scales.
    """
    dtype = value if isinstance(value, torch.dtype) else parse_dtype(value)
    if not is_arithmetic(dtype_name(dtype)):
        floating = ", ".join(str(f.torch).removeprefix("torch.") for f in FORMATS.values() if f.arithmetic)
        raise ConfigError(
            f"dtype {str(dtype).removeprefix('torch.')}: merged values have fractions, so they are stored as "
            f"one of {floating}. Integers of the inputs are copied as they are; to quantise a model, merge "
            "it first."
        )
    return dtype
