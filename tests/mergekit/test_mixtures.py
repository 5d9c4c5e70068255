"""Dense models become the experts of one; `make parity` makes mergekit-moe's golden file anew."""

import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from mergekit_configs import INNER, LAYERS, WIDTH, model_config
from mergekit_mixtures import MIXTURE_CONFIGS, PROMPTS, write_mixture_models
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mecha_exp import MechaError, from_mergekit, merge
from mecha_exp.app.recipes.templates import brought_by
from mecha_exp.cli import main

GOLDEN = Path(__file__).parents[1] / "golden" / "mergekit-mixtures.safetensors"
TWO = "base_model: base\nexperts: [{source_model: a}, {source_model: b, residual_scale: 0.5}]\n"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models that the configurations name; tests write nothing into it."""
    folder = tmp_path_factory.mktemp("models")
    write_mixture_models(folder)
    return folder


def make(monkeypatch: pytest.MonkeyPatch, config: str, output: str = "made") -> dict[str, torch.Tensor]:
    Path("moe.yml").write_text(config)
    monkeypatch.setattr("sys.argv", ["mecha_exp", "merge", "moe.yml", output])
    assert main() == 0
    return load_file(Path(output) / "model.safetensors")


def as_published(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """mergekit's tensors of all experts under the names of published checkpoints of Mixtral, one by one."""
    published = {}
    for key, tensor in tensors.items():
        prefix = key.partition("mlp.")[0] + "block_sparse_moe"
        for number, expert in enumerate(tensor if ".mlp.experts." in key and tensor.ndim == 3 else ()):
            if key.endswith("down_proj"):
                published[f"{prefix}.experts.{number}.w2.weight"] = expert
            else:
                published[f"{prefix}.experts.{number}.w1.weight"] = expert[:INNER]
                published[f"{prefix}.experts.{number}.w3.weight"] = expert[INNER:]
        if key.endswith(".mlp.gate.weight"):
            published[f"{prefix}.gate.weight"] = tensor
        elif ".mlp." not in key:
            published[key] = tensor
    return published


