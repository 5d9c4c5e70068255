"""Sums over columns, in an order that torch and a compiled loop share.

Rows lie side by side in wide rows of up to 1024 entries, or of a whole row if that is more. Eight wide rows
are added one after the other, in float64, then such groups, and in the end the parts of the wide sum that
belong to the same columns, in halves.
"""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from mecha_exp.engine.compiler.jit import LoopText, can_compile, compiled
from mecha_exp.engine.compiler.object_file import Loop
from mecha_exp.engine.compiler.ops import NUMBERS

WIDE_ROW, GROUP = 1 << 10, 8
"""Entries of a wide row, and wide rows of a group. Not settings: the bits depend on them."""


def products_of_columns(a: Tensor, b: Tensor) -> Tensor:
    """|a|^2, |b|^2 and <a, b> of each column of two matrices, [3, columns], summed in float64."""
    columns = a.shape[-1]
    parts = 1 << max(0, (WIDE_ROW // columns).bit_length() - 1)
    sums = a.new_zeros(3, parts, columns, dtype=torch.float64)
    loop = _loop(a, b)
    if loop:
        runs = (a.contiguous(), b.contiguous(), *sums)
        table = array("q", [run.data_ptr() for run in runs])
        loop(parts * columns, a.numel(), table.buffer_info()[0])
    else:
        for first, second in zip(_groups(a, sums[0]), _groups(b, sums[0]), strict=True):
            sums = sums + torch.stack([_sum(first * first), _sum(second * second), _sum(first * second)])
    while sums.shape[1] > 1:
        first, second = sums.chunk(2, 1)
        sums = first + second
    return sums[:, 0]


def _groups(rows: Tensor, wide_row: Tensor) -> tuple[Tensor, ...]:
    """Groups of wide rows in float64, the last one filled up with zeros."""
    flat = rows.double().reshape(-1)
    padding = -len(flat) % (GROUP * wide_row.numel())
    return torch.nn.functional.pad(flat, (0, padding)).view(-1, GROUP, *wide_row.shape).unbind()


def _sum(group: Tensor) -> Tensor:
    first, *others = group.unbind()
    total: Tensor = sum(others, first)
    return total


def _loop(a: Tensor, b: Tensor) -> Loop | None:
    """A loop that adds up the products of such tensors; None where there is none."""
    is_plain = type(a) is type(b) is Tensor and a.dtype is b.dtype and a.device.type == "cpu"
    return compiled(_TEXTS[a.dtype]) if is_plain and a.dtype in _TEXTS and can_compile() else None


def _text(kind: str) -> LoopText:
    places = [f"array_at(places[{n}], count, {kind})" for n in range(2)]
    sums = [f"array_at(places[{n}], width, float64)" for n in range(2, 5)]
    return LoopText(
        f"from numba import {kind}, float64, int64\n"
        "from mecha_exp.engine.compiler.kernels.columns import add_products, array_at\n\n"
        "def loop(width, count, table):\n"
        "    places = array_at(table, 5, int64)\n"
        f"    add_products({', '.join([*places, 'width', *sums])})\n",
        room=0,
    )


_TEXTS = {dtype: _text(NUMBERS[dtype]) for dtype in (torch.float32, torch.float64)}
