"""TIES and its relatives: trim deltas, elect signs, merge what agrees."""

import torch
from torch import Tensor

from mecha_exp import Node, Parameter, Return, merge_method
from mecha_exp.extensions.merge_methods import is_constant, spread
from mecha_exp.methods.centres import Iterations, Nearest, Progress, consecutive_share, geometric_median
from mecha_exp.methods.linear import add_scaled, deltas_to, weighted_total
from mecha_exp.methods.parameters import (
    Alpha,
    Base,
    Delta,
    Densities,
    Experts,
    Kept,
    RowNorm,
    Scale,
    Small,
    VoteBySize,
    Weights,
)
from mecha_exp.methods.reductions import kth_magnitude, least_kept


@merge_method(elementwise=True, register=False)
def trim(delta: Delta, threshold: Small) -> Return(Tensor, "delta"):
    """The entries of a magnitude of at least `threshold`; the others become 0."""
    return torch.where(delta.abs() >= threshold, delta, 0)


def elected(deltas: tuple[Tensor, ...], vote_sgn: bool) -> list[Tensor]:
    """A mask for each delta: the entries whose sign is that of the sum of signs, or of values."""
    signs = [delta.sign() for delta in deltas]
    majority = sum(deltas if vote_sgn else signs).sign()
    return [sign == majority for sign in signs]


def mean_of(deltas: tuple[Tensor, ...], chosen: list[Tensor]) -> Tensor:
    """The mean of the chosen entries, entry by entry; 0 where none is."""
    total = sum(torch.where(yes, delta, 0) for yes, delta in zip(chosen, deltas, strict=True))
    count = sum(yes.to(total.dtype) for yes in chosen)
    return torch.where(count > 0, total / count, 0)


@merge_method(elementwise=True, register=False)
def elect_and_average(*deltas: Delta, vote_sgn: VoteBySize = False) -> Return(Tensor, "delta"):
    """The mean of the entries whose sign is the elected one, entry by entry.

    The elected sign is that of the sum of the signs or, with `vote_sgn`, of the sum of the values.
    """
    return mean_of(deltas, elected(deltas, vote_sgn))


@merge_method(composite=True)
def ties_sum(*deltas: Delta, k: Kept = 1.0, vote_sgn: VoteBySize = False) -> Return(Tensor, "delta"):
    """Trim each delta to its `k` largest entries, elect a sign for each entry, average those that agree.

    Source: TIES-Merging, Yadav et al. 2023, arXiv:2306.01708; trimmed and elected as in sd-mecha.
    """
    return elect_and_average(*_trimmed(deltas, k), vote_sgn=vote_sgn)


def _trimmed(deltas: tuple[Node, ...], k: float) -> list[Node]:
    return [trim(delta, kth_magnitude(delta, k=k)) if k < 1 else delta for delta in deltas]


@merge_method(composite=True)
def add_difference_ties(
    base: Base, *models: Experts, alpha: Alpha = 1.0, k: Kept = 1.0, vote_sgn: VoteBySize = False
) -> Return(Tensor, "weight"):
    """base + alpha ties_sum(model_i - base), `k` being the fraction of each task vector that is kept.

    Source: TIES-Merging, Yadav et al. 2023, arXiv:2306.01708.
    """
    if is_constant(alpha, 0):
        return base
    return add_scaled(base, ties_sum(*deltas_to(base, models), k=k, vote_sgn=vote_sgn), alpha)


@merge_method(rowwise=True, register=False)
def elect_and_take_stock(*deltas: Delta, vote_sgn: VoteBySize, cos_eps: RowNorm) -> Return(Tensor, "delta"):
    """The mean of what agrees, times model stock's factor of each row of what agrees."""
    chosen = elected(deltas, vote_sgn)
    agreeing = tuple(torch.where(yes, delta, 0) for yes, delta in zip(chosen, deltas, strict=True))
    return mean_of(deltas, chosen) * consecutive_share(agreeing, cos_eps)


@merge_method(elementwise=True, register=False)
def agreeing_entries(*deltas: Delta, vote_sgn: VoteBySize, index: Parameter(int)) -> Return(Tensor, "delta"):
    """The entries of the delta `index` whose sign is the elected one; the others become 0."""
    return torch.where(elected(deltas, vote_sgn)[index], deltas[index], 0)


ApplyStock = Parameter(bool, help="scale each row by model stock's factor of what agrees")
ApplyMedian = Parameter(bool, help="take the geometric median of what agrees, not the mean")