@pytest.mark.libraries
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MIXTURE_CONFIGS)
def test_the_output_is_that_of_mergekit_moe(name: str, here: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("transformers")
    made = make(monkeypatch, MIXTURE_CONFIGS[name])

    with safe_open(GOLDEN, framework="pt") as golden:
        facts = json.loads(golden.metadata()["configs"])[name]
        expected = {
            k.partition("|")[2]: golden.get_tensor(k) for k in golden.keys() if k.startswith(f"{name}|")
        }
    if facts["model_type"] == "mixtral":
        expected = as_published(expected)
    assert made.keys() == expected.keys()
    for key, tensor in expected.items():
        is_of_bfloat16 = "gate.weight" in key and "hidden" in name  # mergekit reads prompts in bfloat16
        near = {"rtol": 1e-5, "atol": 0.03 if is_of_bfloat16 else 1e-5}
        near = near if tensor.dtype is torch.float32 else {"rtol": 0.01, "atol": 1e-3}
        assert made[key].dtype is tensor.dtype
        torch.testing.assert_close(made[key], tensor, **near, msg=lambda text, k=key: f"{k}: {text}")
    content = json.loads((here / "made" / "config.json").read_text())
    assert {word: content[word] for word in facts if word != "tokens"} == {
        word: value for word, value in facts.items() if word != "tokens"
    }


def test_gates_that_are_drawn_are_the_same_each_time(here: Path, monkeypatch: pytest.MonkeyPatch):
    made = make(monkeypatch, f"{TWO}gate_mode: uniform_random\n")
    again = make(monkeypatch, f"{TWO}gate_mode: uniform_random\n", "again")
    normal = merge(from_mergekit(yaml.safe_load(f"{TWO}gate_mode: random\n")))

    gates = torch.cat([made[f"model.layers.{n}.block_sparse_moe.gate.weight"] for n in range(LAYERS)])
    assert all(torch.equal(made[key], again[key]) for key in made)
    assert gates.shape == (2 * LAYERS, WIDTH)
    assert gates.abs().max() <= 1 / math.sqrt(WIDTH) < 2 * gates.abs().max()
    drawn = torch.cat([normal[f"model.layers.{n}.block_sparse_moe.gate.weight"] for n in range(LAYERS)])
    assert 0.5 < drawn.std() < 1.5


def test_gates_are_not_rounded_before_the_dtype_that_is_said(here: Path):
    config = yaml.safe_load(TWO.replace("base_model: base", "base_model: base16"))

    made = merge(from_mergekit({**config, "gate_mode": "random", "dtype": "float32"}))

    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn((LAYERS, 2, WIDTH), generator=generator)
    assert torch.equal(made["model.layers.1.block_sparse_moe.gate.weight"], drawn[1])


def test_experts_have_the_feed_forward_layers_and_the_base_has_the_rest(
    here: Path, models: Path, monkeypatch: pytest.MonkeyPatch
):
    made = make(monkeypatch, f"{TWO}gate_mode: random\n")

    base, b = (load_file(models / name / "model.safetensors") for name in ("base", "b"))
    layer = "model.layers.2"
    assert torch.equal(made[f"{layer}.self_attn.q_proj.weight"], base[f"{layer}.self_attn.q_proj.weight"])
    experts = f"{layer}.block_sparse_moe.experts.1"
    assert torch.equal(made[f"{experts}.w1.weight"], b[f"{layer}.mlp.gate_proj.weight"])
    assert torch.equal(made[f"{experts}.w2.weight"], b[f"{layer}.mlp.down_proj.weight"] / 2)
    assert torch.equal(made[f"{experts}.w3.weight"], b[f"{layer}.mlp.up_proj.weight"])
    assert (here / "made" / "tokenizer.json").is_file()


def test_the_tokens_of_experts_do_not_matter(here: Path, models: Path):
    """Experts that were trained with more tokens give their feed-forward layers alone."""
    (here / "chat").mkdir()
    tensors = load_file(models / "b" / "model.safetensors")
    tensors["model.embed_tokens.weight"] = torch.ones(20, WIDTH)
    del tensors["lm_head.weight"]
    save_file(tensors, here / "chat" / "model.safetensors")
    (here / "chat" / "config.json").write_bytes((models / "b" / "config.json").read_bytes())
    config = yaml.safe_load(f"{TWO}gate_mode: random\n")
    expected = merge(from_mergekit(config))
    config["experts"][1]["source_model"] = "chat"

    made = merge(from_mergekit(config))

    assert made.keys() == expected.keys()
    assert all(torch.equal(made[key], expected[key]) for key in made)


@pytest.mark.parametrize("verb", ["show", "plan"])
def test_a_mixture_is_shown_and_planned(
    verb: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    Path("moe.yml").write_text(f"{TWO}gate_mode: random\n")
    monkeypatch.setattr("sys.argv", ["mecha_exp", verb, "moe.yml"])

    assert main() == 0
    out = capsys.readouterr().out
    assert "gates" in out and "base" in out


def test_the_bench_refuses_what_it_could_not_find_again(here: Path):
    Path("moe.yml").write_text(f"{TWO}gate_mode: random\n")

    with pytest.raises(MechaError, match=r"moe\.yml is a mixture of experts, whose gates are made in memory"):
        brought_by({"recipe": {"mergekit": "moe.yml"}}, [])


def qwen(folder: Path, model_type: str, seed: int) -> None:
    """A tiny model of Qwen2 or Qwen3."""
    import transformers

    names = {"qwen2": "Qwen2", "qwen3": "Qwen3"}
    torch.manual_seed(seed)
    sizes = {k: v for k, v in model_config().items() if isinstance(v, int) and not isinstance(v, bool)}
    config = getattr(transformers, f"{names[model_type]}Config")(**sizes, head_dim=WIDTH // 2)
    getattr(transformers, f"{names[model_type]}ForCausalLM")(config).save_pretrained(folder)


GLM = "architecture: glm\n"
EQUAL = (
    "experts: [{source_model: a}, {source_model: a}, {source_model: a}]\n"
    "base_model: a\ngate_mode: uniform_random\n"
)
HALVES = (EQUAL + "shared_experts: [{source_model: a}]\n").replace(
    "source_model: a}", "source_model: a, residual_scale: 0.5}"
)


@pytest.mark.libraries
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        ("llama", ""),
        ("qwen3", ""),
        ("qwen2", "shared_experts: [{source_model: a, residual_scale: 0}]\n"),
        ("llama", "architecture: qwen\nshared_experts: [{source_model: a, residual_scale: 0}]\n"),
        ("llama", "halves"),
        ("qwen2", f"{GLM}shared_experts: [{{source_model: a, residual_scale: 0}}]\n"),
    ],
)
def test_equal_experts_give_the_logits_of_the_dense_model(
    model_type: str, more: str, here: Path, models: Path, monkeypatch: pytest.MonkeyPatch
):
    transformers = pytest.importorskip("transformers")
    if model_type != "llama":
        qwen(here / "a", model_type, 1)
    make(monkeypatch, HALVES + GLM if more == "halves" else EQUAL + more)

    tokens = torch.tensor([[3, 5, 7, 1, 0, 9]])
    dense = here / "a" if model_type != "llama" else models / "a"
    logits = [
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()(tokens).logits
        for path in (dense, here / "made")
    ]
    torch.testing.assert_close(*logits)


def granite(tensors: dict[str, torch.Tensor], config: dict[str, object]) -> "torch.nn.Module":
    """A DeepSeek MoE as a Granite MoE, which computes the same: transformers does not have the first."""
    import transformers

    sizes = {
        name: config[name] for name in ("hidden_size", "num_hidden_layers", "vocab_size", "rms_norm_eps")
    }
    sizes |= {
        name: config[name] for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    }
    model = transformers.GraniteMoeSharedForCausalLM(
        transformers.GraniteMoeSharedConfig(
            **sizes,
            num_local_experts=config["n_routed_experts"],
            num_experts_per_tok=config["num_experts_per_tok"],
            shared_intermediate_size=config["moe_intermediate_size"],
            attention_multiplier=(sizes["hidden_size"] // sizes["num_attention_heads"]) ** -0.5,
            rope_parameters={"rope_type": "default", "rope_theta": config["rope_theta"]},
        )
    )
    renamed = {key: tensor for key, tensor in tensors.items() if ".mlp." not in key}
    for layer in (f"model.layers.{number}" for number in range(LAYERS)):
        stacked = {
            name: [
                tensors[f"{layer}.mlp.experts.{n}.{name}.weight"] for n in range(config["n_routed_experts"])
            ]
            for name in ("gate_proj", "up_proj", "down_proj")
        }
        shared = {name: tensors[f"{layer}.mlp.shared_experts.{name}.weight"] for name in stacked}
        experts = [torch.cat(pair) for pair in zip(stacked["gate_proj"], stacked["up_proj"], strict=True)]
        renamed |= {
            f"{layer}.block_sparse_moe.experts.gate_up_proj": torch.stack(experts),
            f"{layer}.block_sparse_moe.experts.down_proj": torch.stack(stacked["down_proj"]),
            f"{layer}.block_sparse_moe.router.weight": tensors[f"{layer}.mlp.gate.weight"],
            f"{layer}.shared_mlp.input_linear.weight": torch.cat([shared["gate_proj"], shared["up_proj"]]),
            f"{layer}.shared_mlp.output_linear.weight": shared["down_proj"],
        }
    model.load_state_dict(renamed)
    return model.eval()


@pytest.mark.libraries
@pytest.mark.filterwarnings("ignore")
def test_equal_experts_of_a_deepseek_moe_give_the_logits_of_the_dense_model(
    here: Path, models: Path, monkeypatch: pytest.MonkeyPatch
):
    transformers = pytest.importorskip("transformers")

    tensors = make(monkeypatch, HALVES)

    config = json.loads((here / "made" / "config.json").read_text())
    tokens = torch.tensor([[3, 5, 7, 1, 0, 9]])
    dense = transformers.AutoModelForCausalLM.from_pretrained(models / "a", dtype=torch.float32).eval()
    torch.testing.assert_close(granite(tensors, config)(tokens).logits, dense(tokens).logits)


@pytest.mark.parametrize(
    ("entries", "written"),
    [
        ({"rope_theta": 5e5}, (5e5, None)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 3e4}}, (3e4, None)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, (1e4, {"type": "linear", "factor": 2})),
    ],
)
def test_a_deepseek_moe_names_its_rotation_as_its_code_reads_it(
    entries: dict, written: tuple, here: Path, models: Path, monkeypatch: pytest.MonkeyPatch
):
    shutil.copytree(models / "a", here / "a")
    (here / "a" / "config.json").write_text(json.dumps({**model_config(), **entries}))

    make(monkeypatch, HALVES)

    config = json.loads((here / "made" / "config.json").read_text())
    assert (config["rope_theta"], config["rope_scaling"]) == written


