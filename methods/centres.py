"""Centres of a set of models."""

from itertools import combinations, pairwise

import torch
from torch import Tensor

from mecha_exp import Parameter, Return, merge_method
from mecha_exp.extensions.merge_methods import is_constant, row_dot, row_norm
from mecha_exp.methods.limiting import higher, lower
from mecha_exp.methods.linear import (
    add_merged,
    add_scaled,
    combination,
    deltas_to,
    difference,
    n_average,
)
from mecha_exp.methods.parameters import Base, Delta, Experts, Model, RowNorm, Scale, Small
from mecha_exp.methods.reductions import gram, gram_matrix


def row_cosine(a: Tensor, b: Tensor, eps: float) -> Tensor:
    """The cosine of each row of a with that row of b, [rows, 1] in float64, 0 where one of them is 0.

    Norms below eps count as eps.
    """
    return quotient(row_dot(a, b), row_norm(a).clamp_min(eps) * row_norm(b).clamp_min(eps))


def quotient(product: Tensor, norms: Tensor) -> Tensor:
    """product / norms, and 0 where the norms are."""
    return torch.where(norms > 0, product / norms, 0)


def stock_share(cosine: Tensor, count: int) -> Tensor:
    """t = N c / (1 + (N - 1) c), how far to go along the mean of N deltas; 0 where that is not defined."""
    below = 1 + (count - 1) * cosine
    return torch.where(below.abs() < 1e-6, 0, count * cosine / below)


PAIRS = {"consecutive": pairwise, "all": lambda deltas: combinations(deltas, 2)}
Pairs = Parameter(
    str, choices=tuple(PAIRS), help="whose cosines are averaged: of all pairs, or of neighbours in the list"
)


def row_share(deltas: tuple[Tensor, ...], eps: float, pairs: str = "consecutive") -> Tensor | float:
    """`stock_share` of each row, from the mean cosine of pairs of deltas, in the dtype of these."""
    if len(deltas) == 1:
        return 1.0
    cosines = [row_cosine(a, b, eps) for a, b in PAIRS[pairs](deltas)]
    return stock_share(sum(cosines) / len(cosines), len(deltas)).to(deltas[0].dtype)


@merge_method(rowwise=True)
def model_stock(*deltas: Delta, cos_eps: RowNorm = 0.0, pairs: Pairs = "consecutive") -> Return(
    Tensor, "delta"
):
    """t mean(deltas), with t = N c / (1 + (N - 1) c) and c the mean cosine of pairs of deltas, by row.

    A row is a slice along the last axis. Where t is not defined the result is 0; one delta is itself.
    Agrees: sd-mecha (cos_eps=1e-6, and pairs=consecutive, where the order of the deltas counts).
    Differs: the paper takes the angle of a whole layer and of all pairs: `model_stock_pairwise`.
    Source: sd-mecha, of Model Stock, Jang et al. 2024, arXiv:2403.19522.
    """
    if len(deltas) == 1:
        return deltas[0]
    return row_share(deltas, cos_eps, pairs) * sum(deltas) / len(deltas)


@merge_method(composite=True)
def n_model_stock(
    base: Base, *models: Experts, cos_eps: RowNorm = 0.0, scale: Scale = 1.0, pairs: Pairs = "consecutive"
) -> Return(Tensor, "weight"):
    """base + scale model_stock(model_i - base).

    Agrees: sd-mecha (cos_eps=1e-6, and pairs=consecutive, where the order of the experts counts).
    Differs: the paper takes the angle of a whole layer and of all pairs: `model_stock_pairwise`.
    Source: sd-mecha, of Model Stock, Jang et al. 2024, arXiv:2403.19522.
    """
    settings = {"cos_eps": cos_eps, "pairs": pairs}
    return add_merged(base, models, scale, lambda deltas: model_stock(*deltas, **settings))


@merge_method(elementwise=True, register=False)
def pairwise_share(products: Small, scale: Small, count: Parameter(int), cos_eps: Parameter(float)) -> Return(
    Tensor, "param"
):
    """`stock_share` times the scale, from the mean cosine of all pairs."""
    matrix = gram_matrix(products, count)
    norms = matrix.diagonal().sqrt()
    pairs = [
        quotient(matrix[i, j], (norms[i] * norms[j]).clamp_min(cos_eps)).clamp(-1, 1)
        for i, j in combinations(range(count), 2)
    ]
    return scale * stock_share(torch.stack(pairs).mean(), count)


@merge_method(rowwise=True, register=False)
def stock_of_rows(*deltas: Delta, cos_eps: Parameter(float)) -> Return(Tensor, "delta"):
    """`stock_share` times the mean, by row, from the mean cosine of all pairs."""
    pairs = []
    for a, b in combinations(deltas, 2):
        norms = row_norm(a) * row_norm(b)
        pairs.append(quotient(row_dot(a, b), norms.clamp_min(cos_eps)).clamp(-1, 1))
    share = stock_share(sum(pairs) / len(pairs), len(deltas)).to(deltas[0].dtype)
    return share * sum(deltas) / len(deltas)


