"""Which keys of a file that is being written are done, so that an interrupted run is gone on with.

A line is written as soon as a key's bytes have been handed to the operating system: that is enough when the
process is killed, since the system still has them. A machine that goes down may lose what it had not put on
the disk, so after a restart only the keys count that had been flushed. Every line carries a checksum; the
first one that is not whole ends the journal.
"""

import functools
import json
import threading
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mecha_exp.checkpoint.transaction.paths import NEW
from mecha_exp.system.atomic_write import atomic_write

Note = dict[str, Any]
"""What a writer's user wants to be told again of a finished key: anything that JSON can say."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Finished:
    """The finished keys with their notes, in the order in which they were finished.

    Attributes:
        flushed: how many of them, from the first one on, had been put on the disk.
    """

    keys: Mapping[str, Note] = field(default_factory=dict)
    flushed: int = 0


class Journal:
    """A journal that is written to, from any thread; it replaces what lies at `path`.

    Args:
        signature: of what is being written; whoever wants to go on must have the same.
        inode: of the file that it tells of.
        finished: what is done already.
    """

    def __init__(self, path: Path, signature: str, inode: int, finished: Finished) -> None:
        self._lock = threading.Lock()
        self._count = len(finished.keys)
        lines = [_line([signature, inode, _boot()])]
        lines += [_line([key, note]) for key, note in finished.keys.items()]
        with atomic_write(path, path.with_name(path.name + NEW)) as fresh:  # a kill must not cost the old one
            fresh.write_bytes(b"".join([*lines, _line(finished.flushed)]))
        self._file = path.open("ab", buffering=0)

    @property
    def count(self) -> int:
        """How many keys are finished."""
        return self._count

    def finish(self, key: str, note: Note) -> None:
        """All of the key's bytes have been written."""
        line = _line([key, note])
        with self._lock:
            self._write(line)
            self._count += 1

    def flush(self, count: int) -> None:
        """The first `count` finished keys are on the disk."""
        with self._lock:
            self._write(_line(count))

    def close(self) -> None:
        """Write no more; what comes later is not kept."""
        with self._lock:
            self._file.close()

    def _write(self, data: bytes) -> None:
        if not self._file.closed and self._file.write(data) != len(data):
            self._file.close()  # a torn line ends the journal


def read_journal(path: Path, signature: str, inode: int) -> Finished:
    """What the journal at `path` tells of that file; nothing where it tells of another or cannot be read."""
    try:
        lines = _lines(path.read_bytes())
        of_signature, of_inode, boot = next(lines)
        if (of_signature, of_inode) != (signature, inode):
            return Finished()
        keys: dict[str, Note] = {}
        flushed = 0
        for line in lines:
            if isinstance(line, int):
                flushed = line
            else:
                key, note = line
                keys[key] = dict(note)
    except (OSError, ValueError, TypeError, StopIteration):
        return Finished()
    if boot is None or boot != _boot():
        keys = dict(list(keys.items())[:flushed])
    return Finished(keys, min(flushed, len(keys)))


def _line(content: object) -> bytes:
    text = json.dumps(content).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _lines(data: bytes) -> Iterator[Any]:
    for line in data.split(b"\n")[:-1]:
        checksum, _, text = line.partition(b" ")
        if checksum != b"%08x" % zlib.crc32(text):
            return
        yield json.loads(text)


@functools.cache
def _boot() -> str | None:
    """What is the same until the machine is restarted; None where it cannot be told."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return None
