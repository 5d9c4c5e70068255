"""Files that are made for a recipe when it is read: `files: {calibrate: ...}`.

A package announces the word by an entry point, whose value is a function of the mapping and the folders of
models to the paths of the files:

    [project.entry-points."mecha_exp.files"]
    calibrate = "mecha_exp.calibration.seams.files:measured_files"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mecha_exp.entry_points import announced, load

GROUP = "mecha_exp.files"


def with_files(recipe: Any, folders: Sequence[Path]) -> Any:
    """A configured recipe with the paths of files in the places that say how they are made.

    Args:
        recipe: the `recipe` of a resolved configuration.
        folders: where models are looked for, after the current folder.

    Raises:
        MechaError: what is wrong with the request for them, or why they cannot be made.
    """
    return _replaced(recipe, lambda word, mapping: load(announced(GROUP)[word])(mapping, folders))


def without_files(recipe: Any) -> Any:
    """A configured recipe with no files in the places that say how they are made."""
    return _replaced(recipe, lambda word, mapping: [])


def _replaced(value: Any, files: Callable[[str, Mapping[str, Any]], list[str]]) -> Any:
    if isinstance(value, Mapping):
        if word := next((word for word in announced(GROUP) if word in value), None):
            return files(word, value)
        return {key: _replaced(item, files) for key, item in value.items()}
    return [_replaced(item, files) for item in value] if isinstance(value, list | tuple) else value
