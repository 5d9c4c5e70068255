# mypy: ignore-errors
"""The stream kernel: machine code that reads, computes and writes tile after tile by itself."""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from mecha_exp.engine.compiler.abi import WORD, Move, Rank, StreamJob, Table, words
from mecha_exp.engine.compiler.kernels.intrinsics import array_at
from mecha_exp.engine.ir.reductions import REDUCTION_BLOCK

_JOB, _MOVE, _RANK, _TABLE = words(StreamJob), words(Move), words(Rank), words(Table)


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
    """Read or write `count` elements after the first `done` by every move; returns whether all succeeded."""
    for row in range(0, len(moves), len(_MOVE)):
        size = moves[row + _MOVE.ITEM_BYTES]
        descriptor, memory = np.int32(moves[row + _MOVE.DESCRIPTOR]), moves[row + _MOVE.MEMORY]
        nbytes, offset = count * size, moves[row + _MOVE.OFFSET] + done * size
        if transferred(call, descriptor, memory, nbytes, offset) != nbytes:
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
    """Read, compute and write tile after tile; `table` is the address of an `abi.StreamJob`.

    It stops at a tile that cannot be read or written, or in which a magnitude reaches its limit, and reports
    how many elements lie before that tile.
    """
    job = array_at(table, len(_JOB), types.int64)
    loop, result, loop_table = job[_JOB.LOOP], job[_JOB.RESULT], job[_JOB.TABLE]
    length, sum_bytes = job[_JOB.LENGTH], job[_JOB.SUM_BYTES]
    tiles, found_words = job[_JOB.TILES], len(_RANK) * job[_JOB.RANKS]
    read, write = job[_JOB.READ], job[_JOB.WRITE]
    reads = array_at(job[_JOB.READS], len(_MOVE) * job[_JOB.INPUTS], types.int64)
    writes = array_at(job[_JOB.WRITES], len(_MOVE) * job[_JOB.OUTPUTS], types.int64)
    peaks = array_at(job[_JOB.PEAKS], tiles, types.int64)
    limits = array_at(job[_JOB.LIMITS], tiles, types.int64)
    found = array_at(job[_JOB.FOUND], found_words, types.int64)
    found_before = array_at(job[_JOB.FOUND_BEFORE], found_words, types.int64)
    terms = array_at(loop_table + WORD * (_TABLE.TILES + tiles), 1, types.int64)
    first_sums, done = terms[0], 0
    while done < count:
        size = min(length, count - done)
        if not moved(read, reads, done, size):
            break
        terms[0] = first_sums + done // REDUCTION_BLOCK * sum_bytes
        for i in range(len(found)):
            found_before[i] = found[i]
        fails = called(loop, result, start + done, size, loop_table) != 0
        if fails or not within(peaks, limits) or not moved(write, writes, done, size):
            for i in range(len(found)):
                found[i] = found_before[i]  # the candidates of this tile are overwritten by the next one's
            break
        done += size
    job[_JOB.DONE] = done
