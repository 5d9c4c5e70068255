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


WIDEST_DIGIT = 11
"""Bits of a digit of the radix kernel, at most: its counters stay in the first cache."""


class RadixJob(IntEnum):
    """Words of what the radix kernel receives.

    `ROWS` is the address of rows of float32, which become ranks where `RANKS` is 0, and else have their ranks
    written there, in int32. `ROOM` has 16 bytes for each entry of a row, `COUNTS` a 32-bit counter for each
    value of a digit, and `COUNTERS` of them at least.
    """

    ROWS = 0
    COLUMNS = 1
    RANKS = 2
    ROOM = 3
    COUNTS = 4
    COUNTERS = 5


def words(table: type[IntEnum]) -> Any:
    """The positions of a table as a named tuple of ints, which machine code folds; it cannot read an enum."""
    make: Any = namedtuple  # whose fields a type checker wants as literals
    return make(table.__name__, [*table.__members__])(*map(int, table))
