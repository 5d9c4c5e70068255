"""Recipes read from YAML and text, and written as text; the graph is in `mecha_exp.graph.nodes`."""

from mecha_exp.recipe.files import deserialize_path, serialize_and_save
from mecha_exp.recipe.templates import fill, parameter, parameters_of
from mecha_exp.recipe.text import deserialize, serialize
from mecha_exp.recipe.yaml_reader import build_recipe

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
