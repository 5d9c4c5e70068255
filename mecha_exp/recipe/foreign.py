"""Recipes in the form of another tool, read by packages that announce a word: `recipe: {mergekit: FILE}`.

[project.entry-points."mecha_exp.recipes"]
mergekit = "mecha_exp.mergekit.recipe:ConfigurationReader"
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from mecha_exp.checkpoint.sidecars import SmallFiles
from mecha_exp.entry_points import announced, load
from mecha_exp.graph.nodes import Node

GROUP = "mecha_exp.recipes"
_OWN = (".mecha", ".safetensors", "")
"""The suffixes of most recipes, for which no package is loaded."""


@dataclass(frozen=True)
class ForeignRecipe:
    """What a file of another tool asks for.

    Attributes:
        recipe: its graph.
        small_files: those that the output does not have from its first input; see `Job`.
        config: the content of the file, with the values that were changed.
        notes: what of it has no effect, in sentences.
        in_memory: what a recipe is that has models in memory, in words.
    """

    recipe: Node
    small_files: SmallFiles = field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    in_memory: str = "a merge with models in memory"


class RecipeReader:
    """Reads the files of another tool.

    Attributes:
        suffixes: of the files that `python -m mecha_exp merge FILE` takes for its own.
        command: the tool's own.
        options: of that command, with what takes their place.
    """

    suffixes: ClassVar[tuple[str, ...]] = ()
    command: ClassVar[str] = ""
    options: ClassVar[Mapping[str, str]] = {}

    def read(
        self, path: Path, values: Mapping[str, Any], folders: Sequence[Path], offline: bool
    ) -> ForeignRecipe:
        """Read a file; arguments as of `from_mergekit`."""
        raise NotImplementedError

    def paths(self, path: Path) -> Sequence[str]:
        """The dotted paths of the values in a file that may be given or swept."""
        return ()

    def check_names(self, path: Path, reserved: Iterable[str]) -> None:
        """Check that no path of a file begins with a top-level name that means something else."""

    def base(self, path: Path, values: Mapping[str, Any]) -> str | None:
        """The base model that a file names, where these values do not; None if there is none."""
        return None

    def seed(self, path: Path, values: Mapping[str, Any]) -> int | None:
        """The seed of a file whose merge draws at random; None if it draws nothing."""
        return None


def word_of(recipe: Any) -> str | None:
    """The word by which the `recipe` of a configuration is one of another tool; None for our own."""
    words = announced(GROUP) if isinstance(recipe, Mapping) else ()
    return next((word for word in words if word in recipe), None)


@cache
def reader_of(word: str) -> RecipeReader:
    """The reader that announces a word."""
    reader: RecipeReader = load(announced(GROUP)[word])()
    return reader


def reader_of_file(path: Path) -> RecipeReader | None:
    """The reader of a file by its suffix; None for our own recipes, which are models too."""
    readers = map(reader_of, announced(GROUP) if path.suffix not in _OWN else ())
    return next((reader for reader in readers if path.suffix in reader.suffixes), None)


def value_at(config: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path; None where there is none."""
    value: Any = config
    for word in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(word, value.get(int(word)) if word.isdecimal() else None)
    return value
