"""DARE and DELLA: entries dropped at random, the rest rescaled. Masks depend on seed, key and model alone."""

import math

import torch
from torch import Tensor

from mecha_exp import Node, Parameter, RecipeError, Return, merge_method, uniform
from mecha_exp.extensions.merge_methods import ranks, row_length, spread
from mecha_exp.methods.linear import add_merged
from mecha_exp.methods.parameters import (
    Base,
    Delta,
    Densities,
    Experts,
    Kept,
    Rescale,
    Scale,
    Seed,
    Small,
    Weights,
)
from mecha_exp.methods.reductions import sum_of_magnitudes
from mecha_exp.methods.ties import (
    Combine,
    Switches,
    Trim,
    keep_largest,
    merged_deltas,
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
    """Scaled so that the magnitudes sum to `before` and not to `after`; left alone if either is 0."""
    return kept * torch.where((before > 0) & (after > 0), before / after, 1)


def dropped_entries(delta: Node, density: Node | float, rescale: bool | str, seed: int, stream: int) -> Node:
    """Keep the entries whose draw is below `density`, made up for as `rescale` says."""
    draw = uniform(delta, seed=seed, stream=stream)
    kept = keep_at_random(delta, draw, density=density, rescale=rescale is True)
    if rescale == "l1":
        return with_total(kept, sum_of_magnitudes(delta), sum_of_magnitudes(kept))
    return kept


def _dare(deltas: list[Node], density: float | list[float], rescale: bool | str, seed: int) -> list[Node]:
    each = enumerate(zip(deltas, spread(density, len(deltas)), strict=True))
    return [d if share == 1 else dropped_entries(d, share, rescale, seed, i) for i, (d, share) in each]


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
    trim: Trim = None,
) -> Return(Tensor, "weight"):
    """As `dare_linear`, but of each entry only the models that agree with the sign of the sum are merged.

    What was not dropped is trimmed to its `k` largest entries as by `ties`, by tensor or over the whole model
    (trim=global); k = 1 trims nothing.
    Variants: paper: combine=mean. mergekit: combine=sum.
    Agrees: mergekit (variant=mergekit, without its L1 norm: see rescale).
    Differs: the paper trims after dropping as TIES does, over the whole model: trim=global.
    Source: DARE, Yu et al. 2023, arXiv:2311.03099, and TIES-Merging, arXiv:2306.01708.
    """
    switches = DARE_TIES[variant].but(combine=combine, trim=trim)

    def merge(deltas: list[Node]) -> Node:
        dropped = _dare(deltas, density, rescale, seed)
        return switches.merge(keep_largest(dropped, k, "paper", trimmed=switches.trim), weights)

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
    count, rank = row_length(delta), ranks(delta.abs())
    if variant == "paper":
        return density + epsilon / 2 - epsilon * (count - 1 - rank) / count
    return density - epsilon + 2 * epsilon * (rank / (count - 1).clamp_min(1))


def _della(
    deltas: list[Node],
    density: float | list[float],
    epsilon: float | list[float],
    variant: str,
    rescale: bool | str,
    seed: int,
) -> list[Node]:
    kept: list[Node] = []
    each = zip(deltas, spread(density, len(deltas)), spread(epsilon, len(deltas)), strict=True)
    for i, (delta, share, width) in enumerate(each):
        reach = width / 2 if variant == "paper" else width
        if share == 1:
            kept.append(delta)
            continue
        if not 0 < share - reach <= share + reach < 1:
            below = min(share, 1 - share) * (2 if variant == "paper" else 1)
            raise RecipeError(
                f"epsilon: {share:g} - {reach:g} and {share:g} + {reach:g} must lie between 0 and 1, "
                f"since they are probabilities. Give an epsilon below {below:g}."
            )
        chances = probability_by_rank(delta, density=share, epsilon=width, variant=variant)
        kept.append(dropped_entries(delta, chances, rescale, seed, i))
    return kept


Epsilon = Parameter(
    list[float],
    ge=0,
    lt=1,
    help="width of the window of probabilities in a row (paper), or half of it (mergekit): one, or a list",
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
