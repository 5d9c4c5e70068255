"""TIES and its relatives: trim deltas, elect signs, merge what agrees."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mecha_exp import Node, Parameter, Return, merge_method, reduction, whole_model
from mecha_exp.extensions.merge_methods import spread
from mecha_exp.methods.centres import Iterations, Nearest, Progress, geometric_median, row_share
from mecha_exp.methods.linear import add_merged, weighted_total
from mecha_exp.methods.parameters import (
    Alpha,
    Base,
    Delta,
    Experts,
    Kept,
    KeptShares,
    RowNorm,
    Scale,
    Small,
    VoteBySize,
    Weights,
)
from mecha_exp.methods.reductions import (
    kth_magnitude,
    largest_dropped,
    least_kept,
    model_largest_dropped,
    model_least_kept,
)


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


@merge_method(composite=True, empty=0.0)
def ties_sum(*deltas: Delta, k: Kept = 1.0, vote_sgn: VoteBySize = False) -> Return(Tensor, "delta"):
    """Trim each delta to its `k` largest entries, elect a sign for each entry, average those that agree.

    Agrees: sd-mecha.
    Differs: the paper elects by the sum of the values (`vote_sgn`), trims over the whole model and keeps k n
    entries, not k n + 1: see `ties`.
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

    Agrees: sd-mecha.
    Differs: the paper elects by the sum of the values (`vote_sgn`), trims over the whole model and keeps k n
    entries, not k n + 1: see `ties`.
    Source: TIES-Merging, Yadav et al. 2023, arXiv:2306.01708.
    """
    return add_merged(base, models, alpha, lambda deltas: ties_sum(*deltas, k=k, vote_sgn=vote_sgn))


@merge_method(rowwise=True, register=False)
def elect_and_take_stock(*deltas: Delta, vote_sgn: VoteBySize, cos_eps: RowNorm) -> Return(Tensor, "delta"):
    """The mean of what agrees, times model stock's factor of each row of what agrees."""
    chosen = elected(deltas, vote_sgn)
    agreeing = tuple(torch.where(yes, delta, 0) for yes, delta in zip(chosen, deltas, strict=True))
    return mean_of(deltas, chosen) * row_share(agreeing, cos_eps)


@merge_method(elementwise=True, register=False)
def agreeing_entries(*deltas: Delta, vote_sgn: VoteBySize, index: Parameter(int)) -> Return(Tensor, "delta"):
    """The entries of the delta `index` whose sign is the elected one; the others become 0."""
    return torch.where(elected(deltas, vote_sgn)[index], deltas[index], 0)


ApplyStock = Parameter(bool, help="scale each row by model stock's factor of what agrees")
ApplyMedian = Parameter(bool, help="take the geometric median of what agrees, not the mean")


