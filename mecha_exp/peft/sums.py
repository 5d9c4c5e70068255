"""Weighted sums of low-rank products: exactly by concatenating factors, or cut to a rank with its error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Term:
    """A product w B A of a sum.

    Attributes:
        weight: w, with the scale of the adapter in it.
        down: A, of shape [rank, inputs].
        up: B, of shape [outputs, rank].
    """

    weight: float
    down: Tensor
    up: Tensor


@dataclass(frozen=True)
class Sum:
    """The sum of w_i B_i A_i, which is never formed: only its factors are, in float64."""

    terms: Sequence[Term]

    @property
    def rank(self) -> int:
        """The rank of the concatenated factors: the sum of all ranks."""
        return sum(term.down.shape[0] for term in self.terms)

    def concatenated(self) -> tuple[Tensor, Tensor]:
        """A and B with B A equal to the sum: all A_i below each other, all w_i B_i beside each other."""
        down = torch.cat([term.down.double() for term in self.terms])
        up = torch.cat([term.weight * term.up.double() for term in self.terms], dim=1)
        return down, up

    def nearest(self, rank: int) -> tuple[Tensor, Tensor]:
        """A and B of the nearest matrix of a rank: sqrt(S) V^T and U sqrt(S) of its singular parts."""
        u, s, vh = self._parts
        root = s[:rank].sqrt()
        return root[:, None] * vh[:rank], u[:, :rank] * root

    def squared_error(self, rank: int | None) -> float:
        """The squared norm of what a rank leaves out; 0 for concatenated factors."""
        return 0.0 if rank is None else float(self._parts[1][rank:].square().sum())

    @property
    def squared_norm(self) -> float:
        """The squared Frobenius norm of the sum."""
        return float(self._parts[1].square().sum())

    @cached_property
    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """U, S, V^T of the sum, from a small matrix between the bases of its rows and columns."""
        down, up = self.concatenated()
        left, upper = torch.linalg.qr(up)
        right, lower = torch.linalg.qr(down.mT)
        u, s, vh = torch.linalg.svd(upper @ lower.mT, full_matrices=False)
        return left @ u, s, vh @ right.mT
