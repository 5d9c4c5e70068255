"""Where a model is written to: one file, or a folder like that of the model it comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from mecha_exp.checkpoint.folder import STEMS, Component, components_of
from mecha_exp.checkpoint.folder_writer import FolderWriter, check_folder
from mecha_exp.checkpoint.formats import INDEX
from mecha_exp.checkpoint.safetensors.writer import CheckpointWriter
from mecha_exp.checkpoint.shards import Package, Tensors, is_file_name, pack
from mecha_exp.checkpoint.sidecars import CONFIG, companions
from mecha_exp.checkpoint.transaction.space import check_writable
from mecha_exp.errors import CheckpointError


@dataclass(frozen=True)
class Template:
    """The model whose folder is imitated: its components, its small files.

    Attributes:
        folder: where it lies.
        tensors: the dtype and shape of its keys.
    """

    folder: Path
    tensors: Tensors = field(repr=False)

    @staticmethod
    def at(path: Path | None, tensors: Tensors) -> Template | None:
        """The model at a path, where that is a folder, or a file that has its configuration beside it."""
        if path is None:
            return None
        if path.is_dir():
            return Template(path, tensors)
        is_usual = path.name.endswith(INDEX) or path.name.partition(".")[0] in STEMS
        return Template(path.parent, tensors) if is_usual and (path.parent / CONFIG).is_file() else None

    def fits(self, tensors: Tensors) -> bool:
        """Whether these are tensors of the same layout, at least most of them: no other format's."""
        return 2 * len(tensors.keys() & self.tensors.keys()) >= len(tensors)


@dataclass(frozen=True)
class Destination:
    """A model that is to be written.

    Attributes:
        path: a file (`*.safetensors`), or else a folder.
        tensors: the dtype and shape of each key.
        shard_size: bytes of a file; larger models are written to a folder, in shards.
        template: the model that a folder is made like.
        components: the sub-folders that a folder has where no template says it.
        small_files: what lies beside the weights there, by where it goes in the folder.
    """

    path: Path
    tensors: Tensors = field(repr=False)
    shard_size: int | None = None
    template: Template | None = None
    components: Sequence[Component] = ()
    small_files: Mapping[str, Path] = field(default_factory=dict)

    @property
    def is_folder(self) -> bool:
        """Whether a folder is written."""
        return self.shard_size is not None or not is_file_name(self.path)

    def check(self) -> None:
        """Raise CheckpointError unless it can be written. Leaves nothing behind."""
        if not self.is_folder:
            check_writable(self.path, sum(p.nbytes for p in self._packages))
            return
        if is_file_name(self.path):
            raise CheckpointError(
                f"{self.path} is a file, and shards need a folder: name one, or leave out shard_size."
            )
        check_folder(self.path, self._packages)
        for package in self._packages:
            for shard in package.shards:
                check_writable(self.path / package.folder / shard.name, shard.nbytes)

    def open(
        self, metadata: Mapping[str, str], durable: bool, signature: str | None
    ) -> CheckpointWriter | FolderWriter:
        """Begin to write."""
        if not self.is_folder:
            return CheckpointWriter(self.path, self.tensors, metadata, durable=durable, signature=signature)
        template = self._fitting
        return FolderWriter(
            self.path,
            self._packages,
            metadata,
            companions=companions(template.folder) if template else self.small_files,
            before=template.tensors if template else {},
            durable=durable,
            signature=signature,
        )

    @property
    def _fitting(self) -> Template | None:
        return self.template if self.template and self.template.fits(self.tensors) else None

    @cached_property
    def _packages(self) -> list[Package]:
        components = list(self.components)
        if self._fitting:
            components = components_of(self._fitting.folder)
        return pack(self.tensors, components if self.is_folder else [], self.shard_size)
