"""Rotations and decompositions. Their expensive parts are factors, computed once for a whole sweep."""

import math
from typing import Any

import torch
from torch import Tensor

from mecha_exp import Node, Parameter, Return, Tile, factor, merge_method, reduction
from mecha_exp.methods.linear import add_scaled, subtract, weighted_sum
from mecha_exp.methods.parameters import Base, Delta, Model, Small
from mecha_exp.methods.stiefel import logarithm, turned


def as_matrix(a: Tensor) -> Tensor:
    """The rows that are rotated: axis 0, or of a convolution with a kernel all filters of all channels."""
    is_convolution = a.ndim == 4 and a.shape[-2:].numel() != 1
    return a.flatten(2).flatten(0, 1) if is_convolution else a.flatten(1)


def _centred(a: Tensor, centralization: float) -> tuple[Tensor, Tensor]:
    matrix = as_matrix(a)
    mean = matrix.mean(0) * centralization
    return matrix - mean, mean


def _sides(shape: tuple[int, ...]) -> tuple[int, int]:
    """The columns of `as_matrix`, and its smaller side."""
    rows = shape[0] * shape[1] if len(shape) == 4 and math.prod(shape[2:]) != 1 else (shape or (1,))[0]
    columns = math.prod(shape) // max(rows, 1)
    return columns, min(rows, columns)


def _frames(shape: tuple[int, ...]) -> int:
    return 2 * math.prod(_sides(shape))


@merge_method(elementwise=True, register=False)
def blended(a: Model, b: Model, alpha: Parameter(float)) -> Return(Tensor):
    """A tensor of one axis between two, which is not rotated."""
    return a + alpha * (b - a)


def _blend(a: Node, b: Node, alpha: float, **_: Any) -> Node:
    return blended(a, b, alpha=alpha)


@factor(elements=lambda shape: _frames(shape) if len(shape) > 1 else None)
def alignment_of(a: Model, b: Model, centralization: Parameter(float)) -> Return(Tensor, "param"):
    """The frames U, V of the rotation that brings the centred rows of a nearest to those of b (Procrustes).

    The rotation takes what lies along U to V, and is found by a decomposition of the smaller side only: with
    n rows of p columns, of the p x p product if p <= n, else of an n x n one between the frames of both.
    Directions that the rows do not determine are left out.
    """
    if a.ndim < 2:
        return ()
    first, second = _centred(a, centralization)[0], _centred(b, centralization)[0]
    if first.shape[0] >= first.shape[1]:
        u, _, vh = torch.linalg.svd(first.mT @ second, full_matrices=False)
        return u, vh.mT
    q_a, r_a = torch.linalg.qr(first.mT)
    q_b, r_b = torch.linalg.qr(second.mT)
    u, s, vh = torch.linalg.svd(r_a @ r_b.mT)
    known = s > s.max() * max(first.shape) * torch.finfo(s.dtype).eps
    return q_a @ u[:, known], q_b @ vh.mT[:, known]


@factor(elements=_frames)
def proper(frames: Small) -> Return(Tensor, "param"):
    """The frames of a rotation without a reflection, which has no fractional powers.

    Where the frames hold all columns (p <= n) the least determined direction is turned round if need be.
    """
    if not frames or frames[0].shape[0] > frames[0].shape[1]:
        return frames
    u, v = frames
    return torch.cat([u[:, :-1], u[:, -1:] * torch.linalg.slogdet(u @ v.mT)[0]], 1), v


@factor(elements=lambda shape: 4 * _sides(shape)[1] ** 2 + _frames(shape))
def turning(frames: Small, eps: Parameter(float), max_iters: Parameter(int)) -> Return(Tensor, "param"):
    """The angles and axes of a rotation, or the way between the frames: input of its powers."""
    if not frames:
        return ()
    u, v = frames
    if u.shape[0] > u.shape[1]:
        return logarithm(u, v, eps, max_iters)
    values, vectors = torch.linalg.eig(u @ v.mT)
    axes, _ = torch.linalg.qr(vectors)  # orthonormal, though eigenvectors of one value need not be
    return values.angle(), axes


