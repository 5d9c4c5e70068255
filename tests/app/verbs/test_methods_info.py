"""`info methods`: what a person is told of the merge methods, and the page that is made of it."""

import json
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mecha_exp import cli
from mecha_exp.architectures import resolve
from mecha_exp.architectures.library import registry
from mecha_exp.cli import info
from mecha_exp.errors import RecipeError
from mecha_exp.inspection import methods
from mecha_exp.method_api.registry import BUILTIN_METHODS, all_methods

PAGE = Path(__file__).parents[3] / "docs" / "methods.md"
BUILT_IN = [method for method in all_methods() if method.__wrapped__.__module__.startswith(BUILTIN_METHODS)]


def told(capsys, *arguments: str) -> str:
    assert info.main(["methods", *arguments]) == 0
    return capsys.readouterr().out


def test_the_list_names_every_method_by_family(capsys):
    listed = told(capsys, "--markdown")

    for method in BUILT_IN:
        assert f"| `{method.identifier}` |" in listed
    assert listed.index("### papers and peers") < listed.index("| `ties` |")
    assert listed.index("### ties") < listed.rindex("| `ties` |")


def test_the_documentation_has_that_very_list(capsys):
    assert PAGE.read_text(encoding="utf-8").endswith(told(capsys, "--markdown")), (
        "docs/methods.md is behind: put what `python -m mecha_exp info methods --markdown` prints at its end"
    )


def test_of_one_method_it_tells_the_ranges_the_meanings_the_source_and_a_command(capsys):
    said = json.loads(told(capsys, "della", "--json"))

    density = next(p for p in said["parameters"] if p["name"] == "density")
    assert density["range"] == "(0, 1]"
    assert density["default"] == 0.5
    assert "fraction of each task vector that is kept" in density["meaning"]
    assert "arXiv:2406.11617" in said["source"]
    assert said["example"] == "python -m mecha_exp recipe=della"
    assert said["memory"] == "streams, row by row"


def test_of_a_method_of_a_paper_it_tells_the_link_the_variants_and_how_the_paper_differs(capsys):
    said = json.loads(told(capsys, "ties", "--json"))

    assert said["link"] == "https://arxiv.org/abs/2306.01708"
    assert said["default"] == "variant=mergekit, recipe=ties: paper"
    assert said["variants"].startswith("paper: elect=mass")
    assert "sd-mecha" in said["agrees"]
    assert "over the whole model" in said["differs"]
    shown = told(capsys, "ties")
    assert all(f"\n{word} " in shown for word in ("link", "default", "variants", "agrees", "differs"))


def test_every_method_of_a_paper_says_who_agrees_or_how_the_paper_differs():
    described = [methods.describe(method) for method in BUILT_IN]

    silent = {m["name"] for m in described if m["link"] and not (m["agrees"] or m["differs"])}
    assert silent == set()


def test_every_switch_between_papers_and_peers_is_explained():
    for method in BUILT_IN:
        spec = next((s for s in method.signature.parameters if s.name == "variant"), None)
        said = methods.describe(method)
        if spec is not None:
            explained = said["variants"].startswith("as `") or all(
                f"{v}:" in said["variants"] for v in spec.choices
            )
            assert explained, method.identifier


WHOLE = {
    "balance_attention",
    "crossover",
    "distribution_crossover",
    "doge",
    "exchange_ema",
    "extract_diffusers_lora",
    "extract_kohya_lokr",
    "extract_kohya_lora",
    "extract_lycoris_lokr",
    "extract_lycoris_lora",
    "fr_merging",
    "iso_c",
    "iso_cts",
    "knots",
    "lora_delta",
    "randperm",
    "rebasin",
    "rebasin_by_activations",
    "regmean",
    "regmean_plus_plus",
    "rotate",
    "smooth_add",
    "stack",
    "star",
    "top_k_tensor_sum",
    "truncate_kronecker",
    "truncate_rank",
    "tsv_m",
    "twin",
    "wudi",
    "zipit",
}
"""All other methods stream."""


def test_it_says_how_a_method_streams():
    memory = {method.identifier: methods.describe(method)["memory"] for method in BUILT_IN}

    assert {name for name, said in memory.items() if said == "needs whole tensors"} == WHOLE
    assert memory["weighted_sum"] == "streams"
    assert memory["karcher"] == memory["ramplus_tl"] == "streams, after reductions"
    assert (
        memory["metagpt"] == memory["model_norm"] == memory["fisher"] == "streams, after a trip over all keys"
    )
    assert memory["model_stock"] == memory["della"] == "streams, row by row"


@pytest.mark.parametrize("method", BUILT_IN, ids=lambda method: method.identifier)
def test_every_hyperparameter_has_a_meaning_and_every_method_a_formula(method):
    said = methods.describe(method)

    assert said["formula"]
    for spec in method.signature.parameters:
        if not spec.is_model:
            assert spec.help, f"{method.identifier}: {spec.name}"


EXAMPLES = {method.identifier: methods.describe(method)["example"] for method in BUILT_IN}
CALLS = {name: text for name, text in EXAMPLES.items() if not text.startswith("python -m mecha_exp recipe=")}


