"""Writing a safetensors file tile by tile, so that it is complete or does not exist."""

import contextlib
import errno
import glob
import os
import shutil
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from mecha_exp.checkpoint.dtypes import number_format, stored_bytes
from mecha_exp.checkpoint.files import PositionalFile, byte_view, require_little_endian
from mecha_exp.checkpoint.header import encode_header
from mecha_exp.checkpoint.lock import TargetLock
from mecha_exp.errors import CheckpointError, did_you_mean, some

_NO_PREALLOCATION = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


class CheckpointWriter:
    """One output file: header first, then tiles in any order from any thread, then a rename.

    Until `commit` the bytes lie in a hidden file beside `path`, whose former content stays as it is. The
    room is taken at once: a full disk is an error before the work, not after it. `durable` waits for the
    disk at commit, so that the file also survives a power failure.

    >>> with CheckpointWriter("out.safetensors", {"w": ("F16", (2, 2))}, {}) as writer:
    ...     writer.write("w", 0, torch.zeros(4, dtype=torch.float16))
    ...     writer.commit()
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tensors: Mapping[str, tuple[str, tuple[int, ...]]],
        metadata: Mapping[str, str],
        *,
        durable: bool = True,
    ) -> None:
        require_little_endian()
        self.path = Path(path).absolute()
        self._durable = durable
        self._tensors = dict(tensors)
        self._sizes = {key: stored_bytes(*tensor) for key, tensor in tensors.items()}
        header, self._offsets = encode_header(tensors, metadata)
        self.nbytes = len(header) + sum(self._sizes.values())
        self._written = dict.fromkeys(self._sizes, 0)
        self._counting = threading.Lock()
        self._file: PositionalFile | None = None
        self._lock: TargetLock | None = None
        try:
            self._open(header)
        except BaseException:
            self.abort()
            raise

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def write(self, key: str, start: int, values: torch.Tensor) -> None:
        """Put `values` (1-D, the key's dtype) at element `start` of the flattened tensor `key`."""
        self._require(key)
        dtype = self._tensors[key][0]
        if values.dtype is not number_format(dtype).torch or values.ndim != 1:
            wrong = f"a {values.ndim}-D tensor of {values.dtype} cannot be written to {key}, which is {dtype}"
            raise CheckpointError(f"{self.path}: {wrong}.")
        self.write_bytes(key, start * values.element_size(), byte_view(values.contiguous()))

    def write_bytes(self, key: str, byte_start: int, view: memoryview) -> None:
        """Put raw bytes at `byte_start` of the tensor `key`: the way for packed dtypes."""
        self._require(key)
        stop = byte_start + len(view)
        if not 0 <= byte_start <= stop <= self._sizes[key]:
            size = f"{key} has {self._sizes[key]:,} bytes, not [{byte_start}, {stop})"
            raise CheckpointError(f"{self.path}: {size}.")
        with self._explained():
            self._open_partial().write(self._offsets[key] + byte_start, view)
        with self._counting:
            self._written[key] += len(view)

    def commit(self) -> Path:
        """Check that every byte was written, and put the file in its place. Returns its path."""
        file = self._open_partial()
        wrong = [key for key, size in self._sizes.items() if self._written[key] != size]
        if wrong:
            counts = some(f"{key} ({self._written[key]:,} of {self._sizes[key]:,} bytes)" for key in wrong)
            raise CheckpointError(f"{self.path} is not complete, nothing was saved: {counts}.")
        with self._explained():
            if self._durable:
                os.fsync(file.descriptor)
            file.close()  # before the rename: Windows does not move an open file
            file.path.replace(self.path)
        self._file = None
        if self._durable:
            _sync_folder(self.path.parent)
        self.abort()  # what is left to do is the same: give the lock back
        return self.path

    def abort(self) -> None:
        """Throw away what was written, unless it is committed. The target stays as it was. Idempotent."""
        file, self._file = self._file, None
        lock, self._lock = self._lock, None
        try:
            if file is not None:
                file.close()
                file.path.unlink(missing_ok=True)
        finally:
            if lock is not None:
                lock.release()

    def _open(self, header: bytes) -> None:
        check_writable(self.path, self.nbytes)
        with self._explained():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = TargetLock(self.path)
            for leftover in self.path.parent.glob(f".{glob.escape(self.path.name)}.????????.partial"):
                leftover.unlink(missing_ok=True)  # of a writer that was killed: we hold the lock now
            partial = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex[:8]}.partial")
            self._file = PositionalFile(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            _allocate(self._file, self.nbytes)
            self._file.write(0, memoryview(header))

    def _open_partial(self) -> PositionalFile:
        if self._file is None:
            raise CheckpointError(f"{self.path}: this writer is closed.")
        return self._file

    def _require(self, key: str) -> None:
        if key not in self._sizes:
            raise CheckpointError(f"{self.path} has no key {key!r}.{did_you_mean(key, self._sizes)}")

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _cannot_write(self.path, self.nbytes, error) from error


def check_writable(path: str | os.PathLike[str], nbytes: int) -> None:
    """Raise CheckpointError unless a file of `nbytes` can be written to `path`. Leaves nothing behind.

    Folders that do not exist yet are no error: the writer creates them.
    """
    target = Path(path).absolute()
    if "\0" in str(target):
        raise CheckpointError(f"{str(target)!r} is not a file name.")
    folder = _existing_folder(target)
    try:
        if target.is_dir():
            raise CheckpointError(f"{target} is a folder: name the file to write in it.")
        if target.exists() and not target.is_file():  # the rename would put a file in place of /dev/null
            raise CheckpointError(f"{target} is a pipe, a socket or a device: choose another output.")
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        with tempfile.TemporaryFile(dir=folder):
            pass  # asking for access rights tells little as root, on Windows and on network drives
        if shutil.disk_usage(folder).free < nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise _cannot_write(target, nbytes, error) from error


def _existing_folder(target: Path) -> Path:
    return next(parent for parent in target.parents if os.path.lexists(parent))


def _cannot_write(target: Path, nbytes: int, error: OSError) -> CheckpointError:
    folder = _existing_folder(target)
    room = f"{nbytes / 1e9:,.3f} GB needed"
    with contextlib.suppress(OSError):
        room += f", {shutil.disk_usage(folder).free / 1e9:,.3f} GB free"
    causes = {
        errno.ENOSPC: f"the disk is full ({room}). Make room or choose another folder",
        getattr(errno, "EDQUOT", -1): f"your disk quota is used up ({room})",
        errno.EFBIG: f"the file is larger than its file system or 'ulimit -f' allows ({room})",
        errno.EACCES: f"no permission to write in {folder}",
        errno.EPERM: f"no permission to write in {folder}",
        errno.EROFS: f"{folder} is read-only",
        errno.ENOTDIR: f"{folder} is not a folder",
        errno.EEXIST: f"{folder} is not a folder",
    }
    cause = causes.get(error.errno or 0, f"{error.strerror or error}")
    return CheckpointError(f"{target} cannot be written: {cause}.")


def _allocate(file: PositionalFile, nbytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.descriptor, 0, nbytes)
            return
        except OSError as error:
            if error.errno not in _NO_PREALLOCATION:
                raise
    os.ftruncate(file.descriptor, nbytes)


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":
        return
    with contextlib.suppress(OSError):  # the file is in its place; some file systems cannot sync folders
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
