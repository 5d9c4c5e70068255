"""A bucket of S3 on the loopback: a server of moto that counts what it is asked for."""

import time
from collections.abc import Iterator
from threading import Lock, Thread

import pytest


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
def bucket(s3_server, monkeypatch, tmp_path) -> Iterator[Counted]:
    """An empty bucket `results`; what the server is asked for."""
    import boto3
    import fsspec

    endpoint, counted = s3_server
    for name, value in (("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.chdir(tmp_path)
    fsspec.filesystem("s3").clear_instance_cache()
    client = boto3.client("s3", endpoint_url=endpoint)
    client.create_bucket(Bucket="results")
    counted.clear()
    yield counted
    while listed := client.list_objects_v2(Bucket="results").get("Contents"):
        for entry in listed:
            client.delete_object(Bucket="results", Key=entry["Key"])
    client.delete_bucket(Bucket="results")
    fsspec.filesystem("s3").clear_instance_cache()