def _rotated(
    x: Tensor,
    frames: tuple[Tensor, Tensor],
    turn: tuple[Tensor, ...],
    power: float,
    eps: float = 1e-8,
    max_iters: int = 100,
) -> Tensor:
    """x Q^power, Q being the rotation that takes the frame U to V and leaves what lies outside of both.

    Rows in the span of U need no more than the frames for a whole power, and those of V for its inverse. The
    others are turned by the way between the frames.
    """
    u, v = frames if power > 0 else frames[::-1]
    if power == 0:
        return x
    is_whole = u.shape[0] == u.shape[1]
    if abs(power) == 1:
        along = x @ u
        if is_whole or (x - along @ u.mT).norm() <= x.norm() * max(x.shape) * torch.finfo(x.dtype).eps:
            return along @ v.mT
    if is_whole:
        angles, axes = turn
        powers = torch.polar(torch.ones_like(angles), angles * power)
        return x @ (axes * powers @ axes.mH).real
    return turned(x, turn or turning.__wrapped__(frames, eps, max_iters), power)


@merge_method(register=False, without=_blend)
def rotated(
    a: Model,
    b: Model,
    frames: Small,
    turn: Small,
    alignment: Parameter(float),
    alpha: Parameter(float),
    centralization: Parameter(float),
    eps: Parameter(float),
    max_iters: Parameter(int),
) -> Return(Tensor):
    """The rows of a, blended with those of b turned back, and turned; tensors of one axis are blended."""
    if a.ndim < 2:
        return blended.__wrapped__(a, b, alpha)
    rows, mean_a = _centred(a, centralization)
    mean_b = as_matrix(b).mean(0) * centralization
    if alpha:
        others = _rotated(as_matrix(b) - mean_b, frames, turn, -1, eps, max_iters)
        rows = rows + alpha * (others - rows)
    moved = _rotated(rows, frames, turn, alignment, eps, max_iters)
    return moved.add_(mean_a + alignment * (mean_b - mean_a)).reshape(a.shape)


@merge_method(register=False, without=_blend)
def rotated_simply(
    a: Model,
    b: Model,
    frames: Small,
    alignment: Parameter(float),
    alpha: Parameter(float),
    centralization: Parameter(float),
    eps: Parameter(float),
    max_iters: Parameter(int),
) -> Return(Tensor):
    """As `rotated` by a whole turn, or by none, which needs no angles."""
    return rotated.__wrapped__(a, b, frames, (), alignment, alpha, centralization, eps, max_iters)


@merge_method(composite=True, base="c")
def rotate(
    a: Model,
    b: Model,
    c: Base = None,
    alignment: Parameter(
        float, help="power of the rotation: 0 leaves a as it is, 1 turns it towards b"
    ) = 1.0,
    alpha: Parameter(float, help="how much of b, turned back to a, is blended in before the rotation") = 0.0,
    centralization: Parameter(float, ge=0, le=1, help="how far the mean row is taken out before") = 1.0,
    stiefel_eps: Parameter(float, gt=0, help="for wide matrices at fractional alignment: accuracy") = 1e-8,
    stiefel_max_iters: Parameter(int, ge=1, help="and iterations at most") = 100,
) -> Return(Tensor):
    """lerp(A, B Q^T, alpha) Q^alignment + lerp(mean a, mean b, alignment): a turned towards b.

    A and B are the centred rows of a and b (with c: of their differences to c, added to it), Q the rotation
    that brings A nearest to B, orthogonal in any shape. Where the rows do not determine it (more columns than
    rows) it turns nothing outside of their span. alignment = alpha = 0 is a, both 1 is b. Tensors of one axis
    are lerp(a, b, alpha).
    Agrees: sd-mecha, where there are no more columns than rows: its map of wide matrices is not orthogonal.
    Needs whole tensors, and a decomposition of a square matrix of the smaller side of each.
    Source: Procrustes, Schoenemann 1966; sd-mecha.
    """
    if c is not None:
        settings = {"alignment": alignment, "alpha": alpha, "centralization": centralization}
        limits = {"stiefel_eps": stiefel_eps, "stiefel_max_iters": stiefel_max_iters}
        return add_scaled(c, rotate(subtract(a, c), subtract(b, c), **settings, **limits), 1.0)
    if alignment == alpha and alpha in (0, 1):
        return weighted_sum(a, b, alpha=alpha)
    frames = alignment_of(a, b, centralization=centralization)
    limits = {"eps": stiefel_eps, "max_iters": stiefel_max_iters}
    settings = {"alignment": alignment, "alpha": alpha, "centralization": centralization, **limits}
    if alignment in (0, 1):
        return rotated_simply(a, b, frames, **settings)
    frames = proper(frames)
    return rotated(a, b, frames, turning(frames, **limits), **settings)


