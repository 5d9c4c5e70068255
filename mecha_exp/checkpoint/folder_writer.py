"""Writes a model's folder: weights in one file or in shards, their index, and the small files beside them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from mecha_exp.checkpoint.folder import PIPELINE, read_index
from mecha_exp.checkpoint.positional import FileRegion
from mecha_exp.checkpoint.safetensors.header import SUFFIX
from mecha_exp.checkpoint.safetensors.writer import CheckpointWriter
from mecha_exp.checkpoint.shards import Layout, Package
from mecha_exp.checkpoint.sidecars import content_of
from mecha_exp.checkpoint.transaction.journal import Note
from mecha_exp.checkpoint.transaction.space import cannot_write
from mecha_exp.errors import CheckpointError
from mecha_exp.system.atomic_write import atomic_write


class FolderWriter:
    """Writes the folder of one model, which `from_pretrained` loads.

    Every shard has a `CheckpointWriter`, with a journal where there is a signature. `commit` puts the small
    files and the shards in place, and last the index (or a pipeline's `model_index.json`). Without it the
    folder is not a model, so a partly written folder cannot be loaded. A model of the same name is replaced;
    other files of the folder stay as they are.

    Args:
        folder: the folder to write.
        packages: the weights of each component, as `pack` distributes them.
        companions: the small files, by their path in the folder.
        before: the tensors of the model that the small files come from.
    """

    def __init__(
        self,
        folder: Path,
        packages: list[Package],
        metadata: Mapping[str, str],
        *,
        companions: Mapping[str, Path] | None = None,
        before: Layout | None = None,
        durable: bool = True,
        signature: str | None = None,
    ) -> None:
        self.path = folder.absolute()
        self._packages = packages
        self._companions = dict(companions or {})
        self._before = before or {}
        self._writers: dict[Path, CheckpointWriter] = {}
        self._writer_of: dict[str, tuple[CheckpointWriter, str]] = {}
        check_folder(self.path, packages)
        try:
            for package in packages:
                for shard in package.shards:
                    path = self.path / package.folder / shard.name
                    writer = CheckpointWriter(
                        path, shard.tensors, metadata, durable=durable, signature=signature
                    )
                    self._writers[path] = writer
                    self._writer_of |= {package.prefix + key: (writer, key) for key in shard.tensors}
        except BaseException as error:
            self.abort() if isinstance(error, Exception) else self.suspend()
            raise
        self.finished: Mapping[str, Note] = {
            key: writer.finished[inner]
            for key, (writer, inner) in self._writer_of.items()
            if inner in writer.finished
        }

    def write(self, key: str, start: int, values: torch.Tensor) -> None:
        """Put `values` (1-D, the key's dtype) at element `start` of the flattened tensor `key`."""
        writer, inner = self._writer_of[key]
        writer.write(inner, start, values)

    def write_bytes(self, key: str, start: int, data: memoryview) -> None:
        """Put raw bytes at byte `start` of the tensor `key`."""
        writer, inner = self._writer_of[key]
        writer.write_bytes(inner, start, data)

    def writing_at(self, key: str) -> AbstractContextManager[FileRegion | None]:
        """The place of a key's bytes, as `CheckpointWriter.writing_at` yields it."""
        writer, inner = self._writer_of[key]
        return writer.writing_at(inner)

    def advance(self, key: str, nbytes: int) -> None:
        """Count bytes of a key that were written at its region."""
        writer, inner = self._writer_of[key]
        writer.advance(inner, nbytes)

    def finish(self, key: str, note: Note) -> None:
        """Record that all of a key was written."""
        writer, inner = self._writer_of[key]
        writer.finish(inner, note)

    def commit(self) -> Path:
        """Put all files in place. Returns the folder."""
        replaced = self._remove_indices()
        last = {PIPELINE} & self._companions.keys()
        for name in self._companions.keys() - last:
            self._copy(name)
        for writer in self._writers.values():
            writer.commit()
        for package in self._packages:
            if len(package.shards) > 1:
                self._put(self.path / package.folder / package.index, _index(package))
        for name in last:
            self._copy(name)
        with self._explained():
            for path in replaced - self._writers.keys():
                path.unlink(missing_ok=True)
        return self.path

    def abort(self) -> None:
        """Delete what was written and not committed. Idempotent."""
        for writer in self._writers.values():
            writer.abort()

    def suspend(self) -> None:
        """Stop and keep the finished keys for a resume. Idempotent."""
        for writer in self._writers.values():
            writer.suspend()

    def _remove_indices(self) -> set[Path]:
        """Delete the indices of the model that is replaced. Returns the shards that they list."""
        listed: set[Path] = set()
        with self._explained():
            (self.path / PIPELINE).unlink(missing_ok=True)
        for package in self._packages:
            index = self.path / package.folder / package.index
            if index.is_file():
                with contextlib.suppress(CheckpointError):
                    listed |= {index.parent / name for name in read_index(index)}
                with self._explained():
                    index.unlink()
        return listed

    def _package_of(self, name: str) -> Package | None:
        folder = name.rpartition("/")[0]
        return next((package for package in self._packages if package.folder == folder), None)

    def _copy(self, name: str) -> None:
        with self._explained():
            content = content_of(self._companions[name], self._package_of(name), self._before)
        self._put(self.path / name, content)

    def _put(self, path: Path, content: bytes) -> None:
        with self._explained():
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as temporary:
                temporary.write_bytes(content)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise cannot_write(self.path, 0, error) from error


def check_folder(folder: Path, packages: list[Package]) -> None:
    """Raise CheckpointError if the folder holds other weights, which a library could load instead."""
    for package in packages:
        subfolder = folder / package.folder
        whole, index = subfolder / f"{package.stem}{SUFFIX}", subfolder / package.index
        other = whole if len(package.shards) > 1 else index
        if other.exists():
            raise CheckpointError(
                f"{subfolder} holds {other.name}, which could be loaded in place of the new weights. "
                "Delete it, or choose another folder."
            )


def _index(package: Package) -> bytes:
    content = {"metadata": {"total_size": package.nbytes}, "weight_map": dict(sorted(package.files.items()))}
    return (json.dumps(content, indent=2) + "\n").encode()
