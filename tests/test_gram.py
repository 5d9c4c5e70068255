"""Singular parts and polar factors by Gram matrices are off by 1e-5 at most, or by no more than LAPACK's."""

import math

import pytest
import torch
from torch import Tensor

import mecha_exp as m
from mecha_exp.methods import gram

SHAPES = [(320, 320), (700, 300), (300, 400), (2100, 260), (257, 1100), (530, 530), (1100, 515)]
EPS = torch.finfo(torch.float32).eps


def drawn(rows: int, columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)


def with_spikes(rows: int, columns: int, seed: int = 0, height: float = 15) -> Tensor:
    spikes = drawn(rows, 16, seed + 100) @ drawn(16, columns, seed + 200) / math.sqrt(rows * columns)
    return drawn(rows, columns, seed) / math.sqrt(columns) + height * spikes


def of_sizes(rows: int, columns: int, sizes: Tensor, seed: int = 0) -> Tensor:
    rank = len(sizes)
    u, v = (torch.linalg.qr(drawn(side, rank, seed + side)).Q for side in (rows, columns))
    return u * sizes @ v.mT


def decaying(rows: int, columns: int, seed: int = 0, least: float = 1e-4) -> Tensor:
    sizes = torch.logspace(0, math.log10(least), min(rows, columns), dtype=torch.float64)
    return of_sizes(rows, columns, sizes, seed)


def lacking(rows: int, columns: int, seed: int = 0, share: float = 0.02) -> Tensor:
    """So large a share of the directions is missing."""
    rank = round(min(rows, columns) * (1 - share))
    return drawn(rows, rank, seed) @ drawn(rank, columns, seed + 1)


