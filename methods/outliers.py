"""Which entries of the deltas count: those of middling size, of much variance, of one model alone."""

import torch
from torch import Tensor

from mecha_exp import Node, Parameter, Return, Tile, merge_method, reduction, whole_model
from mecha_exp.extensions.merge_methods import MergeMethod, is_constant, spread
from mecha_exp.methods.linear import add_merged, add_scaled, deltas_to
from mecha_exp.methods.parameters import Base, Delta, Densities, Experts, Model, Scale, Small, Weight, Weights
from mecha_exp.methods.reductions import least_chosen, mean, quantile, squared_norm, whole_share
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


@merge_method(rowwise=True, register=False)
def crumbs_of_rows(delta: Delta, tile: Tile, density: Parameter(float), gamma: Parameter(float)) -> Return(
    Tensor, "delta"
):
    """The density n entries of each row after its gamma n largest; all of a tensor without axes."""
    if not tile.shape:
        return delta.clone()
    count = delta.shape[-1]
    largest = count - whole_share(gamma, count)
    least = largest - min(whole_share(density, count), largest)
    if least == largest:
        return torch.zeros_like(delta)
    sizes = delta.abs()
    ordered = sizes.sort(-1).values
    chosen = (sizes >= ordered[:, least : least + 1]) & (sizes <= ordered[:, largest - 1 : largest])
    return torch.where(chosen, delta, 0)


def _breadcrumbs(
    deltas: list[Node],
    weights: float | list[float],
    density: float | list[float],
    gamma: float | list[float],
    variant: str,
    consensus: bool,
) -> Node:
    crumbs = crumbs_of_rows if variant == "paper" else _crumbs
    each = zip(deltas, spread(density, len(deltas)), spread(gamma, len(deltas)), strict=True)
    kept = [crumbs(delta, density=share, gamma=dropped) for delta, share, dropped in each]
    return merged_deltas(kept, weights, consensus)


Gamma = Parameter(
    list[float], ge=0, lt=1, help="fraction of the largest entries that is dropped: one for all, or a list"
)


Slices = Parameter(
    str, choices=("paper", "mergekit"), help="count in slices of the last axis, or in the whole tensor"
)


@merge_method(composite=True)
def breadcrumbs(
    base: Base,
    *models: Experts,
    weights: Weights = 1.0,
    density: Densities = 0.9,
    gamma: Gamma = 0.01,
    scale: Scale = 1.0,
    variant: Slices = "mergekit",
) -> Return(Tensor, "weight"):
    """base + scale sum_i w_i d_i, d_i without its gamma n largest entries and all but the next density n.

    Counts are rounded down, so where there are fewer than 1 / gamma entries none of the largest is dropped,
    and where there are fewer than 1 / density none is kept. Entries that tie with a kept one are kept.
    Variants: paper: n entries are a slice along the last axis; a tensor without axes stays whole. mergekit:
    n entries are the tensor; density 1 keeps all, and density + gamma above 1 drops fewer of the largest.
    Agrees: the official code (variant=paper), mergekit (variant=mergekit).
    Differs: the paper's beta, 0.85 or so, is what is dropped of the smallest: density = 1 - beta.
    Source: Model Breadcrumbs, Davari & Belilovsky 2023, arXiv:2312.06795.
    """
    settings = {"density": density, "gamma": gamma, "variant": variant, "consensus": False}
    return add_merged(base, models, scale, lambda deltas: _breadcrumbs(deltas, weights, **settings))


@merge_method(composite=True)
def breadcrumbs_ties(
    base: Base,
    *models: Experts,
    weights: Weights = 1.0,
    density: Densities = 0.9,
    gamma: Gamma = 0.01,
    scale: Scale = 1.0,
    variant: Slices = "mergekit",
) -> Return(Tensor, "weight"):
    """As `breadcrumbs`, but of each entry only the models that agree with the sign of the sum are added.

    Variants: as `breadcrumbs`.
    Agrees: mergekit (variant=mergekit).
    Differs: the paper has no election of signs; mergekit joined the two.
    Source: mergekit, of Model Breadcrumbs, arXiv:2312.06795, and TIES-Merging, arXiv:2306.01708.
    """
    settings = {"density": density, "gamma": gamma, "variant": variant, "consensus": True}
    return add_merged(base, models, scale, lambda deltas: _breadcrumbs(deltas, weights, **settings))


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


