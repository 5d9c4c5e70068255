"""The file systems of fsspec as stores: S3, Google Cloud Storage, and any other."""

from __future__ import annotations

import base64
import posixpath
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from mecha_exp.checkpoint.remote.address import scheme_of
from mecha_exp.checkpoint.remote.libraries import library
from mecha_exp.checkpoint.remote.pin import Interruption, Pin, cause_of, changed
from mecha_exp.checkpoint.remote.retries import RATE_SECONDS, at_a_rate, at_once, seconds_for
from mecha_exp.checkpoint.safetensors.header import INDEX
from mecha_exp.errors import CheckpointError
from mecha_exp.system.progress import within

_VERSION_FIELDS = (
    *("etag", "generation", "md5hash", "version_id", "mtime", "lastmodified", "last_modified"),
    *("modified", "updated", "created"),
)
_LISTING_SECONDS = 300.0
_PART = 1 << 20
_GONE = {"NoSuchKey", "NoSuchBucket", "NotFound", "404"}
_CHANGED = {"PreconditionFailed", "412", "InvalidRange", "416"}


class AnyStore:
    """Any file system of fsspec, by its own settings and credentials."""

    missing = "it is gone"
    """What happened to an object that a read does not find."""

    def files(self, address: str) -> dict[str, Pin]:
        try:
            pins = within(_LISTING_SECONDS, partial(self._files, address))
        except CheckpointError:
            raise
        except Exception as error:  # each file system has errors of its own
            raise CheckpointError(f"{address} cannot be read: {cause_of(error)}.") from None
        if not pins:
            raise CheckpointError(f"{address} does not exist, or is empty.")
        return pins

    def _files(self, address: str) -> dict[str, Pin]:
        fs, path = opened(address)
        fs.invalidate_cache()
        if fs.isfile(path) and not path.endswith(INDEX):
            return {"": self.pin(address)}
        folder = address.rpartition("/")[0] if fs.isfile(path) else address.rstrip("/")
        root = opened(folder)[1]
        names = [posixpath.relpath(file, root) for file in fs.find(root, maxdepth=2)]
        return dict(at_once(lambda name: self.pin(f"{folder}/{name}"), names))

    def pin(self, address: str) -> Pin:
        """The pin of a file. Raises what the file system raises."""
        fs, path = opened(address)
        info = fs.info(path)
        return Pin(address, info["size"], _version(info, address))

    def read_into(self, pin: Pin, start: int, view: memoryview) -> int:
        try:
            fs, path = opened(pin.address)
            content = within(
                seconds_for(len(view)),
                lambda: fs.cat_file(path, start=start, end=start + len(view), **self._state(pin)),
            )
        except FileNotFoundError:
            raise changed(pin, self.missing) from None
        except Exception as error:
            raise Interruption(cause_of(error)) from None
        return _fill(view, content, pin)

    def version(self, pin: Pin) -> str:
        try:
            opened(pin.address)[0].invalidate_cache()
            return within(RATE_SECONDS, partial(self.pin, pin.address)).version
        except FileNotFoundError:
            raise changed(pin, "it is gone") from None
        except CheckpointError:
            raise
        except Exception as error:
            raise Interruption(cause_of(error)) from None

    def _state(self, pin: Pin) -> dict[str, str]:
        """What a read says of the state of the file that it wants; file systems in general take nothing."""
        return {}


class GoogleStore(AnyStore):
    """Google Cloud Storage: a read asks for the generation that was looked up, whose bytes never change.

    Source: https://cloud.google.com/storage/docs/metadata#generation-number.
    """

    missing = "it no longer has the generation that it had"

    def __init__(self) -> None:
        library("gcsfs")

    def pin(self, address: str) -> Pin:
        fs, path = opened(address)
        info = fs.info(path)
        return Pin(address, info["size"], f"generation {info['generation']}")

    def _state(self, pin: Pin) -> dict[str, str]:
        return {"generation": pin.version.removeprefix("generation ")}


