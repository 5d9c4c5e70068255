"""Heads of classifiers on the command line: kept as a whole, or refused as a whole."""

import torch
from safetensors.torch import load_file, save_file

KEEP_HEADS = "keys={head: base, default: merge}"


def classifier(path, seed, classes=3):
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "bert.embeddings.word_embeddings.weight": (5, 4),
        "bert.encoder.layer.0.output.dense.weight": (4, 4),
        "bert.encoder.layer.0.output.dense.bias": (4,),
        "classifier.weight": (classes, 4),
        "classifier.bias": (classes,),
    }
    tensors = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    save_file(tensors, path)
    return tensors


def test_a_kept_head_is_kept_with_its_bias(app, folder):
    base = classifier(folder / "base.safetensors", 0)
    classifier(folder / "a.safetensors", 1)

    models = ["models.base=base.safetensors", "models.experts=[a.safetensors]"]
    outcome = app("recipe=ties", "evaluator=none", *models, KEEP_HEADS, "output.path=out.safetensors")

    assert outcome.status == 0, outcome.err
    merged = load_file(folder / "out.safetensors")
    kept = [key for key in merged if torch.equal(merged[key], base[key])]
    assert sorted(kept) == ["classifier.bias", "classifier.weight"]


def test_heads_of_other_classes_do_not_hinder_a_merge_that_keeps_the_base_s(app, folder):
    base = classifier(folder / "base.safetensors", 0, classes=3)
    classifier(folder / "a.safetensors", 1, classes=2)

    models = ["models.base=base.safetensors", "models.experts=[a.safetensors]"]
    outcome = app("recipe=ties", "evaluator=none", *models, KEEP_HEADS, "output.path=out.safetensors")

    assert outcome.status == 0, outcome.err
    assert torch.equal(load_file(folder / "out.safetensors")["classifier.bias"], base["classifier.bias"])
