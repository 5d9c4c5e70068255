"""Recipes that are too large are refused with a sentence, before time or memory is spent on them."""

import pytest

from mecha_exp.errors import RecipeError
from mecha_exp.recipe import deserialize

HEAD = 'version 0.1.0\nmodel "a" model_config=null merge_space="weight"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("".join(f'merge "weighted_sum" &{i} &0 alpha=0.3\n' for i in range(20_000)), "at most 20,000 lines"),
        ("dict " + " ".join(f"k{i}=1" for i in range(50_000)), "line 3, .*a line has at most 40,000 values"),
        ('model "' + "\\" * 1_000_000 + '"', "at most 4,096 characters, this one 500,000"),
        ('model "' + "\\" * 1_000_000, "a quote or a bracket is not closed"),
        ("merge " + "[" * 1_000_000, "a quote or a bracket is not closed"),
    ],
)
def test_what_is_too_large_is_refused(text: str, message: str):
    with pytest.raises(RecipeError, match=message) as raised:
        deserialize(HEAD + text)
    assert len(str(raised.value)) < 2000