@merge_method(elementwise=True, register=False)
def square(delta: Delta) -> Return(Tensor, "param"):
    """The squares of the entries."""
    return delta.square()


@merge_method(elementwise=True, register=False)
def shares_of_means(*means: Small, least: Parameter(float)) -> Return(Tensor, "param"):
    """Means over their sum; equal shares where they sum to less than `least`."""
    each = torch.stack(means)
    return torch.where(each.sum() < least, 1 / len(means), each / each.sum())


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
    equal_below: Parameter(
        float, ge=0, help="the w_i are equal where the means of d_i^2 sum to less; mergekit has 1e-6"
    ) = 0.0,
) -> Return(Tensor, "weight"):
    """base + scale sum_i w_i d_i / sum_i w_i over the models that agree with the sign of sum_i d_i.

    Select the entries of largest variance across the deltas, calculate w_i proportional to the mean of d_i^2,
    erase the minority sign.
    Agrees: mergekit (equal_below=1e-6: in fine-tuning the means of d_i^2 often sum to less, and its w_i are
    equal then; here that holds for 0 alone unless told otherwise).
    Differs: the official code selects entries for the weights w_i only.
    Source: SCE of FuseChat, Wan et al. 2024, arXiv:2408.07990.
    """

    def merge(deltas: list[Node]) -> Node:
        if select_topk < 1:
            spreading = variance(*deltas)
            least = least_chosen(spreading, density=select_topk)
            deltas = [where_at_least(delta, spreading, least) for delta in deltas]
        if equal_below:
            sizes = shares_of_means(*(mean(square(delta)) for delta in deltas), least=equal_below)
        else:
            sizes = shares(*(squared_norm(delta) for delta in deltas))
        return agreeing_mean(*deltas, sizes=sizes)

    return add_merged(base, models, scale, merge)


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


model_entries_shared = whole_model(entries_shared)


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


@merge_method(composite=True, title="RAM")
def ram(base: Base, *models: Experts, epsilon: Changed = 1e-5, scale: Scale = 1.0) -> Return(
    Tensor, "weight"
):
    """base + scale d: an entry that one model changes is kept, one that several change is their mean.

    Agrees: the official code, mergekit.
    Source: Reinforced Agent Merging, 2026, arXiv:2601.13572.
    """
    return add_merged(base, models, scale, lambda deltas: kept_or_averaged(*deltas, epsilon=epsilon))


def _reinforced(
    base: Node,
    models: tuple[Node, ...],
    scale: Node,
    counting: MergeMethod,
    epsilon: float,
    r: float,
    alpha: float,
) -> Node:
    """The base with what is shared averaged and what is a model's own strengthened, by what is counted."""

    def merge(deltas: list[Node]) -> Node:
        factors = reinforcement(counting(*deltas, epsilon=epsilon), epsilon=epsilon, r=r, alpha=alpha)
        return shared_or_alone(*deltas, factors=factors, epsilon=epsilon)

    return add_merged(base, models, scale, merge)


Reinforced = Parameter(float, ge=0, help="how much what a model alone changes is strengthened")
RatioLimit = Parameter(float, ge=0, help="limit of the ratio of shared to lone changes that counts")


@merge_method(composite=True)
def ramplus(
    base: Base,
    *models: Experts,
    epsilon: Changed = 1e-5,
    r: Reinforced = 0.1,
    alpha: RatioLimit = 0.2,
    scale: Scale = 1.0,
) -> Return(Tensor, "weight"):
    """As `ram`, what a model alone changes times 1 + r min(rho, alpha), rho = shared over lone changes.

    rho is counted for each model over all its keys, in one more trip over the data.
    Agrees: the paper's formula.
    Source: RAM+ of Reinforced Agent Merging, 2026, arXiv:2601.13572.
    """
    return _reinforced(base, models, scale, model_entries_shared, epsilon, r, alpha)


