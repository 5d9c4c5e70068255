"""Polar factors and largest singular parts by Gram matrices, in a fraction of the time of LAPACK's SVD.

The eigenvalues of A^T A are the squares of A's singular values s, so float32 tells them apart less well. What
this loses is corrected, and what cannot be corrected is left to float64 or LAPACK; so are float64 and small
matrices. A GPU takes as long for eigenvectors in float64 as in float32, so it always takes float64.
`python -m bench.polar` measures errors and time.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mecha_exp.extensions.merge_methods import Spectrum
from mecha_exp.methods.spectral import singular_parts

EVEN = 1e-2
"""Beside the largest: eigenvalues of which none is smaller are exact enough in float32."""
LEAST = 2e-4
"""Beside the largest: smaller eigenvalues have vectors that float64 must find."""
MOST_SKEW = 3e-3
"""Cosines between columns, up to which a correction may leave out their squares."""
BLURRED = 4e-2
"""Beside the largest: vectors of smaller eigenvalues are turned away from the others."""
CONVERGED = 1e-9
"""The change of a step after which one more would change nothing that float32 sees."""
WINDOW = 32
"""So many vectors on each side of a cut are told apart in float64."""
LANES = 16
"""Products by BLAS take up to half as long again where columns are not a multiple of this."""

Parts = tuple[Tensor, Tensor, Tensor]
"""U, S and V."""


class Polar(NamedTuple):
    """The polar factor A R + U V^T of a matrix A.

    Attributes:
        matrix, root: A and R.
        left, right: U and V, of few columns or none.
    """

    matrix: Tensor
    root: Tensor
    left: Tensor | None = None
    right: Tensor | None = None

    def whole(self) -> Tensor:
        """The polar factor as one matrix."""
        made = self.matrix @ self.root
        return made if self.left is None or self.right is None else made.addmm_(self.left, self.right.mT)

    def times(self, b: Tensor) -> Tensor:
        """The factor times a matrix, of which A has more rows than columns."""
        made = self.matrix @ (self.root @ b)
        if self.left is None or self.right is None:
            return made
        return made.addmm_(self.left, self.right.mT @ b)


def polar_and_sizes(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """U V^T without the directions that float32 does not tell from none, and the singular values.

    Those directions are up to max(shape) eps of the largest. The error is below 1e-5 of the largest entry,
    but of matrices that are left to LAPACK: its errors in float32 reach 4e-4, and 1e-3 where directions lie
    close to that limit.

    Raises:
        LinAlgError: a value is not finite.
    """
    if matrix.shape[0] < matrix.shape[1]:
        factor, s = polar_and_sizes(matrix.mT)
        return factor.mT, s
    least = len(matrix) * torch.finfo(matrix.dtype).eps
    if found := polar_factor(matrix, least):
        return found[0].whole(), found[1]
    u, s, v = exact_parts(matrix)
    return u * (s > s.max() * least) @ v.mT, s


def polar_and_mean_size(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """U V^T as `polar_and_sizes` gives it, and the mean of the singular values.

    Raises:
        LinAlgError: a value is not finite.
    """
    if not is_by_float64(matrix):
        factor, s = polar_and_sizes(matrix)
        return factor, s.mean()
    if matrix.shape[0] < matrix.shape[1]:
        factor, mean = polar_and_mean_size(matrix.mT)
        return factor.mT, mean
    root, mean = exact_root(matrix)
    return (matrix.double() @ root).to(matrix), mean.to(matrix)


def frame(matrix: Tensor) -> Polar:
    """The nearest matrix with orthonormal columns."""
    if found := polar_factor(matrix):
        return found[0]
    if is_by_float64(matrix):
        return Polar(matrix, exact_root(matrix)[0].to(matrix))
    u, _, vh = singular_parts(matrix)
    return Polar(u, vh)


def polar_factor(matrix: Tensor, least: float = 0) -> tuple[Polar, Tensor] | None:
    """The polar factor of a matrix and its singular values; None where that is for float64 or LAPACK.

    An error e in A^T A moves the polar factor by e / (s_j (s_i + s_j)) between the directions i and j, which
    is some eps (s_max / s_min)^2 / 2 at most. So (A^T A)^-1/2 serves singular values that differ no more than
    tenfold. The few that are smaller are found in float64; where they are many, `turned_parts` is taken.

    Args:
        least: beside the largest, directions of singular values up to this are left out.
    """
    found = spectrum(matrix)
    if not found:
        return None
    squares = found.values()
    small, smallest = (int((squares <= squares[-1] * limit).sum()) for limit in (EVEN, LEAST))
    if smallest > len(squares) // 4:
        return None
    squares, vectors = found.parts()
    if small > len(squares) // 4:
        parts = turned_parts(matrix, squares, vectors, smallest)
        if not parts:
            return None
        u, s, v = parts
        return Polar(u * (s > s.max() * least), v.mT), s
    few, many = vectors[:, :small], vectors[:, small:]
    if not small:
        return Polar(matrix, inverse_root(squares, many)), squares.sqrt()
    few, made, _ = turned(matrix, few, many, squares[small:])
    s = torch.linalg.vector_norm(made, dim=0)
    if not bool((s > 0).all()):
        return None
    u, v = (made / s).to(matrix), few.to(matrix)
    many = torch.addmm(many, v, v.mT @ many, alpha=-1)
    sizes = torch.cat([s.to(matrix), squares[small:].sqrt()])
    known = sizes[:small] > sizes[-1] * least
    return Polar(matrix, inverse_root(squares[small:], many), u * known, v), sizes


def largest_parts(matrix: Tensor, count: int) -> Parts:
    """U, S and V of the `count` largest singular values.

    Raises:
        LinAlgError: a value is not finite.
    """
    if matrix.shape[0] < matrix.shape[1]:
        v, s, u = largest_parts(matrix.mT, count)
        return u, s, v
    found = spectrum(matrix) if count else None
    squares = found.values(min(count + WINDOW, matrix.shape[1])) if found else None
    if not found or squares is None or not squares[-count] > squares[-1] * LEAST:
        return exact_parts(matrix, count)
    is_blurred = bool(squares[-count] < squares[-1] * BLURRED)
    squares, v = (part.flip(-1) for part in found.parts(None if is_blurred else len(squares)))
    near = v[:, max(count - WINDOW, 0) : count + WINDOW]
    basis = torch.linalg.qr(near.double()).Q
    near.copy_(basis @ own_directions((matrix @ basis.to(matrix)).double()))
    kept, others = v[:, :count].contiguous(), v[:, count:]
    if is_blurred:
        turn = others.mT @ (matrix.mT @ (matrix @ kept)) / (squares[:count] - squares[count:, None])
        turn[:WINDOW, -WINDOW:] = 0
        kept = kept + others @ turn
    made = orthonormal(product(matrix, kept))
    return (*made, kept) if made else exact_parts(matrix, count)


def product(a: Tensor, b: Tensor) -> Tensor:
    """A B, by columns that BLAS takes as fast as it can."""
    columns = b.shape[1]
    return (a @ torch.nn.functional.pad(b, (0, -columns % LANES)))[:, :columns]


def exact_parts(matrix: Tensor, count: int | None = None) -> Parts:
    """U, S and V of the `count` largest singular values, or of all, by float64 or LAPACK."""
    if is_long(matrix) or is_by_float64(matrix):
        return long_parts(matrix, count)
    u, s, vh = singular_parts(matrix)
    if count is None:
        return u, s, vh.mT
    return u[:, :count].clone(), s[:count], vh[:count].clone().mT  # or the others would stay in memory


def is_by_float64(matrix: Tensor) -> bool:
    """Whether eigenvectors in float64 cost no more than in float32: on a GPU."""
    return matrix.is_cuda and matrix.dtype == torch.float32 and matrix.numel() > 0


def exact_root(a: Tensor) -> tuple[Tensor, Tensor]:
    """(A^T A)^-1/2 on the directions that float32 tells from none, 0 on the others; the mean singular value.

    Both are in float64.

    Raises:
        LinAlgError: a value is not finite.
    """
    square, least = gram(a.double()), max(a.shape) * torch.finfo(a.dtype).eps
    if found := iterated_roots(square, least):
        root, inverse = found
        return inverse, root.diagonal().mean()
    if not bool(square.isfinite().all()):
        raise torch.linalg.LinAlgError("the input matrix contains non-finite values")
    squares, v = torch.linalg.eigh(square)
    s = squares.clamp_min(0).sqrt()
    return v * torch.where(s > s.max() * least, 1 / s, 0) @ v.mT, s.mean()


def is_long(matrix: Tensor) -> bool:
    """Whether `long_parts` is for it: float32, one side 512 or more and at least four times the other."""
    most, least = max(matrix.shape), min(matrix.shape)
    return matrix.dtype == torch.float32 and most >= max(512, 4 * least)


def long_parts(matrix: Tensor, count: int | None = None) -> Parts:
    """U, S and V of a long matrix by the eigenvectors of A^T A in float64; of the `count` largest, or of all.

    As fast as LAPACK in float32, and more exact. Singular values that float32 does not tell from 0, up to
    max(shape) eps32 of the largest, have zeros as vectors on the longer side. U V^T of the others is off by
    about n eps64 / (max(shape) eps32)^2 at most, n being the smaller side: less than 1e-5 where `is_long`.

    Raises:
        LinAlgError: as LAPACK's SVD does, a value is not finite.
    """
    if not bool(matrix.isfinite().all()):  # which would count as no singular values, so as zeros
        raise torch.linalg.LinAlgError("the input matrix contains non-finite values")
    if matrix.shape[0] < matrix.shape[1]:
        v, s, u = long_parts(matrix.mT, count)
        return u, s, v
    a = matrix.double()
    squares, v = (part.flip(-1)[..., :count] for part in torch.linalg.eigh(gram(a)))
    s = squares.clamp_min(0).sqrt()
    known = s > s.max() * len(a) * torch.finfo(matrix.dtype).eps
    u = a @ torch.where(known, v / s, 0)
    return u.to(matrix), s.to(matrix), v.to(matrix)


def iterated_roots(square: Tensor, least: float) -> tuple[Tensor, Tensor] | None:
    """The root of a positive matrix and its inverse, by products alone; None if eigenvalues differ too much.

    Newton and Schulz's iteration for the sign, in the coupled form in which Y and Z become the root and the
    inverse root. Each step is scaled by the least eigenvalue that there may be, which halves their number.

    Args:
        square: the matrix, in float64.
        least: beside the largest root of an eigenvalue, the smallest for which the steps do.

    Source: Higham 2008, Functions of Matrices, equation 6.35; Chen & Chow 2014 for the scaling.
    """
    one = torch.eye(len(square)).to(square)
    norm = torch.linalg.matrix_norm(square)
    size = torch.minimum(norm, torch.linalg.matrix_norm(square, torch.inf))  # the largest is at most that
    share = float(norm**2 / square.trace() / size)  # and at least the norm's square over the trace
    if not 0 < share < math.inf:
        return None
    least *= math.sqrt(share)
    y, z, done = square / size, one, False
    while not done:
        done = 1 - least < CONVERGED
        scale = math.sqrt(3 / (1 + least + least**2))
        turn = torch.addmm(one, z, y, beta=1.5 * scale, alpha=-0.5 * scale**3)
        y, z = y @ turn, turn @ z
        least = 0.5 * scale * least * (3 - (scale * least) ** 2)
    if not bool((turn - one).abs().amax() < CONVERGED):
        return None
    return y * size.sqrt(), z / size.sqrt()


def spectrum(matrix: Tensor) -> Spectrum | None:
    """The eigenvalues of A^T A, and its eigenvectors; None where it is not for this."""
    if matrix.dtype != torch.float32 or not 256 <= matrix.shape[1] <= matrix.shape[0] or matrix.is_cuda:
        return None
    smallest, largest = matrix.aminmax()
    if not 1e-12 < max(-float(smallest), float(largest)) < 1e12:  # squares would be denormals, or not finite
        return None
    return Spectrum(gram(matrix))


def gram(a: Tensor) -> Tensor:
    """A^T A, by nine sixteenths of the products since it is symmetric."""
    size = a.shape[1]
    width = max(-(-size // 512), 1) * 64
    made = a.new_empty(size, size)
    for start in range(0, size, width):
        here, after = slice(start, start + width), slice(start + width, size)
        made[here, start:] = a[:, here].mT @ a[:, start:]
        made[after, here] = made[here, after].mT
    return made


def inverse_root(squares: Tensor, vectors: Tensor) -> Tensor:
    """(A^T A)^-1/2 from eigenvalues and eigenvectors, by nine sixteenths of the products."""
    return gram((vectors * squares.pow(-0.25)).mT)


def turned_parts(a: Tensor, squares: Tensor, vectors: Tensor, small: int) -> Parts | None:
    """U, S and V with the polar factor U V^T, where so many directions need float64.

    The columns of A V are nearly orthogonal then, whatever their lengths; None where they are not.
    """
    many = vectors[:, small:]
    few, made_few, turn = (part.to(a) for part in turned(a, vectors[:, :small], many, squares[small:]))
    made = a @ many
    v = torch.cat([few, torch.addmm(many, few, turn.mT)], 1)
    parts = orthonormal(torch.cat([made_few, torch.addmm(made, made_few, turn.mT)], 1))
    return (*parts, v) if parts else None


def turned(a: Tensor, few: Tensor, many: Tensor, squares: Tensor) -> Parts:
    """Few right singular vectors V, turned away from many others, A V, and the turn, in float64.

    It is right to first order. They are told apart by themselves then. The squares are those of the singular
    values of the others.
    """
    few = few.double()
    made = a.double() @ few
    turn = many.mT @ (a.mT @ made.to(a)) / squares[:, None]
    change = many @ turn
    few, made = few - change, made - a @ change
    own = own_directions(made)
    return few @ own, made @ own, turn.double() @ own


def own_directions(a: Tensor) -> Tensor:
    """The right singular vectors of a matrix of few columns, the largest first."""
    return torch.linalg.eigh(a.mT @ a).eigenvectors.flip(-1)


def orthonormal(b: Tensor) -> tuple[Tensor, Tensor] | None:
    """The polar factor of nearly orthogonal columns, and their lengths; None where they are not.

    B = Y S with Y^T Y = I + F has (B^T B)^1/2 = S + X with X_ij = s_i s_j F_ij / (s_i + s_j), and so the
    factor Y (I - C) with C_ij = F_ij s_i / (s_i + s_j), all but for the squares of F.
    """
    products = gram(b)
    s = products.diagonal().sqrt()
    skew = products / (s[:, None] * s)
    skew.diagonal().zero_()
    if not skew.abs().amax() <= MOST_SKEW:
        return None
    skew *= s[:, None] / (s[:, None] + s)
    return product(b, (torch.eye(len(s)).to(s) - skew) / s[:, None]), s
