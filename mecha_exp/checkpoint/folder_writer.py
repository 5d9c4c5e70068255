"""Writes a model's folder: weights in one file or in shards, their index, and the small files beside them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mecha_exp.checkpoint.dtypes import Layout
from mecha_exp.checkpoint.folder_in_place import index_content, publish_in_place, replaced_files
from mecha_exp.checkpoint.safetensors.header import SUFFIX
from mecha_exp.checkpoint.safetensors.shard_writers import ShardWriters
from mecha_exp.checkpoint.shards import Package
from mecha_exp.checkpoint.sidecars import content_of
from mecha_exp.checkpoint.transaction.lock import TargetLock
from mecha_exp.checkpoint.transaction.paths import target_of
from mecha_exp.checkpoint.transaction.recovery import can_resume, remove_beside, require_unused
from mecha_exp.checkpoint.transaction.running_hash import Hashed
from mecha_exp.checkpoint.transaction.space import cannot_write
from mecha_exp.checkpoint.transaction.staging import Inseparable, anchor_of, publish, staged_folder, sync
from mecha_exp.errors import CheckpointError


class FolderWriter(ShardWriters):
    """Writes the folder of one model, which `from_pretrained` loads.

    All files are written into a hidden folder beside the target, each shard by a `CheckpointWriter`, with a
    journal where there is a signature. `commit` puts that folder in the place of the target in one step, so
    that a reader finds the old model or the new one, with the small files of the same version. Other files of
    the target stay as they are. Where no system call exchanges two folders, the target is changed file by
    file: new shards get names that the old model does not use, and the index is the step that counts.

    Args:
        folder: the folder to write.
        packages: the weights of each component, as `pack` distributes them.
        companions: the small files or their contents, by their path in the folder.
        before: the tensors of the model that the small files come from.
        entries: entries of its config.json that change; see `content_of`.
        hashed: receives the SHA-256 of each file of weights once it is in its place; None computes none.
    """

    def __init__(
        self,
        folder: Path,
        packages: list[Package],
        metadata: Mapping[str, str],
        *,
        companions: Mapping[str, Path | bytes] | None = None,
        before: Layout | None = None,
        entries: Mapping[str, Any] | None = None,
        durable: bool = True,
        signature: str | None = None,
        hashed: Hashed | None = None,
    ) -> None:
        super().__init__()
        self.path = folder.absolute()
        self._target = Path(os.path.realpath(folder))
        self._anchor = anchor_of(folder)
        self._staged = staged_folder(folder)
        self._packages = packages
        self._companions = dict(companions or {})
        self._before = before or {}
        self._entries = entries or {}
        self._durable = durable
        self._hashed = hashed
        self._hashes: list[tuple[Path, str, tuple[int, int, int]]] = []
        check_folder(self.path, packages)
        with self._explained():
            self._anchor.parent.mkdir(parents=True, exist_ok=True)
            self._lock: TargetLock | None = TargetLock(self._anchor)
        try:
            require_unused(self.path, self._staged)
        except CheckpointError:
            self._release()
            raise
        try:
            self._open(metadata, signature)
        except BaseException as error:
            self.abort() if isinstance(error, Exception) else self.suspend()
            raise

    def _open(self, metadata: Mapping[str, str], signature: str | None) -> None:
        with self._explained():
            if self._staged.is_dir() and not self._staged.is_symlink():
                _remove_complete_files(self._staged)
            elif os.path.lexists(self._staged):
                self._staged.unlink()
            self._staged.mkdir(exist_ok=True)
            for package in self._packages:
                for shard in package.shards:
                    self.add(
                        self._staged / package.path_of(shard.name),
                        package.prefix,
                        shard.tensors,
                        metadata,
                        durable=self._durable,
                        signature=signature,
                        hashed=self._keep_hash if self._hashed else None,
                    )

    def commit(self) -> Path:
        """Put all files in place. Returns the folder."""
        with self._explained():
            for writer in self._writers:
                writer.commit()
            for name in self._companions:
                source, package = self._companions[name], self._package_of(name)
                content = content_of(source, package, self._before, self._entries)
                self._put(name, content)
            for package in self._packages:
                if len(package.shards) > 1:
                    self._put(package.path_of(package.index), index_content(package, package.files))
            self._publish()
        self.abort()  # removes what is left beside the target, and frees the lock
        if self._hashed is not None:
            for file, sha256, identity in self._hashes:
                self._hashed(self.path / file.relative_to(self._staged), sha256, identity)
        return self.path

    def _keep_hash(self, file: Path, sha256: str, identity: tuple[int, int, int]) -> None:
        """Keep the hash of a file until it has its name in the target."""
        self._hashes.append((file, sha256, identity))

    def abort(self) -> None:
        """Delete what was written and not committed. Idempotent."""
        for writer in self._writers:
            writer.abort()
        if self._lock is not None:
            try:
                remove_beside(self._anchor)
            finally:
                self._release()

    def suspend(self) -> None:
        """Stop and keep the finished keys for a resume. Idempotent."""
        for writer in self._writers:
            writer.suspend()
        if self._lock is not None and not can_resume(self._anchor):
            remove_beside(self._anchor)
        self._release()

    def _release(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def _publish(self) -> None:
        """Replace the target by the staged folder."""
        if self._durable:
            beside = [self._staged / name for name in self._companions]
            for folder in {path.parent for path in [*(writer.path for writer in self._writers), *beside]}:
                sync(folder)
        replaced = replaced_files(self._target, self._packages)
        try:
            publish(self._staged, self._target, replaced)
        except Inseparable:
            publish_in_place(self._staged, self._target, self._packages, replaced)
        if self._durable:
            sync(self._target.parent)

    def _package_of(self, name: str) -> Package | None:
        folder = name.rpartition("/")[0]
        return next((package for package in self._packages if package.folder == folder), None)

    def _put(self, name: str, content: bytes) -> None:
        path = self._staged / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        if self._durable:
            sync(path)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Errors name the folder, and not the hidden one."""
        try:
            yield
        except OSError as error:
            raise cannot_write(self.path, sum(p.nbytes for p in self._packages), error) from error
        except CheckpointError as error:
            message = str(error).replace(str(self._staged), str(self.path))
            raise CheckpointError(message) from error


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


def _remove_complete_files(staged: Path) -> None:
    """Delete what an interrupted writer has left in a staged folder, except for what can be resumed."""
    for parent, _, files in os.walk(staged):
        for name in files:
            if target_of(path := Path(parent, name)) is None:
                path.unlink()
