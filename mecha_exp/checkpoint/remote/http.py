"""Ranges of files over HTTP, through the session of fsspec; each answer is checked before it is believed."""

from __future__ import annotations

import email.utils
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from mecha_exp.checkpoint.remote import retries
from mecha_exp.checkpoint.remote.libraries import library
from mecha_exp.checkpoint.remote.pin import Interruption, Pin, cause_of, changed
from mecha_exp.errors import CheckpointError

_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")
_TRY_AGAIN = {408, 425, 429, 500, 502, 503, 504}
_CONNECT_SECONDS, _SILENT_SECONDS = 20.0, 30.0
"""aiohttp's own limits. They do not end each wait: `at_a_rate` does."""
_STRONG_AFTER = 1.0
"""Seconds after which a time of change tells versions apart, by RFC 9110, section 8.8.2.2."""


class NotThere(CheckpointError):
    """There is no such file."""


class HttpReader:
    """Reads ranges of URLs. Many threads share one session, which lives in the loop of fsspec.

    Args:
        headers: what is sent with each request, such as a login.
    """

    def __init__(self, scheme: str = "https", headers: Mapping[str, str] | None = None) -> None:
        library("aiohttp")
        self._fs: Any = library("fsspec").filesystem(scheme)
        self._headers = dict(headers or {})

    def look_up(self, url: str) -> Pin:
        """The size and version of a file.

        Raises:
            Interruption: the server asks to wait, or the connection broke.
            CheckpointError: there is no such file, or it cannot be read in ranges.
        """
        answer = self._run(self._head(url), lambda: 0)
        return Pin(url, _size(answer, url), _version(answer, url))

    def read_into(self, pin: Pin, start: int, view: memoryview) -> int:
        """Fill `view`; see `Store.read_into`."""
        received: list[int] = []
        count: int = self._run(self._range(pin, start, view, received), lambda: sum(received))
        return count

    def _run(self, coroutine: Any, moved: Callable[[], int]) -> Any:
        from fsspec.asyn import sync

        return sync(self._fs.loop, retries.at_a_rate, coroutine, moved)

    async def _head(self, url: str) -> Any:
        import aiohttp

        try:
            async with await self._get(url, "bytes=0-0") as answer:
                _require_usable(answer, url)
                return _Answer(answer.status, dict(answer.headers))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Interruption(cause_of(error)) from None
        except ValueError as error:
            raise CheckpointError(f"{url} is not an address that can be read: {cause_of(error)}.") from None

    async def _range(self, pin: Pin, start: int, view: memoryview, parts: list[int]) -> int:
        """Fill `view`; the sizes of what has come are appended to `parts`."""
        import aiohttp

        url, received = pin.source or pin.address, 0
        try:
            async with await self._get(url, f"bytes={start}-{start + len(view) - 1}") as answer:
                _require_usable(answer, pin.address)
                expected = _expected(answer, pin, start, len(view))
                async for chunk in answer.content.iter_any():
                    if received + len(chunk) > expected:
                        raise CheckpointError(f"{pin.address}: the server sends more bytes than it says.")
                    view[received : received + len(chunk)] = chunk
                    received += len(chunk)
                    parts.append(len(chunk))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Interruption(cause_of(error), received) from None
        if received < expected:
            raise Interruption(f"the answer ended {expected - received:,} bytes too early", received)
        return received

    async def _get(self, url: str, byte_range: str) -> Any:
        import aiohttp

        session = await self._fs.set_session()
        limits = aiohttp.ClientTimeout(None, sock_connect=_CONNECT_SECONDS, sock_read=_SILENT_SECONDS)
        request = {"timeout": limits, **self._fs.kwargs}
        own = {**request.pop("headers", {}), **self._headers}
        headers = {**own, "Range": byte_range, "Accept-Encoding": "identity"}
        return session.get(self._fs.encode_url(url), headers=headers, **request)


class _Answer:
    """The status and the headers of an answer, whose names are in lower case."""

    def __init__(self, status: int, headers: Mapping[str, str]) -> None:
        self.status, self.headers = status, {name.lower(): value for name, value in headers.items()}


