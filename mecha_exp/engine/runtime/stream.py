"""Streams tiles from files through a loop to files in one call, without Python between them.

Python costs more than the arithmetic where tiles are many: each has calls that read, compute and write, and
the workers wait for each other's. So where the inputs of a pass lie in files as its loop takes them, and its
outputs go into files as the loop gives them, the stream kernel goes from tile to tile by itself, and
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
from mecha_exp.engine.compiler.abi import StreamJob
from mecha_exp.engine.compiler.jit import LoopText, compiled
from mecha_exp.engine.compiler.object_file import Loop, NativeLoop
from mecha_exp.engine.runtime.buffers import Buffer
from mecha_exp.method_api.state_dict import Tile

STREAM_TEXT = LoopText(
    "from mecha_exp.engine.compiler.kernels.stream import streamed\n\n"
    "def loop(start, count, table):\n"
    "    streamed(start, count, table)\n",
    room=0,
)
"""The source of the stream kernel; it serves every loop."""

Move: TypeAlias = tuple[FileRegion, Buffer]
"""The region of a key in a file, and the memory for a tile of it."""


@dataclass(frozen=True)
class Stream:
    """The files, memory and limits of a streamed tile.

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
    """The table that a loop receives for a tile, and the memory that it points to.

    Attributes:
        addresses: the words of the table; see `abi.Table`.
        peaks: the largest magnitude of each input and output, as bits.
        candidates: for each rank the elements inside its bracket.
        found: for each rank a row of `abi.Rank`.
        sum_bytes: bytes from the sums of a block to those of the next one.
    """

    addresses: array[int]
    peaks: Buffer
    candidates: list[Buffer]
    found: array[int]
    sum_bytes: int

    @property
    def address(self) -> int:
        """The address of this table."""
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
    words = {
        StreamJob.LOOP: loop.address,
        StreamJob.RESULT: loop.result,
        StreamJob.TABLE: table.address,
        StreamJob.LENGTH: stream.length,
        StreamJob.SUM_BYTES: table.sum_bytes,
        StreamJob.TILES: len(stream.tiles),
        StreamJob.PEAKS: table.peaks.address,
        StreamJob.LIMITS: _address(stream.limits),
        StreamJob.READ: read,
        StreamJob.READS: _address(reads),
        StreamJob.INPUTS: len(stream.reads),
        StreamJob.WRITE: write,
        StreamJob.WRITES: _address(writes),
        StreamJob.OUTPUTS: len(stream.writes),
        StreamJob.RANKS: len(table.candidates),
        StreamJob.FOUND: _address(table.found),
        StreamJob.FOUND_BEFORE: _address(before),
        StreamJob.DONE: 0,
    }
    job = array("q", [words[word] for word in StreamJob])
    code(tile.offset + tile.start, tile.stop - tile.start, _address(job))
    return job[StreamJob.DONE]


def _rows(moves: Sequence[Move], tile: Tile) -> array[int]:
    """The transfers of a tile, a row of `abi.Move` each."""
    rows = array("q")
    for region, buffer in moves:
        size = buffer.tensor.itemsize
        place = region.offset + (tile.offset + tile.start) * size
        rows.extend((region.descriptor, buffer.address, place, size))
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
