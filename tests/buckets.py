"""A bucket of S3 on the loopback: a server of moto that counts what it is asked for."""

import time
from collections.abc import Iterator
from threading import Lock, Thread
from urllib.request import Request, urlopen

import pytest

from mecha_exp.checkpoint.remote import stores


class Counted:
    """An application of WSGI with what it was asked for, each answer a little late."""

    def __init__(self, application):
        self._application, self._lock = application, Lock()
        self.clear()

    def clear(self):
        self.requests, self.at_once, self._now = [], 0, 0

    def __call__(self, environ, start):
        with self._lock:
            self._now += 1
            self.at_once = max(self.at_once, self._now)
            self.requests.append((environ["REQUEST_METHOD"], environ["PATH_INFO"]))
        time.sleep(0.02)
        try:
            return self._application(environ, start)
        finally:
            with self._lock:
                self._now -= 1

    def count(self, method: str) -> int:
        return sum(asked == method for asked, _ in self.requests)


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

    endpoint, _ = s3_server
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
