# mypy: ignore-errors
"""Ranks by counting: for entries of few values, such as those of 16 bits, one counter for each value does."""

import numpy as np
from numba import njit

_ALL_BUT_SIGN = np.int32(2**31 - 1)


@njit(nogil=True, error_model="numpy", _nrt=False)
def value_range(raw):
    """What makes small numbers of the magnitudes of floats: a shift, what is taken off, and how many result.

    The lowest bits, which are zero in all, are left out. Zero is apart, since it lies far below the others.
    """
    low, high, used = np.uint32(2**32 - 1), np.int32(0), np.int32(0)
    for i in range(len(raw)):
        size = np.int32(raw[i] & _ALL_BUT_SIGN)
        below = np.uint32(size) - np.uint32(1)  # of zero it is the largest
        low = below if below < low else low
        high = size if size > high else high
        used = np.int32(used | size)
    if used == 0:
        return 0, 0, 0
    shift = 0
    while (used >> shift) & 1 == 0:
        shift += 1
    least = (np.int64(low) + 1) >> shift
    return shift, least - 1, (np.int64(high) >> shift) - least + 1


@njit(nogil=True, error_model="numpy", _nrt=False)
def small_number(raw, shift, offset, middle):
    """The counter of a float of these bits: `middle` for both zeros, one more for the least above them."""
    size = (np.int64(raw) & np.int64(_ALL_BUT_SIGN)) >> shift
    away = size - offset if size != 0 else np.int64(0)
    return middle - away if raw < 0 else middle + away


@njit(nogil=True, error_model="numpy", _nrt=False)
def rank_by_counting(raw, counters, starts, ranks):
    """Write the ranks of floats of these bits, where so many counters do; returns whether they do."""
    shift, offset, middle = value_range(raw)
    if 2 * middle + 1 > counters:
        return False
    starts[: 2 * middle + 1] = 0
    for i in range(len(raw)):
        starts[small_number(raw[i], shift, offset, middle)] += 1
    start = np.int32(0)
    for value in range(2 * middle + 1):
        count = starts[value]
        starts[value] = start
        start = np.int32(start + count)
    for i in range(len(raw)):
        value = small_number(raw[i], shift, offset, middle)
        ranks[i] = starts[value]
        starts[value] += 1
    return True