def repeated(rows: int, columns: int, seed: int = 0) -> Tensor:
    """A third of the singular values are 4, as many 3, and the others 1."""
    rank = min(rows, columns)
    third = (torch.arange(rank) // (rank // 3)).clamp_max(2)
    sizes = torch.tensor([4.0, 3.0, 1.0], dtype=torch.float64)[third]
    return of_sizes(rows, columns, sizes, seed)


EASY = {
    "noise": drawn,
    "spikes": with_spikes,
    "decaying to a tenth": lambda *given: decaying(*given, least=0.1),
    "repeated": repeated,
}
"""Matrices that no case of these leaves to LAPACK."""
HARD = {
    "high spikes": lambda *given: with_spikes(*given, height=300),
    "decaying": decaying,
    "a few directions missing": lacking,
    "half of the directions missing": lambda *given: lacking(*given, share=0.5),
    "tiny": lambda *given: drawn(*given) * 1e-15,
    "huge": lambda *given: drawn(*given) * 1e15,
}
MATRICES = EASY | HARD


def error(made: Tensor, expected: Tensor) -> float:
    """The largest one, beside the largest entry."""
    return float((made - expected).abs().max() / expected.abs().max())


def decomposed(matrix: Tensor, count: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """U, S and V by LAPACK, of the side that is not the smaller one."""
    if matrix.shape[0] < matrix.shape[1]:
        v, s, u = decomposed(matrix.mT, count)
        return u, s, v
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    return u[:, :count], s[:count], vh[:count].mT


def polar(u: Tensor, s: Tensor, v: Tensor) -> Tensor:
    return u * (s > s.max() * max(len(u), len(v)) * EPS) @ v.mT


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", MATRICES)
def test_polar_factors_are_those_of_float64_or_as_near_as_lapacks(kind, shape):
    matrix = MATRICES[kind](*shape).float()
    exact, lapack = decomposed(matrix.double()), decomposed(matrix)

    factor, sizes = gram.polar_and_sizes(matrix)

    assert error(factor, polar(*exact)) <= max(1e-5, error(polar(*lapack), polar(*exact)))
    torch.testing.assert_close(sizes.mean().double(), exact[1].mean(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", MATRICES)
def test_the_largest_parts_are_those_of_float64_or_as_near_as_lapacks(kind, shape):
    matrix, count = MATRICES[kind](*shape).float(), min(shape) // 3
    exact, lapack = decomposed(matrix.double(), count), decomposed(matrix, count)

    made = gram.largest_parts(matrix, count)

    for product in (lambda u, s, v: u * s @ v.mT, lambda u, s, v: u @ v.mT):
        assert error(product(*made), product(*exact)) <= max(1e-5, error(product(*lapack), product(*exact)))
    torch.testing.assert_close(made[1].double(), exact[1], rtol=0, atol=2e-6 * float(exact[1][0]))
    for frame in (made[0], made[2]):
        torch.testing.assert_close(frame.mT @ frame, torch.eye(count), rtol=0, atol=5e-6)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", EASY)
def test_most_matrices_need_no_singular_value_decomposition(kind, shape, monkeypatch):
    monkeypatch.setattr(torch.linalg, "svd", None)
    matrix = EASY[kind](*shape).float()

    gram.polar_and_sizes(matrix)
    gram.largest_parts(matrix, min(shape) // 3)
    if shape[0] >= shape[1]:
        gram.frame(matrix)


@pytest.mark.parametrize("columns", [0, 1, 256, 300])
def test_a_cut_at_either_end_keeps_all_or_nothing(columns):
    matrix = drawn(400, 300).float()

    u, s, v = gram.largest_parts(matrix, columns)

    exact = decomposed(matrix.double(), columns)
    assert (u.shape, s.shape, v.shape) == ((400, columns), (columns,), (300, columns))
    torch.testing.assert_close((u * s @ v.mT).double(), exact[0] * exact[1] @ exact[2].mT, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(320, 320), (1100, 257)])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_has_neither_parts_nor_a_factor(shape, value):
    matrix = drawn(*shape).float()
    matrix[3, 5] = value

    for made in (lambda: gram.polar_and_sizes(matrix), lambda: gram.largest_parts(matrix, 9)):
        with pytest.raises(torch.linalg.LinAlgError, match=r"linalg.svd|non-finite values"):
            made()


@pytest.mark.parametrize("columns", [1, 63, 64, 257, 300])
def test_a_gram_matrix_is_the_product_though_half_of_it_is_copied(columns):
    a = drawn(400, columns)

    torch.testing.assert_close(gram.gram(a), a.mT @ a)


def official_iso_c(deltas: list[Tensor]) -> Tensor:
    u, s, v = decomposed(sum(deltas))
    return s.mean() * polar(u, s, v)


def official_tsv_m(deltas: list[Tensor]) -> Tensor:
    parts = [decomposed(delta, min(delta.shape) // len(deltas)) for delta in deltas]
    left, sizes, right = (torch.cat(stacked, -1) for stacked in zip(*parts, strict=True))
    (u, _, v), (x, _, y) = decomposed(left), decomposed(right)
    return u @ v.mT * sizes @ (x @ y.mT).mT


def official_iso_cts(deltas: list[Tensor]) -> Tensor:
    """With four fifths of the directions in common."""
    u, s, v = decomposed(sum(deltas))
    rank = len(s)
    own = min(round((rank - int(rank * 0.8)) / len(deltas)), rank // len(deltas))
    basis = u[:, : rank - own * len(deltas)]
    parts = [(basis, s[: basis.shape[1]], v[:, : basis.shape[1]])]
    parts += [decomposed(delta - basis @ (basis.mT @ delta), own) for delta in deltas]
    left, sizes, right = (torch.cat(stacked, -1) for stacked in zip(*parts, strict=True))
    (u, _, v), (x, _, y) = decomposed(left), decomposed(right)
    return sizes.mean() * (u @ v.mT @ (x @ y.mT).mT)


def official_star(deltas: list[Tensor]) -> Tensor:
    """With two fifths of the nuclear norm."""
    cuts = []
    for u, s, v in map(decomposed, deltas):
        held = s.cumsum(0)
        kept = int((held < 0.4 * held[-1]).sum()) + 1
        cuts.append(u[:, :kept] * (s[:kept] * held[-1] / held[kept - 1]) @ v[:, :kept].mT)
    return sum(cuts) / len(cuts)


FORMULAS = {
    "iso_c": official_iso_c,
    "iso_cts": official_iso_cts,
    "star": official_star,
    "tsv_m": official_tsv_m,
}


@pytest.mark.parametrize("shape", [(300, 300), (1040, 260), (300, 700), (515, 1100)])
@pytest.mark.parametrize("kind", ["noise", "spikes", "decaying", "half of the directions missing"])
@pytest.mark.parametrize("method", FORMULAS)
def test_merges_in_float32_are_those_of_float64_or_as_near_as_lapacks(method, kind, shape):
    deltas = [MATRICES[kind](*shape, 10 * i).float() for i in range(3)]

    made = m.merge(getattr(m, method)({"w": torch.zeros(shape)}, *({"w": delta} for delta in deltas)))["w"]

    exact, lapack = (FORMULAS[method](given) for given in ([d.double() for d in deltas], deltas))
    assert error(made, exact) <= max(1e-5, 2 * error(lapack, exact))


@pytest.mark.parametrize("method", [m.iso_c, m.iso_cts, m.tsv_m])
def test_strengths_of_a_sweep_share_what_is_decomposed_and_give_what_each_gives_alone(method):
    models = [{"w": drawn(300, 280, seed).float(), "norm": drawn(1, 9, seed)[0].float()} for seed in range(4)]
    recipes = [method(*models, scale=scale) for scale in (0.3, 0.7, 1.0)]
    made: list[dict[str, Tensor]] = [{} for _ in recipes]

    m.merge_many([m.Job(recipe, output) for recipe, output in zip(recipes, made, strict=True)])

    for recipe, output in zip(recipes, made, strict=True):
        alone = m.merge(recipe)
        assert all(torch.equal(alone[key], output[key]) for key in models[0])


@pytest.mark.parametrize("method", [m.iso_c, m.tsv_m])
def test_workers_do_not_change_a_byte(method):
    shapes = {"square": (530, 530), "wide": (520, 1100), "tall": (2100, 512), "spiked": (600, 600)}
    kinds = {key: with_spikes if key == "spiked" else drawn for key in shapes}
    models = [{key: kinds[key](*shape, seed).float() for key, shape in shapes.items()} for seed in range(4)]

    one, *others = (m.merge(method(*models), threads=threads) for threads in (1, 2, 3, 2))

    assert all(torch.equal(one[key], other[key]) for other in others for key in shapes)


@pytest.mark.parametrize("kind", [drawn, with_spikes, decaying, lacking])
def test_what_a_gpu_does_in_float64_is_right_too(kind, monkeypatch):
    monkeypatch.setattr(gram, "spectrum", lambda matrix: None)
    monkeypatch.setattr(gram, "is_by_float64", lambda matrix: True)
    a = kind(300, 200).float()
    u, s, vh = torch.linalg.svd(a.double(), full_matrices=False)
    known = s > s.max() * 300 * EPS
    expected = u * known @ vh

    factor, sizes = gram.polar_and_sizes(a)
    torch.testing.assert_close(factor.double(), expected, atol=2e-5, rtol=0)
    torch.testing.assert_close(sizes.double(), s, atol=1e-5 * float(s[0]), rtol=0)
    factor, mean = gram.polar_and_mean_size(a)
    torch.testing.assert_close(factor.double(), expected, atol=2e-5, rtol=0)
    torch.testing.assert_close(mean.double(), s.mean(), rtol=1e-6, atol=0)
    framed = gram.frame(a)
    torch.testing.assert_close(framed.whole().double(), expected, atol=5e-5, rtol=0)
    left, values, right = gram.largest_parts(a, 50)
    torch.testing.assert_close(
        (left * values @ right.mT).double(), u[:, :50] * s[:50] @ vh[:50], atol=1e-4, rtol=0
    )


def test_the_root_by_products_is_left_where_eigenvalues_differ_too_much():
    for even in (drawn(900, 200), drawn(200, 200), decaying(900, 200, least=1e-3)):
        square = gram.gram(even)
        root, inverse = gram.iterated_roots(square, least=1e-4)
        torch.testing.assert_close(root @ root, square, atol=1e-9 * float(square.abs().max()), rtol=0)
        torch.testing.assert_close(inverse @ square @ inverse, torch.eye(200).double(), atol=1e-6, rtol=0)
    assert gram.iterated_roots(gram.gram(decaying(900, 200, least=1e-5)), least=1e-4) is None
    assert gram.iterated_roots(torch.zeros(9, 9).double(), least=1e-4) is None