def _require_usable(answer: Any, address: str) -> None:
    """Raise unless the answer has bytes of the file."""
    status = answer.status
    if status in _TRY_AGAIN:
        cause = f"the server answers {status} {answer.reason}"
        raise Interruption(cause, wait=_seconds(answer.headers.get("Retry-After")))
    if status in (401, 403, 407):
        raise CheckpointError(
            f"{address}: no access, the server answers {status} {answer.reason}. Log in to the store as "
            "its own tools do, or check the rights."
        )
    if status in (404, 410):
        raise NotThere(f"{address} does not exist: the server answers {status} {answer.reason}.")
    if status not in (200, 206, 416):
        raise CheckpointError(f"{address} cannot be read: the server answers {status} {answer.reason}.")
    if answer.headers.get("Content-Encoding", "identity") != "identity":
        raise CheckpointError(f"{address}: the server sends a compressed form, of which ranges mean nothing.")


def _expected(answer: Any, pin: Pin, start: int, count: int) -> int:
    """How many bytes an answer holds: all of `count`, or the first of them."""
    if answer.status == 416:
        raise changed(pin, f"byte {start:,} lies behind its end")
    if pin.version and (now := _version_or_none(_Answer(answer.status, answer.headers))) != pin.version:
        raise changed(pin, f"its version was {pin.version}, and is {now or 'not told'}")
    if answer.status == 200:
        if start or count != pin.size or answer.content_length not in (None, pin.size):
            raise _ignores_ranges(pin.address)
        return count
    match = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
    if match is None or match[1] is None:
        raise CheckpointError(f"{pin.address}: the server does not say which bytes it sends.")
    first, last = int(match[1]), int(match[2])
    if match[3] not in ("*", str(pin.size)):
        raise changed(pin, f"it had {pin.size:,} bytes, and has {match[3]}")
    if first != start or not start <= last < start + count:
        byte_range = f"bytes {start}-{start + count - 1}"
        raise CheckpointError(f"{pin.address}: asked for {byte_range}, the server sends {first}-{last}.")
    if answer.content_length not in (None, last - first + 1):
        raise CheckpointError(
            f"{pin.address}: the server says that it sends bytes {first}-{last}, in "
            f"{answer.content_length:,} bytes: it cannot be believed."
        )
    return last - first + 1


def _ignores_ranges(address: str) -> CheckpointError:
    return CheckpointError(
        f"{address} can only be downloaded as a whole: its server does not send ranges of bytes. Download "
        "it, and name the file."
    )


def _size(answer: _Answer, url: str) -> int:
    match = _CONTENT_RANGE.fullmatch(answer.headers.get("content-range", ""))
    if answer.status == 416 and match is not None and match[3] == "0":
        raise CheckpointError(f"{url} is empty.")
    if answer.status != 206 or match is None or match[3] == "*":
        raise _ignores_ranges(url)
    return int(match[3])


def _version(answer: _Answer, url: str) -> str:
    version = _version_or_none(answer)
    if version is None:
        raise CheckpointError(
            f"{url}: its server gives neither an ETag nor a time of change that is past, so a change under a "
            "merge would not be noticed. Download it, and name the file."
        )
    return version


def _version_or_none(answer: _Answer) -> str | None:
    """A strong validator of an answer, by RFC 9110, section 8.8; None where it has none."""
    etag = answer.headers.get("etag", "")
    if etag and not etag.startswith("W/"):
        return f"ETag {etag}"
    changed_at, now = (_time(answer.headers.get(name)) for name in ("last-modified", "date"))
    if changed_at is not None and now is not None and now - changed_at >= _STRONG_AFTER:
        return f"Last-Modified {answer.headers['last-modified']}"
    return None


def _seconds(text: str | None) -> float | None:
    """The seconds of a Retry-After, which is a number or a date."""
    if text and text.strip().isdigit():
        return float(text)
    moment = _time(text)
    return max(0.0, moment - time.time()) if moment is not None else None


def _time(text: str | None) -> float | None:
    try:
        return email.utils.parsedate_to_datetime(text).timestamp() if text else None
    except ValueError:
        return None
