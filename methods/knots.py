"""Task vectors in a basis that all tasks share, where their entries can be compared."""

import math

import torch
from torch import Tensor

from mecha_exp import Node, Parameter, Return, factor, merge_method
from mecha_exp.methods.dare import dropped_entries
from mecha_exp.methods.gram import gram
from mecha_exp.methods.linear import add_merged
from mecha_exp.methods.parameters import Base, Delta, Dropped, Experts, Kept, Scale, Seed, Small
from mecha_exp.methods.ties import Switches, keep_largest

Tasks = Parameter(int, help="how many deltas there are")


def _elements_of_basis(shape: tuple[int, ...], *, tasks: int) -> int:
    """The elements of a basis in float64, of the products that it is found from, and of LAPACK's work."""
    if len(shape) < 2:
        return 0
    rows, columns = shape[0], math.prod(shape[1:])
    beside = tasks * columns if _is_tall(rows, columns, tasks) else columns
    return 2 * (rows * beside + 4 * min(rows, tasks * columns) ** 2)


def _is_tall(rows: int, columns: int, tasks: int) -> bool:
    """Whether a matrix has more rows than all deltas together have columns."""
    return rows > tasks * columns


@factor(elements=_elements_of_basis)
def shared_basis(*deltas: Delta, tasks: Tasks, smallest: Parameter(float)) -> Return(Tensor, "param"):
    """U of the singular parts U S V^T of all deltas side by side, D; or, of a tall D, V S and V / S.

    Nothing for tensors of one axis. Parts of a size of at most `smallest` are left out. They are found as
    eigenvectors in float64, of D D^T or, where D has fewer columns than rows, of D^T D; so directions below
    1e-7 of the largest are rounding errors, and left out, too. U is D V / S, which need not be formed.
    """
    if deltas[0].ndim < 2:
        return ()
    matrices = [delta.flatten(1) for delta in deltas]
    is_tall = _is_tall(*matrices[0].shape, tasks)
    if is_tall:
        products = gram(torch.cat(matrices, dim=1).double())
    else:
        products = sum(gram(matrix.double().mT) for matrix in matrices)
    squares, vectors = torch.linalg.eigh(products)
    sizes = squares.clamp_min(0).sqrt()
    known = (sizes > smallest) & (sizes > sizes.amax() * 1e-7)
    basis, sizes = vectors[:, known].flip(1), sizes[known].flip(0)
    parts = (basis * sizes, basis / sizes) if is_tall else (basis,)
    return tuple(part.to(deltas[0].dtype) for part in parts)


@merge_method(register=False)
def in_basis(delta: Delta, basis: Small, task: Parameter(int)) -> Return(Tensor, "delta"):
    """U^T d in the first rows, which is S V^T of this delta; zeros below, and where there is no basis."""
    made = torch.zeros_like(delta)
    if basis:
        matrix, u = delta.flatten(1), basis[0]
        columns = matrix.shape[1]
        is_tall = len(basis) > 1
        rows = u[task * columns : (task + 1) * columns].mT if is_tall else u.mT @ matrix
        made.flatten(1)[: u.shape[1]] = rows
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
def out_of_basis(coordinates: Delta, *deltas: Delta, basis: Small) -> Return(Tensor, "delta"):
    """U c; zeros where there is no basis."""
    if not basis:
        return torch.zeros_like(coordinates)
    known = coordinates.flatten(1)[: basis[0].shape[1]]
    if len(basis) == 1:
        return (basis[0] @ known).reshape(coordinates.shape)
    shares = (basis[1] @ known).chunk(len(deltas))
    made = sum(delta.flatten(1) @ share for delta, share in zip(deltas, shares, strict=True))
    return made.reshape(coordinates.shape)


@merge_method(composite=True, title="KnOTS-TIES")
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
    smallest: Parameter(
        float, ge=0, help="singular values up to it are left out; the authors have 1e-5"
    ) = 0.0,
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
    Agrees: the official code (svd-vector, ties, mean; smallest=1e-5) for matrices, but for random numbers.
    KnOTS-TIES is the default, KnOTS-DARE-TIES has k=1 and drop=0.1.
    Differs: the official code joins the bias of a layer to its matrix as a column more, and gives entries
    whose values cancel the sign that most have. Where singular values are equal the basis, and so the result,
    is one of many.
    Source: KnOTS, Stoica et al. 2024, arXiv:2410.19735.
    """

    def merge(deltas: list[Node]) -> Node:
        basis = shared_basis(*deltas, tasks=len(deltas), smallest=smallest)
        aligned = [in_basis(delta, basis, task=i) for i, delta in enumerate(deltas)]
        if drop > 0:
            aligned = [dropped_entries(c, 1 - drop, True, seed, i) for i, c in enumerate(aligned)]
        if k < 1:
            marked = [known_rows(c, basis) for c in aligned]
            aligned = keep_largest(marked, k, "official", trimmed=trim)
        return out_of_basis(Switches().merge(aligned, 1.0), *deltas, basis=basis)

    return add_merged(base, models, scale, merge)
