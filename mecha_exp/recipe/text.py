"""The text form of a recipe, `.mecha` version 0.1.0 as sd-mecha writes it.

One line a node that others refer to, `&N` being the N-th line after the version; the last line is the
recipe:

    version 0.1.0
    model "a.safetensors" model_config=null merge_space="weight"
    model "b.safetensors" model_config=null merge_space="weight"
    merge "weighted_sum" &0 &1 alpha=0.3

Beyond sd-mecha it can say parameters, lists (`[0.3,0.7]`), infinities, tensors, and any character in a path
or a dictionary's key; docs/recipe-format.md has all of it. Reading a recipe never runs code and opens no
file.
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

VERSION_LINE = "version 0.1.0"


def serialize(recipe: Any, *, finalize: bool = True, output: str | os.PathLike[str] | None = None) -> str:
    """The text of a recipe; equal recipes have equal texts.

    Args:
        recipe: its graph, or whatever means one.
        finalize: is accepted for the sake of scripts written for sd-mecha, and changes nothing.
        output: a file that the text is written to as well.

    Raises:
        RecipeError: the recipe has an in-memory model, which a text cannot name; or the file cannot be
            written.
    """
    text = "\n".join([VERSION_LINE, *write_lines(as_node(recipe))])
    if output is not None:
        write_text(Path(output), text)
    return text


def write_text(path: Path, text: str) -> None:
    """Write a recipe's text to a file; RecipeError where that cannot be done."""
    try:
        path.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise RecipeError(f"{path} cannot be written: {error.strerror}.") from None


def deserialize(recipe: str | Sequence[str]) -> Node:
    """The recipe that a text describes: of version 0.1.0, or of the older format without a version line.

    Args:
        recipe: the text, or its lines.

    Raises:
        RecipeError: with the line, the column and the line's text.
    """
    # Only at these: a path may hold the other characters that splitlines() splits at.
    lines = recipe.split("\n") if isinstance(recipe, str) else [line.removesuffix("\n") for line in recipe]
    lines = [line.removesuffix("\r").removeprefix("\ufeff") for line in lines]
    first = next((number for number, line in enumerate(lines) if text_reader.says_something(line)), None)
    if first is None:
        raise RecipeError(f"line 1: expected '{VERSION_LINE}', found an empty text")
    if lines[first].strip() == VERSION_LINE:
        lines[first] = ""
        return text_reader.read(lines, text_reader.DIALECT)
    if text_legacy.is_legacy(lines[first]):
        return text_reader.read(lines, text_legacy.DIALECT)
    raise RecipeError(f"line {first + 1}: expected '{VERSION_LINE}', found {lines[first][:80]!r}")
