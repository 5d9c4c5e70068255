"""A bucket of S3 on the loopback: a server of moto that counts what it is asked for."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from threading import Lock, Thread
from urllib.request import Request, urlopen

import pytest

from mecha_exp.checkpoint.remote import stores

Answer = tuple[str, dict[str, str], bytes]
"""The status, headers and body of an answer."""


class Counted:
    """An application of WSGI with what it was asked for, each answer a little late.

    Attributes:
        fault: called with the method, the path and the right answer; returns the answer that is sent.
    """

    def __init__(self, application):
        self._application, self._lock = application, Lock()
        self.clear()

    def clear(self):
        self.requests, self.at_once, self._now = [], 0, 0
        self.fault: Callable[[str, str, Answer], Answer] | None = None

    def __call__(self, environ, start):
        with self._lock:
            self._now += 1
            self.at_once = max(self.at_once, self._now)
            self.requests.append((environ["REQUEST_METHOD"], environ["PATH_INFO"]))
        time.sleep(0.02)
        try:
            if self.fault is None:
                return self._application(environ, start)
            return self._faulty(environ, start)
        finally:
            with self._lock:
                self._now -= 1

    def _faulty(self, environ, start):
        head = []
        parts = self._application(environ, lambda status, headers, error=None: head.append((status, headers)))
        answer = head[0][0], dict(head[0][1]), b"".join(parts)
        status, headers, body = self.fault(environ["REQUEST_METHOD"], environ["PATH_INFO"], answer)
        start(status, [*headers.items()])
        return [body]

    def count(self, method: str) -> int:
        return sum(asked == method for asked, _ in self.requests)


def busy(answer: Answer) -> Answer:
    """An answer that the store has too much to do."""
    body = b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"
    return "503 Slow Down", {"Content-Length": str(len(body)), "Content-Type": "application/xml"}, body


def cut(answer: Answer) -> Answer:
    """An answer whose connection ends in its middle."""
    status, headers, body = answer
    return status, {**headers, "Content-Length": str(len(body))}, body[: len(body) // 2]


def short(answer: Answer) -> Answer:
    """An answer that lacks its second half, and says so nowhere."""
    status, headers, body = answer
    half = body[: len(body) // 2]
    kept = {name: value for name, value in headers.items() if "checksum" not in name.lower()}
    return status, {**kept, "Content-Length": str(len(half))}, half


def at_first(fault: Callable[[Answer], Answer], times: int, *methods: str) -> Callable[..., Answer]:
    """A fault at the first requests for each path by these methods."""
    seen: Counter[tuple[str, str]] = Counter()

    def answered(method: str, path: str, answer: Answer) -> Answer:
        if method not in methods:
            return answer
        seen[method, path] += 1
        return fault(answer) if seen[method, path] <= times else answer

    return answered


@pytest.fixture(scope="session")
def s3_server() -> Iterator[tuple[str, Counted]]:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    counted = Counted(DomainDispatcherApplication(create_backend_app))
    web = make_server("127.0.0.1", 0, counted, threaded=True)
    Thread(target=web.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{web.server_port}", counted
    web.shutdown()


@pytest.fixture
def s3_client(s3_server, monkeypatch):
    """The client of boto3 for a server without a bucket; s3fs asks the same server.

    The servers of moto in a process share what they hold, so what an earlier test left is removed first.
    """
    import boto3
    import fsspec

    endpoint, counted = s3_server
    counted.clear()
    for name, value in (("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    urlopen(Request(f"{endpoint}/moto-api/reset", method="POST")).close()
    stores.store_of.cache_clear()
    fsspec.filesystem("s3").clear_instance_cache()
    yield boto3.client("s3", endpoint_url=endpoint)
    fsspec.filesystem("s3").clear_instance_cache()


@pytest.fixture
def bucket(s3_server, s3_client, monkeypatch, tmp_path) -> Counted:
    """An empty bucket `results`; what the server is asked for."""
    monkeypatch.chdir(tmp_path)
    s3_client.create_bucket(Bucket="results")
    _, counted = s3_server
    counted.clear()
    return counted