def test_an_example_is_the_recipe_of_that_name_or_one_that_ends_with_the_method():
    assert EXAMPLES["weighted_sum"] == "python -m mecha_exp recipe=weighted_sum"
    assert EXAMPLES["task_arithmetic"] == "python -m mecha_exp recipe=task_arithmetic"
    assert EXAMPLES["rebasin"] == "python -m mecha_exp recipe=rebasin"
    assert EXAMPLES["truncate_rank"] == "python -m mecha_exp recipe=truncate_rank"
    assert EXAMPLES["ties"] == "python -m mecha_exp recipe=ties"


OF_ADAPTERS = {"extract_diffusers_lora", "extract_kohya_lokr", "extract_lycoris_lokr", "extract_lycoris_lora"}
OF_ADAPTERS |= {"lora_delta"}
OF_KNOWN_MODELS = {"balance_attention", "omit_component", "pick_component", "randperm", *OF_ADAPTERS}
OF_LAYERS = {"approximate_rows", "rename_keys", "take_layers", "take_rows"}


@pytest.mark.parametrize("name", sorted(CALLS.keys() - OF_KNOWN_MODELS - OF_LAYERS - {"stack", "statistics"}))
def test_an_example_without_a_recipe_merges(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, letter in enumerate(["a", "b", "c", "base"]):
        generator = torch.Generator().manual_seed(number)
        save_file({"w": torch.randn(6, 4, generator=generator)}, f"{letter}.safetensors")
    words = shlex.split(CALLS[name])

    exec(words[-1], {})

    assert words[:2] == ["python", "-c"]
    assert load_file("out.safetensors")["w"].shape == (6, 4)


def test_the_example_of_a_method_of_layers_merges_models_that_have_some(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_file({f"layers.{n}.w": torch.full((2, 2), float(n)) for n in range(2)}, "a.safetensors")

    exec(shlex.split(CALLS["take_layers"])[-1], {})

    assert load_file("out.safetensors").keys() == {"layers.0.w"}


@pytest.mark.parametrize("name", ["balance_attention", "randperm"])
def test_the_example_of_a_method_of_networks_merges_one_whose_config_is_known(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rule = "{head: 3, rows: [query.weight, key.weight]}"
    keys = "{query.weight: [6, 4], key.weight: [6, 4]}"
    text = f"identifier: tiny-test\ncomponents:\n  x: {{keys: {keys}, symmetries: {{'': [{rule}]}}}}"
    registry.register(registry.from_yaml(text))
    generator = torch.Generator().manual_seed(0)
    drawn = {f"{n}.weight": torch.randn(6, 4, generator=generator) for n in ("query", "key")}
    save_file(drawn, "a.safetensors")

    exec(shlex.split(CALLS[name])[-1], {})

    made = load_file("out.safetensors")
    assert not torch.equal(made["query.weight"], drawn["query.weight"])
    per_head = [x["query.weight"].view(2, 3, 4).mT @ x["key.weight"].view(2, 3, 4) for x in (made, drawn)]
    torch.testing.assert_close(*per_head)


@pytest.mark.parametrize("name", sorted(OF_ADAPTERS))
def test_the_example_of_a_method_about_lora_files_merges_a_model_that_there_are_such_files_for(
    name, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    registry.register(registry.from_yaml("identifier: wee-test\ncomponents: {x: {keys: {w.weight: [6, 4]}}}"))
    for name_of, how in (
        ("a", "prefix: lora"),
        ("b", "prefix: lycoris"),
        ("c", "names: {'': [transformer.]}"),
    ):
        text = f"identifier: wee-{name_of}\nadapter: {{base: wee-test, {how}}}"
        registry.register(registry.from_yaml(text))
    save_file({"w.weight": torch.ones(6, 4)}, "base.safetensors")
    if name == "lora_delta":
        save_file({"lora_w.diff": torch.ones(6, 4)}, "a.safetensors")
    else:
        save_file({"w.weight": torch.full((6, 4), 3.0)}, "a.safetensors")

    exec(shlex.split(CALLS[name])[-1], {})

    made = load_file("out.safetensors")
    if name == "lora_delta":
        assert torch.equal(made["w.weight"], torch.full((6, 4), 2.0))
    else:
        starts = {"kohya": "lora_w.", "lycoris": "lycoris_w.", "diffusers": "transformer.w.lora_"}
        assert made and all(key.startswith(starts[name.split("_")[1]]) for key in made)


@pytest.mark.parametrize("name", ["omit_component", "pick_component"])
def test_the_example_of_a_component_names_one_that_real_models_have(name):
    assert '"vae"' in CALLS[name]
    assert "vae" in resolve("sdxl-sgm").components()


def test_a_person_sees_tables(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["mecha_exp", "info", "methods", "slerp"])

    assert cli.main() == 0

    shown = capsys.readouterr().out
    assert "Spherical interpolation" in shown
    assert "part of the way from a (0) to b (1)" in " ".join(shown.split())
    assert "Shoemake 1985" in shown


def test_a_method_that_is_none_is_met_with_the_nearest():
    with pytest.raises(RecipeError, match=r"unknown merge method 'karchr'\. Did you mean 'karcher'"):
        info.main(["methods", "karchr"])
