"""Installed packages, by their entry points: those that carry models, and what others announce.

A path such as `pkg://some.package/file` may stand in a recipe that comes from elsewhere, so nothing is
imported to find it, and only a package is looked at that says that it carries models: by an entry point of
the group `mecha_exp.models`, whose value is the package. In its pyproject.toml:

    [project.entry-points."mecha_exp.models"]
    any_name = "some.package"

The current folder is never searched.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from mecha_exp.errors import CheckpointError, ConfigError, did_you_mean

GROUP = "mecha_exp.models"
"""The group of the entry points by which a package says that it carries models."""

_OWN = __name__.partition(".")[0]


def package_folder(package: str) -> Path:
    """Find the folder of a package that carries models, without importing it or its parents.

    Raises:
        CheckpointError: there is no such package, or it does not say that it carries models.
    """
    first, *rest = package.split(".")
    if not all(part.isidentifier() for part in (first, *rest)):
        raise CheckpointError(f"{package!r} is not the name of a package.")
    if first == _OWN:
        folder = _own_folder(tuple(rest))
    else:
        declared = _declared()
        if not any(f"{package}.".startswith(f"{name}.") for name in declared):
            raise CheckpointError(
                f"there is no package '{package}' that says that it carries models, by an entry point of the "
                f"group {GROUP}.{did_you_mean(package, declared)}"
            )
        folder = _below(_search_path(), [first, *rest])
    if folder is None:
        raise CheckpointError(f"there is no package '{package}'.")
    return folder


@functools.cache
def _own_folder(names: tuple[str, ...]) -> Path | None:
    """A folder of this package, which each point of a sweep asks for."""
    return _below([str(path) for path in sys.modules[_OWN].__path__], [*names])


def announced(group: str) -> list[Any]:
    """What installed packages, mecha_exp among them, announce by the entry points of a group, by name.

    Raises:
        ConfigError: it cannot be imported, or mecha_exp itself announces nothing, being installed as it was.
    """
    own = os.path.realpath(Path(next(iter(sys.modules[_OWN].__path__))).parent)
    entries = {entry.name: entry for entry in _entries(group, [*_search_path(), own])}
    if not any(entry.value.startswith(f"{_OWN}.") for entry in entries.values()):
        raise ConfigError(
            f"mecha_exp is installed as it was before its code changed: it announces no {group}. Install it "
            f"again: pip install -e {own}"
        )
    return [_loaded(entries[name]) for name in sorted(entries)]


def _loaded(entry: metadata.EntryPoint) -> Any:
    try:
        return entry.load()
    except Exception as error:  # of any package
        raise ConfigError(
            f"'{entry.name}' of the entry points {entry.group}, {entry.value}, cannot be imported: {error}. "
            "Install its package again, or remove it."
        ) from error


def _declared() -> set[str]:
    """The packages that say that they carry models."""
    return {entry.value.strip() for entry in _entries(GROUP, _search_path())}


def _entries(group: str, folders: list[str]) -> Iterator[metadata.EntryPoint]:
    for distribution in metadata.distributions(path=folders):
        yield from (entry for entry in distribution.entry_points if entry.group == group)


def _search_path() -> list[str]:
    """Where packages are installed: Python's search path without the current folder."""
    current = os.path.realpath(Path.cwd())
    return [folder for folder in sys.path if folder and os.path.realpath(folder) != current]


def _below(search_path: list[str], names: list[str]) -> Path | None:
    """The folder of a package that is found name by name."""
    for name in names:
        folders = [Path(path, name) for path in search_path]
        folder = next((folder for folder in folders if folder.is_dir()), None)
        if folder is None:
            return None
        search_path = [str(folder)]
    return Path(search_path[0])
