"""Arithmetic on runs: stretches of entries that lie in memory one after another.

For methods that look at neighbours, which a fused loop does not see: the neighbours at a distance are the
same run begun elsewhere.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from mecha_exp.engine.compiler.jit import LoopText, can_compile, compiled
from mecha_exp.engine.compiler.object_file import Loop
from mecha_exp.engine.compiler.ops import NUMBERS


class RunLoop:
    """A compiled loop that computes the entries of some runs from those at the same place of others.

    Args:
        lines: what is done to one entry, in Python's arithmetic, with `smaller(a, b)` and `larger(a, b)`,
            which take b where one is not a number. x0, x1, ... are the entries of the inputs, {t}(0.1) is a
            constant: `["y = smaller(x0, x1) + {t}(0.1) * x2"]`. Nothing is put into another order, or fused.
        inputs: how many runs are read.
        results: what the lines call the entry of each output.
        dtype: of all runs. There are loops for float32 and float64.
    """

    def __init__(self, lines: Iterable[str], inputs: int, results: Sequence[str], dtype: torch.dtype) -> None:
        self._counts, self._has_loop = (inputs, len(results)), dtype in (torch.float32, torch.float64)
        kind, stretches = NUMBERS[dtype], 1 + len(results)  # outputs overlap with nothing
        addresses = [f"x{n}_" for n in range(inputs)] + [f"y{n}_" for n in range(len(results))]
        source = (
            f"from numba import {kind}, int64",
            "from mecha_exp.engine.compiler.kernels.intrinsics import *",
            "",
            "def loop(start, count, table):",
            f"    runs = array_at(table, {len(addresses)}, int64)",
            *(f"    {name} = runs[{n}]" for n, name in enumerate(addresses)),
            "    for i in range(start, start + count):",
            *(f"        x{n} = entry(x{n}_, i, {kind}, 0, {stretches})" for n in range(inputs)),
            *(f"        {line.format(t=kind)}" for line in lines),
            *(f"        put(y{n}_, i, {name}, {n + 1}, {stretches})" for n, name in enumerate(results)),
        )
        self._text = LoopText("\n".join(source) + "\n", room=0)

    @cached_property
    def _loop(self) -> Loop | None:
        return compiled(self._text) if self._has_loop and can_compile() else None

    def __call__(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
        """Fill the outputs; False, and nothing is done, where there is no loop for these tensors.

        Args:
            inputs: contiguous, of one length and the loop's dtype; they may overlap with each other.
            outputs: the same, but no output overlaps with another run.
        """
        runs = (*inputs, *outputs)
        assert (len(inputs), len(outputs)) == self._counts
        assert all(run.is_contiguous() and run.shape == runs[0].shape for run in runs)
        loop = self._loop if runs[0].device.type == "cpu" else None
        if loop is None:
            return False
        table = array("q", [run.data_ptr() for run in runs])
        loop(0, runs[0].numel(), table.buffer_info()[0])
        return True
