"""Codes times scales: one scale for a tensor, or one for each row, column, group or block."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mecha_exp.checkpoint.dtypes import is_arithmetic
from mecha_exp.errors import CheckpointError
from mecha_exp.sources.quantised.tensor import QuantisedTensor, powers_of_two, read_part, widened
from mecha_exp.sources.source import Source

BITSANDBYTES_STEP = 7.874015718698502e-3
"""1 / 127: bitsandbytes stores the largest magnitude of a row, which the code 127 stands for."""


class ScaledTensor(QuantisedTensor):
    """(code - zero) * scale, in float32, where a scale belongs to a block of the tensor.

    Args:
        source: the stored model.
        codes, scale: keys; the scale is floating point, or E8M0 (bytes that are exponents).
        block: the size of a block along the last axes; None where the shapes tell it.
        zero: the key of whole numbers of the shape of the scale, subtracted from the codes; None for 0.
        step: a number by which all is multiplied last.

    Raises:
        CheckpointError: the shape of the scale does not fit that of the codes.
    """

    def __init__(
        self,
        source: Source,
        codes: str,
        scale: str,
        *,
        block: Sequence[int] | None = None,
        zero: str | None = None,
        step: float | None = None,
    ) -> None:
        self._source, self._codes, self._scale, self._zero, self._step = source, codes, scale, zero, step
        self.keys = (codes, scale, *([zero] if zero else []))
        self.shape = source.info(codes).shape
        scales = source.info(scale).shape
        if zero and math.prod(source.info(zero).shape) != math.prod(scales):
            raise CheckpointError(f"{zero} has another shape than {scale}")
        self._count = math.prod(scales)
        if self._count != 1:
            self._scales = _with_all_axes(scales, self.shape)
            self._blocks = _block_sizes(self._scales, self.shape, block, f"{codes} and {scale}")

    def decode(self, start: int, stop: int) -> Tensor:
        if self._count == 1 or start == stop:
            return self._times(self._numbers(start, stop), *self._read_scales(0, 1))
        columns = self.shape[-1]
        first, last = start // columns, -(-stop // columns)
        rows = self._scale_rows(torch.arange(first, last))
        low, high, across = int(rows[0]), int(rows[-1]) + 1, self._scales[-1]
        at = torch.arange(start, stop)
        places = rows[at // columns - first] - low
        places = places * across + at % columns // self._blocks[-1]
        scale, zero = self._read_scales(low * across, high * across)
        numbers = self._numbers(start, stop)
        return self._times(numbers, scale[places], None if zero is None else zero[places])

    def _numbers(self, start: int, stop: int) -> Tensor:
        """Some codes as float32, in a tensor that may be changed."""
        return widened(read_part(self._source, self._codes, start, stop))

    def _times(self, numbers: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        if zero is not None:
            numbers -= zero
        numbers *= scale
        return numbers if self._step is None else numbers.mul_(self._step)

    def _read_scales(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        scale = read_part(self._source, self._scale, start, stop)
        is_number = is_arithmetic(self._source.info(self._scale).dtype)
        zero = read_part(self._source, self._zero, start, stop).float() if self._zero else None
        return (scale.float() if is_number else powers_of_two(scale.view(torch.uint8))), zero

    def _scale_rows(self, rows: Tensor) -> Tensor:
        """The row of the scales for each row of the tensor; both are counted over all axes but the last."""
        place, stride = torch.zeros_like(rows), 1
        axes = zip(self.shape[:-1], self._scales[:-1], self._blocks[:-1], strict=True)
        for size, count, block in reversed([*axes]):
            place += rows % size // block * stride
            rows, stride = rows // size, stride * count
        return place


def _with_all_axes(scales: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of scales with as many axes as their tensor; those that it lacks are its last."""
    return (*scales, *[1] * (len(shape) - len(scales)))


def _block_sizes(
    scales: Sequence[int], shape: Sequence[int], block: Sequence[int] | None, what: str
) -> list[int]:
    """The size of a block along each axis.

    Raises:
        CheckpointError: the numbers of blocks do not fit the shape.
    """
    fault = CheckpointError(f"{what} do not fit each other: {list(shape)} and {list(scales)}")
    if len(scales) != len(shape):
        raise fault
    sizes = [size if count == 1 else 1 for size, count in zip(shape, scales, strict=True)]
    if block is not None:
        if len(block) > len(shape):
            raise fault
        sizes[-len(block) :] = block
    elif shape[-1] % scales[-1] == 0:
        sizes[-1] = shape[-1] // scales[-1]
    if any(-(-size // b) != count for size, b, count in zip(shape, sizes, scales, strict=True)):
        raise fault
    return sizes
