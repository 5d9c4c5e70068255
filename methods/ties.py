"""Trim, elect signs, merge: what becomes of deltas that disagree."""

import torch
from torch import Tensor

from mecha_exp import Parameter, Return, merge_method
from mecha_exp.method import is_constant
from mecha_exp.methods.linear import add_scaled, deltas_to
from mecha_exp.methods.reductions import kth_magnitude


@merge_method(elementwise=True, register=False)
def trim(delta: Parameter(Tensor, "delta"), threshold: Parameter(Tensor, "param")) -> Return(Tensor, "delta"):
    """The entries of a magnitude of at least `threshold`; the others become 0."""
    return torch.where(delta.abs() >= threshold, delta, 0)


@merge_method(elementwise=True, register=False)
def elect_and_average(*deltas: Parameter(Tensor, "delta"), vote_sgn: Parameter(bool) = False) -> Return(
    Tensor, "delta"
):
    """The mean of the entries whose sign is the elected one, entry by entry.

    The elected sign is that of the sum of the signs or, with `vote_sgn`, of the sum of the values.
    """
    signs = [delta.sign() for delta in deltas]
    elected = sum(deltas if vote_sgn else signs).sign()
    agree = [sign == elected for sign in signs]
    total = sum(torch.where(yes, delta, 0) for yes, delta in zip(agree, deltas, strict=True))
    count = sum(yes.to(total.dtype) for yes in agree)
    return torch.where(count > 0, total / count, 0)


@merge_method(composite=True)
def ties_sum(
    *deltas: Parameter(Tensor, "delta"),
    k: Parameter(float, ge=0, le=1) = 1.0,
    vote_sgn: Parameter(bool) = False,
) -> Return(Tensor, "delta"):
    """Trim each delta to its `k` largest entries, elect a sign for each entry, average those that agree.

    Source: TIES-Merging, Yadav et al. 2023, arXiv:2306.01708; trimmed and elected as in sd-mecha.
    """
    if k < 1:
        deltas = [trim(delta, kth_magnitude(delta, k=k)) for delta in deltas]
    return elect_and_average(*deltas, vote_sgn=vote_sgn)


@merge_method(composite=True)
def add_difference_ties(
    base: Parameter(Tensor, "weight"),
    *models: Parameter(Tensor, ("weight", "delta")),
    alpha: Parameter(Tensor) = 1.0,
    k: Parameter(float, ge=0, le=1) = 1.0,
    vote_sgn: Parameter(bool) = False,
) -> Return(Tensor, "weight"):
    """base + alpha ties_sum(model_i - base), `k` being the fraction of each task vector that is kept.

    Source: TIES-Merging, Yadav et al. 2023, arXiv:2306.01708.
    """
    if is_constant(alpha, 0):
        return base
    return add_scaled(base, ties_sum(*deltas_to(base, models), k=k, vote_sgn=vote_sgn), alpha)
