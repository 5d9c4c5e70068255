"""Task vectors as subspaces: each is of low rank, and there they get into each other's way."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mecha_exp import Node, Parameter, Return, factor, merge_method
from mecha_exp.methods.gram import exact_parts, frame, largest_parts, polar_and_mean_size
from mecha_exp.methods.linear import add_merged, difference, n_average, plus, weighted_total
from mecha_exp.methods.parameters import Base, Delta, Experts, Model, Scale, Small, Task, check_task
from mecha_exp.methods.reductions import whole_share
from mecha_exp.methods.spectral import decomposition, reduced

MATRICES = {"axes:2": "merge", "kind:experts": "merge", "kind:text_projection": "mean", "default": "mean"}
"""What the code of the methods' authors merges, and what it gives the other keys."""

Decomposed = Parameter(
    str,
    choices=("paper", "rows"),
    help="what is decomposed: tensors of two axes, or of two and more as matrices of the rows of axis 0",
)


def is_decomposed(shape: Sequence[int], variant: str, key: str = "") -> bool:
    """Whether a tensor is a matrix: two axes, and not CLIP's `text_projection`; as rows two and more."""
    return len(shape) > 1 if variant == "rows" else len(shape) == 2 and "text_projection" not in key


@factor(elements=lambda shape, *, variant: 2 * math.prod(shape) if is_decomposed(shape, variant) else None)
def known_parts(a: Model, variant: Parameter(str), **kwargs: Any) -> Return(Tensor, "param"):
    """U, S and V^T of a matrix; the vectors of singular values that are rounding errors are zeros.

    Nothing for what is not decomposed; see `is_decomposed`.
    """
    if not is_decomposed(a.shape, variant, kwargs["key"]):
        return ()
    u, s, v = exact_parts(a.flatten(1))
    return u * _known(s, a), s, v.mT


def _known(sizes: Tensor, a: Tensor) -> Tensor:
    """Which singular values of a tensor's rows are more than rounding errors of the largest."""
    return sizes > sizes[:1].sum() * max(a.flatten(1).shape) * torch.finfo(sizes.dtype).eps


@factor(elements=lambda shape, *, variant: math.prod(shape) if is_decomposed(shape, variant) else None)
def flattened(total: Model, variant: Parameter(str), **kwargs: Any) -> Return(Tensor, "param"):
    """mean(S) U V^T of a matrix; nothing for what is not decomposed, see `is_decomposed`."""
    if not is_decomposed(total.shape, variant, kwargs["key"]):
        return ()
    factor, mean = polar_and_mean_size(total.flatten(1))
    return (mean * factor,)


@merge_method(elementwise=True, register=False)
def divided(total: Delta, count: Parameter(int)) -> Return(Tensor, "delta"):
    """An equal part of a total, one of `count`."""
    return total / count


@merge_method(register=False, without=lambda total, made, count: divided(total, count=count))
def isotropic(total: Delta, made: Small, count: Parameter(int)) -> Return(Tensor, "delta"):
    """What was made of the total, or else the mean of the `count` deltas that it is the sum of."""
    return made[0].reshape(total.shape) if made else total / count


@merge_method(composite=True, paper_keys=MATRICES, title="Iso-C")
def iso_c(base: Base, *models: Experts, scale: Scale = 1.0, variant: Decomposed = "paper") -> Return(
    Tensor, "weight"
):
    """base + scale mean(S) U V^T, where U S V^T is the sum of the task vectors; of other tensors their mean.

    A flat spectrum gives each direction that any task has learnt the same weight. Needs whole tensors; the
    decomposition serves all strengths of a sweep.
    Variants: paper: matrices are the tensors of two axes, but for CLIP's text_projection. rows: tensors of
    more axes too, as matrices of the rows of axis 0.
    Agrees: the official code (variant=paper).
    Differs: directions in which no task moves have no vectors but those of rounding errors, which the
    official code gives full weight. Here they are left out.
    Source: Iso-C, Marczak et al. 2025, arXiv:2502.04959.
    """

    def merge(deltas: list[Node]) -> Node:
        total = weighted_total(*deltas, weights=[1.0] * len(deltas))
        return isotropic(total, flattened(total, variant=variant), count=len(deltas))

    return add_merged(base, models, scale, merge)


