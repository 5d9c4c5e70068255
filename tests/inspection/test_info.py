"""The verbs that look at models: `info`, and `diff` of two of them."""

import json

import pytest
import torch
from safetensors.torch import save_file

import mecha_exp
from mecha_exp.__main__ import main
from mecha_exp.architectures import resolve

SIZES = {"layers": 3, "vocabulary": 50, "hidden": 8, "feed_forward": 12, "queries": 8, "keys": 4}


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """The command line in a folder of its own: its words -> its exit status and all it says."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["mecha_exp", *words])
        status = main()
        said = capsys.readouterr()
        return status, said.out + said.err

    return run


@pytest.fixture
def llama(tmp_path):
    """A tiny Llama in a file: its path and tensors."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        key: torch.rand(info.shape, generator=generator).bfloat16()
        for key, info in resolve("llama-hf").with_sizes(SIZES).keys().items()
    }
    save_file(tensors, tmp_path / "llama.safetensors", {"format": "pt"})
    return tensors


def test_info_lists_every_config(run):
    status, said = run("info", "--json")

    configs = {config["identifier"]: config for config in json.loads(said)["configs"]}
    assert status == 0
    assert {"sdxl-sgm", "sd1-ldm", "flux-flux", "llama-hf", "vit-hf"} <= configs.keys()
    assert configs["sdxl-sgm"]["parameters"] == pytest.approx(3.47e9, rel=0.02)
    assert "sdxl-diffusers" in run("info")[1]


def test_info_of_a_config_says_its_components_blocks_and_conversions(run):
    status, said = run("info", "sdxl-sgm", "-v", "--json")

    config = json.loads(said)
    assert status == 0
    assert config["components"]["diffuser"]["keys"] == 1680
    assert config["blocks"]["sd-mecha"][:2] == ["BASE", "IN00"]
    assert "sdxl-diffusers" in config["converts_to"]
    assert config["moved"]["supermerger"]["model.diffusion_model.label_emb.0.0.bias"] == "IN00"
    assert config["all_keys"]["model.diffusion_model.out.2.bias"]["block"] == "OUT08"
    assert "convention supermerger: IN00 has 8 keys more" in run("info", "sdxl-sgm")[1]


def test_info_of_a_model_says_what_it_is(run, llama):
    status, said = run("info", "llama.safetensors", "--json")

    found = json.loads(said)
    assert status == 0
    assert (found["config"], found["sizes"]["layers"], found["sizes"]["hidden"]) == ("llama-hf", 3, 8)
    assert found["components"]["lm_head"] == {
        "keys": 1,
        "parameters": 400,
        "bytes": 800,
        "dtypes": {"BF16": 1},
    }
    assert found["blocks"] == ["embed_tokens", "0", "1", "2", "norm", "lm_head"]
    assert (found["anomalies"], found["recipe"]) == ([], None)


def test_info_names_stacks_of_experts_and_what_looks_like_one(run, tmp_path):
    experts = "model.layers.0.mlp.experts"
    tensors = {f"{experts}.down_proj": torch.zeros(4, 6, 3), f"{experts}.w1": torch.zeros(4, 3, 6)}
    save_file({**tensors, "model.norm.weight": torch.zeros(6)}, tmp_path / "mixture.safetensors")

    found = json.loads(run("info", "mixture.safetensors", "--json")[1])
    said = run("info", "mixture.safetensors")[1]

    assert found["stacked"] == {f"{experts}.down_proj": 4}
    assert f"stacked: 1 key holds 4 experts each: {experts}.down_proj" in said
    assert (
        "odd: 1 key looks like several experts in one tensor, and no model config says whether that is so: "
        f"{experts}.w1" in said
    )


@pytest.mark.parametrize(
    "more", ["self_attn.q_proj.bias", "self_attn.k_norm.weight", "pre_feedforward_layernorm.weight"]
)
def test_what_families_like_llama_have_besides_is_of_its_layers_and_not_odd(run, llama, more):
    save_file({**llama, f"model.layers.0.{more}": torch.zeros(8)}, "like.safetensors")

    _, said = run("info", "like.safetensors")

    assert f"its layers have 1 more key than llama-hf lists: model.layers.0.{more}" in said
    assert "odd:" not in said and "(unknown)" not in said


def test_info_says_what_is_odd_and_reads_the_numbers_only_when_asked(run, llama, tmp_path):
    llama["model.norm.weight"][1] = float("nan")
    del llama["model.layers.1.mlp.up_proj.weight"]
    save_file({**llama, "stray": torch.zeros(0)}, tmp_path / "odd.safetensors")

    shallow, deep = (
        json.loads(run("info", "odd.safetensors", "--json", *more)[1]) for more in ([], ["--deep"])
    )

    assert shallow["anomalies"] == [
        "1 key is missing: model.layers.1.mlp.up_proj.weight",
        "1 key does not belong to it: stray",
        "1 tensor is empty: stray",
    ]
    assert deep["anomalies"][3:] == ["NaN or infinity in 1 tensor: model.norm.weight (1)"]
    assert "odd: 1 key is missing" in run("info", "odd.safetensors")[1]


def test_info_of_a_model_that_fits_two_configs_names_both(run, tmp_path):
    keys = resolve("sd1-ldm").components()["vae"]
    save_file(
        {k: torch.zeros(i.shape, dtype=torch.float8_e5m2) for k, i in keys.items()},
        tmp_path / "v.safetensors",
    )

    [anomaly] = json.loads(run("info", "v.safetensors", "--json")[1])["anomalies"]

    assert "'sd1-ldm', 'sdxl-kohya', " in anomaly


