"""The keywords of merge: those of sd-mecha 1.1.8, as far as they mean something here."""

import logging
import re

import pytest
import torch

import mecha_exp
from mecha_exp import (
    ConfigError,
    Defaults,
    MechaError,
    MergeError,
    RecipeError,
    merge,
    model,
    weighted_sum,
)
from mecha_exp.system import progress

A = {"x": torch.tensor([1.0, 2.0]), "y": torch.tensor([3.0])}
B = {"x": torch.tensor([5.0, 6.0]), "y": torch.tensor([7.0])}
RECIPE = weighted_sum(model(A), model(B), alpha=0.5)


class Bar:
    """A progress bar as tqdm makes one."""

    total = done = 0
    keys = ()

    def __init__(self, **words):
        Bar.total, Bar.done, Bar.keys = words["total"], 0, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def update(self, count):
        Bar.done += count

    def set_postfix_str(self, text, refresh):
        assert not refresh
        Bar.keys.append(text)


def test_keywords_are_options_of_the_engine_in_other_words(tmp_path):
    made = merge(
        RECIPE,
        merge_dtype=torch.float64,
        output_dtype=torch.bfloat16,
        output_device="cpu",
        threads=0,
        tqdm=Bar,
        total_buffer_size=2**20,
        memoize_intermediates=False,
        validate_mm_contract=False,
        check_extra_keys=False,
    )

    assert made["x"].dtype == torch.bfloat16
    assert made["x"].tolist() == [3, 4]
    assert Bar.done == Bar.total > 0
    assert sorted(Bar.keys) == ["x", "y"]


def test_a_bar_that_cannot_show_keys_is_a_bar(monkeypatch):
    monkeypatch.delattr(Bar, "set_postfix_str")

    merge(RECIPE, tqdm=Bar)

    assert Bar.done == Bar.total > 0


def test_the_log_tells_how_far_a_merge_is_and_what_it_took(caplog, monkeypatch):
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)

    merge(RECIPE)
    assert caplog.text == ""
    with caplog.at_level(logging.INFO, "mecha_exp"):
        merge(RECIPE, threads=1)

    far, _, took = (record.getMessage() for record in caplog.records)
    assert re.fullmatch(r"16 B of 24 B, [\d.]+ .?B/s, \d+ s left, at x", far)
    said = r"merged 2 keys in 0\.\d\d s: 24 B read, 12 B written, [\d.]+ .?B/s, peak memory [\d.]+ [MG]B"
    assert re.fullmatch(said, took)


def test_the_output_is_a_file_a_dictionary_or_what_is_returned(tmp_path):
    path, given = tmp_path / "merged.safetensors", {"other": torch.ones(1)}

    assert merge(RECIPE, output=str(path)) == path
    assert path.exists()
    assert merge(RECIPE, output=given) is given
    assert given.keys() == {"other", "x", "y"}
    assert merge(A).keys() == A.keys()


def test_a_fallback_model_gives_what_the_recipe_lacks():
    assert merge(model({"x": A["x"]}), fallback_model=B)["y"] == 7


def test_a_missing_key_is_an_error_unless_it_is_said_to_be_none():
    half = weighted_sum(model({"x": A["x"]}), model(B), alpha=0.5)

    with pytest.raises(MechaError, match="lacks 1 of the 2 keys"):
        merge(half)
    assert merge(half, strict_mandatory_keys=False).keys() == {"x"}


def test_a_key_that_is_not_finite_is_an_error_kept_or_left_out():
    broken = weighted_sum(model({**A, "y": torch.tensor([torch.nan])}), model(B), alpha=0.5)

    with pytest.raises(MergeError, match="not finite"):
        merge(broken)
    assert merge(broken, omit_non_finite_inputs=False)["y"].isnan()
    assert merge(broken, omit_non_finite_inputs=True, fallback_model=A)["y"] == 3
    assert merge(broken, omit_non_finite_inputs=True, strict_mandatory_keys=False).keys() == {"x"}


