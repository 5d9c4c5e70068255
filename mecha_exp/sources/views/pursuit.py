"""Orthogonal matching pursuit: vectors as sums of a few others, chosen one after the other."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from mecha_exp.system.cores import available_cores

SMALLEST = 1e-6
"""The part of a vector's length below which a residual is rounding in float32, and is not followed."""

_BLOCK_BYTES = 1 << 27
"""The memory in which the vectors of a block are approximated."""


def sparse_sums(
    read: Callable[[int, int], torch.Tensor], total: int, atoms: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Approximate many vectors by sums of atoms, block by block.

    Blocks have a fixed size and one thread each, so that the result is the same for any number of threads.

    Args:
        read: gives the vectors first, ..., end - 1, as [end - first, width].
        total: how many vectors there are.
        atoms: the vectors [atoms, width] that are added, in float32.
        count: how many of them a sum has at most.

    Returns:
        the atoms [total, count] of each sum, and their coefficients [total, count] in float64.
    """
    step = max(1, _BLOCK_BYTES // (8 * count * (atoms.shape[1] + count) + 4 * len(atoms)))
    firsts = range(0, total, step)

    def approximate(first: int) -> tuple[torch.Tensor, torch.Tensor]:
        return pursue(read(first, min(first + step, total)), atoms, count)

    with ThreadPoolExecutor(available_cores(), initializer=partial(torch.set_num_threads, 1)) as pool:
        places, coefficients = zip(*pool.map(approximate, firsts), strict=True)
    return torch.cat(places), torch.cat(coefficients)


def pursue(targets: torch.Tensor, atoms: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The atoms and coefficients of orthogonal matching pursuit.

    Each step takes the atom with the largest |<atom, residual>|, and the residual is what least squares over
    all atoms so far leaves of the target. Atoms have their own lengths there, as in the paper's code. Inner
    products are float32, the rest is float64. A target whose residual is below `SMALLEST` of it, or which
    only atoms that depend on those it has would bring nearer, gets no more: the remaining coefficients are 0.

    Args:
        targets: [targets, width].
        atoms: [atoms, width] in float32.
        count: how many steps, at most as many as there are atoms.

    Returns:
        the atoms [targets, count] of each target, and their coefficients [targets, count] in float64.

    Source: Goddard and Fernandes Neto, arXiv:2506.06607; Pati et al. 1993. The authors' code is mergekit,
    tokensurgeon/omp.py.
    """
    residual = targets.double()
    enough = SMALLEST * residual.norm(dim=1)
    places = torch.zeros((len(targets), count), dtype=torch.int64)
    basis = torch.zeros((len(targets), count, targets.shape[1]), dtype=torch.float64)
    triangle = torch.eye(count, dtype=torch.float64).repeat(len(targets), 1, 1)
    heights = torch.zeros((len(targets), count, 1), dtype=torch.float64)
    goes_on = enough > 0
    for step in range(count):
        chosen = _nearest(residual, atoms, places[:, :step])
        new = atoms[chosen].double()
        across, along = _orthogonal(new, basis[:, :step])
        length = across.norm(dim=1)
        goes_on &= (residual.norm(dim=1) > enough) & (length > SMALLEST * new.norm(dim=1))
        if not goes_on.any():
            break
        at = goes_on.nonzero()[:, 0]
        places[at, step] = chosen[at]
        basis[at, step] = across[at] / length[at, None]
        triangle[at, :step, step], triangle[at, step, step] = along[at], length[at]
        heights[:, step, 0] = (basis[:, step] * residual).sum(1)
        residual -= heights[:, step] * basis[:, step]
    return places, torch.linalg.solve_triangular(triangle, heights, upper=True)[:, :, 0]


def _nearest(residual: torch.Tensor, atoms: torch.Tensor, taken: torch.Tensor) -> torch.Tensor:
    """The atom with the largest inner product for each residual, besides those that are taken."""
    products = (residual.to(atoms.dtype) @ atoms.T).abs_()
    return products.scatter_(1, taken, -1.0).argmax(1)


def _orthogonal(vectors: torch.Tensor, basis: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The part of each vector across its basis [vectors, k, width], and its components along it."""
    across, along = vectors, torch.zeros(basis.shape[:2], dtype=vectors.dtype)
    for _ in range(2):  # once leaves what rounding adds to nearly dependent vectors
        components = (basis @ across[:, :, None])[:, :, 0]
        across = across - (components[:, None] @ basis)[:, 0]
        along = along + components
    return across, along
