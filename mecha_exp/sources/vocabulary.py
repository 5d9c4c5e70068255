"""Models that differ in their vocabulary: a missing output layer, more or fewer rows.

A language model may use its embedding as its output layer and store it once (tied), and fine-tuning may have
added tokens. Such a model is merged with others only after a decision, which is the user's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import torch

from mecha_exp.checkpoint import TensorInfo, round_to, stored_bytes, torch_dtype
from mecha_exp.checkpoint.positional import FileRegion
from mecha_exp.families import may_have_tokens, token_tables
from mecha_exp.sources.source import Source, SourceView, read_values_as_bytes


def token_axes(source: Source, keys: Iterable[str] | None = None) -> dict[str, int]:
    """The keys of a source, or those of some, that have an entry for each token, with the axis of the tokens.

    Axes before that one have one place, so that the entries of a token lie side by side.
    """
    likely = filter(may_have_tokens, source.keys() if keys is None else keys)
    return token_tables({key: source.info(key).shape for key in likely})


def with_tokens(shape: tuple[int, ...], axis: int, count: int) -> tuple[int, ...]:
    """A shape with another number of tokens."""
    return (*shape[:axis], count, *shape[axis + 1 :])


def as_stored(source: Source) -> Source:
    """The source below its vocabulary views: with the keys and rows that the file has."""
    return source.stored if isinstance(source, VocabularyView) else source


def vocabulary_donor(source: Source) -> Source | None:
    """The source whose vocabulary a view with more or fewer rows has; None for any other source."""
    return source.donor if isinstance(source, VocabularyView) else None


class VocabularyView(SourceView):
    """Another source with tied keys added, with keys dropped, or with other numbers of rows.

    Args:
        original: the source to read.
        tied: the keys to add, each with the key of the original whose tensor it shares.
        dropped: the keys to leave out.
        rows: by key the new shape, and the source of the rows that the original lacks.

    Attributes:
        stored: the source below all vocabulary views.
        donor: the source that has the number of rows that this one gets; None if it keeps its own.
    """

    def __init__(
        self,
        original: Source,
        tied: Mapping[str, str] | None = None,
        dropped: Collection[str] = (),
        rows: Mapping[str, tuple[tuple[int, ...], Source]] | None = None,
    ) -> None:
        super().__init__(original)
        self._tied = dict(tied or {})
        self._rows = dict(rows or {})
        self._keys = dict.fromkeys([key for key in original.keys() if key not in dropped] + list(self._tied))
        self.stored = as_stored(original)
        donors = (as_stored(donor) for _, donor in self._rows.values())
        self.donor = next(donors, vocabulary_donor(original))

    def keys(self) -> Collection[str]:
        return self._keys.keys()

    def info(self, key: str) -> TensorInfo:
        info = self._original.info(self._tied.get(key, key))
        if key not in self._rows:
            return info
        shape = self._rows[key][0]
        return replace(info, shape=shape, nbytes=stored_bytes(info.dtype, shape))

    def read_into(self, key: str, start: int, out: torch.Tensor) -> None:
        original_key = self._tied.get(key, key)
        count = max(0, min(self._original.info(original_key).numel - start, out.numel()))
        if count:
            self._original.read_into(original_key, start, out[:count])
        if count < out.numel():
            donor = self._rows[key][1]
            added = torch.empty(out.numel() - count, dtype=torch_dtype(donor.info(key).dtype))
            donor.read_into(key, start + count, added)
            out[count:] = round_to(added, out.dtype)

    def read_bytes_into(self, key: str, start: int, view: memoryview) -> None:
        read_values_as_bytes(self, key, start, view)

    def region(self, key: str) -> FileRegion | None:
        return None if key in self._rows else self._original.region(self._tied.get(key, key))
