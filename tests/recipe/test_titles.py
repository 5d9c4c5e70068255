"""The title of a recipe names it in papers, and decides nothing else."""

import pytest

from mecha_exp.errors import RecipeError
from mecha_exp.recipe.yaml_reader import build_recipe

CALL = {"method": "weighted_sum", "a": "a.safetensors", "b": "b.safetensors", "alpha": 0.5}


def test_a_title_leaves_the_graph_as_it_is():
    assert build_recipe({"title": "My-Merge", **CALL}) == build_recipe(CALL)


def test_a_title_that_is_not_a_name_is_an_error_beside_the_others():
    with pytest.raises(RecipeError, match=r"(?s)recipe.title: expected a name, got 3.*unknown|alhpa"):
        build_recipe({"title": 3, **CALL, "alhpa": 1})


def test_a_title_within_a_recipe_is_an_unknown_word():
    with pytest.raises(RecipeError, match="title"):
        build_recipe({**CALL, "a": {"title": "Inner", **CALL}})