@factor(
    elements=lambda shape, *, tasks, variant: (
        2 * math.prod(shape) // tasks if is_decomposed(shape, variant) else None
    )
)
def leading_parts(delta: Delta, tasks: Parameter(int), variant: Parameter(str), **kwargs: Any) -> Return(
    Tensor, "param"
):
    """U, S and V of the largest singular parts of a task, floor(rank / tasks) of them; see `is_decomposed`.

    At least one where variant is rows. Parts of no size are left out, since their directions mean nothing.
    """
    if not is_decomposed(delta.shape, variant, kwargs["key"]):
        return ()
    matrix = delta.flatten(1)
    u, s, v = largest_parts(matrix, max(min(matrix.shape) // tasks, int(variant == "rows")))
    count = int(_known(s, delta).sum())  # the first ones, since the largest come first
    return u[:, :count], s[:count], v[:, :count]


@factor()
def separated(*parts: Small) -> Return(Tensor, "param"):
    """sum_i U_i S_i V_i^T of the leading parts of all tasks, made orthogonal to each other.

    Of the stacked U, and likewise of the stacked V, the nearest matrix with orthonormal columns is taken.
    """
    if not parts[0]:
        return ()
    left, sizes, right = (torch.cat(stacked, -1) for stacked in zip(*parts, strict=True))
    return (_in_frames(left, sizes, right),)


def _in_frames(left: Tensor, sizes: Tensor, right: Tensor) -> Tensor:
    """U S V^T, U and V being the frames nearest to the matrices on the left and right."""
    if len(left) < len(right):
        return _in_frames(right, sizes, left).mT
    return frame(left).times((frame(right).whole() * sizes).mT)


@merge_method(register=False, without=lambda mean, made: mean)
def made_or_mean(mean: Delta, made: Small) -> Return(Tensor, "delta"):
    """What a factor made; the mean where it made nothing."""
    return made[0].reshape(mean.shape) if made else mean


@merge_method(composite=True, paper_keys=MATRICES, title="TSV-M")
def tsv_m(base: Base, *models: Experts, scale: Scale = 1.0, variant: Decomposed = "paper") -> Return(
    Tensor, "weight"
):
    """base + scale sum_i U_i S_i V_i^T, the singular parts of all task vectors made orthogonal to each other.

    Each of N task vectors keeps floor(rank / N) parts, so a matrix with fewer directions than tasks stays the
    base's; the stacked singular vectors are replaced by the nearest orthonormal ones, so that tasks no longer
    interfere. Other tensors get the mean of the task vectors. Needs whole tensors; the decompositions serve
    all strengths of a sweep.
    Variants: paper: matrices are the tensors of two axes, but for CLIP's text_projection. rows: tensors of
    more axes too, as matrices of the rows of axis 0, and of each task at least one part is kept.
    Agrees: the official code (variant=paper) where the parts that are kept have a size.
    Differs: parts of no size have no vectors but those of rounding errors, which take room in the official
    code. Here they are left out.
    Source: TSV-Merge, Gargiulo et al. 2024, arXiv:2412.00081.
    """

    def merge(deltas: list[Node]) -> Node:
        settings = {"tasks": len(deltas), "variant": variant}
        made = separated(*(leading_parts(delta, **settings) for delta in deltas))
        return made_or_mean(n_average(*deltas), made)

    return add_merged(base, models, scale, merge)


def shared_out(rank: int, tasks: int, share: float) -> tuple[int, int]:
    """The directions that all tasks have in common, and those that each has for itself; all are `rank`.

    Their own are round((rank - floor(share rank)) / tasks), and at most floor(rank / tasks).
    """
    own = min(round((rank - int(rank * share)) / tasks), rank // tasks)
    return rank - own * tasks, own


@factor()
def common_and_own(*deltas: Delta, parts: Small, share: Parameter(float)) -> Return(Tensor, "param"):
    """mean(S) U V^T of the directions in common and those of each task, made orthogonal.

    Args:
        deltas: the task vectors.
        parts: `known_parts` of their sum.
        share: of the directions that are in common.
    """
    if not parts:
        return ()
    u, s, vh = parts
    common, own = shared_out(len(s), len(deltas), share)
    basis = u[:, :common]
    left, sizes, right = [basis], [s[:common]], [vh[:common].mT]
    for delta in deltas if own else ():
        matrix = delta.flatten(1)
        part = largest_parts(matrix - basis @ (basis.mT @ matrix), own)
        for stacked, vectors in zip((left, sizes, right), part, strict=True):
            stacked.append(vectors)
    every = torch.cat(sizes)
    known = every > every.max() * max(u.shape[0], vh.shape[1]) * torch.finfo(s.dtype).eps
    first, second = (torch.cat(side, 1)[:, known] for side in (left, right))
    return (_in_frames(first, every.mean(), second),)


@merge_method(composite=True, paper_keys=MATRICES, title="Iso-CTS")
def iso_cts(
    base: Base,
    *models: Experts,
    common: Parameter(float, ge=0, le=1, help="share of the directions that all tasks have in common") = 0.8,
    scale: Scale = 1.0,
    variant: Decomposed = "paper",
) -> Return(Tensor, "weight"):
    """base + scale mean(S) U V^T, U S V^T being leading parts of the summed task vectors and of each task.

    The sum gives the largest `common` of its directions. Each of N tasks gives its largest parts at right
    angles to those, round((1 - common) rank / N) of them. All are made orthogonal, and get the mean of their
    sizes. Other tensors get the mean of the task vectors. Needs whole tensors; the decompositions serve all
    strengths of a sweep.
    Variants: paper: matrices are the tensors of two axes, but for CLIP's text_projection. rows: tensors of
    more axes too, as matrices of the rows of axis 0.
    Agrees: the official code (variant=paper) where the parts that are kept have a size.
    Differs: parts of no size are left out, and a task gets at most floor(rank / N) parts, where the official
    code can ask for more than there are in a small matrix.
    Source: Iso-CTS, Marczak et al. 2025, arXiv:2502.04959.
    """

    def merge(deltas: list[Node]) -> Node:
        total = weighted_total(*deltas, weights=[1.0] * len(deltas))
        made = common_and_own(*deltas, parts=known_parts(total, variant=variant), share=common)
        return made_or_mean(n_average(*deltas), made)

    return add_merged(base, models, scale, merge)


@merge_method(elementwise=True, register=False)
def unless_none(delta: Delta, density: Parameter(float)) -> Return(Tensor, "delta"):
    """A tensor that has no parts: itself, or zeros where none of it is kept."""
    return delta.clone() if density else torch.zeros_like(delta)


@merge_method(register=False, without=lambda delta, parts, density: unless_none(delta, density=density))
def leading_share(delta: Delta, parts: Small, density: Parameter(float)) -> Return(Tensor, "delta"):
    """The floor(density rank) largest singular parts; a tensor of one axis whole, unless density is 0."""
    if not parts:
        return unless_none.__wrapped__(delta, density)
    return reduced.__wrapped__(delta, parts, whole_share(density, len(parts[1])))


@merge_method(composite=True, title="Twin-Merging")
def twin(
    base: Base,
    *models: Experts,
    task: Task = 0,
    density: Parameter(
        float, ge=0, le=1, help="fraction of the rank that is kept of what is the task's own"
    ) = 0.1,
    shared: Parameter(float, help="strength of the sum of the task vectors in the shared expert") = 0.3,
    scale: Scale = 1.0,
) -> Return(Tensor, "weight"):
    """base + scale (s + SVD_r(d_task - s)), s = shared sum_i d_i being what all tasks share.

    What the task knows beside the shared expert, base + s, is cut to its floor(density rank) largest singular
    parts, in matrices of the rows of axis 0; tensors of one axis are restored whole. density 0 is the shared
    expert alone. A sweep over `task` writes the models of all tasks. Needs whole tensors; a decomposition
    serves all densities and strengths of a sweep.
    Agrees: the official code for one task and tensors of one or two axes, but for its counts in floats: 0.1
    of 30 is 2 there.
    Differs: for each input the paper adds the tasks' own parts by the probabilities of a trained router; here
    one task is chosen. The official code has no tensors of more axes.
    Source: Twin-Merging, Lu et al. 2024, arXiv:2406.15479.
    """
    check_task(task, models)

    def merge(deltas: list[Node]) -> Node:
        common = weighted_total(*deltas, weights=[shared] * len(deltas))
        own = difference(deltas[task], common)
        return plus(common, leading_share(own, decomposition(own), density=density))

    return add_merged(base, models, scale, merge)


@factor(elements=lambda shape, *, variant: math.prod(shape) if is_decomposed(shape, variant) else None)
def spectrum_cut(delta: Delta, eta: Parameter(float), variant: Parameter(str), **kwargs: Any) -> Return(
    Tensor, "param"
):
    """The leading singular parts that hold eta percent of the nuclear norm, times what makes up for the rest.

    Nothing for what is not decomposed; see `known_parts`.
    """
    parts = known_parts.__wrapped__(delta, variant, **kwargs)
    if not parts:
        return ()
    u, s, vh = parts
    held = s.cumsum(0)
    if not held[-1:].sum() > 0:
        return (torch.zeros_like(delta),)
    kept = min(int(torch.searchsorted(held, held[-1] * eta / 100)) + 1, len(s))
    return ((u[:, :kept] * (s[:kept] * (held[-1] / held[kept - 1])) @ vh[:kept]).reshape(delta.shape),)


@merge_method(register=False, without=lambda mean, cuts: mean)
def mean_of_cuts(mean: Delta, *cuts: Small) -> Return(Tensor, "delta"):
    """The mean of what `spectrum_cut` made of each delta; where it made nothing the mean of the deltas."""
    if not cuts[0]:
        return mean
    return sum(cut for (cut,) in cuts) / len(cuts)


@merge_method(composite=True, paper_keys=MATRICES, title="STAR")
def star(
    base: Base,
    *models: Experts,
    eta: Parameter(float, gt=0, le=100, help="percent of the nuclear norm that is kept") = 40.0,
    scale: Scale = 1.0,
    variant: Decomposed = "paper",
) -> Return(Tensor, "weight"):
    """base + scale mean_i t_i, t_i being task vector i cut to its leading singular parts and made up for it.

    The fewest parts are kept that hold eta percent of the nuclear norm (the sum of the singular values), and
    multiplied so that they have all of it. Other tensors get the mean of the task vectors. Needs whole
    tensors; the decompositions serve all strengths of a sweep.
    Variants: paper: matrices are the tensors of two axes, but for CLIP's text_projection. rows: tensors of
    more axes too, as matrices of the rows of axis 0.
    Agrees: the official code, which merges matrices only.
    Source: STAR, Lee et al. 2025, arXiv:2502.10339.
    """

    def merge(deltas: list[Node]) -> Node:
        cuts = [spectrum_cut(delta, eta=eta, variant=variant) for delta in deltas]
        return mean_of_cuts(n_average(*deltas), *cuts)

    return add_merged(base, models, scale, merge)
