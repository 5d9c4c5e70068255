"""Files that many threads read and write at absolute offsets, on every platform."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from mecha_exp.errors import CheckpointError
from mecha_exp.system.file_limit import explain_limit, raise_limit

if TYPE_CHECKING:
    import torch

POSITIONAL = hasattr(os, "preadv") and hasattr(os, "pwrite")  # Windows has neither: seek under a lock
_CHUNK = 1 << 30  # more than 2 GiB in one call is cut short on Linux and refused on macOS and Windows


class FileRegion(NamedTuple):
    """A place in an open file, from an offset on, for machine code that reads or writes there."""

    descriptor: int
    offset: int


class ReadableFile(Protocol):
    """A file that many threads read at absolute offsets, wherever it lies.

    Attributes:
        name: the name of the file in messages.
        size: its bytes.
        identity: a value that differs once the file was changed or replaced.
    """

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int: ...

    @property
    def identity(self) -> tuple[str | int, ...]: ...

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes that start at `offset`."""

    def region(self, offset: int) -> FileRegion | None:
        """The place of a byte for machine code; None where none can read there."""

    def expect(self, extents: Iterable[tuple[int, int]]) -> None:
        """Receive the extents (first byte, bytes) that will be read, in their likely order."""

    def is_unchanged(self) -> bool:
        """Whether the file is still what it was when it was opened."""

    def close(self) -> None: ...


def identity_of(status: os.stat_result) -> tuple[int, int, int]:
    """The inode, size and time of change of a file."""
    return status.st_ino, status.st_size, status.st_mtime_ns


def is_still(path: Path, identity: tuple[int, int, int]) -> bool:
    """Whether a path leads to the file of that identity, unchanged."""
    try:
        return identity_of(path.stat()) == identity
    except OSError:
        return False


def file_changed(file: object) -> CheckpointError:
    """The error of a file that is not what it was when it was opened."""
    return CheckpointError(f"{file} changed while it was being read. Run again once it is at rest.")


def _open(path: str | os.PathLike[str], flags: int) -> int:
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        explain_limit(error)
        raise
    raise_limit(descriptor)
    return descriptor


class PositionalFile:
    """An open file without a position: `read_into` and `write` take the offset and transfer all bytes."""

    def __init__(self, path: str | os.PathLike[str], flags: int) -> None:
        self.path = Path(path)
        flags |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        writes = flags & (os.O_WRONLY | os.O_RDWR)
        descriptor = _open(path, flags)
        try:
            self._raw = io.FileIO(descriptor, "r+" if writes else "r")
        except OSError:  # a folder
            os.close(descriptor)
            raise
        self._lock = None if POSITIONAL else threading.Lock()
        self._opened = identity_of(self.stat())

    def __enter__(self) -> PositionalFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._raw.close()

    @property
    def descriptor(self) -> int:
        """The file descriptor. Raises CheckpointError once the file is closed."""
        try:
            return self._raw.fileno()
        except ValueError:
            raise CheckpointError(f"{self.path} is closed.") from None

    @property
    def name(self) -> str:
        return str(self.path)

    def stat(self) -> os.stat_result:
        return os.fstat(self.descriptor)

    @property
    def size(self) -> int:
        return self.stat().st_size

    @property
    def identity(self) -> tuple[str | int, ...]:
        return str(self.path.resolve()), *self._opened

    def is_unchanged(self) -> bool:
        """Whether the path still leads to the file that was opened, unchanged since."""
        return is_still(self.path, self._opened)

    def expect(self, extents: Iterable[tuple[int, int]]) -> None:
        """Do nothing: the system reads ahead by itself."""

    def region(self, offset: int) -> FileRegion | None:
        """The place of a byte; None where the system has no calls that take an offset."""
        return FileRegion(self.descriptor, offset) if self._lock is None else None

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes that start at `offset`."""
        done = 0
        while done < len(view):
            try:
                count = self._read(offset + done, view[done : done + _CHUNK])
            except OSError as error:
                raise CheckpointError(f"{self.path} cannot be read: {error.strerror}.") from error
            if not count:
                end = f"ends at byte {offset + done:,}, {len(view) - done:,} too early"
                raise CheckpointError(f"{self.path} {end}: it was changed while it was being read.")
            done += count

    def write(self, offset: int, view: memoryview) -> None:
        """Write all of `view` at `offset`. Raises OSError."""
        done = 0
        while done < len(view):
            done += self._write(offset + done, view[done : done + _CHUNK])

    def _read(self, offset: int, view: memoryview) -> int:
        if self._lock is None:
            return os.preadv(self.descriptor, [view], offset)
        with self._lock:
            os.lseek(self.descriptor, offset, os.SEEK_SET)
            return self._raw.readinto(view) or 0

    def _write(self, offset: int, view: memoryview) -> int:
        if self._lock is None:
            return os.pwrite(self.descriptor, view, offset)
        with self._lock:
            os.lseek(self.descriptor, offset, os.SEEK_SET)
            return self._raw.write(view) or 0


def adjacent(extents: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield extents (first byte, bytes) with those joined that follow each other without a gap."""
    begin = size = 0
    for start, nbytes in extents:
        if size and start != begin + size:
            yield begin, size
            size = 0
        begin = begin if size else start
        size += nbytes
    if size:
        yield begin, size


def parts_of(values: torch.Tensor, counts: Mapping[str, int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each key with its values: those of all keys lie one after another."""
    begin = 0
    for key, count in counts.items():
        yield key, values[begin : begin + count]
        begin += count


def require_little_endian() -> None:
    """Raise CheckpointError on a big-endian machine: tiles are used in the byte order of the file."""
    if sys.byteorder != "little":
        raise CheckpointError("big-endian machines are not supported: safetensors files are little endian.")


def byte_view(values: torch.Tensor) -> memoryview:
    """The memory of a contiguous 1-D tensor on the CPU, as bytes."""
    if values.device.type != "cpu" or not values.is_contiguous():
        raise CheckpointError("only contiguous tensors on the CPU can be read into or written from.")
    import torch  # not above: what only lists files does without it

    return values.detach().view(torch.uint8).numpy().data


def fill_by_units(
    view: memoryview, start: int, unit_bytes: int, at_once: int, decode: Callable[[int, int], torch.Tensor]
) -> None:
    """Fill `view` with bytes of numbers that are decoded in units, such as the blocks of a quantised tensor.

    Args:
        view: what is filled, with the bytes from `start` on.
        start: its first byte, counted over the numbers of all units.
        unit_bytes: the bytes of the numbers of a unit.
        at_once: how many units are decoded at a time.
        decode: (first unit, the one after the last) -> their numbers.
    """
    end = start + len(view)
    stop = -(-end // unit_bytes)
    for first in range(start // unit_bytes, stop, at_once):
        last = min(first + at_once, stop)
        begin = first * unit_bytes
        numbers = byte_view(decode(first, last).contiguous())
        low, high = max(start, begin), min(end, last * unit_bytes)
        view[low - start : high - start] = numbers[low - begin : high - begin]
