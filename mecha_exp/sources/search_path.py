"""Folders that this process searches for models after the current folder."""

import os
from pathlib import Path

_folders: list[Path] = []


def add_path(path: str | os.PathLike[str]) -> None:
    """Add a folder to search for models, after the folders that were added before."""
    folder = Path(path)
    if folder not in _folders:
        _folders.append(folder)


def get_all() -> list[Path]:
    """The added folders, in order."""
    return list(_folders)


def normalize_path(path: str | os.PathLike[str]) -> Path:
    """The absolute path of a model: in the first added folder that has it, else in the current one."""
    candidates = (folder / path for folder in _folders)
    return next((candidate for candidate in candidates if candidate.exists()), Path(path)).resolve()