def test_info_of_nothing_known_is_an_error_with_the_nearest_name(run):
    status, said = run("info", "sdxl-smg")

    assert status == 1
    assert "neither a model config nor a model. Did you mean 'sdxl-sgm'" in " ".join(said.split())
    assert run("info", "missing.safetensors")[0] == 1


def test_diff_measures_every_block_and_finds_what_changed(run, llama, tmp_path):
    other = {key: tensor.clone() for key, tensor in llama.items()}
    key = "model.layers.1.mlp.up_proj.weight"
    other[key] = other[key] * 2
    other["new"] = torch.ones(1)
    other["lm_head.weight"] = torch.ones(51, 8, dtype=torch.bfloat16)
    save_file(other, tmp_path / "other.safetensors")

    status, said = run("diff", "llama.safetensors", "other.safetensors", "--json", "--figure", "f.png")

    found = json.loads(said)
    expected = llama[key].double().norm().item()
    assert status == 0
    assert found["changed"] == [key]
    assert found["blocks"]["1"]["distance"] == pytest.approx(expected)
    assert found["blocks"]["0"] == pytest.approx(
        {"keys": 9, "changed": 0, "distance": 0, "relative_change": 0, "cosine": 1}
    )
    assert (found["only_a"], found["only_b"], found["other_shape"]) == ([], ["new"], ["lm_head.weight"])
    assert (tmp_path / "f.png").stat().st_size > 1000
    said = run("diff", "llama.safetensors", "other.safetensors")[1]
    assert "1 key of another shape: lm_head.weight" in said


def test_diff_reads_two_formats_in_one(run):
    keys = resolve("vae-ldm").keys()
    save_file({k: torch.ones(i.shape, dtype=torch.float8_e4m3fn) for k, i in keys.items()}, "ldm.safetensors")
    assert run("convert", "ldm.safetensors", "--to", "vae-diffusers", "-o", "hf.safetensors")[0] == 0

    found = json.loads(run("diff", "ldm.safetensors", "hf.safetensors", "--json")[1])

    assert (found["changed"], found["only_a"], found["only_b"]) == ([], [], [])
    assert found["notes"] == ["hf.safetensors is vae-diffusers: read as vae-ldm"]


def test_diff_of_models_without_a_common_key_is_an_error(run, llama, tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")

    status, said = run("diff", "llama.safetensors", "a.safetensors")

    assert status == 1
    assert "have no key of the same shape in common" in " ".join(said.split())
    status, said = run("diff", "llama.safetensors", "lama.safetensors")
    assert (status, "Did you mean 'llama.safetensors'" in " ".join(said.split())) == (1, True)
    status, said = run("diff", "3f2a", "91bc", "--figure", "x.png")
    assert (status, "draws the difference of two models" in said) == (1, True)


def test_info_of_a_near_miss_names_the_nearest_config_and_what_differs(run, llama):
    name = "model.layers.1.self_attn.q_proj.weight"
    save_file({**llama, name: torch.zeros(9, 8)}, "odd.safetensors")

    status, said = run("info", "odd.safetensors")

    assert status == 0
    assert f"odd: nearly llama-hf, but {name} is [9, 8] instead of [8, 8]" in said


def test_a_model_unlike_any_is_nearly_nothing(run):
    save_file({f"some.{i}.weight": torch.zeros(3) for i in range(4)}, "own.safetensors")

    assert "nearly" not in run("info", "own.safetensors")[1]


def test_the_blocks_of_two_models_are_those_of_their_config(run, llama):
    save_file({key: tensor + 1 for key, tensor in llama.items()}, "other.safetensors")

    compared = json.loads(run("diff", "llama.safetensors", "other.safetensors", "--json")[1])

    assert compared["config"] == "llama-hf"
    assert set(compared["blocks"]) == set(resolve("llama-hf").with_sizes(SIZES).blocks())


def test_an_architecture_with_one_config_is_enough_of_a_name(run):
    assert run("info", "flux")[1].startswith("flux-flux: ")

    status, said = run("info", "sdxl")
    assert status == 1
    assert "'sdxl' has several model configs: sdxl-diffusers, " in " ".join(said.split())


def test_info_shows_the_recipe_that_a_model_carries_and_the_blocks_that_it_has(run, llama, tmp_path):
    del llama["lm_head.weight"]
    save_file(llama, tmp_path / "tied.safetensors")
    recipe = mecha_exp.weighted_sum("tied.safetensors", "tied.safetensors", alpha=0.125)
    mecha_exp.merge(recipe, "merged.safetensors")

    status, said = run("info", "merged.safetensors")

    assert status == 0
    assert "blocks: embed_tokens 0 1 2 norm\n" in said
    tree = said.partition("merged, by this recipe:")[2]
    assert "weighted_sum" in tree
    assert "alpha=0.125" in tree


def test_a_long_recipe_is_cut_and_one_of_unknown_methods_is_shown_as_it_is(run, llama, tmp_path):
    node = mecha_exp.model("llama.safetensors")
    for i in range(20):
        node = mecha_exp.weighted_sum(node, "llama.safetensors", alpha=i / 32 + 0.01)
    save_file(llama, tmp_path / "long.safetensors", {"mecha_recipe": mecha_exp.serialize(node)})
    save_file(llama, tmp_path / "other.safetensors", {"mecha_recipe": 'version 0.1.0\nmerge "of_mine"'})

    assert "lines more: python -m mecha_exp show " in run("info", "long.safetensors")[1]
    assert 'merge "of_mine"' in run("info", "other.safetensors")[1]
