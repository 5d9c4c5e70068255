"""Reads a safetensors file in parts, into buffers of the caller: no memory map, no copy."""

import os
from collections.abc import Iterable, KeysView
from pathlib import Path

import torch

from mecha_exp.checkpoint.dtypes import number_format, torch_dtype
from mecha_exp.checkpoint.positional import (
    FileRegion,
    ReadableFile,
    byte_view,
    file_changed,
    require_little_endian,
)
from mecha_exp.checkpoint.safetensors.header import Header, TensorInfo, open_regular, parse_header
from mecha_exp.errors import CheckpointError, did_you_mean


class Checkpoint:
    """An open safetensors file. The header is checked when it is opened, data are read on demand.

    Any number of threads may read at once. A memory map would count every page read against the process
    and turn a file that shrinks into a crash: this reads into the caller's buffers instead.

    >>> with Checkpoint("model.safetensors") as checkpoint:
    ...     tile = torch.empty(4096, dtype=torch.float16)
    ...     checkpoint.read_into("layer.weight", 0, tile)

    Args:
        path: of the file.
        file: what is read, where that is not the file at `path`.

    Attributes:
        name: the name of the file in messages.
        identity: a value that differs once the file was changed or replaced.
    """

    def __init__(self, path: str | os.PathLike[str], file: ReadableFile | None = None) -> None:
        require_little_endian()
        self.path = Path(path)
        self._file: ReadableFile = file or open_regular(path)
        try:
            self.name, self.identity = self._file.name, self._file.identity
            self.header: Header = parse_header(self._file)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def keys(self) -> KeysView[str]:
        """The keys, in the order in which the tensors lie in the file."""
        return self.header.tensors.keys()

    def __contains__(self, key: object) -> bool:
        return key in self.header.tensors

    def read_into(self, key: str, start: int, out: torch.Tensor) -> None:
        """Fill `out` (1-D, contiguous, the key's dtype) with the elements [start, start + len(out)).

        Elements are counted in the flattened tensor. Raises CheckpointError where the key is unknown, the
        range or the dtype does not fit, or the file ends too early.
        """
        info = self._info(key)
        if out.dtype is not number_format(info.dtype).torch or out.ndim != 1:
            wrong = f"{key} is {info.dtype}, which cannot fill a {out.ndim}-D tensor of {out.dtype}"
            raise CheckpointError(f"{self.name}: {wrong}.")
        stop = start + len(out)
        if not 0 <= start <= stop <= info.numel:
            raise CheckpointError(f"{self.name}: {key} has {info.numel:,} elements, not [{start}, {stop}).")
        self.read_bytes_into(info.offset + start * out.element_size(), byte_view(out))

    def read(self, key: str) -> torch.Tensor:
        """The whole tensor, freshly allocated. Packed dtypes (F4, F6) have `read_bytes_into` only."""
        info = self._info(key)
        try:
            values = torch.empty(info.numel, dtype=torch_dtype(info.dtype))
        except CheckpointError as error:
            raise CheckpointError(f"{self.name}: {key}: {error}") from None
        self.read_into(key, 0, values)
        return values.reshape(info.shape)

    def read_bytes_into(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes from the absolute `offset` in the file on."""
        self._file.read_into(offset, view)

    def region(self, offset: int) -> FileRegion | None:
        """The region from an absolute offset on; None where machine code cannot read it."""
        return self._file.region(offset)

    def expect(self, keys: Iterable[str]) -> None:
        """Hear which keys will be read, in their likely order."""
        infos = (self._info(key) for key in keys)
        self._file.expect((info.offset, info.nbytes) for info in infos)

    def unchanged(self) -> bool:
        """Whether the file is still what it was when it was opened."""
        return self._file.is_unchanged()

    def check_unchanged(self) -> None:
        """Raise CheckpointError if the file was changed, replaced or removed since it was opened."""
        if not self.unchanged():
            raise file_changed(self.name)

    def _info(self, key: str) -> TensorInfo:
        try:
            return self.header.tensors[key]
        except KeyError:
            hint = did_you_mean(key, self.header.tensors)
            raise CheckpointError(f"{self.name} has no key {key!r}.{hint}") from None
