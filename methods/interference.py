"""Task vectors as inputs of their own layers: what disturbs a task, measured on them."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mecha_exp import Node, Parameter, Return, factor, merge_method
from mecha_exp.methods.linear import add_merged, n_average
from mecha_exp.methods.parameters import Base, Delta, Experts, Scale, Small
from mecha_exp.methods.reductions import model_least_kept
from mecha_exp.methods.spectral import singular_parts
from mecha_exp.methods.subspaces import leading_parts
from mecha_exp.methods.tasks import thresholds_of

Steps = Parameter(int, ge=0, help="of Adam")
Rate = Parameter(float, gt=0, help="learning rate of Adam")
Others = Parameter(
    str, choices=("base", "mean"), help="what tensors that are not matrices get of the task vectors"
)

CACHED = 1 << 16
"""Elements of a matrix that are worked on at a time where each is needed several times."""


def interference_terms(deltas: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A = sum_i d_i^T d_i / |d_i|^2 and B = sum_i d_i d_i^T d_i / |d_i|^2, of which WUDI's loss is made.

    sum_i |(t - d_i) d_i^T|^2 / |d_i|^2 has the gradient 2 (t A - B). Deltas of no size add nothing.
    """
    columns = deltas[0].shape[1]
    products = deltas[0].new_zeros(columns, columns, dtype=dtype)
    target = torch.zeros_like(deltas[0], dtype=dtype)
    for delta in (delta.to(dtype) for delta in deltas):
        size = delta.square().sum()
        if size != 0:
            own = delta.mT @ delta / size
            products += own
            target += delta @ own
    return products, target


def least_interference(deltas: Sequence[Tensor]) -> Tensor:
    """B A^+ of `interference_terms`, in float64: in float32 the rounding errors of A count as directions.

    Of all minimisers it has the least norm: gradient descent from sum_i d_i ends there. Where the deltas have
    fewer rows than columns, E being all rows of the d_i / |d_i|, A = E^T E and B A^+ = F (E E^T)^+ E, F the
    blocks |d_i| E_i E_i^T side by side.
    """
    rows, columns = deltas[0].shape
    sizes = [size for delta in deltas if (size := delta.double().norm()) != 0]
    if not sizes or rows * len(sizes) >= columns:
        return solution(*interference_terms(deltas, torch.float64))
    changed = (delta.double() for delta in deltas if delta.any())
    units = torch.cat([delta / size for delta, size in zip(changed, sizes, strict=True)])
    products = units @ units.mT
    tasks = (slice(start, start + rows) for start in range(0, len(units), rows))
    own = [size * products[task, task] for size, task in zip(sizes, tasks, strict=True)]
    return solution(products, torch.cat(own, 1)) @ units


def solution(products: Tensor, target: Tensor) -> Tensor:
    """B A^+ of products A of a matrix with its transpose; of directions that A has, in float64.

    By Cholesky's factor L where A surely has all directions: 1 / |L^-1|^2 is at most its least eigenvalue.

    Raises:
        LinAlgError: a value is not finite.
    """
    if not bool(products.isfinite().all()):
        raise torch.linalg.LinAlgError("the task vectors contain values that are not finite")
    least = len(products) * torch.finfo(products.dtype).eps
    factor, failed = torch.linalg.cholesky_ex(products)
    if not failed:
        inverse = torch.linalg.solve_triangular(factor, torch.eye(len(factor)).to(factor), upper=False)
        if 1 / inverse.square().sum() > products.trace() * least:
            return target @ inverse.mT @ inverse
    sizes, vectors = torch.linalg.eigh(products)
    known = sizes > sizes.amax() * least
    return target @ vectors * torch.where(known, 1 / sizes, 0) @ vectors.mT


def adam(start: Tensor, slope: Callable[[Tensor], Tensor], steps: int, rate: float) -> Tensor:
    """Adam (Kingma & Ba 2014, arXiv:1412.6980) with torch's defaults, on the gradient that `slope` gives."""
    made = start.clone()
    first, second = torch.zeros_like(made), torch.zeros_like(made)
    for step in range(1, steps + 1):
        gradient = slope(made)
        for rows in few_rows(made):
            mean, square, now = first[rows], second[rows], gradient[rows]
            mean.lerp_(now, 0.1)
            square.mul_(0.999).addcmul_(now, now, value=0.001)
            spread = square.sqrt().div_(math.sqrt(1 - 0.999**step)).add_(1e-8)
            made[rows].addcdiv_(mean, spread, value=-rate / (1 - 0.9**step))
    return made


