# mypy: disable-error-code="no-untyped-call"
"""Sums over rows, in an order that torch and a compiled loop share.

Entry i of a row goes to lane i modulo 16, one after the other, in float64; then the lanes are added up, one
after the other. That order is as easy for torch as for a loop, and gives both the same bits for rows of any
length.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

ROW_LANES = 16
"""Running sums in a row. Not a setting: the bits depend on it."""


def row_sum(rows: Tensor) -> Tensor:
    """The sum of each row, [rows, 1] in float64."""
    return total_of_rows(rows.double())


def row_dot(a: Tensor, b: Tensor) -> Tensor:
    """The inner product of each row of a with that row of b, [rows, 1] in float64, as are the products."""
    return total_of_rows(a.double() * b.double())


def row_norm(rows: Tensor) -> Tensor:
    """The Euclidean norm of each row, [rows, 1] in float64, as are the squares; the root is the nearest."""
    return root_of_totals(total_of_rows(rows.double().square()))


def total_of_rows(wide: Tensor) -> Tensor:
    """The sum of each row of float64, [rows, 1]; see the module for the order."""
    if has_torch_function_unary(wide):
        return told(total_of_rows, wide)
    width = max(1, min(wide.shape[-1], ROW_LANES))
    strips = torch.nn.functional.pad(wide, (0, -wide.shape[-1] % width)).unflatten(-1, (-1, width))
    lanes = wide.new_zeros(*wide.shape[:-1], width)
    for strip in strips.unbind(-2):
        lanes = lanes + strip
    first, *others = lanes.split(1, -1)
    total: Tensor = sum(others, first)
    return total


def root_of_totals(totals: Tensor) -> Tensor:
    """The square root, rounded to the nearest as a processor does it; torch's may be one of MKL's."""
    if has_torch_function_unary(totals):
        return told(root_of_totals, totals)
    if totals.device.type != "cpu" or totals.requires_grad:
        return totals.sqrt()
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.asarray(np.sqrt(totals.numpy())))


def row_length(rows: Tensor) -> Tensor:
    """How many entries a row has, a number in float64: `rows.shape[-1]` for loops over rows of any length."""
    if has_torch_function_unary(rows):
        return told(row_length, rows)
    return torch.tensor(float(rows.shape[-1]), dtype=torch.float64)


def told(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """A call that a recorder sees as one operation; see `recorder.Guard`."""
    result: Tensor = handle_torch_function(function, (rows,), rows)
    return result


ROW_FUNCTIONS = {total_of_rows: "row_sum", root_of_totals: "root", row_length: "row_length"}
"""The operations that a recorder notes for these calls; see `ops.ROW_OPERATIONS`."""
