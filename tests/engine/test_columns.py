"""Sums over columns are the same by a loop and by torch, and as exact as those of torch."""

import numpy as np
import pytest
import torch

from mecha_exp.engine.compiler.primitives import columns, runs
from mecha_exp.engine.compiler.primitives.columns import GROUP, WIDE_ROW, products_of_columns
from mecha_exp.methods.difference import blended_columns

SHAPES = [(64, WIDE_ROW), (3 * GROUP + 5, WIDE_ROW + 77), (1000, 9), (4099, 1), (70, 300), (5, 2), (1, 1)]
DTYPES = [torch.float32, torch.float64]


def drawn(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_without_a_compiler_the_sums_are_the_same(shape, dtype, monkeypatch):
    a, b = drawn(shape, dtype)
    a[0, 0], b[-1, -1] = -0.0, torch.inf
    by_loop = products_of_columns(a, b)
    assert columns._loop(a, b) is not None

    monkeypatch.setattr(columns, "can_compile", lambda: False)

    assert columns._loop(a, b) is None
    torch.testing.assert_close(products_of_columns(a, b), by_loop, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_sums_are_as_exact_as_those_of_torch(shape, dtype):
    a, b = drawn(shape, dtype, seed=1)
    pairs = [(a.double(), a.double()), (b.double(), b.double()), (a.double(), b.double())]
    wide = [one.numpy().astype(np.longdouble) * other.numpy() for one, other in pairs]
    exact = np.stack([product.sum(0) for product in wide])
    sizes = np.stack([abs(product).sum(0) for product in wide])

    def error(sums):
        return float((abs(sums.numpy() - exact) / sizes).max())

    by_torch = torch.stack([(one * other).sum(0) for one, other in pairs])
    assert error(products_of_columns(a, b)) <= error(by_torch) + 2 * torch.finfo(torch.float64).eps


def test_a_part_that_is_not_contiguous_is_added_up_alike():
    a, b = drawn((40, 60), torch.float32)
    whole = products_of_columns(a[:, ::3].contiguous(), b[:, ::3].contiguous())
    assert torch.equal(products_of_columns(a[:, ::3], b[:, ::3]), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_are_blended_by_a_loop_as_by_torch(dtype, monkeypatch):
    a, b = drawn((30, 50), dtype)
    likeness = torch.linspace(-1, 1, 50, dtype=dtype)
    likeness[7] = torch.nan
    arguments = (a, b, likeness, torch.tensor(0.2, dtype=dtype))
    by_loop = blended_columns.function(*arguments)

    monkeypatch.setattr(runs.RunLoop, "_loop", None)

    assert torch.equal(blended_columns.function(*arguments), by_loop)
