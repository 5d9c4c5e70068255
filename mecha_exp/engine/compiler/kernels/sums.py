# mypy: ignore-errors
"""Sums in loops: of blocks, in lanes, and of rows, each in one order."""

import numpy as np
from numba import njit

from mecha_exp.engine.compiler.primitives.rows import ROW_LANES as _ROW_LANES


@njit(nogil=True, error_model="numpy", _nrt=False)
def add_to(totals, values):
    """Add each of the values to its total."""
    for i in range(len(values)):
        totals[i] += np.float64(values[i])


@njit(nogil=True, error_model="numpy", _nrt=False)
def fold(sums, rows, length):
    """Sum each row into its first element: add the second half to the first until one element is left.

    The length of a row is a power of two.
    """
    for row in range(rows):
        begin, size = row * length, length
        while size > 1:
            size //= 2
            for i in range(begin, begin + size):
                sums[i] += sums[i + size]


@njit(nogil=True, error_model="numpy", _nrt=False)
def sum_rows(values, size, columns, lanes):
    """Put the sum of each row of a strip at the row's number; of a row with more strips, the sum so far.

    In the order of `primitives.rows`. `lanes` are the running sums of a row, 0 where the first strip begins.
    """
    if columns > len(values):
        add_to_lanes(lanes, values, 0, size)
        values[0] = sum_of_lanes(lanes)
        return
    for place in range(size // columns):
        begin, total = place * columns, np.float64(0)
        if columns <= _ROW_LANES:
            for i in range(columns):
                total += values[begin + i]
        else:
            lanes[:_ROW_LANES] = 0
            add_to_lanes(lanes, values, begin, columns)
            total = sum_of_lanes(lanes)
        values[place] = total


@njit(nogil=True, error_model="numpy", _nrt=False)
def add_to_lanes(lanes, values, begin, count):
    """Add so many values from `begin` on to the lanes, in turn."""
    whole = count // _ROW_LANES * _ROW_LANES
    for first in range(begin, begin + whole, _ROW_LANES):
        for lane in range(_ROW_LANES):
            lanes[lane] += values[first + lane]
    for lane in range(count - whole):
        lanes[lane] += values[begin + whole + lane]


@njit(nogil=True, error_model="numpy", _nrt=False)
def sum_of_lanes(lanes):
    """The sum of the lanes, one after the other."""
    total = np.float64(0)
    for lane in range(_ROW_LANES):
        total += lanes[lane]
    return total


@njit(nogil=True, error_model="numpy", _nrt=False)
def spread_rows(values, rows, columns):
    """Give every entry of a strip the value of its row, which is found at the row's number."""
    for place in range(rows - 1, -1, -1):
        value = values[place]
        for i in range(place * columns, min((place + 1) * columns, len(values))):
            values[i] = value
