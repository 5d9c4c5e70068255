"""Adapters that were trained after tokens were added, on tiny models of many families, as PEFT merges them.

Run by `make hf`, which installs the libraries.
"""

import json
from collections.abc import Callable
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
TOKENS, ADDED = 40, 43
INPUT = torch.tensor([[1, 5, 41, 2]])
OPT = {"hidden_size": 16, "word_embed_proj_dim": 16, "num_hidden_layers": 2, "ffn_dim": 32}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
BART = {
    **{f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in
       (("layers", 1), ("attention_heads", 2), ("ffn_dim", 32))},
    "d_model": 16,
}  # fmt: skip

FAMILIES: dict[str, tuple[str, dict[str, Any], list[str], list[str]]] = {
    "llama": ("LlamaForCausalLM", {**SMALL, "tie_word_embeddings": False}, ["q_proj"], ["embed_tokens"]),
    "llama, tied": ("LlamaForCausalLM", {**SMALL, "tie_word_embeddings": True}, ["q_proj"], ["embed_tokens"]),
    "qwen2, tied": ("Qwen2ForCausalLM", {**SMALL, "tie_word_embeddings": True}, ["q_proj"], ["embed_tokens"]),
    "gemma": ("GemmaForCausalLM", {**SMALL, "head_dim": 8}, ["q_proj"], ["embed_tokens"]),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 16, "n_layer": 2, "n_head": 2}, ["c_attn"], ["wte"]),
    "opt": ("OPTForCausalLM", {**OPT, "num_attention_heads": 2}, ["q_proj"], ["embed_tokens"]),
    "gpt_neox": ("GPTNeoXForCausalLM", {**SMALL}, ["query_key_value"], ["embed_in"]),
    "phi": ("PhiForCausalLM", {**SMALL}, ["q_proj"], ["embed_tokens"]),
    "t5": ("T5ForConditionalGeneration", T5, ["q"], ["shared"]),
    "bart": ("BartForConditionalGeneration", BART, ["q_proj"], ["shared"]),
}
"""The class, its config, the modules with factors, and the embedding."""


def base_of(family: str, folder: Path) -> nn.Module:
    """Save a tiny model, and load it again."""
    torch.manual_seed(0)
    name, config, _, _ = FAMILIES[family]
    kind = getattr(transformers, name)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    kind(kind.config_class(vocab_size=TOKENS, **ids, **config)).save_pretrained(folder / "base")
    return kind.from_pretrained(folder / "base")


def trained(model: nn.Module, folder: Path, count: int | None = ADDED, **config: Any) -> Any:
    """Add tokens to a model, and save an adapter with random values; returns PEFT's model."""
    if count:
        model.resize_token_embeddings(count)
    torch.manual_seed(1)
    adapted = peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "lora_alpha": 6} | config))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn_like(parameter) * 0.3
    adapted.save_pretrained(folder / "adapter")
    return adapted.eval()


def compare(folder: Path, theirs: nn.Module, **options: Any) -> dict[str, Tensor]:
    """Check that ours is theirs: the tensors, the config, and that it is loaded without a word."""
    theirs.save_pretrained(folder / "theirs")
    base = m.model(str(folder / "base"))
    recipe = base + m.lora_delta(str(folder / "adapter"), base)
    m.merge(recipe, folder / "ours", options=m.EngineOptions(**options))
    ours, info = type(theirs).from_pretrained(folder / "ours", output_loading_info=True)
    assert not any(info.values()), info
    loaded = type(theirs).from_pretrained(folder / "theirs")
    assert ours.config.vocab_size == loaded.config.vocab_size
    assert ours.config.tie_word_embeddings == loaded.config.tie_word_embeddings
    expected = loaded.state_dict()
    result: dict[str, Tensor] = ours.state_dict()
    assert result.keys() == expected.keys()
    for key, tensor in result.items():
        torch.testing.assert_close(tensor, expected[key], rtol=1e-5, atol=1e-5, msg=key)
    return result


def head_of(model: nn.Module) -> str:
    head = model.get_output_embeddings()
    return next(name.rpartition(".")[2] for name, module in model.named_modules() if module is head)


Config = Callable[[str, str, list[str]], dict[str, Any]]
WAYS: dict[str, Config] = {
    "both tables": lambda embedding, head, targets: {"modules_to_save": [embedding, head]},
    "one table": lambda embedding, head, targets: {"modules_to_save": [embedding]},
    "both, tied": lambda e, head, targets: {"modules_to_save": [e, head], "ensure_weight_tying": True},
    "rows": lambda embedding, head, targets: {"trainable_token_indices": {embedding: [3, 40, 41, 42]}},
    "rows of the embedding": lambda embedding, head, targets: {"trainable_token_indices": [3, 40, 42]},
    "factors": lambda embedding, head, targets: {},
}


