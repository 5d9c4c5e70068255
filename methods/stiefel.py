"""Rotations that take one orthonormal frame to another, and their logarithms: ways on the Stiefel manifold.

Source: Edelman, Arias & Smith 1998 (the exponential); Zimmermann 2017, arXiv:1604.05054 (its inverse).
"""

import torch
from torch import Tensor


def between_frames(frame: Tensor, way: tuple[Tensor, Tensor], part: float) -> Tensor:
    """The frame that a part of a `logarithm` leads to: 0 is the frame itself, 1 the other end.

    Args:
        frame: orthonormal columns, [n, p] with p < n.
        way: the logarithm that begins at the frame.
        part: how far to go, any number.
    """
    return turned(frame.mT, way, part).mT


def turned(rows: Tensor, way: tuple[Tensor, Tensor], part: float) -> Tensor:
    """Rows [m, n], turned by a part of the rotation of a `logarithm`, which leaves what is outside of it."""
    axes, skew = way
    change = torch.linalg.matrix_exp(part * skew) - torch.eye(len(skew)).to(skew)
    return rows + (rows @ axes) @ change.mT @ axes.mT


def logarithm(frame: Tensor, other: Tensor, eps: float = 1e-8, max_iters: int = 100) -> tuple[Tensor, Tensor]:
    """The way from a frame to another: axes [n, q] of what is turned, and a skew-symmetric matrix [q, q].

    Its exponential is a rotation within the axes that takes the frame to the other. Of all these rotations it
    is the one of a geodesic, whose last block is zero.

    Args:
        frame, other: orthonormal columns, [n, p] with p < n.
        eps: what may be left in that block, if the dtype can tell it from 0.
        max_iters: how often it is made smaller at most. The rotation takes frame to other in any case.
    """
    count = frame.shape[1]
    if not count:
        return frame, frame.new_zeros(0, 0)
    axes = _axes(frame, other)
    known = torch.linalg.qr(axes.mT @ other).Q  # orthonormal but for rounding errors
    known = known * (known * (axes.mT @ other)).sum(0).sign()
    rest = torch.linalg.qr(known, mode="complete").Q[:, count:]
    u, _, vh = torch.linalg.svd(rest[count:])
    rest = rest @ vh.mT @ u.mT
    if torch.linalg.slogdet(torch.cat([known, rest], 1))[0] < 0:
        rest = torch.cat([rest[:, :-1], -rest[:, -1:]], 1)
    eps = max(eps, len(known) * torch.finfo(frame.dtype).eps)
    for _ in range(max_iters):
        whole = _rotation_logarithm(torch.cat([known, rest], 1))
        corner, below = whole[count:, count:], whole[count:, :count]
        if corner.norm() <= eps:
            break
        values, vectors = torch.linalg.eigh(below @ below.mT / 12 - 0.5 * torch.eye(len(below)).to(below))
        sums = values + values.unsqueeze(1)
        step = vectors @ ((vectors.mT @ corner @ vectors) / sums) @ vectors.mT
        rest = rest @ torch.linalg.matrix_exp(step)
    return axes, _rotation_logarithm(torch.cat([known, rest], 1))


def _axes(frame: Tensor, other: Tensor) -> Tensor:
    """The frame, and orthonormal columns for what of the other lies outside, as many as there is room for."""
    room = min(frame.shape[0] - frame.shape[1], frame.shape[1])
    outside = other - frame @ (frame.mT @ other)
    both = torch.linalg.qr(torch.cat([frame, outside], 1)).Q
    return torch.cat([frame, both[:, frame.shape[1] :][:, :room]], 1)


def _rotation_logarithm(rotation: Tensor) -> Tensor:
    """The skew-symmetric matrix whose exponential a rotation is."""
    values, vectors = torch.linalg.eig(rotation)
    axes, _ = torch.linalg.qr(vectors)  # orthonormal, though eigenvectors of one value need not be
    logged = (axes * (1j * values.angle()) @ axes.mH).real
    return (logged - logged.mT) / 2
