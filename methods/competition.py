"""Entries that compete: which task an entry serves best, and by how much."""

import torch
from torch import Tensor

from mecha_exp import Node, Parameter, Return, merge_method, reduction, whole_model
from mecha_exp.methods.linear import add_merged
from mecha_exp.methods.parameters import Base, Delta, Experts, Model, Scale, Small

OUTER = 0.0001
"""The share of the smallest and of the largest magnitudes that PCB's official code cuts off."""


@reduction(rank=lambda count: int(count * OUTER) + 1, register=False)
def lower_limit(a: Model) -> Return(Tensor, "param"):
    """The magnitude at the ascending index int(0.0001 n), counted from 0."""
    return a.abs()


@reduction(rank=lambda count: max(int(count * (1 - OUTER) - 1), 0) + 1, register=False)
def upper_limit(a: Model) -> Return(Tensor, "param"):
    """The magnitude at the ascending index int(0.9999 n - 1), counted from 0."""
    return a.abs()


model_lower_limit = whole_model(lower_limit)
model_upper_limit = whole_model(upper_limit)


def scores(deltas: tuple[Tensor, ...], low: Tensor, high: Tensor, index: int) -> Tensor:
    """exp(N m^2) tanh(d sum_j d_j) of one delta, m its magnitudes from 0 at `low` to 1 at `high`."""
    own = deltas[index]
    size = torch.minimum(torch.maximum(own.abs(), low), high)
    within = torch.where(high > low, (size - low) / (high - low), 0)
    return (len(deltas) * within.square()).exp() * (own * sum(deltas)).tanh()


@reduction(rank=lambda count, ratio, **_: min(int(count * (1 - ratio)), count - 1) + 1, register=False)
def score_kept(
    *deltas: Delta, low: Small, high: Small, index: Parameter(int), ratio: Parameter(float)
) -> Return(Tensor, "param"):
    """The score at the ascending index int((1 - ratio) n): the least that counts."""
    return scores(deltas, low, high, index)


@reduction(rank=lambda count, **_: count, register=False)
def score_best(*deltas: Delta, low: Small, high: Small, index: Parameter(int)) -> Return(Tensor, "param"):
    """The largest score."""
    return scores(deltas, low, high, index)


model_score_kept = whole_model(score_kept)
model_score_best = whole_model(score_best)


@merge_method(elementwise=True, register=False)
def side_by_side(*numbers: Small) -> Return(Tensor, "param"):
    """Numbers of a model as one vector."""
    return torch.stack(numbers)


@merge_method(elementwise=True, register=False)
def balanced_mean(*deltas: Delta, limits: Small) -> Return(Tensor, "delta"):
    """sum_i s_i c_i / sum_i s_i, s_i the scores from 0 at the least that counts to 1, c_i the cut deltas.

    `limits` has four numbers for each delta: the least and the largest magnitude, the least score that counts
    and the largest.
    """
    total = share = torch.zeros_like(deltas[0])
    for index, delta in enumerate(deltas):
        low, high, least, best = (limits[4 * index + place] for place in range(4))
        size = torch.minimum(torch.maximum(delta.abs(), low), high)
        score = torch.minimum(torch.maximum(scores(deltas, low, high, index), least), best)
        each = torch.where(best > least, (score - least) / (best - least), 0)
        total = total + each * delta.sign() * size
        share = share + each
    return total / share.clamp_min(1e-12)


@merge_method(composite=True, title="PCB-Merging")
def pcb(
    base: Base,
    *models: Experts,
    ratio: Parameter(float, gt=0, le=1, help="share of each task vector's entries that counts") = 0.1,
    scale: Scale = 1.0,
) -> Return(Tensor, "weight"):
    """base + scale sum_i s_i d_i / sum_i s_i, s_i by how an entry of d_i competes with others.

    The score of an entry is exp(N m^2) tanh(d_i sum_j d_j): m is its magnitude from 0 at the smallest to 1 at
    the largest of the task vector, whose outer 0.01 percent at both ends are cut off before. The ratio n
    largest scores give s_i, from 0 at the least of them to 1 at the largest; the rest is dropped. All limits
    are those of the whole model, found in two more trips over the data. An entry that no task keeps stays the
    base's.
    Agrees: the official code (pcb-merging.py), the paper's formula.
    Differs: a strength for each task, which the authors search for, is not offered: scale is one for all.
    Source: PCB-Merging, Du et al. 2024, arXiv:2410.02396.
    """

    def merge(deltas: list[Node]) -> Node:
        limits: list[Node] = []
        for index, delta in enumerate(deltas):
            ends = {"low": model_lower_limit(delta), "high": model_upper_limit(delta)}
            asked = {**ends, "index": index}
            limits += [*ends.values(), model_score_kept(*deltas, **asked, ratio=ratio)]
            limits.append(model_score_best(*deltas, **asked))
        return balanced_mean(*deltas, limits=side_by_side(*limits))

    return add_merged(base, models, scale, merge)
