"""Experts in 8 bits: each weight's difference from the base, in steps of its tensor's own size."""

from collections.abc import Mapping

import torch
from torch import Tensor

LEVELS = 127
STEP = "step"


def pack(expert: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Round an expert's differences from its base to int8: code = round((expert - base) / step).

    Args:
        expert: float32 tensors by key.
        base: tensors of the same keys and shapes.

    Returns:
        For each key the codes, -127 to 127, and under `KEY/step` the float32 step, max |expert - base| / 127.
    """
    packed = {}
    for key, weight in expert.items():
        difference = weight - base[key]
        step = (difference.abs().max() / LEVELS).clamp(min=torch.finfo(torch.float32).tiny)
        packed[key] = (difference / step).round().to(torch.int8)
        packed[f"{key}/{STEP}"] = step
    return packed


def unpack(packed: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The expert that `pack` was given, as base + code * step: no weight is off by more than half a step."""
    return {key: weight + packed[key].float() * packed[f"{key}/{STEP}"] for key, weight in base.items()}
