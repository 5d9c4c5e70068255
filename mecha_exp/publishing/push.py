"""Uploads a merged folder to a hub by huggingface_hub, after it was checked and shown."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mecha_exp.checkpoint import find_partial_outputs, open_stored
from mecha_exp.checkpoint.sidecars import CARD
from mecha_exp.checkpoint.transaction.paths import PARTIAL, sibling
from mecha_exp.errors import CheckpointError, ConfigError, Problems, first_line, some

_NAME = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_TITLE = re.compile(r"^# (?P<title>.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Upload:
    """One commit of a model's folder to a hub.

    Attributes:
        folder: of the model.
        repository: its name on the hub, `org/name`.
        files: their sizes in bytes, by their path in the folder.
        message: of the commit.
        revision: the branch; None is the main one.
        is_private: whether a repository that does not exist yet is made for its owner alone.
    """

    folder: Path
    repository: str
    files: Mapping[str, int]
    message: str
    revision: str | None = None
    is_private: bool = True

    @classmethod
    def of(
        cls,
        folder: Path,
        repository: str,
        message: str | None = None,
        revision: str | None = None,
        is_private: bool = True,
    ) -> Upload:
        """Check a folder, and list what would be uploaded. The network is not used.

        Hidden files are left out, such as those of a version control or of a cache.

        Raises:
            ConfigError: the repository is not named `org/name`.
            CheckpointError: the folder does not hold a model that is complete and has a card, or it has links
                that lead out of it, to a folder, or nowhere. All problems at once.
        """
        if not _NAME.fullmatch(repository):
            raise ConfigError(f"{repository!r} is not the name of a repository: expected org/name.")
        files = list(_visible_files(folder)) if folder.is_dir() else []
        _check(folder, files)
        sizes = {file.relative_to(folder).as_posix(): file.stat().st_size for file in files}
        title = _TITLE.search((folder / CARD).read_text(encoding="utf-8", errors="replace"))
        about = title["title"] if title else f"Add {repository.partition('/')[2]}"
        return cls(folder, repository, sizes, message or about, revision, is_private)

    @property
    def nbytes(self) -> int:
        """The size of all files."""
        return sum(self.files.values())

    def send(self) -> str:
        """Upload the files in one commit, and return its address.

        The repository is made if it does not exist. Files that it has and the folder lacks stay. The hub and
        the token are those of huggingface_hub: HF_ENDPOINT, HF_TOKEN, or who is logged in.

        Raises:
            CheckpointError: the library is not installed, or the hub refuses or does not answer.
        """
        try:
            from huggingface_hub import CommitOperationAdd, HfApi
        except ModuleNotFoundError:
            raise CheckpointError(
                "An upload needs the library of the Hugging Face hub: pip install 'mecha_exp[hub]'."
            ) from None
        added = [CommitOperationAdd(name, str(self.folder / name)) for name in self.files]
        try:
            hub = HfApi()
            hub.create_repo(self.repository, private=self.is_private, exist_ok=True)
            commit = hub.create_commit(
                self.repository, added, commit_message=self.message, revision=self.revision
            )
        except Exception as error:  # the library also raises errors of its transport
            raise CheckpointError(
                f"{self.folder} was not uploaded to {self.repository}: {first_line(error)} Once that is "
                "mended, the same command tries it again."
            ) from None
        return str(commit.commit_url)


def _visible_files(folder: Path) -> Iterator[Path]:
    for path, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        links = [name for name in folders if Path(path, name).is_symlink()]  # which are not entered
        yield from (Path(path, name) for name in sorted([*names, *links]) if not name.startswith("."))


def _check(folder: Path, files: list[Path]) -> None:
    """Raise one CheckpointError with all that speaks against an upload."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder: merge into a folder, which has a card.")
    problems = Problems()
    unfinished = [output.target.name for output in find_partial_outputs([folder])]
    if unfinished or sibling(folder.absolute(), PARTIAL).exists():
        problems.add(
            f"a merge into {folder} was not finished. Run its command again, or `python -m mecha_exp clean`."
        )
    if folder / CARD not in files:
        problems.add(
            f"{folder} has no model card. Merge without output.card=false, or write {CARD} yourself."
        )
    root = folder.resolve()
    links = [str(file) for file in files if not file.is_file() or not file.resolve().is_relative_to(root)]
    if links:
        problems.add(
            f"{some(links, 3)} lead out of the folder, to a folder, or nowhere. Put the files themselves in "
            "their places."
        )
    with problems.collected(CheckpointError), open_stored(folder) as model:
        model.check_unchanged()
    problems.raise_as(CheckpointError)
