"""The text form of a recipe, `.mecha` version 0.1.0 as sd-mecha writes it.

Each line is a node. `&N` refers to the N-th line after the version, and the last line is the recipe:

    version 0.1.0
    model "a.safetensors" model_config=null merge_space="weight"
    model "b.safetensors" model_config=null merge_space="weight"
    merge "weighted_sum" &0 &1 alpha=0.3

Beyond sd-mecha it has parameters, lists (`[0.3,0.7]`), infinities, tensors, and any character in a path or a
dictionary's key; see docs/recipe-format.md. Reading a recipe runs no code and opens no file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mecha_exp.errors import RecipeError
from mecha_exp.graph.literals import as_node
from mecha_exp.graph.nodes import Node
from mecha_exp.recipe import text_legacy, text_reader
from mecha_exp.recipe.text_writer import write_lines
from mecha_exp.system.atomic_write import replace_text

VERSION_LINE = "version 0.1.0"


def serialize(recipe: Any, *, finalize: bool = True, output: str | os.PathLike[str] | None = None) -> str:
    """The text of a recipe; equal recipes have equal texts.

    Args:
        recipe: its graph, or a value that `as_node` accepts.
        finalize: accepted for scripts written for sd-mecha; it changes nothing.
        output: a file to write the text to.

    Raises:
        RecipeError: the recipe has an in-memory model, which has no path; or the file cannot be written.
    """
    text = "\n".join([VERSION_LINE, *write_lines(as_node(recipe))])
    if output is not None:
        write_text(Path(output), text)
    return text


def write_text(path: Path, text: str) -> None:
    """Write a recipe's text to a file; RecipeError where it cannot be written."""
    try:
        replace_text(path, text, newline="\n")
    except OSError as error:
        raise RecipeError(f"{path} cannot be written: {error.strerror}.") from None


def deserialize(recipe: str | Sequence[str]) -> Node:
    """Read a recipe from text: of version 0.1.0, or of the older format without a version line.

    Args:
        recipe: the text, or its lines.

    Raises:
        RecipeError: the text is not valid; the message has the line, its number and the column.
    """
    # Not splitlines(), which also splits at other characters that a path may contain.
    lines = recipe.split("\n") if isinstance(recipe, str) else [line.removesuffix("\n") for line in recipe]
    lines = [line.removesuffix("\r").removeprefix("\ufeff") for line in lines]
    first = next((number for number, line in enumerate(lines) if text_reader.has_content(line)), None)
    if first is None:
        raise RecipeError(f"line 1: expected '{VERSION_LINE}', found an empty text")
    if lines[first].strip() == VERSION_LINE:
        lines[first] = ""
        return text_reader.read(lines, text_reader.DIALECT)
    if text_legacy.is_legacy(lines[first]):
        return text_reader.read(lines, text_legacy.DIALECT)
    raise RecipeError(f"line {first + 1}: expected '{VERSION_LINE}', found {lines[first][:80]!r}")
