"""A model as it is stored, whatever the format: one way to read files, shards, pickles and folders."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch

from mecha_exp.checkpoint.dtypes import number_format, torch_dtype
from mecha_exp.checkpoint.positional import FileRegion, byte_view
from mecha_exp.checkpoint.safetensors.header import TensorInfo
from mecha_exp.checkpoint.safetensors.reader import Checkpoint
from mecha_exp.errors import CheckpointError, did_you_mean


class StoredModel(ABC):
    """Named tensors on a disk, read by parts: any number of threads may read at once.

    Attributes:
        path: what the user named: a file, or a folder.
        files: the files that hold the tensors.
        identity: what is another one when a file was changed or replaced.
    """

    path: Path
    files: tuple[Path, ...]
    identity: tuple[str | int, ...]

    @property
    def name(self) -> str:
        """How messages call it."""
        return str(self.path)

    @property
    def metadata(self) -> Mapping[str, str]:
        """What the file says of itself, as the recipe that made it."""
        return {}

    @abstractmethod
    def keys(self) -> Collection[str]:
        """The keys in the order in which they are best read."""

    @abstractmethod
    def info(self, key: str) -> TensorInfo:
        """The dtype and the shape of a key; CheckpointError where there is none of that name."""

    @abstractmethod
    def read_bytes_into(self, key: str, start: int, view: memoryview) -> None:
        """Fill `view` with the bytes of a key from `start` on."""

    def region(self, key: str) -> FileRegion | None:
        """Where the bytes of a key lie; None where they are not in a file as they are."""
        return None

    @abstractmethod
    def check_unchanged(self) -> None:
        """CheckpointError where a file was changed, replaced or removed since it was opened."""

    @abstractmethod
    def close(self) -> None:
        """Close the files. Idempotent."""

    def __enter__(self) -> StoredModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __contains__(self, key: object) -> bool:
        return key in self.keys()

    def read_into(self, key: str, start: int, out: torch.Tensor) -> None:
        """Fill `out` (1-D, contiguous, the key's dtype) with the flattened elements from `start` on."""
        info = self.info(key)
        if out.dtype is not number_format(info.dtype).torch or out.ndim != 1:
            found = f"{key} is {info.dtype}, which cannot fill a {out.ndim}-D tensor of {out.dtype}"
            raise CheckpointError(f"{self.name}: {found}.")
        if not 0 <= start <= start + len(out) <= info.numel:
            span = f"[{start}, {start + len(out)})"
            raise CheckpointError(f"{self.name}: {key} has {info.numel:,} elements, not {span}.")
        self.read_bytes_into(key, start * out.element_size(), byte_view(out))

    def read(self, key: str) -> torch.Tensor:
        """The whole tensor, freshly allocated."""
        info = self.info(key)
        values = torch.empty(info.numel, dtype=torch_dtype(info.dtype))
        self.read_into(key, 0, values)
        return values.reshape(info.shape)

    def _unknown(self, key: str) -> CheckpointError:
        return CheckpointError(f"{self.name} has no key {key!r}.{did_you_mean(key, self.keys())}")


class SafetensorsModel(StoredModel):
    """One safetensors file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.files = (self.path,)
        self._file = Checkpoint(path)
        self.identity = (str(self.path.resolve()), *self._file.identity)

    @property
    def metadata(self) -> Mapping[str, str]:
        return self._file.header.metadata

    def keys(self) -> Collection[str]:
        return self._file.keys()

    def info(self, key: str) -> TensorInfo:
        try:
            return self._file.header.tensors[key]
        except KeyError:
            raise self._unknown(key) from None

    def read_bytes_into(self, key: str, start: int, view: memoryview) -> None:
        self._file.read_bytes_into(self.info(key).offset + start, view)

    def region(self, key: str) -> FileRegion | None:
        return self._file.region(self.info(key).offset)

    def check_unchanged(self) -> None:
        self._file.check_unchanged()

    def close(self) -> None:
        self._file.close()


class JoinedModel(StoredModel):
    """Several stored models as one: the shards of a model, or the components of a pipeline.

    Args:
        path: of the whole, as the user named it.
        parts: each with what its keys are prefixed with, and those that count (None: all).
    """

    def __init__(self, path: Path, parts: Sequence[tuple[str, StoredModel, Collection[str] | None]]) -> None:
        self.path = path
        self._parts = [model for _, model, _ in parts]
        self.files = tuple(file for model in self._parts for file in model.files)
        self.identity = tuple(item for model in self._parts for item in model.identity)
        self._places: dict[str, tuple[StoredModel, str]] = {}
        for prefix, model, wanted in parts:
            for key in model.keys():
                if wanted is None or key in wanted:
                    self._place(prefix + key, model, key)

    @property
    def metadata(self) -> Mapping[str, str]:
        return self._parts[0].metadata if self._parts else {}

    def keys(self) -> Collection[str]:
        return self._places.keys()

    def info(self, key: str) -> TensorInfo:
        model, inner = self._find(key)
        return model.info(inner)

    def read_bytes_into(self, key: str, start: int, view: memoryview) -> None:
        model, inner = self._find(key)
        model.read_bytes_into(inner, start, view)

    def region(self, key: str) -> FileRegion | None:
        model, inner = self._find(key)
        return model.region(inner)

    def check_unchanged(self) -> None:
        for model in self._parts:
            model.check_unchanged()

    def close(self) -> None:
        for model in self._parts:
            model.close()

    def _place(self, key: str, model: StoredModel, inner: str) -> None:
        if key in self._places:
            other = self._places[key][0].name
            raise CheckpointError(f"{self.name}: the key {key!r} is in {other} and in {model.name}.")
        self._places[key] = (model, inner)

    def _find(self, key: str) -> tuple[StoredModel, str]:
        try:
            return self._places[key]
        except KeyError:
            raise self._unknown(key) from None
