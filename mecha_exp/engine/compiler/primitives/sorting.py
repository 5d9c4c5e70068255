"""Order and ranks of the entries of rows, by a radix sort in machine code where there is one.

Of equal entries the earlier one comes first, 0.0 and -0.0 are equal, and NaN lies beyond infinity on the side
of its sign: what numpy finds where a loop cannot be compiled is the same.
"""

from __future__ import annotations

from array import array

import torch
from torch import Tensor
from torch.overrides import has_torch_function_unary

from mecha_exp.engine.compiler.abi import WIDEST_DIGIT, RadixJob
from mecha_exp.engine.compiler.jit import LoopText, can_compile, compiled
from mecha_exp.engine.compiler.object_file import Loop
from mecha_exp.engine.compiler.primitives.rows import told

RADIX_TEXT = LoopText(
    "from mecha_exp.engine.compiler.kernels.radix import sort_rows\n\n"
    "def loop(start, count, table):\n"
    "    sort_rows(count, table)\n",
    room=0,
)
"""The source of the radix kernel."""

SHORT_ROW = 512
"""Entries of a row below which counting digits costs more than comparing."""

MOST_COUNTERS = 1 << 18
"""Values of the entries of a row up to which each has a counter: as many stay in the second cache."""

_LONGEST_ROW = 1 << 31


def ascending_order(values: Tensor) -> Tensor:
    """The places along the last axis from the smallest entry to the largest, as int64."""
    if _radix_loop(values) is None:
        return _order(values)
    places = torch.arange(values.shape[-1]).expand_as(values)
    return torch.empty(values.shape, dtype=torch.int64).scatter_(-1, whole_ranks(values).long(), places)


def _order(values: Tensor) -> Tensor:
    """The places in ascending order, by torch or numpy."""
    if values.dtype is not torch.float32 or values.device.type != "cpu":
        return values.argsort(dim=-1, stable=True)
    bits = (values + 0.0).view(torch.int32)  # adding zero makes -0.0 equal to 0.0
    ascending = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    # whole numbers with the value in their upper half and the place in the lower one: no two are equal
    keys = (ascending.long() << 32) + torch.arange(values.shape[-1] if values.ndim else 1)
    keys.numpy().sort(axis=-1)
    return keys & 0xFFFFFFFF


def whole_ranks(rows: Tensor) -> Tensor:
    """The place of each entry in its row, from 0 for the smallest, as int32; rows are shorter than 2^31."""
    loop = _radix_loop(rows)
    result = torch.empty(rows.shape, dtype=torch.int32, device=rows.device)
    if loop:
        _sort(loop, rows.detach().contiguous(), result)
        return result
    places = torch.arange(rows.shape[-1] if rows.ndim else 1, dtype=torch.int32, device=rows.device)
    return result.scatter_(-1, _order(rows), places.expand_as(rows))


def ranks(rows: Tensor) -> Tensor:
    """The place of each entry in its row, from 0 for the smallest, in the dtype of the rows."""
    if has_torch_function_unary(rows):
        return told(ranks, rows)
    loop = _radix_loop(rows)
    if loop is None:
        return whole_ranks(rows).to(rows)
    result = rows.detach().clone(memory_format=torch.contiguous_format)
    _sort(loop, result)
    return result


def _radix_loop(values: Tensor) -> Loop | None:
    """The radix kernel, where it can sort these rows and is faster than numpy."""
    fits = values.dtype is torch.float32 and values.device.type == "cpu" and values.ndim > 0
    if not (fits and SHORT_ROW <= values.shape[-1] < _LONGEST_ROW and can_compile()):
        return None
    return compiled(RADIX_TEXT)


def _sort(loop: Loop, rows: Tensor, ranks: Tensor | None = None) -> None:
    """Write the ranks of rows, or turn them into ranks."""
    columns = rows.shape[-1]
    room = torch.empty(2 * columns, dtype=torch.int64)  # which takes no memory where counters do
    counters = min(columns, MOST_COUNTERS)
    counts = torch.empty(max(1 << WIDEST_DIGIT, counters), dtype=torch.int32)
    addresses = {
        RadixJob.ROWS: rows.data_ptr(),
        RadixJob.COLUMNS: columns,
        RadixJob.RANKS: 0 if ranks is None else ranks.data_ptr(),
        RadixJob.ROOM: room.data_ptr(),
        RadixJob.COUNTS: counts.data_ptr(),
        RadixJob.COUNTERS: counters,
    }
    table = array("q", [addresses[word] for word in RadixJob])
    loop(0, rows.numel() // columns, table.buffer_info()[0])
