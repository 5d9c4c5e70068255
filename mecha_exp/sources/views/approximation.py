"""A model with rows for tokens that it lacks, approximated from the rows of a donor that has them."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

import torch

from mecha_exp.checkpoint import TensorInfo, is_arithmetic, round_to, torch_dtype
from mecha_exp.checkpoint.positional import FileRegion
from mecha_exp.errors import CheckpointError, RecipeError, counted
from mecha_exp.families import is_embedding
from mecha_exp.sources.source import Source, SourceView, read_values_as_bytes
from mecha_exp.sources.views.pursuit import sparse_sums
from mecha_exp.sources.views.row_table import RowTable
from mecha_exp.sources.vocabulary import token_axes, with_tokens


@dataclass(frozen=True)
class Approximation:
    """The rows that are approximated, and the rows that they are approximated from.

    Attributes:
        shared: the tokens that both models have, each a row of the model and one of the donor: `0@5+1@7`.
        rows: the rows of the donor that are approximated.
        k: how many rows a sum has at most.
    """

    shared: str
    rows: str
    k: int = 64

    @cached_property
    def own_rows(self) -> torch.Tensor:
        """The row of each shared token in the model."""
        return self._pairs[:, 0]

    @cached_property
    def donor_rows(self) -> torch.Tensor:
        """The row of each shared token in the donor."""
        return self._pairs[:, 1]

    @cached_property
    def wanted(self) -> torch.Tensor:
        """The rows of the donor that are approximated."""
        table = RowTable.parse(self.rows)
        runs = table.runs
        if table.padding or any([model for model, _ in run.origins] != [0] for run in runs):
            raise RecipeError("approximate_rows: rows: expected rows of the donor alone, such as 5 and 9:12.")
        return torch.cat([torch.arange(run.count) + run.origins[0][1] for run in runs])

    @cached_property
    def _pairs(self) -> torch.Tensor:
        runs = RowTable.parse(self.shared).runs
        if any([model for model, _ in run.origins] != [0, 1] for run in runs):
            raise RecipeError(
                "approximate_rows: shared: expected a row of each model for every token, such as 0@5+1@7."
            )
        pairs = torch.cat(
            [torch.arange(run.count)[:, None] + torch.tensor([row for _, row in run.origins]) for run in runs]
        )
        if self.k > len(pairs):
            raise RecipeError(
                f"approximate_rows: a sum of k={self.k} rows is asked for, and the models share "
                f"{counted(len(pairs), 'token')}. Set k={len(pairs)} or less."
            )
        return pairs


class ApproximatedRows(SourceView):
    """A model whose embedding and output layer have the approximated rows, and no others.

    The sums are found when a row is first read, one tensor at a time. Their places and coefficients stay in
    memory, 16 k bytes for each row. While they are sought, the donor's rows of shared tokens are there in
    float32 as well. A vector with one number for each token, such as a bias, gets zeros.

    Args:
        original: the model.
        donor: the one that has the tokens.
        what: which rows are approximated.

    Raises:
        CheckpointError: the donor has no tensor for one of the model, or not the rows.
        RecipeError: there are fewer shared tokens than rows in a sum.
    """

    def __init__(self, original: Source, donor: Source, what: Approximation) -> None:
        super().__init__(original)
        self._donor, self._what = donor, what
        self._keys = original.all_keys()
        self._axes = token_axes(original, self._keys)
        self._donor_keys = {key: _donor_key(key, donor) for key in self._axes}
        for key, other in self._donor_keys.items():
            axis = self._axes[key]
            _require_rows(original, key, axis, what.own_rows)
            _require_rows(
                donor, other, min(axis, len(donor.info(other).shape) - 1), what.donor_rows, what.wanted
            )
        self._infos: dict[str, TensorInfo] = {}
        self._sums: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._lock = threading.Lock()

    def keys(self) -> Collection[str]:
        return self._keys

    def info(self, key: str) -> TensorInfo:
        if key not in self._infos:  # views lie on views
            info = self._original.info(key)
            if key in self._donor_keys:
                shape = with_tokens(info.shape, self._axes[key], len(self._what.wanted))
                info = TensorInfo.made(info.dtype, shape)
            self._infos[key] = info
        return self._infos[key]

    def read_into(self, key: str, start: int, out: torch.Tensor) -> None:
        if key not in self._donor_keys:
            self._original.read_into(key, start, out)
        elif key.endswith("bias"):
            out.zero_()
        else:
            self._add_rows(key, start, out)

    def read_bytes_into(self, key: str, start: int, view: memoryview) -> None:
        if key not in self._donor_keys:
            self._original.read_bytes_into(key, start, view)
        else:
            read_values_as_bytes(self, key, start, view)

    def region(self, key: str) -> FileRegion | None:
        return None if key in self._donor_keys else self._original.region(key)

    def expect(self, keys: Iterable[str]) -> None:
        listed = [key for key in keys if key in self._original]
        self._original.expect(listed)
        self._donor.expect([self._donor_keys[key] for key in listed if key in self._donor_keys])

    def _add_rows(self, key: str, start: int, out: torch.Tensor) -> None:
        """Fill a tile with sums of the model's rows, added in float64."""
        places, coefficients = self._sums_of(key)
        width, end = self.info(key).shape[1], start + out.numel()
        for row in range(start // width, math.ceil(end / width)):
            first, last = max(start, row * width), min(end, (row + 1) * width)
            used = coefficients[row].nonzero()[:, 0]
            parts = torch.zeros((len(used), last - first), dtype=out.dtype)
            for part, place in zip(parts, self._what.own_rows[places[row, used]].tolist(), strict=True):
                self._original.read_into(key, place * width + first - row * width, part)
            out[first - start : last - start] = round_to(coefficients[row, used] @ parts.double(), out.dtype)

    def _sums_of(self, key: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The shared tokens that each row is the sum of, and their coefficients; found once."""
        with self._lock:
            if key not in self._sums:
                donor_key, wanted = self._donor_keys[key], self._what.wanted
                atoms = _read_rows(self._donor, donor_key, self._what.donor_rows)
                self._sums[key] = sparse_sums(
                    lambda first, end: _read_rows(self._donor, donor_key, wanted[first:end]),
                    len(wanted),
                    atoms,
                    self._what.k,
                )
            return self._sums[key]


def _donor_key(key: str, donor: Source) -> str:
    """The key of the donor's embedding or output layer; a donor that is tied has one for both."""
    keys = [other for other in token_axes(donor) if other.endswith(".weight")]
    same = [other for other in keys if is_embedding(other) == is_embedding(key)]
    if key in donor:
        return key
    if len(same or keys) == 1:
        return (same or keys)[0]
    raise CheckpointError(
        f"approximate_rows: '{key}' has no counterpart in {donor.name}, which has "
        f"{counted(len(keys), 'tensor')} with a row for each token. Take a donor of the same architecture."
    )


def _require_rows(model: Source, key: str, axis: int, *rows: torch.Tensor) -> None:
    info, last = model.info(key), max(int(each.max()) for each in rows)
    if last >= info.shape[axis]:
        raise CheckpointError(
            f"approximate_rows: row {last} of '{key}' is asked for, and {model.name} has {info.shape[axis]}, "
            "numbered from 0."
        )
    if not is_arithmetic(info.dtype):
        raise CheckpointError(
            f"approximate_rows: '{key}' of {model.name} is {info.dtype}. Rows of floating point are added."
        )


def _read_rows(model: Source, key: str, rows: torch.Tensor) -> torch.Tensor:
    """Rows of a model [rows, width] in float32.

    Raises:
        CheckpointError: one of them has a NaN or an infinity.
    """
    info = model.info(key)
    width, values = info.shape[1], torch.empty((len(rows), info.shape[1]), dtype=torch.float32)
    row = torch.empty(width, dtype=torch_dtype(info.dtype))
    for number, place in enumerate(rows.tolist()):
        model.read_into(key, place * width, row)
        values[number] = row
    if not (finite := values.isfinite().all(1)).all():
        raise CheckpointError(
            f"approximate_rows: row {int(rows[~finite][0])} of '{key}' of {model.name} has a NaN or an "
            "infinity, of which no sum is made. Mend that model, or take another donor."
        )
    return values
