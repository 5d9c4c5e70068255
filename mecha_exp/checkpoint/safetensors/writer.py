"""Writes a safetensors file in parts, so that it is complete or does not exist."""

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from mecha_exp.checkpoint.dtypes import Layout, number_format, stored_bytes
from mecha_exp.checkpoint.positional import (
    FileRegion,
    PositionalFile,
    adjacent,
    byte_view,
    identity_of,
    parts_of,
    require_little_endian,
)
from mecha_exp.checkpoint.safetensors.header import encode_header
from mecha_exp.checkpoint.transaction.journal import Finished, Journal, Note, read_journal
from mecha_exp.checkpoint.transaction.lock import TargetLock
from mecha_exp.checkpoint.transaction.paths import JOURNAL, PARTIAL, sibling
from mecha_exp.checkpoint.transaction.recovery import remove_beside
from mecha_exp.checkpoint.transaction.running_hash import Hashed, RunningHash
from mecha_exp.checkpoint.transaction.space import allocated_blocks, cannot_write, check_writable, preallocate
from mecha_exp.checkpoint.transaction.staging import sync
from mecha_exp.errors import CheckpointError, counted, did_you_mean, some

FLUSH_SECONDS = 5.0
"""How often a durable writer flushes finished keys: after a power failure only later ones are redone."""

_flush_data = getattr(os, "fdatasync", os.fsync)  # only Linux has the former


class Places(NamedTuple):
    """The places of the tensors in a file.

    Attributes:
        header: the first bytes of the file.
        offsets: of each tensor, absolute, in bytes.
        sizes: of each tensor in the file, in bytes.
        nbytes: of the whole file.
    """

    header: bytes
    offsets: Mapping[str, int]
    sizes: Mapping[str, int]
    nbytes: int

    @staticmethod
    def in_safetensors(tensors: Layout, metadata: Mapping[str, str]) -> "Places":
        """The places in a safetensors file."""
        sizes = {key: stored_bytes(*tensor) for key, tensor in tensors.items()}
        header, offsets = encode_header(tensors, metadata)
        return Places(header, offsets, sizes, len(header) + sum(sizes.values()))


