"""Aesthetic predictors: linear layers over the features that a CLIP gives to pictures."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from mecha_exp.checkpoint import open_stored
from mecha_exp.errors import CheckpointError, ConfigError, did_you_mean, some

ACTIVATION = "activation"
"""The entry of a file's metadata that names what is between the layers."""
_ACTIVATIONS = {"none": lambda x: x, "relu": F.relu, "gelu": F.gelu, "silu": F.silu, "tanh": F.tanh}
_KEY = re.compile(r"(?:.*?(?P<place>\d+)\.)?(?P<part>weight|bias)")


@dataclass(frozen=True, eq=False)
class Predictor:
    """A chain of linear layers, the last of which has one output.

    Attributes:
        layers: the weight [outputs, inputs] and the bias [outputs] of each.
        activation: the function between layers; those of LAION have none.
    """

    layers: tuple[tuple[Tensor, Tensor | None], ...]
    activation: str = "none"

    @property
    def width(self) -> int:
        """The number of features that it reads."""
        return self.layers[0][0].shape[1]

    def scores(self, features: Tensor) -> NDArray[np.float64]:
        """A score for each picture.

        Args:
            features: of norm 1, [pictures, width].
        """
        values = features.double()
        for place, (weight, bias) in enumerate(self.layers):
            values = _ACTIVATIONS[self.activation](values) if place else values
            values = F.linear(values, weight.double(), None if bias is None else bias.double())
        scores: NDArray[np.float64] = values[:, 0].numpy()
        return scores


def read_predictor(path: Path) -> Predictor:
    """The predictor in a file: `weight` and `bias` of one layer, or `layers.0.weight` and so on of several.

    The metadata of a safetensors file may name an `activation` between the layers.

    Raises:
        ConfigError: the file is not such a predictor.
    """
    named = f"evaluator.aesthetic={path}"
    if not path.is_file():
        raise ConfigError(f"{named}: this file does not exist.")
    try:
        with open_stored(path) as model:
            tensors = {key: model.read(key) for key in model.keys()}
            activation = dict(model.metadata).get(ACTIVATION, "none")
    except CheckpointError as error:
        raise ConfigError(f"{named}: {error}") from None
    if activation not in _ACTIVATIONS:
        hint = did_you_mean(activation, _ACTIVATIONS)
        raise ConfigError(f"{named}: its metadata have the unknown {ACTIVATION} '{activation}'.{hint}")
    return Predictor(_layers(tensors, named), activation)


def _layers(tensors: dict[str, Tensor], named: str) -> tuple[tuple[Tensor, Tensor | None], ...]:
    """The layers in the order of their numbers, checked to be a chain to one output."""
    parts: dict[tuple[int, str], Tensor] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise ConfigError(
                f"{named}: expected the layers of a predictor (weight and bias, or 0.weight, 0.bias, ...), "
                f"and it has {some(tensors, limit=4)}."
            )
        parts[int(match["place"] or 0), match["part"]] = tensor
    layers = tuple(
        (tensor, parts.get((place, "bias")))
        for (place, part), tensor in sorted(parts.items())
        if part == "weight"
    )
    shapes = [list(weight.shape) for weight, _ in layers]
    is_chain = (
        bool(layers)
        and all(weight.ndim == 2 for weight, _ in layers)
        and all(bias is None or bias.shape == weight.shape[:1] for weight, bias in layers)
        and all(lower.shape[0] == upper.shape[1] for (lower, _), (upper, _) in pairwise(layers))
        and layers[-1][0].shape[0] == 1
    )
    if not is_chain:
        raise ConfigError(
            f"{named}: its layers have the shapes {shapes}: expected [outputs, inputs], each with the inputs "
            "that the one before gives, and one output at the end."
        )
    return layers