def change(name: str, models: Path, here: Path, **entries: object) -> None:
    """A copy of a model with other entries in its config.json."""
    shutil.copytree(models / name, here / name)
    (here / name / "config.json").write_text(json.dumps({**model_config(), **entries}))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8}},
            "rotates by {'rope_type': 'llama3', 'factor'",
        ),
        (
            {"rope_scaling": {"type": "linear"}},
            "rotates by {'type': 'linear'}, and DeepSeek MoE by 'default'",
        ),
        ({"head_dim": 16}, "has heads of 16, and those of DeepSeek MoE have 4, the hidden size by their"),
        ({"model_type": "mistral"}, "looks back at 4096 tokens (sliding_window), and DeepSeek MoE at all"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers is '4', and 4 in its weights."),
    ],
)
def test_a_base_that_a_mixture_cannot_be_is_refused(entries: dict, message: str, here: Path, models: Path):
    change("a", models, here, **entries)

    assert message in said(HALVES)


@pytest.mark.libraries
@pytest.mark.filterwarnings("ignore")
def test_a_window_of_attention_is_kept(here: Path, models: Path, monkeypatch: pytest.MonkeyPatch):
    transformers = pytest.importorskip("transformers")
    change("a", models, here, model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=2)

    make(monkeypatch, EQUAL)

    tokens = torch.tensor([[3, 5, 7, 1, 0, 9]])
    windowed, made, whole = (
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()(tokens).logits
        for path in (here / "a", here / "made", models / "a")
    )
    torch.testing.assert_close(made, windowed)
    assert not torch.allclose(made, whole)


