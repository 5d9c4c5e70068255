"""A server that misbehaves: the right bytes, or an error that says so, and never wrong bytes."""

import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from range_server import Handler, RangeServer
from safetensors.torch import save_file
from state_dicts import as_bytes

from mecha_exp import merge, weighted_sum
from mecha_exp.checkpoint.remote import lookup, pieces
from mecha_exp.errors import CheckpointError

Fault = Callable[[Handler], bool]
"""Answers in place of the server; False where it does not."""
TENSORS = {"a": torch.arange(200_000.0), "b": torch.arange(100_000.0, 300_000.0)}


@pytest.fixture
def file(served: Path, monkeypatch) -> Path:
    """A model on the server that is read in many pieces."""
    monkeypatch.setattr(pieces, "PIECE", 1 << 18)
    path = served / "model.safetensors"
    save_file(TENSORS, path)
    return path


def read(server: RangeServer) -> dict[str, torch.Tensor]:
    return merge(weighted_sum(f"{server.url}/model.safetensors", TENSORS, alpha=0.0))


def is_right(merged: dict[str, torch.Tensor]) -> bool:
    return all(as_bytes(merged[key]) == as_bytes(TENSORS[key]) for key in TENSORS)


def with_faults(server: RangeServer, fault: Fault, every: int = 1) -> None:
    """Let a fault happen to each answer after the look-up, or to each second one, and so on."""

    def happens(handler: Handler, number: int) -> bool:
        return number > 2 and number % every == 0 and fault(handler)

    server.fault = happens


def wanted(handler: Handler) -> tuple[int, int]:
    """The first byte of the range that is asked for, and the one behind it."""
    first, last = handler.headers["Range"].removeprefix("bytes=").split("-")
    return int(first), int(last) + 1


def content_of(handler: Handler) -> bytes:
    return (handler.server.folder / "model.safetensors").read_bytes()


def validators(handler: Handler) -> dict[str, str]:
    return handler.validators(handler.server.folder / "model.safetensors")


def begin_range(handler: Handler, first: int, stop: int, **more: object) -> None:
    """Send the head of an answer with a range; `length` and `size` are told in place of the true ones."""
    size = more.get("size", len(content_of(handler)))
    span = {"Content-Range": f"bytes {first}-{stop - 1}/{size}"}
    handler.begin(206, int(str(more.get("length", stop - first))), {**span, **validators(handler)})


def cut(handler: Handler) -> bool:
    """Send a half, then hang up."""
    first, stop = wanted(handler)
    begin_range(handler, first, stop)
    handler.wfile.write(content_of(handler)[first : (first + stop) // 2])
    return hang_up(handler)


def hang_up(handler: Handler) -> bool:
    """Hang up without an answer."""
    handler.wfile.flush()
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True
    return True


def shorter(handler: Handler) -> bool:
    """Send the first 70,000 bytes of the range, and say so."""
    first, stop = wanted(handler)
    stop = min(stop, first + 70_000)
    begin_range(handler, first, stop)
    handler.send_body(content_of(handler)[first:stop])
    return True


def whole(handler: Handler) -> bool:
    """Ignore the range."""
    handler.send(200, content_of(handler), validators(handler))
    return True


def another_range(handler: Handler) -> bool:
    """Send as many bytes as are asked for, of another place."""
    first, stop = wanted(handler)
    begin_range(handler, first - 4, stop - 4)
    handler.send_body(content_of(handler)[first - 4 : stop - 4])
    return True


def no_range(handler: Handler) -> bool:
    """Send a part, and do not say which."""
    first, stop = wanted(handler)
    handler.begin(206, stop - first, validators(handler))
    handler.send_body(bytes(stop - first))
    return True


def another_size(handler: Handler) -> bool:
    """Say another size of the file than before."""
    first, stop = wanted(handler)
    begin_range(handler, first, stop, size=999_999_999)
    handler.send_body(bytes(stop - first))
    return True


def another_length(handler: Handler) -> bool:
    """Say a range, and a length of the answer that does not fit it."""
    first, stop = wanted(handler)
    begin_range(handler, first, stop, length=stop - first - 8)
    handler.send_body(bytes(stop - first - 8))
    return True


def too_few(handler: Handler) -> bool:
    """Say a length and send less of it, each time."""
    first, stop = wanted(handler)
    begin_range(handler, first, stop)
    return hang_up(handler)


def chunked(handler: Handler, first: int, stop: int, content: bytes) -> bool:
    """Say a range, and send a content without saying its length."""
    span = {"Content-Range": f"bytes {first}-{stop - 1}/{len(content_of(handler))}", **validators(handler)}
    handler.send_response(206)
    for name, value in {"Transfer-Encoding": "chunked", **span}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(content), content))
    return True


def more_than_said(handler: Handler) -> bool:
    """Send four bytes behind the range."""
    first, stop = wanted(handler)
    return chunked(handler, first, stop, content_of(handler)[first:stop] + b"more")


