# mypy: ignore-errors
"""The column kernel: machine code that adds up products of the entries of columns."""

import numpy as np
from numba import njit

from mecha_exp.engine.compiler.kernels.intrinsics import array_at
from mecha_exp.engine.compiler.primitives.columns import GROUP as _GROUP

__all__ = ["add_products", "array_at"]

_STRIP = 1 << 10  # columns whose sums stay in the first cache


@njit(nogil=True, error_model="numpy", _nrt=False)
def add_products(a, b, width, squares_a, squares_b, products):
    """Add those of wide rows to three sums: in each column of a group first, then to the sum."""
    group = _GROUP * width
    full = len(a) // group * group
    for first in range(0, width, _STRIP):
        for start in range(first, full, group):
            for j in range(min(_STRIP, width - first)):
                aa = bb = ab = 0.0
                for k in range(_GROUP):
                    x, y = np.float64(a[start + k * width + j]), np.float64(b[start + k * width + j])
                    aa += x * x
                    bb += y * y
                    ab += x * y
                squares_a[first + j] += aa
                squares_b[first + j] += bb
                products[first + j] += ab
    for j in range(min(width, len(a) - full)):
        aa = bb = ab = 0.0
        for place in range(full + j, len(a), width):
            x, y = np.float64(a[place]), np.float64(b[place])
            aa += x * x
            bb += y * y
            ab += x * y
        squares_a[j] += aa
        squares_b[j] += bb
        products[j] += ab