@merge_method(composite=True, empty=0.0)
def ties_sum_extended(
    *deltas: Delta,
    k: Kept = 0.2,
    vote_sgn: VoteBySize = False,
    apply_stock: ApplyStock = False,
    apply_median: ApplyMedian = False,
    cos_eps: RowNorm = 0.0,
    eps: Nearest = 0.0,
    maxiter: Iterations = 100,
    ftol: Progress = 1e-20,
) -> Return(Tensor, "delta"):
    """As `ties_sum`, but model stock or the geometric median of what agrees (`apply_stock`, `apply_median`).

    sd-mecha 1.1.8 has `apply_stock` the wrong way round; here true applies it. The median goes first.
    Agrees: sd-mecha (cos_eps=eps=1e-6), whose apply_stock is the wrong way round.
    Differs: no paper joins the two; the parts differ as `ties_sum` and `model_stock` do.
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
    cos_eps: RowNorm = 0.0,
    apply_median: ApplyMedian = False,
    eps: Nearest = 0.0,
    maxiter: Iterations = 100,
    ftol: Progress = 1e-20,
) -> Return(Tensor, "weight"):
    """base + alpha ties_sum_extended(model_i - base).

    Agrees: sd-mecha (cos_eps=eps=1e-6), whose apply_stock is the wrong way round.
    Differs: as `ties_sum_extended`.
    Source: TIES-Merging, arXiv:2306.01708; Model Stock, arXiv:2403.19522; sd-mecha.
    """
    settings = {"k": k, "vote_sgn": vote_sgn, "apply_stock": apply_stock, "apply_median": apply_median}
    limits = {"cos_eps": cos_eps, "eps": eps, "maxiter": maxiter, "ftol": ftol}
    return add_merged(base, models, alpha, lambda deltas: ties_sum_extended(*deltas, **settings, **limits))


def _votes(weighted: list[Tensor], elect: str) -> Tensor:
    return sum(weighted) if elect == "mass" else sum(w.sign() for w in weighted)


@reduction(sums=True, register=False)
def surplus_of_signs(*deltas: Delta, weights: Weights, elect: Parameter(str)) -> Return(Tensor, "param"):
    """How many more entries vote for plus than for minus."""
    weighted = [delta * weight for delta, weight in zip(deltas, weights, strict=True)]
    return _votes(weighted, elect).sign().double()


model_surplus_of_signs = whole_model(surplus_of_signs)


@merge_method(elementwise=True, register=False)
def agreeing_total(
    *deltas: Delta,
    weights: Weights,
    normalize: Parameter(bool) = False,
    elect: Parameter(str) = "mass",
    zero_sum: Parameter(str) = "plus",
    majority: Small = 0.0,
) -> Return(Tensor, "delta"):
    """The sum of the weighted entries whose sign is that of the sum of them all, or of their signs (count).

    A zero sum elects no sign (none), counts as positive (plus), or elects plus where `majority` is above 0
    and else minus (majority). `normalize` divides by the sum of the weights of those that agree.
    """
    weighted = [delta * weight for delta, weight in zip(deltas, weights, strict=True)]
    votes = _votes(weighted, elect)
    if zero_sum == "majority":
        votes = torch.where(votes == 0, torch.where(majority > 0, 1.0, -1.0), votes)
    if zero_sum == "plus":
        positive = votes >= 0
        agree = [((w > 0) == positive) & (w != 0) for w in weighted]
    else:
        agree = [(w.sign() == votes.sign()) & (w != 0) for w in weighted]
    total = sum(torch.where(yes, w, 0) for yes, w in zip(agree, weighted, strict=True))
    if not normalize:
        return total
    share = sum(yes.to(total.dtype) * weight for yes, weight in zip(agree, weights, strict=True))
    return torch.where(share == 0, total, total / share)


def merged_deltas(
    deltas: list[Node], weights: float | list[float], consensus: bool, normalize: bool = False, **vote: str
) -> Node:
    """The weighted sum of deltas, or of what agrees in sign; divided by the weights if it is to be a mean.

    `vote` holds `elect` and `zero_sum` of `agreeing_total`.
    """
    each = spread(weights, len(deltas))
    if consensus:
        if vote.get("zero_sum") == "majority":
            surplus = model_surplus_of_signs(*deltas, weights=each, elect=vote["elect"])
            return agreeing_total(*deltas, weights=each, normalize=normalize, majority=surplus, **vote)
        return agreeing_total(*deltas, weights=each, normalize=normalize, **vote)
    divisor = sum(each) if normalize and abs(sum(each)) > 1e-8 * max(map(abs, each)) else 1.0
    return weighted_total(*deltas, weights=[weight / divisor for weight in each])


@merge_method(elementwise=True, register=False)
def trim_with_ties(delta: Delta, threshold: Small) -> Return(Tensor, "delta"):
    """The entries of a magnitude above `threshold`, or all where it is infinite; the others become 0."""
    return torch.where((delta.abs() > threshold) | (threshold == torch.inf), delta, 0)


def keep_largest(
    deltas: list[Node],
    density: float | list[float],
    variant: str,
    ties_kept: bool = True,
    trimmed: str = "tensor",
) -> list[Node]:
    """Keep the density n largest entries of each delta, with all or none of those that tie with the last.

    The n entries are those of a tensor, or of all keys of the model (trimmed global).
    """
    threshold, kept = (least_kept, trim) if ties_kept else (largest_dropped, trim_with_ties)
    if trimmed == "global":
        threshold = model_least_kept if ties_kept else model_largest_dropped
    return [
        kept(delta, threshold(delta, density=share, variant=variant)) if share < 1 else delta
        for delta, share in zip(deltas, spread(density, len(deltas)), strict=True)
    ]


@dataclass(frozen=True)
class Switches:
    """What papers and projects do differently under the name of TIES.

    Attributes:
        elect: the sign of the sum of the values (mass), or of the sum of their signs (count).
        combine: the mean of what agrees, or its sum.
        zero_sum: whether a zero sum elects no sign (none), counts as positive (plus), or elects the sign that
            most entries of the model have (majority).
        trim: whether each tensor is trimmed, or the whole model at once (global).
        ties_kept: whether all entries that tie with the last one kept are kept, or none of them.
    """

    elect: str = "mass"
    combine: str = "mean"
    zero_sum: str = "none"
    trim: str = "tensor"
    ties_kept: bool = True

    def but(self, **given: str | bool | None) -> "Switches":
        """The switches with those that are given in place of the variant's."""
        return replace(self, **{name: value for name, value in given.items() if value is not None})

    def merge(self, deltas: list[Node], weights: float | list[float]) -> Node:
        """Elect a sign for each entry, and combine what agrees with it."""
        vote = {"elect": self.elect, "zero_sum": self.zero_sum}
        return merged_deltas(deltas, weights, consensus=True, normalize=self.combine == "mean", **vote)


