"""Random sparsification of deltas. Masks are a function of (seed, key, model) alone."""

import math
from itertools import accumulate

import torch
from torch import Tensor

from mecha_exp import Node, Parameter, Return, factor, merge_method, uniform
from mecha_exp.extensions.merge_methods import is_constant, ranks
from mecha_exp.methods.centres import Iterations, Nearest, Progress
from mecha_exp.methods.dare import dropped_entries
from mecha_exp.methods.linear import add_merged, add_scaled, deltas_to
from mecha_exp.methods.linear import scale as scaled
from mecha_exp.methods.parameters import (
    Alpha,
    Base,
    Delta,
    Dropped,
    Experts,
    Kept,
    RowNorm,
    Seed,
    Small,
    VoteBySize,
)
from mecha_exp.methods.ties import (
    ApplyMedian,
    ApplyStock,
    ties_sum_extended,
)


@factor(elements=math.prod)
def rank_in_tensor(delta: Delta) -> Return(Tensor, "param"):
    """The place of each magnitude in the whole tensor, from 1 for the smallest."""
    return ranks(delta.abs().flatten()) + 1


@merge_method(elementwise=True, register=False)
def below(draw: Small, limit: Parameter(float)) -> Return(Tensor, "param"):
    """1 where the draw is below the limit, 0 elsewhere."""
    return (draw < limit).to(draw.dtype)


@merge_method(elementwise=True, register=False)
def in_subset(draw: Small, ends: Parameter(list[float]), index: Parameter(int)) -> Return(Tensor, "param"):
    """1 where the subset that the draw falls on has the member `index`; subset s ends at `ends[s]`."""
    inside = torch.zeros_like(draw)
    for subset in range(1, len(ends)):
        if subset >> index & 1:
            inside = inside + ((draw >= ends[subset - 1]) & (draw < ends[subset])).to(draw.dtype)
    return inside


@merge_method(elementwise=True, register=False)
def mean_where(*deltas_then_masks: Parameter(Tensor, ("delta", "param"))) -> Return(Tensor, "delta"):
    """The mean of the deltas at whose entries the mask is 1."""
    half = len(deltas_then_masks) // 2
    deltas, masks = deltas_then_masks[:half], deltas_then_masks[half:]
    total = sum(delta * mask for delta, mask in zip(deltas, masks, strict=True))
    return total / sum(masks).clamp_min(1)


def subset_chances(count: int, probability: float, overlap: float, emphasis: float) -> list[float]:
    """The chance of each subset of `count` models to be what is kept of an entry; bit i is model i.

    Nothing is kept with `probability`. Otherwise overlap 0 keeps exactly one model; between 0 and 1 subsets
    grow, their log-chance being tan(pi (overlap - 1/2)) times their size. Beyond 1 it goes back again, with
    period 2. `emphasis` blends in the chances of independent masks.
    """
    nearness = overlap % 2 if overlap % 2 <= 1 else 2 - overlap % 2
    sizes = [bin(subset).count("1") for subset in range(1, 1 << count)]
    if nearness == 0:
        chances = [float(size == 1) for size in sizes]
    else:
        slope = math.tan(math.pi * (nearness - 0.5))
        steepest = max(slope * size for size in sizes)
        chances = [math.exp(slope * size - steepest) for size in sizes]
    alone = [(1 - probability) ** size * probability ** (count - size) for size in sizes]
    part = emphasis * (1 - abs(2 * nearness - 1))
    blended = [
        (1 - part) * chance / sum(chances) + part * single / (sum(alone) or 1)
        for chance, single in zip(chances, alone, strict=True)
    ]
    return [probability, *((1 - probability) * chance for chance in blended)]


Power = Parameter(float, help="power of (1 - probability) that the kept are divided by")
Overlap = Parameter(
    float, help="1: independent masks, 0: of each entry one model at most, between: more or less alike"
)
Emphasis = Parameter(float, ge=0, le=1, help="between whole overlaps: how far towards independent masks")


@merge_method(composite=True)
def dropout_deltas(
    *deltas: Delta,
    probability: Dropped = 0.9,
    rescale: Power = 1.0,
    overlap: Overlap = 1.0,
    overlap_emphasis: Emphasis = 0.0,
    seed: Seed = 0,
) -> Return(Tensor, "delta"):
    """m / (1 - probability)^rescale, m the mean of the deltas that are kept, by entry; see `dropout`.

    In texts of sd-mecha it is `dropout` with deltas for arguments.
    Agrees: sd-mecha, but for its random numbers.
    Source: DARE, Yu et al. 2023, arXiv:2311.03099; overlapping masks of sd-mecha.
    """
    if probability == 1:
        return scaled(deltas[0], alpha=0.0)
    draws = [uniform(delta, seed=seed, stream=i) for i, delta in enumerate(deltas)]
    if overlap % 2 == 1:
        masks = [below(draw, limit=1 - probability) for draw in draws]
    else:
        ends = list(accumulate(subset_chances(len(deltas), probability, overlap, overlap_emphasis)))
        masks = [in_subset(draws[0], ends=[*ends[:-1], 1.0], index=i) for i in range(len(deltas))]
    strength = 1 / (1 - probability) ** rescale
    return scaled(mean_where(*deltas, *masks), alpha=strength)


