"""Eigenvectors by loops are orthonormal and exact to the rounding of float32, or LAPACK's."""

import pytest
import torch
from torch import Tensor

from mecha_exp.engine.compiler.primitives import eigenvectors
from mecha_exp.engine.compiler.primitives.eigenvectors import LANES, PANEL, SMALLEST, Spectrum

EPS = torch.finfo(torch.float32).eps


def drawn(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def with_signs(size: int) -> Tensor:
    made = drawn(size, size)
    return made + made.mT


def spiked(size: int) -> Tensor:
    return products(size) + 50 * drawn(size, 3) @ drawn(size, 3).mT


def products(size: int) -> Tensor:
    return drawn(size + 30, size).mT @ drawn(size + 30, size)


def diagonal(size: int) -> Tensor:
    """No row of it has anything to be reflected."""
    return torch.linspace(-1, 2, size)[
        torch.randperm(size, generator=torch.Generator().manual_seed(0))
    ].diag()


def of_blocks(size: int) -> Tensor:
    """It falls into parts that have nothing in common."""
    return torch.block_diag(with_signs(100), products(size - 101) / 9, torch.tensor([[7.0]]))


@pytest.fixture
def no_lapack(monkeypatch):
    monkeypatch.setattr(torch.linalg, "eigh", None)


@pytest.mark.parametrize("size", [SMALLEST, SMALLEST + PANEL // 2 + 1])
@pytest.mark.parametrize("made", [products, with_signs, spiked, diagonal, of_blocks])
@pytest.mark.parametrize("count", [1, LANES, 171, None])
def test_the_largest_parts_are_those_of_float64(size, made, count, no_lapack):
    matrix = made(size)

    values, vectors = Spectrum(matrix).parts(count)

    exact = torch.linalg.eigvalsh(matrix.double())[-len(values) :]
    largest = float(torch.linalg.eigvalsh(matrix.double()).abs().max())
    turned = matrix.double() @ vectors.double() - vectors.double() * values.double()
    assert len(values) == (count or size)
    assert vectors.shape == (size, len(values))
    assert (values.double() - exact).abs().max() <= 8 * EPS * largest
    assert turned.norm(dim=0).max() <= 24 * EPS * largest
    torch.testing.assert_close(vectors.mT @ vectors, torch.eye(len(values)), rtol=0, atol=8 * EPS)


def test_they_are_more_exact_than_lapacks():
    matrix = products(700)

    by_loops, by_lapack = Spectrum(matrix).parts()[1], torch.linalg.eigh(matrix)[1]

    off = [float((v.mT @ v - torch.eye(700)).abs().max()) for v in (by_loops, by_lapack)]
    assert off[0] < off[1]


def test_values_alone_are_those_of_the_parts():
    spectrum = Spectrum(products(600))

    few, values, (every, _) = spectrum.values(9), spectrum.values(), spectrum.parts()

    assert torch.equal(values, every)
    assert torch.equal(few, every[-9:])


def test_what_is_below_the_diagonal_is_not_read(no_lapack):
    matrix = products(600)
    above = matrix.triu() + torch.full_like(matrix, torch.nan).tril(-1)

    expected, made = (Spectrum(given).parts(50) for given in (matrix, above))

    assert all(map(torch.equal, made, expected))


@pytest.mark.parametrize(
    "matrix",
    [torch.eye(600), torch.zeros(600, 600), torch.block_diag(*[products(300)] * 2)],
    ids=["all equal", "zeros", "in pairs"],
)
def test_equal_eigenvalues_have_the_vectors_of_lapack(matrix):
    values, vectors = Spectrum(matrix).parts()

    assert torch.equal(vectors, torch.linalg.eigh(matrix, UPLO="U").eigenvectors)
    assert torch.equal(values, torch.linalg.eigh(matrix, UPLO="U").eigenvalues)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_has_no_parts(value):
    matrix = products(600)
    matrix[7, 9] = matrix[9, 7] = value

    with pytest.raises(torch.linalg.LinAlgError, match="contains values that are not finite"):
        Spectrum(matrix)


def test_small_matrices_and_other_dtypes_are_left_to_lapack():
    for matrix in (products(SMALLEST - 1), products(SMALLEST).double()):
        expected = torch.linalg.eigh(matrix, UPLO="U")

        values, vectors = Spectrum(matrix).parts(40)

        assert torch.equal(values, expected.eigenvalues[-40:])
        assert torch.equal(vectors, expected.eigenvectors[:, -40:])


def test_without_a_compiler_lapack_finds_the_same(monkeypatch):
    matrix = products(560)
    values, vectors = Spectrum(matrix).parts(20)

    monkeypatch.setattr(eigenvectors, "can_compile", lambda: False)
    others, by_lapack = Spectrum(matrix).parts(20)

    torch.testing.assert_close(values, others, rtol=1e-5, atol=0)
    torch.testing.assert_close((vectors.mT @ by_lapack).abs(), torch.eye(20), rtol=0, atol=2e-4)
