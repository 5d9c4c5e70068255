"""Nothing waits for ever: each wait has an end that counts progress, and a sentence there.

The places that wait without a limit of their own are found in the source; each says what ends it.
"""

import ast
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from range_server import Handler, RangeServer
from safetensors.torch import save_file

import mecha_exp
from mecha_exp import merge, weighted_sum
from mecha_exp.checkpoint.remote import file_systems, lookup, pieces, retries
from mecha_exp.checkpoint.transaction import lock
from mecha_exp.checkpoint.transaction.lock import TargetLock, exclusive
from mecha_exp.checkpoint.upload import multipart
from mecha_exp.errors import CheckpointError, EvaluationError, TrackingError
from mecha_exp.evaluation.isolation import process
from mecha_exp.lab import bucket
from mecha_exp.system.progress import within
from mecha_exp.tracking import Store, mlflow_client

PACKAGE = Path(mecha_exp.__file__).parent
OWN_THREAD = "a thread of this process, which computes or reads files"
READ = "a thread of this process that reads: HTTP, buckets and stores have the limits below"
SENT = "a thread that sends, with limits of its own below"
KILLED = "a process that was killed before"
WAITS = {
    "app/measurements.py:_measure": "an evaluator: evaluator.timeout is its limit, which a user sets",
    "app/tracking.py:__exit__": SENT,
    "app/tracking.py:log_runs": SENT,
    "app/workbench.py:merge": OWN_THREAD,
    "checkpoint/remote/lookup.py:_write": READ,
    "checkpoint/remote/pieces.py:read_into": READ,
    "checkpoint/remote/retries.py:at_a_rate": "a task that has ended",
    "checkpoint/safetensors/writer.py:commit": OWN_THREAD,
    "checkpoint/safetensors/writer.py:_close": OWN_THREAD,
    "checkpoint/transaction/heartbeat.py:heartbeat": OWN_THREAD,
    "checkpoint/transaction/running_hash.py:stop": OWN_THREAD,
    "checkpoint/transaction/running_hash.py:_wait_beyond": OWN_THREAD,
    "checkpoint/upload/multipart.py:complete": SENT,
    "checkpoint/upload/multipart.py:_add": SENT,
    "cli/ui.py:serve": "the user, who ends the server",
    "cli/ui.py:_end": KILLED,
    "cluster/processes.py:_reap": KILLED,
    "engine/runtime/scheduler.py:_take": OWN_THREAD,
    "evaluation/isolation/pool.py:_idle_worker": "an evaluator: evaluator.timeout is its limit",
    "evaluation/isolation/process.py:close": KILLED,
    "evaluation/transfers.py:wait": OWN_THREAD,
    "evaluation/transfers.py:moved": OWN_THREAD,
    "evaluation/transfers.py:expect": OWN_THREAD,
    "lab/bucket.py:flush": SENT,
    "sources/copier.py:write_source": READ,
    "system/progress.py:within": "a future that is done",
}
"""What ends each wait without a limit."""


