# mypy: disable-error-code="valid-type"
"""Scaled fp8 outputs: matrices as float8_e4m3fn with a scale each, in ComfyUI's layout.

The scale of a tensor is its largest magnitude / 448, the largest number of the format. It is a reduction, so
a matrix is computed twice: once for its scale, once for its codes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mecha_exp.errors import ConfigError, did_you_mean
from mecha_exp.families import NEVER_SCALED
from mecha_exp.graph.nodes import Node
from mecha_exp.method_api.decorators import merge_method, reduction
from mecha_exp.method_api.parameters import Parameter, Return

FP8_SCALED = "fp8_scaled"
QUANTISE = (FP8_SCALED,)
"""The choices of `Job.quantize`."""

DTYPE = "F8_E4M3"
LARGEST = torch.finfo(torch.float8_e4m3fn).max

MARKER = "scaled_fp8"
DIFFUSER = "model.diffusion_model."
"""The prefix of the diffusion model in a single file, where ComfyUI looks for the marker too."""


@reduction(rank=lambda count: count, register=False)
def largest_magnitude(a: Parameter(Tensor)) -> Return(Tensor, "param"):
    """The largest abs(a) over the whole tensor; NaN is not counted."""
    return a.abs()


@merge_method(elementwise=True, register=False)
def scale_of(largest: Parameter(Tensor, "param")) -> Return(Tensor, "param"):
    """largest / 448 as a float32; 1 where that is 0 or not finite."""
    scale = (largest / LARGEST).float().to(largest.dtype)
    return torch.where((scale > 0) & scale.isfinite(), scale, torch.ones_like(scale))


@merge_method(elementwise=True, register=False)
def divided(a: Parameter(Tensor), scale: Parameter(Tensor, "param")) -> Return(Tensor):
    """The numbers a / scale, which are rounded to codes when they are stored."""
    return a / scale


@merge_method(elementwise=True, register=False)
def restored(codes: Parameter(Tensor), scale: Parameter(Tensor, "param")) -> Return(Tensor):
    """The numbers that a reader gets: codes, rounded to float8_e4m3fn, * scale."""
    return codes.to(torch.float8_e4m3fn).to(codes.dtype) * scale


@dataclass(frozen=True)
class QuantisationError:
    """How far the numbers of a scaled fp8 output are from those that were merged.

    Attributes:
        tensors: the number of quantised tensors.
        mean: |stored - merged| / |merged| over all of them as one vector.
        largest: the same of the tensor where it is largest.
        key: that tensor.
    """

    tensors: int
    mean: float
    largest: float
    key: str

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers for a record."""
        return {
            "quantisation/tensors": float(self.tensors),
            "quantisation/relative_error_mean": self.mean,
            "quantisation/relative_error_max": self.largest,
        }


def error_of(by_key: Mapping[str, Tensor]) -> QuantisationError | None:
    """The error of a model from the `moments` of each of its tensors and the merged one; None without any."""
    if not by_key:
        return None
    apart = {key: float(moments[2]) for key, moments in by_key.items()}
    size = {key: float(moments[1]) for key, moments in by_key.items()}
    relative = {key: _ratio(apart[key], size[key]) for key in by_key}
    key = max(relative, key=relative.__getitem__)
    whole = _ratio(math.fsum(apart.values()), math.fsum(size.values()))
    return QuantisationError(len(by_key), whole, relative[key], key)


def scaled(root: Node) -> tuple[Node, Node, Node]:
    """The nodes of a result's codes before they are rounded, its scale, and what a reader gets."""
    scale = scale_of(largest_magnitude(root))
    codes = divided(root, scale)
    return codes, scale, restored(codes, scale)


def is_linear(key: str, shape: Sequence[int], prefix: str = "") -> bool:
    """Whether a key with the prefix is the matrix [out, in] of a linear layer; names tell embeddings."""
    if not key.startswith(prefix):
        return False
    is_matrix = key.endswith(".weight") and len(shape) == 2 and math.prod(shape) > 0
    return is_matrix and not any(name in key for name in NEVER_SCALED)


def scale_key(key: str) -> str:
    """The key of a matrix's scale."""
    return key.removesuffix("weight") + "scale_weight"


def prefix_of(keys: Iterable[str]) -> str:
    """The prefix of the keys that are quantised, and of the marker: the diffusion model's, or none."""
    return DIFFUSER if any(key.startswith(DIFFUSER) for key in keys) else ""


def require_known(choice: str | None) -> None:
    """Raise ConfigError unless a way of quantising an output is known; None is none."""
    if choice is not None and choice not in QUANTISE:
        raise ConfigError(f"quantize: unknown choice '{choice}'.{did_you_mean(choice, QUANTISE)}")


def _ratio(apart: float, size: float) -> float:
    """The ratio of two norms, from their squares; 0 where both are."""
    return math.sqrt(apart / size) if size else (math.inf if apart else 0.0)
