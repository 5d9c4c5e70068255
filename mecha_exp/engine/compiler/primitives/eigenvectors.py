"""The largest eigenvalues of symmetric matrices and their eigenvectors, without the work for the others.

LAPACK's solvers that torch calls always find all vectors. Here the matrix is made tridiagonal as LAPACK does
it, half of the work by matrix products; bisection gives the eigenvalues that are asked for, and a twisted
factorisation each eigenvector, both in float64. So a third of the vectors of 1280 x 1280 takes half of the
time, and vectors are as orthogonal as float32 can tell.
"""

from __future__ import annotations

from array import array
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from mecha_exp.engine.compiler.jit import LoopText, can_compile, compiled
from mecha_exp.engine.compiler.object_file import Loop

LANES = 16
"""Eigenvectors that are found side by side."""
PANEL, BLOCK = 32, 256
"""Rows that are made tridiagonal before a product, and rows of a product. The bits depend on them."""
SMALLEST = 512
"""Rows of a matrix that is not left to LAPACK, which is as fast for fewer."""
NEAREST = 2**-30
"""Beside the largest: vectors of eigenvalues that are nearer to each other are blurred by float64, too."""


class Spectrum:
    """The eigenvalues and eigenvectors of a symmetric matrix, as many of the largest as are asked for.

    Of matrices of 512 rows or more, in float32 and in the processor's memory, what is below the diagonal is
    not read. Others are left to `torch.linalg.eigh`, and so are vectors of which two have eigenvalues that
    are as good as equal.

    Raises:
        LinAlgError: a value is not finite, in a matrix that is not left to LAPACK.
    """

    def __init__(self, matrix: Tensor) -> None:
        self._matrix = matrix
        self._loops = _loops(matrix)
        turned = _tridiagonal(matrix, self._loops[0]) if self._loops else None
        if turned and not turned.bound() < torch.inf:
            message = "the matrix contains values that are not finite"
            raise torch.linalg.LinAlgError(message)  # type: ignore[attr-defined]
        self._turned = turned if turned and turned.bound() > 0 else None
        self._values: Tensor | None = None  # the largest ones that were asked for

    def values(self, count: int | None = None) -> Tensor:
        """The `count` largest eigenvalues, or all, ascending."""
        count = len(self._matrix) if count is None else count
        return (self._exact(count) if self._turned else self._by_lapack[0][-count:]).to(self._matrix)

    def parts(self, count: int | None = None) -> tuple[Tensor, Tensor]:
        """The `count` largest eigenvalues, or all, ascending, and their eigenvectors as columns."""
        count = len(self._matrix) if count is None else count
        if self._turned:
            values = self._exact(count)
            if count < 2 or values.diff().amin() > values.abs().amax() * NEAREST:
                return values.to(self._matrix), self._turned.vectors(values, self._loops[2])
        values, vectors = self._by_lapack
        return values[-count:], vectors[:, -count:]

    @cached_property
    def _by_lapack(self) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(self._matrix, UPLO="U")
        return values, vectors

    def _exact(self, count: int) -> Tensor:
        """The largest eigenvalues in float64, which are kept."""
        assert self._turned
        if self._values is None or len(self._values) < count:
            self._values = self._turned.values(count, self._loops[1])
        return self._values[-count:]


class Tridiagonal(NamedTuple):
    """A symmetric matrix after reflections that leave it only a diagonal and what is beside it.

    Attributes:
        diagonal, beside: the matrix, in float64.
        reflectors, scales: the reflections, one after the other I - scale v v^T, v a row of reflectors.
    """

    diagonal: Tensor
    beside: Tensor
    reflectors: Tensor
    scales: Tensor

    def bound(self) -> float:
        """What no eigenvalue exceeds (Gershgorin)."""
        around = torch.nn.functional.pad(self.beside.abs(), (1, 1))
        return float((self.diagonal.abs() + around[1:] + around[:-1]).amax())

    def values(self, count: int, bisect: Loop) -> Tensor:
        """The `count` largest eigenvalues, ascending."""
        size, bound = len(self.diagonal), self.bound()
        squares = self.beside.square().clamp_min_(bound**2 * 1e-40)
        low, high = (self.diagonal.new_full((count,), end) for end in (-bound, bound))
        room = self.diagonal.new_empty(2, count)
        _call(bisect, size - count, count, torch.tensor([size]), self.diagonal, squares, low, high, *room)
        return (low + high) / 2

    def vectors(self, values: Tensor, solve: Loop) -> Tensor:
        """The eigenvectors of the matrix before its reflections, as columns of float32."""
        size, count = len(self.diagonal), len(values)
        vectors = self.scales.new_empty(size, count)
        room, of_lanes = self.diagonal.new_empty(3, size * LANES), self.diagonal.new_empty(2, LANES)
        sizes, least = torch.tensor([size, count]), self.diagonal.new_tensor([self.bound() * 1e-30])
        padded = torch.nn.functional.pad(values, (0, LANES), value=float(values[-1]))
        _call(solve, 0, count, sizes, self.diagonal, self.beside, padded, least, *room, *of_lanes, vectors)
        # from the right, where the layout of rows is LAPACK's
        turn = partial(torch.ormqr, self.reflectors[:, 1:].mT, self.scales, left=False, transpose=True)
        vectors[1:] = turn(vectors[1:].mT).mT
        return vectors


