"""Several safetensors files that are written as one model: each key goes to the file that holds it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import groupby
from pathlib import Path

import torch

from mecha_exp.checkpoint.dtypes import Layout
from mecha_exp.checkpoint.positional import FileRegion
from mecha_exp.checkpoint.safetensors.writer import CheckpointWriter
from mecha_exp.checkpoint.transaction.journal import Note
from mecha_exp.checkpoint.transaction.running_hash import Hashed


class ShardWriters:
    """The writers of some shards of a model, each a transaction of its own.

    By itself it leaves the shards under hidden names, each with its journal. A `FolderWriter` of the same
    signature finds their keys finished and puts the whole model in its place.

    Attributes:
        finished: the keys that an earlier run finished, with its notes.
    """

    def __init__(self) -> None:
        self.finished: dict[str, Note] = {}
        self._writers: list[CheckpointWriter] = []
        self._writer_of: dict[str, tuple[CheckpointWriter, str]] = {}

    def add(
        self,
        path: Path,
        prefix: str,
        tensors: Layout,
        metadata: Mapping[str, str],
        *,
        durable: bool,
        signature: str | None,
        hashed: Hashed | None = None,
    ) -> None:
        """Open the writer of one shard.

        Args:
            path: of the file.
            prefix: of its keys in the whole model, which the file leaves out.
            hashed: receives its SHA-256 once it is committed; None computes none.
        """
        writer = CheckpointWriter(
            path, tensors, metadata, durable=durable, signature=signature, hashed=hashed
        )
        self._writers.append(writer)
        self._writer_of |= {prefix + key: (writer, key) for key in tensors}
        self.finished |= {prefix + key: note for key, note in writer.finished.items()}

    def write(self, key: str, start: int, values: torch.Tensor) -> None:
        """Put `values` (1-D, the key's dtype) at element `start` of the flattened tensor `key`."""
        writer, inner = self._writer_of[key]
        writer.write(inner, start, values)

    def write_bytes(self, key: str, start: int, data: memoryview) -> None:
        """Put raw bytes at byte `start` of the tensor `key`."""
        writer, inner = self._writer_of[key]
        writer.write_bytes(inner, start, data)

    def write_together(self, counts: Mapping[str, int], values: torch.Tensor) -> None:
        """Put all values of several keys, as `CheckpointWriter.write_together` does."""
        begin = 0
        for writer, inner in self._by_writer(counts):
            own = {name: counts[key] for key, name in inner.items()}
            end = begin + sum(own.values())
            writer.write_together(own, values[begin:end])
            begin = end

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

    def finish_together(self, notes: Mapping[str, Note]) -> None:
        """Record that all of several keys was written."""
        for writer, inner in self._by_writer(notes):
            writer.finish_together({name: notes[key] for key, name in inner.items()})

    def _by_writer(self, keys: Iterable[str]) -> Iterator[tuple[CheckpointWriter, dict[str, str]]]:
        """Keys that follow each other in one file: its writer, and each key with its name there."""
        for writer, group in groupby(keys, key=lambda key: self._writer_of[key][0]):
            yield writer, {key: self._writer_of[key][1] for key in group}

    def commit(self) -> object:
        """Leave all shards complete, on the disk and under their hidden names."""
        for writer in self._writers:
            writer.seal()
        return None

    def abort(self) -> None:
        """Delete the shards that are not complete, and leave the others. Idempotent."""
        for writer in self._writers:
            writer.seal() if writer.is_complete else writer.abort()

    def suspend(self) -> None:
        """Stop, and keep the finished keys for a resume. Idempotent."""
        for writer in self._writers:
            writer.suspend()
