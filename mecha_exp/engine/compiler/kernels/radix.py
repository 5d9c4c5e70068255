# mypy: ignore-errors
"""The radix kernel: machine code that finds the ranks of the entries of each row.

A row is sorted by digits of whole numbers that order as its entries do, and are as short as the row allows:
what differs between halves has some 18 bits as multiples of a power of two, where its floats have 31.
"""

import numpy as np
from numba import njit, types

from mecha_exp.engine.compiler.abi import WIDEST_DIGIT, RadixJob, words
from mecha_exp.engine.compiler.kernels.counting import rank_by_counting
from mecha_exp.engine.compiler.kernels.intrinsics import array_at, magnitude, number

_JOB = words(RadixJob)
_PLACE_BITS = 31  # the lower bits of an entry are its place in the row, the upper ones its number
_PLACE = (1 << _PLACE_BITS) - 1
_COUNTERS_OF_ENTRY = 4  # to count and move an entry takes as long as to clear and add up so many counters
_MANTISSA_BITS, _BIAS = 23, 127  # of float32
_NEGATIVE_ZERO, _ALL_BUT_SIGN = np.int32(-(2**31)), np.int32(2**31 - 1)
_SMALLEST, _LARGEST = 29, 156  # exponents of a largest magnitude that a float from 1 on scales to below 2^30


@njit(nogil=True, error_model="numpy", _nrt=False)
def multiples(values, keys):
    """Write the entries as multiples of one power of two; returns whether that is what they are.

    From 2^30 on that is left to `patterns`: a factor below 1 would turn tiny entries beside large ones to 0.
    """
    largest = np.int32(0)
    for i in range(len(values)):
        size = magnitude(values[i])
        largest = size if size > largest else largest
    exponent = largest >> _MANTISSA_BITS
    if exponent < _SMALLEST or exponent > _LARGEST:
        return False
    factor = number(np.int32((_LARGEST + _BIAS - exponent) << _MANTISSA_BITS))
    rounded = np.int32(0)
    for i in range(len(values)):
        scaled = np.float32(values[i] * factor)
        whole = np.int32(scaled)
        keys[i] = whole
        rounded = np.int32(rounded | np.int32(np.float32(whole) != scaled))
    return rounded == 0


@njit(nogil=True, error_model="numpy", _nrt=False)
def patterns(raw, keys):
    """Write whole numbers that sort as floats of these bits do; both zeros are one."""
    for i in range(len(raw)):
        bits = np.int32(0) if raw[i] == _NEGATIVE_ZERO else raw[i]
        keys[i] = np.int32(bits ^ np.int32(np.int32(bits >> 31) & _ALL_BUT_SIGN))


@njit(nogil=True, error_model="numpy", _nrt=False)
def entered(keys, entries):
    """Join the keys, less what all have in common, with their places; returns the bits left of a key."""
    first = low = high = keys[0]
    different = np.int32(0)
    for i in range(len(keys)):
        key = keys[i]
        low = key if key < low else low
        high = key if key > high else high
        different = np.int32(different | np.int32(key ^ first))
    common = 0  # the lowest bits, in which no two differ
    while different != 0 and (different >> common) & 1 == 0:
        common += 1
    for i in range(len(keys)):
        entries[i] = ((np.int64(keys[i]) - np.int64(low)) >> common) << _PLACE_BITS | i
    bits = 0
    while (np.int64(high) - np.int64(low)) >> (common + bits) != 0:
        bits += 1
    return bits


