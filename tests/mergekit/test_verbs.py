"""The verbs merge, show and plan take configurations of mergekit, with the words of mergekit-yaml."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from mergekit_configs import CONFIGS, LAYERS
from safetensors import safe_open
from safetensors.torch import load_file

from mecha_exp import from_mergekit, merge
from mecha_exp.cli import main
from mecha_exp.mergekit.settings import NUMBER, read_setting

SLERP = CONFIGS["slerp by filters and gradients"]


@pytest.fixture
def run(here: Path, monkeypatch: pytest.MonkeyPatch):
    (here / "slerp.yml").write_text(SLERP)

    def call(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["mecha_exp", *arguments])
        return main()

    return call


def test_a_configuration_is_merged_into_a_folder(run, here: Path, llamas: Path):
    assert run("merge", "slerp.yml", "out/merged") == 0

    merged = load_file(here / "out" / "merged" / "model.safetensors")
    again = merge(from_mergekit("slerp.yml"))
    assert all(torch.equal(merged[key], again[key]) for key in again)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        written = json.loads((here / "out" / "merged" / name).read_text())
        assert written == json.loads((llamas / "base" / name).read_text())


def test_the_recipe_in_the_output_is_merged_again_to_the_same_bytes(run, here: Path):
    run("merge", "slerp.yml", "-o", "one.safetensors")

    assert run("merge", "one.safetensors", "-o", "two.safetensors") == 0
    assert (here / "one.safetensors").read_bytes() == (here / "two.safetensors").read_bytes()


def test_values_and_settings_are_given_after_it(run, here: Path):
    (here / "linear.yml").write_text("merge_method: linear\nmodels: [{model: a}, {model: b}]\n")

    values = ["-p", "parameters.weight", "1.0", "-p", "models.1.parameters.weight", "3"]
    values += ["-p", "merge_method", "linear", "-p", "out_dtype", "bfloat16"]
    status = run("merge", "linear.yml", "merged.safetensors", "engine.on_tokens=merge", *values)

    assert status == 0
    a, b = (merge(from_mergekit({"merge_method": "passthrough", "models": [{"model": n}]})) for n in "ab")
    for key, tensor in load_file(here / "merged.safetensors").items():
        torch.testing.assert_close(tensor, (0.25 * a[key] + 0.75 * b[key]).bfloat16())


def test_an_output_is_asked_for(run, capsys: pytest.CaptureFixture[str]):
    assert run("merge", "slerp.yml") == 1

    assert "say where the model goes: python -m mecha_exp merge slerp.yml OUTPUT" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["show", "plan"])
def test_a_configuration_is_shown_and_planned(verb: str, run, capsys: pytest.CaptureFixture[str]):
    assert run(verb, "slerp.yml") == 0

    out = capsys.readouterr().out
    assert "slerp_raw" in out
    assert "base" in out and "b" in out


def test_a_tokenizer_and_a_chat_template_are_written(run, here: Path, llamas: Path):
    own = here / "own"
    own.mkdir()
    for file in (llamas / "a").iterdir():
        (own / file.name).write_bytes(file.read_bytes())
    settings = json.loads((own / "tokenizer_config.json").read_text())
    (own / "tokenizer_config.json").write_text(
        json.dumps({**settings, "pad_token": "t1", "chat_template": "x"})
    )
    (here / "own.yml").write_text(f"{SLERP}tokenizer_source: own\nchat_template: '{{{{ messages }}}}'\n")
    (here / "plain.yml").write_text(f"{SLERP}tokenizer: {{source: own}}\n")

    assert (run("merge", "own.yml", "merged"), run("merge", "plain.yml", "plain")) == (0, 0)

    written = json.loads((here / "merged" / "tokenizer_config.json").read_text())
    assert written == {**settings, "pad_token": "t1"}
    assert (here / "merged" / "chat_template.jinja").read_text() == "{{ messages }}"
    plain = json.loads((here / "plain" / "tokenizer_config.json").read_text())
    assert plain == {**settings, "pad_token": "t1", "chat_template": "x"}
    assert not (here / "plain" / "chat_template.jinja").exists()


def test_the_chat_template_of_most_models_is_written(run, here: Path, llamas: Path):
    templates = {"x": "{{ one }}", "y": [{"name": "default", "template": " {{ two }}\n"}], "z": None}
    for name, template in templates.items():
        shutil.copytree(llamas / "a", here / name)
        settings = json.loads((here / name / "tokenizer_config.json").read_text())
        (here / name / "tokenizer_config.json").write_text(
            json.dumps({**settings, "chat_template": template})
        )
    (here / "z" / "chat_template.jinja").write_text("{{ two }}")
    linear = "merge_method: linear\nparameters: {weight: 1}\nchat_template: auto\nmodels: "
    (here / "auto.yml").write_text(linear + "[{model: x}, {model: y}, {model: z}, {model: b}]\n")
    (here / "none.yml").write_text(linear + "[{model: a}, {model: b}]\n")

    assert (run("merge", "auto.yml", "auto"), run("merge", "none.yml", "none")) == (0, 0)

    assert (here / "auto" / "chat_template.jinja").read_text() == "{{ two }}"
    assert "chat_template" not in json.loads((here / "auto" / "tokenizer_config.json").read_text())
    assert not (here / "none" / "chat_template.jinja").exists()


def test_random_masks_keep_the_density_of_each_layer(here: Path):
    """What DARE keeps is random: the number of entries that change follows the gradient of the density."""
    config = {
        "merge_method": "dare_linear",
        "base_model": "base",
        "models": [{"model": "a", "parameters": {"weight": 1.0, "density": [0.1, 0.9]}}],
    }
    base = merge(from_mergekit({"merge_method": "passthrough", "models": [{"model": "base"}]}))
    merged = merge(from_mergekit(config))

    def share(layer: int) -> float:
        keys = [key for key in base if f"layers.{layer}." in key and "proj" in key]
        changed = sum(int((merged[key] != base[key]).sum()) for key in keys)
        return changed / sum(base[key].numel() for key in keys)

    for layer in range(LAYERS):
        density = 0.1 + 0.8 * layer / (LAYERS - 1)
        assert share(layer) == pytest.approx(density, abs=4 * (density * (1 - density) / 448) ** 0.5)


def test_the_first_filter_that_holds_a_key_decides():
    setting = read_setting(
        [{"filter": "q_proj", "value": [0, 1]}, {"filter": "*", "value": "1e-3"}], NUMBER, "weight"
    )

    assert setting.at("layers.0.q_proj", 0.25) == 0.25
    assert setting.at("layers.0.k_proj", 0.25) == 1e-3
    assert read_setting({"filter": "q_proj", "value": 2}, NUMBER, "weight").at("k_proj", 0) is None


def test_layers_whose_keys_agree_are_one_selector(run, here: Path, capsys: pytest.CaptureFixture[str]):
    (here / "ties.yml").write_text(CONFIGS["ties by gradients and filters"])
    run("show", "slerp.yml", "-p", "parameters.t", "0.4")
    constant = capsys.readouterr().out
    run("show", "ties.yml")

    assert "slerp_raw  alpha=0.4" in constant
    assert "model.layers.3.*: (0.1, 0.5, 0.33)" in capsys.readouterr().out


@pytest.mark.libraries
@pytest.mark.filterwarnings("ignore")
def test_transformers_loads_the_output_and_its_tokenizer(run, here: Path):
    transformers = pytest.importorskip("transformers")
    run("merge", "slerp.yml", "merged")

    model = transformers.AutoModelForCausalLM.from_pretrained(here / "merged").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(here / "merged")

    with safe_open(here / "merged" / "model.safetensors", framework="pt") as merged:
        assert torch.equal(model.lm_head.weight, merged.get_tensor("lm_head.weight"))
    assert tokenizer("t3 t5")["input_ids"] == [3, 5]
    assert model(torch.tensor([[3, 5]])).logits.isfinite().all()


@pytest.mark.libraries
@pytest.mark.filterwarnings("ignore")
def test_transformers_loads_a_model_of_more_layers_whose_added_layers_change_nothing(run, here: Path):
    """Layers whose outputs are scaled by 0 add nothing to the residual stream: depth up-scaling begins so."""
    transformers = pytest.importorskip("transformers")
    (here / "deep.yml").write_text(CONFIGS["slices of one model, one layer scaled"])
    (here / "plain.yml").write_text("merge_method: passthrough\nmodels: [{model: a}]\n")
    logits = []
    for name in ("deep", "plain"):
        assert run("merge", f"{name}.yml", name) == 0
        model = transformers.AutoModelForCausalLM.from_pretrained(here / name).eval()
        logits.append(model(torch.tensor([[3, 5, 7]])).logits)

    assert transformers.AutoConfig.from_pretrained(here / "deep").num_hidden_layers == LAYERS + 1
    torch.testing.assert_close(*logits)


def test_options_of_mergekit_yaml_are_errors_that_say_what_takes_their_place(run, here: Path, capsys):
    assert run("merge", "slerp.yml", "out", "--out-shard-size", "1B", "--cuda", "--lazy-unpickle") == 1

    said = capsys.readouterr().err
    assert (
        "--out-shard-size: --shard-size, --cuda: engine.device=cuda, --lazy-unpickle: leave it out." in said
    )
    assert not (here / "out").exists()


def test_an_option_that_nobody_knows_is_a_mistake_in_the_words(run, capsys):
    with pytest.raises(SystemExit) as ended:
        run("merge", "slerp.yml", "out", "--lasy")

    assert ended.value.code == 2
    assert "unrecognized arguments: --lasy" in capsys.readouterr().err


def test_the_seed_of_random_masks_is_a_parameter(run, here: Path):
    config = {
        "merge_method": "dare_linear",
        "base_model": "base",
        "models": [{"model": "a"}, {"model": "b"}],
        "parameters": {"weight": 0.5, "density": 0.5},
    }
    (here / "dare.yml").write_text(json.dumps(config))

    statuses = [
        run("merge", "dare.yml", "-o", "plain.safetensors"),
        run("merge", "dare.yml", "-o", "zero.safetensors", "-p", "parameters.seed", "0"),
        run("merge", "dare.yml", "-o", "three.safetensors", "-p", "parameters.seed", "3"),
    ]

    assert statuses == [0, 0, 0]
    plain, zero, three = (load_file(here / f"{name}.safetensors") for name in ("plain", "zero", "three"))
    assert all(torch.equal(plain[key], zero[key]) for key in plain)
    assert not torch.equal(plain["lm_head.weight"], three["lm_head.weight"])
    expected = merge(from_mergekit(config, values={"parameters.seed": 3}))
    assert all(torch.equal(three[key], expected[key]) for key in expected)


def test_what_is_missing_is_named_alone(run, capsys):
    with pytest.raises(SystemExit):
        run("merge")

    assert capsys.readouterr().err.endswith("the following arguments are required: recipe\n")
