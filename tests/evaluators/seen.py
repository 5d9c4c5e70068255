"""Measures tiny classifiers and CLIPs by the evaluators of pictures."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from mecha_exp import Context, Outcomes
from mecha_exp.evaluation import read_scoring

SPLITS = ("validation", "test")


def context_of(model: Path) -> Context:
    return Context(
        "point", inputs={"a": model.with_name(f"{model.name}_1"), "b": model.with_name(f"{model.name}_2")}
    )


def state_dict(model: Path) -> dict[str, torch.Tensor]:
    return load_file(model / "model.safetensors")


def measured(name: str, model: Path, weights=None, context=None, **settings) -> dict[str, Outcomes]:
    """The outcomes on both splits, as a sweep measures them."""
    weights = state_dict(model) if weights is None else weights
    context = context or context_of(model)
    shapes = {key: tuple(tensor.shape) for key, tensor in weights.items()}
    scoring = read_scoring({"name": name, **settings}, shapes, context=context)
    parts = [*scoring.evaluations, *scoring.on("test").evaluations]
    results = {part.split: scoring.measure_one(part, weights, context) for part in parts}
    return {str(split): measurement.outcomes for split, measurement in results.items()}
