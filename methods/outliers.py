"""Which entries of the deltas count: those of middling size, of much variance, of one model alone."""

import torch
from torch import Tensor

from mecha_exp import Node, Parameter, Return, merge_method, reduction
from mecha_exp.extensions.merge_methods import is_constant, spread
from mecha_exp.methods.linear import add_scaled, deltas_to
from mecha_exp.methods.parameters import Base, Delta, Densities, Experts, Model, Scale, Small, Weight, Weights
from mecha_exp.methods.reductions import least_chosen, quantile, squared_norm
from mecha_exp.methods.ties import merged_deltas


def _smallest_crumb(count: int, density: float, gamma: float) -> int:
    kept = int(density * count)
    return max(0, count - kept - int(gamma * count)) + 1 if kept else count + 1


def _largest_crumb(count: int, density: float, gamma: float) -> int:
    return _smallest_crumb(count, density, gamma) + int(density * count) - 1


@reduction(rank=_smallest_crumb, register=False)
def least_crumb(a: Model, density: Parameter(float), gamma: Parameter(float)) -> Return(Tensor, "param"):
    """The smallest magnitude that is left when the gamma n largest are dropped and density n kept."""
    return a.abs()


@reduction(rank=_largest_crumb, register=False)
def largest_crumb(a: Model, density: Parameter(float), gamma: Parameter(float)) -> Return(Tensor, "param"):
    """The largest magnitude that is left."""
    return a.abs()


@merge_method(elementwise=True, register=False)
def between(delta: Delta, least: Small, largest: Small) -> Return(Tensor, "delta"):
    """The entries of a magnitude from `least` to `largest`; the others become 0."""
    size = delta.abs()
    return torch.where((size >= least) & (size <= largest), delta, 0)


def _crumbs(delta: Node, density: float, gamma: float) -> Node:
    if density == 1:
        return delta
    limits = {"density": density, "gamma": gamma}
    return between(delta, least_crumb(delta, **limits), largest_crumb(delta, **limits))


def _breadcrumbs(
    base: Node,
    models: tuple[Node, ...],
    weights: float | list[float],
    density: float | list[float],
    gamma: float,
    scale: Node,
    consensus: bool,
) -> Node:
    if is_constant(scale, 0):
        return base
    deltas = deltas_to(base, models)
    each = zip(deltas, spread(density, len(deltas)), strict=True)
    kept = [_crumbs(delta, share, gamma) for delta, share in each]
    return add_scaled(base, merged_deltas(kept, weights, consensus), scale)


Gamma = Parameter(float, ge=0, lt=1, help="fraction of the largest entries that is dropped")


@merge_method(composite=True)
def breadcrumbs(
    base: Base,
    *models: Experts,
    weights: Weights = 1.0,
    density: Densities = 0.9,
    gamma: Gamma = 0.01,
    scale: Scale = 1.0,
) -> Return(Tensor, "weight"):
    """base + scale sum_i w_i d_i, d_i without its gamma n largest and its smallest entries.

    Of n entries density n are left. Counts are rounded down, so a tensor of fewer than 1 / gamma entries
    loses none of the largest, and one of fewer than 1 / density keeps none. density 1 keeps all. Entries that
    tie with a kept one are kept.
    Source: Model Breadcrumbs, Davari & Belilovsky 2023, arXiv:2312.06795; counted as in mergekit.
    """
    return _breadcrumbs(base, models, weights, density, gamma, scale, consensus=False)


@merge_method(composite=True)
def breadcrumbs_ties(
    base: Base,
    *models: Experts,
    weights: Weights = 1.0,
    density: Densities = 0.9,
    gamma: Gamma = 0.01,
    scale: Scale = 1.0,
) -> Return(Tensor, "weight"):
    """As `breadcrumbs`, but of each entry only the models that agree with the sign of the sum are added.

    Source: Model Breadcrumbs, arXiv:2312.06795, with the sign election of TIES as in mergekit.
    """
    return _breadcrumbs(base, models, weights, density, gamma, scale, consensus=True)


@merge_method(elementwise=True, register=False)
def variance(*deltas: Delta) -> Return(Tensor, "param"):
    """The variance across the deltas, entry by entry, their number being the divisor."""
    mean = sum(deltas) / len(deltas)
    return sum((delta - mean).square() for delta in deltas) / len(deltas)


