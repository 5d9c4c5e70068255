"""One object of S3 that is uploaded in parts, in any order, and appears when all parts are there."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from mecha_exp.checkpoint.remote.file_systems import object_at
from mecha_exp.checkpoint.remote.libraries import library
from mecha_exp.checkpoint.remote.pin import cause_of
from mecha_exp.checkpoint.remote.retries import seconds_to_send
from mecha_exp.errors import CheckpointError
from mecha_exp.system.progress import within

PART = 16 << 20
"""The bytes of a part, at least; S3 wants 5 MiB."""
MOST_PARTS = 10_000
"""What S3 allows."""
CONNECTIONS = 4


class MultipartUpload:
    """An upload that is under way; the object's old content stays until `complete`.

    Only bytes of parts that are not complete are in memory, and of up to `2 * CONNECTIONS` that wait. Source:
    https://docs.aws.amazon.com/AmazonS3/latest/userguide/mpuoverview.html.

    Args:
        address: of the object.
        nbytes: its size, at least 1.

    Raises:
        CheckpointError: s3fs is not installed, or nothing can be written there.
    """

    def __init__(self, address: str, nbytes: int) -> None:
        library("s3fs")
        self.address, self.nbytes = address, nbytes
        self._fs, self._place = object_at(address)
        self._part = max(PART, -(-nbytes // MOST_PARTS))
        self._pieces: dict[int, list[tuple[int, bytes]]] = {}
        self._missing: dict[int, int] = {}
        self._sent: dict[int, Future[str]] = {}
        self._failure: CheckpointError | None = None
        self._lock = threading.Lock()
        self._waiting = threading.BoundedSemaphore(2 * CONNECTIONS)
        self._upload: str | None = self._call("create_multipart_upload")["UploadId"]
        self._pool = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="mecha_exp upload")

    def write(self, start: int, data: memoryview) -> None:
        """Put bytes at `start`. Each byte of the object is put once; any thread may call this.

        Raises:
            CheckpointError: the store refused an earlier part.
        """
        if self._failure is not None:
            raise self._failure
        while data:
            number, offset = divmod(start, self._part)
            piece = bytes(data[: self._part - offset])
            self._add(number, offset, piece)
            start, data = start + len(piece), data[len(piece) :]

    def complete(self) -> None:
        """Wait for all parts, and let the object appear.

        Raises:
            CheckpointError: bytes are missing, or the store refuses a part.
        """
        count = -(-self.nbytes // self._part)
        if self._pieces or len(self._sent) != count:
            raise CheckpointError(f"{self.address} is not complete, nothing was saved.")
        parts = [{"PartNumber": n + 1, "ETag": self._sent[n].result()} for n in range(count)]
        self._call("complete_multipart_upload", UploadId=self._upload, MultipartUpload={"Parts": parts})
        self._upload = None
        self._pool.shutdown()

    def abort(self) -> None:
        """Delete what was uploaded, unless it is complete. Idempotent."""
        upload, self._upload = self._upload, None
        self._pool.shutdown(cancel_futures=True)
        self._pieces.clear()
        if upload is not None:
            self._call("abort_multipart_upload", UploadId=upload)

    def _add(self, number: int, offset: int, piece: bytes) -> None:
        with self._lock:
            size = min(self._part, self.nbytes - number * self._part)
            self._pieces.setdefault(number, []).append((offset, piece))
            self._missing[number] = self._missing.get(number, size) - len(piece)
            if self._missing[number]:
                return
            pieces = self._pieces.pop(number)
        self._waiting.acquire()
        self._sent[number] = self._pool.submit(self._send, number, sorted(pieces))

    def _send(self, number: int, pieces: list[tuple[int, bytes]]) -> str:
        try:
            body = b"".join(piece for _, piece in pieces)
            sent = self._call("upload_part", UploadId=self._upload, PartNumber=number + 1, Body=body)
            return str(sent["ETag"])
        except CheckpointError as error:
            self._failure = error
            raise
        finally:
            self._waiting.release()

    def _call(self, name: str, **arguments: Any) -> Any:
        seconds = seconds_to_send(len(arguments.get("Body", b"")))
        try:
            return within(seconds, lambda: self._fs.call_s3(name, **self._place, **arguments))
        except Exception as error:  # of botocore, s3fs and the network
            raise CheckpointError(f"{self.address} cannot be written: {cause_of(error)}.") from error
