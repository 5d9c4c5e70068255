"""Families of models: keys of classes of transformers as they are merged, by block and by row."""

import json
from collections import defaultdict

import pytest
import torch
from library_families import mistakes, sample
from safetensors.torch import load_file, save_file

import mecha_exp as m
from mecha_exp.architectures import get_all
from mecha_exp.architectures.anatomy import Anatomy
from mecha_exp.errors import CheckpointError
from mecha_exp.families import output_tied_to, tied_to, token_tables, vocabulary_sizes

FAMILIES, _ = sample()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_blocks_layers_tables_of_tokens_and_ties_are_those_of_the_library(family):
    assert list(mistakes(family)) == []


def test_the_sample_has_forty_classes_at_least():
    assert len(FAMILIES) >= 40


BIASED = {f"model.layers.{i}.self_attn.{name}_proj.bias": (8,) for i in (0, 1) for name in "qkv"}
"""The keys by which Qwen2 differs from Llama."""


def write_qwen(path, seed, **more):
    """A Qwen2 of two layers, eight wide, and more keys."""
    layer = {
        **{f"self_attn.{name}_proj.weight": (8, 8) for name in "qkvo"},
        **{f"mlp.{name}_proj.weight": (12, 8) for name in ("gate", "up")},
        "mlp.down_proj.weight": (8, 12),
        **{f"{name}_layernorm.weight": (8,) for name in ("input", "post_attention")},
    }
    shapes = {f"model.layers.{i}.{key}": shape for i in (0, 1) for key, shape in layer.items()}
    shapes |= {"model.embed_tokens.weight": (6, 8), "model.norm.weight": (8,), **BIASED, **more}
    generator = torch.Generator().manual_seed(seed)
    save_file({key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}, path)


@pytest.fixture
def qwens(tmp_path):
    write_qwen(tmp_path / "a.safetensors", 1)
    write_qwen(tmp_path / "b.safetensors", 2)
    return tmp_path


def share_of_b(folder, merged):
    """How much of `b` is in each key of a weighted sum, rounded."""
    a, b = (load_file(folder / f"{name}.safetensors") for name in "ab")
    return {key: round(float(((merged[key] - a[key]) / (b[key] - a[key])).median()), 3) for key in a}


@pytest.mark.parametrize(
    ("alpha", "first", "second", "outside"),
    [
        ({"0": 0.1, "default": 0.5}, 0.1, 0.5, {0.5}),
        ({"default": 0.5, "preset": "FLAT_75"}, 0.75, 0.75, {0.0}),
        ([0.2, 0.8], 0.2, 0.8, {0.2, 0.8}),
    ],
)
def test_biases_of_a_layer_have_the_strength_of_the_layer(qwens, alpha, first, second, outside):
    merged = m.merge(m.weighted_sum(qwens / "a.safetensors", qwens / "b.safetensors", alpha=alpha))
    shares = share_of_b(qwens, merged)

    assert {share for key, share in shares.items() if ".layers.0." in key} == {first}
    assert {share for key, share in shares.items() if ".layers.1." in key} == {second}
    assert {share for key, share in shares.items() if ".layers." not in key} == outside


def test_an_ablation_leaves_whole_layers_out_and_has_no_point_that_changes_nothing(qwens, app):
    words = (
        "recipe=weighted_sum",
        "models.base=a.safetensors",
        "models.experts=[b.safetensors]",
        "alpha=0.5",
    )
    outcome = app(*words, "sweep=leave_one_block_out", "evaluator=none", "tracking=none", "-m", cwd=qwens)

    assert outcome.status == 0, outcome.err
    found = {}
    for path in (qwens / "outputs").rglob("model.safetensors"):
        shares = share_of_b(qwens, load_file(path))
        found[frozenset(key for key, share in shares.items() if share == 0)] = path
    keys = set(load_file(qwens / "a.safetensors"))
    layers = [frozenset(key for key in keys if f".layers.{i}." in key) for i in (0, 1)]
    outside = [frozenset({"model.embed_tokens.weight"}), frozenset({"model.norm.weight"})]
    assert set(found) == {frozenset(), *layers, *outside}  # and none for the output layer, which is tied