class CheckpointWriter:
    """One output file: header first, then tiles in any order from any thread, then a rename.

    Until `commit` the bytes are in a hidden file beside `path`, whose former content stays as it is. The disk
    space is allocated at once, so that a full disk is an error before the work. `durable` waits for the disk
    at commit, so that the file also survives a power failure.

    With a `signature` the finished keys are recorded in a journal beside the hidden file. A writer that is
    killed or interrupted leaves both, and the next writer with the same signature, tensors and metadata
    resumes: the keys in `finished` need no second write. After an error nothing is left, since what is kept
    would take up the space that a full disk lacks.

    >>> with CheckpointWriter("out.safetensors", {"w": ("F16", (2, 2))}, {}) as writer:
    ...     writer.write("w", 0, torch.zeros(4, dtype=torch.float16))
    ...     writer.commit()

    Args:
        signature: a hash of all that decides the bytes; None to never resume.
        places: of a file in another format than safetensors.
        hashed: receives the SHA-256 of the committed file, which is computed meanwhile; None computes none.

    Attributes:
        finished: the keys that an earlier run finished, with its notes. Writing them again does nothing.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tensors: Layout,
        metadata: Mapping[str, str],
        *,
        durable: bool = True,
        signature: str | None = None,
        places: Places | None = None,
        hashed: Hashed | None = None,
    ) -> None:
        require_little_endian()
        self.path = Path(path).absolute()
        self.finished: Mapping[str, Note] = {}
        self._durable = durable
        self._signature = signature
        self._hashed = hashed
        self._tensors = dict(tensors)
        places = places or Places.in_safetensors(tensors, metadata)
        self._header, self._offsets, self._sizes, self.nbytes = places
        self._allocated = 0
        self._written = dict.fromkeys(self._sizes, 0)
        self._changed = threading.Condition(threading.Lock())
        self._writing = 0  # threads that are using the file
        self._flushing = threading.Lock()
        self._flushed_at = time.monotonic()
        self._file: PositionalFile | None = None
        self._journal: Journal | None = None
        self._hash: RunningHash | None = None
        self._lock: TargetLock | None = None
        try:
            self._open()
        except BaseException as error:
            self._leave(type(error))
            raise

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._leave(kind)

    def write(self, key: str, start: int, values: torch.Tensor) -> None:
        """Put `values` (1-D, the key's dtype) at element `start` of the flattened tensor `key`."""
        self._require(key)
        dtype = self._tensors[key][0]
        if values.dtype is not number_format(dtype).torch or values.ndim != 1:
            wrong = f"a {values.ndim}-D tensor of {values.dtype} cannot be written to {key}, which is {dtype}"
            raise CheckpointError(f"{self.path}: {wrong}.")
        self.write_bytes(key, start * values.element_size(), byte_view(values.contiguous()))

    def write_bytes(self, key: str, byte_start: int, view: memoryview) -> None:
        """Put raw bytes at `byte_start` of the tensor `key`. Packed dtypes are written like this."""
        self._require(key)
        stop = byte_start + len(view)
        if not 0 <= byte_start <= stop <= self._sizes[key]:
            size = f"{key} has {self._sizes[key]:,} bytes, not [{byte_start}, {stop})"
            raise CheckpointError(f"{self.path}: {size}.")
        if key in self.finished:
            return
        with self._explained(), self._in_use() as file:
            file.write(self._offsets[key] + byte_start, view)
        self.advance(key, len(view))

    def write_together(self, counts: Mapping[str, int], values: torch.Tensor) -> None:
        """Put all values of several keys of one dtype, one after another; `counts` has how many each has."""
        dtypes = {self._tensors[key][0] for key in counts}
        plain = all(number_format(dtype).torch is values.dtype for dtype in dtypes)
        if not plain or any(self._sizes[key] != n * values.itemsize for key, n in counts.items()):
            raise CheckpointError(
                f"{self.path}: {some(counts)} are not {counted(len(values), 'value')} of {values.dtype}."
            )
        if not self.finished.keys().isdisjoint(counts):
            for key, part in parts_of(values, counts):
                self.write(key, 0, part)
            return
        view, begin = byte_view(values.contiguous()), 0
        with self._explained(), self._in_use() as file:
            for offset, nbytes in adjacent((self._offsets[key], self._sizes[key]) for key in counts):
                file.write(offset, view[begin : begin + nbytes])
                begin += nbytes
        with self._changed:
            self._written.update((key, self._sizes[key]) for key in counts)
        self._let_hash(counts)

    @contextlib.contextmanager
    def writing_at(self, key: str) -> Iterator[FileRegion | None]:
        """Yield the region of a key, for machine code that writes there and reports to `advance`.

        None where machine code cannot write, or the key is finished.
        """
        self._require(key)
        with self._in_use() as file:
            yield None if key in self.finished else file.region(self._offsets[key])

    def advance(self, key: str, nbytes: int) -> None:
        """Count bytes of a key that were written at its region."""
        with self._changed:
            self._written[key] += nbytes
            is_complete = self._written[key] == self._sizes[key]
        if is_complete:
            self._let_hash([key])

    def finish(self, key: str, note: Note | None = None) -> None:
        """Record that all of a key was written, with a note: a writer that resumes has both in `finished`."""
        self.finish_together({key: note or {}})

    def finish_together(self, notes: Mapping[str, Note]) -> None:
        """Record that all of several keys was written, each with its note."""
        for key in notes:
            self._require(key)
        if self._journal is None:
            return
        done = {key: note for key, note in notes.items() if key not in self.finished}
        for key in done:
            if self._written[key] != self._sizes[key]:
                raise CheckpointError(f"{self.path}: {key} is not finished, {self._count(key)}.")
        with self._explained():
            self._journal.finish(done)
            if self._durable and time.monotonic() - self._flushed_at > FLUSH_SECONDS:
                self._flush()

    def commit(self) -> Path:
        """Check that every byte was written, and rename the file to its path. Returns the path."""
        file = self._open_partial()
        wrong = [key for key, size in self._sizes.items() if self._written[key] != size]
        if wrong:
            counts = some(f"{key} ({self._count(key)})" for key in wrong)
            raise CheckpointError(f"{self.path} is not complete, nothing was saved: {counts}.")
        with self._explained():
            self._require_untouched(file)
            if self._durable:
                os.fsync(file.descriptor)
            sha256 = self._hash.result() if self._hash is not None else None
            identity = identity_of(file.stat())
            file.close()  # before the rename: Windows does not move an open file
            file.path.replace(self.path)
        if self._durable:
            with contextlib.suppress(OSError):  # the file is renamed already
                sync(self.path.parent)
        self.abort()  # removes the journal and frees the lock
        if self._hashed is not None and sha256 is not None:
            self._hashed(self.path, sha256, identity)
        return self.path

    def _require_untouched(self, file: PositionalFile) -> None:
        """Raise CheckpointError if another process has truncated or replaced the partial file."""
        status = file.stat()
        try:
            is_named = os.path.samestat(status, file.path.stat())
        except FileNotFoundError:
            is_named = False
        has_holes = getattr(status, "st_blocks", self._allocated) < self._allocated
        is_whole = is_named and status.st_size == self.nbytes and not has_holes
        if is_whole and _begins_with(file, self._header):
            return
        raise CheckpointError(
            f"{self.path} was not saved: another process changed {file.path.name} while it was written. "
            "Start the merge again."
        )

    @property
    def is_complete(self) -> bool:
        """Whether every byte was written."""
        return self._written == self._sizes

    def seal(self) -> None:
        """Stop, and keep the finished keys for a resume on any machine: they are on the disk. Idempotent."""
        if self._file is not None:
            with self._explained():
                self._flush()
        self.suspend()

    def abort(self) -> None:
        """Delete what was written, unless it is committed. The target stays as it was. Idempotent."""
        self._close(keep=False)

    def suspend(self) -> None:
        """Stop, and keep the finished keys for a resume where there is a signature. Idempotent."""
        nothing_done = self._journal is not None and not self._journal.count
        self._close(keep=self._signature is not None and not nothing_done)

    def _leave(self, kind: type[BaseException] | None) -> None:
        """Abort after an error or at the normal end. Suspend after an interrupt."""
        if kind is None or issubclass(kind, Exception):
            self.abort()
        else:
            self.suspend()

    def _close(self, keep: bool) -> None:
        with self._changed:
            file, self._file = self._file, None
            self._changed.wait_for(lambda: not self._writing)
        lock, self._lock = self._lock, None
        try:
            if self._hash is not None:
                self._hash.stop()
            if self._journal is not None:
                self._journal.close()
            if file is not None:
                file.close()
            if lock is not None and not keep:
                remove_beside(self.path)
        finally:
            if lock is not None:
                lock.release()

    def _open(self) -> None:
        check_writable(self.path, self.nbytes)
        with self._explained():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = TargetLock(self.path)
            finished = self._reopen()
            if self._file is None:
                remove_beside(self.path)  # of a writer that was killed: we hold the lock now
                self._file = PositionalFile(self._partial, os.O_RDWR | os.O_CREAT | os.O_EXCL)
                preallocate(self._file, self.nbytes)
                self._file.write(0, memoryview(self._header))
            self._allocated = allocated_blocks(self._file, self.nbytes)
            if self._signature is not None:
                inode = self._file.stat().st_ino
                self._journal = Journal(sibling(self.path, JOURNAL), self._signature, inode, finished)
        self.finished = finished.keys
        self._written |= {key: self._sizes[key] for key in self.finished}
        if self._hashed is not None and self._file is not None:
            ends = {key: self._offsets[key] + size for key, size in self._sizes.items()}
            self._hash = RunningHash(self._file, ends, self.nbytes)
            self._let_hash(key for key, size in self._sizes.items() if self._written[key] == size)

    def _reopen(self) -> Finished:
        """Open the partial file of an interrupted run, if it can be resumed. Returns its finished keys."""
        if self._signature is None or not self._partial.is_file():
            return Finished()
        file = PositionalFile(self._partial, os.O_RDWR)
        try:
            status = file.stat()
            finished = read_journal(sibling(self.path, JOURNAL), self._signature, status.st_ino)
            is_whole = status.st_size == self.nbytes and _begins_with(file, self._header)
            if is_whole and finished.keys and finished.keys.keys() <= self._sizes.keys():
                self._file = file
                return finished
        finally:
            if self._file is None:
                file.close()
        return Finished()

    @property
    def _partial(self) -> Path:
        return sibling(self.path, PARTIAL)

    def _flush(self) -> None:
        """Flush the finished keys to the disk, while other threads write."""
        if not self._flushing.acquire(blocking=False):
            return
        try:
            with self._in_use() as file:
                descriptor = os.dup(file.descriptor)  # closing the file does not wait for the disk
            try:
                count = self._journal.count if self._journal else 0
                _flush_data(descriptor)
            finally:
                os.close(descriptor)
            if self._journal:
                self._journal.flush(count)
            self._flushed_at = time.monotonic()
        finally:
            self._flushing.release()

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[PositionalFile]:
        """Yield the open file and keep it open: a closed descriptor could become another file's."""
        with self._changed:
            file = self._open_partial()
            self._writing += 1
        try:
            yield file
        finally:
            with self._changed:
                self._writing -= 1
                if self._file is None:
                    self._changed.notify_all()

    def _open_partial(self) -> PositionalFile:
        if self._file is None:
            raise CheckpointError(f"{self.path}: this writer is closed.")
        return self._file

    def _let_hash(self, keys: Iterable[str]) -> None:
        """Have keys hashed, if a hash is wanted: all of their bytes are written."""
        if self._hash is not None:
            self._hash.add(keys)

    def _count(self, key: str) -> str:
        return f"{self._written[key]:,} of {self._sizes[key]:,} bytes"

    def _require(self, key: str) -> None:
        if key not in self._sizes:
            raise CheckpointError(f"{self.path} has no key {key!r}.{did_you_mean(key, self._sizes)}")

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise cannot_write(self.path, self.nbytes, error) from error


def _begins_with(file: PositionalFile, header: bytes) -> bool:
    start = bytearray(len(header))
    file.read_into(0, memoryview(start))
    return start == header
