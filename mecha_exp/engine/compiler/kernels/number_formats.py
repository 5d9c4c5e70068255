# mypy: ignore-errors
"""Numbers of 16 and 8 bits in loops: reading them, writing them, and rounding to them."""

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from mecha_exp.engine.compiler.kernels.intrinsics import bits, number

_HALF_LIMIT = np.float32(65520)  # from here on a float16 is infinite
_HALF_NORMAL = np.float32(2**-14)
_ROUNDER = np.float32(0.5)  # float32 has steps of 2^-24 from here on, as float16 has below 2^-14


@intrinsic
def from_half(context, value):
    """A float16, given by its bits, as a float32."""

    def build(context, builder, signature, args):
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.int16), build


@intrinsic
def to_half(context, value):
    """The bits of a float32 rounded to float16, to the nearest, ties to even."""

    def build(context, builder, signature, args):
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.int16(types.float32), build


@intrinsic
def from_bfloat16(context, value):
    """A bfloat16, given by its bits, as a float32."""

    def build(context, builder, signature, args):
        wide = builder.zext(args[0], ir.IntType(32))
        return builder.bitcast(builder.shl(wide, wide.type(16)), ir.FloatType())

    return types.float32(types.int16), build


@njit(nogil=True, error_model="numpy", _nrt=False)
def to_bfloat16(value):
    """The bits of a float32 rounded to bfloat16, to the nearest, ties to even."""
    return np.int16(np.uint32(bits(as_bfloat16(value))) >> np.uint32(16))


@njit(nogil=True, error_model="numpy", _nrt=False)
def as_bfloat16(value):
    """value rounded to bfloat16, to the nearest, ties to even."""
    raw = np.uint32(bits(value))
    rounded = np.uint32(raw + np.uint32(0x7FFF) + ((raw >> np.uint32(16)) & np.uint32(1)))
    kept = number(np.int32(rounded & np.uint32(0xFFFF0000)))
    return kept if value == value else number(np.int32(bits(value) | np.int32(0x400000)))


@njit(nogil=True, error_model="numpy", _nrt=False)
def as_half(value):
    """value rounded to float16, to the nearest, ties to even."""
    size = abs(value)
    raw = np.uint32(bits(size))
    rounded = np.uint32(raw + np.uint32(0xFFF) + ((raw >> np.uint32(13)) & np.uint32(1)))
    normal = number(np.int32(rounded & np.uint32(0xFFFFE000)))
    half = normal if size >= _HALF_NORMAL else np.float32(np.float32(size + _ROUNDER) - _ROUNDER)
    half = np.float32(np.inf) if size >= _HALF_LIMIT else half
    signed = number(np.int32(np.uint32(bits(half)) | (np.uint32(bits(value)) & np.uint32(0x80000000))))
    return signed if value == value else value


def _float8(dtype, bias, places):
    """Reading, writing and rounding to a float8: its `from_...`, `to_...` and `as_...`.

    The exponent is moved, and in writing the mantissa is rounded where it lies. What is below the normal
    numbers is the mantissa of a number that has the same last place. No table: vectors are slow to look up.

    Args:
        bias: of its exponent.
        places: of its mantissa.
    """
    largest = int(torch.tensor(torch.inf).to(dtype).view(torch.uint8))  # versions of torch differ in this
    infinity = int(torch.isinf(torch.tensor(torch.inf).to(dtype).float())) * 0x7C  # 0 where it has none
    dropped, moved, last = np.uint32(23 - places), np.uint32((127 - bias) << places), np.uint32(largest)
    one, half, seven = np.uint32(1), np.uint32((1 << (22 - places)) - 1), np.uint32(0x7F)
    normal, rounder = np.float32(2.0 ** (1 - bias)), np.float32(2.0 ** (24 - bias - places))
    first_normal = np.uint32(1 << places)
    has_one_zero = largest == 0x80  # and NaN where the negative one would be
    no_number, signed_from = np.uint32(max(largest, 0x7F)), np.uint32(has_one_zero)
    no_numbers = np.uint32(infinity + 1 if infinity else 0x7F)

    @njit(nogil=True, error_model="numpy", _nrt=False)
    def from_bits(raw):
        code = np.uint32(raw) & seven
        placed = np.uint32((code + moved) << dropped)
        small = np.float32(number(np.int32(np.uint32(placed + np.uint32(one << np.uint32(23))))) - normal)
        size = number(np.int32(placed)) if code >= first_normal else small
        if infinity:
            size = np.float32(np.inf) if code == np.uint32(infinity) else size
        value = -size if np.uint32(raw) > seven else size
        nothing = np.uint32(raw) == no_number if has_one_zero else code >= no_numbers
        return np.float32(np.nan) if nothing else value

    @njit(nogil=True, error_model="numpy", _nrt=False)
    def to_bits(value):
        size = abs(value)
        raw = np.uint32(bits(size))
        rounded = np.uint32(((raw + half + ((raw >> dropped) & one)) >> dropped) - moved)
        small = np.uint32(np.uint32(bits(np.float32(size + rounder))) - np.uint32(bits(rounder)))
        code = rounded if size >= normal else small
        code = last if code > last else code
        code = code if value == value else no_number
        sign = (np.uint32(bits(value)) >> np.uint32(24)) & np.uint32(0x80)
        return np.uint8(code | (sign if code >= signed_from else np.uint32(0)))

    @njit(nogil=True, error_model="numpy", _nrt=False)
    def rounded_to(value):
        return from_bits(to_bits(value))

    return from_bits, to_bits, rounded_to


from_e4m3fn, to_e4m3fn, as_e4m3fn = _float8(torch.float8_e4m3fn, 7, 3)
from_e4m3fnuz, to_e4m3fnuz, as_e4m3fnuz = _float8(torch.float8_e4m3fnuz, 8, 3)
from_e5m2, to_e5m2, as_e5m2 = _float8(torch.float8_e5m2, 15, 2)
from_e5m2fnuz, to_e5m2fnuz, as_e5m2fnuz = _float8(torch.float8_e5m2fnuz, 16, 2)
