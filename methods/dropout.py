"""Random sparsification of deltas. Masks are a function of (seed, key, model) alone."""

import math
from itertools import accumulate

import torch
from torch import Tensor

from mecha_exp import Node, Parameter, RecipeError, Return, factor, merge_method, uniform
from mecha_exp.extensions.merge_methods import is_constant, spread
from mecha_exp.methods.centres import Iterations, Nearest, Progress
from mecha_exp.methods.linear import add_merged, add_scaled, deltas_to
from mecha_exp.methods.linear import scale as scaled
from mecha_exp.methods.ordering import ranks
from mecha_exp.methods.parameters import (
    Alpha,
    Base,
    Delta,
    Densities,
    Dropped,
    Experts,
    Kept,
    Rescale,
    RowNorm,
    Scale,
    Seed,
    Small,
    VoteBySize,
    Weights,
)
from mecha_exp.methods.reductions import sum_of_magnitudes
from mecha_exp.methods.ties import (
    ApplyMedian,
    ApplyStock,
    Combine,
    Switches,
    keep_largest,
    merged_deltas,
    ties_sum_extended,
)


@merge_method(elementwise=True, register=False)
def keep_at_random(
    delta: Delta, draw: Small, density: Parameter(Tensor, "param"), rescale: Parameter(bool)
) -> Return(Tensor, "delta"):
    """The entries whose draw is below `density`, divided by it if they are to keep their expectation."""
    kept = torch.where(draw < density, delta, 0)
    return torch.where(density > 0, kept / density, 0) if rescale else kept


@merge_method(elementwise=True, register=False)
def with_total(kept: Delta, before: Small, after: Small) -> Return(Tensor, "delta"):
    """Scaled so that the magnitudes sum to `before` and not to `after`; left alone if either is tiny."""
    return kept * torch.where((before < 1e-7) | (after < 1e-7), 1, before / after)


def _dropped(delta: Node, density: Node | float, rescale: bool | str, seed: int, stream: int) -> Node:
    draw = uniform(delta, seed=seed, stream=stream)
    kept = keep_at_random(delta, draw, density=density, rescale=rescale is True)
    if rescale == "l1":
        return with_total(kept, sum_of_magnitudes(delta), sum_of_magnitudes(kept))
    return kept


def _dare(deltas: list[Node], density: float | list[float], rescale: bool | str, seed: int) -> list[Node]:
    each = enumerate(zip(deltas, spread(density, len(deltas)), strict=True))
    return [d if share == 1 else _dropped(d, share, rescale, seed, i) for i, (d, share) in each]


@merge_method(composite=True)
def dare_linear(
    base: Base,
    *models: Experts,
    weights: Weights = 1.0,
    density: Densities = 0.5,
    rescale: Rescale = True,
    scale: Scale = 1.0,
    seed: Seed = 0,
) -> Return(Tensor, "weight"):
    """base + scale sum_i w_i drop(model_i - base).

    `drop` keeps each entry with probability `density`. What is left is divided by it (`rescale` true), left
    alone (false), or scaled to the L1 norm that there was (l1, as in mergekit).
    Agrees: the paper (rescale=true), mergekit (rescale=l1) but for its random numbers.
    Source: DARE, Yu et al. 2023, arXiv:2311.03099.
    """

    def merge(deltas: list[Node]) -> Node:
        return merged_deltas(_dare(deltas, density, rescale, seed), weights, consensus=False)

    return add_merged(base, models, scale, merge)


DARE_TIES = {"paper": Switches(), "mergekit": Switches(combine="sum", zero_sum="plus")}
"""What each variant of `dare_ties` sets."""


@merge_method(composite=True)
def dare_ties(
    base: Base,
    *models: Experts,
    weights: Weights = 1.0,
    density: Densities = 0.5,
    k: Kept = 1.0,
    rescale: Rescale = True,
    scale: Scale = 1.0,
    seed: Seed = 0,
    variant: Parameter(str, choices=tuple(DARE_TIES), help="whose: it sets what is not given") = "mergekit",
    combine: Combine = None,
) -> Return(Tensor, "weight"):
    """As `dare_linear`, but of each entry only the models that agree with the sign of the sum are merged.

    The dropped task vectors are trimmed to their `k` largest entries as by `ties`; k = 1 trims nothing.
    Variants: paper: combine=mean. mergekit: combine=sum.
    Agrees: mergekit (variant=mergekit, without its L1 norm: see rescale).
    Differs: the paper trims after dropping as TIES does, over the whole model: here by tensor.
    Source: DARE, Yu et al. 2023, arXiv:2311.03099, and TIES-Merging, arXiv:2306.01708.
    """
    switches = DARE_TIES[variant].but(combine=combine)

    def merge(deltas: list[Node]) -> Node:
        dropped = _dare(deltas, density, rescale, seed)
        return switches.merge(keep_largest(dropped, k, "paper"), weights)

    return add_merged(base, models, scale, merge)


def filter_size(shape: tuple[int, ...]) -> int:
    """The length of DELLA's rows: slices along the first axis, or all of a tensor of one axis."""
    return math.prod(shape[1:] if len(shape) > 1 else shape)


