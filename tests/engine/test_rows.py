"""Sums and ranks of rows: methods that have these alone are loops, with the bits of torch."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

import mecha_exp as mx
from mecha_exp import EngineOptions, Job, Parameter, Return, merge_many, merge_method
from mecha_exp.extensions.merge_methods import ranks, row_dot, row_length, row_norm, row_sum


@merge_method(rowwise=True, register=False)
def projected(a: Parameter(Tensor), b: Parameter(Tensor), scale: Parameter(float) = 1.0) -> Return(Tensor):
    """scale (a, b) / (b, b) b of each row, and a thousandth of the sum of the row of a."""
    share = (row_dot(a, b) / row_dot(b, b).clamp_min(1e-6)).to(a.dtype)
    return scale * share * b + (row_sum(a) / 1000).to(a.dtype)


@merge_method(rowwise=True, register=False)
def unit_rows(a: Parameter(Tensor)) -> Return(Tensor):
    """Each row over its norm."""
    return a / row_norm(a).to(a.dtype)


@merge_method(rowwise=True, register=False)
def norms_alone(a: Parameter(Tensor)) -> Return(Tensor):
    """The norm of its row at each entry."""
    return row_norm(a).to(a.dtype).expand_as(a).clone()


@merge_method(rowwise=True, register=False)
def by_place(a: Parameter(Tensor), b: Parameter(Tensor)) -> Return(Tensor):
    """The share of the row that is smaller, times the norm of that row of b, less the place there."""
    return ranks(a.abs()) / row_length(a) * row_norm(b).to(a.dtype) - ranks(b)


@merge_method(rowwise=True, register=False)
def places_of_places(a: Parameter(Tensor)) -> Return(Tensor):
    """Ranks of what ranks give."""
    return ranks(a * ranks(a))


@merge_method(rowwise=True, register=False)
def spread_of_rows(a: Parameter(Tensor)) -> Return(Tensor):
    """The norm of what is left of a row: a sum of what another sum gives."""
    away = a - (row_sum(a) / 1000).to(a.dtype)
    return a * row_norm(away).to(a.dtype)


@merge_method(rowwise=True, register=False)
def without_mean(a: Parameter(Tensor)) -> Return(Tensor):
    """Each row less its mean, for which the length of a row is read."""
    return a - (row_sum(a) / a.shape[-1]).to(a.dtype)


@merge_method(rowwise=True, register=False)
def by_stride(a: Parameter(Tensor)) -> Return(Tensor):
    """Each row less its mean, its length being read from how far rows lie apart."""
    return a - (row_sum(a) / a.stride(0)).to(a.dtype)


@merge_method(rowwise=True, register=False)
def by_bytes(a: Parameter(Tensor)) -> Return(Tensor):
    """Each row over the bytes of its tile."""
    return a / a.nbytes


@merge_method(rowwise=lambda shape: 2, register=False)
def unit_pairs(a: Parameter(Tensor)) -> Return(Tensor):
    """Each pair of entries over its norm: rows of a length that not every shape has."""
    return a / row_norm(a).to(a.dtype)


def by_rows(a, b):
    """Recipes of two models whose methods add up rows."""
    beyond = mx.weighted_sum(a, b, alpha=-1.0)
    return [
        mx.n_model_stock(a, b, beyond, b),
        mx.model_stock_pairwise(a, b, beyond, filter_wise=True),
        projected(a, b, scale=0.3),
        unit_rows(mx.subtract(a, b)),
        norms_alone(b),
        by_place(b, beyond),
        mx.add_difference_ties_extended(a, b, beyond, k=1.0, apply_stock=True),
    ]


def by_slices(a, b):
    """Recipes of two models whose methods rank slices along the first axis, and drop at random."""
    beyond = mx.weighted_sum(a, b, alpha=-1.0)
    return [
        mx.della(a, b, beyond, density=0.6, seed=3),
        mx.della_linear(a, b, density=[0.4], variant="paper", rescale=False),
    ]


def outputs_of(recipes, **options):
    jobs = [Job(recipe, {}) for recipe in recipes]
    merge_many(jobs, EngineOptions(on_nonfinite="keep", **options))
    return [job.output["w"] for job in jobs]


def same_bits(a, b):
    return bool(((a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())).all())


KINDS = {
    "drawn": lambda x: x,
    "nine tenths zeros": lambda x: torch.where(x.abs() > 1.645, x, 0),
    "two values": lambda x: torch.where(x > 0, 0.25, -3.0),
    "ascending": lambda x: x.sort(-1).values,
    "descending": lambda x: x.sort(-1, descending=True).values,
    "equal": torch.ones_like,
    "zeros": lambda x: torch.zeros_like(x) * x,
    "tiny": lambda x: x * 1e-41,
    "large": lambda x: x * 1e30,
    "not finite": lambda x: torch.where(x > 1.5, torch.nan, torch.where(x < -1.5, torch.inf, x)),
}


@settings(max_examples=20)
@given(
    kinds=st.tuples(st.sampled_from([*KINDS]), st.sampled_from([*KINDS])),
    rows=st.integers(1, 200),
    columns=st.sampled_from([1, 2, 3, 9, 15, 16, 17, 31, 256, 257, 511, 512, 513, 1024, 1030]),
    seed=st.integers(0, 1 << 20),
)
def test_a_loop_over_rows_gives_the_bits_of_torch(kinds, rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    drawn = (torch.randn(rows, columns, generator=generator) for _ in kinds)
    a, b = (mx.model({"w": KINDS[kind](values)}) for kind, values in zip(kinds, drawn, strict=True))

    for recipes in (by_rows(a, b), by_slices(a, b)):
        fused = outputs_of(recipes, fuse="always", workers=1)
        in_parts = outputs_of(recipes, fuse="always", workers=1, tile_size=1 << 12)
        eager = outputs_of(recipes, fuse="never", workers=1)

        assert [*map(same_bits, fused, eager)] == [True] * len(eager)
        assert [*map(same_bits, in_parts, eager)] == [True] * len(eager)


@pytest.mark.parametrize("shape", [(), (7,), (20_000,), (3, 20_000), (6, 5, 3, 3), (700, 1)])
def test_rows_of_any_shape(shape):
    generator = torch.Generator().manual_seed(0)
    a, b = (mx.model({"w": torch.randn(shape, generator=generator)}) for _ in range(2))

    for recipes in (by_rows(a, b), by_slices(a, b)):
        fused, eager = (outputs_of(recipes, fuse=fuse) for fuse in ("always", "never"))

        assert [*map(same_bits, fused, eager)] == [True] * len(eager)


@pytest.mark.parametrize("stored", [torch.float16, torch.float64])
@pytest.mark.parametrize("method", [mx.n_model_stock, partial(mx.della, density=0.6)])
def test_rows_go_from_file_to_file(tmp_path, stored, method):
    paths = [tmp_path / f"{name}.safetensors" for name in "abc"]
    generator = torch.Generator().manual_seed(0)
    for path in paths:
        shapes = {"w": (700, 1031), "conv": (900, 40, 3, 3)}
        save_file({k: torch.randn(s, generator=generator).to(stored) for k, s in shapes.items()}, path)
    merged = {}
    for fuse in ("always", "never"):
        target = tmp_path / f"{fuse}.safetensors"
        merge_many([Job(method(*map(mx.model, map(str, paths))), target)], EngineOptions(fuse=fuse))
        merged[fuse] = load_file(target)

    assert all(torch.equal(merged["always"][key], merged["never"][key]) for key in ("w", "conv"))


def said_of(recipe):
    with mx.plan([Job(recipe, {})], EngineOptions(fuse="always")) as plan:
        return set(plan.fused)


def test_the_plan_says_which_rows_are_loops():
    a, b = (mx.model({"w": torch.ones(4, 3)}) for _ in range(2))

    assert [said_of(recipe) for recipe in [*by_rows(a, b), *by_slices(a, b)]] == [{"fused"}] * 9
    assert said_of(places_of_places(a)) == {"eager: it works on rows"}
    assert said_of(spread_of_rows(a)) == {"eager: it works on rows"}
    assert said_of(mx.add_difference(a, spread_of_rows(a), b)) == {"fused but for rows"}
    many = [mx.Job(unit_rows(mx.weighted_sum(a, b, alpha=i / 32)), {}) for i in range(1, 32)]
    with mx.plan(many, EngineOptions(fuse="always")) as plan:
        assert set(plan.fused) == {"eager: it works on rows"}


@pytest.mark.parametrize("method", [without_mean, by_stride, by_bytes])
def test_methods_that_read_the_length_of_a_row_are_left_to_torch(method):
    a = mx.model({"w": torch.randn(4, 5, generator=torch.Generator().manual_seed(0))})

    assert said_of(method(a)) == {"eager: it works on rows"}
    assert same_bits(*(outputs_of([method(a)], fuse=fuse)[0] for fuse in ("always", "never")))


def test_what_is_around_rows_of_a_length_that_the_toy_tile_lacks_is_a_loop():
    a, b = (mx.model({"w": torch.full((4, 4), value)}) for value in (1.0, 2.0))

    assert said_of(unit_pairs(a)) == {"eager: it works on rows"}
    assert said_of(mx.add_difference(a, unit_pairs(a), b)) == {"fused but for rows"}


@pytest.mark.parametrize("columns", [3, 9, 40, 1280, 5120])
def test_sums_of_rows_are_nearer_to_float64_than_those_of_torch(columns):
    a, b = torch.randn(2, 50, columns, generator=torch.Generator().manual_seed(columns))
    exact = (a.double() * b.double()).sum(-1, keepdim=True)

    ours = (row_dot(a, b) - exact).abs().max()
    assert ours <= (((a * b).sum(-1, keepdim=True)).double() - exact).abs().max()
    assert torch.allclose(row_norm(a), a.double().norm(dim=-1, keepdim=True), rtol=1e-15, atol=0)
    assert row_sum(a).shape == (50, 1)


def test_sums_of_rows_have_gradients():
    a = torch.randn(3, 20, dtype=torch.float64, requires_grad=True)

    assert torch.autograd.gradcheck(lambda x: row_norm(x) + row_sum(x) * row_dot(x, x), (a,))
