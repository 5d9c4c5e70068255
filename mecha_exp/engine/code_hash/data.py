"""Files and environment variables that decide what a function computes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from mecha_exp.errors import ConfigError
from mecha_exp.system.folders import files_below


@dataclass
class Data:
    """Data that code depends on.

    Attributes:
        files: declared files and folders, each with the name of what declares it.
        constants: files that are values of `Path` constants; they may be missing.
        variables: the names of environment variables.
    """

    files: dict[Path, str] = field(default_factory=dict)
    constants: list[Path] = field(default_factory=list)
    variables: list[str] = field(default_factory=list)

    def add(self, files: Iterable[Path], variables: Iterable[str], owner: str) -> None:
        """Add what `owner` declares."""
        for path in files:
            self.files.setdefault(path, owner)
        self.variables += [name for name in variables if name not in self.variables]


def content_of_data(data: Data) -> str:
    """The content of files and variables as it is now, without paths.

    Raises:
        ConfigError: a declared file does not exist.
    """
    lines = [f"{path.name} {content_of_files(path, owner)}" for path, owner in data.files.items()]
    lines += [f"{path.name} {_content(path) if path.is_file() else 'none'}" for path in data.constants]
    lines += [f"${name}={os.environ.get(name)!r}" for name in data.variables]
    return "\n".join(lines)


def content_of_files(path: Path, owner: str) -> str:
    """The SHA-256 of a file, or of all files of a folder with their names.

    Args:
        path: the file or the folder.
        owner: what depends on it, for the error.

    Raises:
        ConfigError: it does not exist.
    """
    if path.is_file():
        return _content(path)
    if not path.is_dir():
        raise ConfigError(
            f"{owner} depends on {path}, which does not exist. Put it there, or mend depends=[...]."
        )
    lines = [f"{name} {_content(file)}" for name, file in files_below(path).items()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _content(path: Path) -> str:
    status = path.stat()
    return _content_of_version(path, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@cache
def _content_of_version(path: Path, *version: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
