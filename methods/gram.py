"""Polar factors and largest singular parts by Gram matrices, in a fraction of the time of LAPACK's SVD.

The eigenvalues of A^T A are the squares of A's singular values s, so float32 tells them apart less well. What
this loses is corrected, and what cannot be corrected is left to float64 or LAPACK; so are float64 and small
matrices. A GPU takes as long for eigenvectors in float64 as in float32, so it always takes float64.
`python -m bench.polar` measures errors and time.
"""

import torch
from torch import Tensor

from mecha_exp.methods.spectral import singular_parts

EVEN = 1e-2
"""Beside the largest: eigenvalues of which none is smaller are exact enough in float32."""
LEAST = 2e-4
"""Beside the largest: smaller eigenvalues have vectors that float64 must find."""
MOST_SKEW = 3e-3
"""Cosines between columns, up to which a correction may leave out their squares."""
BLURRED = 4e-2
"""Beside the largest: vectors of smaller eigenvalues are turned away from the others."""
MOST_STEPS = 16
"""After so many, `iterated_root` leaves directions that float32 hardly tells from none to eigenvectors."""
CONVERGED = 1e-9
"""The change of a step after which one more would change nothing that float32 sees."""
WINDOW = 32
"""So many vectors on each side of a cut are told apart in float64."""

Parts = tuple[Tensor, Tensor, Tensor]
"""U, S and V."""


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
    found = spectrum(matrix)
    if found and (root := inverse_root(*found)) is not None:
        return matrix @ root, found[0].sqrt()
    u, s, v = (found and turned_parts(matrix, *found)) or exact_parts(matrix)
    known = s > s.max() * len(matrix) * torch.finfo(s.dtype).eps
    return u * known @ v.mT, s


def frame(matrix: Tensor) -> tuple[Tensor, Tensor | None]:
    """The nearest matrix with orthonormal columns; or the matrix, and by what to multiply it for that."""
    found = spectrum(matrix)
    if found and (root := inverse_root(*found)) is not None:
        return matrix, root
    if not matrix.numel():
        return matrix, None
    if found and (parts := turned_parts(matrix, *found)):
        return parts[0] @ parts[2].mT, None
    if is_by_float64(matrix):
        return matrix, exact_root(matrix)
    u, _, vh = singular_parts(matrix)
    return u @ vh, None


def largest_parts(matrix: Tensor, count: int) -> Parts:
    """U, S and V of the `count` largest singular values.

    Raises:
        LinAlgError: a value is not finite.
    """
    if matrix.shape[0] < matrix.shape[1]:
        v, s, u = largest_parts(matrix.mT, count)
        return u, s, v
    found = spectrum(matrix) if count else None
    if not found or not found[0][-count] > found[0][-1] * LEAST:
        return exact_parts(matrix, count)
    squares, v = (part.flip(-1) for part in found)
    near = v[:, max(count - WINDOW, 0) : count + WINDOW]
    basis = torch.linalg.qr(near.double()).Q
    near.copy_(basis @ own_directions((matrix @ basis.to(matrix)).double()))
    kept, others = v[:, :count].contiguous(), v[:, count:]
    if squares[count - 1] < squares[0] * BLURRED:
        turn = others.mT @ (matrix.mT @ (matrix @ kept)) / (squares[:count] - squares[count:, None])
        turn[:WINDOW, -WINDOW:] = 0
        kept = kept + others @ turn
    made = orthonormal(matrix @ kept)
    return (*made, kept) if made else exact_parts(matrix, count)


def exact_parts(matrix: Tensor, count: int | None = None) -> Parts:
    """U, S and V of the `count` largest singular values, or of all, by float64 or LAPACK."""
    if is_long(matrix) or is_by_float64(matrix):
        return long_parts(matrix, count)
    u, s, vh = singular_parts(matrix)
    return u[:, :count], s[:count], vh[:count].mT


def is_by_float64(matrix: Tensor) -> bool:
    """Whether eigenvectors in float64 cost no more than in float32: on a GPU."""
    return matrix.is_cuda and matrix.dtype == torch.float32


def exact_root(a: Tensor) -> Tensor:
    """(A^T A)^-1/2 in float64 on the directions that float32 tells from none, and 0 on the others."""
    square = gram(a.double())
    if (root := iterated_root(square)) is not None:
        return root.to(a)
    squares, v = torch.linalg.eigh(square)
    s = squares.clamp_min(0).sqrt()
    known = s > s.max() * max(a.shape) * torch.finfo(a.dtype).eps
    return (v * torch.where(known, 1 / s, 0) @ v.mT).to(a)


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