@merge_method(composite=True)
def ties_sum_extended(
    *deltas: Delta,
    k: Kept = 0.2,
    vote_sgn: VoteBySize = False,
    apply_stock: ApplyStock = False,
    apply_median: ApplyMedian = False,
    cos_eps: RowNorm = 1e-6,
    eps: Nearest = 1e-6,
    maxiter: Iterations = 100,
    ftol: Progress = 1e-20,
) -> Return(Tensor, "delta"):
    """As `ties_sum`, but model stock or the geometric median of what agrees (`apply_stock`, `apply_median`).

    sd-mecha 1.1.8 has `apply_stock` the wrong way round; here true applies it. The median goes first.
    Source: TIES-Merging, arXiv:2306.01708; Model Stock, arXiv:2403.19522; sd-mecha.
    """
    trimmed = _trimmed(deltas, k)
    if apply_median:
        agreeing = [agreeing_entries(*trimmed, vote_sgn=vote_sgn, index=i) for i in range(len(trimmed))]
        return geometric_median(*agreeing, eps=eps, maxiter=maxiter, ftol=ftol)
    if apply_stock:
        return elect_and_take_stock(*trimmed, vote_sgn=vote_sgn, cos_eps=cos_eps)
    return elect_and_average(*trimmed, vote_sgn=vote_sgn)


@merge_method(composite=True)
def add_difference_ties_extended(
    base: Base,
    *models: Experts,
    alpha: Alpha = 1.0,
    k: Kept = 0.2,
    vote_sgn: VoteBySize = False,
    apply_stock: ApplyStock = False,
    cos_eps: RowNorm = 1e-6,
    apply_median: ApplyMedian = False,
    eps: Nearest = 1e-6,
    maxiter: Iterations = 100,
    ftol: Progress = 1e-20,
) -> Return(Tensor, "weight"):
    """base + alpha ties_sum_extended(model_i - base).

    Source: TIES-Merging, arXiv:2306.01708; Model Stock, arXiv:2403.19522; sd-mecha.
    """
    if is_constant(alpha, 0):
        return base
    settings = {"k": k, "vote_sgn": vote_sgn, "apply_stock": apply_stock, "apply_median": apply_median}
    limits = {"cos_eps": cos_eps, "eps": eps, "maxiter": maxiter, "ftol": ftol}
    return add_scaled(base, ties_sum_extended(*deltas_to(base, models), **settings, **limits), alpha)


@merge_method(elementwise=True, register=False)
def agreeing_total(*deltas: Delta, weights: Weights, normalize: Parameter(bool) = False) -> Return(
    Tensor, "delta"
):
    """The sum of the weighted entries whose sign is that of the sum of them all, a zero sum counting as +.

    `normalize` divides by the sum of the weights of those that agree.
    """
    weighted = [delta * weight for delta, weight in zip(deltas, weights, strict=True)]
    positive = sum(weighted) >= 0
    agree = [((w > 0) == positive) & (w != 0) for w in weighted]
    total = sum(torch.where(yes, w, 0) for yes, w in zip(agree, weighted, strict=True))
    if not normalize:
        return total
    share = sum(yes.to(total.dtype) * weight for yes, weight in zip(agree, weights, strict=True))
    return torch.where(share == 0, total, total / share)


def merged_deltas(
    deltas: list[Node], weights: float | list[float], consensus: bool, normalize: bool = False
) -> Node:
    """The weighted sum of deltas, or of what agrees in sign; divided by the weights if it is to be a mean."""
    each = spread(weights, len(deltas))
    if consensus:
        return agreeing_total(*deltas, weights=each, normalize=normalize)
    divisor = sum(each) if normalize and abs(sum(each)) > 1e-8 else 1.0
    return weighted_total(*deltas, weights=[weight / divisor for weight in each])


def keep_largest(deltas: list[Node], density: float | list[float]) -> list[Node]:
    """Keep the int(density n) largest entries of each delta, at least one, and all that tie with the last."""
    return [
        trim(delta, least_kept(delta, density=share)) if share < 1 else delta
        for delta, share in zip(deltas, spread(density, len(deltas)), strict=True)
    ]


Normalize = Parameter(bool, help="divide by the weights of the models that are summed")


@merge_method(composite=True)
def ties(
    base: Base,
    *models: Experts,
    weights: Weights = 1.0,
    density: Densities = 1.0,
    normalize: Normalize = True,
    scale: Scale = 1.0,
) -> Return(Tensor, "weight"):
    """base + scale sum of what agrees with the sign of sum_i w_i d_i, over the weights of what agrees.

    d_i is model_i - base, trimmed to its int(density n) largest entries, at least one, and whatever ties with
    the last of them. A zero sum counts as positive.
    Source: TIES-Merging, Yadav et al. 2023, arXiv:2306.01708; weighted as in mergekit.
    """
    if is_constant(scale, 0):
        return base
    kept = keep_largest(deltas_to(base, models), density)
    return add_scaled(base, merged_deltas(kept, weights, consensus=True, normalize=normalize), scale)