def singular_parts(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, S and V^T with as many columns as the smaller side; LAPACK takes far longer for a wide matrix."""
    if matrix.shape[0] >= matrix.shape[1]:
        return torch.linalg.svd(matrix, full_matrices=False)
    v, s, uh = torch.linalg.svd(matrix.mT, full_matrices=False)
    return uh.mT, s, v.mT


@factor(elements=lambda shape: 2 * math.prod(shape) if len(shape) > 1 else None)
def decomposition(a: Model) -> Return(Tensor, "param"):
    """The singular value decomposition of the rows of axis 0: U, S, V^T. Nothing for tensors of one axis."""
    return singular_parts(a.flatten(1)) if a.ndim > 1 else ()


@factor(elements=lambda shape: 2 * math.prod(shape) if len(shape) > 1 else None)
def approximate_decomposition(a: Model, rank: Small, iters: Parameter(int), seed: Parameter(int)) -> Return(
    Tensor, "param"
):
    """As `decomposition`, within a random subspace of `rank` dimensions that power iterations have turned."""
    if a.ndim < 2:
        return ()
    matrix = a.flatten(1)
    return low_rank_svd(matrix, min(max(round(float(rank)), 1), min(matrix.shape)), iters, seed)


def low_rank_svd(matrix: Tensor, rank: int, iters: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """The largest singular values and vectors, nearly (Halko, Martinsson & Tropp 2011, arXiv:0909.4061)."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.randn(matrix.shape[1], rank, generator=generator, dtype=torch.float64).to(matrix)
    basis = torch.linalg.qr(matrix @ basis).Q
    for _ in range(iters):
        basis = torch.linalg.qr(matrix.mT @ basis).Q
        basis = torch.linalg.qr(matrix @ basis).Q
    u, s, vh = singular_parts(basis.mT @ matrix)
    return basis @ u, s, vh


@merge_method(register=False, without=lambda a, parts, rank: a)
def reduced(a: Delta, parts: Small, rank: Small) -> Return(Tensor, "delta"):
    """The sum of the first `rank` singular parts; the tensor itself where that is all of them."""
    count = round(float(rank))
    if not parts or count >= min(a.flatten(1).shape):
        return a.clone()
    u, s, vh = (part.narrow(axis, 0, max(count, 0)) for part, axis in zip(parts, (1, 0, 0), strict=True))
    return (u * s @ vh).reshape(a.shape)


UseApproximation = Parameter(
    bool, help="find the largest singular vectors approximately, which is much faster"
)
BasisIterations = Parameter(int, ge=0, help="power iterations of the approximation")
BasisSeed = Parameter(int | None, ge=0, help="of the random subspace that the approximation begins with")


@merge_method(composite=True)
def truncate_rank(
    a: Delta,
    rank: Parameter(
        Tensor, ge=0, help="how many singular values are kept: a number, or a param of each key"
    ) = 8,
    use_approximate_basis: UseApproximation = True,
    approximate_basis_iters: BasisIterations = 2,
    approximate_basis_seed: BasisSeed = 0,
) -> Return(Tensor, "delta"):
    """The nearest tensor of a rank: its `rank` largest singular parts, of the rows of axis 0.

    Exact (Eckart & Young 1936), or in a random subspace (Halko et al. 2011, arXiv:0909.4061). Tensors of one
    axis stay as they are. Needs whole tensors; exact decompositions serve all ranks of a sweep.
    Source: sd-mecha.
    """
    if use_approximate_basis:
        settings = {"iters": approximate_basis_iters, "seed": approximate_basis_seed}
        return reduced(a, approximate_decomposition(a, rank, **settings), rank)
    return reduced(a, decomposition(a), rank)


@reduction
def get_rank_from_ratio(
    a: Parameter(Tensor, ("weight", "delta")),
    tile: Tile,
    ratio: Parameter(float, ge=0, le=1, help="fraction of the full rank") = 0.5,
) -> Return(Tensor, "param"):
    """round(ratio min(rows, columns)): a rank for each key, for `truncate_rank`. Rows are those of axis 0.

    A tensor of one axis has one column. Source: sd-mecha.
    """
    rows, *others = tile.shape or (1,)
    rank = round(ratio * min(rows, math.prod(others)))
    return torch.tensor(float(rank if tile.start == 0 else 0))  # the blocks are added up


def kronecker_shapes(shape: tuple[int, ...], ratio: float) -> tuple[int, int, int, int]:
    """(m1, m2, n1, n2): how axis 0 = m1 m2 and axis 1 = n1 n2 are split, the first factor being m1 x n1.

    `ratio` says how large the first factor is on a logarithmic scale, of the possible ones; of equally near
    splits the most balanced one is taken.
    """
    middle = math.log(math.prod(shape)) / 2
    splits = [
        (math.log(m1 * n1) - middle, m1, shape[0] // m1, n1, shape[1] // n1)
        for m1 in _divisors(shape[0])
        for n1 in _divisors(shape[1])
    ]
    widest = max(abs(size) for size, *_ in splits)
    wanted = (2 * ratio - 1) * widest
    _, *best = min(
        splits, key=lambda s: (abs(s[0] - wanted), abs(math.log(s[1] / s[2])) + abs(math.log(s[3] / s[4])))
    )
    m1, m2, n1, n2 = best
    return m1, m2, n1, n2


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


@merge_method
def truncate_kronecker(
    a: Delta,
    kronecker_ratio: Parameter(float, ge=0, le=1, help="size of the first factor, logarithmically") = 0.5,
    use_approximate_basis: UseApproximation = True,
    approximate_basis_iters: BasisIterations = 2,
    approximate_basis_seed: BasisSeed = 0,
) -> Return(Tensor, "delta"):
    """The nearest Kronecker product of two smaller tensors; tensors of one axis stay as they are.

    It is the first singular part of a rearrangement of the tensor. Needs whole tensors.
    Source: Van Loan & Pitsianis 1993; sd-mecha.
    """
    if a.ndim < 2:
        return a.clone()
    m1, m2, n1, n2 = kronecker_shapes(tuple(a.shape), kronecker_ratio)
    blocks = a.reshape(m1, m2, n1, -1).transpose(1, 2).reshape(m1 * n1, -1)
    if use_approximate_basis:
        u, s, vh = low_rank_svd(blocks, 1, approximate_basis_iters, approximate_basis_seed)
    else:
        u, s, vh = singular_parts(blocks)
    first = (u[:, 0] * s[0]).reshape(m1, n1, *[1] * (a.ndim - 2))
    return torch.kron(first, vh[0].reshape(m2, n2, *a.shape[2:])).reshape(a.shape)
