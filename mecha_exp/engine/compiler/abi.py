"""The calling convention between Python and machine code: tables of 64-bit words, by name.

A loop is called as `loop(start, count, table)`, where `table` is the address of its table. The code
generator, the caller in Python and the stream kernel take the positions of words from here.
"""

from collections import namedtuple
from enum import IntEnum
from typing import Any

WORD = 8
"""Bytes of a word."""


class Table(IntEnum):
    """Words of a loop's table, from its address on; all of them are addresses.

    The addresses of the tiles begin at `TILES`: the inputs, then the outputs. After them come the address of
    the sums, then for each rank the address of its candidates, then for each rank that of its `Rank` row.
    """

    FLOATS = 0
    INTEGERS = 1
    ORDER = 2
    PEAKS = 3
    ROOM = 4
    TILES = 5


class Rank(IntEnum):
    """Words of a rank: the ends of its bracket, which the loop receives, and the counts that it reports."""

    LOW = 0
    HIGH = 1
    BELOW = 2
    NAN = 3
    AT_LOW = 4
    AT_HIGH = 5
    INSIDE = 6


class Move(IntEnum):
    """Words of a transfer between a file and memory."""

    DESCRIPTOR = 0
    MEMORY = 1
    OFFSET = 2
    ITEM_BYTES = 3


class StreamJob(IntEnum):
    """Words of what the stream kernel receives, and of its answer (`DONE`: elements that it completed)."""

    LOOP = 0
    RESULT = 1
    TABLE = 2
    LENGTH = 3
    SUM_BYTES = 4
    TILES = 5
    PEAKS = 6
    LIMITS = 7
    READ = 8
    READS = 9
    INPUTS = 10
    WRITE = 11
    WRITES = 12
    OUTPUTS = 13
    RANKS = 14
    FOUND = 15
    FOUND_BEFORE = 16
    DONE = 17


class RadixJob(IntEnum):
    """Words of what the radix kernel receives.

    `VALUES` is the address of rows of float32, `RESULT` that of as many ranks in float32, or of places in
    int64. `FIRST` and `SECOND` have room for a row of 64-bit words each, `COUNTS` for 3 times 2048.
    """

    VALUES = 0
    RESULT = 1
    COLUMNS = 2
    RANKS = 3
    FIRST = 4
    SECOND = 5
    COUNTS = 6


def words(table: type[IntEnum]) -> Any:
    """The positions of a table as a named tuple of ints, which machine code folds; it cannot read an enum."""
    make: Any = namedtuple  # whose fields a type checker wants as literals
    return make(table.__name__, [*table.__members__])(*map(int, table))
