"""Adapters that PEFT trained and saved are read as PEFT merges them, on tiny models of three kinds.

Run by `make hf`, which installs the library.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mecha_exp as m

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("ignore")]  # theirs are not ours

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def llama(tied: bool = False) -> nn.Module:
    config = transformers.LlamaConfig(vocab_size=40, tie_word_embeddings=tied, **SMALL)
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(vocab_size=40, num_labels=3, **SMALL)
    return transformers.BertForSequenceClassification(config)


def trained(model: nn.Module, folder: Path, seed: int = 0, **config: Any) -> dict[str, Tensor]:
    """Save a model, and an adapter of it with random values; returns what PEFT merges them to."""
    torch.manual_seed(seed)
    if not (folder / "base").exists():
        model.save_pretrained(folder / "base")
    loaded = type(model).from_pretrained(folder / "base")
    adapted = peft.get_peft_model(loaded, peft.LoraConfig(**{"r": 4, "lora_alpha": 6} | config))
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            noise = torch.randn_like(parameter) * 0.3
            parameter.data = parameter.data + (noise.abs() if "magnitude" in name else noise)
    adapted.save_pretrained(folder / f"adapter_{seed}")
    merged = adapted.merge_and_unload()
    merged.save_pretrained(folder / f"merged_{seed}")
    return {key: tensor.clone() for key, tensor in merged.state_dict().items()}


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (llama, {"target_modules": ["q_proj", "o_proj", "down_proj"]}),
    "rslora with patterns": (
        llama,
        {
            "target_modules": "all-linear",
            "use_rslora": True,
            "rank_pattern": {"down_proj": 2},
            "alpha_pattern": {"layers.0.self_attn.q_proj": 9},
        },
    ),
    "dora": (llama, {"target_modules": ["q_proj", "up_proj"], "use_dora": True}),
    "dora of an embedding": (llama, {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True}),
    "embedding": (llama, {"target_modules": ["embed_tokens", "lm_head"]}),
    "whole head": (llama, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "some layers": (llama, {"target_modules": ["q_proj"], "layers_to_transform": [1]}),
    "gpt2": (gpt2, {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "gpt2, square only": (gpt2, {"target_modules": ["attn.c_proj"]}),
    "gpt2, dora": (gpt2, {"target_modules": ["c_attn", "c_proj"], "use_dora": True}),
    "bert": (bert, {"target_modules": ["query", "value", "dense"], "task_type": "SEQ_CLS"}),
    "bert with biases": (bert, {"target_modules": ["query"], "bias": "all"}),
    "bert with lora_bias": (bert, {"target_modules": ["query"], "lora_bias": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_is_read_as_peft_merges_it(case: str, tmp_path: Path):
    make, config = CASES[case]
    expected = trained(make(), tmp_path, **config)
    base = m.model(str(tmp_path / "base"))

    result = m.merge(base + m.lora_delta(str(tmp_path / "adapter_0"), base))

    with_heads = {key for key in expected if key in result}
    assert with_heads == result.keys()
    for key, tensor in result.items():
        torch.testing.assert_close(tensor, expected[key], rtol=1e-5, atol=1e-6, msg=f"{case}: {key}")


def test_a_merged_folder_gives_the_logits_of_the_adapted_model(tmp_path: Path):
    trained(llama(), tmp_path, target_modules=["q_proj", "v_proj"])
    m.merge(m.weighted_sum(str(tmp_path / "base"), str(tmp_path / "adapter_0"), alpha=1.0), tmp_path / "ours")
    tokens = torch.tensor([[1, 5, 7, 2]])

    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")(tokens).logits
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(loaded, tmp_path / "adapter_0").eval()(tokens).logits

    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_tied_model_gets_the_output_layer_that_was_trained(tmp_path: Path):
    """PEFT's merge of a tied embedding changes the output layer, too, which it did not in training."""
    torch.manual_seed(0)
    trained(llama(tied=True), tmp_path, target_modules=["embed_tokens"])
    base, tokens = m.model(str(tmp_path / "base")), torch.tensor([[1, 5, 7, 2]])
    recipe = base + m.lora_delta(str(tmp_path / "adapter_0"), base)

    with pytest.raises(m.CheckpointError, match="on_tied=untie gives the result an output layer of its own"):
        m.merge(recipe)
    m.merge(recipe, tmp_path / "ours", options=m.EngineOptions(on_tied="untie"))

    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")(tokens).logits
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(loaded, tmp_path / "adapter_0").eval()(tokens).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_pissa_is_refused_since_it_changes_the_base(tmp_path: Path):
    trained(llama(), tmp_path, target_modules=["q_proj"], init_lora_weights="pissa")
    base = m.model(str(tmp_path / "base"))

    with pytest.raises(m.CheckpointError, match="init_lora_weights 'pissa' changes the weights of the base"):
        m.merge(base + m.lora_delta(str(tmp_path / "adapter_0"), base))


