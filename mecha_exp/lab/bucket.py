"""A store of results at an address such as `s3://bucket/path`, by fsspec.

It has the names of a store in a folder, so one can be copied to the other. What exists is listed once, and
the results of many points are fetched together; they lie in a temporary folder while the process runs. What
is written is sent by a thread, as many files at a time as have come meanwhile: outcomes and other files
first, then the JSON files that name them. An object appears whole, and two writers of one name write equal
results, or results that name outcomes of their own (see `store.py`). So nothing needs a lock.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from mecha_exp.checkpoint.remote import is_address
from mecha_exp.checkpoint.remote.address import GOOGLE, HTTP, S3, scheme_of
from mecha_exp.checkpoint.remote.libraries import library
from mecha_exp.checkpoint.remote.pin import cause_of
from mecha_exp.checkpoint.remote.retries import seconds_to_send
from mecha_exp.errors import CheckpointError, StoreError
from mecha_exp.lab.store import STORE_FILE, ResultStore
from mecha_exp.lab.stored_results import StoredMerge
from mecha_exp.paths import STORE
from mecha_exp.system.cache import cache_folder
from mecha_exp.system.progress import within

_SECONDS = 900.0
"""How long a store may take to list what it has, or for the files that are fetched together."""
_AT_ONCE = 256
"""Files that are fetched together."""


def open_store(place: str) -> ResultStore:
    """The store in a folder, or at an address.

    Raises:
        StoreError: a newer version wrote it, or it cannot be reached.
    """
    return BucketStore(place) if is_address(place) else ResultStore(Path(place))


class BucketStore(ResultStore):
    """The results below an address.

    Attributes:
        folder: the temporary folder with what was fetched or written.
        name: the address.

    Raises:
        StoreError: it cannot be reached, or the address is none to write to.
    """

    def __init__(self, address: str) -> None:
        self._bucket = _Bucket(address.rstrip("/"))
        self.folder = Path(tempfile.mkdtemp(prefix="mecha_exp_store_"))
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self._names: dict[str, list[str]] = {}
        for name in self._bucket.names():
            self._names.setdefault("/".join(name.split("/")[:2]), []).append(name)
        self._fetched: set[str] = set()
        self._fetching = Lock()
        self._fetch([STORE_FILE])
        super().__init__(self.folder)
        self.name = address

    @property
    def shared_folder(self) -> None:
        """None: its folder is this process's own."""
        return None

    def __iter__(self) -> Iterator[StoredMerge]:
        self.fetch(path.name for path in self.points())
        return super().__iter__()

    def points(self) -> list[Path]:
        """The folder of every point that was there at first or is known by now, named by its signature."""
        listed = {self.folder / name for name in self._names if name.startswith("points/")}
        return sorted(listed.union(super().points()))

    def fetch(self, signatures: Iterable[str]) -> None:
        """Load the results of points: the files that exist are fetched in one go."""
        self._fetch(f"points/{signature}" for signature in signatures)

    def flush(self) -> None:
        """Wait until everything has been sent.

        Raises:
            StoreError: something could not be sent.
        """
        self._bucket.flush()

    def partial(self, key: str, signature: str = "", *, content: str = "") -> Path:
        """The file of this machine that keeps the parts of a measurement until it is stored as a whole."""
        whole = self._evaluation(key, signature, content)
        return (cache_folder() or self.folder) / "partial" / f".{whole.parent.name}.{whole.stem}.partial"

    @property
    def _sweeps(self) -> Path:
        return STORE.absolute() / "sweeps"  # their folders are on this machine

    def _point(self, signature: str) -> Path:
        self.fetch([signature])
        return super()._point(signature)

    def _evaluation(self, key: str, signature: str, content: str) -> Path:
        if content:
            self._fetch([f"inputs/{content}"])
        return super()._evaluation(key, signature, content)

    def _fetch(self, parts: Iterable[str]) -> None:
        """Fetch what was listed of points, of inputs, or a file."""
        with self._fetching:
            new = [part for part in dict.fromkeys(parts) if part not in self._fetched]
            names = [name for part in new for name in self._names.get(part, ())]
            self._bucket.fetch(names, self.folder)
            self._fetched.update(new)

    def _write(self, path: Path, value: dict[str, Any], beside: Mapping[Path, bytes] | None = None) -> None:
        super()._write(path, value, beside)
        if path.is_relative_to(self.folder):
            marker = [] if STORE_FILE in self._names else [self.folder / STORE_FILE]
            self._names[STORE_FILE] = [STORE_FILE]
            self._bucket.send(
                {self._name(file): file.read_bytes() for file in (*marker, *(beside or {}), path)}
            )

    def _remove(self, path: Path) -> None:
        if path.exists():
            super()._remove(path)
            self._bucket.send({self._name(path): None})

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()