@merge_method(elementwise=True, register=False)
def where_at_least(delta: Delta, measure: Small, threshold: Small) -> Return(Tensor, "delta"):
    """The entries at which `measure` reaches the threshold; the others become 0."""
    return torch.where(measure >= threshold, delta, 0)


@merge_method(elementwise=True, register=False)
def agreeing_mean(*deltas: Delta, sizes: Parameter(Tensor, "param")) -> Return(Tensor, "delta"):
    """The mean of the entries whose sign is that of the sum of all, weighted by `sizes`."""
    positive = sum(deltas) >= 0
    agree = [((delta > 0) == positive) & (delta != 0) for delta in deltas]
    chosen = [torch.where(yes, delta, 0) for yes, delta in zip(agree, deltas, strict=True)]
    total = sum(delta * sizes[i] for i, delta in enumerate(chosen))
    share = sum(yes.to(total.dtype) * sizes[i] for i, yes in enumerate(agree))
    return torch.where(share > 0, total / share, 0)


@merge_method(elementwise=True, register=False)
def shares(*sizes: Small) -> Return(Tensor, "param"):
    """Sizes over their sum; equal shares where all are zero."""
    each = torch.stack(sizes)
    return each / each.sum() if each.sum() > 0 else torch.full_like(each, 1 / len(sizes))


@merge_method(composite=True)
def sce(
    base: Base,
    *models: Experts,
    select_topk: Parameter(
        float,
        ge=0,
        le=1,
        help="fraction of the entries that differ between the models, by variance, that is kept",
    ) = 1.0,
    scale: Scale = 1.0,
) -> Return(Tensor, "weight"):
    """base + scale sum_i w_i d_i / sum_i w_i over the models that agree with the sign of sum_i d_i.

    Select the entries of largest variance across the deltas, calculate w_i proportional to the mean of d_i^2,
    erase the minority sign. mergekit takes equal w_i where the means sum to less than 1e-6, which fine-tuning
    often is; here that holds for 0 alone.
    Source: SCE of FuseChat, Wan et al. 2024, arXiv:2408.07990; as in mergekit.
    """
    if is_constant(scale, 0):
        return base
    deltas = deltas_to(base, models)
    if select_topk < 1:
        spreading = variance(*deltas)
        least = least_chosen(spreading, density=select_topk)
        deltas = [where_at_least(delta, spreading, least) for delta in deltas]
    sizes = shares(*(squared_norm(delta) for delta in deltas))
    return add_scaled(base, agreeing_mean(*deltas, sizes=sizes), scale)


def _changed(deltas: tuple[Tensor, ...], epsilon: float) -> tuple[list[Tensor], Tensor]:
    """Which entries each delta changes, and how many deltas change each."""
    changed = [delta.abs() > epsilon for delta in deltas]
    return changed, sum(yes.to(deltas[0].dtype) for yes in changed)


@reduction(sums=True, register=False)
def entries_shared(*deltas: Delta, epsilon: Parameter(float)) -> Return(Tensor, "param"):
    """Counts for each delta: its entries that others change too, then those that it alone changes."""
    changed, count = _changed(deltas, epsilon)
    shared = [(yes & (count > 1)).double() for yes in changed]
    alone = [(yes & (count == 1)).double() for yes in changed]
    return tuple(shared + alone)


@merge_method(elementwise=True, register=False)
def shared_or_alone(*deltas: Delta, factors: Parameter(Tensor, "param"), epsilon: Parameter(float)) -> Return(
    Tensor, "delta"
):
    """Entries that one delta alone changes, times its factor; the mean where several change one."""
    changed, count = _changed(deltas, epsilon)
    total = sum(
        torch.where(yes, delta * torch.where(count > 1, 1, factors[i]), 0)
        for i, (yes, delta) in enumerate(zip(changed, deltas, strict=True))
    )
    return torch.where(count > 1, total / count, total)


