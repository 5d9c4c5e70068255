"""The pieces in which a remote file is fetched: several at once, ahead of the reader, within limits.

Extents that will be read are cut into pieces of some MB. A reader of a piece has the next ones fetched,
so that the link stays busy while tiles are computed. Small tensors have a lane of their own: a merge goes
through them faster than through the large ones between which they lie.
"""

from __future__ import annotations

import functools
import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from mecha_exp.errors import CheckpointError

PIECE = 4 << 20
"""Bytes of a piece."""
SMALL = 1 << 18
"""Bytes below which a tensor is in the lane of the small ones."""
AHEAD = 32 << 20
"""Bytes of a file that are fetched ahead of the reader, in each lane."""
AHEAD_PIECES = 64
"""Pieces of a lane that are fetched ahead at most."""
KEPT = 64 << 20
"""Bytes of a file that stay in memory after they were read, for the next stage of a key."""
CONNECTIONS = (16, 48)
"""Ranges that are fetched at once, of all files together: in the lane of the large tensors, and the small."""

Fetch = Callable[[int, memoryview], None]
"""Fills a view with the bytes of the file from an offset on."""


@dataclass(frozen=True, eq=False)
class Piece:
    """A range of a file, and its place among the pieces of its lane."""

    start: int
    stop: int
    is_small: bool
    place: int

    @property
    def nbytes(self) -> int:
        """The size of the range."""
        return self.stop - self.start


class Pieces:
    """The pieces of one file. Any number of threads may read at once.

    Args:
        fetch: gets a range of the file.
    """

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._lock = threading.Lock()
        self._pieces: list[Piece] = []  # by start
        self._starts: list[int] = []
        self._lanes: tuple[list[Piece], list[Piece]] = ([], [])
        self._fetched: OrderedDict[Piece, Future[bytearray]] = OrderedDict()  # those in use last
        self._used: set[Piece] = set()
        self._counts: dict[Piece, int] = {}  # how often each was fetched
        self._is_closed = False

    def expect(self, extents: Iterable[tuple[int, int]]) -> None:
        """Cut extents (first byte, bytes) into pieces. What is in a piece already stays there."""
        with self._lock:
            free = [(start, size) for start, size in extents if size and self._at(start) is None]
            for is_small in (False, True):
                for start, stop in _cut(e for e in free if (e[1] < SMALL) is is_small):
                    lane = self._lanes[is_small]
                    lane.append(Piece(start, stop, is_small, len(lane)))
            self._pieces = sorted((*self._lanes[0], *self._lanes[1]), key=lambda piece: piece.start)
            self._starts = [piece.start for piece in self._pieces]

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill `view`, from pieces where there are some; anything else is fetched for itself."""
        done = 0
        while done < len(view):
            at = offset + done
            with self._lock:
                piece = self._at(at)
                future = None if piece is None else self._take(piece)
                stop = self._next_start(at) if piece is None else piece.stop
            count = min(stop - at, len(view) - done) if stop is not None else len(view) - done
            part = view[done : done + count]
            if piece is None or future is None:
                self._fetch(at, part)
            else:
                begin = at - piece.start
                part[:] = memoryview(future.result())[begin : begin + count]
            done += count

    def close(self) -> None:
        """Forget everything, and fetch nothing more."""
        with self._lock:
            self._is_closed = True
            for future in self._fetched.values():
                future.cancel()
            self._fetched.clear()

    def _at(self, offset: int) -> Piece | None:
        """The piece that has a byte."""
        place = bisect_right(self._starts, offset) - 1
        piece = self._pieces[place] if place >= 0 else None
        return piece if piece is not None and offset < piece.stop else None

    def _next_start(self, offset: int) -> int | None:
        place = bisect_right(self._starts, offset)
        return self._starts[place] if place < len(self._starts) else None

    def _take(self, piece: Piece) -> Future[bytearray]:
        """The content of a piece, which is fetched with those behind it."""
        future = self._fetched.get(piece) or self._start(piece)
        self._fetched.move_to_end(piece)
        self._used.add(piece)
        self._look_ahead(piece)
        self._make_room()
        return future

    def _start(self, piece: Piece) -> Future[bytearray]:
        self._counts[piece] = self._counts.get(piece, 0) + 1
        self._used.discard(piece)
        future = self._fetched[piece] = _threads(piece.is_small, os.getpid()).submit(self._load, piece)
        return future

    def _load(self, piece: Piece) -> bytearray:
        if self._is_closed:
            raise CheckpointError("a remote file was closed while it was being read.")
        content = bytearray(piece.nbytes)
        self._fetch(piece.start, memoryview(content))
        return content

    def _look_ahead(self, piece: Piece) -> None:
        """Fetch the next pieces of a lane that were fetched less often: in a second reading, all again."""
        count, room = self._counts[piece], AHEAD
        for other in self._lanes[piece.is_small][piece.place + 1 : piece.place + 1 + AHEAD_PIECES]:
            room -= other.nbytes
            if room < 0:
                return
            if other not in self._fetched and self._counts.get(other, 0) < count:
                self._start(other)

    def _make_room(self) -> None:
        """Let go of the pieces that were read longest ago. Those that were not read yet stay."""
        excess = sum(piece.nbytes for piece in self._used) - KEPT
        for piece in [piece for piece in self._fetched if piece in self._used]:
            if excess <= 0:
                return
            excess -= piece.nbytes
            self._used.discard(piece)
            del self._fetched[piece]


@functools.cache
def _threads(is_small: bool, process: int) -> ThreadPoolExecutor:
    """The threads of a lane, which all files share; a forked process has its own."""
    return ThreadPoolExecutor(CONNECTIONS[is_small], f"mecha_exp ranges {'small' if is_small else 'large'}")


def _cut(extents: Iterable[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    """Cut extents into ranges of at most `PIECE` bytes. Those that touch are joined up to that."""
    start = stop = 0
    for first, size in extents:
        if first == stop and stop > start and first + size - start <= PIECE:
            stop = first + size
            continue
        if stop > start:
            yield start, stop
        while size > PIECE:
            yield first, first + PIECE
            first, size = first + PIECE, size - PIECE
        start, stop = first, first + size
    if stop > start:
        yield start, stop
