"""The header of a safetensors file: checked when it is read, deterministic when it is written.

A file is: 8 bytes (little endian) with the length of the header; the header, a JSON object of dtype, shape
and data_offsets per tensor; then the data, which the tensors cover without holes, overlaps or a rest.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from mecha_exp.checkpoint.dtypes import Layout, number_format, stored_bytes
from mecha_exp.checkpoint.positional import PositionalFile, ReadableFile
from mecha_exp.checkpoint.safetensors.json_reader import AGAIN, MAX_TEXT, EntryReader, require_short
from mecha_exp.errors import CheckpointError, did_you_mean, prefixed

SUFFIX = ".safetensors"
INDEX = ".index.json"
"""The suffix of an index of shards."""

MAX_INDEX_BYTES = 100_000_000
MAX_HEADER_BYTES = 100_000_000  # the limit of the format itself
MAX_DIMENSIONS = 64  # what torch can index; it also bounds the work that a hostile shape causes
MAX_TENSORS = 1 << 18  # far more than any model has; a header of 100 MB could name two million
ALIGNMENT = 64  # of the first data byte in the files we write: a cache line

_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_text = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_LOOKALIKES = {
    b"PK": "a pickle checkpoint (.ckpt, .pt), not safetensors: convert it to safetensors first",
    b"\x80": "a pickle checkpoint (.ckpt, .pt), not safetensors: convert it to safetensors first",
    b"version https://git-lfs": "a git-lfs pointer, not the model: run 'git lfs pull'",
    b"GGUF": "a GGUF file, not safetensors",
    b"<": "a web page, not a model: the download needs another link, or a login",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The dtype, shape and place of a tensor in its file. `offset` is absolute, in bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @classmethod
    def made(cls, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
        """The info of a tensor that is computed, and lies in no file."""
        return cls(dtype, shape, 0, stored_bytes(dtype, shape))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    """A checked header. `tensors` are in the order of their data in the file."""

    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    data_start: int
    file_size: int


_open_headers: WeakValueDictionary[tuple[bytes, int], Header] = WeakValueDictionary()
"""The headers of open files by their hash and the size of the file: merged models mostly share one."""


def begins_as_safetensors(start: bytes | bytearray) -> bool:
    """Whether the first bytes of a file may be those of a safetensors file: a length, then a JSON object."""
    return start[_LENGTH_BYTES : _LENGTH_BYTES + 1] == b"{"


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read and check the header of the safetensors file at `path`. The data are not read.

    Raises:
        CheckpointError: the file is not complete and valid, or its header exceeds the 100 MB of the format.
    """
    with open_regular(path) as file:
        return parse_header(file)


def open_regular(path: str | os.PathLike[str]) -> PositionalFile:
    """Open a regular file for reading. Anything else is refused before it is opened: a pipe would block."""
    try:
        _require_regular(path, Path(path).stat())
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)  # in case it has become a pipe since
        file = PositionalFile(path, flags)
    except OSError as error:
        raise cannot_open(Path(path), error) from None
    except ValueError as error:  # a NUL or a lone surrogate in the name
        raise CheckpointError(f"{os.fspath(path)!r} is not a file name: {error}.") from None
    try:
        _require_regular(path, file.stat())
    except BaseException:
        file.close()
        raise
    return file


def parse_header(file: ReadableFile) -> Header:
    """Read and check the header of an open file."""
    file_size = file.size
    with prefixed(f"{file.name}: ", CheckpointError):
        raw = _raw_header(file, file_size)
        content = hashlib.sha256(raw).digest(), file_size
        if (known := _open_headers.get(content)) is not None:
            return known
        data_start = _LENGTH_BYTES + len(raw)
        tensors, metadata = _decode(raw, data_start)
        raw.clear()
        tensors = _in_order(tensors)
        _require_covered(tensors, data_start, file_size)
    return _open_headers.setdefault(content, Header(tensors, metadata, data_start, file_size))


