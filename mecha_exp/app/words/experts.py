"""The names by which a command line calls experts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from mecha_exp.app.words.slips import MODELS

_INDEX = ".safetensors.index.json"


def names_of(paths: Sequence[str]) -> list[str]:
    """A short name for each expert: its file's, with its folder's where files have one name.

    >>> names_of(["made://x/a.safetensors", "b.safetensors"]), names_of(["x/a.pt", "y/a.pt", "y/b c.pt"])
    (['a', 'b'], ['x_a', 'y_a', 'b_c'])
    >>> names_of(["org/Llama-3.1-8B", "steps/1.5", "steps/1.25"])
    ['Llama-3_1-8B', '1_5', '1_25']
    """
    stems = [_word(_stem(PurePosixPath(path).name)) for path in paths]
    names: list[str] = []
    for path, stem in zip(paths, stems, strict=True):
        name = stem if stems.count(stem) == 1 else f"{_word(PurePosixPath(path).parent.name)}_{stem}"
        namesakes = sum(other == name or other.startswith(f"{name}.") for other in names)
        names.append(f"{name}.{namesakes + 1}" if namesakes else name)
    return names


def _stem(name: str) -> str:
    """The name of a file without the suffix of a model; folders have dots in their names."""
    suffix = next(filter(name.lower().endswith, (_INDEX, *MODELS)), "")
    return name[: len(name) - len(suffix)]


def _word(text: str) -> str:
    """A text as one word of letters, digits and underscores."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", text) or "_"
