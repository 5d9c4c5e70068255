"""The interface of a readable state dict, and those that safetensors files and sets of files have."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType

import torch

from mecha_exp.checkpoint.dtypes import number_format, torch_dtype
from mecha_exp.checkpoint.positional import (
    FileRegion,
    ReadableFile,
    adjacent,
    byte_view,
    file_changed,
    identity_of,
    is_still,
    require_little_endian,
)
from mecha_exp.checkpoint.remote.stand_in import place_of
from mecha_exp.checkpoint.safetensors.header import Header, TensorInfo, open_regular, parse_header
from mecha_exp.errors import CheckpointError, did_you_mean

ADAPTER_CONFIG = "adapter_config.json"
"""The file that marks a folder as an adapter of PEFT, and without which its tensors mean nothing."""


class StateDictSource(ABC):
    """Named tensors, read in parts from files or memory. Any number of threads may read at once.

    Attributes:
        name: the name of the source in messages.
        path: the file or folder that the user named; None for a state dict in memory.
        files: the files that hold the tensors.
        identity: a value that differs once a file was changed or replaced; None where nothing tells.
        is_partial: whether it may lack any key of a model, as what changes a part of one does.
        codes: the keys that are stored as codes and read as the numbers that these stand for, each with the
            name of its type.
    """

    name: str
    path: Path | None
    files: tuple[Path, ...]
    identity: tuple[str | int, ...] | None
    is_partial: bool = False
    codes: Mapping[str, str] = MappingProxyType({})

    @property
    def is_adapter(self) -> bool:
        """Whether it is the folder of an adapter of PEFT, one that can be read or not."""
        return any(file.name == ADAPTER_CONFIG for file in self.files)

    @property
    def metadata(self) -> Mapping[str, str]:
        """The metadata of its file, such as the recipe that made it."""
        return {}

    @abstractmethod
    def keys(self) -> Collection[str]:
        """The keys, in the order in which they are best read."""

    def all_keys(self) -> Collection[str]:
        """The keys that can be read: also those that are not listed, since they hold zeros."""
        return self.keys()

    @abstractmethod
    def info(self, key: str) -> TensorInfo:
        """The dtype and the shape of a key. Raises CheckpointError for an unknown key."""

    def infos(self) -> Mapping[str, TensorInfo]:
        """The dtype and the shape of every key, by which a model is recognised."""
        return {key: self.info(key) for key in self.keys()}

    @abstractmethod
    def read_bytes_into(self, key: str, start: int, view: memoryview) -> None:
        """Fill `view` with the bytes of a key from `start` on."""

    def read_together(self, keys: Sequence[str], view: memoryview) -> None:
        """Fill `view` with all bytes of several keys, one after another."""
        begin = 0
        for key in keys:
            end = begin + self.info(key).nbytes
            self.read_bytes_into(key, 0, view[begin:end])
            begin = end

    def region(self, key: str) -> FileRegion | None:
        """The place of a key's bytes in a file; None where no file holds them unchanged."""
        return None

    def notes(self, keys: Collection[str]) -> Iterable[str]:
        """What is worth a warning, as half a sentence, where a merge makes these keys of the source."""
        return ()

    def expect(self, keys: Iterable[str]) -> None:  # noqa: B027, most sources lie near
        """Receive the keys that will be read, in their likely order: remote ones are fetched ahead."""

    @abstractmethod
    def check_unchanged(self) -> None:
        """Raise CheckpointError where a file was changed, replaced or removed since it was opened."""

    @abstractmethod
    def close(self) -> None:
        """Close the files. Idempotent."""

    def __enter__(self) -> StateDictSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __contains__(self, key: object) -> bool:
        return key in self.keys()

    def read_into(self, key: str, start: int, out: torch.Tensor) -> None:
        """Fill `out` (1-D, contiguous, the key's dtype) with the flattened elements from `start` on.

        Raises:
            CheckpointError: the key is unknown, or the range or the dtype does not fit.
        """
        info = self.info(key)
        if out.dtype is not number_format(info.dtype).torch or out.ndim != 1:
            wrong = f"{key} is {info.dtype}, which cannot fill a {out.ndim}-D tensor of {out.dtype}"
            raise CheckpointError(f"{self.name}: {wrong}.")
        if not 0 <= start <= start + len(out) <= info.numel:
            span = f"[{start}, {start + len(out)})"
            raise CheckpointError(f"{self.name}: {key} has {info.numel:,} elements, not {span}.")
        self.read_bytes_into(key, start * out.element_size(), byte_view(out))

    def read(self, key: str) -> torch.Tensor:
        """The whole tensor, freshly allocated. Packed dtypes (F4, F6) have `read_bytes_into` only."""
        info = self.info(key)
        try:
            values = torch.empty(info.numel, dtype=torch_dtype(info.dtype))
        except CheckpointError as error:
            raise CheckpointError(f"{self.name}: {key}: {error}") from None
        self.read_into(key, 0, values)
        return values.reshape(info.shape)

    def _unknown(self, key: str) -> CheckpointError:
        return CheckpointError(f"{self.name} has no key {key!r}.{did_you_mean(key, self.keys())}")


