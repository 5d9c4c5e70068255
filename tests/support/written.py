"""Folders and files that were written, in a form that tells whether two of them are the same."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def names(folder: Path) -> list[str]:
    """The names of what lies in a folder, hidden files included."""
    return sorted(path.name for path in folder.iterdir())


def hash_of(groups: Iterable[Iterable[str]]) -> str:
    """A hash of sets of keys, in whichever order they come."""
    return hashlib.sha256(json.dumps(sorted(map(sorted, groups))).encode()).hexdigest()
