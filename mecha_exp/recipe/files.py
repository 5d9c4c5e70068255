"""Recipes in files: a text of its own (`.mecha`), or the one that a merged model carries in its header."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mecha_exp.checkpoint import open_stored
from mecha_exp.errors import CheckpointError, RecipeError
from mecha_exp.graph.nodes import Node
from mecha_exp.recipe.templates import fill
from mecha_exp.recipe.text import deserialize, serialize
from mecha_exp.sources.search import find_model

SUFFIX = ".mecha"
METADATA_KEY = "mecha_recipe"
"""Under which a model's header has the text of its recipe."""


def deserialize_path(recipe: str | os.PathLike[str]) -> Node:
    """The recipe in a `.mecha` file, or the one that a merged model carries.

    Raises:
        RecipeError: there is no such file, it cannot be read, or it carries no recipe.
        CheckpointError: a model that cannot be read.
    """
    return read_recipe_text(Path(recipe))[1]


def read_recipe_text(path: Path) -> tuple[str, Node]:
    """The text as it stands in the file, and the recipe; errors as of `deserialize_path`."""
    if not path.exists():
        raise RecipeError(f"the recipe '{path}' does not exist. Looked in {path.absolute().parent}.")
    text = _text_of(path) if path.suffix == SUFFIX else _embedded(path)
    try:
        return text, deserialize(text)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None


def serialize_and_save(recipe: Node, path: str | os.PathLike[str]) -> Path:
    """Write the text of a recipe to a file, and return its path; `.mecha` may be left out of it.

    The file ends without a line end, since sd-mecha takes none after the last line.

    Raises:
        RecipeError: the recipe has an in-memory model, or the file cannot be written.
    """
    target = Path(path)
    if target.suffix != SUFFIX:
        target = target.with_name(target.name + SUFFIX)
    serialize(recipe, output=target)
    return target


def _text_of(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")  # line ends as they are: a path may hold some
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is not a text in UTF-8: {error.reason} at byte {error.start}.") from None


def _embedded(path: Path) -> str:
    with open_stored(path) as model:
        text = model.metadata.get(METADATA_KEY)
    if text is None:
        raise RecipeError(
            f"{path} carries no recipe: it is a model that was not merged by mecha_exp or sd-mecha, or it "
            "was merged from models in memory."
        )
    return text


def fill_from_files(recipe: Node, given: Mapping[str, Any], folders: Sequence[Path]) -> Node:
    """The recipe with parameters replaced by values, of which a `.mecha` path is the recipe in that file."""
    if not given:
        return recipe
    is_recipe = {name: isinstance(value, str) and value.endswith(SUFFIX) for name, value in given.items()}
    return fill(
        recipe,
        {
            name: deserialize_path(find_recipe(Path(value), folders)) if is_recipe[name] else value
            for name, value in given.items()
        },
    )


def find_recipe(path: Path, folders: Sequence[Path]) -> Path:
    """Where a recipe lies: as models, relative to the current folder or to one of the model folders."""
    try:
        return find_model(str(path), folders)
    except CheckpointError as error:
        raise RecipeError(str(error).replace("the model", "the recipe", 1)) from None
