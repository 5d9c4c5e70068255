"""Arithmetic follows the widest input, and what is stored is rounded once."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mecha_exp as mx
from mecha_exp.checkpoint.dtypes import round_to
from mecha_exp.engine.statistics import summarise
from mecha_exp.errors import CheckpointError, RecipeError

NARROW = {
    torch.bfloat16: (8, -126, 127),
    torch.float16: (11, -14, 15),
    torch.float8_e4m3fn: (4, -6, 8),
    torch.float8_e5m2: (3, -14, 15),
}
"""By dtype the bits of its significand, and the exponents of its smallest and largest normal numbers."""

TIE = 1 + 2**-8 + 2**-40


def nearest(value: float, dtype: torch.dtype) -> float:
    """The nearest number of a dtype, ties to even, by exact arithmetic; for values in its range."""
    places, smallest, _ = NARROW[dtype]
    exponent = max(math.frexp(value)[1] - 1, smallest) if value else smallest
    step = Fraction(2) ** (exponent - places + 1)
    return math.copysign(float(round(Fraction(value) / step) * step), value)


@st.composite
def near_ties(draw: st.DrawFn, dtype: torch.dtype) -> float:
    """Numbers halfway between two of a dtype, or a little beside that."""
    places, smallest, largest = NARROW[dtype]
    exponent = draw(st.integers(smallest - places, largest - 1))
    whole = draw(st.integers(2 ** (places - 1), 2**places - 2))
    beside = draw(st.sampled_from([0, 1, -1])) * 2.0 ** -draw(st.integers(24, 40))
    sign = draw(st.sampled_from([1, -1]))
    return sign * math.ldexp(whole + 0.5 + beside, exponent - places + 1)


@given(st.data(), st.sampled_from(list(NARROW)))
def test_float64_is_rounded_once(data, dtype):
    values = [data.draw(near_ties(dtype)) for _ in range(8)]

    rounded = round_to(torch.tensor(values, dtype=torch.float64), dtype).double()

    assert rounded.tolist() == [nearest(value, dtype) for value in values]


def test_what_is_not_a_number_or_too_large_is_as_torch_has_it():
    values = torch.tensor([math.inf, -math.inf, 1e300, -1e300, 0.0, -0.0, 5e-324], dtype=torch.float64)
    for dtype in NARROW:
        ours, theirs = round_to(values, dtype).float(), values.to(dtype).float()
        assert torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7))
        numbers = ~theirs.isnan()  # whose sign depends on torch's kernel
        assert torch.equal(ours.signbit()[numbers], theirs.signbit()[numbers])
        assert round_to(torch.tensor(math.nan, dtype=torch.float64), dtype).float().isnan()


@pytest.mark.parametrize("fuse", ["never", "always"])
@pytest.mark.parametrize("dtype", list(NARROW))
def test_a_merge_rounds_once(fuse, dtype):
    places = NARROW[dtype][0]
    tie = 1 + 2.0**-places + 2.0**-40
    a = {"w": torch.full((3000,), tie - 1, dtype=torch.float64)}
    b = {"w": torch.full((3000,), tie + 1, dtype=torch.float64)}
    options = mx.EngineOptions(fuse=fuse)

    for recipe in (mx.n_average(a, b), mx.cast(mx.n_average(a, b), dtype=str(dtype))):
        merged = mx.merge(recipe, options=options, dtype=dtype)["w"]
        assert set(merged.double().tolist()) == {1 + 2.0 ** (1 - places)}


def test_the_case_of_the_report():
    assert float(round_to(torch.tensor(TIE, dtype=torch.float64), torch.bfloat16)) == 1.0078125


@pytest.mark.parametrize("values", [[2.0**24 + 1], [1e300, -1e-300], [0.1, 1 / 3]])
@pytest.mark.parametrize("alpha", [0, 1, 0.5])
def test_float64_inputs_are_computed_in_float64(values, alpha):
    tensor = torch.tensor(values, dtype=torch.float64)

    merged = mx.merge(mx.weighted_sum({"w": tensor}, {"w": tensor.clone()}, alpha=alpha))["w"]

    assert torch.equal(merged, tensor)


def test_only_float64_keys_are_computed_in_float64():
    wide, narrow = torch.rand(5, dtype=torch.float64), torch.rand(5)
    models = [{"wide": wide + i, "narrow": narrow + i} for i in range(2)]
    alone = mx.merge(mx.weighted_sum(*({"narrow": m["narrow"]} for m in models), alpha=0.3))["narrow"]

    with mx.plan([mx.Job(mx.weighted_sum(*models, alpha=0.3), {})]) as planned:
        assert planned.arithmetic == {torch.float64: 1, torch.float32: 1}
    merged = mx.merge(mx.weighted_sum(*models, alpha=0.3))
    assert torch.equal(merged["narrow"], alone)
    assert torch.equal(merged["wide"], wide + 0.3 * (models[1]["wide"] - wide))


def test_one_float64_input_decides_and_the_option_overrules_it():
    a, b = {"w": torch.tensor([2.0**24])}, {"w": torch.tensor([2.0**24 + 1], dtype=torch.float64)}

    assert float(mx.merge(mx.weighted_sum(b, a, alpha=0))["w"]) == 2**24 + 1
    forced = mx.EngineOptions(compute_dtype="float32")
    assert float(mx.merge(mx.weighted_sum(b, a, alpha=0.25), options=forced)["w"]) == 2**24


@pytest.mark.parametrize(
    "alpha", [math.inf, -math.inf, math.nan, [0, math.inf], {"w": math.inf, "default": 0}]
)
def test_a_strength_is_finite(alpha):
    with pytest.raises(RecipeError, match=r"alpha: expected a (finite )?number, got (-?inf|nan)"):
        mx.weighted_sum({"w": torch.ones(1)}, {"w": torch.ones(1)}, alpha=alpha)


@pytest.mark.parametrize("size", [1e25, 1e-25, 3e38])
def test_statistics_have_no_range_of_their_own(size):
    a, b = {"w": torch.tensor([size, 0.0])}, {"w": torch.tensor([0.0, size])}

    report = mx.merge_many([mx.Job(mx.weighted_sum(a, b, alpha=0.5), None, statistics=True)])

    (statistics,) = {repr(summarise(by_key)[""]) for by_key in report.moments[0].values()}
    first = summarise(next(iter(report.moments[0].values())))[""]
    assert first.distance == pytest.approx(size / math.sqrt(2), rel=1e-6)
    assert first.cosine == pytest.approx(1 / math.sqrt(2), rel=1e-6), statistics


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (
            torch.eye(3).to_sparse(),
            "is sparse_coo, and only dense tensors can be merged. Pass its to_dense()",
        ),
        (torch.empty(3, device="meta"), "is without values"),
    ],
)
def test_a_tensor_that_is_not_dense_is_refused_in_a_sentence(tensor, said):
    with pytest.raises(CheckpointError) as error:
        mx.merge(mx.weighted_sum({"w": tensor}, {"w": tensor}))

    assert f"the tensor 'w' {said}" in str(error.value)
