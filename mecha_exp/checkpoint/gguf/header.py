"""The header of a GGUF file: its fields and tensors, checked when it is read.

A file is: `GGUF`, a version and two counts; the fields, each a name, a type and a value; the tensors, each a
name, a shape (the last axis first), a type and an offset; then, aligned, the data. All numbers are little
endian. Source: the specification of GGUF in the project ggml.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from mecha_exp.checkpoint.gguf.types import bytes_of, type_of
from mecha_exp.checkpoint.positional import ReadableFile
from mecha_exp.checkpoint.safetensors.header import MAX_TENSORS
from mecha_exp.errors import CheckpointError, some

MAGIC = b"GGUF"
GGUF_SUFFIX = ".gguf"
VERSIONS = (2, 3)
ALIGNMENT_FIELD = "general.alignment"
SPLIT_FIELD = "split.count"
DEFAULT_ALIGNMENT = 32
UINT32, STRING, ARRAY = 4, 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""The bytes of a value of each type that is a number."""

MAX_HEADER_BYTES = 1 << 28
"""A vocabulary of a million tokens takes a tenth of it."""
MAX_FIELDS = 1 << 16
MAX_AXES = 8
_CHUNK = 1 << 20
_AGAIN = "It is damaged or was not fully copied: download or copy it again."


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in a file.

    Attributes:
        kind: the number of its type.
        shape: with the first axis first, as torch has it.
        offset: absolute, in bytes.
        nbytes: that it takes in the file.
    """

    kind: int
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufHeader:
    """A checked header.

    Attributes:
        fields: by name the bytes of type and value, as they are stored.
        tensors: in the order of the header.
        alignment: of the data of each tensor.
    """

    fields: Mapping[str, bytes] = field(repr=False)
    tensors: Mapping[str, GgufTensor] = field(repr=False)
    alignment: int = DEFAULT_ALIGNMENT

    def text(self, name: str) -> str | None:
        """The value of a field that is a string; None where there is no such field."""
        raw = self.fields.get(name, b"")
        is_text = len(raw) >= 12 and raw[:4] == struct.pack("<I", STRING)
        return raw[12:].decode("utf-8", errors="replace") if is_text else None

    def texts(self, name: str) -> list[str]:
        """The values of a field that is a list of strings; empty where there is no such field."""
        raw, texts, at = self.fields.get(name, b""), [], 16
        if raw[:8] != struct.pack("<II", ARRAY, STRING):
            return []
        for _ in range(struct.unpack_from("<Q", raw, 8)[0]):
            end = at + 8 + struct.unpack_from("<Q", raw, at)[0]
            texts.append(raw[at + 8 : end].decode("utf-8", errors="replace"))
            at = end
        return texts


def begins_as_gguf(start: bytes) -> bool:
    """Whether the first bytes of a file are those of a GGUF file."""
    return start.startswith(MAGIC)


def parse_header(file: ReadableFile) -> GgufHeader:
    """Read and check the header of an open file.

    Raises:
        CheckpointError: the file is not complete and valid, is one of several parts, or has tensors of types
            that are not read.
    """
    try:
        return _parse(_Cursor(file))
    except CheckpointError as error:
        raise CheckpointError(f"{file.name}: {error}") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{file.name}: a name in its header is not text in UTF-8. {_AGAIN}") from None


class _Cursor:
    """Reads a header from its beginning on, in pieces, and never beyond the file."""

    def __init__(self, file: ReadableFile) -> None:
        self._file = file
        self.size = file.size
        self._bytes = bytearray()
        self.at = 0

    def take(self, count: int) -> bytes:
        """The next bytes."""
        self.skip(count)
        return bytes(self._bytes[self.at - count : self.at])

    def skip(self, count: int) -> None:
        """Go on by some bytes."""
        stop = self.at + count
        if stop > min(self.size, MAX_HEADER_BYTES):
            raise CheckpointError(
                f"its header ends beyond byte {min(self.size, MAX_HEADER_BYTES):,}. {_AGAIN}"
            )
        while len(self._bytes) < stop:
            piece = bytearray(min(_CHUNK, self.size - len(self._bytes)))
            self._file.read_into(len(self._bytes), memoryview(piece))
            self._bytes += piece
        self.at = stop

    def since(self, start: int) -> bytes:
        """The bytes from an earlier place up to here."""
        return bytes(self._bytes[start : self.at])

    def number(self, layout: str) -> int:
        """The next number, in a layout of `struct`."""
        value: int = struct.unpack(f"<{layout}", self.take(struct.calcsize(f"<{layout}")))[0]
        return value

    def text(self) -> str:
        """The next string."""
        return self.take(self.number("Q")).decode("utf-8")


def _parse(cursor: _Cursor) -> GgufHeader:
    if cursor.take(4) != MAGIC:
        raise CheckpointError("this is not a GGUF file.")
    if (version := cursor.number("I")) not in VERSIONS:
        raise CheckpointError(f"it is of version {version} of GGUF, or big endian: 2 and 3 are read.")
    tensor_count, field_count = cursor.number("Q"), cursor.number("Q")
    if tensor_count > MAX_TENSORS or field_count > MAX_FIELDS:
        raise CheckpointError(
            f"{tensor_count:,} tensors and {field_count:,} fields, which no model has. {_AGAIN}"
        )
    fields: dict[str, bytes] = {}
    for _ in range(field_count):
        name, start = cursor.text(), cursor.at
        _skip_value(cursor, cursor.number("I"), depth=0)
        fields[name] = cursor.since(start)
    alignment = _number_in(fields, ALIGNMENT_FIELD, DEFAULT_ALIGNMENT)
    if alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(f"{ALIGNMENT_FIELD} is {alignment}, and should be a power of two. {_AGAIN}")
    if (parts := _number_in(fields, SPLIT_FIELD, 1)) > 1:
        raise CheckpointError(
            f"it is one of {parts} parts of a model. Join them first: llama-gguf-split --merge FIRST OUTPUT."
        )
    entries = list(_tensor_entries(cursor, tensor_count))
    start = -(-cursor.at // alignment) * alignment
    return GgufHeader(fields, _tensors(entries, start, alignment, cursor.size), alignment)


def _skip_value(cursor: _Cursor, kind: int, depth: int) -> None:
    if kind in _SIZES:
        cursor.skip(_SIZES[kind])
    elif kind == STRING:
        cursor.skip(cursor.number("Q"))
    elif kind == ARRAY and depth < 2:
        inner, count = cursor.number("I"), cursor.number("Q")
        if inner in _SIZES:
            cursor.skip(_SIZES[inner] * count)
        else:
            for _ in range(count):  # each takes eight bytes at least, so that the file bounds the count
                _skip_value(cursor, inner, depth + 1)
    else:
        raise CheckpointError(f"a field has the unknown type {kind}. {_AGAIN}")


def _number_in(fields: Mapping[str, bytes], name: str, default: int) -> int:
    """The whole number of a field, whatever its width."""
    raw = fields.get(name)
    if raw is None:
        return default
    if int.from_bytes(raw[:4], "little") not in (0, 2, 4, 10):
        raise CheckpointError(f"the field {name} is not a whole number. {_AGAIN}")
    return int.from_bytes(raw[4:], "little")


def _tensor_entries(cursor: _Cursor, count: int) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
    """The name, shape, type and relative offset of each tensor."""
    for _ in range(count):
        name = cursor.text()
        if (axes := cursor.number("I")) > MAX_AXES:
            raise CheckpointError(f"{name[:200]!r} has {axes:,} axes. {_AGAIN}")
        shape = tuple(reversed([cursor.number("Q") for _ in range(axes)]))
        yield name, shape, cursor.number("I"), cursor.number("Q")


def _tensors(
    entries: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int, size: int
) -> dict[str, GgufTensor]:
    _require_read(entries)
    tensors: dict[str, GgufTensor] = {}
    end = start
    for name, shape, kind, offset in sorted(entries, key=lambda entry: entry[3]):
        nbytes = _size_of(name, shape, kind)
        begin = start + offset
        if offset % alignment or begin < end or begin + nbytes > size:
            raise CheckpointError(f"{name!r} does not lie where its header says. {_AGAIN}")
        if name in tensors:
            raise CheckpointError(f"the header has {name!r} twice. {_AGAIN}")
        tensors[name] = GgufTensor(kind, shape, begin, nbytes)
        end = begin + nbytes
    return {name: tensors[name] for name, *_ in entries}


def _size_of(name: str, shape: tuple[int, ...], kind: int) -> int:
    block = type_of(kind).block
    if block > 1 and (not shape or shape[-1] % block):
        raise CheckpointError(
            f"{name!r} of shape {list(shape)} has rows that are not whole blocks of {block}. {_AGAIN}"
        )
    return bytes_of(math.prod(shape), kind)


def _require_read(entries: list[tuple[str, tuple[int, ...], int, int]]) -> None:
    """Check that the types of all tensors can be read, and that codes have no factor in another tensor."""
    names: dict[int, list[str]] = {}
    for name, _, kind, _ in entries:
        names.setdefault(kind, []).append(name)
    everything = {name for name, *_ in entries}
    for kind, of_kind in names.items():
        try:
            block = type_of(kind).block
        except CheckpointError as error:
            raise CheckpointError(f"{some(of_kind, 3)}: {error}") from None
        factors = [name for name in map(_factor_of, of_kind) if block > 1 and name in everything]
        if factors:
            raise CheckpointError(
                f"{some(factors, 3)} is a factor of the codes beside it, which is not read. Get the model in "
                "another type, such as that which it was quantised from."
            )


def _factor_of(name: str) -> str:
    """The name of the tensor by which llama.cpp multiplies what a matrix of NVFP4 or of BitNet gives."""
    return name.removesuffix(".weight") + ".scale"
