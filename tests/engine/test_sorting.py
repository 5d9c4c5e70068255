"""The radix sort of rows is the stable sort of torch, whatever the entries are."""

import pytest
import torch

from mecha_exp.engine.compiler import sorting
from mecha_exp.engine.compiler.sorting import SHORT_ROW, ascending_order, ranks

COLUMNS = 3 * SHORT_ROW + 5


def drawn(seed: int = 0) -> torch.Tensor:
    return torch.randn(7, COLUMNS, generator=torch.Generator().manual_seed(seed))


ROWS = {
    "drawn": drawn,
    "zeros of both signs": lambda: torch.where(drawn(1) > -1, drawn().sign() * 0.0, drawn()),
    "two values": lambda: drawn().sign(),
    "one value": lambda: torch.full((2, COLUMNS), -3.0),
    "sorted": lambda: drawn().sort().values,
    "reversed": lambda: drawn().sort(descending=True).values,
    "denormals": lambda: drawn() * 1e-40,
    "infinities": lambda: torch.where(drawn(1) > 1, torch.inf * drawn().sign(), drawn()),
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


@pytest.mark.parametrize("name", [name for name in ROWS if name != "float64"])
def test_without_a_compiler_rows_are_sorted_alike(name, monkeypatch):
    rows = ROWS[name]()
    rows[..., ::100] = torch.nan
    rows[..., 1::100] = -torch.nan
    compiled = ascending_order(rows), ranks(rows)

    monkeypatch.setattr(sorting, "can_compile", lambda: False)

    assert torch.equal(compiled[0], ascending_order(rows))
    assert torch.equal(compiled[1], ranks(rows))


def test_long_rows_are_sorted_by_the_compiled_loop():
    assert sorting._radix_loop(drawn()) is not None
    assert sorting._radix_loop(drawn()[:, : SHORT_ROW - 1]) is None
