"""Task vectors as subspaces: each is of low rank, and there they get into each other's way."""

import math

import torch
from torch import Tensor

from mecha_exp import Parameter, Return, factor, merge_method
from mecha_exp.extensions.merge_methods import is_constant
from mecha_exp.methods.linear import add_scaled, deltas_to, n_average, weighted_total
from mecha_exp.methods.parameters import Base, Delta, Experts, Scale, Small
from mecha_exp.methods.spectral import decomposition, singular_parts


@merge_method(register=False)
def isotropic(total: Delta, parts: Small, count: Parameter(int)) -> Return(Tensor, "delta"):
    """mean(S) U V^T; of a tensor of one axis the mean of the `count` deltas that make up the total."""
    if not parts:
        return total / count
    u, s, vh = parts
    return (s.mean() * (u @ vh)).reshape(total.shape)


@merge_method(composite=True)
def iso_c(base: Base, *models: Experts, scale: Scale = 1.0) -> Return(Tensor, "weight"):
    """base + scale mean(S) U V^T, where U S V^T is the sum of the task vectors, rows being those of axis 0.

    A flat spectrum gives each direction that any task has learnt the same weight. Tensors of one axis get the
    mean of the task vectors. Needs whole tensors; the decomposition serves all strengths of a sweep.
    Source: Iso-C, Marczak et al. 2025, arXiv:2502.04959.
    """
    if is_constant(scale, 0):
        return base
    total = weighted_total(*deltas_to(base, models), weights=[1.0] * len(models))
    return add_scaled(base, isotropic(total, decomposition(total), count=len(models)), scale)


@factor(elements=lambda shape, *, tasks: 2 * math.prod(shape) // tasks)
def leading_parts(delta: Delta, tasks: Parameter(int)) -> Return(Tensor, "param"):
    """U, S and V of the largest singular parts of a task, its share of the rank among so many `tasks`.

    At least one; parts of no size are left out, since their directions mean nothing.
    """
    parts = decomposition.__wrapped__(delta)
    if not parts:
        return ()
    u, s, vh = parts
    known = s[: max(len(s) // tasks, 1)] > s.max() * max(len(u), vh.shape[1]) * torch.finfo(s.dtype).eps
    return u[:, : len(known)][:, known], s[: len(known)][known], vh[: len(known)][known].mT


@factor(elements=lambda shape: 2 * math.prod(shape))
def separated(*parts: Small) -> Return(Tensor, "param"):
    """The leading parts of all tasks, made orthogonal to each other.

    Of the stacked U, and likewise of the stacked V, the nearest matrix with orthonormal columns is taken.
    """
    if not parts[0]:
        return ()
    left, sizes, right = (torch.cat(stacked, -1) for stacked in zip(*parts, strict=True))
    return _nearest_frame(left), sizes, _nearest_frame(right.mT)


def _nearest_frame(matrix: Tensor) -> Tensor:
    u, _, vh = singular_parts(matrix)
    return u @ vh


@merge_method(register=False)
def from_parts(mean: Delta, parts: Small) -> Return(Tensor, "delta"):
    """U S V^T; where there are no parts the mean."""
    if not parts:
        return mean.clone()
    u, s, vh = parts
    return (u * s @ vh).reshape(mean.shape)


@merge_method(composite=True)
def tsv_m(base: Base, *models: Experts, scale: Scale = 1.0) -> Return(Tensor, "weight"):
    """base + scale sum_i U_i S_i V_i^T, the singular parts of all task vectors made orthogonal to each other.

    Each of N task vectors keeps 1 / N of the full rank, of the rows of axis 0; the stacked singular vectors
    are replaced by the nearest orthonormal ones, so that tasks no longer interfere. Tensors of one axis get
    the mean of the task vectors. Needs whole tensors; the decompositions serve all strengths of a sweep.
    Source: TSV-Merge, Gargiulo et al. 2024, arXiv:2412.00081.
    """
    if is_constant(scale, 0):
        return base
    deltas = deltas_to(base, models)
    parts = separated(*(leading_parts(delta, tasks=len(deltas)) for delta in deltas))
    return add_scaled(base, from_parts(n_average(*deltas), parts), scale)
