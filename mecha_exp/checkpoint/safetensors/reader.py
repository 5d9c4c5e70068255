"""Reads a safetensors file in parts, into buffers of the caller: no memory map, no copy."""

import os
from collections.abc import KeysView
from pathlib import Path

import torch

from mecha_exp.checkpoint.dtypes import number_format, torch_dtype
from mecha_exp.checkpoint.positional import FileRegion, byte_view, require_little_endian
from mecha_exp.checkpoint.safetensors.header import Header, TensorInfo, open_regular, parse_header
from mecha_exp.errors import CheckpointError, did_you_mean


class Checkpoint:
    """An open safetensors file. The header is checked when it is opened, data are read on demand.

    Any number of threads may read at once. A memory map would count every page read against the process
    and turn a file that shrinks into a crash: this reads into the caller's buffers instead.

    >>> with Checkpoint("model.safetensors") as checkpoint:
    ...     tile = torch.empty(4096, dtype=torch.float16)
    ...     checkpoint.read_into("layer.weight", 0, tile)

    Attributes:
        identity: the inode, size and time of change of the file when it was opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        require_little_endian()
        self.path = Path(path)
        self._file = open_regular(path)
        try:
            self.identity = identity_of(self._file.stat())
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
            raise CheckpointError(f"{self.path}: {wrong}.")
        stop = start + len(out)
        if not 0 <= start <= stop <= info.numel:
            raise CheckpointError(f"{self.path}: {key} has {info.numel:,} elements, not [{start}, {stop}).")
        self.read_bytes_into(info.offset + start * out.element_size(), byte_view(out))

    def read(self, key: str) -> torch.Tensor:
        """The whole tensor, freshly allocated. Packed dtypes (F4, F6) have `read_bytes_into` only."""
        info = self._info(key)
        try:
            values = torch.empty(info.numel, dtype=torch_dtype(info.dtype))
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {key}: {error}") from None
        self.read_into(key, 0, values)
        return values.reshape(info.shape)

    def read_bytes_into(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes from the absolute `offset` in the file on."""
        self._file.read_into(offset, view)

    def region(self, offset: int) -> FileRegion | None:
        """The region from an absolute offset on; None where machine code cannot read it."""
        return self._file.region(offset)

    def unchanged(self) -> bool:
        """Whether the file at `path` still has the inode, size and time of the opened file."""
        try:
            return identity_of(self.path.stat()) == self.identity
        except OSError:
            return False

    def check_unchanged(self) -> None:
        """Raise CheckpointError if the file was changed, replaced or removed since it was opened."""
        if not self.unchanged():
            raise CheckpointError(
                f"{self.path} changed while it was being read. Run again once it is at rest."
            )

    def _info(self, key: str) -> TensorInfo:
        try:
            return self.header.tensors[key]
        except KeyError:
            hint = did_you_mean(key, self.header.tensors)
            raise CheckpointError(f"{self.path} has no key {key!r}.{hint}") from None


def identity_of(status: os.stat_result) -> tuple[int, int, int]:
    """The inode, size and time of change of a file."""
    return status.st_ino, status.st_size, status.st_mtime_ns
