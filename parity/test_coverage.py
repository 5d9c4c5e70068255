"""No merge method without an oracle or a formula, and none without a recipe to try it with."""

from collections.abc import Iterable
from pathlib import Path

import torch

import mecha_exp as m
from mecha_exp.engine.ir.expansion import expand
from mecha_exp.graph.nodes import MergeNode, walk
from mecha_exp.method_api.registry import BUILTIN_METHODS, all_methods
from parity.inputs import inputs
from parity.recipes import RECIPES
from tests.support import first_formulas, formulas, method_cases

BUILT_IN = {x.identifier for x in all_methods() if x.__wrapped__.__module__.startswith(BUILTIN_METHODS)}
ELSEWHERE = {
    "apply_mask": "test_task_masks",
    "approximate_rows": "test_missing_tokens",
    "balance_attention": "test_symmetries",
    "cast": "parity/test_texts",
    "doge": "test_method_authors",
    "ema": "test_method_authors",
    "emr": "test_method_authors",
    "emr_unified": "test_method_authors",
    "emr_mask": "test_task_masks",
    "exchange_ema": "test_method_edge_cases",
    "df_merge": "test_statistics_of_a_merge",
    "extract_diffusers_lora": "test_transformer_loras",
    "extract_kohya_lokr": "test_lora_extraction",
    "extract_kohya_lora": "test_lora_extraction",
    "extract_lycoris_lokr": "test_lora_extraction",
    "extract_lycoris_lora": "test_lora_extraction",
    "fallback": "parity/test_texts",
    "fisher": "test_merging_with_data",
    "fr_merging": "test_method_authors",
    "get_device": "test_plumbing",
    "get_dtype": "test_plumbing",
    "iso_cts": "test_method_authors",
    "knots": "test_knots",
    "lawa": "test_method_authors",
    "localize_and_stitch": "test_method_authors",
    "lora_delta": "test_lora_modules",
    "magmax": "test_method_authors",
    "metagpt": "test_whole_model",
    "model_dot": "test_whole_model",
    "model_kth_magnitude": "test_whole_model",
    "model_mean": "test_whole_model",
    "model_norm": "test_whole_model",
    "model_squared_norm": "test_whole_model",
    "omit_component": "test_recipes_by_key",
    "omit_non_finite": "test_method_edge_cases",
    "pcb": "test_method_authors",
    "pick_component": "test_recipes_by_key",
    "ramplus": "test_whole_model",
    "randperm": "test_symmetries",
    "rebasin": "test_symmetries",
    "rebasin_by_activations": "test_activations",
    "regmean": "test_merging_with_data",
    "regmean_plus_plus": "test_statistics_of_a_merge",
    "stitch": "test_masks",
    "rename_keys": "test_renamed_keys",
    "select": "test_dictionaries_of_recipes",
    "stack": "test_plumbing",
    "star": "test_method_authors",
    "statistics": "test_merging_with_data",
    "tall_mask_of": "test_task_masks",
    "take_layers": "test_layers",
    "take_rows": "test_rows_of_tokens",
    "twin": "test_method_authors",
    "wise_ft": "test_method_authors",
    "wsm": "test_method_authors",
    "wudi": "test_method_authors",
    "zipit": "test_zipit",
}
"""What chooses or passes on values or is about whole models, and where it is tested."""


def methods_in(recipes: Iterable[m.Node]) -> set[str]:
    """The methods that recipes call."""
    return {node.method.identifier for node in walk(*recipes) if isinstance(node, MergeNode)}


def test_every_method_is_compared_with_an_oracle_or_a_formula():
    models = [m.model(model) for model in inputs(torch.float32)]
    with_oracle = [recipe(*models) for recipe in RECIPES.values()]
    with_formula = [recipe(models) for recipe, _ in formulas.CASES.values()]
    with_formula += [case.recipe(*models[:3]) for case in first_formulas.CASES.values()]

    compared = methods_in([*with_oracle, *expand(with_oracle), *with_formula])

    assert BUILT_IN - compared == ELSEWHERE.keys()


def test_what_is_tested_elsewhere_is_named_there():
    for method, where in ELSEWHERE.items():
        tests = Path(__file__).parents[1] / "tests"
        (path,) = [tests.parent / f"{where}.py"] if "/" in where else tests.rglob(f"{where}.py")
        assert method in path.read_text(encoding="utf-8")


def test_every_method_that_gives_a_model_has_the_properties_tried():
    tried = {method.identifier for method in method_cases.METHODS}

    plumbing = {x.identifier for x in all_methods() if x.__wrapped__.__module__.endswith("methods.plumbing")}
    aside = method_cases.KEY_LESS | method_cases.OF_NETWORKS
    aside |= method_cases.OF_ADAPTERS | method_cases.WITH_DATA
    assert tried == BUILT_IN - plumbing - aside
