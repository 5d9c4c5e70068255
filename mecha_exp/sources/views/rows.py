"""A model with the rows of its tokens in other places, or from other models; read row by row."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import reduce

import torch

from mecha_exp.checkpoint import (
    TensorInfo,
    dtype_name,
    is_arithmetic,
    round_to,
    torch_dtype,
)
from mecha_exp.checkpoint.positional import FileRegion
from mecha_exp.errors import CheckpointError, RecipeError
from mecha_exp.sources.source import Source, SourceView, read_values_as_bytes
from mecha_exp.sources.views.row_table import RowTable, Run
from mecha_exp.sources.vocabulary import token_axes, with_tokens

_CHUNK = 1 << 18
"""How many elements are held at once for the mean of all rows."""


class RowsSource(SourceView):
    """A source whose embedding and output layer have rows of other places. Other keys are as they were.

    Rows are gathered as they are asked for, so a tile is all that is in memory. The mean of several rows is
    computed in float64 and rounded to the dtype of the tensor: the one that all models are promoted to.

    Args:
        original: the source to read, model 0 of the table.
        table: where the rows come from.
        others: the models 1, 2, ... of the table.

    Raises:
        RecipeError: the table names a model that is not given.
        CheckpointError: there are no rows of tokens, a model lacks a key or a row that the table names, a
            tensor has rows of another size, or is not floating point.
    """

    def __init__(self, original: Source, table: RowTable, others: Sequence[Source] = ()) -> None:
        super().__init__(original)
        if max(table.ends, default=0) > len(others):
            raise RecipeError(
                f"take_rows: rows are taken from model {max(table.ends)}, counted from 0, and "
                f"{1 + len(others)} are given."
            )
        self._table = table
        self._models = (original, *others)
        self._keys = original.all_keys()
        self._axes = token_axes(original, self._keys)
        self._infos = {key: self._info_of(key) for key in self._axes}
        if not self._infos:
            raise CheckpointError(
                f"take_rows: {original.name} has no key that is known for a row for each token, such as "
                "model.embed_tokens.weight."
            )
        self._means: dict[str, torch.Tensor] = {}
        self._lock = threading.Lock()

    def keys(self) -> Collection[str]:
        return self._keys

    def info(self, key: str) -> TensorInfo:
        return self._infos.get(key) or self._original.info(key)

    def read_into(self, key: str, start: int, out: torch.Tensor) -> None:
        if key not in self._infos:
            self._original.read_into(key, start, out)
            return
        width = self._width(key)
        for run, offset, piece in self._pieces(start, out, width):
            self._fill(key, run, offset, piece)
        first_padded = self._table.count * width
        done = max(0, min(first_padded - start, out.numel()))
        if done < out.numel():
            column = (start + done) % width
            rows = math.ceil((column + out.numel() - done) / width)
            out[done:] = self._mean(key).repeat(rows)[column : column + out.numel() - done]

    def read_bytes_into(self, key: str, start: int, view: memoryview) -> None:
        if key not in self._infos:
            self._original.read_bytes_into(key, start, view)
        else:
            read_values_as_bytes(self, key, start, view)

    def region(self, key: str) -> FileRegion | None:
        if key not in self._infos:
            return self._original.region(key)
        region, row = self._original.region(key), self._table.start
        if region is None or row is None:
            return None
        itemsize = torch_dtype(self.info(key).dtype).itemsize
        return region._replace(offset=region.offset + row * self._width(key) * itemsize)

    def expect(self, keys: Iterable[str]) -> None:
        listed = list(keys)
        for number, model in enumerate(self._models):
            model.expect([key for key in listed if self._is_read_through(number, key)])

    def _is_read_through(self, number: int, key: str) -> bool:
        """Whether a key of a model is read from its first element to its last."""
        if key not in self._infos:
            return number == 0 and key in self._original
        model = self._models[number]
        return key in model and self._table.reads_through(number, model.info(key).shape[self._axes[key]])

    def _info_of(self, key: str) -> TensorInfo:
        """The dtype and the new shape of a key, once it is seen that all rows are there."""
        own, axis = self._original.info(key), self._axes[key]
        dtypes = []
        for number in {0, *self._table.ends}:
            model = self._models[number]
            if key not in model:
                raise CheckpointError(
                    f"take_rows: rows of {self.name} come from {model.name}, which has no '{key}'."
                )
            info, end = model.info(key), self._table.ends.get(number, 0)
            if with_tokens(info.shape, axis, 0) != with_tokens(own.shape, axis, 0):
                raise CheckpointError(
                    f"take_rows: '{key}' is {list(own.shape)} in {self.name} and {list(info.shape)} in "
                    f"{model.name}. Rows of one size are moved."
                )
            if end > info.shape[axis]:
                raise CheckpointError(
                    f"take_rows: row {end - 1} of '{key}' is asked for, and {model.name} has "
                    f"{info.shape[axis]}, numbered from 0."
                )
            if not is_arithmetic(info.dtype):
                raise CheckpointError(
                    f"take_rows: '{key}' of {model.name} is {info.dtype}. Rows of floating point are moved."
                )
            dtypes.append(torch_dtype(info.dtype))
        dtype = dtype_name(reduce(torch.promote_types, dtypes))
        return TensorInfo.made(dtype, with_tokens(own.shape, axis, self._table.total))

    def _width(self, key: str) -> int:
        """How many elements a row has."""
        return math.prod(self._infos[key].shape[self._axes[key] + 1 :])

    def _pieces(self, start: int, out: torch.Tensor, width: int) -> Iterator[tuple[Run, int, torch.Tensor]]:
        """The parts of a tile that lie in one run each, with the number of the first element in the run."""
        end = start + out.numel()
        for run in self._table.between(start // width, math.ceil(end / width)):
            first, last = max(start, run.at * width), min(end, run.end * width)
            yield run, first - run.at * width, out[first - start : last - start]

    def _fill(self, key: str, run: Run, offset: int, piece: torch.Tensor) -> None:
        """Read a part of a run: zeros, rows of a model, or the mean of rows."""
        width = self._width(key)
        parts = [(self._models[model], row * width + offset) for model, row in run.origins]
        if not parts:
            piece.zero_()
        elif len(parts) == 1:
            _read(*parts[0], key, piece)
        else:
            total = torch.zeros(piece.numel(), dtype=torch.float64)
            values = torch.empty_like(total)
            for model, first in parts:
                _read(model, first, key, values)
                total += values
            piece.copy_(round_to(total / len(parts), piece.dtype))

    def _mean(self, key: str) -> torch.Tensor:
        """The mean of all rows before the padding, found once."""
        with self._lock:
            if key not in self._means:
                self._means[key] = self._mean_of_rows(key)
            return self._means[key]

    def _mean_of_rows(self, key: str) -> torch.Tensor:
        width, dtype = self._width(key), torch_dtype(self.info(key).dtype)
        total = torch.zeros(width, dtype=torch.float64)
        step = max(1, _CHUNK // width)
        for row in range(0, self._table.count, step):
            rows = torch.empty(min(step, self._table.count - row) * width, dtype=dtype)
            self.read_into(key, row * width, rows)
            total += rows.view(-1, width).double().sum(0)
        return round_to(total / self._table.count, dtype)


def _read(model: Source, start: int, key: str, out: torch.Tensor) -> None:
    """Read elements of a model into a tensor of another dtype, too."""
    dtype = torch_dtype(model.info(key).dtype)
    values = out if dtype == out.dtype else torch.empty(out.numel(), dtype=dtype)
    model.read_into(key, start, values)
    if values is not out:
        out.copy_(round_to(values, out.dtype))
