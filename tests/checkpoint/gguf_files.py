"""GGUF files as bytes, written here after the specification: sound ones, and ones made to harm."""

import struct
from collections.abc import Mapping
from pathlib import Path

import torch

F32, F16, Q4_0, Q8_0, Q4_K, Q8_K, BF16, NVFP4 = 0, 1, 2, 8, 12, 15, 30, 40
Value = str | int | list[str]


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def field(name: str, value: Value) -> bytes:
    """A field: a string, a whole number of 32 bits, or a list of strings."""
    if isinstance(value, str):
        return text(name) + struct.pack("<I", 8) + text(value)
    if isinstance(value, int):
        return text(name) + struct.pack("<II", 4, value)
    return text(name) + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))


def gguf_bytes(
    tensors: Mapping[str, tuple[int, tuple[int, ...], bytes]],
    fields: Mapping[str, Value] | None = None,
    alignment: int = 32,
) -> bytes:
    """A file of tensors (type, shape, bytes) and fields."""
    fields = {"general.architecture": "llama", **(fields or {})}
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields))
    head += b"".join(field(name, value) for name, value in fields.items())
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        head += text(name) + struct.pack("<I", len(shape))
        head += b"".join(struct.pack("<Q", size) for size in reversed(shape))
        head += struct.pack("<IQ", kind, len(data))
        data += raw + bytes(-len(raw) % alignment)
    return head + bytes(-len(head) % alignment) + data


def numbers_of_q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """The numbers of blocks of Q8_0, uint8 [blocks, 34]: a scale in float16, then 32 codes of a byte each."""
    scales = blocks[:, :2].contiguous().view(torch.float16).float()
    return (blocks[:, 2:].contiguous().view(torch.int8).float() * scales).flatten()


def write_gguf(path: Path, *arguments: object, **more: object) -> Path:
    path.write_bytes(gguf_bytes(*arguments, **more))  # type: ignore[arg-type]
    return path