def iterated_root(square: Tensor) -> Tensor | None:
    """The inverse root of a positive matrix by products alone; None if eigenvalues differ too much for that.

    Newton's iteration for the sign in its coupled form: Y and Z become its root and the inverse root.
    An eigenvalue of x of the largest takes about log(1 / x) / log(9 / 4) steps, and four more.
    Source: Higham 2008, Functions of Matrices, equation 6.35.
    """
    size = torch.linalg.matrix_norm(square)
    y, z, one = square / size, torch.eye(len(square)).to(square), torch.eye(len(square)).to(square)
    for _ in range(MOST_STEPS):
        turn = 1.5 * one - 0.5 * z @ y
        y, z = y @ turn, turn @ z
        if float((turn - one).abs().amax()) < CONVERGED:
            return z / size.sqrt()
    return None


def spectrum(matrix: Tensor) -> tuple[Tensor, Tensor] | None:
    """The eigenvalues of A^T A, ascending, and its eigenvectors; None where it is not for this."""
    if matrix.dtype != torch.float32 or not 256 <= matrix.shape[1] <= matrix.shape[0] or matrix.is_cuda:
        return None
    if not 1e-12 < float(matrix.abs().amax()) < 1e12:  # squares would be denormals, or not finite
        return None
    return torch.linalg.eigh(gram(matrix))


def gram(a: Tensor) -> Tensor:
    """A^T A, by five eighths of the products since it is symmetric."""
    size = a.shape[1]
    width = max(-(-size // 256), 1) * 64
    made = a.new_empty(size, size)
    for start in range(0, size, width):
        here, after = slice(start, start + width), slice(start + width, size)
        made[here, start:] = a[:, here].mT @ a[:, start:]
        made[after, here] = made[here, after].mT
    return made


def inverse_root(squares: Tensor, vectors: Tensor) -> Tensor | None:
    """(A^T A)^-1/2, which makes A its polar factor; None where singular values differ more than tenfold.

    An error e in A^T A moves the polar factor by e / (s_j (s_i + s_j)) between the directions i and j, which
    is some eps (s_max / s_min)^2 / 2 at most.
    """
    if not squares[0] > squares[-1] * EVEN:
        return None
    return vectors / squares.sqrt() @ vectors.mT


def turned_parts(a: Tensor, squares: Tensor, vectors: Tensor) -> Parts | None:
    """U, S and V with the polar factor U V^T; None where a quarter of the directions need float64, or more.

    Those are turned away from the others, to first order, and told apart by themselves. Then the columns of
    A V are nearly orthogonal, whatever their lengths; None where they are not.
    """
    small = int((squares < squares[-1] * LEAST).sum())
    if small > len(squares) // 4:
        return None
    few, many = vectors[:, :small].double(), vectors[:, small:]
    made_few, made = a.double() @ few, a @ many
    turn = many.mT @ (a.mT @ made_few.float()) / squares[small:, None]
    few, made_few = few - (many @ turn).double(), made_few - (made @ turn).double()
    own = own_directions(made_few)
    few, made_few, turn = (few @ own).float(), (made_few @ own).float(), turn @ own.float()
    v = torch.cat([few, torch.addmm(many, few, turn.mT)], 1)
    parts = orthonormal(torch.cat([made_few, torch.addmm(made, made_few, turn.mT)], 1))
    return (*parts, v) if parts else None


def own_directions(a: Tensor) -> Tensor:
    """The right singular vectors of a matrix of few columns, the largest first."""
    return torch.linalg.eigh(a.mT @ a).eigenvectors.flip(-1)


def orthonormal(b: Tensor) -> tuple[Tensor, Tensor] | None:
    """The polar factor of nearly orthogonal columns, and their lengths; None where they are not.

    B = Y S with Y^T Y = I + F has (B^T B)^1/2 = S + X with X_ij = s_i s_j F_ij / (s_i + s_j), and so the
    factor Y (I - C) with C_ij = F_ij s_i / (s_i + s_j), all but for the squares of F.
    """
    s = torch.linalg.vector_norm(b, dim=0)
    y = b / s
    skew = gram(y)
    skew.diagonal().sub_(1)
    if not skew.abs().amax() <= MOST_SKEW:
        return None
    skew *= s[:, None] / (s[:, None] + s)
    return torch.addmm(y, y, skew, alpha=-1), s
