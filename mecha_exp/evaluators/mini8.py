"""The evaluator of the eight-task bench: hits on each image, with heads that are not merged."""

from collections.abc import Mapping
from functools import lru_cache
from importlib import resources

import torch
from safetensors.torch import load
from torch import Tensor
from torch.nn import functional as F

from mecha_exp.errors import ConfigError
from mecha_exp.evaluation.learning.registry import logits_of
from mecha_exp.evaluation.outcomes import Outcomes
from mecha_exp.evaluation.registry import evaluator

# mypy does not see the packages that live beside mecha_exp in the checkout.
from mecha_exp.examples.mini8.network import (  # type: ignore[import-not-found, unused-ignore]
    differentiable_features,
    encoder_shapes,
    features,
)
from mecha_exp.examples.mini8.tasks import tasks  # type: ignore[import-not-found, unused-ignore]
from mecha_exp.system.cores import one_thread

__all__ = ["fits", "mini8", "mini8_logits"]


def fits(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the keys and shapes are those of mini8's encoder."""
    expected: dict[str, tuple[int, ...]] = encoder_shapes()
    return {key: tuple(shape) for key, shape in shapes.items()} == expected


@evaluator(
    "mini8",
    metric="accuracy",
    fits=fits,
    splits=("validation", "test"),
    units={"accuracy": "fraction of the images, mean over tasks"},
    takes_examples=True,
)
def mini8(
    state_dict: Mapping[str, Tensor],
    *,
    split: str = "validation",
    examples: Mapping[str, list[int]] | None = None,
) -> Outcomes:
    """Measure an encoder of mini8 on the images of a split, task by task, each with its frozen head.

    Computes in float32 on one thread of the CPU. An image with a logit that is not finite counts as a miss.

    Args:
        state_dict: the encoder's weights, of any floating dtype and device.
        split: `validation` or `test`.
        examples: the positions of the images to measure, by task; None is all.

    Returns:
        For each image of each task 1 if it is classified rightly, else 0; its cluster is its source.

    Raises:
        ConfigError: the keys or shapes are not those of the encoder.
    """
    if not fits({key: tuple(tensor.shape) for key, tensor in state_dict.items()}):
        raise ConfigError(
            "evaluator=mini8 measures the encoder of examples/mini8 only, and this model has other keys or "
            "shapes. Use models=mini8, or another evaluator."
        )
    heads, listed = head_weights(), tasks()[split]
    chosen, images = _chosen(split, examples)
    with one_thread():
        everything = features(state_dict, images)
    parts = everything.split([len(places) for places in chosen.values()])
    hits: dict[str, Tensor] = {}
    for part, (name, places) in zip(parts, chosen.items(), strict=True):
        logits = F.linear(part, heads[f"{name}.weight"], heads[f"{name}.bias"])
        hits[name] = (logits.argmax(1) == listed[name].labels[places]) & logits.isfinite().all(1)
    sources = {name: listed[name].sources for name in chosen}
    names = {name: _example_names(of_task) for name, of_task in sources.items()}
    return Outcomes(
        {name: right.numpy() for name, right in hits.items()},
        clusters={name: [sources[name][place] for place in places] for name, places in chosen.items()},
        examples={name: [names[name][place] for place in places] for name, places in chosen.items()},
    )


@logits_of("mini8")
def mini8_logits(
    state_dict: Mapping[str, Tensor],
    *,
    split: str = "validation",
    examples: Mapping[str, list[int]] | None = None,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Compute logits of mini8's images with gradients, task by task, each with its frozen head.

    Args:
        state_dict: the encoder's weights, float32 on the CPU.
        split: `validation` or `test`.
        examples: the positions of the images to use, by task; None is all.

    Returns:
        Logits, float32 [images, classes], and labels, int64 [images], by task.
    """
    heads, listed = head_weights(), tasks()[split]
    chosen, images = _chosen(split, examples)
    with one_thread():
        parts = differentiable_features(state_dict, images).split([len(places) for places in chosen.values()])
        return {
            name: (
                F.linear(part, heads[f"{name}.weight"], heads[f"{name}.bias"]),
                listed[name].labels[places],
            )
            for part, (name, places) in zip(parts, chosen.items(), strict=True)
        }


def _chosen(split: str, examples: Mapping[str, list[int]] | None) -> tuple[dict[str, list[int]], Tensor]:
    """The places of the images to use, by task, and these images one after another."""
    listed = tasks()[split]
    places = {name: list(range(len(task.labels))) for name, task in listed.items()}
    chosen = places if examples is None else dict(examples)
    return chosen, torch.cat([listed[name].images[of_task] for name, of_task in chosen.items()])


def _example_names(sources: tuple[str, ...]) -> list[str]:
    """A name for each example: its source, and a number where a source has several."""
    counts: dict[str, int] = {}
    names = []
    for source in sources:
        counts[source] = counts.get(source, 0) + 1
        names.append(source if counts[source] == 1 else f"{source} {counts[source]}")
    return names


@lru_cache(maxsize=1)
def head_weights() -> dict[str, Tensor]:
    """The eight linear heads, by task: `digits.weight`, `digits.bias`."""
    return load(resources.files("mecha_exp.examples.mini8").joinpath("heads.safetensors").read_bytes())
