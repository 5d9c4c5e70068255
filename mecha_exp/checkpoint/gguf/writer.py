"""Writes a GGUF file with the fields of another one, its tensors in parts."""

from __future__ import annotations

import math
import struct
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from mecha_exp.checkpoint.dtypes import Layout
from mecha_exp.checkpoint.gguf.header import MAGIC, STRING, UINT32, VERSIONS, GgufHeader
from mecha_exp.checkpoint.gguf.model import OWN_FIELDS, GgufModel
from mecha_exp.checkpoint.gguf.types import (
    BLOCK,
    BLOCK_BYTES,
    NUMBERS,
    Q8_0,
    bytes_of,
    encode_q8_0,
    scales_of,
)
from mecha_exp.checkpoint.model import StateDictSource
from mecha_exp.checkpoint.positional import FileRegion, byte_view, parts_of
from mecha_exp.checkpoint.safetensors.writer import CheckpointWriter, Places
from mecha_exp.checkpoint.transaction.running_hash import Hashed
from mecha_exp.errors import CheckpointError, Problems, counted, some

FILE_TYPE = "general.file_type"
_FILE_TYPES = {NUMBERS["F32"]: 0, NUMBERS["F16"]: 1, Q8_0: 7, NUMBERS["BF16"]: 32}
"""The values of that field, by the type that most matrices have."""

CONVERTER = "Convert the inputs with llama.cpp's convert_hf_to_gguf.py first, or write .safetensors."


@dataclass(frozen=True)
class GgufTemplate:
    """The fields and codes that a merged file takes from its first input.

    Attributes:
        header: the fields, and the order of the tensors.
        codes: the keys that are Q8_0 there and stay it, where the result has them as float32.
    """

    header: GgufHeader
    codes: frozenset[str]

    @staticmethod
    def of(first: StateDictSource, keeps_codes: bool) -> GgufTemplate | None:
        """The template that an input is; None where it is not a GGUF file.

        Args:
            keeps_codes: whether what is Q8_0 there is Q8_0 again, rather than of its output dtype. Codes of
                other types never remain what they are.
        """
        if not isinstance(first, GgufModel):
            return None
        kept = [key for key, tensor in first.header.tensors.items() if tensor.kind == Q8_0 and keeps_codes]
        return GgufTemplate(first.header, frozenset(kept))

    def codes_in(self, tensors: Layout) -> frozenset[str]:
        """The keys that are written as Q8_0: a recipe may cast others to a dtype, which they have then."""
        return frozenset(key for key in self.codes if key in tensors and tensors[key][0] == "F32")


