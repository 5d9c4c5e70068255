"""The order statistic is exact, whatever the sample says and however the entries lie."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mecha_exp as mx
from mecha_exp.engine.ir import order_statistic
from mecha_exp.engine.ir.order_statistic import (
    Bracket,
    Candidates,
    bracket_from_sample,
    entries_of,
    from_sort_key,
    partition,
    passes_needed,
    sample_spans,
    sort_key,
)
from mecha_exp.engine.ir.program import Pass
from mecha_exp.engine.runtime.key_pass import KeyPass
from mecha_exp.methods.reductions import kth_magnitude

COUNT = 5 * order_statistic.SAMPLE
F32, F64 = torch.float32, torch.float64
EVERYTHING = Bracket.everything(F32)


def normal(seed=0, dtype=F32):
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def search(values: torch.Tensor, rank: int, bracket: Bracket) -> tuple[torch.Tensor, int]:
    """The entry of a rank, beginning with a bracket, and how many trips that took."""
    everything = Bracket.everything(values.dtype)
    for trip in range(1, 10):
        inside = Candidates(bracket, len(values))
        for part in sort_key(values).split(10_000):
            inside.add(*partition(part.numpy(), bracket))
        found = inside.find(rank, everything)
        if isinstance(found, int):
            return from_sort_key(found, values.dtype), trip
        bracket = found
    raise AssertionError("no end")


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1))
def test_whole_numbers_sort_as_the_floats_do(values):
    for dtype in (F32, F64):
        floats = torch.tensor(values, dtype=dtype)
        keys = sort_key(floats)
        assert torch.equal(floats[keys.argsort()], floats.sort().values)
        assert all(torch.equal(from_sort_key(int(k), dtype), f) for k, f in zip(keys, floats, strict=True))


def test_infinity_and_nan_come_last():
    keys = sort_key(torch.tensor([-torch.inf, -1, -0.0, 0.0, 1e-45, 3e38, torch.inf, torch.nan]))
    assert torch.equal(keys, keys.sort().values)
    assert keys[-2] < EVERYTHING.high < keys[-1]


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.8, 0.9999, 1.0])
@pytest.mark.parametrize("start", ["a good guess", "everything", "too low", "too high"])
def test_any_bracket_leads_to_the_entry(dtype, share, start):
    values = normal(dtype=dtype)
    rank = max(1, int(share * COUNT))
    wanted = values.sort().values[rank - 1]
    key, everything = int(sort_key(wanted.reshape(1))), Bracket.everything(dtype)
    bracket = {
        "a good guess": bracket_from_sample(sort_key(values[::5]).numpy(), share, everything),
        "everything": everything,
        "too low": Bracket(everything.low, key - 1),
        "too high": Bracket(key + 1, everything.high),
    }[start]

    found, needed = search(values, rank, bracket)

    assert torch.equal(found, wanted)
    assert needed == 1 if start == "a good guess" else needed <= passes_needed(dtype) - 1


@pytest.mark.parametrize("different", [1, 2, 30])
def test_where_many_entries_are_equal_they_are_counted(different, monkeypatch):
    monkeypatch.setattr(order_statistic, "_MOST", 1000)
    values = torch.arange(COUNT).remainder(different).to(F32)
    for rank in (1, COUNT // 3, COUNT):
        found, needed = search(
            values, rank, bracket_from_sample(sort_key(values[::7]).numpy(), rank / COUNT, EVERYTHING)
        )
        assert found == values.sort().values[rank - 1]
        assert needed <= passes_needed(F32) - 1


@given(st.integers(1, 10**9), st.sampled_from([1, 3, 1000, 5000, 70_001]))
def test_samples_are_whole_blocks_that_lie_apart_inside_the_tensor(rows, block):
    spans = sample_spans(rows * block, block)
    ends = [place for span in spans for place in span]
    assert ends == sorted(ends) and ends[0] >= 0 and ends[-1] <= rows * block
    assert all(place % block == 0 for place in ends)
    assert sum(stop - start for start, stop in spans) <= max(16 * order_statistic.SAMPLE, 4 * block)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=9, unique=True))
def test_the_entries_of_spans_are_those_of_each_in_turn(places):
    ends = sorted(places) if len(places) % 2 == 0 else sorted([*places, 41])
    spans = [*zip(ends[::2], ends[1::2], strict=True)]
    assert entries_of(spans).tolist() == [place for start, stop in spans for place in range(start, stop)]


class Trips:
    """How often each input of a merge is gone through, samples left out."""

    def __init__(self, monkeypatch):
        self.tiles: list[Pass] = []
        run = KeyPass.run

        def note(key_pass, tile, scratch):
            if not key_pass._pass.sampled:
                self.tiles.append(key_pass._pass)
            run(key_pass, tile, scratch)

        monkeypatch.setattr(KeyPass, "run", note)

    @property
    def count(self):
        return len(set(map(id, self.tiles)))


@pytest.mark.parametrize("fuse", ["never", "always"])
def test_ties_goes_through_its_inputs_twice(monkeypatch, fuse):
    trips = Trips(monkeypatch)
    recipe = mx.add_difference_ties(*(mx.model({"w": normal(i)}) for i in range(3)), k=0.2)

    mx.merge_many([mx.Job(recipe, {})], mx.EngineOptions(fuse=fuse))

    assert trips.count == 2


@pytest.mark.parametrize("fuse", ["never", "always"])
def test_an_unlucky_sample_costs_time_and_changes_nothing(monkeypatch, fuse):
    trips = Trips(monkeypatch)
    values = normal()
    wanted = values.abs().kthvalue(max(int(0.8 * COUNT), 1)).values
    for start, stop in sample_spans(COUNT, 1):
        values[start:stop] *= 1e-3
    expected = values.abs().kthvalue(max(int(0.8 * COUNT), 1)).values
    node = mx.model({"w": values})

    report = mx.merge_many([mx.Job(threshold_of(node), output := {})], mx.EngineOptions(fuse=fuse))

    assert output["w"][0] == expected != wanted
    assert trips.count > 2
    assert report.bytes_read == 2 * values.nbytes


@mx.merge_method(elementwise=True, register=False)
def filled(a: mx.Parameter(torch.Tensor), value: mx.Parameter(torch.Tensor, "param")) -> mx.Return(
    torch.Tensor
):
    """Makes a small value visible."""
    return torch.zeros_like(a) + value


def threshold_of(node):
    return filled(node, kth_magnitude(node, k=0.2))


def mostly_zero():
    return torch.where(normal(1).abs() > 1.645, normal(), 0)


DISTRIBUTIONS = {
    "nine tenths zeros": mostly_zero,
    "four fifths zeros, where the threshold is": lambda: torch.where(normal(1).abs() > 1.2816, normal(), 0),
    "zeros of both signs": lambda: mostly_zero() * normal(2).sign(),
    "two values": lambda: normal().sign() + 2,
    "one value": lambda: torch.ones(COUNT),
    "sorted": lambda: normal().sort().values,
    "reversed": lambda: normal().sort(descending=True).values,
    "not a number": lambda: torch.where(normal(1) > 1, torch.nan, normal()),
    "denormals": lambda: normal() * 1e-40,
    "infinities": lambda: torch.where(normal(1) > 1, torch.inf, normal()),
}


@pytest.mark.parametrize("fuse", ["never", "always"])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_no_distribution_costs_another_trip_or_more_memory(name, fuse, monkeypatch):
    trips, held = Trips(monkeypatch), []
    values = DISTRIBUTIONS[name]()
    add = Candidates.add

    def note(self, *counts):
        held.append(len(counts[-1]) if self._bracket != EVERYTHING else 0)
        add(self, *counts)

    monkeypatch.setattr(Candidates, "add", note)
    options = mx.EngineOptions(fuse=fuse, on_nonfinite="keep")
    mx.merge_many([mx.Job(threshold_of(mx.model({"w": values})), output := {})], options)

    numbers = values[~values.isnan()].abs().sort().values
    assert output["w"][0] == numbers[max(int(0.8 * len(numbers)), 1) - 1]
    assert trips.count == 2
    assert sum(held) < COUNT // 2  # of what is sorted the sample knows least


@pytest.mark.parametrize("fuse", ["never", "always"])
@pytest.mark.parametrize("count", [1000, COUNT])
def test_what_is_not_a_number_is_not_counted(fuse, count):
    @mx.reduction(rank=lambda count, part: int(part * count), register=False)
    def positive(a: mx.Parameter(torch.Tensor), part: mx.Parameter(float)) -> mx.Return(
        torch.Tensor, "param"
    ):
        return torch.where(a > 0, a, torch.nan)

    values = normal()[:count]
    node = mx.model({"w": values})
    jobs = [mx.Job(filled(node, positive(node, part=part)), {}) for part in (0.25, 1.0, 1.5)]

    mx.merge_many(jobs, mx.EngineOptions(fuse=fuse))

    chosen = values[values > 0].sort().values
    expected = [chosen[int(len(chosen) * 0.25) - 1], chosen[-1], torch.tensor(torch.inf)]
    assert [job.output["w"][0] for job in jobs] == expected


@mx.merge_method(register=False)
def reversed_whole(a: mx.Parameter(torch.Tensor)) -> mx.Return(torch.Tensor):
    """A method of whole tensors."""
    return a.flip(0)


@pytest.mark.parametrize("fuse", ["never", "always"])
def test_rows_and_whole_tensors_are_sampled_too(fuse):
    shape = (320, 1024)
    base, a, b = (mx.model({"w": normal(i).reshape(shape)}) for i in range(3))
    rows = mx.n_model_stock(base, a, b)
    jobs = [mx.Job(node, {}) for node in (rows, threshold_of(rows), threshold_of(reversed_whole(a)))]

    mx.merge_many(jobs, mx.EngineOptions(fuse=fuse))

    merged, of_rows, of_whole = (job.output["w"] for job in jobs)
    rank = int((1 - 0.2) * merged.numel())
    assert of_rows[0, 0] == merged.abs().reshape(-1).kthvalue(rank).values
    assert of_whole[0, 0] == a.source.state_dict["w"].abs().reshape(-1).kthvalue(rank).values


def test_a_reduction_by_rank_has_no_sums():
    with pytest.raises(mx.RecipeError, match="by rank gives the entry of that rank"):
        mx.reduction(sums=True, rank=lambda count: 1)


def test_what_is_collected_may_come_in_any_order():
    keys = sort_key(normal()).numpy()
    bracket = bracket_from_sample(keys[:: COUNT // order_statistic.SAMPLE], 0.5, EVERYTHING)
    forwards, backwards = Candidates(bracket, COUNT), Candidates(bracket, COUNT)
    for part in np.array_split(keys, 9):
        forwards.add(*partition(part, bracket))
    for part in reversed(np.array_split(keys, 9)):
        backwards.add(*partition(part, bracket))
    assert forwards.find(COUNT // 2, EVERYTHING) == backwards.find(COUNT // 2, EVERYTHING)