@merge_method(composite=True)
def model_stock_pairwise(
    base: Base,
    *models: Experts,
    filter_wise: Parameter(bool, help="an angle for each row (a slice along the last axis)") = False,
    scale: Scale = 1.0,
    cos_eps: Parameter(float, ge=0, help="products of norms below it count as it; mergekit has 1e-6") = 0.0,
) -> Return(Tensor, "weight"):
    """base + scale t mean(deltas), t = N c / (1 + (N - 1) c), c the mean cosine of all pairs of deltas.

    Over the whole tensor or by row. Where t is not defined the result is the base; one model is itself.
    Agrees: the paper by layer; mergekit (cos_eps=1e-6, by which small task vectors count as orthogonal).
    Differs: the paper derives t for two experts and for N of them at one angle, whose mean is taken here.
    Source: Model Stock, Jang et al. 2024, arXiv:2403.19522.
    """
    if is_constant(scale, 0):
        return base
    deltas = deltas_to(base, models)
    if len(deltas) == 1:
        return add_scaled(base, deltas[0], scale)
    if filter_wise:
        return add_scaled(base, stock_of_rows(*deltas, cos_eps=cos_eps), scale)
    share = pairwise_share(gram(*deltas), scale, count=len(deltas), cos_eps=cos_eps)
    return add_scaled(base, n_average(*deltas), share)


Iterations = Parameter(int, ge=0, help="iterations at most")
Nearest = Parameter(float, ge=0, help="distances below it count as it; sd-mecha has 1e-6")
Progress = Parameter(float, ge=0, help="relative change of the sum of distances that ends the iteration")
ROUNDED = 1e-8
"""Share of the largest distance that rounding may add to one, the root of a sum of inner products."""


@merge_method(elementwise=True, register=False)
def median_shares(
    products: Small,
    count: Parameter(int),
    eps: Parameter(float),
    maxiter: Parameter(int),
    ftol: Parameter(float),
) -> Return(Tensor, "param"):
    """The coefficients of `geometric_median`, from the inner products of what leads from the first model on.

    Weiszfeld's iteration stays in the span of the models, so N numbers are all that changes.
    """
    matrix = products.new_zeros(count, count)
    matrix[1:, 1:] = gram_matrix(products, count - 1)
    every = torch.eye(count, dtype=matrix.dtype)

    def distances(shares: Tensor) -> Tensor:
        apart = every - shares
        return ((apart @ matrix) * apart).sum(1).clamp_min(0).sqrt()

    shares = torch.full([count], 1 / count, dtype=matrix.dtype)
    away = distances(shares)
    if not away.any():
        return shares
    for _ in range(maxiter):
        before = away.mean()
        shares = 1 / away.clamp_min(max(eps, float(away.max()) * ROUNDED))
        shares = shares / shares.sum()
        away = distances(shares)
        if (before - away.mean()).abs() <= ftol * away.mean():
            break
    return shares


@merge_method(composite=True, title="Geometric median")
def geometric_median(
    *models: Model, eps: Nearest = 0.0, maxiter: Iterations = 100, ftol: Progress = 1e-20
) -> Return(Tensor):
    """The point whose distances to all models have the smallest sum, over the whole tensor.

    Weiszfeld's iteration from the mean: weights 1 / max(distance, eps), normalised. Only inner products are
    needed for it, so the tensors are read twice in all, and a distance below 1e-8 of the largest counts as
    that.
    Agrees: sd-mecha (eps=1e-6).
    Differs: the paper takes one median of the whole model, here each tensor has its own.
    Source: Weiszfeld 1937; Pillutla et al. 2022, arXiv:1912.13445; sd-mecha.
    """
    if len(models) == 1:
        return models[0]
    apart = [difference(model, models[0]) for model in models[1:]]
    shares = median_shares(gram(*apart), count=len(models), eps=eps, maxiter=maxiter, ftol=ftol)
    return combination(*models, coefficients=shares)


@merge_method(elementwise=True, title="Median")
def median(*models: Model) -> Return(Tensor):
    """The entry-wise median, of an even number of models the lower of the two in the middle.

    Source: as torch.median.
    """
    ordered = list(models)
    for place in range((len(models) + 1) // 2):  # the smallest one to the front, as often as it takes
        for other in range(len(models) - 1, place, -1):
            a, b = ordered[other - 1], ordered[other]
            ordered[other - 1], ordered[other] = lower(a, b), higher(b, a)
    return ordered[(len(models) - 1) // 2]