class _Bucket:
    """The files below an address, by their relative names.

    Raises:
        StoreError: they cannot be listed, fetched or sent; from any method.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._fs, self._root = _opened(address)
        self._waiting: dict[str, bytes | None] = {}
        self._sending: Future[None] | None = None
        self._sender = ThreadPoolExecutor(1)
        self._lock = Lock()
        self._error: StoreError | None = None

    def names(self) -> list[str]:
        """The names of all files."""
        with self._explained("listed"):
            if scheme_of(self._address) in S3:  # else a bucket that is missing counts as empty
                self._fs.call_s3("head_bucket", Bucket=self._root.partition("/")[0])
            self._fs.invalidate_cache()
            found = within(_SECONDS, partial(self._fs.find, self._root))
            return [path[len(self._root) :].lstrip("/") for path in found]

    def fetch(self, names: Sequence[str], folder: Path) -> None:
        """Write files into a folder, many requests at a time. What is gone by now is left out."""
        for start in range(0, len(names), _AT_ONCE):
            paths = {f"{self._root}/{name}": name for name in names[start : start + _AT_ONCE]}
            with self._explained("read"):
                contents = within(_SECONDS, partial(self._fs.cat, [*paths], on_error="return"))
                if errors := [c for c in contents.values() if isinstance(c, Exception) and not _is_gone(c)]:
                    raise errors[0]
            for path, content in contents.items():
                if isinstance(content, Exception):
                    continue
                file = folder / paths[path]
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)

    def send(self, files: Mapping[str, bytes | None]) -> None:
        """Have files written, or deleted where there is no content; raises for earlier ones that failed."""
        with self._lock:
            self._waiting.update(files)
            if self._sending is None:
                self._sending = self._sender.submit(self._send_waiting)
        self._raise_earlier()

    def flush(self) -> None:
        """Wait until everything has been sent."""
        with self._lock:
            sending = self._sending
        if sending is not None:
            sending.result()
        self._raise_earlier()

    def _raise_earlier(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _send_waiting(self) -> None:
        while batch := self._next_batch():
            try:
                with self._explained("written"):
                    self._send(batch)
            except StoreError as error:
                self._error = error

    def _next_batch(self) -> dict[str, bytes | None]:
        """The files that have come since the last call; without any the sending ends."""
        with self._lock:
            batch, self._waiting = self._waiting, {}
            if not batch:
                self._sending = None
            return batch

    def _send(self, files: Mapping[str, bytes | None]) -> None:
        """Write files, those that JSON files name before these, and delete others."""
        written = {name: content for name, content in files.items() if content is not None}
        for is_json in (False, True):
            part = {name: c for name, c in written.items() if name.endswith(".json") is is_json}
            if part:
                placed = {f"{self._root}/{name}": content for name, content in part.items()}
                within(seconds_to_send(sum(map(len, part.values()))), partial(self._fs.pipe, placed))
        if gone := [f"{self._root}/{name}" for name, content in files.items() if content is None]:
            within(_SECONDS, partial(self._fs.rm, gone))

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Turn the error of a file system, which may be of any kind, into a `MechaError`."""
        try:
            yield
        except Exception as error:
            raise StoreError(f"store={self._address} cannot be {what}: {_cause(error)}") from error


def _opened(address: str) -> tuple[Any, str]:
    """The file system of an address, and the path in it."""
    from fsspec.core import url_to_fs

    scheme = scheme_of(address)
    if scheme in ("hf", *HTTP):
        raise StoreError(
            f"store={address}: results cannot be written there. Name a folder, or a place such as s3://bucket/path."
        )
    try:
        if scheme in (*S3, *GOOGLE):
            library("s3fs" if scheme in S3 else "gcsfs")
        fs, root = url_to_fs(address)
    except (ImportError, ValueError, CheckpointError) as error:
        raise StoreError(f"store={address} cannot be opened: {cause_of(error)}") from None
    return fs, str(root).rstrip("/")


def _is_gone(error: Exception) -> bool:
    """Whether an error says that a file is no longer there."""
    return isinstance(error, FileNotFoundError | KeyError)


def _cause(error: Exception) -> str:
    """Why a store cannot be used, and how to mend it."""
    if "Credential" in type(error).__name__:
        return (
            f"there are no credentials for it ({cause_of(error)}). Set AWS_PROFILE, or AWS_ACCESS_KEY_ID "
            "and AWS_SECRET_ACCESS_KEY, or what the file system takes."
        )
    if isinstance(error, FileNotFoundError):
        return "there is no such bucket. Make it first, or name another one."
    if isinstance(error, PermissionError):
        return f"access is denied ({cause_of(error)}). They must allow to list, read, write and delete there."
    return f"{cause_of(error).rstrip('.')}."
