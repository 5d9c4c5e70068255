"""Tokenizers, chat templates and mixtures of models that lie elsewhere."""

import json

import pytest
import torch
from mergekit_mixtures import write_mixture_models
from safetensors.torch import save_file

from mecha_exp import ConfigError, from_mergekit, merge
from mecha_exp.checkpoint.remote import lookup
from mecha_exp.mergekit.recipe import read_merge
from mecha_exp.method_api.registry import resolve_method


@pytest.fixture
def late(server, served, monkeypatch, tmp_path) -> str:
    """The address of a model whose tokenizer is fetched only when something reads it."""
    monkeypatch.setattr(lookup, "FETCHED_AT_ONCE", 16)
    monkeypatch.chdir(tmp_path)
    save_file({"model.embed_tokens.weight": torch.ones(4, 2)}, served / "model.safetensors")
    vocabulary = {token: number for number, token in enumerate("abcd")}
    (served / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    (served / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    (served / "config.json").write_text("{}")
    return server.url


def test_a_tokenizer_that_was_not_fetched_yet_is_left_out_with_its_rows(late, tmp_path):
    merge(resolve_method("take_rows")(late, rows="0:2"), tmp_path / "made")

    assert not (tmp_path / "made" / "tokenizer.json").exists()


def test_a_chat_template_that_was_not_fetched_yet_is_known(late, tmp_path):
    config = {"merge_method": "passthrough", "models": [{"model": late}], "chat_template": "auto"}

    made = read_merge(config, offline=False)

    assert made.small_files["chat_template.jinja"] == b"{{ messages }}"


@pytest.mark.libraries
@pytest.mark.filterwarnings("ignore")
def test_a_mixture_of_remote_models_reads_prompts_of_embeddings_alone(server, served, monkeypatch):
    pytest.importorskip("transformers")
    write_mixture_models(served)
    experts = [{"source_model": f"{server.url}/{name}", "positive_prompts": [name]} for name in "ab"]
    config = {"base_model": f"{server.url}/base", "experts": experts}

    with pytest.raises(ConfigError, match=r"gate_mode: hidden runs the base with transformers, .*/base lies"):
        from_mergekit(config, offline=False)
    made = merge(from_mergekit({**config, "gate_mode": "cheap_embed"}, offline=False))

    monkeypatch.setenv("MECHA_MODELS_DIR", str(served))
    names = [{**expert, "source_model": name} for expert, name in zip(experts, "ab", strict=True)]
    here = merge(from_mergekit({"base_model": "base", "experts": names, "gate_mode": "cheap_embed"}))
    assert made.keys() == here.keys()
    assert all(torch.equal(made[key], here[key]) for key in here)