def end_early(handler: Handler) -> bool:
    """Send a half of the range as if it were all."""
    first, stop = wanted(handler)
    return chunked(handler, first, stop, content_of(handler)[first : (first + stop) // 2])


def compressed(handler: Handler) -> bool:
    """Send a compressed form."""
    handler.send(200, b"\x1f\x8b", {"Content-Encoding": "gzip", **validators(handler)})
    return True


def busy(status: int, wait: str = "") -> Fault:
    """Answer with a status and no content."""

    def answer(handler: Handler) -> bool:
        handler.send(status, b"later", {"Retry-After": wait} if wait else {})
        return True

    return answer


@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize("fault", [cut, end_early, hang_up, busy(503), busy(429), busy(500)])
def test_interruptions_give_the_right_bytes(fault, every, file, server):
    with_faults(server, fault, every)

    assert is_right(read(server))


def test_short_answers_give_the_right_bytes(file, server):
    with_faults(server, shorter)

    assert is_right(read(server))


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_is_left_alone_for_as_long_as_it_asks(status, file, server):
    moments = []

    def once(handler: Handler) -> bool:
        moments.append(time.monotonic())
        return len(moments) == 1 and busy(status, "1")(handler)

    with_faults(server, once)
    began = time.monotonic()

    assert is_right(read(server))
    assert time.monotonic() - began >= 1


@pytest.mark.parametrize("wait", ["3600", "Fri, 01 Jan 2100 00:00:00 GMT"])
def test_a_server_that_asks_for_an_hour_is_not_waited_for(wait, file, server):
    with_faults(server, busy(429, wait))

    with pytest.raises(
        CheckpointError, match=r"cannot be read now: the server answers 429 .* asks to wait [\d,]+ sec"
    ):
        read(server)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (hang_up, r"cannot be read, tried 6 times: "),
        (too_few, r"cannot be read, tried 6 times: "),
        (busy(503), r"cannot be read, tried 6 times: the server answers 503 Service Unavailable\."),
        (busy(403), r"no access, the server answers 403 Forbidden\. Log in to the store"),
        (busy(404), r"does not exist: the server answers 404"),
        (busy(418), r"cannot be read: the server answers 418"),
        (whole, r"can only be downloaded as a whole: its server does not send ranges of bytes\. Download it"),
        (another_range, r"asked for bytes \d+-\d+, the server sends \d+-\d+"),
        (no_range, r"the server does not say which bytes it sends"),
        (another_size, r"changed after it was looked up: it had 1,600,\d+ bytes, and has 999999999"),
        (another_length, r"says that it sends bytes \d+-\d+, in [\d,]+ bytes: it cannot be believed"),
        (more_than_said, r"the server sends more bytes than it says"),
        (compressed, r"sends a compressed form, of which ranges mean nothing"),
    ],
)
def test_what_cannot_be_right_is_an_error(fault, message, file, server):
    with_faults(server, fault)

    with pytest.raises(CheckpointError, match=message):
        read(server)


def test_a_file_that_is_replaced_under_a_merge_is_an_error(file, server):
    before, turn = file.stat().st_ino, threading.Lock()

    def replace(handler: Handler) -> bool:
        with turn:
            if file.stat().st_ino == before:  # once, however many requests there are
                save_file({key: -tensor for key, tensor in TENSORS.items()}, file.with_suffix(".new"))
                file.with_suffix(".new").replace(file)
        return False

    with_faults(server, replace)

    with pytest.raises(
        CheckpointError, match=r"changed after it was looked up: its version was ETag \S+, and is ETag"
    ):
        read(server)


def test_after_the_error_the_new_file_is_read(file, server):
    test_a_file_that_is_replaced_under_a_merge_is_an_error(file, server)
    server.fault = None

    assert torch.equal(read(server)["a"], -TENSORS["a"])


def test_a_file_that_is_replaced_after_its_last_byte_is_an_error_too(file, server):
    def replace_at_the_end(handler: Handler) -> bool:
        first, stop = wanted(handler)
        if (first, stop) == (0, 1):  # the question whether it is unchanged
            save_file({key: -tensor for key, tensor in TENSORS.items()}, file)
        return False

    with_faults(server, replace_at_the_end)

    with pytest.raises(CheckpointError, match=r"model\.safetensors changed while it was being read"):
        read(server)


def test_a_file_that_shrank_is_an_error(file, server):
    server.etags = False
    os.utime(file, (1, 1))

    def truncate(handler: Handler) -> bool:
        os.truncate(file, 500)
        os.utime(file, (1, 1))
        return False

    with_faults(server, truncate)

    with pytest.raises(
        CheckpointError, match=r"changed after it was looked up: byte [\d,]+ lies behind its end"
    ):
        read(server)


def test_a_time_of_change_tells_versions_apart_once_it_is_past(file, server):
    server.etags = False
    os.utime(file, (1_000_000_000, 1_000_000_000))
    assert is_right(read(server))

    os.utime(file, (2_000_000_000, 2_000_000_000))
    with pytest.raises(CheckpointError, match=r"gives neither an ETag nor a time of change that is past"):
        lookup.forget_lookups()
        read(server)


def test_a_weak_etag_is_not_enough(file, server, monkeypatch):
    monkeypatch.setattr(Handler, "validators", lambda *_: {"ETag": 'W/"same"'})

    with pytest.raises(CheckpointError, match=r"gives neither an ETag nor a time of change that is past"):
        read(server)


def test_a_server_without_ranges_is_refused_before_anything_is_read(file, server):
    server.fault = lambda handler, number: whole(handler)

    with pytest.raises(CheckpointError, match=r"can only be downloaded as a whole"):
        read(server)
    assert len(server.requests) == 1


def test_nothing_is_written_where_reading_fails(file, server, tmp_path):
    with_faults(server, another_range)

    with pytest.raises(CheckpointError, match="the server sends"):
        merge(
            weighted_sum(f"{server.url}/model.safetensors", TENSORS, alpha=0.0), tmp_path / "out.safetensors"
        )
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]