class GgufWriter(CheckpointWriter):
    """A GGUF file in the making: like a `CheckpointWriter`, with tensors of Q8_0 encoded as they come."""

    def __init__(
        self,
        path: Path,
        tensors: Layout,
        metadata: Mapping[str, str],
        template: GgufTemplate,
        durable: bool = True,
        signature: str | None = None,
        hashed: Hashed | None = None,
    ) -> None:
        self._codes = template.codes_in(tensors)
        self._begun: dict[tuple[str, int], tuple[torch.Tensor, int]] = {}
        self._joining = threading.Lock()
        places = places_of(tensors, metadata, template)
        super().__init__(
            path, tensors, metadata, durable=durable, signature=signature, places=places, hashed=hashed
        )

    def write(self, key: str, start: int, values: torch.Tensor) -> None:
        if key not in self._codes:
            super().write(key, start, values)
            return
        head = min(-start % BLOCK, len(values))
        whole = (len(values) - head) // BLOCK * BLOCK
        self._join(key, start, values[:head])
        self._encode(key, start + head, values[head : head + whole])
        self._join(key, start + head + whole, values[head + whole :])

    def write_bytes(self, key: str, byte_start: int, view: memoryview) -> None:
        if key not in self._codes:
            super().write_bytes(key, byte_start, view)
            return
        values = torch.frombuffer(bytearray(view), dtype=torch.float32)
        self.write(key, byte_start // values.element_size(), values)

    def write_together(self, counts: Mapping[str, int], values: torch.Tensor) -> None:
        for key, part in parts_of(values, counts):
            self.write(key, 0, part)

    @contextmanager
    def writing_at(self, key: str) -> Iterator[FileRegion | None]:
        if key in self._codes:
            yield None
            return
        with super().writing_at(key) as region:
            yield region

    def _encode(self, key: str, start: int, values: torch.Tensor) -> None:
        """Write whole blocks."""
        if len(values):
            blocks = encode_q8_0(values)
            if not scales_of(blocks).isfinite().all():
                raise CheckpointError(
                    f"{self.path}: {key} has values that Q8_0 cannot hold, whose scales are float16: beyond "
                    "8.3 million, or not finite. Write plain numbers, such as output.dtype=float32."
                )
            super().write_bytes(key, start // BLOCK * BLOCK_BYTES, byte_view(blocks.flatten()))

    def _join(self, key: str, start: int, values: torch.Tensor) -> None:
        """Hold a part of a block, and write the block once it is whole."""
        if not len(values):
            return
        place = (key, start // BLOCK)
        with self._joining:
            block, count = self._begun.get(place, (torch.empty(BLOCK), 0))
            block[start % BLOCK :][: len(values)] = values
            self._begun[place] = block, count + len(values)
            is_whole = count + len(values) == BLOCK
            if is_whole:
                del self._begun[place]
        if is_whole:
            self._encode(key, place[1] * BLOCK, block)


def check_gguf(path: Path, tensors: Layout, template: GgufTemplate | None) -> None:
    """Check that tensors can be written as a GGUF file with the fields of the first input.

    Raises:
        CheckpointError: the first input is not a GGUF file, or the tensors are not those that its fields
            describe, or have dtypes that the format or llama.cpp does not have for them.
    """
    if template is None:
        raise CheckpointError(
            f"{path}: a GGUF file takes its fields and names from the first input, which is not a GGUF file. "
            f"{CONVERTER}"
        )
    problems = Problems()
    stored = template.header.tensors
    if other := sorted(tensors.keys() ^ stored.keys()):
        problems.add(
            f"{path}: the first input and the result differ in {counted(len(other), 'key')}: "
            f"{some(other, 3)}."
        )
    shapes = [key for key, (_, shape) in tensors.items() if key in stored and stored[key].shape != shape]
    if shapes:
        problems.add(f"{path}: {some(shapes, 3)} have other shapes than the fields of the first input say.")
    if unknown := [f"{key} ({dtype})" for key, (dtype, _) in tensors.items() if dtype not in NUMBERS]:
        problems.add(f"{path}: {some(unknown, 3)} cannot be written: GGUF has F32, F16, BF16 and Q8_0 here.")
    narrowed = [
        key
        for key, (dtype, shape) in tensors.items()
        if len(shape) < 2 and dtype != "F32" and key in stored and stored[key].kind == NUMBERS["F32"]
    ]
    if narrowed:
        problems.add(
            f"{path}: llama.cpp computes with vectors in F32, and {some(narrowed, 3)} would be narrower. "
            "Name them in the dtype, such as output.dtype={*norm*: input, default: bfloat16}."
        )
    problems.raise_as(CheckpointError)


def places_of(tensors: Layout, metadata: Mapping[str, str], template: GgufTemplate) -> Places:
    """The header of a file, and where its tensors lie."""
    header = template.header
    order = [key for key in header.tensors if key in tensors]
    codes = template.codes_in(tensors)
    kinds = {key: Q8_0 if key in codes else NUMBERS[tensors[key][0]] for key in order}
    sizes = {key: bytes_of(math.prod(tensors[key][1]), kinds[key]) for key in order}
    entries, relative, end = bytearray(), {}, 0
    for key in order:
        relative[key] = end
        shape = tensors[key][1]
        entries += _text(key) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        entries += struct.pack("<IQ", kinds[key], end)
        end = -(-(end + sizes[key]) // header.alignment) * header.alignment
    fields = _fields(header, kinds, metadata)
    opening = MAGIC + struct.pack("<IQQ", VERSIONS[-1], len(order), len(fields))
    first = opening + b"".join(_text(name) + raw for name, raw in fields.items()) + bytes(entries)
    first += bytes(-len(first) % header.alignment)
    offsets = {key: len(first) + relative[key] for key in order}
    return Places(first, offsets, sizes, len(first) + end)


def _fields(header: GgufHeader, kinds: Mapping[str, int], metadata: Mapping[str, str]) -> dict[str, bytes]:
    """The fields of the first input, with what is known of the new file in place of the old."""
    fields = {name: raw for name, raw in header.fields.items() if not name.startswith(OWN_FIELDS)}
    if FILE_TYPE in fields and any(header.tensors[key].kind != kind for key, kind in kinds.items()):
        matrices = Counter(kind for key, kind in kinds.items() if len(header.tensors[key].shape) > 1)
        common = next((kind for kind, _ in matrices.most_common() if kind in _FILE_TYPES), NUMBERS["F32"])
        fields[FILE_TYPE] = struct.pack("<II", UINT32, _FILE_TYPES[common])
    own = {name: text for name, text in metadata.items() if name.startswith(OWN_FIELDS)}
    return fields | {name: struct.pack("<I", STRING) + _text(text) for name, text in own.items()}


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw
