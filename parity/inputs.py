"""The tensors that methods are compared on: the same for the oracles, which know nothing of mecha_exp."""

import torch
from torch import Tensor

SHAPES = {"number": (), "one": (1,), "vector": (7,), "column": (6, 1), "row": (1, 5), "wide": (5, 9),
          "tall": (24, 10), "kernel": (4, 3, 3, 3)}  # fmt: skip
MODELS = 4


def inputs(dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """Four models, rounded to the dtype and given in float64.

    They are multiples of 2^-20, so that their differences are float32 numbers too: oracles find thresholds in
    float32, and round the others up or down.
    """
    generator = torch.Generator().manual_seed(20)
    drawn = [
        {
            key: (torch.randn(shape, generator=generator, dtype=torch.float32) * 2**20).round() / 2**20
            for key, shape in SHAPES.items()
        }
        for _ in range(MODELS)
    ]
    return [{key: tensor.to(dtype).double() for key, tensor in model.items()} for model in drawn]


def plain_inputs() -> list[dict[str, Tensor]]:
    """The models of recipe texts, in float32: only keys on which no method divides by zero."""
    return [
        {key: model[key].float().contiguous() for key in ("vector", "wide", "tall", "kernel")}
        for model in inputs(torch.float32)
    ]
