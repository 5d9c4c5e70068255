"""Task vectors in a basis that all tasks share, where their entries can be compared."""

import math

import torch
from torch import Tensor

from mecha_exp import Node, Parameter, Return, factor, merge_method
from mecha_exp.methods.dare import dropped_entries
from mecha_exp.methods.linear import add_merged
from mecha_exp.methods.parameters import Base, Delta, Dropped, Experts, Kept, Scale, Seed, Small
from mecha_exp.methods.ties import Switches, keep_largest

_MOST_TASKS = 8
"""The tasks for which memory is planned: a tall matrix has as many directions as all of them have columns."""


def _elements_of_basis(shape: tuple[int, ...]) -> int:
    """The elements of a basis, and of the products that it is found from."""
    if len(shape) < 2:
        return 0
    rows, columns = shape[0], math.prod(shape[1:])
    directions = min(rows, _MOST_TASKS * columns)
    return directions * (rows + 2 * directions)


@factor(elements=_elements_of_basis)
def shared_basis(*deltas: Delta, smallest: Parameter(float)) -> Return(Tensor, "param"):
    """U of the singular parts U S V^T of all deltas side by side, [rows, r]; nothing for tensors of one axis.

    Parts of a size of at most `smallest` are left out. They are found as eigenvectors in float64, of
    sum_i d_i d_i^T or, where all deltas together have fewer columns than rows, of D^T D with D the deltas
    side by side; so directions below 1e-7 of the largest are rounding errors, and left out, too.
    """
    if deltas[0].ndim < 2:
        return ()
    matrices = [delta.flatten(1) for delta in deltas]
    rows = len(matrices[0])
    is_tall = rows > sum(matrix.shape[1] for matrix in matrices)
    if is_tall:
        beside = torch.cat(matrices, dim=1).double()
        products = beside.mT @ beside
    else:
        products = torch.zeros(rows, rows, dtype=torch.float64, device=matrices[0].device)
        for matrix in matrices:
            products.addmm_(matrix.double(), matrix.mT.double())
    squares, vectors = torch.linalg.eigh(products)
    sizes = squares.clamp_min(0).sqrt()
    known = (sizes > smallest) & (sizes > sizes.amax() * 1e-7)
    basis = vectors[:, known].flip(1)
    if is_tall:  # D v is u s, and the largest parts come first in the factorisation
        basis = torch.linalg.qr(beside @ basis).Q
    return (basis.to(deltas[0].dtype),)


@merge_method(register=False)
def in_basis(delta: Delta, basis: Small) -> Return(Tensor, "delta"):
    """U^T d in the first rows, which is S V^T of this delta; zeros below, and where there is no basis."""
    made = torch.zeros_like(delta)
    if basis:
        (u,) = basis
        made.flatten(1)[: u.shape[1]] = u.mT @ delta.flatten(1)
    return made


@merge_method(register=False)
def known_rows(coordinates: Delta, basis: Small) -> Return(Tensor, "delta"):
    """Coordinates with NaN in the rows that the basis does not have, so that ranks do not count them."""
    marked = torch.full_like(coordinates, torch.nan)
    if basis:
        rows = basis[0].shape[1]
        marked[:rows] = coordinates[:rows]
    return marked


@merge_method(register=False)
def out_of_basis(coordinates: Delta, basis: Small) -> Return(Tensor, "delta"):
    """U c; zeros where there is no basis."""
    if not basis:
        return torch.zeros_like(coordinates)
    (u,) = basis
    return (u @ coordinates.flatten(1)[: u.shape[1]]).reshape(coordinates.shape)


@merge_method(composite=True)
def knots(
    base: Base,
    *models: Experts,
    k: Kept = 0.2,
    drop: Dropped = 0.0,
    trim: Parameter(
        str,
        choices=("global", "tensor"),
        help="trim the coordinates of the whole model at once, or of each tensor",
    ) = "global",
    smallest: Parameter(float, ge=0, help="singular values up to it are left out") = 1e-5,
    scale: Scale = 1.0,
    seed: Seed = 0,
) -> Return(Tensor, "weight"):
    """base + scale U ties(U^T d_1, ..., U^T d_N), U S V^T being the task vectors of a matrix side by side.

    In the basis U the tasks are aligned: entries that mean the same stand at the same place. There they are
    merged as by TIES (the `k` largest of each task, the sign of their sum, the mean of what agrees) or, where
    `drop` is not 0, by DARE before it: entries are dropped with that probability, the rest is divided by
    1 - drop. `k` counts the coordinates of the whole model, found in one more trip over the data.
    Tensors of more than two axes are matrices of the rows of axis 0, and those of one axis stay the base's.
    Stacked experts take trim=tensor. Needs whole tensors.
    Agrees: the official code (svd-vector, ties, mean) for matrices, but for its random numbers. KnOTS-TIES is
    the default, KnOTS-DARE-TIES has k=1 and drop=0.1.
    Differs: the official code joins the bias of a layer to its matrix as a column more, and gives entries
    whose values cancel the sign that most have. Where singular values are equal the basis, and so the result,
    is one of many.
    Source: KnOTS, Stoica et al. 2024, arXiv:2410.19735.
    """

    def merge(deltas: list[Node]) -> Node:
        basis = shared_basis(*deltas, smallest=smallest)
        aligned = [in_basis(delta, basis) for delta in deltas]
        if drop > 0:
            aligned = [dropped_entries(c, 1 - drop, True, seed, i) for i, c in enumerate(aligned)]
        if k < 1:
            marked = [known_rows(c, basis) for c in aligned]
            aligned = keep_largest(marked, k, "official", trimmed=trim)
        return out_of_basis(Switches().merge(aligned, 1.0), basis)

    return add_merged(base, models, scale, merge)
