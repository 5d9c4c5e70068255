"""The destination of a model: one file, or a folder laid out like another model's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mecha_exp.checkpoint.dtypes import Layout, stored_bytes
from mecha_exp.checkpoint.folder import STEMS, Component, components_of
from mecha_exp.checkpoint.folder_writer import FolderWriter, check_folder
from mecha_exp.checkpoint.formats import SUFFIXES
from mecha_exp.checkpoint.gguf.header import GGUF_SUFFIX
from mecha_exp.checkpoint.gguf.writer import GgufTemplate, GgufWriter, check_gguf
from mecha_exp.checkpoint.model import StateDictSource
from mecha_exp.checkpoint.remote.address import GOOGLE, S3, address_in, scheme_of
from mecha_exp.checkpoint.safetensors.header import INDEX
from mecha_exp.checkpoint.safetensors.shard_writers import ShardWriters
from mecha_exp.checkpoint.safetensors.writer import CheckpointWriter
from mecha_exp.checkpoint.shards import WRITTEN, Package, is_file_name, pack
from mecha_exp.checkpoint.sidecars import CARD, SmallFiles, companions, content_of, is_own_card
from mecha_exp.checkpoint.transaction.running_hash import Hashed
from mecha_exp.checkpoint.transaction.space import check_folder_writable, check_writable
from mecha_exp.checkpoint.transaction.staging import staged_folder
from mecha_exp.checkpoint.upload.writer import UploadWriter, check_address
from mecha_exp.errors import CheckpointError
from mecha_exp.families import CONFIG


@dataclass(frozen=True)
class Template:
    """A model whose folder layout, components and small files are imitated.

    Attributes:
        folder: the folder of the model.
        tensors: the dtype and shape of its keys.
        replaced: small files of other models, or contents, that take the place of its own, by their path in
            the folder; None leaves one out.
        entries: entries of its config.json that change, such as the number of layers.
    """

    folder: Path
    tensors: Layout = field(repr=False)
    replaced: SmallFiles = field(default_factory=dict, repr=False)
    entries: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def small_files(self) -> dict[str, Path | bytes]:
        """The small files beside the weights, or their contents, by their path in the folder."""
        files = {**companions(self.folder), **self.replaced}
        return {name: path for name, path in files.items() if path is not None}

    @staticmethod
    def at(path: Path | None, tensors: Callable[[], Layout]) -> Template | None:
        """The template at a path: a folder, or a file with its configuration beside it. Otherwise None."""
        if path is None:
            return None
        if path.is_dir():
            return Template(path, tensors())
        is_usual = path.name.endswith(INDEX) or path.name.partition(".")[0] in STEMS
        return Template(path.parent, tensors()) if is_usual and (path.parent / CONFIG).is_file() else None

    def fits(self, tensors: Layout) -> bool:
        """Whether the template has at least half of these keys, so that both have one format.

        Where layers are stacked there may be many more of them, and a config.json of its own says what the
        model is.
        """
        if self.entries or CONFIG in self.replaced:
            return True
        return 2 * len(tensors.keys() & self.tensors.keys()) >= len(tensors)


def template_of_file(first: StateDictSource, keeps_codes: bool) -> GgufTemplate | None:
    """What a file in the format of the first input takes from it; None where it takes nothing.

    Args:
        keeps_codes: whether codes that can be written stay codes, rather than get an output dtype.
    """
    return GgufTemplate.of(first, keeps_codes)


@dataclass(frozen=True)
class Destination:
    """A model to write.

    Attributes:
        path: a file (`*.safetensors`), or else a folder.
        tensors: the dtype and shape of each key.
        shard_size: the largest size of a file in bytes; a larger model is written as a folder of shards.
        template: the model whose folder is imitated.
        components: the sub-folders of the folder where no template gives them.
        small_files: the files beside the weights there, by their path in the folder.
        gguf: what a GGUF file takes from the first input; None where that is not one.
        card: makes the model card of the folder, once the merge begins; None writes none.
        hashed: receives the SHA-256 of each file of weights on this machine; None computes none.
    """

    path: Path
    tensors: Layout = field(repr=False)
    shard_size: int | None = None
    template: Template | None = None
    components: Sequence[Component] = ()
    small_files: Mapping[str, Path] = field(default_factory=dict)
    gguf: GgufTemplate | None = field(default=None, repr=False)
    card: Callable[[], bytes] | None = field(default=None, repr=False)
    hashed: Hashed | None = field(default=None, repr=False)

    @property
    def is_folder(self) -> bool:
        """Whether a folder is written."""
        return self.shard_size is not None or not is_file_name(self.path)

    @property
    def foreign_card(self) -> Path | None:
        """The README.md that stays there, since another program wrote it; None where a card may be."""
        file = self.path / CARD
        stays = self.card is not None and self.is_folder and file.exists() and not is_own_card(file)
        return file if stays else None

    @property
    def address(self) -> str | None:
        """The address of the model if it is not written to this machine; otherwise None."""
        return address_in(str(self.path))

    def check(self) -> None:
        """Raise CheckpointError unless the model can be written. Leaves nothing behind."""
        self._check_suffix()
        if self.address is not None:
            self._check_address(self.address)
            return
        if self.path.suffix == GGUF_SUFFIX and not self.is_folder:
            check_gguf(self.path, self.tensors, self.gguf)
        if not self.is_folder:
            check_writable(self.path, sum(stored_bytes(*tensor) for tensor in self.tensors.values()))
            return
        if is_file_name(self.path):
            raise CheckpointError(
                f"{self.path} is a file, and shards need a folder: name one, or leave out shard_size."
            )
        check_folder(self.path, self.packages)
        check_folder_writable(self.path, sum(package.nbytes for package in self.packages))

    def _check_suffix(self) -> None:
        """Refuse the suffix of a file in a format that is not written, which would be that of a folder."""
        suffix = self.path.suffix
        if suffix.lower() in SUFFIXES and suffix not in WRITTEN and not self.path.is_dir():
            raise CheckpointError(
                f"{self.path}: models are written as {', '.join(WRITTEN)}, and not as {suffix}. Name such a "
                "file, or a folder without such a suffix."
            )

    def _check_address(self, address: str) -> None:
        if scheme_of(address) not in (*S3, *GOOGLE):
            raise CheckpointError(
                f"{address} lies elsewhere. Outputs are written to this machine's disks, s3:// and gs://. "
                "Write to a path, and upload the result with the store's own tool."
            )
        if self.path.suffix == GGUF_SUFFIX and not self.is_folder:
            raise CheckpointError(f"{address}: GGUF is written to this machine's disks only.")
        check_address(address, self.is_folder)

    def open(
        self, metadata: Mapping[str, str], durable: bool, signature: str | None
    ) -> CheckpointWriter | FolderWriter | UploadWriter:
        """Open a writer for the model."""
        if self.address is not None:
            return self._open_upload(self.address, metadata)
        if self.gguf is not None and self.path.suffix == GGUF_SUFFIX:
            return GgufWriter(self.path, self.tensors, metadata, self.gguf, durable, signature, self.hashed)
        if not self.is_folder:
            return CheckpointWriter(
                self.path,
                self.tensors,
                metadata,
                durable=durable,
                signature=signature,
                hashed=self.hashed,
            )
        template = self._fitting
        return FolderWriter(
            self.path,
            self.packages,
            metadata,
            companions=self._beside(),
            before=template.tensors if template else {},
            entries=template.entries if template else {},
            durable=durable,
            signature=signature,
            hashed=self.hashed,
        )

    def _beside(self) -> dict[str, Path | bytes]:
        """The small files beside the weights of a folder, or their contents."""
        template = self._fitting
        beside: dict[str, Path | bytes] = dict(template.small_files if template else self.small_files)
        if self.card is not None and self.foreign_card is None:
            beside[CARD] = self.card()
        return beside

    def _open_upload(self, address: str, metadata: Mapping[str, str]) -> UploadWriter:
        if not self.is_folder:
            return UploadWriter(address, self.packages, metadata)
        before, entries = (self._fitting.tensors, self._fitting.entries) if self._fitting else ({}, {})
        package_of = {package.folder: package for package in self.packages}
        contents = {
            name: content_of(source, package_of.get(name.rpartition("/")[0]), before, entries)
            for name, source in self._beside().items()
        }
        return UploadWriter(address, self.packages, metadata, contents)

    def open_shards(
        self, names: Collection[str], metadata: Mapping[str, str], durable: bool, signature: str | None
    ) -> ShardWriters:
        """Open writers for some files of the folder, which stay hidden until a writer of `open` commits them.

        Args:
            names: of the files, by their path in the folder; other tasks write the others.
        """
        writers, folder = ShardWriters(), staged_folder(self.path)
        try:
            for package in self.packages:
                for shard in package.shards:
                    if (name := package.path_of(shard.name)) in names:
                        file = (folder / name, package.prefix, shard.tensors)
                        writers.add(*file, metadata, durable=durable, signature=signature)
        except BaseException as error:
            writers.abort() if isinstance(error, Exception) else writers.suspend()
            raise
        return writers

    @property
    def _fitting(self) -> Template | None:
        return self.template if self.template and self.template.fits(self.tensors) else None

    @cached_property
    def packages(self) -> list[Package]:
        """The weights of each component, in the files that will be written."""
        components = list(self.components)
        if self._fitting:
            components = components_of(self._fitting.folder)
        return pack(self.tensors, components if self.is_folder else [], self.shard_size)