class ListedSource(StateDictSource):
    """A source whose keys are all known when it is opened: `_infos` has each with its dtype and shape."""

    _infos: Mapping[str, TensorInfo]

    def keys(self) -> Collection[str]:
        return self._infos.keys()

    def infos(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def info(self, key: str) -> TensorInfo:
        try:
            return self._infos[key]
        except KeyError:
            raise self._unknown(key) from None


class FileModel(ListedSource):
    """A source that reads from one open file.

    Args:
        path: of the file.
        file: what is read, where that is not the file at `path`.
    """

    path: Path

    def __init__(self, path: str | os.PathLike[str], file: ReadableFile | None = None) -> None:
        require_little_endian()
        self.path = Path(path)
        self.files = (self.path,)
        self._file: ReadableFile = file or open_regular(path)
        try:
            self.name, self.identity = self._file.name, self._file.identity
            self._read_header()
        except BaseException:
            self._file.close()
            raise

    @abstractmethod
    def _read_header(self) -> None:
        """Set `_infos` by what the file begins with."""

    def check_unchanged(self) -> None:
        if not self._file.is_unchanged():
            raise file_changed(self.name)

    def close(self) -> None:
        self._file.close()


class Checkpoint(FileModel):
    """An open safetensors file. The header is checked when it is opened, data are read on demand.

    Any number of threads may read at once. A memory map would count every page read against the process
    and turn a file that shrinks into a crash: this reads into the caller's buffers instead. The keys are in
    the order in which the tensors lie in the file.

    >>> with Checkpoint("model.safetensors") as checkpoint:
    ...     tile = torch.empty(4096, dtype=torch.float16)
    ...     checkpoint.read_into("layer.weight", 0, tile)

    Attributes:
        header: the checked header.
    """

    def _read_header(self) -> None:
        self.header: Header = parse_header(self._file)
        self._infos = self.header.tensors

    @property
    def metadata(self) -> Mapping[str, str]:
        return self.header.metadata

    def read_bytes_into(self, key: str, start: int, view: memoryview) -> None:
        self._file.read_into(self.info(key).offset + start, view)

    def read_together(self, keys: Sequence[str], view: memoryview) -> None:
        infos = map(self.info, keys)
        begin = 0
        for offset, nbytes in adjacent((info.offset, info.nbytes) for info in infos):
            self._file.read_into(offset, view[begin : begin + nbytes])
            begin += nbytes

    def region(self, key: str) -> FileRegion | None:
        return self._file.region(self.info(key).offset)

    def expect(self, keys: Iterable[str]) -> None:
        infos = map(self.info, keys)
        self._file.expect((info.offset, info.nbytes) for info in infos)


class JoinedModel(ListedSource):
    """Several models as one: the shards of a model, or the components of a pipeline.

    Args:
        path: the path of the whole, as the user named it.
        parts: each model with the prefix that its keys get, and the keys that count (None: all).
        beside: files that decide what the tensors mean: they belong to the content.
        notes: what is worth a warning about the set of files.
    """

    def __init__(
        self,
        path: Path,
        parts: Sequence[tuple[str, StateDictSource, Collection[str] | None]],
        beside: Sequence[Path] = (),
        notes: Sequence[str] = (),
    ) -> None:
        self.path, self.name = path, place_of(path)
        self._notes = notes
        self._models = [model for _, model, _ in parts]
        self.files = (*(file for model in self._models for file in model.files), *beside)
        self._beside = {file: identity_of(file.stat()) for file in beside}
        of_models = (item for model in self._models for item in model.identity or ())
        of_files = (item for file, known in self._beside.items() for item in (str(file.resolve()), *known))
        self.identity = (*of_models, *of_files)
        self._places: dict[str, tuple[StateDictSource, str]] = {}  # the model of a key, and its prefix
        for prefix, model, selected in parts:
            keys = [key for key in model.keys() if selected is None or key in selected]
            if isinstance(model, JoinedModel):  # a folder of shards, which are asked at once
                places = {place: (place[0], prefix + place[1]) for place in {*model._places.values()}}
                self._add({prefix + key: places[model._places[key]] for key in keys}, model)
            else:
                self._add(dict.fromkeys([prefix + key for key in keys], (model, prefix)), model)
        self.codes = {
            key: model.codes[key[len(prefix) :]]
            for key, (model, prefix) in self._places.items()
            if key[len(prefix) :] in model.codes
        }

    @property
    def metadata(self) -> Mapping[str, str]:
        return self._models[0].metadata if self._models else {}

    def keys(self) -> Collection[str]:
        return self._places.keys()

    def notes(self, keys: Collection[str]) -> Iterable[str]:
        return dict.fromkeys([*self._notes, *(note for model in self._models for note in model.notes(keys))])

    def __contains__(self, key: object) -> bool:
        return key in self._places

    @cached_property
    def _infos(self) -> Mapping[str, TensorInfo]:  # type: ignore[override]  # found when it is asked for
        return {key: model.info(key[len(prefix) :]) for key, (model, prefix) in self._places.items()}

    def read_bytes_into(self, key: str, start: int, view: memoryview) -> None:
        model, inner = self._origin(key)
        model.read_bytes_into(inner, start, view)

    def read_together(self, keys: Sequence[str], view: memoryview) -> None:
        begin = 0
        for model, origins in groupby(map(self._origin, keys), key=itemgetter(0)):
            inner = [key for _, key in origins]
            end = begin + sum(model.info(key).nbytes for key in inner)
            model.read_together(inner, view[begin:end])
            begin = end

    def region(self, key: str) -> FileRegion | None:
        model, inner = self._origin(key)
        return model.region(inner)

    def expect(self, keys: Iterable[str]) -> None:
        by_model: dict[StateDictSource, list[str]] = {}
        for model, inner in map(self._origin, keys):
            by_model.setdefault(model, []).append(inner)
        for model, own in by_model.items():
            model.expect(own)

    def check_unchanged(self) -> None:
        for model in self._models:
            model.check_unchanged()
        for file, known in self._beside.items():
            if not is_still(file, known):
                raise file_changed(file)

    def close(self) -> None:
        for model in self._models:
            model.close()

    def _add(self, places: Mapping[str, tuple[StateDictSource, str]], model: StateDictSource) -> None:
        twice = next((key for key in places if key in self._places), None)
        if twice is not None:
            other = self._places[twice][0].name
            raise CheckpointError(f"{self.name}: the key {twice!r} is in {other} and in {model.name}.")
        self._places |= places

    def _origin(self, key: str) -> tuple[StateDictSource, str]:
        try:
            model, prefix = self._places[key]
        except KeyError:
            raise self._unknown(key) from None
        return model, key[len(prefix) :]
