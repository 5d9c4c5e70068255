# mypy: ignore-errors
"""Machine code that goes from tile to tile by itself; see `streaming`. Only that has it compiled."""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from mecha_exp.engine.compiler.intrinsics import array_at
from mecha_exp.engine.ir.reductions import REDUCTION_BLOCK


@intrinsic
def called(context, address, result, start, count, table):
    """Call a loop by its address, as numba has its functions called; 0 is success."""

    def build(context, builder, signature, args):
        address, result, *given = args
        return _call(builder, ir.IntType(32), address, [result, result, *given])

    return types.int32(*[types.int64] * 5), build


@intrinsic
def transferred(context, address, descriptor, memory, size, offset):
    """Call pread or pwrite by its address: how many bytes were moved."""

    def build(context, builder, signature, args):
        return _call(builder, ir.IntType(64), args[0], args[1:])

    return types.int64(types.int64, types.int32, *[types.int64] * 3), build


def _call(builder, result, address, given):
    kind = ir.FunctionType(result, [value.type for value in given])
    return builder.call(builder.inttoptr(address, kind.as_pointer()), given)


@njit(nogil=True, error_model="numpy", _nrt=False)
def moved(call, moves, done, count):
    """Read or write so many entries, after those that are done, wherever they are to go; whether all were."""
    for row in range(0, len(moves), 4):
        descriptor, memory, offset, size = moves[row], moves[row + 1], moves[row + 2], moves[row + 3]
        nbytes = count * size
        if transferred(call, np.int32(descriptor), memory, nbytes, offset + done * size) != nbytes:
            return False
    return True


@njit(nogil=True, error_model="numpy", _nrt=False)
def within(values, limits):
    """Whether each value is below its limit."""
    are = True
    for i in range(len(values)):
        are &= values[i] < limits[i]
    return are


@njit(nogil=True, error_model="numpy", _nrt=False)
def streamed(start, count, table):
    """Read, compute and write tile after tile; `streaming.run_stream` says what the table has.

    It stops at a tile that cannot be read or written, or in which a magnitude reaches its limit, and says how
    many entries lie before.
    """
    job = array_at(table, 18, types.int64)
    loop, result, loop_table, length, row_bytes = job[0], job[1], job[2], job[3], job[4]
    tiles, peaks, limits = job[5], job[6], job[7]
    read, reads, inputs = job[8], job[9], job[10]
    write, writes, outputs = job[11], job[12], job[13]
    ranks, found, before = job[14], job[15], job[16]
    to_read = array_at(reads, 4 * inputs, types.int64)
    to_write = array_at(writes, 4 * outputs, types.int64)
    largest, below = array_at(peaks, tiles, types.int64), array_at(limits, tiles, types.int64)
    counts, counts_before = array_at(found, 5 * ranks, types.int64), array_at(before, 5 * ranks, types.int64)
    terms = array_at(loop_table + 40 + 8 * tiles, 1, types.int64)
    first_sums, done = terms[0], 0
    while done < count:
        size = min(length, count - done)
        if not moved(read, to_read, done, size):
            break
        terms[0] = first_sums + done // REDUCTION_BLOCK * row_bytes
        for i in range(len(counts)):
            counts_before[i] = counts[i]
        fails = called(loop, result, start + done, size, loop_table) != 0
        if fails or not within(largest, below) or not moved(write, to_write, done, size):
            for i in range(len(counts)):
                counts[i] = counts_before[i]  # what is kept of this tile is written over by the next one's
            break
        done += size
    job[17] = done
