# mypy: ignore-errors
"""The radix kernel: machine code that finds the order of the entries of each row, or their ranks."""

import numpy as np
from numba import njit, types

from mecha_exp.engine.compiler.abi import RadixJob, words
from mecha_exp.engine.compiler.kernels.intrinsics import array_at

_JOB = words(RadixJob)
_DIGIT = 1 << 11  # of the 32 bits of an entry the digits have 11, 11 and 10
_MASK = np.uint64(_DIGIT - 1)
_SHIFTS = (np.uint64(32), np.uint64(43), np.uint64(54))  # of the digits, beside the place in the lower half
_PLACE = np.uint64(0xFFFFFFFF)


@njit(nogil=True, error_model="numpy", _nrt=False)
def keyed(raw):
    """The bits of a float32 as a number that sorts as it does in its upper half; both zeros are one."""
    if raw == np.int32(-(2**31)):
        raw = np.int32(0)
    turned = np.uint32(raw) ^ (np.uint32(0xFFFFFFFF) if raw < 0 else np.uint32(0x80000000))
    return np.uint64(turned) << np.uint64(32)


@njit(nogil=True, error_model="numpy", _nrt=False)
def ends_to_starts(counts):
    """Turn the counts of each digit's values into where the entries of each begin."""
    for digit in range(3):
        start = 0
        for i in range(digit * _DIGIT, (digit + 1) * _DIGIT):
            count = counts[i]
            counts[i] = start
            start += count


@njit(nogil=True, error_model="numpy", _nrt=False)
def ordered_rows(start, count, table):
    """Sort rows `start` to `start + count`, each by three digits; `table` is the address of a `RadixJob`."""
    job = array_at(table, len(_JOB), types.int64)
    columns = job[_JOB.COLUMNS]
    counts = array_at(job[_JOB.COUNTS], 3 * _DIGIT, types.int64)
    first = array_at(job[_JOB.FIRST], columns, types.uint64)
    second = array_at(job[_JOB.SECOND], columns, types.uint64)
    for row in range(start, start + count):
        values = array_at(job[_JOB.VALUES] + 4 * row * columns, columns, types.int32)
        counts[:] = 0
        for i in range(columns):
            key = keyed(values[i])
            for digit in range(3):
                counts[digit * _DIGIT + np.int64((key >> _SHIFTS[digit]) & _MASK)] += 1
        ends_to_starts(counts)
        for i in range(columns):
            key = keyed(values[i]) | np.uint64(i)
            digit = np.int64((key >> _SHIFTS[0]) & _MASK)
            first[counts[digit]] = key
            counts[digit] += 1
        for i in range(columns):
            key = first[i]
            digit = _DIGIT + np.int64((key >> _SHIFTS[1]) & _MASK)
            second[counts[digit]] = key
            counts[digit] += 1
        if job[_JOB.RANKS]:
            ranks = array_at(job[_JOB.RESULT] + 4 * row * columns, columns, types.float32)
            for i in range(columns):
                key = second[i]
                digit = 2 * _DIGIT + np.int64((key >> _SHIFTS[2]) & _MASK)
                ranks[np.int64(key & _PLACE)] = np.float32(counts[digit])
                counts[digit] += 1
        else:
            order = array_at(job[_JOB.RESULT] + 8 * row * columns, columns, types.int64)
            for i in range(columns):
                key = second[i]
                digit = 2 * _DIGIT + np.int64((key >> _SHIFTS[2]) & _MASK)
                order[counts[digit]] = np.int64(key & _PLACE)
                counts[digit] += 1
