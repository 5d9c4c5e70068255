"""Centres of a set of models."""

from itertools import pairwise

import torch
from torch import Tensor

from mecha_exp import Parameter, Return, merge_method
from mecha_exp.methods.linear import add_scaled, deltas_to


def _row_cosine(a: Tensor, b: Tensor, eps: float) -> Tensor:
    """The cosine of each row of a with that row of b, of shape [rows, 1]; norms below eps count as eps."""
    norms = [x.norm(dim=-1, keepdim=True).clamp_min(eps) for x in (a, b)]
    return (a * b).sum(dim=-1, keepdim=True) / (norms[0] * norms[1])


@merge_method(rowwise=True)
def model_stock(*deltas: Parameter(Tensor, "delta"), cos_eps: Parameter(float, gt=0) = 1e-6) -> Return(
    Tensor, "delta"
):
    """t mean(deltas), with t = N c / (1 + (N - 1) c) and c the mean cosine of consecutive deltas, by row.

    A row is a slice along the last axis. Where t is not defined the result is 0; one delta is itself.
    Source: Model Stock, Jang et al. 2024, arXiv:2403.19522; rows as in sd-mecha.
    """
    n = len(deltas)
    if n == 1:
        return deltas[0]
    cosines = [_row_cosine(a, b, cos_eps) for a, b in pairwise(deltas)]
    cosine = sum(cosines) / len(cosines)
    t = n * cosine / (1 + (n - 1) * cosine)
    return torch.nan_to_num(t * sum(deltas) / n, nan=0, posinf=0, neginf=0)


@merge_method(composite=True)
def n_model_stock(
    base: Parameter(Tensor, "weight"),
    *models: Parameter(Tensor, ("weight", "delta")),
    cos_eps: Parameter(float, gt=0) = 1e-6,
) -> Return(Tensor, "weight"):
    """base + model_stock(model_i - base).

    Source: Model Stock, Jang et al. 2024, arXiv:2403.19522.
    """
    return add_scaled(base, model_stock(*deltas_to(base, models), cos_eps=cos_eps), 1.0)
