"""Random sparsification of deltas. Masks are a function of (seed, key, model) alone."""

import torch
from torch import Tensor

from mecha_exp import Node, Parameter, Return, merge_method, uniform
from mecha_exp.method import is_constant, spread
from mecha_exp.methods.linear import add_scaled, deltas_to, weighted_total


@merge_method(elementwise=True, register=False)
def keep_at_random(
    delta: Parameter(Tensor, "delta"),
    draw: Parameter(Tensor, "param"),
    density: Parameter(float, gt=0, le=1),
    rescale: Parameter(bool),
) -> Return(Tensor, "delta"):
    """The entries whose draw is below `density`, divided by it if they are to keep their expectation."""
    kept = torch.where(draw < density, delta, 0)
    return kept / density if rescale else kept


@merge_method(elementwise=True, register=False)
def agreeing_total(*deltas: Parameter(Tensor, "delta"), weights: Parameter(list[float])) -> Return(
    Tensor, "delta"
):
    """The sum of the weighted entries whose sign is that of the sum of them all, a zero sum counting as +."""
    weighted = [delta * weight for delta, weight in zip(deltas, weights, strict=True)]
    positive = sum(weighted) >= 0
    return sum(torch.where((w > 0) == positive, w, 0) for w in weighted)


def _dropped(base: Node, models: tuple[Node, ...], density: float, rescale: bool, seed: int) -> list[Node]:
    deltas = deltas_to(base, models)
    if density == 1:
        return deltas
    return [
        keep_at_random(delta, uniform(delta, seed=seed, stream=i), density=density, rescale=rescale)
        for i, delta in enumerate(deltas)
    ]


@merge_method(composite=True)
def dare_linear(
    base: Parameter(Tensor, "weight"),
    *models: Parameter(Tensor, ("weight", "delta")),
    weights: Parameter(list[float]) = 1.0,
    density: Parameter(float, gt=0, le=1) = 0.5,
    rescale: Parameter(bool) = True,
    scale: Parameter(Tensor) = 1.0,
    seed: Parameter(int, ge=0) = 0,
) -> Return(Tensor, "weight"):
    """base + scale sum_i weights_i drop(model_i - base).

    `drop` keeps each entry with probability `density` and divides what is left by it (`rescale`).
    Source: DARE, Yu et al. 2023, arXiv:2311.03099.
    """
    if is_constant(scale, 0):
        return base
    dropped = _dropped(base, models, density, rescale, seed)
    return add_scaled(base, weighted_total(*dropped, weights=spread(weights, len(models))), scale)


@merge_method(composite=True)
def dare_ties(
    base: Parameter(Tensor, "weight"),
    *models: Parameter(Tensor, ("weight", "delta")),
    weights: Parameter(list[float]) = 1.0,
    density: Parameter(float, gt=0, le=1) = 0.5,
    rescale: Parameter(bool) = True,
    scale: Parameter(Tensor) = 1.0,
    seed: Parameter(int, ge=0) = 0,
) -> Return(Tensor, "weight"):
    """As `dare_linear`, but of each entry only the models that agree with the sign of the sum are added.

    Source: DARE, Yu et al. 2023, arXiv:2311.03099, with the sign election of TIES as in mergekit.
    """
    if is_constant(scale, 0):
        return base
    dropped = _dropped(base, models, density, rescale, seed)
    return add_scaled(base, agreeing_total(*dropped, weights=spread(weights, len(models))), scale)