def few_rows(matrix: Tensor) -> list[slice]:
    """The rows of a matrix in parts that stay in the processor's cache while they are worked on."""
    rows, columns = matrix.shape
    size = max(CACHED // columns, 1)
    return [slice(start, start + size) for start in range(0, rows, size)]


@factor(elements=lambda shape: math.prod(shape) if len(shape) == 2 else None)
def without_interference(
    *deltas: Delta, solver: Parameter(str), steps: Parameter(int), rate: Parameter(float), **kwargs: Any
) -> Return(Tensor, "param"):
    """The delta of least interference for a matrix; nothing for other tensors. See `wudi`."""
    if deltas[0].ndim != 2 or "text_projection" in kwargs["key"] or not deltas[0].numel():
        return ()
    if solver == "closed":
        return (least_interference(deltas).to(deltas[0].dtype),)
    products, target = interference_terms(deltas, deltas[0].dtype)
    return (adam(sum(deltas), lambda merged: 2 * (merged @ products - target), steps, rate),)


@merge_method(elementwise=True, register=False)
def rest(mean: Delta, others: Parameter(str)) -> Return(Tensor, "delta"):
    """The mean, or zeros where the others stay the base's."""
    return mean.clone() if others == "mean" else torch.zeros_like(mean)


@merge_method(register=False, without=lambda mean, solved, others: rest(mean, others=others))
def solved_or_rest(mean: Delta, solved: Small, others: Parameter(str)) -> Return(Tensor, "delta"):
    """What was solved for; else the mean, or zeros where the others stay the base's."""
    return solved[0] if solved else rest.__wrapped__(mean, others)


@merge_method(composite=True, title="WUDI-Merging")
def wudi(
    base: Base,
    *models: Experts,
    solver: Parameter(
        str, choices=("adam", "closed"), help="steps of Adam as the authors take them, or the minimiser"
    ) = "adam",
    steps: Steps = 300,
    rate: Rate = 1e-5,
    others: Others = "base",
    scale: Scale = 1.0,
) -> Return(Tensor, "weight"):
    """base + scale t, t of least sum_i |(t - d_i) d_i^T|^2 / |d_i|^2 for each matrix, d_i the task vectors.

    A task vector's rows lie in the span of the inputs that its layer was trained on, so the sum bounds what
    the merge does to them. Adam begins at sum_i d_i and moves an entry by at most about rate times steps;
    `closed` is the minimiser itself, B A^+ with A = sum_i d_i^T d_i / |d_i|^2 and B = sum_i d_i d_i^T d_i /
    |d_i|^2, where gradient descent would end. Matrices are the tensors of two axes, but for CLIP's
    text_projection. Needs whole tensors; a solution serves all strengths of a sweep.
    Agrees: the official code (solver=adam), whose gradient comes from autograd.
    Differs: the official code names the layers of CLIP's encoder, so that embeddings stay the base's; here
    every tensor of two axes is a matrix. FusionBench gives other tensors the mean: others=mean.
    Source: WUDI-Merging, Cheng et al. 2025, arXiv:2503.08099.
    """

    def merge(deltas: list[Node]) -> Node:
        solved = without_interference(*deltas, solver=solver, steps=steps, rate=rate)
        return solved_or_rest(n_average(*deltas), solved, others=others)

    return add_merged(base, models, scale, merge)


@factor(elements=lambda shape: math.prod(shape))
def shared_directions(*parts: Small, subspace: Parameter(int)) -> Return(Tensor, "param"):
    """The directions that the left `leading_parts` of all tasks share most, floor(rank / subspace) of them.

    An orthonormal basis, [rows, directions]; nothing for what is not a matrix.
    """
    if not parts[0]:
        return ()
    left, _, right = parts[0]
    stacked = torch.cat([u for u, _, _ in parts], 1)
    u, s, _ = singular_parts(stacked)
    known = s > s[:1].sum() * max(stacked.shape) * torch.finfo(s.dtype).eps
    known &= torch.arange(len(s), device=s.device) < min(len(left), len(right)) // subspace
    return (u[:, known],)


@factor(elements=lambda shape: math.prod(shape))
def modification(
    *deltas: Delta, shared: Small, eta: Parameter(float), steps: Parameter(int), rate: Parameter(float)
) -> Return(Tensor, "param"):
    """t and the l_i of `doge`; nothing for what is not a matrix.

    Rows of the gradient are -2 sum_i l_i sum_j e_j d_j, where e_j = <d_j, d_j - sum_i l_i (d_i + t)>, of
    which <d_j, d_j - sum_i l_i d_i> is the same at each step.
    """
    if not shared:
        return ()
    (basis,) = shared
    sizes = torch.stack([delta.norm() for delta in deltas])
    shares = torch.where(sizes > 0, eta / sizes, 0)
    size = shares.sum()
    total = sum(share * delta for share, delta in zip(shares, deltas, strict=True))
    first_gaps = [(delta * (delta - total)).sum(1, keepdim=True) for delta in deltas]
    steep = torch.empty_like(total)

    def slope(change: Tensor) -> Tensor:
        for rows in few_rows(change):
            steep[rows] = 0
            for delta, gap in zip(deltas, first_gaps, strict=True):
                now = gap[rows] - size * (delta[rows] * change[rows]).sum(1, keepdim=True)
                steep[rows].addcmul_(delta[rows], now * (-2 * size))
        return torch.addmm(steep, basis, basis.mT @ steep, alpha=-1, out=steep)

    return adam(torch.zeros_like(total), slope, steps, rate), shares


@merge_method(
    register=False,
    without=lambda mean, deltas, modified, thresholds, others: rest(mean, others=others),
)
def modified_total(
    mean: Delta, *deltas: Delta, modified: Small, thresholds: Small, others: Parameter(str)
) -> Return(Tensor, "delta"):
    """sum_i l_i (d_i + t) where |d_i| reaches its threshold; what is not a matrix as in `solved_or_rest`."""
    if not modified:
        return rest.__wrapped__(mean, others)
    change, shares = modified
    total = torch.zeros_like(mean)
    for delta, share, least in zip(deltas, shares, thresholds, strict=True):
        total += torch.where(delta.abs() >= least, share * (delta + change), 0)
    return total


@merge_method(composite=True, title="DOGE")
def doge(
    base: Base,
    *models: Experts,
    eta: Parameter(float, ge=0, help="size that each task vector gets in each matrix") = 0.07,
    density: Parameter(
        float, ge=0, le=1, help="fraction of each whole task vector that is kept, by magnitude"
    ) = 0.3,
    subspace: Parameter(int, ge=1, help="one of so many directions is shared, and kept as it is") = 6,
    steps: Steps = 400,
    rate: Rate = 1e-4,
    others: Others = "base",
    scale: Scale = 1.0,
) -> Return(Tensor, "weight"):
    """base + scale sum_i l_i m_i (d_i + t), t of least sum_j <d_j, sum_i l_i (d_i + t) - d_j>^2 row by row.

    A task vector d_j stands for the gradient of its task, so the sum is what the merge changes for the tasks.
    For each matrix l_i = eta / |d_i|. m_i keeps the int(density n) + 1 largest of all n entries of d_i, found
    in one more trip over the data. Adam begins at t = 0. Of each gradient it takes what is at right angles to
    the shared directions: the floor(rank / subspace) largest that the floor(rank / N) leading left singular
    vectors of the N task vectors span. Matrices are as in `wudi`. Needs whole tensors; a solution serves all
    strengths and densities of a sweep.
    Agrees: the official code (DOGE TA, which is FusionBench's too), whose gradient comes from autograd.
    Differs: the official code names the layers of CLIP's encoder, and n counts their entries alone. Here
    directions of no size are left out, and l_i is 0 where a task leaves a matrix at the base, not infinity.
    Source: DOGE, Wei et al. 2025, arXiv:2501.01230.
    """

    def merge(deltas: list[Node]) -> Node:
        parts = [leading_parts(delta, tasks=len(deltas), variant="paper") for delta in deltas]
        shared = shared_directions(*parts, subspace=subspace)
        modified = modification(*deltas, shared=shared, eta=eta, steps=steps, rate=rate)
        least = thresholds_of(*(model_least_kept(d, density=density, variant="official") for d in deltas))
        return modified_total(n_average(*deltas), *deltas, modified=modified, thresholds=least, others=others)

    return add_merged(base, models, scale, merge)
