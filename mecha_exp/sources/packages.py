"""Installed packages that carry models.

A path such as `pkg://some.package/file` may stand in a recipe that comes from elsewhere, so nothing is
imported to find it, and only a package is looked at that says that it carries models: by an entry point of
the group `mecha_exp.models`, whose value is the package. In its pyproject.toml:

    [project.entry-points."mecha_exp.models"]
    any_name = "some.package"

The current folder is never searched.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from mecha_exp.entry_points import entry_points, search_path
from mecha_exp.errors import CheckpointError, did_you_mean

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
        folder = _below(search_path(), [first, *rest])
    if folder is None:
        raise CheckpointError(f"there is no package '{package}'.")
    return folder


@functools.cache
def _own_folder(names: tuple[str, ...]) -> Path | None:
    """A folder of this package, which each point of a sweep asks for."""
    return _below([str(path) for path in sys.modules[_OWN].__path__], [*names])


def _declared() -> set[str]:
    """The packages that say that they carry models."""
    return {entry.value.strip() for entry in entry_points(GROUP, search_path())}


def _below(search_path: list[str], names: list[str]) -> Path | None:
    """The folder of a package that is found name by name."""
    for name in names:
        folders = [Path(path, name) for path in search_path]
        folder = next((folder for folder in folders if folder.is_dir()), None)
        if folder is None:
            return None
        search_path = [str(folder)]
    return Path(search_path[0])