def encode_header(tensors: Layout, metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """The first bytes of a file that holds `tensors` (dtype, shape), and the absolute offset of each.

    Equal arguments give equal bytes. The data are in the order of `tensors`, wider dtypes first: loaders
    need every tensor aligned to its elements.
    """
    begins: dict[str, int] = {}
    ends: dict[str, int] = {}
    end = 0
    for key in sorted(tensors, key=lambda key: -number_format(tensors[key][0]).bits):
        begins[key], end = end, end + stored_bytes(*tensors[key])
        ends[key] = end
    if _METADATA in tensors:
        raise CheckpointError(f"'{_METADATA}' is reserved by the format: no tensor can be called that.")
    forms = {tensor: _text({"dtype": tensor[0], "shape": tensor[1]})[:-1] for tensor in {*tensors.values()}}
    entries = [f'"{_METADATA}":{_text(dict(metadata))}'] if metadata else []
    entries += [
        f'{_text(key)}:{forms[tensor]},"data_offsets":[{begins[key]},{ends[key]}]}}'
        for key, tensor in tensors.items()
    ]
    try:
        raw = f"{{{','.join(entries)}}}".encode()
        for encoded in map(str.encode, metadata.values()):
            require_short(len(encoded), encoded)
    except UnicodeEncodeError as error:
        raise CheckpointError(f"a key or metadata text is not valid Unicode: {error}.") from None
    raw += b" " * (-(_LENGTH_BYTES + len(raw)) % ALIGNMENT)
    if len(raw) > MAX_HEADER_BYTES:
        raise CheckpointError(f"the header would be {len(raw):,} bytes; the format allows 100 MB.")
    data_start = _LENGTH_BYTES + len(raw)
    offsets = {key: data_start + begins[key] for key in tensors}
    return len(raw).to_bytes(_LENGTH_BYTES, "little") + raw, offsets


def _require_regular(path: str | os.PathLike[str], status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        hint = did_you_mean("", _models_in(Path(path)))
        raise CheckpointError(f"{path} is a folder: name the safetensors file in it.{hint}")
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is a pipe, a socket or a device: a checkpoint must be a regular file.")


def cannot_open(path: Path, error: OSError) -> CheckpointError:
    """The error for a file or folder that cannot be opened, with the cause and the nearest name."""
    if error.errno == errno.ELOOP:
        return CheckpointError(f"{path} is a symbolic link that leads back to itself.")
    if isinstance(error, PermissionError):
        return CheckpointError(f"{path} cannot be read: no permission. Check its rights and its folder's.")
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        return CheckpointError(f"{path} cannot be opened: {error.strerror}.")
    if path.is_symlink():
        return CheckpointError(f"{path} is a link to {path.readlink()}, which does not exist.")
    if not path.parent.is_dir():
        return CheckpointError(f"{path} does not exist: {path.parent} is not a folder.")
    return CheckpointError(f"{path} does not exist.{did_you_mean(path.name, _models_in(path.parent))}")


def _models_in(folder: Path) -> list[str]:
    try:
        return list(islice((entry.name for entry in folder.glob(f"*{SUFFIX}")), 1000))
    except OSError:
        return []


def _raw_header(file: ReadableFile, file_size: int) -> bytearray:
    if file_size == 0:
        raise CheckpointError(f"the file is empty. {AGAIN}")
    start = bytearray(min(file_size, 32))
    file.read_into(0, memoryview(start))
    if file_size < _LENGTH_BYTES:
        raise CheckpointError(f"the file is {file_size} bytes, too short for a safetensors file. {AGAIN}")
    length = int.from_bytes(start[:_LENGTH_BYTES], "little")
    available = file_size - _LENGTH_BYTES
    if not begins_as_safetensors(start) or length > min(available, MAX_HEADER_BYTES):
        for magic, meaning in _LOOKALIKES.items():  # only now: a valid length may look like any of them
            if start.startswith(magic):
                raise CheckpointError(f"this is {meaning}.")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"its header would be {length:,} bytes; the format allows 100 MB. {AGAIN}")
    if length > available:
        raise CheckpointError(f"its header would be {length:,} bytes, the file has {available:,}. {AGAIN}")
    raw = bytearray(length)
    file.read_into(_LENGTH_BYTES, memoryview(raw))
    return raw


def _decode(raw: bytearray, data_start: int) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Parse the tensors and the metadata of a header."""
    if not raw.startswith(b"{"):
        raise CheckpointError(f"the header is not a JSON object: this is not a safetensors file. {AGAIN}")
    try:
        return _entries(EntryReader(raw), data_start)
    except UnicodeError:
        raise CheckpointError(f"the header is not UTF-8 text. {AGAIN}") from None
    except RecursionError:
        raise CheckpointError(f"the header is not valid: it is nested too deeply. {AGAIN}") from None
    except ValueError as error:
        raise CheckpointError(f"the header is not valid JSON ({error}). {AGAIN}") from None


def _entries(text: EntryReader, data_start: int) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, str] | None = None
    memory = 0
    for name in text.names():
        memory += sys.getsizeof(name)
        if name in tensors or (name == _METADATA and metadata is not None):
            raise CheckpointError(f"the header has {name[:200]!r} twice. {AGAIN}")
        if name == _METADATA:
            metadata = _metadata(text)
            memory += sum(map(sys.getsizeof, metadata)) + sum(map(sys.getsizeof, metadata.values()))
        elif len(tensors) == MAX_TENSORS:
            raise CheckpointError(f"the header has more than {MAX_TENSORS:,} tensors, which no model has.")
        else:
            tensors[name] = _tensor(name, text, data_start)
        if memory > MAX_TEXT:
            raise CheckpointError(f"the header's names and texts take more than {MAX_TEXT:,} bytes.")
    text.end()
    return tensors, metadata or {}


def _metadata(text: EntryReader) -> dict[str, str]:
    metadata: dict[str, str] = {}
    wrong = CheckpointError("the header's __metadata__ is not a map of texts to texts.")
    if not text.is_next(b"{"):
        raise wrong
    for name in text.names():
        if name in metadata:
            raise CheckpointError(f"the header has {name[:200]!r} twice. {AGAIN}")
        if not text.is_next(b'"'):
            raise wrong
        if len(metadata) == MAX_TENSORS:
            raise CheckpointError(f"the header's __metadata__ has more than {MAX_TENSORS:,} entries.")
        metadata[name] = text.string()
    return metadata


def _tensor(key: str, text: EntryReader, data_start: int) -> TensorInfo:
    usual = text.usual_tensor()
    if usual is None:
        return _checked(key, text.value(key), data_start)
    letters, sizes, begin, end = usual
    dtype, shape, nbytes = _usual_form(letters, sizes)
    if nbytes is not None and end - begin == nbytes:
        return TensorInfo(dtype, shape, data_start + begin, nbytes)
    return _checked(key, {"dtype": dtype, "shape": [*shape], "data_offsets": [begin, end]}, data_start)


@lru_cache(maxsize=1 << 10)
def _usual_form(dtype: bytes, sizes: bytes) -> tuple[str, tuple[int, ...], int | None]:
    """The dtype, the shape and the bytes of a tensor; None for the bytes if there cannot be such a tensor."""
    name, shape = sys.intern(dtype.decode()), tuple(map(int, sizes.split(b","))) if sizes else ()
    try:
        return name, shape, _bytes_of(name, shape)
    except CheckpointError:
        return name, shape, None


def _checked(key: str, entry: Any, data_start: int) -> TensorInfo:
    where = f"tensor {key[:200]!r}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise CheckpointError(f"{where} needs dtype, shape and data_offsets.")
    dtype, shape, span = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise CheckpointError(f"{where} has a dtype that is not a text.")
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise CheckpointError(f"{where} has a shape that is not a short list of sizes, {str(shape)[:60]}.")
    if not _are_sizes(span) or len(span) != 2 or span[0] > span[1]:
        raise CheckpointError(f"{where} has data_offsets that are not [begin, end], {str(span)[:60]}.")
    with prefixed(f"{where}: ", CheckpointError):
        nbytes = _bytes_of(dtype, tuple(shape))
    if span[1] - span[0] != nbytes:
        size = f"takes {span[1] - span[0]:,} bytes by its data_offsets"
        raise CheckpointError(f"{where} {size}, but {dtype} of shape {shape} is {nbytes:,}.")
    return TensorInfo(sys.intern(dtype), tuple(shape), data_start + span[0], nbytes)


@lru_cache(maxsize=1 << 10)
def _bytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    if math.prod(size or 1 for size in shape) >= 2**63:  # more elements than can be addressed
        raise CheckpointError(f"an impossible shape, {str(list(shape))[:60]}.")
    return stored_bytes(dtype, shape)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and {*map(type, values)} <= {int} and min(values, default=0) >= 0


def _in_order(tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The tensors in the order of their data, which most headers have already."""
    begins = [info.offset for info in tensors.values()]
    ends = [info.offset + info.nbytes for info in tensors.values()]
    if begins == sorted(begins) and ends == sorted(ends):
        return tensors
    return dict(sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)))


def _require_covered(tensors: Mapping[str, TensorInfo], data_start: int, file_size: int) -> None:
    end = data_start
    for key, info in tensors.items():
        if info.offset < end:
            raise CheckpointError(f"tensor {key[:200]!r} overlaps the one before it. {AGAIN}")
        if info.offset > end:
            raise CheckpointError(f"{info.offset - end:,} bytes before tensor {key[:200]!r} belong to none.")
        end += info.nbytes
    if end > file_size:
        raise CheckpointError(f"truncated: {end:,} bytes by its header, {file_size:,} in the file. {AGAIN}")
    if end < file_size:
        raise CheckpointError(f"{file_size - end:,} bytes after the last tensor belong to none. {AGAIN}")
