"""The way from one orthonormal frame to another, on the Stiefel manifold.

Source: Edelman, Arias & Smith 1998 (the exponential); Zimmermann 2017, arXiv:1604.05054 (its inverse).
"""

import torch
from torch import Tensor


def between_frames(frame: Tensor, way: Tensor, part: float) -> Tensor:
    """The frame that a part of a `logarithm` leads to: 0 is the frame itself, 1 the other end.

    Args:
        frame: orthonormal columns, [n, p] with p < n.
        way: a tangent at the frame, [n, p].
        part: how far to go, any number.
    """
    count = frame.shape[1]
    tangent = part * way
    inside = frame.mT @ tangent
    outside, lengths = _outside(tangent - frame @ inside)
    empty = lengths.new_zeros(len(lengths), len(lengths))
    moved = torch.linalg.matrix_exp(
        torch.cat([torch.cat([inside, -lengths.mT], 1), torch.cat([lengths, empty], 1)])
    )
    return frame @ moved[:count, :count] + outside @ moved[count:, :count]


def logarithm(frame: Tensor, other: Tensor, eps: float = 1e-8, max_iters: int = 100) -> Tensor:
    """The tangent at a frame that leads to another one by `between_frames`.

    Args:
        frame, other: orthonormal columns, [n, p] with p < n.
        eps: what may be left in the block that a tangent does not have, if the dtype can tell it from 0.
        max_iters: how often it is made smaller at most.
    """
    count = frame.shape[1]
    if not count:
        return torch.zeros_like(frame)
    along = frame.mT @ other
    outside, lengths = _outside(other - frame @ along)
    known = torch.cat([along, lengths])
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
    return frame @ whole[:count, :count] + outside @ whole[count:, :count]


def _outside(residual: Tensor) -> tuple[Tensor, Tensor]:
    """An orthonormal frame of what lies outside, of as many columns as there is room for, and coordinates."""
    room = min(residual.shape[0] - residual.shape[1], residual.shape[1])
    q, r = torch.linalg.qr(residual)
    return q[:, :room], r[:room]


def _rotation_logarithm(rotation: Tensor) -> Tensor:
    """The skew-symmetric matrix whose exponential a rotation is."""
    values, vectors = torch.linalg.eig(rotation)
    axes, _ = torch.linalg.qr(vectors)  # orthonormal, though eigenvectors of one value need not be
    logged = (axes * (1j * values.angle()) @ axes.mH).real
    return (logged - logged.mT) / 2