@njit(nogil=True, error_model="numpy", _nrt=False)
def cost(columns, bits, digits):
    """What a sort by so many digits takes, in counters."""
    return digits * (_COUNTERS_OF_ENTRY * columns + (1 << -(-bits // digits)))


@njit(nogil=True, error_model="numpy", _nrt=False)
def digits_of(columns, bits):
    """In how many digits to sort keys of so many bits: fewer are larger, and have more counters."""
    digits = max(1, -(-bits // WIDEST_DIGIT))
    while cost(columns, bits, digits + 1) < cost(columns, bits, digits):
        digits += 1
    return digits


@njit(nogil=True, error_model="numpy", _nrt=False)
def count_digits(entries, shift, mask, starts):
    """Find where the entries of each value of a digit begin in the order of that digit."""
    starts[: mask + 1] = 0
    for i in range(len(entries)):
        starts[(entries[i] >> shift) & mask] += 1
    start = np.int32(0)
    for value in range(mask + 1):
        count = starts[value]
        starts[value] = start
        start = np.int32(start + count)


@njit(nogil=True, error_model="numpy", _nrt=False)
def sorted_but_for_one(row, columns, room, starts):
    """Sort the row at an address by all digits but the highest.

    Returns the address of its entries, the shift and the mask of the highest digit, whose `starts` are found.
    """
    entries = array_at(room, columns, types.int64)
    moved = array_at(room + 8 * columns, columns, types.int64)
    keys = array_at(room + 8 * columns, columns, types.int32)  # needed until the entries are there
    if not multiples(array_at(row, columns, types.float32), keys):
        patterns(array_at(row, columns, types.int32), keys)
    bits = entered(keys, entries)
    digits = digits_of(columns, bits)
    size = -(-bits // digits)
    mask, shift = (1 << size) - 1, _PLACE_BITS
    for _ in range(digits - 1):
        count_digits(entries, shift, mask, starts)
        for i in range(columns):
            value = (entries[i] >> shift) & mask
            moved[starts[value]] = entries[i]
            starts[value] += 1
        entries, moved = moved, entries
        shift += size
    count_digits(entries, shift, mask, starts)
    return room + 8 * columns * ((digits - 1) & 1), shift, mask


@njit(nogil=True, error_model="numpy", _nrt=False)
def rank_rows(rows, count, columns, room, starts):
    """Put the rank of each entry, as float32, in its place; `room` has 16 bytes for each entry of a row."""
    for row in range(rows, rows + 4 * columns * count, 4 * columns):
        place, shift, mask = sorted_but_for_one(row, columns, room, starts)
        entries = array_at(place, columns, types.int64)
        ranks = array_at(row, columns, types.float32)
        for i in range(columns):
            value = (entries[i] >> shift) & mask
            ranks[entries[i] & _PLACE] = np.float32(starts[value])
            starts[value] += 1


@njit(nogil=True, error_model="numpy", _nrt=False)
def rank_apart(row, columns, room, starts, ranks):
    """Write the ranks of the entries of a row to int32."""
    place, shift, mask = sorted_but_for_one(row, columns, room, starts)
    entries = array_at(place, columns, types.int64)
    for i in range(columns):
        value = (entries[i] >> shift) & mask
        ranks[entries[i] & _PLACE] = starts[value]
        starts[value] += 1


@njit(nogil=True, error_model="numpy", _nrt=False)
def sort_rows(count, table):
    """Find the ranks of the entries of so many rows; `table` is the address of a `RadixJob`."""
    job = array_at(table, len(_JOB), types.int64)
    rows, columns, room = job[_JOB.ROWS], job[_JOB.COLUMNS], job[_JOB.ROOM]
    starts = array_at(job[_JOB.COUNTS], max(1 << WIDEST_DIGIT, job[_JOB.COUNTERS]), types.int32)
    if job[_JOB.RANKS] == 0:
        rank_rows(rows, count, columns, room, starts)
        return
    for row in range(count):
        values = array_at(rows + 4 * columns * row, columns, types.int32)
        ranks = array_at(job[_JOB.RANKS] + 4 * columns * row, columns, types.int32)
        if not rank_by_counting(values, job[_JOB.COUNTERS], starts, ranks):
            rank_apart(rows + 4 * columns * row, columns, room, starts, ranks)
