"""The evaluator of the eight-task bench: hits on each image, with heads that are not merged."""

from collections.abc import Mapping
from functools import lru_cache
from importlib import resources

import torch
from safetensors.torch import load
from torch import Tensor
from torch.nn import functional as F

from mecha_exp.errors import ConfigError
from mecha_exp.evaluation.outcomes import Outcomes
from mecha_exp.evaluation.registry import evaluator

# mypy does not see the packages that live beside mecha_exp in the checkout.
from mecha_exp.examples.mini8.network import (  # type: ignore[import-not-found, unused-ignore]
    encoder,
    encoder_shapes,
)
from mecha_exp.examples.mini8.tasks import tasks  # type: ignore[import-not-found, unused-ignore]

__all__ = ["fits", "mini8"]


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
)
def mini8(state_dict: Mapping[str, Tensor], *, split: str = "validation") -> Outcomes:
    """Measure an encoder of mini8 on the images of a split, task by task, each with its frozen head.

    Computes in float32 on the CPU. An image with a logit that is not finite counts as a miss.

    Args:
        state_dict: the encoder's weights, of any floating dtype and device.
        split: `validation` or `test`.

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
    network, heads, listed = encoder(state_dict), _heads(), tasks()[split]
    with torch.no_grad():
        features = network(torch.cat([task.images for task in listed.values()]))
    hits: dict[str, Tensor] = {}
    for part, (name, task) in zip(
        features.split([len(task.labels) for task in listed.values()]), listed.items(), strict=True
    ):
        logits = F.linear(part, heads[f"{name}.weight"], heads[f"{name}.bias"])
        hits[name] = (logits.argmax(1) == task.labels) & logits.isfinite().all(1)
    return Outcomes(
        {name: right.numpy() for name, right in hits.items()},
        clusters={name: list(task.sources) for name, task in listed.items()},
        examples={name: _example_names(task.sources) for name, task in listed.items()},
    )


def _example_names(sources: tuple[str, ...]) -> list[str]:
    """A name for each example: its source, and a number where a source has several."""
    counts: dict[str, int] = {}
    names = []
    for source in sources:
        counts[source] = counts.get(source, 0) + 1
        names.append(source if counts[source] == 1 else f"{source} {counts[source]}")
    return names


@lru_cache(maxsize=1)
def _heads() -> dict[str, Tensor]:
    """The eight linear heads."""
    return load(resources.files("mecha_exp.examples.mini8").joinpath("heads.safetensors").read_bytes())
