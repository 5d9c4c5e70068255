"""Adapters extracted from fine-tuned models: what was added comes back, and nothing is dropped in silence."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft_tensors import HEAD, SHAPES, O, Q, lora
from safetensors.torch import load_file, save_file
from torch import Tensor

import mecha_exp as m
from mecha_exp.errors import CheckpointError, ConfigError
from mecha_exp.peft.extraction import extract_adapter

Base = dict[str, Tensor]
NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"


def fine_tuned(base: Base, changes: Base, folder: str = "fine") -> str:
    Path(folder).mkdir(exist_ok=True)
    tensors = {key: tensor + changes.get(key, 0) for key, tensor in base.items()}
    save_file(tensors, Path(folder) / "model.safetensors")
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_apply_then_extract_gives_the_difference_back(base: Base, adapter: Callable[..., str]):
    adapter("first", lora(Q, O, HEAD))
    m.merge(m.weighted_sum("base", "first", alpha=1.0), "fine", card=False)

    made = extract_adapter("fine", "base", "again", rank=8)

    assert made.ranks == {Q: 2, O: 2, HEAD: 2}
    assert made.error < 1e-5
    again, fine = m.merge(m.weighted_sum("base", "again", alpha=1.0)), load_file("fine/model.safetensors")
    for key in base:
        torch.testing.assert_close(again[key], fine[key], rtol=1e-5, atol=1e-5)


def test_each_module_has_the_nearest_product_and_its_error(base: Base, here: Path):
    torch.manual_seed(0)
    changes = {f"{module}.weight": torch.randn(SHAPES[f"{module}.weight"]) for module in (Q, O)}

    made = extract_adapter(fine_tuned(base, changes), "base", "out", rank=3)

    tensors = load_file("out/adapter_model.safetensors")
    fine = load_file("fine/model.safetensors")
    lost, total = 0.0, 0.0
    for module in (Q, O):
        difference = (fine[f"{module}.weight"] - base[f"{module}.weight"]).double()
        u, s, vh = torch.linalg.svd(difference, full_matrices=False)
        nearest = u[:, :3] * s[:3] @ vh[:3]
        down, up = (tensors[f"base_model.model.{module}.lora_{x}.weight"] for x in "AB")
        torch.testing.assert_close((up @ down).double(), nearest, rtol=1e-4, atol=1e-5)
        left = (difference - (up @ down).double()).norm()
        assert made.errors[module] == pytest.approx(float(left / difference.norm()), rel=1e-4)
        lost, total = lost + float(left) ** 2, total + float(difference.norm()) ** 2
    assert made.error == pytest.approx((lost / total) ** 0.5, rel=1e-4)
    config = json.loads(Path("out/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["task_type"]) == (3, 3, "CAUSAL_LM")
    assert config["base_model_name_or_path"] == "base" and config["target_modules"] == sorted([Q, O])


def test_what_else_changed_is_an_error_that_names_it_and_the_ways(base: Base, here: Path):
    shapes = {f"{Q}.weight": (8, 6), NORM: (6,), f"{Q}.bias": (8,)}
    fine = fine_tuned(base, {key: torch.ones(shape) for key, shape in shapes.items()})

    with pytest.raises(CheckpointError) as caught:
        extract_adapter(fine, "base", "out")

    message = str(caught.value)
    assert "besides linear layers 2 tensors changed" in message and NORM in message and f"{Q}.bias" in message
    assert "--modules-to-save" in message and "--leave-out" in message
    assert not Path("out").exists()


def test_modules_are_saved_whole_and_changes_left_out_where_that_is_said(base: Base, here: Path):
    keys = (f"{O}.weight", NORM, EMBEDDING, f"{Q}.bias")
    fine = fine_tuned(base, {key: torch.ones(SHAPES[key]) for key in keys})
    whole = ("norm", "embed_tokens")

    made = extract_adapter(fine, "base", "out", modules_to_save=whole, leave_out=["*.bias"])

    assert set(made.whole) == {NORM, EMBEDDING} and made.left_out == (f"{Q}.bias",)
    again, expected = m.merge(m.weighted_sum("base", "out", alpha=1.0)), load_file("fine/model.safetensors")
    for key in base:
        torch.testing.assert_close(again[key], base[key] if key.endswith(".bias") else expected[key])


def test_a_change_in_a_module_that_is_saved_whole_is_not_left_out(base: Base, here: Path):
    fine = fine_tuned(base, {f"{O}.weight": torch.ones(6, 6), NORM: torch.ones(6)})

    made = extract_adapter(fine, "base", "out", modules_to_save=["norm"], leave_out=["*norm*"])

    assert (made.whole, made.left_out) == ((NORM,), ())


def test_rows_that_were_added_are_saved_whole_or_left_out(base: Base, here: Path):
    fine_tuned(base, {f"{Q}.weight": torch.ones(8, 1) @ torch.ones(1, 6)})
    fine = load_file("fine/model.safetensors")
    fine[EMBEDDING] = torch.cat([base[EMBEDDING], torch.ones(2, 6)])
    save_file(fine, "fine/model.safetensors")

    with pytest.raises(
        CheckpointError,
        match=rf"{EMBEDDING} has another shape in fine than in base. .*--modules-to-save embed_t",
    ):
        extract_adapter("fine", "base", "out")
    saved = extract_adapter("fine", "base", "whole", modules_to_save=["embed_tokens"])
    left = extract_adapter("fine", "base", "left", leave_out=["*embed*"])

    assert saved.whole == left.left_out == (EMBEDDING,)
    assert saved.ranks == left.ranks == {Q: 1}
    tables = load_file("whole/adapter_model.safetensors")
    assert torch.equal(tables[f"base_model.model.{EMBEDDING}"], fine[EMBEDDING])


def test_a_module_that_is_saved_whole_is_finite(base: Base, here: Path):
    fine = fine_tuned(base, {f"{O}.weight": torch.ones(6, 6), NORM: torch.full((6,), torch.nan)})

    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has values that are not finite"):
        extract_adapter(fine, "base", "out", modules_to_save=["norm"])


def test_an_embedding_that_is_the_output_layer_too_is_refused(base: Base, here: Path):
    base.pop(f"{HEAD}.weight")
    save_file(base, "base/model.safetensors")
    Path("base/config.json").write_text('{"architectures": ["ToyForCausalLM"], "tie_word_embeddings": true}')
    fine = fine_tuned(base, {f"{O}.weight": torch.ones(6, 6), EMBEDDING: torch.ones(20, 6)})

    with pytest.raises(
        CheckpointError, match=r"base uses model\.embed_tokens\.weight as its output layer, to"
    ):
        extract_adapter(fine, "base", "out", modules_to_save=["embed_tokens"])
    made = extract_adapter(fine, "base", "out", leave_out=[EMBEDDING])

    assert made.left_out == (EMBEDDING,)


@pytest.mark.parametrize("name", ["relative_attention_bias", "shared", "emb", "pos_emb", "word_embeddings"])
def test_a_table_of_rows_is_not_taken_for_a_linear_layer(name: str, base: Base, here: Path):
    key = f"block.0.{name}.weight"
    save_file(base | {key: torch.zeros(32, 2)}, "base/model.safetensors")
    fine = fine_tuned(base | {key: torch.ones(32, 2)}, {f"{O}.weight": torch.ones(6, 6)})

    with pytest.raises(CheckpointError, match=rf"besides linear layers 1 tensor changed: block\.0\.{name}\."):
        extract_adapter(fine, "base", "out")


def test_a_transposed_layer_is_extracted_as_peft_has_it(base: Base, here: Path):
    Path("gpt").mkdir()
    key, change = "h.0.mlp.c_fc.weight", torch.randn(6, 2) @ torch.randn(2, 9)
    tensors = {key: torch.randn(6, 9), "wte.weight": torch.randn(5, 6)}
    save_file(tensors, "gpt/model.safetensors")
    (here / "gpt" / "config.json").write_text('{"model_type": "gpt2"}')

    extract_adapter(fine_tuned(tensors, {key: change}), "gpt", "out", rank=2)

    factors = load_file("out/adapter_model.safetensors")
    down, up = (factors[f"base_model.model.h.0.mlp.c_fc.lora_{x}.weight"] for x in "AB")
    assert down.shape == (2, 6) and up.shape == (9, 2)
    torch.testing.assert_close((up @ down).mT, change, rtol=1e-4, atol=1e-4)
    assert json.loads(Path("out/adapter_config.json").read_text())["fan_in_fan_out"] is True


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop(NORM),
            r"do not have the same keys: model\.norm\.weight\. An adapter changes",
        ),
        (
            lambda t: t.update({NORM: torch.ones(7)}),
            r"model\.norm\.weight has another shape in fine",
        ),
        (lambda t: None, r"no linear layer of fine differs from base"),
        (lambda t: t[f"{Q}.weight"].fill_(torch.nan), r"q_proj\.weight has values that are not finite"),
    ],
)
def test_models_that_do_not_fit_are_refused(change, message: str, base: Base, here: Path):
    tensors = {key: tensor.clone() for key, tensor in base.items()}
    change(tensors)
    fine_tuned(tensors, {})

    with pytest.raises(CheckpointError, match=message):
        extract_adapter("fine", "base", "out")


@pytest.mark.parametrize("rank", [0, -1, True, 1.5])
def test_a_rank_is_a_whole_number(rank, base: Base, here: Path):
    with pytest.raises(ConfigError, match="rank: expected a whole number of at least 1"):
        extract_adapter("base", "base", "out", rank)


def test_a_folder_of_something_else_is_not_replaced(base: Base, here: Path):
    with pytest.raises(CheckpointError, match="base is there and is not an adapter: name another folder"):
        extract_adapter("base", "base", "base")


def test_the_verb_shows_every_module_with_its_error(base: Base, here: Path, app):
    fine_tuned(base, {f"{Q}.weight": torch.ones(8, 6), NORM: torch.ones(6)})
    words = ("adapters", "extract", "fine", "base", "out", "--rank", "4")

    refused = app(*words, cwd=here)
    outcome = app(*words, "--leave-out", "*norm.weight", cwd=here)

    assert refused.status == 1 and "besides linear layers 1 tensor changed" in refused.err
    assert outcome.status == 0, outcome.err
    assert "out: 1 modules of rank 1, relative error" in outcome.out
    assert f"left out: {NORM}" in outcome.out and Q in outcome.out


@pytest.mark.libraries
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_peft_applies_what_was_extracted(kind: str, here: Path):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = (
        transformers.LlamaConfig(vocab_size=40, tie_word_embeddings=False, **small)
        if kind == "llama"
        else transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained("base")
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "wpe" not in name and "wte" not in name and "embed" not in name:
            parameter.data += torch.randn(parameter.shape[0], 3) @ torch.randn(3, parameter.shape[1])
        elif "norm" in name or "ln_f" in name:
            parameter.data += 0.1
    model.save_pretrained("fine")

    made = extract_adapter("fine", "base", "out", rank=3, modules_to_save=["norm", "layernorm", "ln_f"])

    assert made.error < 1e-4
    loaded = transformers.AutoModelForCausalLM.from_pretrained("base")
    adapted = peft.PeftModel.from_pretrained(loaded, "out").merge_and_unload()
    expected = model.state_dict()
    for key, tensor in adapted.state_dict().items():
        torch.testing.assert_close(tensor, expected[key], rtol=1e-3, atol=1e-3)
