"""Scripts for sd-mecha 1.1.8 say these names and keywords; whoever changes one breaks somebody's script."""

import inspect

import pytest
import torch

import mecha_exp as m
from mecha_exp.extensions import merge_methods, model_configs

A = {"x": torch.tensor([1.0, 2.0])}

KEYWORDS = {
    "model": ["state_dict", "config", "merge_space"],
    "literal": ["value", "config", "merge_space"],
    "convert": ["recipe", "config"],
    "serialize": ["recipe", "finalize", "output"],
    "deserialize": ["recipe"],
    "deserialize_path": ["recipe"],
    "value_to_node": ["node_or_value", "expected_type"],
    "skip_key": ["key"],
    "set_log_level": ["level"],
    "Parameter": ["interface", "merge_space", "model_config"],
    "Return": ["interface", "merge_space", "model_config"],
    "merge": [
        *(
            "recipe",
            "fallback_model",
            "merge_device",
            "merge_dtype",
            "output_device",
            "output_dtype",
            "threads",
        ),
        *("total_buffer_size", "strict_merge_space", "strict_mandatory_keys", "check_extra_keys"),
        *("check_finite_output", "omit_non_finite_inputs", "allow_empty_merge", "memoize_intermediates"),
        *("validate_mm_contract", "cache", "tqdm", "output"),
    ],
    "merge_method": [
        *("identifier", "register", "is_conversion", "implements", "is_interface", "reuse_outputs"),
        "cache_factory",
    ],
    "add_difference": ["a", "b", "c", "alpha", "clamp_to_ab"],
    "tensor_sum": ["a", "b", "c", "width", "offset", "top_k"],
    "copy_region": ["a", "b", "c", "width", "offset", "top_k"],
    "dropout": ["a", "models", "probability", "alpha", "overlap", "overlap_emphasis", "seed"],
    "rotate": ["a", "b", "alignment", "alpha"],
    "add_ties_with_dare": [
        *("base", "models", "della_eps", "probability", "rescale", "alpha", "seed", "k", "vote_sgn"),
        *("apply_stock", "cos_eps", "apply_median", "eps", "maxiter", "ftol"),
    ],
}


@pytest.mark.parametrize("name", KEYWORDS)
def test_a_function_has_the_keywords_that_it_has_there(name):
    ours = inspect.signature(getattr(m, name)).parameters

    assert [word for word in KEYWORDS[name] if word not in ours] == []


def test_the_extensions_have_their_keywords():
    assert next(iter(inspect.signature(model_configs.from_yaml).parameters)) == "yaml_config"
    assert list(inspect.signature(model_configs.to_yaml).parameters) == ["model_config"]
    assert list(inspect.signature(merge_methods.value_to_node).parameters)[1] == "expected_type"


def test_three_dots_are_what_is_left_out():
    merged = m.merge(m.model(A), output=..., output_dtype=..., threads=..., cache=..., tqdm=...)
    mecha = m.Defaults(output_dtype=torch.float16, threads=...)

    assert merged["x"].dtype == torch.float32
    assert mecha.merge(m.model(A), output_dtype=..., output=...)["x"].dtype == torch.float16


def test_a_text_is_written_on_the_way(tmp_path):
    text = m.serialize("a", finalize=False, output=tmp_path / "a.mecha")

    assert (tmp_path / "a.mecha").read_text() == text
    with pytest.raises(m.RecipeError, match="cannot be written"):
        m.serialize("a", output=tmp_path / "none" / "a.mecha")


def test_a_node_contains_what_it_is_made_of():
    a, b = m.model("a"), m.model("b", "sdxl-sgm")
    recipe = a | b

    assert isinstance(recipe, m.RecipeNode)
    assert a in recipe
    assert m.model("c") not in recipe
    assert list(recipe) == [a, b, recipe]
    assert (a.model_config, b.model_config.identifier) == (None, "sdxl-sgm")
    assert recipe.model_config is None
    assert m.convert(m.model("b", "sd1-ldm"), "sd1-diffusers").model_config.identifier == "sd1-diffusers"


def test_a_literal_without_a_merge_space_is_a_hyperparameter():
    assert m.literal(3.0, None, None) is m.literal(3.0)


def test_a_seed_of_none_is_the_default_seed():
    assert m.dropout("a", "b", seed=None) is m.dropout("a", "b")
    with pytest.raises(m.RecipeError, match="probability: expected a number, got None"):
        m.dropout("a", "b", probability=None)


def test_regions_of_three_models_are_copied_as_differences():
    a, b, c = (m.model({"x": torch.full((4, 2), value)}) for value in (1.0, 2.0, 0.5))

    assert m.merge(m.tensor_sum(a, b, c, width=0.5))["x"][:, 0].tolist() == [2, 2, 1, 1]
    assert m.merge(m.tensor_sum(a, b, 0.25))["x"][:, 0].tolist() == [2, 1, 1, 1]
    assert m.tensor_sum("a", "b", "c", width=1.0, top_k=True)