@merge_method(composite=True, base="a")
def dropout(
    a: Base,
    *models: Experts,
    probability: Dropped = 0.9,
    alpha: Alpha = 0.5,
    rescale: Power = 1.0,
    overlap: Overlap = 1.0,
    overlap_emphasis: Emphasis = 0.0,
    seed: Seed = 0,
) -> Return(Tensor, "weight"):
    """a + alpha m / (1 - probability)^rescale, m the mean of the deltas model_i - a that are kept, by entry.

    sd-mecha 1.1.8 fails for overlaps that are not odd; here they do what its formula says.
    Agrees: sd-mecha, but for its random numbers.
    Differs: the paper has independent masks (overlap=1), adds the deltas and does not average them.
    Source: DARE, Yu et al. 2023, arXiv:2311.03099; overlapping masks of sd-mecha.
    """
    if is_constant(alpha, 0) or probability == 1:
        return a
    masks = {"overlap": overlap, "overlap_emphasis": overlap_emphasis, "seed": seed}
    kept = dropout_deltas(*deltas_to(a, models), probability=probability, rescale=rescale, **masks)
    return add_scaled(a, kept, alpha)


@merge_method(register=False)
def probability_by_size(
    delta: Delta, rank: Small, probability: Parameter(float), della_eps: Parameter(float)
) -> Return(Tensor, "param"):
    """1 - probability for the middling entry of a tensor, della_eps / 2 more for the largest."""
    count = delta.numel()
    centred = rank / count - (count + 1) / (2 * count)
    return (1 - probability + centred * della_eps).clamp(0, 1).reshape(delta.shape)


@merge_method(composite=True, empty=0.0)
def ties_sum_with_dropout(
    *deltas: Delta,
    probability: Dropped = 0.9,
    della_eps: Parameter(float, help="how much more often the largest entry is kept than the smallest") = 0.0,
    rescale: Parameter(bool, help="divide the result by 1 - probability") = True,
    k: Kept = 0.2,
    vote_sgn: VoteBySize = False,
    apply_stock: ApplyStock = False,
    cos_eps: RowNorm = 0.0,
    apply_median: ApplyMedian = False,
    eps: Nearest = 0.0,
    maxiter: Iterations = 100,
    ftol: Progress = 1e-20,
    seed: Seed = 0,
) -> Return(Tensor, "delta"):
    """ties_sum_extended(drop(deltas)) / (1 - probability); probability 1 gives zeros.

    `drop` keeps entries with 1 - probability; with `della_eps` the rank of their magnitude in the tensor
    counts too, which needs whole tensors.
    Agrees: sd-mecha, but for its random numbers.
    Differs: ranks are those of the tensor, DELLA's of the row; what was dropped is trimmed, elected and
    averaged as by `ties_sum_extended`.
    Source: DARE, arXiv:2311.03099; DELLA, arXiv:2406.11617; TIES, arXiv:2306.01708; sd-mecha.
    """
    if probability == 1:
        return scaled(deltas[0], alpha=0.0)
    dropped = []
    for i, delta in enumerate(deltas):
        chance: Node | float = 1 - probability
        if della_eps:
            chance = probability_by_size(
                delta, rank_in_tensor(delta), probability=probability, della_eps=della_eps
            )
        dropped.append(dropped_entries(delta, chance, False, seed, i))
    settings = {"k": k, "vote_sgn": vote_sgn, "apply_stock": apply_stock, "apply_median": apply_median}
    limits = {"cos_eps": cos_eps, "eps": eps, "maxiter": maxiter, "ftol": ftol}
    merged = ties_sum_extended(*dropped, **settings, **limits)
    return scaled(merged, alpha=1 / (1 - probability)) if rescale else merged


@merge_method(composite=True)
def add_ties_with_dare(
    base: Base,
    *models: Experts,
    probability: Dropped = 0.9,
    della_eps: Parameter(float, help="how much more often the largest entry is kept than the smallest") = 0.0,
    rescale: Parameter(bool, help="divide the result by 1 - probability") = True,
    alpha: Alpha = 1.0,
    seed: Seed = 0,
    k: Kept = 1.0,
    vote_sgn: VoteBySize = False,
    apply_stock: ApplyStock = False,
    cos_eps: RowNorm = 0.0,
    apply_median: ApplyMedian = False,
    eps: Nearest = 0.0,
    maxiter: Iterations = 100,
    ftol: Progress = 1e-20,
) -> Return(Tensor, "weight"):
    """base + alpha ties_sum_with_dropout(model_i - base).

    Agrees: sd-mecha, but for its random numbers.
    Differs: as `ties_sum_with_dropout`; the paper's is `dare_ties`.
    Source: DARE, arXiv:2311.03099; TIES, arXiv:2306.01708; sd-mecha.
    """
    chances = {"probability": probability, "della_eps": della_eps, "rescale": rescale, "seed": seed}
    settings = {"k": k, "vote_sgn": vote_sgn, "apply_stock": apply_stock, "apply_median": apply_median}
    limits = {"cos_eps": cos_eps, "eps": eps, "maxiter": maxiter, "ftol": ftol}
    every = {**chances, **settings, **limits}
    return add_merged(base, models, alpha, lambda deltas: ties_sum_with_dropout(*deltas, **every))
