"""Tiles that go from files through a loop to files in one call, without Python between them.

Python costs more than the arithmetic where tiles are many: each has calls that read, compute and write, and
the workers wait for each other's. So where the inputs of a pass lie in files as its loop takes them, and its
outputs go into files as the loop gives them, machine code goes from tile to tile by itself (`streamed`), and
the other workers go on meanwhile. It stops at a tile that is not as expected: a read that
is cut short, a disk that is full, a value that is not finite. Python does that one again, and knows what to
say.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from mecha_exp.checkpoint.positional import FileRegion
from mecha_exp.engine.compiler.jit import LoopText, compiled
from mecha_exp.engine.compiler.object_file import Loop, NativeLoop
from mecha_exp.engine.runtime.buffers import Buffer
from mecha_exp.method_api.state_dict import Tile

STREAM_TEXT = LoopText(
    "from mecha_exp.engine.compiler.stream_kernel import streamed\n\n"
    "def loop(start, count, table):\n"
    "    streamed(start, count, table)\n",
    room=0,
)
"""What goes from tile to tile; the same for every loop."""

Move: TypeAlias = tuple[FileRegion, Buffer]
"""Where a key begins in a file, and the room for a tile of it."""


@dataclass(frozen=True)
class Stream:
    """Where tiles come from and go to.

    Attributes:
        length: entries of a tile.
        reads, writes: of every input and of the outputs that go somewhere.
        tiles: the room for a tile of every input and output; None where only its largest magnitude is wanted.
        limits: of every input and output the magnitude, in its bits, from which on Python is to look.
    """

    length: int
    reads: Sequence[Move]
    writes: Sequence[Move]
    tiles: Sequence[Buffer | None]
    limits: array[int]


def can_stream(loop: Loop) -> bool:
    """Whether a loop is machine code that other machine code can call."""
    return isinstance(loop, NativeLoop) and isinstance(compiled(STREAM_TEXT), NativeLoop)


class LoopTable(NamedTuple):
    """What a loop is given for a tile, and where it puts what it finds.

    Attributes:
        addresses: of all of it.
        peaks: of the largest magnitudes.
        kept: of each rank the entries that are inside its bracket.
        found: of each rank its bracket, and how many entries are below, not a number, and inside.
        sums: bytes from the sums of a block to those of the next one.
    """

    addresses: array[int]
    peaks: Buffer
    kept: list[Buffer]
    found: array[int]
    sums: int

    @property
    def address(self) -> int:
        """Its own."""
        return _address(self.addresses)


def run_stream(stream: Stream, loop: Loop, tile: Tile, table: LoopTable) -> int:
    """Go through a tile by parts of the stream's length; returns how many entries are done.

    What is found in the parts that are done is in the table, as if they were one tile.
    """
    code = compiled(STREAM_TEXT)
    assert isinstance(loop, NativeLoop) and isinstance(code, NativeLoop)
    read, write = _system_calls()
    reads, writes = _rows(stream.reads, tile), _rows(stream.writes, tile)
    before = array("q", table.found)
    # in the order in which `streamed` takes them; the last one is the answer
    job = array("q", [loop.address, loop.result, table.address, stream.length, table.sums])
    job.extend((len(stream.tiles), table.peaks.address, _address(stream.limits)))
    job.extend((read, _address(reads), len(stream.reads), write, _address(writes), len(stream.writes)))
    job.extend((len(table.kept), _address(table.found), _address(before), 0))
    code(tile.start, tile.stop - tile.start, _address(job))
    return job[-1]


def _rows(moves: Sequence[Move], tile: Tile) -> array[int]:
    """Of every move the file, the memory, where in the file the tile begins, and the bytes of an entry."""
    rows = array("q")
    for place, buffer in moves:
        size = buffer.tensor.itemsize
        rows.extend((place.descriptor, buffer.address, place.offset + tile.start * size, size))
    return rows


def _address(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]


@functools.cache
def _system_calls() -> tuple[int, int]:
    """The addresses of pread and pwrite."""
    library = ctypes.CDLL(None)
    read, write = (ctypes.cast(call, ctypes.c_void_p).value for call in (library.pread, library.pwrite))
    assert read and write
    return read, write