def test_values_that_are_not_finite_are_warned_of(caplog):
    huge = model({"x": torch.tensor([1e30])})

    merge(huge, output_dtype=torch.float16)
    merge(huge, output_dtype=torch.float16, check_finite_output=False)

    assert [record.levelno for record in caplog.records if "not finite" in record.message] == [
        logging.WARNING
    ]


def test_a_file_holds_weights_unless_it_is_said_to_hold_something_else(tmp_path):
    delta, path = model(A) - model(B), tmp_path / "d.safetensors"

    with pytest.raises(RecipeError, match=r"gives a delta, not a weight.*strict_merge_space='delta'"):
        merge(delta, path)
    assert merge(delta, path, strict_merge_space="delta") == path
    assert merge(delta, path, strict_merge_space=None) == path
    assert merge(delta)["x"].tolist() == [-4, -4]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"merge_dtype": torch.float16}, "merge_dtype: F16 rounds every step of a merge"),
        ({"threads": -1}, "threads: expected a whole number of at least 0, got -1"),
        ({"strict_merge_space": "wight"}, "unknown merge space 'wight'. Did you mean 'weight'?"),
        ({"output_dtype": "flaot16"}, "unknown dtype 'flaot16'"),
    ],
)
def test_what_is_wrong_with_a_keyword_is_said(words, said):
    with pytest.raises(MechaError) as error:
        merge(RECIPE, **words)

    assert said in str(error.value)


def test_an_empty_result_is_an_error_unless_it_is_allowed():
    nothing = model({})

    with pytest.raises(MergeError, match="gives no key"):
        merge(nothing)
    assert merge(nothing, allow_empty_merge=True) == {}


def test_defaults_are_keywords_for_several_merges():
    mecha = Defaults(output_dtype=torch.float16)

    assert mecha.merge(RECIPE)["x"].dtype == torch.float16
    assert mecha.merge(RECIPE, output_dtype=torch.float64)["x"].dtype == torch.float64
    assert mecha.convert(RECIPE, RECIPE) is RECIPE
    with pytest.raises(ConfigError, match="no keyword 'ouput'"):
        Defaults(ouput="x")


def test_models_are_looked_for_in_the_folders_that_are_added(tmp_path, monkeypatch, save):
    monkeypatch.setattr("mecha_exp.sources.search_path._folders", [])
    save("a", A)
    mecha_exp.extensions.model_dirs.add_path(tmp_path)

    assert merge("a.safetensors")["y"] == 3
    assert mecha_exp.extensions.model_dirs.normalize_path("a.safetensors") == tmp_path / "a.safetensors"
    assert mecha_exp.extensions.model_dirs.get_all() == [tmp_path]


def test_the_extensions_have_their_names():
    extensions = mecha_exp.extensions

    assert extensions.merge_methods.resolve("slerp") is mecha_exp.slerp
    assert mecha_exp.slerp in extensions.merge_methods.get_all()
    assert [space.identifier for space in extensions.merge_spaces.get_all()][:3] == [
        "weight",
        "delta",
        "param",
    ]
    assert extensions.merge_spaces.get_identifiers({"weight"}) == ["weight"]
    symbol = mecha_exp.MergeSpaceSymbol("weight", "delta")
    assert extensions.merge_spaces.get_identifiers(symbol) == ["weight", "delta"]
    with pytest.raises(RecipeError, match=r"unknown merge space 'wieght'\. Did you mean 'weight'"):
        extensions.merge_spaces.get_identifiers({"wieght"})
    with pytest.raises(RecipeError, match="several merge spaces, got the one name 'weight'"):
        extensions.merge_spaces.get_identifiers("weight")
    assert "sdxl-sgm" in [config.identifier for config in extensions.model_configs.get_all()]


def test_values_become_nodes():
    assert mecha_exp.value_to_node("a") is model("a")
    assert mecha_exp.value_to_node("a", str) is mecha_exp.literal("a")
    assert mecha_exp.value_to_node(RECIPE) is RECIPE


def test_the_log_level_is_that_of_this_library():
    mecha_exp.set_log_level("ERROR")

    assert logging.getLogger("mecha_exp").level == logging.ERROR
    mecha_exp.set_log_level(logging.NOTSET)
