"""Iso-C's mean(S) U V^T with and without a decomposition: ways to the polar factor U V^T beside LAPACK's SVD.

    python -m bench.polar --save

Matrices are float32 and look like sums of task vectors: of low rank with noise, or of all ranks with singular
values that decay to 1e-4 of the largest. Each way has processor time and the largest error, over the largest
entry, from LAPACK's SVD in float64. Iso-C leaves out directions that float32 does not tell from none, and so
does the SVD that it is compared with. Tall matrices are first reduced to the R of a QR before iterations.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from bench.report import machine, make_parser, publish, table
from mecha_exp.methods.gram import polar_and_sizes

SHAPES = ((320, 320), (640, 640), (1280, 1280), (2560, 640), (1280, 5120))
LEAST = 1e-7
"""What the iterations take as the least singular value beside the largest."""


def low_rank_and_noise(rows: int, columns: int) -> Tensor:
    """Sixteen directions above noise of entries that have nothing in common."""
    random = torch.Generator().manual_seed(0)
    left, right = (torch.randn(size, 16, generator=random, dtype=torch.float64) for size in (rows, columns))
    noise = torch.randn(rows, columns, generator=random, dtype=torch.float64)
    return (15 * left @ right.mT / math.sqrt(rows * columns) + noise / math.sqrt(columns)).float()


def decaying(rows: int, columns: int) -> Tensor:
    """Singular values from 1 to 1e-4, evenly on a logarithmic scale."""
    random, rank = torch.Generator().manual_seed(0), min(rows, columns)
    u, v = (
        torch.linalg.qr(torch.randn(size, rank, generator=random, dtype=torch.float64)).Q
        for size in (rows, columns)
    )
    return (u * torch.logspace(0, -4, rank, dtype=torch.float64) @ v.mT).float()


def by_svd(a: Tensor, cut: float = 0) -> Tensor:
    """mean(S) U V^T by LAPACK's SVD, without directions that are smaller beside the largest than a cut."""
    u, s, vh = torch.linalg.svd(a, full_matrices=False)
    return s.mean() * (u * (s > cut * s.max()) @ vh)


def by_corrected_gram(a: Tensor) -> Tensor:
    """What `iso_c` does."""
    factor, sizes = polar_and_sizes(a)
    return sizes.mean() * factor


def by_gram(a: Tensor) -> Tensor:
    """mean(S) A (A^T A)^-1/2 by the eigenvectors of A^T A; singular values that this loses count as 0."""
    squares, vectors = torch.linalg.eigh(a.mT @ a)
    sizes = squares.clamp_min(0).sqrt()
    inverse = torch.where(squares > squares.max() * len(squares) * torch.finfo(a.dtype).eps, 1 / sizes, 0)
    return sizes.mean() * (a @ (vectors * inverse @ vectors.mT))


def reduced(iterate: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """mean(S) U V^T of A = Q R by the polar factor of R, which Q turns into that of A."""

    def made(a: Tensor) -> Tensor:
        basis, square = torch.linalg.qr(a) if a.shape[0] > a.shape[1] else (None, a)
        polar = iterate(square)
        isotropic = (polar * square).sum() / len(square) * polar
        return isotropic if basis is None else basis @ isotropic

    return made


def newton_schulz(a: Tensor) -> Tensor:
    """The polar factor by X <- 3/2 r X - r^3/2 X X^T X, r for the least singular value (Chen & Chow 2014)."""
    x, least = a / torch.linalg.matrix_norm(a), LEAST
    while 1 - least > torch.finfo(a.dtype).eps:
        scale = math.sqrt(3 / (1 + least + least**2))
        x = 1.5 * scale * x - 0.5 * scale**3 * (x @ (x.mT @ x))
        least = min(0.5 * scale * least * (3 - (scale * least) ** 2), 1.0)
    return x


def qdwh(a: Tensor) -> Tensor:
    """The polar factor by dynamically weighted Halley iterations: QR at first, Cholesky afterwards.

    Source: Nakatsukasa, Bai & Gygi 2010.
    """
    x, least = a / torch.linalg.matrix_norm(a), LEAST
    eye = torch.eye(a.shape[1], dtype=a.dtype)
    while 1 - least > torch.finfo(a.dtype).eps:
        root = (4 * (1 - least**2) / least**4) ** (1 / 3)
        first = math.sqrt(1 + root)
        first += 0.5 * math.sqrt(8 - 4 * root + 8 * (2 - least**2) / (least**2 * math.sqrt(1 + root)))
        second = (first - 1) ** 2 / 4
        third = first + second - 1
        if third > 100:
            q = torch.linalg.qr(torch.cat([math.sqrt(third) * x, eye])).Q
            turned = q[: len(x)] @ q[len(x) :].mT / math.sqrt(third)
        else:
            factor = torch.linalg.cholesky(eye + third * (x.mT @ x))
            turned = torch.cholesky_solve(x.mT, factor).mT
        share = first - second / third
        x = second / third * x + share * turned
        least = min(least * (first + second * least**2) / (1 + third * least**2), 1.0)
    return x


WAYS: dict[str, tuple[Callable[[Tensor], Tensor], torch.dtype]] = {
    "LAPACK's SVD": (by_svd, torch.float32),
    "Iso-C": (by_corrected_gram, torch.float32),
    "Gram and eigenvectors, float64": (by_gram, torch.float64),
    "Gram and eigenvectors": (by_gram, torch.float32),
    "QDWH": (reduced(qdwh), torch.float32),
    "Newton-Schulz": (reduced(newton_schulz), torch.float32),
}


CUT = {"Iso-C": torch.finfo(torch.float32).eps}
"""Ways that leave out directions of up to so much times the longer side, beside the largest."""


def measured(way: str, matrix: Tensor, references: dict[float, Tensor], turns: int) -> str:
    """The least processor seconds of a way in so many turns, and its error."""
    function, dtype = WAYS[way]
    seconds = []
    for _ in range(turns):
        began = time.process_time()
        made = function(matrix.to(dtype)).float()
        seconds.append(time.process_time() - began)
    reference = references[CUT.get(way, 0)]
    error = float((made - reference).abs().max() / reference.abs().max())
    return f"{min(seconds):.2f} s, {error:.0e}"


def main() -> None:
    """Print the table."""
    parser = make_parser(__doc__)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [["matrix", *WAYS]]
    for spectrum in (low_rank_and_noise, decaying):
        for shape in SHAPES:
            matrix = spectrum(max(shape), min(shape))
            exact = matrix.double()
            references = {cut: by_svd(exact, cut * max(shape)) for cut in (0, *CUT.values())}
            cells = (measured(way, matrix, references, options.turns) for way in WAYS)
            name = spectrum.__name__.replace("_", " ")
            rows.append([f"{shape[0]} x {shape[1]}, {name}", *cells])
            sys.stderr.write(f"{rows[-1]}\n")
    said = (
        f"Processor time, the least of {options.turns} turns, and the largest error\nover the largest entry"
    )
    text = f"{table(rows)}\n\n{machine()}, one thread. {said}, from LAPACK's SVD in float64."
    publish("Iso-C without a decomposition", text, save=options.save)


if __name__ == "__main__":
    main()