def test_the_output_is_not_called_quantised(here: Path, models: Path, monkeypatch: pytest.MonkeyPatch):
    change("a", models, here, quantization_config={"quant_method": "bitsandbytes"})

    make(monkeypatch, EQUAL)

    assert "quantization_config" not in json.loads((here / "made" / "config.json").read_text())


def said(config: str) -> str:
    with pytest.raises(MechaError) as error:
        from_mergekit(yaml.safe_load(config))
    return str(error.value)


def mixture(**changes: object) -> str:
    config = {**yaml.safe_load(TWO), "gate_mode": "random", **changes}
    return yaml.safe_dump({word: value for word, value in config.items() if value is not None})


def of_expert(**words: object) -> str:
    return mixture(experts=[{"source_model": "a", **words}, {"source_model": "b"}])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (mixture(gates=1), "configuration: unknown word 'gates'."),
        (mixture(dtype="int8"), "dtype: unknown dtype 'int8'."),
        (mixture(experts=[]), "experts: expected a list of mappings, got []."),
        (mixture(gate_mode="rnd"), "gate_mode: unknown mode 'rnd'."),
        (
            mixture(experts_per_token=3),
            "experts_per_token: expected a whole number from 1 to 2, the number of",
        ),
        (mixture(base_model=None), "base_model: expected the path or the name of a model, got None."),
        (of_expert(noise_scale=0.1), "experts[0].noise_scale: noise is not added to experts here"),
        (of_expert(residual_scale="x"), "experts[0].residual_scale: expected a number, got 'x'."),
        (
            of_expert(residual_scale=float("nan")),
            "experts[0].residual_scale: expected a number, got nan.",
        ),
        (of_expert(prompts=[]), "experts[0]: unknown word 'prompts'."),
        (of_expert(positive_prompts="x"), "experts[0].positive_prompts: expected a list of texts, got 'x'."),
        (of_expert(source_model="a+b"), "experts[0].source_model: a+b has an adapter, which is not added"),
        (
            mixture(gate_mode="hidden"),
            "experts[0]: gate_mode hidden makes gates of prompts, and there are no",
        ),
        (
            mixture(
                experts=[{"source_model": name, "positive_prompts": ["x"]} for name in "ab"],
                gate_mode="hidden",
            ),
            "experts: all have the same prompts, so that their gates would be equal.",
        ),
        (
            mixture(architecture="dbrx"),
            "architecture: 'dbrx' is not made here. There are Mixtral, DeepSeek MoE, Qwen MoE, Qwen3 MoE",
        ),
        (
            mixture(
                architecture="deepseek",
                shared_experts=[{"source_model": "a", "positive_prompts": ["x"]}],
            ),
            "shared_experts[0]: has prompts, and the shared experts of DeepSeek MoE have no gate.",
        ),
        (
            mixture(architecture="glm", shared_experts=[{"source_model": "a"}]),
            "chooses among two experts or more by the sigmoid of their scores",
        ),
        (
            mixture(shared_experts=[{"source_model": "a"}, {"source_model": "b"}]),
            "experts: no mixture is made of llama with 2 shared experts. There are: Mixtral of llama or",
        ),
        (
            "base_model: base\ngate_mode: hidden\narchitecture: qwen\nexperts:\n"
            f"{PROMPTS}shared_experts: [{{source_model: a}}]",
            "shared_experts[0]: gate_mode hidden makes gates of prompts",
        ),
        (
            "gate_mode: random",
            "this has words of a mixture of experts (mergekit-moe), whose configuration has",
        ),
    ],
)
def test_what_is_wrong_is_said(config: str, message: str, here: Path):
    assert message in said(config)