@pytest.mark.parametrize("kind", ["LoHaConfig", "LoKrConfig"])
@pytest.mark.parametrize("more", [{}, {"r": 2, "alpha_pattern": {"q_proj": 5}}])
def test_loha_and_lokr_are_read_as_peft_merges_them(kind: str, more: dict[str, Any], tmp_path: Path):
    torch.manual_seed(0)
    llama().save_pretrained(tmp_path / "base")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    targets = ["q_proj", "down_proj"]
    config = getattr(peft, kind)(**{"r": 3, "alpha": 7, "target_modules": targets} | more)
    model = peft.get_peft_model(loaded, config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn_like(parameter) * 0.3
    model.save_pretrained(tmp_path / "adapter")
    expected = model.merge_and_unload().state_dict()
    base = m.model(str(tmp_path / "base"))

    for key, tensor in m.merge(base + m.lora_delta(str(tmp_path / "adapter"), base)).items():
        torch.testing.assert_close(tensor, expected[key], rtol=1e-5, atol=1e-6)


def adapted(folder: Path) -> Any:
    """The base in PEFT with two adapters, `one` and `two`."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    model = peft.PeftModel.from_pretrained(loaded, folder / "adapter_0", adapter_name="one")
    model.load_adapter(folder / "adapter_1", adapter_name="two")
    return model


@pytest.mark.parametrize(("combination", "rank"), [("cat", None), ("svd", 3)])
@pytest.mark.parametrize("weights", [[0.7, 0.4], [0.7, -0.4]])
def test_merged_adapters_are_those_of_add_weighted_adapter(
    combination: str, rank: int | None, weights: list[float], tmp_path: Path
):
    """PEFT 0.21 takes negative weights for both; its svd keeps one rank for all modules, as ours does."""
    for seed in (0, 1):
        trained(llama(), tmp_path, seed, target_modules=["q_proj", "down_proj"], r=4 + seed)
    model = adapted(tmp_path)
    model.add_weighted_adapter(["one", "two"], weights, "sum", combination_type=combination, svd_rank=rank)
    model.set_adapter("sum")
    theirs = model.merge_and_unload(adapter_names=["sum"]).state_dict()

    names = [str(tmp_path / f"adapter_{seed}") for seed in (0, 1)]
    m.merge_adapters(names, tmp_path / "sum", weights, rank)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    ours = peft.PeftModel.from_pretrained(loaded, tmp_path / "sum").merge_and_unload().state_dict()
    base = m.model(str(tmp_path / "base"))
    read = m.merge(base + m.lora_delta(str(tmp_path / "sum"), base))

    for key, tensor in theirs.items():
        torch.testing.assert_close(ours[key], tensor, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(read[key], ours[key], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("make", [gpt2, bert])
def test_peft_loads_what_was_merged(make: Any, tmp_path: Path):
    targets = {gpt2: ["c_attn", "c_proj"], bert: ["query", "word_embeddings"]}[make]
    for seed in (0, 1):
        trained(make(), tmp_path, seed, target_modules=targets, rank_pattern={targets[0]: 2 + seed})
    base = m.model(str(tmp_path / "base"))
    names = [str(tmp_path / f"adapter_{seed}") for seed in (0, 1)]
    m.merge_adapters(names, tmp_path / "sum", [1.0, -0.5])

    loaded = type(make()).from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(loaded, tmp_path / "sum").merge_and_unload().state_dict()

    first, second = (m.lora_delta(name, base) for name in names)
    for key, tensor in m.merge(base + first - 0.5 * second).items():
        torch.testing.assert_close(theirs[key], tensor, rtol=1e-5, atol=2e-6)
