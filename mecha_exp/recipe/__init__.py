"""Recipes from YAML and from text, and back to text; the graph itself is in `mecha_exp.nodes`."""

from mecha_exp.recipe.build import build_recipe
from mecha_exp.recipe.files import deserialize_path, serialize_and_save
from mecha_exp.recipe.parameters import fill, parameter, parameters_of
from mecha_exp.recipe.text import deserialize, serialize

__all__ = [
    "build_recipe",
    "deserialize",
    "deserialize_path",
    "fill",
    "parameter",
    "parameters_of",
    "serialize",
    "serialize_and_save",
]