@merge_method(rowwise=filter_size, register=False)
def probability_by_rank(
    delta: Delta, density: Parameter(float), epsilon: Parameter(float), variant: Parameter(str)
) -> Return(Tensor, "param"):
    """The probability of each entry of a row, by the rank of its magnitude from 0 for the smallest.

    paper: density + epsilon / 2 - (n - 1 - rank) epsilon / n. mergekit: from density - epsilon for the
    smallest to density + epsilon for the largest. Of equal magnitudes the later entry has the higher rank.
    """
    count, rank = delta.shape[1], ranks(delta.abs())
    if variant == "paper":
        return density + epsilon / 2 - epsilon * (count - 1 - rank) / count
    return density - epsilon + 2 * epsilon * (rank / max(count - 1, 1))


@factor(elements=math.prod)
def rank_in_tensor(delta: Delta) -> Return(Tensor, "param"):
    """The place of each magnitude in the whole tensor, from 1 for the smallest."""
    return ranks(delta.abs().flatten()) + 1


def _della(
    deltas: list[Node],
    density: float | list[float],
    epsilon: float,
    variant: str,
    rescale: bool | str,
    seed: int,
) -> list[Node]:
    kept: list[Node] = []
    reach = epsilon / 2 if variant == "paper" else epsilon
    for i, (delta, share) in enumerate(zip(deltas, spread(density, len(deltas)), strict=True)):
        if share == 1:
            kept.append(delta)
            continue
        if not 0 < share - reach <= share + reach < 1:
            below = min(share, 1 - share) * (2 if variant == "paper" else 1)
            raise RecipeError(
                f"epsilon: {share:g} - {reach:g} and {share:g} + {reach:g} must lie between 0 and 1, "
                f"since they are probabilities. Give an epsilon below {below:g}."
            )
        chances = probability_by_rank(delta, density=share, epsilon=epsilon, variant=variant)
        kept.append(_dropped(delta, chances, rescale, seed, i))
    return kept


Epsilon = Parameter(
    float, ge=0, lt=1, help="width of the window of probabilities in a row (paper), or half of it (mergekit)"
)
Window = Parameter(str, choices=("paper", "mergekit"), help="whether epsilon is the window or half of it")
Normalize = Parameter(bool, help="divide by the weights of the models that are summed")


@merge_method(composite=True)
def della_linear(
    base: Base,
    *models: Experts,
    weights: Weights = 1.0,
    density: Densities = 0.5,
    epsilon: Epsilon = 0.15,
    rescale: Rescale = True,
    normalize: Normalize = False,
    scale: Scale = 1.0,
    seed: Seed = 0,
    variant: Window = "mergekit",
) -> Return(Tensor, "weight"):
    """base + scale sum_i w_i drop(model_i - base), larger entries being kept more often.

    The probability goes linearly with the rank of the magnitude in its row (a slice along the first axis),
    around density. `rescale` is as for `dare_linear`.
    Variants: paper: from about density - epsilon / 2 to density + epsilon / 2. mergekit: from density -
    epsilon to density + epsilon.
    Agrees: mergekit (variant=mergekit, without its L1 norm: see rescale).
    Differs: DELLA's official code has the window of mergekit.
    Source: DELLA, Deep et al. 2024, arXiv:2406.11617, without its election.
    """

    def merge(deltas: list[Node]) -> Node:
        kept = _della(deltas, density, epsilon, variant, rescale, seed)
        return merged_deltas(kept, weights, consensus=False, normalize=normalize)

    return add_merged(base, models, scale, merge)


@merge_method(composite=True)
def della(
    base: Base,
    *models: Experts,
    weights: Weights = 1.0,
    density: Densities = 0.5,
    epsilon: Epsilon = 0.15,
    rescale: Rescale = True,
    normalize: Normalize = True,
    scale: Scale = 1.0,
    seed: Seed = 0,
    variant: Window = "mergekit",
) -> Return(Tensor, "weight"):
    """As `della_linear`, but of each entry only the models that agree with the sign of the sum are averaged.

    Variants: as `della_linear`.
    Agrees: mergekit (variant=mergekit, without its L1 norm: see rescale).
    Differs: DELLA's official code has the window of mergekit.
    Source: DELLA, Deep et al. 2024, arXiv:2406.11617.
    """

    def merge(deltas: list[Node]) -> Node:
        kept = _della(deltas, density, epsilon, variant, rescale, seed)
        return merged_deltas(kept, weights, consensus=True, normalize=normalize)

    return add_merged(base, models, scale, merge)


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


@merge_method(composite=True)
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


@merge_method(composite=True)
def ties_sum_with_dropout(
    *deltas: Delta,
    probability: Dropped = 0.9,
    della_eps: Parameter(float, help="how much more often the largest entry is kept than the smallest") = 0.0,
    rescale: Parameter(bool, help="divide the result by 1 - probability") = True,
    k: Kept = 0.2,
    vote_sgn: VoteBySize = False,
    apply_stock: ApplyStock = False,
    cos_eps: RowNorm = 1e-6,
    apply_median: ApplyMedian = False,
    eps: Nearest = 1e-6,
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
        dropped.append(_dropped(delta, chance, False, seed, i))
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
    cos_eps: RowNorm = 1e-6,
    apply_median: ApplyMedian = False,
    eps: Nearest = 1e-6,
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
