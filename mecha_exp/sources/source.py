"""The inputs of a merge: where a path is looked for, and one way to read files and in-memory models."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

import torch

from mecha_exp.checkpoint import TensorInfo
from mecha_exp.checkpoint.positional import FileRegion

_LOOK = 1 << 20


class Source(Protocol):
    """A state dict that is read by parts of flattened tensors."""

    @property
    def name(self) -> str:
        """How messages call it."""

    @property
    def path(self) -> Path | None:
        """Its file or folder, if it has one."""

    @property
    def files(self) -> Sequence[Path]:
        """The files that hold its tensors."""

    @property
    def identity(self) -> tuple[str | int, ...] | None:
        """What is another one when the data may be; None where nothing tells."""

    def keys(self) -> Collection[str]:
        """The keys in the order in which they are best read."""

    def __contains__(self, key: str) -> bool:
        """Whether it has a key."""

    def info(self, key: str) -> TensorInfo:
        """The dtype and the shape of a key."""

    def read_into(self, key: str, start: int, out: torch.Tensor) -> None:
        """Fill `out` with the elements from `start` on."""

    def read_bytes_into(self, key: str, start: int, view: memoryview) -> None:
        """Fill `view` with the bytes from `start` on."""

    def region(self, key: str) -> FileRegion | None:
        """Where the bytes of a key lie; None where they are not in a file as they are."""

    def check_unchanged(self) -> None:
        """CheckpointError where the data is no longer what the plan saw."""

    def close(self) -> None:
        """Nothing is read from it any more. Idempotent."""


def infos_of(source: Source) -> dict[str, TensorInfo]:
    """The dtype and the shape of every key: what a model is recognised by."""
    return {key: source.info(key) for key in source.keys()}


class DerivedSource:
    """What is read from another source: it has the same files, under the same name."""

    def __init__(self, original: Source) -> None:
        self._original = original
        self.name = original.name
        self.path: Path | None = original.path
        self.files: Sequence[Path] = original.files
        self.identity = original.identity
        self.check_unchanged = original.check_unchanged
        self.close = original.close

    def region(self, key: str) -> FileRegion | None:
        """Where the bytes of a key lie, if it has them as the original does."""
        return None