def write(folder: Path, config: dict[str, object] | None, width: int = INNER) -> None:
    folder.mkdir()
    names = ("gate_proj", "up_proj", "down_proj")
    save_file(
        {f"model.layers.0.mlp.{name}.weight": torch.zeros(width, 2) for name in names},
        folder / "model.safetensors",
    )
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))


def test_models_that_make_no_mixture_are_refused(here: Path, models: Path):
    write(here / "gpt", {**model_config(), "model_type": "gpt2"})
    write(here / "biased", {**model_config(), "mlp_bias": True})
    write(here / "bare", None)
    write(here / "small", model_config())
    write(here / "wide", model_config(), 2 * INNER)

    for name, entries in {"short": {"num_hidden_layers": 2}, "narrow": {"hidden_size": 4}}.items():
        shutil.copytree(models / "base", here / name)
        (here / name / "config.json").write_text(json.dumps({**model_config(), **entries}))
    without = {entry: value for entry, value in model_config().items() if entry != "num_attention_heads"}
    write(here / "headless", without)

    def of(base: str, expert: str) -> str:
        experts = f"experts: [{{source_model: {expert}}}]\nexperts_per_token: 1\n"
        return said(f"base_model: {base}\n{experts}gate_mode: random")

    assert "experts: expected models of one architecture, got base is llama, gpt is gpt2." in of(
        "base", "gpt"
    )
    assert "no mixture is made of gpt2 with 0 shared experts" in of("gpt", "gpt")
    assert "base_model: has mlp_bias, which Mixtral does not have." in of("biased", "biased")
    assert "base_model: its config.json has no num_attention_heads." in of("headless", "headless")
    assert f"in the config.json of short num_hidden_layers is 2, and {LAYERS} in its weights." in of(
        "short", "base"
    )
    assert f"of narrow hidden_size is 4, and {WIDTH} in its weights." in of("narrow", "base")
    assert "base_model: there is no config.json beside" in of("bare", "base")
    assert "small has no 'model.layers.0.self_attn.q_proj.weight', as a Llama or" in of("small", "base")
    assert "the feed-forward layers of wide have other keys or shapes than those of base." in of(
        "base", "wide"
    )


def test_prompts_need_transformers_and_a_tokenizer(here: Path, monkeypatch: pytest.MonkeyPatch):
    config = MIXTURE_CONFIGS["gates of embeddings"]
    monkeypatch.setitem(sys.modules, "transformers", None)

    assert "gate_mode: cheap_embed reads prompts with transformers, which is not installed." in said(config)


@pytest.mark.libraries
@pytest.mark.filterwarnings("ignore")
def test_a_base_that_transformers_cannot_load_is_named(here: Path, models: Path):
    pytest.importorskip("transformers")
    (here / "base").mkdir()
    for name in ("model.safetensors", "config.json"):
        (here / "base" / name).write_bytes((models / "base" / name).read_bytes())

    assert "base_model: transformers cannot load base:" in said(MIXTURE_CONFIGS["gates of embeddings"])


@pytest.mark.libraries
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["cheap_embed", "hidden"])
def test_a_prompt_without_tokens_is_refused(mode: str, here: Path, models: Path):
    pytest.importorskip("transformers")
    shutil.copytree(models / "base", here / "base")
    (here / "base" / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0"}'
    )
    experts = [{"source_model": name, "positive_prompts": [text]} for name, text in (("a", "t1"), ("b", ""))]

    assert "one of them has no tokens" in said(mixture(experts=experts, gate_mode=mode))


def test_the_card_of_a_mixture_has_its_configuration_and_the_licence_of_its_models(
    here: Path, models: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("base", "a", "b"):
        shutil.copytree(models / name, here / name)
        (here / name / "README.md").write_text("---\nlicense: mit\n---\n")

    made = make(monkeypatch, f"{TWO}gate_mode: random\n")

    card = (here / "made" / "README.md").read_text()
    assert "\nlicense: mit\n" in card
    assert "# Merge of base, a and b\n" in card
    again = make(monkeypatch, card.partition("```yaml\n")[2].partition("```")[0], "again")
    assert all(torch.equal(made[key], again[key]) for key in made)
