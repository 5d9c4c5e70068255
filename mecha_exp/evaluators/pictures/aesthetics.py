"""Aesthetic predictors: linear layers over the features that a CLIP gives to pictures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from mecha_exp.checkpoint import open_stored
from mecha_exp.errors import CheckpointError, ConfigError, did_you_mean, some

Layer = tuple[Tensor, Tensor | None]
"""A weight, [outputs, inputs], and a bias, [outputs]."""
ACTIVATION = "activation"
"""The entry of a file's metadata that names what is between the layers."""
_ACTIVATIONS = {"none": lambda x: x, "relu": F.relu, "gelu": F.gelu, "silu": F.silu, "tanh": F.tanh}
_KEY = re.compile(r"(?:.*?(?P<place>\d+)\.)?(?P<part>weight|bias)")


@dataclass(frozen=True, eq=False)
class Predictor:
    """A chain of linear layers, the last of which has one output.

    Attributes:
        layers: from the features to the score.
        activation: the function between layers; those of LAION have none.
    """

    layers: tuple[Layer, ...]
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

    def most(self, norm: float) -> float:
        """A bound of the score of features of this norm: n_(i+1) = ||W_i|| n_i + ||b_i||, by spectral norms.

        No activation makes a vector longer. Without one, the layers are multiplied before: the bound is
        ||w|| n + b of the one layer that they are, which is the least that there is.
        """
        layers = self.layers if self.activation != "none" else [_product(self.layers)]
        *lower, (weight, bias) = [(w.double(), None if b is None else b.double()) for w, b in layers]
        for matrix, vector in lower:
            norm = float(torch.linalg.matrix_norm(matrix, 2)) * norm
            norm += 0.0 if vector is None else float(vector.norm())
        return float(weight.norm()) * norm + (0.0 if bias is None else float(bias))


def _product(layers: Sequence[Layer]) -> Layer:
    """The layer that a chain of linear layers is."""
    width = layers[0][0].shape[1]
    weight, bias = torch.eye(width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64)
    for matrix, vector in layers:
        weight, bias = matrix.double() @ weight, matrix.double() @ bias
        bias = bias if vector is None else bias + vector.double()
    return weight, bias


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


def _layers(tensors: dict[str, Tensor], named: str) -> tuple[Layer, ...]:
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