class S3Store(AnyStore):
    """S3, with its checksums, and with reads that fail where the object is no longer the same."""

    def __init__(self) -> None:
        library("s3fs")

    def pin(self, address: str) -> Pin:
        fs, place = object_at(address)
        head = fs.call_s3("head_object", **place, ChecksumMode="ENABLED")
        checksum = head.get("ChecksumSHA256", "")
        whole = checksum and "-" not in checksum  # else of the parts of an upload
        sha256 = base64.b64decode(checksum).hex() if whole else None
        return Pin(address, head["ContentLength"], f"ETag {head['ETag']}", sha256)

    def read_into(self, pin: Pin, start: int, view: memoryview) -> int:
        from botocore.exceptions import ClientError
        from fsspec.asyn import sync

        fs, place = object_at(pin.address)
        etag, byte_range = pin.version.removeprefix("ETag "), f"bytes={start}-{start + len(view) - 1}"
        parts: list[bytes] = []
        call = _object(fs, parts, **place, Range=byte_range, IfMatch=etag)
        try:
            answer = sync(fs.loop, at_a_rate, call, lambda: sum(map(len, parts)))
            content = b"".join(parts)
        except Interruption as slow:
            raise Interruption(slow.cause) from None  # what has come is not in `view`
        except (ClientError, OSError) as error:
            raise _of_s3(pin, error) from None
        except Exception as error:
            raise Interruption(cause_of(error)) from None
        _require_range(pin, answer, start, len(content))
        return _fill(view, content, pin)


def opened(address: str) -> tuple[Any, str]:
    """The file system of an address, which fsspec keeps open, and the path in it.

    Raises:
        CheckpointError: there is no such file system, or its package is not installed.
    """
    from fsspec.core import url_to_fs

    try:
        fs, path = url_to_fs(address)
    except ValueError:
        raise CheckpointError(
            f"{scheme_of(address)}://: there is no such store. hf, s3, gs, http, https and those of fsspec "
            "are read."
        ) from None
    except ImportError as error:
        raise CheckpointError(f"{scheme_of(address)}:// needs another package: {cause_of(error)}.") from None
    return fs, path


def object_at(address: str) -> tuple[Any, dict[str, str]]:
    """The file system of an object of S3, and its place for the calls of S3."""
    fs, path = opened(address)
    bucket, key, version = fs.split_path(path)
    return fs, {"Bucket": bucket, "Key": key, **({"VersionId": version} if version else {})}


async def _object(fs: Any, parts: list[bytes], **request: Any) -> Mapping[str, Any]:
    """Ask for an object, and append its content to `parts`; returns what S3 says of it."""
    answer: Mapping[str, Any] = await fs._call_s3("get_object", **request)
    body = answer["Body"]
    async with body:  # which gives the connection back, also after an error
        while part := await body.read(_PART):
            parts.append(part)
    return answer


def _fill(view: memoryview, content: bytes, pin: Pin) -> int:
    if len(content) > len(view):
        raise CheckpointError(f"{pin.address}: the store sends more bytes than it was asked for.")
    view[: len(content)] = content
    return len(content)


def _of_s3(pin: Pin, error: Exception) -> Exception:
    """The error for a range that S3 did not give."""
    code = str(getattr(error, "response", {}).get("Error", {}).get("Code", ""))
    cause = error.__cause__ or error
    code = code or str(getattr(cause, "response", {}).get("Error", {}).get("Code", ""))
    if code in _CHANGED:
        return changed(pin, "it no longer has the ETag that it had")
    if code in _GONE or isinstance(error, FileNotFoundError):
        return changed(pin, "it is gone")
    if isinstance(error, PermissionError):
        return CheckpointError(f"{pin.address}: no access: {cause_of(error)}.")
    return Interruption(cause_of(error))


def _require_range(pin: Pin, answer: Mapping[str, Any], start: int, count: int) -> None:
    sent = answer.get("ContentRange") or f"bytes 0-{count - 1}/{pin.size}"
    match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", sent)
    if match is not None and int(match[1]) == start and int(match[2]) >= start + count:
        raise Interruption(f"the answer has {count:,} bytes of those that it names, {sent}")
    if match is None or int(match[1]) != start or int(match[2]) != start + count - 1:
        raise CheckpointError(f"{pin.address}: asked for bytes from {start} on, the store sends {sent}.")
    if int(match[3]) != pin.size:
        raise changed(pin, f"it had {pin.size:,} bytes, and has {match[3]}")


def _version(info: Mapping[str, Any], address: str) -> str:
    """What a file system says of the state of a file."""
    known = {name.lower(): value for name, value in info.items()}
    for field in _VERSION_FIELDS:
        if known.get(field) is not None:
            return f"{field} {known[field]}"
    raise CheckpointError(
        f"{address}: the store tells neither a version nor a time of change, so a change under a merge would "
        "not be noticed. Download it, and name the file."
    )
