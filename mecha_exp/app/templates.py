"""Recipe templates in a configuration: `recipe=mecha recipe.path=template.mecha a=a.safetensors alpha=0.3`.

A parameter of the recipe is filled by the top-level value of its name, which need not be in any file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mecha_exp.graph.nodes import Node
from mecha_exp.recipe import build_recipe, deserialize_path, parameters_of
from mecha_exp.recipe.files import fill_from_files, find_recipe


def build_filled(config: Mapping[str, Any], folders: Sequence[Path], reserved: Sequence[str]) -> Node:
    """Build the recipe of a resolved configuration, and fill the parameters that it has values for.

    Args:
        config: the whole configuration; its `recipe` is built.
        folders: where recipes are looked for, after the current folder.
        reserved: top-level names that mean something else, and fill nothing.

    Raises:
        RecipeError: everything that is wrong with it.
    """
    recipe = _built(config.get("recipe"), folders)
    names = sorted({parameter.name for parameter in parameters_of(recipe)} - set(reserved))
    given = {name: config[name] for name in names if config.get(name) is not None}
    return fill_from_files(recipe, given, folders)


def names_in(recipe: Any, folders: Sequence[Path]) -> set[str]:
    """The names of the parameters of a configured recipe, before they are filled.

    Raises:
        RecipeError: everything that is wrong with the recipe.
    """
    return {parameter.name for parameter in parameters_of(_built(recipe, folders))}


def _built(recipe: Any, folders: Sequence[Path]) -> Node:
    return build_recipe(recipe, load_text=lambda path: deserialize_path(find_recipe(Path(path), folders)))
