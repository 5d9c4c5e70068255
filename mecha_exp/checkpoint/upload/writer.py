"""Writers of models in a bucket: one file, or a folder of shards whose index comes last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from mecha_exp.checkpoint.folder_in_place import index_content
from mecha_exp.checkpoint.positional import byte_view, parts_of
from mecha_exp.checkpoint.remote.address import GOOGLE, scheme_of
from mecha_exp.checkpoint.remote.file_systems import opened
from mecha_exp.checkpoint.remote.pin import cause_of
from mecha_exp.checkpoint.safetensors.writer import Places
from mecha_exp.checkpoint.shards import Package
from mecha_exp.checkpoint.transaction.journal import Note
from mecha_exp.checkpoint.upload.multipart import MultipartUpload
from mecha_exp.checkpoint.upload.resumable import ResumableUpload
from mecha_exp.errors import CheckpointError


class UploadWriter:
    """Uploads the files of one model while it is made; nothing is there before `commit`.

    One file replaces an old one in one step. A folder is committed shard by shard, then its small files, and
    what a reader opens first comes last: the index, or the only file. If one cannot be, those before it are
    deleted again. It cannot go on after an interrupt, so nothing is left then.

    Args:
        address: of the file, or of the folder.
        packages: the weights, in the files that `pack` has given them to.
        small_files: the contents beside the weights, by their path in the folder.

    Attributes:
        finished: empty, see above.
    """

    def __init__(
        self,
        address: str,
        packages: Sequence[Package],
        metadata: Mapping[str, str],
        small_files: Mapping[str, bytes] | None = None,
    ) -> None:
        self.address = address.rstrip("/")
        self.finished: Mapping[str, Note] = {}
        self._is_folder = small_files is not None
        self._packages, self._small_files = packages, dict(small_files or {})
        self._uploads: dict[str, MultipartUpload | ResumableUpload] = {}
        self._visible: list[str] = []  # files of a folder that others lack
        self._place_of: dict[str, tuple[MultipartUpload | ResumableUpload, int]] = {}
        try:
            for package in packages:
                self._open(package, metadata)
        except BaseException:
            self.abort()
            raise

    def _open(self, package: Package, metadata: Mapping[str, str]) -> None:
        for shard in package.shards:
            name = package.path_of(shard.name)
            places = Places.in_safetensors(shard.tensors, metadata)
            address = f"{self.address}/{name}" if self._is_folder else self.address
            upload = self._uploads[name] = upload_to(address, places.nbytes)
            upload.write(0, memoryview(places.header))
            self._place_of |= {package.prefix + key: (upload, at) for key, at in places.offsets.items()}

    def write(self, key: str, start: int, values: torch.Tensor) -> None:
        """Put `values` (1-D, the key's dtype) at element `start` of the flattened tensor `key`."""
        self.write_bytes(key, start * values.element_size(), byte_view(values.contiguous()))

    def write_bytes(self, key: str, start: int, data: memoryview) -> None:
        """Put raw bytes at byte `start` of the tensor `key`."""
        upload, offset = self._place_of[key]
        upload.write(offset + start, data)

    def write_together(self, counts: Mapping[str, int], values: torch.Tensor) -> None:
        """Put all values of several keys, one after another; `counts` has how many each has."""
        for key, part in parts_of(values, counts):
            self.write(key, 0, part)

    def writing_at(self, key: str) -> AbstractContextManager[None]:
        """Machine code cannot write into an upload."""
        return nullcontext()

    def advance(self, key: str, nbytes: int) -> None:
        """Do nothing: parts count their bytes themselves."""

    def finish(self, key: str, note: Note) -> None:
        """Do nothing: an upload is not resumed."""

    def finish_together(self, notes: Mapping[str, Note]) -> None:
        """Do nothing: an upload is not resumed."""

    def commit(self) -> Path:
        """Let all files appear. Returns the address, as `pathlib` writes it."""
        last = {p.path_of(p.shards[0].name) for p in self._packages if len(p.shards) == 1}
        for name in sorted(self._uploads, key=lambda name: name in last):
            if name in last:
                self._put_small_files()
            self._visible.append(name)
            self._uploads[name].complete()
        self._put_small_files()
        for package in self._packages:
            if len(package.shards) > 1:
                self._put(package.path_of(package.index), index_content(package, package.files))
        self._visible.clear()
        return Path(self.address)

    def abort(self) -> None:
        """Delete what was uploaded and is not complete: parts, and files of a folder. Idempotent.

        Raises:
            CheckpointError: the store refuses to delete them.
        """
        failures: list[CheckpointError] = []
        for upload in self._uploads.values():
            try:
                upload.abort()
            except CheckpointError as error:  # the others, and the files that are visible, are deleted first
                failures.append(error)
        visible, self._visible = self._visible, []
        if visible and self._is_folder:
            self._delete(visible)
        if failures:
            raise failures[0]

    suspend = abort

    def _put_small_files(self) -> None:
        while self._small_files:
            self._put(*self._small_files.popitem())

    def _delete(self, names: Sequence[str]) -> None:
        fs, root = opened(self.address)
        try:
            fs.invalidate_cache()
            if paths := [path for name in names if fs.exists(path := f"{root}/{name}")]:
                fs.rm(paths)
        except Exception as error:
            raise CheckpointError(
                f"{self.address} is not complete, and the files of it that are there cannot be deleted: "
                f"{cause_of(error)}. Delete them: {', '.join(names)}."
            ) from error

    def _put(self, name: str, content: bytes) -> None:
        self._visible.append(name)
        fs, path = opened(f"{self.address}/{name}")
        try:
            fs.pipe_file(path, content)
        except Exception as error:
            raise CheckpointError(f"{self.address}/{name} cannot be written: {cause_of(error)}.") from error


def upload_to(address: str, nbytes: int) -> MultipartUpload | ResumableUpload:
    """An upload of an object of so many bytes, as its store takes it.

    Raises:
        CheckpointError: the store's library is not installed, or nothing can be written there.
    """
    return (ResumableUpload if scheme_of(address) in GOOGLE else MultipartUpload)(address, nbytes)


def check_address(address: str, is_folder: bool) -> None:
    """Raise CheckpointError unless a model can be uploaded to an address. Leaves nothing behind."""
    upload_to(address, 1).abort()
    fs, path = opened(address.rstrip("/"))
    try:
        fs.invalidate_cache()
        is_taken = is_folder and bool(fs.find(path, maxdepth=2))
    except Exception as error:
        raise CheckpointError(f"{address} cannot be read: {cause_of(error)}.") from error
    if is_taken:
        raise CheckpointError(
            f"{address} holds files already, and a bucket cannot replace a folder in one step. Choose "
            "another place, or delete them."
        )
