"""A loop over runs computes what its lines say, on whatever it can be compiled for."""

import pytest
import torch

from mecha_exp.engine.compiler.primitives import runs
from mecha_exp.extensions.merge_methods import RunLoop

LINES = ["y = {t}(0.1) * smaller(x0, x1) - x2", "z = larger(x0, x1) / x2"]


def loop(dtype: torch.dtype = torch.float32) -> RunLoop:
    return RunLoop(LINES, 3, ["y", "z"], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [0, 1, 7, 1001])
def test_each_entry_is_computed_from_those_at_its_place(dtype: torch.dtype, length: int):
    a, b, c = torch.randn(3, length, dtype=dtype).unbind()
    results = torch.empty(2, length, dtype=dtype)

    assert loop(dtype)((a, b, c), results.unbind())

    assert torch.equal(results[0], torch.tensor(0.1, dtype=dtype) * torch.minimum(a, b) - c)
    assert torch.equal(results[1], torch.maximum(a, b) / c)


def test_inputs_may_be_one_run_begun_elsewhere():
    values, result = torch.arange(10.0), torch.empty(8)
    differences = RunLoop(["d = x2 - {t}(2) * x1 + x0"], 3, ["d"], torch.float32)

    assert differences([values[step : step + 8] for step in range(3)], [result])

    assert torch.equal(result, torch.zeros(8))


def test_what_is_not_a_number_gives_way_to_the_second():
    one, other = torch.tensor([torch.nan, 1.0]), torch.tensor([1.0, torch.nan])
    result = torch.empty(2)

    assert RunLoop(["y = smaller(x0, x1)"], 2, ["y"], torch.float32)((one, other), [result])

    assert result[0] == 1
    assert result[1].isnan()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_there_are_no_loops_for_short_floats(dtype: torch.dtype):
    result = torch.full((4,), 7, dtype=dtype)

    assert not RunLoop(["y = x0 + x0"], 1, ["y"], dtype)([result.clone()], [result])

    assert (result == 7).all()


def test_without_a_compiler_nothing_is_done(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runs, "can_compile", lambda: False)

    assert not RunLoop(["y = x0"], 1, ["y"], torch.float32)([torch.ones(2)], [torch.zeros(2)])


def test_runs_of_other_lengths_are_not_taken():
    with pytest.raises(AssertionError):
        RunLoop(["y = x0"], 1, ["y"], torch.float32)([torch.ones(2)], [torch.zeros(3)])
