"""The filters of `smooth_add` are scipy's, by compiled loops as by torch."""

import numpy as np
import pytest
import torch
from scipy import ndimage

from mecha_exp.engine.compiler.primitives import runs
from mecha_exp.methods import smoothing

SHAPES = [
    (1,),
    (6,),
    (1, 9),
    (9, 1),
    (30, 21),
    (5, 2, 6),
    (20, 16, 1, 1),
    (8, 6, 3, 3),
    (2, 2, 2, 2),
    (3, 2, 4, 2, 2),
]
smoothed = smoothing.smoothed.__wrapped__


def drawn(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_filters_are_those_of_scipy(shape: tuple[int, ...], dtype: torch.dtype):
    values = drawn(shape).to(dtype)

    expected = ndimage.gaussian_filter(ndimage.median_filter(values.double().numpy(), size=3), sigma=1)

    tolerance = 1e-6 if dtype is torch.float32 else 1e-12
    np.testing.assert_allclose(smoothed(values).numpy(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", SHAPES)
def test_without_a_compiler_the_bits_are_the_same(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch):
    values = drawn(shape).mul(2).round()
    compiled = smoothed(values)

    for cached in (smoothing._network_loop, smoothing._weighing):
        cached.cache_clear()
    monkeypatch.setattr(runs, "can_compile", lambda: False)
    by_torch = smoothed(values)
    for cached in (smoothing._network_loop, smoothing._weighing):
        cached.cache_clear()

    assert torch.equal(compiled, by_torch)


def test_a_part_at_a_time_is_the_same(monkeypatch: pytest.MonkeyPatch):
    values = drawn((40, 30, 3, 3))
    whole = smoothed(values)

    monkeypatch.setattr(smoothing, "PART", 100)

    assert torch.equal(smoothed(values), whole)


@pytest.mark.parametrize("size", [7, 40])
def test_what_is_not_a_number_reaches_its_neighbours_and_no_further(size: int):
    values = drawn((size, size))
    values[0, 0] = torch.nan

    made = smoothed(values)

    reach = 1 + smoothing.TAIL
    assert made[: reach + 1, : reach + 1].isnan().all()
    assert not made[reach + 1 :].isnan().any()
    assert not made[:, reach + 1 :].isnan().any()