@merge_method(elementwise=True, register=False)
def reinforcement(
    counts: Small, epsilon: Parameter(float), r: Parameter(float), alpha: Parameter(float)
) -> Return(Tensor, "param"):
    """1 + r min(shared / alone, alpha) of each delta."""
    shared, alone = counts.reshape(2, -1)
    return 1 + r * (shared / alone.clamp_min(epsilon)).clamp(0, alpha)


Changed = Parameter(float, gt=0, help="a larger change counts as one")


@merge_method(elementwise=True, register=False)
def kept_or_averaged(*deltas: Delta, epsilon: Parameter(float)) -> Return(Tensor, "delta"):
    """The mean of the deltas that change an entry."""
    changed, count = _changed(deltas, epsilon)
    total = sum(torch.where(yes, delta, 0) for yes, delta in zip(changed, deltas, strict=True))
    return torch.where(count > 1, total / count, total)


@merge_method(composite=True)
def ram(base: Base, *models: Experts, epsilon: Changed = 1e-5, scale: Scale = 1.0) -> Return(
    Tensor, "weight"
):
    """base + scale d: an entry that one model changes is kept, one that several change is their mean.

    Source: Reinforced Agent Merging, 2026, arXiv:2601.13572; mergekit.
    """
    if is_constant(scale, 0):
        return base
    return add_scaled(base, kept_or_averaged(*deltas_to(base, models), epsilon=epsilon), scale)


@merge_method(composite=True)
def ramplus_tl(
    base: Base,
    *models: Experts,
    epsilon: Changed = 1e-5,
    r: Parameter(float, ge=0, help="how much what a model alone changes is strengthened") = 0.1,
    alpha: Parameter(float, ge=0, help="limit of the ratio of shared to lone changes that counts") = 0.2,
    scale: Scale = 1.0,
) -> Return(Tensor, "weight"):
    """As `ram`, what a model alone changes times 1 + r min(rho, alpha), rho = shared over lone changes.

    rho is counted for each model and tensor.
    Source: Reinforced Agent Merging, 2026, arXiv:2601.13572; mergekit.
    """
    if is_constant(scale, 0):
        return base
    deltas = deltas_to(base, models)
    counts = entries_shared(*deltas, epsilon=epsilon)
    factors = reinforcement(counts, epsilon=epsilon, r=r, alpha=alpha)
    return add_scaled(base, shared_or_alone(*deltas, factors=factors, epsilon=epsilon), scale)


@merge_method(elementwise=True)
def nearswap(
    a: Model, b: Model, t: Parameter(float, ge=0, help="entries nearer than t are taken from b") = 1e-4
) -> Return(Tensor):
    """lerp(a, b, w), w = min(t / max(|a - b|, 1e-6), 1): b where it is near a, ever less where it is far.

    Source: alchemonaut's QuartetAnemoi; mergekit.
    """
    w = (t / (a - b).abs().clamp_min(1e-6)).clamp(0, 1)
    return w * b + (1 - w) * a


@merge_method(rowwise=True, register=False)
def importance(base: Weight, b: Weight) -> Return(Tensor, "param"):
    """|b - base| times the divergence KL(softmax(b), softmax(base)) of its row."""
    p, q = b.softmax(-1) + 1e-8, base.softmax(-1) + 1e-8
    return (b - base).abs() * (p * (p / q).log()).sum(-1, keepdim=True).clamp_min(0)


@merge_method(elementwise=True, register=False)
def far_out(lower: Small, middle: Small, upper: Small) -> Return(Tensor, "param"):
    """The median and 1.5 interquartile ranges."""
    return middle + 1.5 * (upper - lower)


@merge_method(composite=True)
def arcee_fusion(base: Base, b: Weight, scale: Scale = 1.0) -> Return(Tensor, "weight"):
    """base + scale (b - base) where |b - base| KL(softmax(b), softmax(base)) >= median + 1.5 IQR.

    The divergence is that of the row (a slice along the last axis). The quartiles are exact, by order
    statistics; mergekit estimates those of large tensors from a sample.
    Source: Arcee Fusion; mergekit.
    """
    if is_constant(scale, 0):
        return base
    (delta,) = deltas_to(base, (b,))
    score = importance(base, b)
    limit = far_out(*(quantile(score, part=part) for part in (0.25, 0.5, 0.75)))
    return add_scaled(base, where_at_least(delta, score, limit), scale)
