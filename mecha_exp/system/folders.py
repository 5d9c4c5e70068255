"""Makes folders that several processes may want in the same second, and lists what lies in one."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path


def files_below(folder: Path) -> dict[str, Path]:
    """The files in a folder and below, by their paths in it with slashes, in the order of their paths."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in paths}


def hidden_below(folder: Path) -> Iterator[Path]:
    """The hidden files and folders below a folder, without looking into these and into environments."""
    for parent, folders, files in os.walk(folder):
        yield from (Path(parent, name) for name in [*files, *folders] if name.startswith("."))
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and not Path(parent, name, "pyvenv.cfg").exists()
        ]


def numbered(folder: Path) -> Iterator[Path]:
    """A path, then the same with `_2`, `_3` and so on behind its name."""
    yield folder
    yield from (folder.with_name(f"{folder.name}_{number}") for number in itertools.count(2))


def make_new_folder(folder: Path) -> Path:
    """Make a folder that was not there, with a number behind its name if that is taken; returns its path."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for path in numbered(folder):
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("there is always another number")
