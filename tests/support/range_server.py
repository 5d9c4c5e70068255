"""A web server with ranges on the loopback: it counts what it sends, can be slow, and misbehaves on request.

    python -m tests.support.range_server FOLDER --rate 100e6 --latency 0.05

prints its address, and serves until it is killed.
"""

from __future__ import annotations

import argparse
import email.utils
import hashlib
import re
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_CHUNK = 1 << 16


class Link:
    """A link of so many bytes a second, which all connections share. None is as fast as the machine."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._free_at = 0.0
        self._lock = threading.Lock()

    def carry(self, nbytes: int) -> None:
        """Wait until so many bytes have gone over the link."""
        if self._rate is None:
            return
        with self._lock:
            self._free_at = max(self._free_at, time.perf_counter()) + nbytes / self._rate
            pause = self._free_at - time.perf_counter()
        if pause > 0:
            time.sleep(pause)


class RangeServer(ThreadingHTTPServer):
    """Serves the files of a folder.

    Args:
        rate: bytes a second of the whole link.
        latency: seconds before each answer.

    Attributes:
        sent: bytes of content that were sent.
        requests: the path and the range of each request.
        etags: whether answers have an ETag.
        fault: called with the handler and the number of the request before it is answered; whoever returns
            True has answered.
        routes: answers that are no files, by path: the content.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder: Path, rate: float | None = None, latency: float = 0.0) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.latency, self.link = folder, latency, Link(rate)
        self.sent = 0
        self.requests: list[tuple[str, str]] = []
        self.etags = True
        self.fault: Callable[[Handler, int], bool] | None = None
        self.routes: dict[str, bytes] = {}
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> RangeServer:
        threading.Thread(target=partial(self.serve_forever, 0.05), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that hang up."""


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD, whole or in one range."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: RangeServer

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def _answer(self, with_body: bool) -> None:
        server = self.server
        with server.lock:
            server.requests.append((self.path, self.headers.get("Range", "")))
            number = len(server.requests)
        if server.latency:
            time.sleep(server.latency)
        if server.fault is not None and server.fault(self, number):
            return
        path = server.folder / self.path.partition("?")[0].lstrip("/")
        if self.path in server.routes:
            self.send(200, server.routes[self.path])
        elif path.is_file():
            self.send_file(path, with_body)
        else:
            self.send(404, b"there is no such file")

    def send_file(self, path: Path, with_body: bool = True) -> None:
        """Send a file, or the range of it that is asked for."""
        size = path.stat().st_size
        match = _RANGE.fullmatch(self.headers.get("Range", ""))
        start, stop = (int(match[1]), min(int(match[2]) + 1, size)) if match else (0, size)
        if match and start >= size:
            self.send(416, b"", {"Content-Range": f"bytes */{size}"})
            return
        headers = {"Content-Range": f"bytes {start}-{stop - 1}/{size}"} if match else {}
        self.begin(206 if match else 200, stop - start, {**headers, **self.validators(path)})
        if with_body:
            with path.open("rb") as file:
                file.seek(start)
                while start < stop:
                    start += self.send_body(file.read(min(_CHUNK, stop - start)))

    def validators(self, path: Path) -> dict[str, str]:
        """The headers that tell a version of a file from another."""
        status = path.stat()
        changed = {"Last-Modified": email.utils.formatdate(status.st_mtime, usegmt=True)}
        if not self.server.etags:
            return changed
        tag = hashlib.md5(f"{status.st_mtime_ns} {status.st_size}".encode()).hexdigest()
        return {"ETag": f'"{tag}"', **changed}

    def send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        """Send an answer that is not a file."""
        self.begin(status, len(content), headers or {})
        self.send_body(content)

    def begin(self, status: int, length: int, headers: dict[str, str]) -> None:
        """Send the head of an answer."""
        self.send_response(status)
        for name, value in {"Content-Length": str(length), **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def send_body(self, content: bytes) -> int:
        """Send a part of a body over the link."""
        self.server.link.carry(len(content))
        with self.server.lock:
            self.server.sent += len(content)
        self.wfile.write(content)
        return len(content)


def main() -> None:
    """Serve a folder until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rate", type=float, help="bytes a second")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds before each answer")
    options = parser.parse_args()
    server = RangeServer(options.folder, options.rate, options.latency)
    sys.stdout.write(server.url + "\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    main()