def waits() -> set[str]:
    """The functions that wait for a thread, a process or a lock and say no limit, by file and name."""

    def is_endless(call: ast.Call) -> bool:
        function, named = ast.unparse(call.func), {word.arg for word in call.keywords}
        name = function.rpartition(".")[2]
        if function.startswith("subprocess.") and name in ("run", "call", "check_call", "check_output"):
            return "timeout" not in named
        is_wait = name in ("result", "wait", "join", "acquire", "communicate") and not call.args
        return ("." in function and is_wait and not named) or (name == "wait_for" and "timeout" not in named)

    def walk(node: ast.AST, around: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            if isinstance(child, ast.Call) and is_endless(child):
                yield around
            yield from walk(child, child.name if is_function else around)  # type: ignore[attr-defined]

    return {
        f"{path.relative_to(PACKAGE).as_posix()}:{name}"
        for path in PACKAGE.rglob("*.py")
        for name in walk(ast.parse(path.read_text(encoding="utf-8")), "")
    }


def test_each_wait_without_a_limit_says_what_ends_it() -> None:
    assert waits() == WAITS.keys(), "give it a limit and a sentence, or say what ends it"


# --- remote reads -----------------------------------------------------------------------------------------

TENSORS = {"a": torch.arange(300_000.0)}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeServer]:
    """A server of a model, of which nothing is kept."""
    monkeypatch.setenv("MECHA_EXP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(retries, "FIRST_PAUSE", 0.001)
    (tmp_path / "served").mkdir()
    save_file(TENSORS, tmp_path / "served" / "model.safetensors")
    lookup.forget_lookups()
    with RangeServer(tmp_path / "served") as server:
        yield server


def read(server: RangeServer) -> torch.Tensor:
    return merge(weighted_sum(f"{server.url}/model.safetensors", TENSORS, alpha=0.0))["a"]


def answer(handler: Handler, *headers: str) -> bytes:
    """Send the head of an answer; returns its content."""
    first, last = map(int, handler.headers["Range"].removeprefix("bytes=").split("-"))
    content = (handler.server.folder / "model.safetensors").read_bytes()
    tags = handler.validators(handler.server.folder / "model.safetensors")
    span = f"Content-Range: bytes {first}-{last}/{len(content)}"
    lines = [f"{name}: {value}" for name, value in tags.items()]
    handler.wfile.write("\r\n".join(["HTTP/1.1 206 Partial", span, *lines, *headers, "", ""]).encode())
    return content[first : last + 1]


def drips(handler: Handler) -> bool:
    """Send one byte after the other, for a minute."""
    content = answer(handler, f"Content-Length: {length(handler)}")
    handler.close_connection = True
    try:
        for byte in content[:600]:
            handler.wfile.write(bytes([byte]))
            handler.wfile.flush()
            time.sleep(0.1)
    except OSError:  # the client has gone
        pass
    return True


def breaks_its_chunks(handler: Handler) -> bool:
    """Send a chunk whose length is none, and nothing more."""
    handler.close_connection = True
    content = answer(handler, "Transfer-Encoding: chunked")
    handler.wfile.write(b"10\r\n" + content[:16] + b"\r\nzz")
    handler.wfile.flush()
    handler.connection.shutdown(socket.SHUT_WR)
    return True


def length(handler: Handler) -> int:
    first, last = map(int, handler.headers["Range"].removeprefix("bytes=").split("-"))
    return last - first + 1


@pytest.mark.parametrize("fault", [drips, breaks_its_chunks])
def test_a_server_that_sends_next_to_nothing_is_given_up(
    fault: Callable[[Handler], bool], model: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "RATE_SECONDS", 0.5)
    model.fault = lambda handler, number: number > 2 and fault(handler)

    with pytest.raises(CheckpointError, match=r"cannot be read, tried 6 times: "):
        read(model)


def test_a_server_that_drips_once_is_asked_again(model: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "RATE_SECONDS", 0.5)
    model.fault = lambda handler, number: number == 3 and drips(handler)

    assert torch.equal(read(model), TENSORS["a"])


def test_a_download_that_goes_on_is_not_given_up_after_six_hiccups(
    model: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The count of tries begins anew where bytes have come."""
    monkeypatch.setattr(pieces, "PIECE", 1 << 21)
    hiccups = []

    def hiccup(handler: Handler, number: int) -> bool:
        if number <= 2 or length(handler) <= 1 << 16:
            return False
        hiccups.append(number)
        content = answer(handler, f"Content-Length: {length(handler)}")
        handler.wfile.write(content[: 1 << 16])
        handler.wfile.flush()
        handler.close_connection = True
        return True

    model.fault = hiccup

    assert torch.equal(read(model), TENSORS["a"])
    assert len(hiccups) > 2 * retries.TRIES


def test_a_store_of_fsspec_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    memory, ended = fsspec.filesystem("memory"), threading.Event()
    memory.pipe("/waits/a.safetensors", b"x" * 100)
    monkeypatch.setattr(file_systems, "seconds_for", lambda nbytes: 0.1)
    monkeypatch.setattr(type(memory), "cat_file", lambda *_, **__: ended.wait(60))
    monkeypatch.setattr(retries, "FIRST_PAUSE", 0.001)
    store = file_systems.AnyStore()
    (pin,) = store.files("memory://waits/a.safetensors").values()

    with pytest.raises(CheckpointError, match="tried 6 times: no answer in 0 seconds"):
        retries.read_all(store, pin, 0, memoryview(bytearray(100)))
    ended.set()


def test_an_upload_that_is_not_taken_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    class Silent:
        """A file system whose store takes nothing."""

        def call_s3(self, name: str, **_: object) -> dict[str, str]:
            if name == "upload_part":
                ended.wait(60)
            return {"UploadId": "1"}

    monkeypatch.setattr(multipart, "library", lambda _: None)
    monkeypatch.setattr(multipart, "object_at", lambda _: (Silent(), {}))
    monkeypatch.setattr(multipart, "seconds_to_send", lambda nbytes: 0.1)
    upload = multipart.MultipartUpload("s3://b/a.safetensors", 10)
    upload.write(0, memoryview(bytes(10)))

    with pytest.raises(CheckpointError, match=r"a\.safetensors cannot be written: no answer in 0 seconds"):
        upload.complete()
    upload.abort()
    ended.set()


def test_a_store_of_results_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    memory, ended = fsspec.filesystem("memory"), threading.Event()
    monkeypatch.setattr(bucket, "_SECONDS", 0.1)
    monkeypatch.setattr(type(memory), "find", lambda *_, **__: ended.wait(60))

    with pytest.raises(mecha_exp.errors.StoreError, match="cannot be listed: no answer in 0 seconds"):
        bucket.open_store("memory://results")
    ended.set()


# --- servers, locks and processes -------------------------------------------------------------------------


@contextmanager
def dripping(port: int) -> Iterator[None]:
    """A server that begins each answer and goes on byte by byte; it is in good health."""
    listening = socket.create_server(("127.0.0.1", port))
    ended = threading.Event()

    def serve(connection: socket.socket) -> None:
        with connection:
            if b"/health" in connection.recv(1 << 16):
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nOK")
                return
            connection.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            while not ended.wait(0.1):
                try:
                    connection.sendall(b"x")
                except OSError:
                    return

    def accept() -> None:
        while not ended.is_set():
            try:
                threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()
            except OSError:
                return

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        listening.close()


def test_a_server_of_mlflow_that_drips_is_given_up(free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_client, "CALL_SECONDS", 1)

    with (
        dripping(free_port),
        pytest.raises(TrackingError, match=r"cannot be used: no answer in 1 seconds\."),
    ):
        Store(f"http://127.0.0.1:{free_port}", "mecha_exp").delete_abandoned()


def test_a_lock_whose_holder_does_nothing_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "STUCK_SECONDS", 0.3)
    held = TargetLock(tmp_path / "study.db")
    waited = r"no progress in \d+ seconds: .*study\.db is being written by process \d+ on"

    with pytest.raises(CheckpointError, match=waited), exclusive(tmp_path / "study.db"):
        pass
    held.release()


def test_a_lock_whose_holder_gives_signs_of_life_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "STUCK_SECONDS", 0.3)
    held = TargetLock(tmp_path / "study.db")
    threading.Timer(1.0, held.release).start()

    with exclusive(tmp_path / "study.db", time.monotonic_ns):
        assert held._file is None


def test_locks_that_go_from_one_to_the_next_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each turn is progress, though all of them take longer than the limit."""
    monkeypatch.setattr(lock, "STUCK_SECONDS", 0.5)
    turns = threading.Thread(target=lambda: [turn(tmp_path / "study.db") for _ in range(5)])
    turns.start()
    time.sleep(0.05)

    with exclusive(tmp_path / "study.db"):
        pass
    turns.join()


def turn(target: Path) -> None:
    held = TargetLock(target)
    time.sleep(0.2)
    held.release()
    time.sleep(0.001)


def test_a_lock_of_a_database_is_not_waited_for_for_ever(
    postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sqlalchemy = pytest.importorskip("sqlalchemy")
    from mecha_exp.app.search import locks

    monkeypatch.setattr(locks, "STUCK_SECONDS", 2 * locks._NOTICE_SECONDS)
    monkeypatch.setattr(locks.PostgresLocks, "_preparation", "SET lock_timeout = 200")
    made = [
        locks.PostgresLocks(sqlalchemy.create_engine(postgres, poolclass=sqlalchemy.NullPool), "s")
        for _ in range(2)
    ]

    with (
        made[0].exclusive(),
        pytest.raises(TimeoutError, match=r"session \d+ of the database has had the lock of the study 's'"),
        made[1].exclusive(),
    ):
        pass
    for each in made:
        each.leave()


def test_a_process_for_evaluators_that_does_not_start_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow.py").write_text("import time\nimport mecha_exp\ntime.sleep(60)\n")
    monkeypatch.setattr(process, "START_SECONDS", 0.5)
    started = process.EvaluationProcess([str(tmp_path / "slow.py")])

    with pytest.raises(EvaluationError, match=r"was not ready after 0\.5 s: see above"):
        started._started()


def test_a_call_gives_what_it_gives_and_raises_what_it_raises() -> None:
    assert within(10, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        within(10, lambda: 1 // 0)