COPIED = {(family, way) for family in ("t5", "bart") for way in ("both tables", "one table")}
"""PEFT trains a copy of `shared` there, which nothing reads."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_added_tokens_are_merged_as_peft_merges_them(family: str, way: str, tmp_path: Path):
    model = base_of(family, tmp_path)
    _, _, targets, (embedding,) = FAMILIES[family]
    config = WAYS[way](embedding, head_of(model), targets)

    theirs = trained(model, tmp_path, target_modules=targets, **config).merge_and_unload()

    if (family, way) in COPIED:
        with pytest.raises(m.CheckpointError, match=r"PEFT trained a copy of .*shared\.weight"):
            compare(tmp_path, theirs)
    else:
        compare(tmp_path, theirs)


@pytest.mark.parametrize("family", ["llama", "llama, tied", "gpt2"])
def test_a_vocabulary_that_was_cut_is_cut(family: str, tmp_path: Path):
    model = base_of(family, tmp_path)
    _, _, targets, (embedding,) = FAMILIES[family]

    theirs = trained(model, tmp_path, 30, target_modules=targets, modules_to_save=[embedding, head_of(model)])

    compare(tmp_path, theirs.merge_and_unload())


@pytest.mark.parametrize("family", ["llama", "llama, tied"])
def test_rows_of_tokens_that_were_there_are_merged(family: str, tmp_path: Path):
    model = base_of(family, tmp_path)

    theirs = trained(model, tmp_path, None, target_modules=["q_proj"], trainable_token_indices=[3, 5])

    compare(tmp_path, theirs.merge_and_unload())


@pytest.mark.parametrize(
    ("family", "config"),
    [
        (family, config)
        for family in ("llama, tied", "opt", "gpt2")
        for config in ("embedding", "head", "embedding, tied")
    ],
)
def test_factors_at_tied_tables_give_the_model_that_was_trained(family: str, config: str, tmp_path: Path):
    """PEFT's own merge adds the changes of both tables to the one tensor, which it did not in training."""
    model = base_of(family, tmp_path)
    _, _, targets, (embedding,) = FAMILIES[family]
    module = head_of(model) if config == "head" else embedding
    adapted = trained(
        model, tmp_path, target_modules=[*targets, module], ensure_weight_tying=config == "embedding, tied"
    )
    base = m.model(str(tmp_path / "base"))
    recipe = base + m.lora_delta(str(tmp_path / "adapter"), base)
    is_tied = config == "embedding, tied" and family != "gpt2"  # where PEFT 0.21 leaves the head as it was

    if not is_tied:
        with pytest.raises(m.CheckpointError, match="on_tied=untie gives"):
            m.merge(recipe)
    options = m.EngineOptions(on_tied="error" if is_tied else "untie")
    m.merge(recipe, tmp_path / "ours", options=options)

    ours, info = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values()), info
    torch.testing.assert_close(ours.eval()(INPUT).logits, adapted(INPUT).logits, rtol=1e-4, atol=1e-4)


def test_an_adapter_with_new_tokens_is_an_expert(tmp_path: Path):
    model = base_of("llama", tmp_path)
    saved = {"modules_to_save": ["embed_tokens", "lm_head"]}
    expected = trained(model, tmp_path, target_modules=["q_proj"], **saved).merge_and_unload().state_dict()
    before = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").state_dict()
    base, adapter = str(tmp_path / "base"), str(tmp_path / "adapter")

    half = m.merge(m.weighted_sum(base, adapter, alpha=0.5), tmp_path / "half")

    assert half is not None
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half").state_dict()
    for key, tensor in loaded.items():
        mean = (before[key] + expected[key][: len(before[key])]) / 2
        torch.testing.assert_close(tensor[: len(mean)], mean, rtol=1e-5, atol=1e-5, msg=key)
        torch.testing.assert_close(tensor[len(mean) :], expected[key][len(mean) :], msg=key)
    assert len(loaded["lm_head.weight"]) == ADDED


def test_a_merged_folder_has_the_tokenizer_of_the_adapter(tmp_path: Path):
    words = {"[UNK]": 0, **{f"w{number}": number for number in range(1, ADDED)}}
    model = base_of("llama", tmp_path)
    trained(model, tmp_path, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    for folder, count in (("base", TOKENS), ("adapter", ADDED)):
        known = {"vocab": dict(list(words.items())[:count]), "type": "WordLevel", "unk_token": "[UNK]"}
        (tmp_path / folder / "tokenizer.json").write_text(json.dumps({"model": known, "added_tokens": []}))

    m.merge(m.weighted_sum(str(tmp_path / "base"), str(tmp_path / "adapter"), alpha=1.0), tmp_path / "ours")

    assert len(json.loads((tmp_path / "ours" / "tokenizer.json").read_text())["model"]["vocab"]) == ADDED


def test_adapters_with_different_numbers_of_tokens_are_refused(tmp_path: Path):
    for count in (42, 43):
        model = base_of("llama", tmp_path)
        trained(
            model, tmp_path, count, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]
        )
        (tmp_path / "adapter").rename(tmp_path / f"with_{count}")
    base, a, b = (str(tmp_path / name) for name in ("base", "with_42", "with_43"))

    with pytest.raises(
        m.CheckpointError, match=r"different numbers of tokens: 42 in .* and 43 in .*recipe=lora"
    ):
        m.merge(m.task_arithmetic(base, a, b))
