"""Recipes in files: a `.mecha` text, or the recipe in the header of a merged model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mecha_exp.checkpoint import open_stored
from mecha_exp.errors import CheckpointError, RecipeError, prefixed
from mecha_exp.graph.nodes import Node
from mecha_exp.recipe.templates import fill
from mecha_exp.recipe.text import deserialize, serialize
from mecha_exp.sources.search import find_model

SUFFIX = ".mecha"
METADATA_KEY = "mecha_recipe"
"""The key of the recipe's text in a model's header."""


def deserialize_path(recipe: str | os.PathLike[str]) -> Node:
    """Read the recipe of a `.mecha` file or of a merged model.

    Raises:
        RecipeError: the file does not exist, cannot be read, or has no recipe.
        CheckpointError: the model cannot be read.
    """
    return read_recipe_text(Path(recipe))[1]


def read_recipe_text(path: Path) -> tuple[str, Node]:
    """The text in a file, and the recipe; errors as in `deserialize_path`."""
    if not path.exists():
        raise RecipeError(f"the recipe '{path}' does not exist. Looked in {path.absolute().parent}.")
    text = _text_of(path) if path.suffix == SUFFIX else _embedded(path)
    with prefixed(f"{path}: ", RecipeError):
        return text, deserialize(text)


def serialize_and_save(recipe: Node, path: str | os.PathLike[str]) -> Path:
    """Write the text of a recipe to a file and return its path. The suffix `.mecha` is added if missing.

    The last line has no line end, since sd-mecha does not accept one.

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
        return path.read_bytes().decode("utf-8")  # without translating line ends: a path may contain some
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


def fill_from_files(recipe: Node, arguments: Mapping[str, Any], folders: Sequence[Path]) -> Node:
    """Fill the parameters of a recipe; the path of a `.mecha` file stands for the recipe in it."""

    def loaded(value: Any) -> Any:
        is_recipe = isinstance(value, str) and value.endswith(SUFFIX)
        return deserialize_path(find_recipe(Path(value), folders)) if is_recipe else value

    return fill(recipe, {name: loaded(value) for name, value in arguments.items()}) if arguments else recipe


def find_recipe(path: Path, folders: Sequence[Path]) -> Path:
    """Find a recipe as models are found: in the current folder, or in one of the model folders."""
    try:
        return find_model(str(path), folders)
    except CheckpointError as error:
        raise RecipeError(str(error).replace("the model", "the recipe", 1)) from None
