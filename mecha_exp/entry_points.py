"""What installed packages announce by entry points, those of mecha_exp itself among them.

    [project.entry-points."mecha_exp.evaluators"]
    my_score = "my_package.scoring"

The current folder is never searched.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from mecha_exp.errors import ConfigError

_OWN = __name__.partition(".")[0]


@cache
def announced(group: str) -> Mapping[str, metadata.EntryPoint]:
    """The entry points of a group by name, in alphabetical order.

    Raises:
        ConfigError: mecha_exp itself announces nothing, being installed as it was before its code changed.
    """
    own = os.path.realpath(Path(next(iter(sys.modules[_OWN].__path__))).parent)
    entries = {entry.name: entry for entry in entry_points(group, [*search_path(), own])}
    if not any(entry.value.startswith(f"{_OWN}.") for entry in entries.values()):
        raise ConfigError(
            f"mecha_exp is installed as it was before its code changed: it announces no {group}. Install it "
            f"again: pip install -e {own}"
        )
    return {name: entries[name] for name in sorted(entries)}


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
    for distribution in metadata.distributions(path=[*folders]):
        yield from (entry for entry in distribution.entry_points if entry.group == group)


def search_path() -> list[str]:
    """Where packages are installed: Python's search path without the current folder."""
    current = os.path.realpath(Path.cwd())
    return [folder for folder in sys.path if folder and os.path.realpath(folder) != current]
