"""Sums of models and of their differences."""

import torch
from torch import Tensor

from mecha_exp import Node, Parameter, Return, merge_method
from mecha_exp.method import is_constant, spread


@merge_method(elementwise=True, register=False)
def lerp(a: Parameter(Tensor), b: Parameter(Tensor), alpha: Parameter(Tensor, "param")) -> Return(Tensor):
    """a + alpha (b - a), exact at both ends: the nearer one is what the other is blended into.

    As `torch.lerp`, which rounds differently at the end of a tile.
    """
    difference = b - a
    return torch.where(alpha.abs() < 0.5, a + alpha * difference, b - (1 - alpha) * difference)


@merge_method(elementwise=True, register=False)
def add_scaled(
    a: Parameter(Tensor),
    d: Parameter(Tensor, ("weight", "delta")),
    alpha: Parameter(Tensor, "param"),
) -> Return(Tensor):
    """a + alpha d."""
    return a + alpha * d


@merge_method(composite=True)
def weighted_sum(a: Parameter(Tensor), b: Parameter(Tensor), alpha: Parameter(Tensor) = 0.5) -> Return(
    Tensor
):
    """lerp(a, b, alpha) = (1 - alpha) a + alpha b.

    alpha 0 is a and reads nothing else, 1 is b; outside [0, 1] it extrapolates.
    """
    if is_constant(alpha, 0):
        return a
    if is_constant(alpha, 1):
        return b
    return lerp(a, b, alpha)


@merge_method(elementwise=True)
def n_average(*models: Parameter(Tensor)) -> Return(Tensor):
    """The mean of the models: a uniform soup (Wortsman et al. 2022, arXiv:2203.05482)."""
    total = models[0]
    for model in models[1:]:
        total = total + model
    return total / len(models)


@merge_method(elementwise=True)
def subtract(a: Parameter(Tensor, "weight"), b: Parameter(Tensor, "weight")) -> Return(Tensor, "delta"):
    """a - b, the delta (task vector) that leads from b to a."""
    return a - b


@merge_method(elementwise=True)
def scale(a: Parameter(Tensor, "delta"), alpha: Parameter(Tensor) = 1.0) -> Return(Tensor, "delta"):
    """alpha a, of a delta."""
    return a * alpha


@merge_method(composite=True)
def add_difference(
    a: Parameter(Tensor),
    b: Parameter(Tensor, ("weight", "delta")),
    c: Parameter(Tensor, "weight") = None,
    alpha: Parameter(Tensor) = 1.0,
) -> Return(Tensor):
    """a + alpha (b - c); without c, b is a delta: a + alpha b. alpha 0 is a and reads nothing else."""
    if is_constant(alpha, 0):
        return a
    return add_scaled(a, b if c is None else subtract(b, c), alpha)


@merge_method(elementwise=True, register=False)
def weighted_total(*deltas: Parameter(Tensor), weights: Parameter(list[float])) -> Return(Tensor):
    """sum_i weights_i deltas_i."""
    total = deltas[0] * weights[0]
    for delta, weight in zip(deltas[1:], weights[1:], strict=True):
        total = total + delta * weight
    return total


def deltas_to(base: Node, models: tuple[Node, ...]) -> list[Node]:
    """What leads from the base to each model; those that are deltas already stay as they are."""
    return [subtract(model, base) if model.merge_space == "weight" else model for model in models]


@merge_method(composite=True)
def task_arithmetic(
    base: Parameter(Tensor, "weight"),
    *models: Parameter(Tensor, ("weight", "delta")),
    weights: Parameter(list[float]) = 1.0,
    scale: Parameter(Tensor) = 1.0,
) -> Return(Tensor, "weight"):
    """base + scale sum_i weights_i (model_i - base).

    `weights` is one number for all models, or one for each. Source: Ilharco et al. 2022, arXiv:2212.04089.
    """
    if is_constant(scale, 0):
        return base
    merged = weighted_total(*deltas_to(base, models), weights=spread(weights, len(models)))
    return add_scaled(base, merged, scale)
