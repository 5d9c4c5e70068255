"""The radix sort of rows is the stable sort of torch, whatever the entries are."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mecha_exp.engine.compiler.primitives import sorting
from mecha_exp.engine.compiler.primitives.sorting import (
    MOST_COUNTERS,
    SHORT_ROW,
    ascending_order,
    ranks,
    whole_ranks,
)

COLUMNS = 3 * SHORT_ROW + 5


def drawn(seed: int = 0, columns: int = COLUMNS) -> torch.Tensor:
    return torch.randn(7, columns, generator=torch.Generator().manual_seed(seed))


def change_of(stored: torch.dtype, values: torch.Tensor) -> torch.Tensor:
    """What lies between values and the same a little off them, both stored in a dtype."""
    return (1.1 * values.flip(-1) + values).to(stored).float() - values.to(stored).float()


KINDS = {
    "drawn": lambda x: x,
    "between float16": lambda x: change_of(torch.float16, x / 50),
    "between bfloat16": lambda x: change_of(torch.bfloat16, x / 50),
    "whole numbers": lambda x: (5 * x).round(),
    "nine tenths zeros": lambda x: torch.where(x.abs() > 1.645, x, 0),
    "zeros of both signs": lambda x: torch.where(x > -1, x.sign() * 0.0, x),
    "two values": lambda x: x.sign(),
    "one value": lambda x: torch.full_like(x, -3.0),
    "sorted": lambda x: x.sort().values,
    "reversed": lambda x: x.sort(descending=True).values,
    "one large": lambda x: torch.where(x == x.max(), 1e30, x),
    "of any size": lambda x: x * 2.0 ** (60 * x.flip(-1)),
    "tiny": lambda x: x * 1e-30,
    "denormals": lambda x: x * 1e-40,
    "the largest": lambda x: x / x.abs().max() * 3e38,
    "the largest and the smallest": lambda x: torch.where(x.abs() > 1, 3e38, 1e-45) * x.sign(),
    "infinities": lambda x: torch.where(x.abs() > 1, torch.inf * x.sign(), x),
    "float16": lambda x: x.half().float(),
    "bfloat16": lambda x: x.bfloat16().float(),
}

ROWS = {
    **{kind: lambda make=make: make(drawn()) for kind, make in KINDS.items()},
    "not contiguous": lambda: drawn().T.contiguous().T,
    "one axis": lambda: drawn()[0],
    "short": lambda: drawn()[:, :SHORT_ROW].sign(),
    "float64": lambda: drawn().double(),
    "no rows": lambda: drawn()[:0],
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_sorted_as_by_a_stable_sort(name):
    rows = ROWS[name]()

    order = ascending_order(rows)

    assert torch.equal(order, rows.argsort(dim=-1, stable=True))
    assert torch.equal(ranks(rows), order.argsort(dim=-1).to(rows))
    assert torch.equal(whole_ranks(rows), order.argsort(dim=-1).int())


@given(
    first=st.sampled_from([*KINDS]),
    second=st.sampled_from([*KINDS]),
    columns=st.integers(SHORT_ROW, 9 * SHORT_ROW),
    magnitudes=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_rows_of_two_kinds_are_sorted_as_by_a_stable_sort(first, second, columns, magnitudes, seed):
    values = drawn(seed, columns)
    rows = torch.where(drawn(seed + 1, columns) > 0, KINDS[first](values), KINDS[second](values))
    rows = rows.abs() if magnitudes else rows

    assert torch.equal(ascending_order(rows), rows.argsort(dim=-1, stable=True))


@pytest.mark.parametrize("name", [name for name in ROWS if name != "float64"])
def test_without_a_compiler_rows_are_sorted_alike(name, monkeypatch):
    rows = ROWS[name]()
    rows[..., ::100] = torch.nan
    rows[..., 1::100] = -torch.nan
    functions = ascending_order, ranks, whole_ranks
    compiled = [function(rows) for function in functions]

    monkeypatch.setattr(sorting, "can_compile", lambda: False)

    assert all(map(torch.equal, compiled, [function(rows) for function in functions]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("extra", [0.0, torch.nan])
def test_long_rows_have_the_ranks_of_a_stable_sort(kind, extra):
    """Counted where the entries have few values, sorted by digits where they have many."""
    rows = KINDS[kind](drawn(1, 70_000)[:2])
    rows[:, 5::9] = extra

    order = rows.argsort(dim=-1, stable=True)

    assert torch.equal(whole_ranks(rows), order.argsort(dim=-1).int())


@pytest.mark.parametrize(
    ("kind", "counted"), [("float16", True), ("bfloat16", True), ("one value", True), ("drawn", False)]
)
def test_entries_of_few_values_are_counted(kind, counted):
    from mecha_exp.engine.compiler.kernels.counting import rank_by_counting

    row = KINDS[kind](drawn(2, 70_000)[0])
    starts, found = np.empty(MOST_COUNTERS, np.int32), np.empty(len(row), np.int32)

    assert rank_by_counting(row.view(torch.int32).numpy(), MOST_COUNTERS, starts, found) == counted


def test_long_rows_are_sorted_by_the_compiled_loop():
    assert sorting._radix_loop(drawn()) is not None
    assert sorting._radix_loop(drawn()[:, : SHORT_ROW - 1]) is None