def _loops(matrix: Tensor) -> list[Loop]:
    """The loops for a matrix; none where it is left to LAPACK."""
    is_plain = type(matrix) is Tensor and matrix.dtype == torch.float32 and matrix.device.type == "cpu"
    if not is_plain or len(matrix) < SMALLEST or not can_compile():
        return []
    loops = [loop for text in (_REDUCING, _BISECTING, _SOLVING) if (loop := compiled(text))]
    return loops if len(loops) == len((_REDUCING, _BISECTING, _SOLVING)) else []


def _tridiagonal(matrix: Tensor, reduce: Loop) -> Tridiagonal:
    """The matrix after its reflections, which are applied to later rows by products."""
    size = len(matrix)
    a = matrix.clone(memory_format=torch.contiguous_format)
    diagonal, beside = a.new_zeros(2, size, dtype=torch.float64)
    reflectors, scales = a.new_zeros(size - 1, size), a.new_zeros(size - 1)
    sizes = torch.tensor([size])
    for first in range(0, size, PANEL):
        after = min(first + PANEL, size)
        sides = a.new_zeros(2, PANEL, size)
        _call(reduce, first, after - first, sizes, a, *sides, reflectors, scales, diagonal, beside)
        both, turned = sides.flatten(0, 1), sides.flip(0).flatten(0, 1)
        for start in range(after, size, BLOCK):
            rows = slice(start, start + BLOCK)
            a[rows, start:].addmm_(both[:, rows].mT, turned[:, start:], alpha=-1)
    return Tridiagonal(diagonal, beside[:-1], reflectors, scales)


def _call(loop: Loop, start: int, count: int, *runs: Tensor) -> None:
    """Have a loop work on tensors, which are contiguous."""
    table = array("q", [run.data_ptr() for run in runs])
    loop(start, count, table.buffer_info()[0])


def _text(kernel: str, runs: list[str], lines: list[str]) -> LoopText:
    """A loop that calls a kernel with the runs of its table, the first of which is of sizes."""
    return LoopText(
        "from numba import float32, float64, int64\n"
        f"from mecha_exp.engine.compiler.kernels.tridiagonal import {kernel}, array_at\n\n"
        "def loop(start, count, table):\n"
        f"    places = array_at(table, {len(runs) + 1}, int64)\n"
        "    sizes = array_at(places[0], 2, int64)\n"
        "    size = sizes[0]\n"
        + "".join(f"    {run.format(f'places[{n}]')}\n" for n, run in enumerate(runs, 1))
        + "".join(f"    {line}\n" for line in lines),
        room=0,
    )


_REDUCING = _text(
    "reduce_rows",
    [
        "a = array_at({}, size * size, float32)",
        "v = array_at({}, count * size, float32)",
        "w = array_at({}, count * size, float32)",
        "reflectors = array_at({}, (size - 1) * size, float32)",
        "scales = array_at({}, size - 1, float32)",
        "diagonal = array_at({}, size, float64)",
        "beside = array_at({}, size - 1, float64)",
    ],
    ["reduce_rows(start, count, size, a, v, w, reflectors, scales, diagonal, beside)"],
)
_BISECTING = _text(
    "bisect",
    [
        "diagonal = array_at({}, size, float64)",
        "squares = array_at({}, size - 1, float64)",
        *(f"{name} = array_at({{}}, count, float64)" for name in ("low", "high", "pivots", "below")),
    ],
    ["bisect(start, diagonal, squares, low, high, pivots, below)"],
)
_SOLVING = _text(
    "solve",
    [
        "diagonal = array_at({}, size, float64)",
        "beside = array_at({}, size - 1, float64)",
        f"values = array_at({{}}, count + {LANES}, float64)",
        "least = array_at({}, 1, float64)",
        *(f"{name} = array_at({{}}, size * {LANES}, float64)" for name in ("down", "up", "x")),
        *(f"{name} = array_at({{}}, {LANES}, float64)" for name in ("twists", "lengths")),
        "vectors = array_at({}, size * count, float32)",
    ],
    [
        f"for column in range(0, count, {LANES}):",
        f"    lanes = values[column : column + {LANES}]",
        "    solve(diagonal, beside, lanes, least[0], down, up, x, twists, lengths, vectors, count, column)",
    ],
)