def test_keys_in_no_block_are_named_before_any_work(tmp_path, app):
    for seed, name in enumerate("ab"):
        write_qwen(tmp_path / f"{name}.safetensors", seed, **{"score.weight": (3, 8)})
    words = (
        "recipe=weighted_sum",
        "models.base=a.safetensors",
        "models.experts=[b.safetensors]",
        "blocks.0=0.1",
    )
    outcome = app(*words, "alpha=0.5", "evaluator=none", "tracking=none", "output=none", cwd=tmp_path)
    strict = app(*words, "alpha=0.5", "engine.strict=true", "output=none", cwd=tmp_path)
    named = app(*words, "+blocks.score=0.2", "engine.strict=true", "output=none", cwd=tmp_path)

    said = "1 key is in no block that llama-hf knows, and get what all others get: score.weight."
    assert outcome.status == 0
    assert said in " ".join(outcome.err.split()) + " ".join(outcome.out.split())
    assert strict.status == 1
    assert said in " ".join(strict.err.split())
    assert named.status == 0, named.err


@pytest.mark.parametrize(
    ("embedding", "head"),
    [
        ("model.embed_tokens.weight", "lm_head.weight"),
        ("model.decoder.embed_tokens.weight", "lm_head.weight"),
        ("model.language_model.embed_tokens.weight", "lm_head.weight"),
        ("language_model.model.embed_tokens.weight", "language_model.lm_head.weight"),
        ("transformer.wte.weight", "lm_head.weight"),
        ("gpt_neox.embed_in.weight", "embed_out.weight"),
        ("bert.embeddings.word_embeddings.weight", None),
    ],
)
def test_a_tied_model_would_have_this_output_layer(embedding, head):
    assert output_tied_to(embedding) == head


def test_all_sizes_of_a_vocabulary_change_together():
    config = {"vocab_size": 9, "text_config": {"vocab_size": 9, "vocab_size_per_layer_input": 9, "other": 9}}

    assert vocabulary_sizes(config, {9: 11}) == {
        "vocab_size": 11,
        "text_config": {"vocab_size": 11, "vocab_size_per_layer_input": 11, "other": 9},
    }
    assert vocabulary_sizes(config, {8: 11}) == {}


def test_the_error_for_other_sizes_names_the_tokens_that_tokenizers_have_more(tmp_path):
    for name, tokens in (("a", ["x", "y"]), ("b", ["x", "y", "<pad>", "<image>"])):
        (tmp_path / name).mkdir()
        save_file(
            {"model.embed_tokens.weight": torch.zeros(len(tokens), 4)}, tmp_path / name / "model.safetensors"
        )
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(tokens)}))

    with pytest.raises(CheckpointError) as error:
        m.merge(m.weighted_sum(tmp_path / "a", tmp_path / "b", alpha=0.5))

    said = str(error.value)
    assert "b has 2 tokens that others lack: '<pad>', '<image>'. The other tokens are the same:" in said
    assert "resize_embeddings=pad keeps 4" in said


def test_tables_of_tokens_and_ties_are_told_by_names_and_shapes():
    shapes = {
        "model.shared.weight": (9, 4),
        "model.encoder.embed_tokens.weight": (9, 4),
        "decoder.weight": (9, 4),
    }
    classes = {"model.embed_tokens.weight": (9, 4), "head.weight": (3, 4), "decoder.bias": (9,)}

    assert token_tables(shapes) == dict.fromkeys(shapes, 0)
    assert token_tables(classes) == {"model.embed_tokens.weight": 0, "decoder.bias": 0}
    assert tied_to("lm_head.weight", shapes) is None  # it has an output layer
    assert tied_to("bert.embed_tokens.weight", {"embed_tokens.weight": (9, 4)}) is None


@pytest.mark.parametrize("config", get_all(), ids=lambda config: config.identifier)
def test_an_unknown_key_beside_known_ones_lies_in_their_block(config):
    """In all formats, such as the names of `sd1-kohya` and `sdxl-diffusers`, and in all conventions."""
    known = config.keys()
    modules = {key.rpartition(".")[0]: key for key in known if "." in key}
    unknown = {f"{module}.of_another_project": known[key] for module, key in modules.items()}

    for convention in config.conventions:
        blocks = Anatomy({**known, **unknown}, config, convention).blocks
        inside = defaultdict(set)
        for key in known:
            for end in (i for i, letter in enumerate(key) if letter == "."):
                inside[key[:end]].add(blocks[key])
        told = {module: min(inside[module]) for module in modules if len(inside[module]) == 1}
        assert {module: blocks[f"{module}.of_another_project"] for module in told} == told
