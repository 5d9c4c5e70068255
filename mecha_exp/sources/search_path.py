"""Folders where a relative path of a model is looked for, after the current one, by all of this process."""

import os
from pathlib import Path

_folders: list[Path] = []


def add_path(path: str | os.PathLike[str]) -> None:
    """Look for models in a folder too, after those that were added before."""
    folder = Path(path)
    if folder not in _folders:
        _folders.append(folder)


def get_all() -> list[Path]:
    """The added folders, in order."""
    return list(_folders)


def normalize_path(path: str | os.PathLike[str]) -> Path:
    """The absolute path of a model: in the first added folder that has it, else in the current one."""
    candidates = (folder / path for folder in _folders)
    return next((found for found in candidates if found.exists()), Path(path)).resolve()
