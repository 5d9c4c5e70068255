"""One object of Google Cloud Storage that is uploaded in chunks, in order, and appears with the last one."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from typing import Any

from mecha_exp.checkpoint.remote.file_systems import opened
from mecha_exp.checkpoint.remote.libraries import library
from mecha_exp.checkpoint.remote.pin import cause_of
from mecha_exp.checkpoint.remote.retries import seconds_to_send
from mecha_exp.errors import CheckpointError

CHUNK = 16 << 20
"""The bytes of a chunk; Google wants a multiple of 256 KiB."""


class ResumableUpload:
    """An upload that is under way; the object's old content stays until `complete`.

    Google takes the bytes of an object in order, which is mostly that in which a merge makes them. Bytes
    that come early wait in memory. Of an upload that is never completed nothing is to be seen, and Google
    deletes it after a week. Source: https://cloud.google.com/storage/docs/resumable-uploads.

    Args:
        address: of the object.
        nbytes: its size, at least 1.

    Raises:
        CheckpointError: gcsfs is not installed, or nothing can be written there.
    """

    def __init__(self, address: str, nbytes: int) -> None:
        self._gcsfs = library("gcsfs").core
        self.address, self.nbytes = address, nbytes
        self._fs, path = opened(address)
        self._early: list[tuple[int, bytes]] = []
        self._ready = bytearray()  # the bytes after those that were sent
        self._sent = 0
        self._lock = threading.Lock()
        self._failure: CheckpointError | None = None
        bucket, key, _ = self._fs.split_path(path)
        self._upload: str | None = self._call(self._gcsfs.initiate_upload, bucket, key)

    def write(self, start: int, data: memoryview) -> None:
        """Put bytes at `start`. Each byte of the object is put once; any thread may call this.

        Raises:
            CheckpointError: the store refuses a chunk.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if data:
                heapq.heappush(self._early, (start, bytes(data)))
            while self._early and self._early[0][0] == self._sent + len(self._ready):
                self._ready += heapq.heappop(self._early)[1]
            while len(self._ready) > CHUNK:  # the last byte, with which the object appears, stays here
                self._send(CHUNK)

    def complete(self) -> None:
        """Send what is left, and with it let the object appear.

        Raises:
            CheckpointError: bytes are missing, or the store refuses a chunk.
        """
        if self._sent + len(self._ready) != self.nbytes:
            raise CheckpointError(f"{self.address} is not complete, nothing was saved.")
        answer = self._send(len(self._ready)) or {}
        if int(answer.get("size", -1)) != self.nbytes:
            raise CheckpointError(f"{self.address}: the store has not got all {self.nbytes:,} bytes.")
        self._upload = None

    def abort(self) -> None:
        """Delete what was uploaded, unless it is complete. Idempotent."""
        upload, self._upload = self._upload, None
        self._early.clear()
        if upload is not None:
            self._call(type(self._fs)._call, "DELETE", upload)

    def _send(self, count: int) -> Any:
        chunk = bytes(self._ready[:count])
        about = chunk, self._sent, self.nbytes, "application/octet-stream"
        answer = self._call(self._gcsfs.upload_chunk, self._upload, *about)
        del self._ready[:count]
        self._sent += count
        return answer

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        from fsspec.asyn import sync

        try:
            return sync(self._fs.loop, function, self._fs, *arguments, timeout=seconds_to_send(CHUNK))
        except Exception as error:  # of gcsfs, aiohttp and the network
            self._failure = CheckpointError(f"{self.address} cannot be written: {cause_of(error)}.")
            raise self._failure from error