TIES = {
    "paper": Switches(),
    "official": Switches(zero_sum="majority", trim="global"),
    "mergekit": Switches(zero_sum="plus"),
    "sd-mecha": Switches(elect="count"),
}
"""What each variant of `ties` sets."""

Trim = Parameter(
    str | None,
    choices=("tensor", "global"),
    help="trim each tensor, or the whole model at once, as the paper does",
)
Elect = Parameter(
    str | None,
    choices=("mass", "count"),
    help="the sign of the sum of the values, or of their signs",
)
Combine = Parameter(str | None, choices=("mean", "sum"), help="the mean of what agrees in sign, or its sum")
TiesKept = Parameter(
    bool | None, help="keep all entries that tie with the last one that is kept, or none of them"
)


@merge_method(composite=True)
def ties(
    base: Base,
    *models: Experts,
    weights: Weights = 1.0,
    density: KeptShares = 1.0,
    scale: Scale = 1.0,
    variant: Parameter(str, choices=tuple(TIES), help="whose TIES: it sets what is not given") = "mergekit",
    trim: Trim = None,
    elect: Elect = None,
    combine: Combine = None,
    ties_kept: TiesKept = None,
) -> Return(Tensor, "weight"):
    """base + scale sum_i w_i d_i / sum_i w_i over the models that agree with the elected sign of the entry.

    d_i is model_i - base, trimmed to its floor(density n) largest entries: at least one, and none for
    density 0. The n entries are those of a tensor, or of the whole model (trim=global), whose threshold is
    found in one more trip over the data. The sign is that of sum_i w_i d_i.
    Variants: paper: elect=mass, combine=mean, trim=tensor, ties_kept=true; a zero sum elects no sign.
    official: as paper, but trim=global, one entry more is kept, and a zero sum elects the sign that most
    entries of the model have, which takes another trip. mergekit: as paper, but a zero sum counts as
    positive, and density n is computed in floats. sd-mecha: elect=count, and one entry more is kept.
    Agrees: the official code (variant=official), mergekit (variant=mergekit), sd-mecha's add_difference_ties
    (variant=sd-mecha).
    Differs: the paper trims over the whole model: trim=global with variant=paper. mergekit keeps some of the
    entries that tie.
    Source: TIES-Merging, Yadav et al. 2023, arXiv:2306.01708; weighted as in mergekit.
    """
    switches = TIES[variant].but(elect=elect, combine=combine, trim=trim, ties_kept=ties_kept)

    def merge(deltas: list[Node]) -> Node:
        kept = keep_largest(deltas, density, variant, switches.ties_kept, switches.trim)
        return switches.merge(kept, weights)

    return add_merged(base, models, scale, merge)
