"""What installed packages announce by entry points, those of mecha_exp itself among them.

    [project.entry-points."mecha_exp.evaluators"]
    my_score = "my_package.scoring"

The current folder is never searched.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from mecha_exp.errors import ConfigError

_GROUP = re.compile(r'^\[project\.entry-points\."(.*)"\]', re.MULTILINE)
_OWN = __name__.partition(".")[0]


@cache
def announced(group: str) -> Mapping[str, metadata.EntryPoint]:
    """The entry points of a group by name, in alphabetical order.

    Raises:
        ConfigError: mecha_exp is installed as it was before this group was in its pyproject.toml.
    """
    entries = {entry.name: entry for entry in _announcements() if entry.group == group}
    if not any(map(is_own_entry, entries.values())) and group in _groups_of_checkout():
        raise ConfigError(
            f"mecha_exp is installed as it was before its code changed: it announces no {group}. Install it "
            f"again: pip install -e {_home()}"
        )
    return {name: entries[name] for name in sorted(entries)}


@cache
def _announcements() -> Sequence[metadata.EntryPoint]:
    """The entry points of all packages. Those of mecha_exp are the ones beside its code, if there are some.

    Another copy of mecha_exp may be installed, whose entry points name modules that this one lacks.
    """
    beside = [entry for entry in _entry_points([_home()]) if is_own_entry(entry)]
    installed = _entry_points([*search_path(), _home()])
    return [*(entry for entry in installed if not (beside and is_own_entry(entry))), *beside]


def _groups_of_checkout() -> Sequence[str]:
    """The groups in the pyproject.toml of a checkout, which may be newer than what is installed of it."""
    project = Path(_home(), "pyproject.toml")
    return _GROUP.findall(project.read_text(encoding="utf-8")) if project.is_file() else ()


def _home() -> str:
    """The folder that the code of mecha_exp lies in."""
    return os.path.realpath(Path(next(iter(sys.modules[_OWN].__path__))).parent)


def is_own_entry(entry: metadata.EntryPoint) -> bool:
    """Whether mecha_exp itself announces it."""
    return entry.value.startswith(f"{_OWN}.")


def load(entry: metadata.EntryPoint) -> Any:
    """Import what an entry point names.

    Raises:
        ConfigError: it cannot be imported.
    """
    try:
        return entry.load()
    except Exception as error:  # of any package
        raise ConfigError(
            f"'{entry.name}' of the entry points {entry.group}, {entry.value}, cannot be imported: {error}. "
            "Install its package again, or remove it."
        ) from error


def entry_points(group: str, folders: Sequence[str]) -> Iterator[metadata.EntryPoint]:
    """The entry points of a group of the packages in some folders."""
    return (entry for entry in _entry_points(folders) if entry.group == group)


def _entry_points(folders: Sequence[str]) -> Iterator[metadata.EntryPoint]:
    for distribution in metadata.distributions(path=[*folders]):
        yield from distribution.entry_points


def search_path() -> list[str]:
    """Where packages are installed: Python's search path without the current folder."""
    current = os.path.realpath(Path.cwd())
    return [folder for folder in sys.path if folder and os.path.realpath(folder) != current]
