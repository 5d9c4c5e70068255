"""The journal of a file that is being written: its finished keys, so that an interrupted run can resume.

A line is written as soon as the operating system has a key's bytes, which is enough when the process is
killed. A machine that goes down loses what was not on the disk, so only flushed keys count after a restart.
Every line has a checksum; the first damaged line ends the journal.
"""

import functools
import json
import threading
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mecha_exp.checkpoint.transaction.paths import JOURNAL, NEW, PARTIAL, sibling
from mecha_exp.documents import parse_json
from mecha_exp.system.atomic_write import atomic_write

Note = dict[str, Any]
"""Data about a finished key that a resumed writer returns: anything that JSON can represent."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Finished:
    """The finished keys and their notes, in the order in which they were finished.

    Attributes:
        flushed: how many of them, counted from the first, were flushed to the disk.
    """

    keys: Mapping[str, Note] = field(default_factory=dict)
    flushed: int = 0


class Journal:
    """A journal that any thread may append to. It replaces the file at `path`.

    Args:
        signature: a hash of all that decides the bytes, which a writer that resumes must share.
        inode: the inode of the partial file.
        finished: the keys that are finished already.
    """

    def __init__(self, path: Path, signature: str, inode: int, finished: Finished) -> None:
        self._lock = threading.Lock()
        self._count = len(finished.keys)
        lines = [_line(json.dumps([signature, inode, _boot()])), *_entries(finished.keys)]
        with atomic_write(path, path.with_name(path.name + NEW)) as fresh:  # a kill must not cost the old one
            fresh.write_bytes(b"".join([*lines, _line(str(finished.flushed))]))
        self._file = path.open("ab", buffering=0)

    @property
    def count(self) -> int:
        """The number of finished keys."""
        return self._count

    def finish(self, notes: Mapping[str, Note]) -> None:
        """Record that all bytes of some keys were written."""
        lines = b"".join(_entries(notes))
        with self._lock:
            self._write(lines)
            self._count += len(notes)

    def flush(self, count: int) -> None:
        """Record that the first `count` finished keys are on the disk."""
        with self._lock:
            self._write(_line(str(count)))

    def close(self) -> None:
        """Close the file. Later entries are dropped."""
        with self._lock:
            self._file.close()

    def _write(self, data: bytes) -> None:
        if not self._file.closed and self._file.write(data) != len(data):
            self._file.close()  # a torn line ends the journal


def read_journal(path: Path, signature: str, inode: int) -> Finished:
    """Read the finished keys of a partial file; none if the journal is another file's or cannot be read."""
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


def finished_keys(target: Path, signature: str) -> Mapping[str, Note]:
    """The keys that a writer of this signature would find finished in its partial file, with their notes."""
    try:
        inode = sibling(target, PARTIAL).stat().st_ino
    except OSError:
        return {}
    return read_journal(sibling(target, JOURNAL), signature, inode).keys


def belongs_to(target: Path, signature: str) -> bool:
    """Whether a writer of this signature has begun the partial file of an output."""
    try:
        inode = sibling(target, PARTIAL).stat().st_ino
        of_signature, of_inode, _ = next(_lines(sibling(target, JOURNAL).read_bytes()))
    except (OSError, ValueError, TypeError, StopIteration):
        return False
    return bool((of_signature, of_inode) == (signature, inode))


def _entries(notes: Mapping[str, Note]) -> Iterator[bytes]:
    """A line for each finished key: the JSON of [key, note]. A lone text is quick to write, a list is not."""
    for key, note in notes.items():
        yield _line(f"[{json.dumps(key)}, {json.dumps(note) if note else '{}'}]")


def _line(content: str) -> bytes:
    text = content.encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _lines(data: bytes) -> Iterator[Any]:
    for line in data.split(b"\n")[:-1]:
        checksum, _, text = line.partition(b" ")
        if checksum != b"%08x" % zlib.crc32(text):
            return
        yield parse_json(text)


@functools.cache
def _boot() -> str | None:
    """An identifier of the time since the machine was started; None where the system has none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return None