@merge_method(composite=True)
def ramplus_tl(
    base: Base,
    *models: Experts,
    epsilon: Changed = 1e-5,
    r: Reinforced = 0.1,
    alpha: RatioLimit = 0.2,
    scale: Scale = 1.0,
) -> Return(Tensor, "weight"):
    """As `ram`, what a model alone changes times 1 + r min(rho, alpha), rho = shared over lone changes.

    rho is counted for each model and tensor, which is what tl (tensor-local) stands for.
    Agrees: mergekit.
    Differs: RAM+ of the paper counts rho over the whole model: `ramplus`.
    Source: mergekit, of Reinforced Agent Merging, 2026, arXiv:2601.13572.
    """
    return _reinforced(base, models, scale, entries_shared, epsilon, r, alpha)


@merge_method(elementwise=True, base="a")
def nearswap(
    a: Model, b: Model, t: Parameter(float, ge=0, help="entries nearer than t are taken from b") = 1e-4
) -> Return(Tensor):
    """lerp(a, b, w), w = min(t / |a - b|, 1): b where it is near a, ever less where it is far.

    Agrees: mergekit, for t of 1e-6 and more: it takes smaller |a - b| for that.
    Source: alchemonaut's QuartetAnemoi; mergekit.
    """
    apart = (a - b).abs()
    w = torch.where(apart > t, t / apart, 1)
    return w * b + (1 - w) * a


LONG_ROW = 64
"""Entries of a row from which on sums along it are as fast as sums of its columns."""


@merge_method(rowwise=True, register=False)
def importance(base: Weight, b: Weight) -> Return(Tensor, "param"):
    """|b - base| times the divergence KL(softmax(b), softmax(base)) of its row."""
    if base.shape[-1] < LONG_ROW:  # the entries of a row on axis 0
        return (b - base).abs_() * divergence(torch.stack(base.unbind(-1)), torch.stack(b.unbind(-1)), 0)
    return (b - base).abs_() * divergence(base, b, -1)


def divergence(base: Tensor, b: Tensor, axis: int) -> Tensor:
    """KL(softmax(b), softmax(base)) along an axis, which is last in the result with a size of 1.

    With q = softmax(base), c = b - base - sum q (b - base) and Z = sum q exp(c) it is sum q exp(c) c / Z -
    log Z. Near the base that is of second order in c, where the logarithms of quotients cancel each other
    out: in float32 they leave rounding errors of changes below 1e-3. Where exp may overflow they serve.
    """
    dtype, base, b = b.dtype, base.double(), b.double()
    q, change = base.softmax(axis), b - base
    change -= (q * change).sum(axis, keepdim=True)
    ratio, is_near = change.expm1(), (change.abs() < 1).all(axis)
    grown = (q * ratio).sum(axis)
    made = ((q * change).mul_(ratio + 1)).sum(axis) / (grown + 1) - grown.log1p()
    if not bool(is_near.all()):
        far = (b.softmax(axis) * (b.log_softmax(axis) - base.log_softmax(axis))).sum(axis)
        made = torch.where(is_near, made, far)
    return made.clamp_min_(0).unsqueeze(-1).to(dtype)


@merge_method(elementwise=True, register=False)
def far_out(lower: Small, middle: Small, upper: Small) -> Return(Tensor, "param"):
    """The median and 1.5 interquartile ranges."""
    return middle + 1.5 * (upper - lower)


@merge_method(composite=True, title="Arcee Fusion")
def arcee_fusion(base: Base, b: Weight, scale: Scale = 1.0) -> Return(Tensor, "weight"):
    """base + scale (b - base) where |b - base| KL(softmax(b), softmax(base)) >= median + 1.5 IQR.

    The divergence is that of the row (a slice along the last axis), by a form that is exact near the base.
    The quartiles are exact, by order statistics.
    Agrees: mergekit, for large changes of small tensors.
    Differs: mergekit adds 1e-8 to the softmax and sums p log(p / q), which in float32 is rounding errors for
    changes below 1e-3 of the weights; it estimates the quartiles of large tensors from a sample.
    Source: Arcee Fusion; mergekit.
    """
    if is_constant(scale, 0):
        return base
    (delta,) = deltas_to(base, (b,))
    score = importance(base, b)
    limit = far_out(*(quantile(score, part=part) for part in (0.25, 0.5, 0.75)))
    return add_scaled(base, where_at_least(delta, score, limit), scale)
