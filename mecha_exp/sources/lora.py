"""A LoRA file read as the differences that it makes to the tensors of a model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping

import torch

from mecha_exp.architectures.lora import ALPHA, IA3_ON_INPUT
from mecha_exp.architectures.lora_deltas import Deltas
from mecha_exp.checkpoint import TensorInfo, dtype_name, is_arithmetic
from mecha_exp.checkpoint.positional import FileRegion
from mecha_exp.errors import CheckpointError, counted, some
from mecha_exp.sources.format_view import convert_source
from mecha_exp.sources.source import Source, SourceView, infos_of, read_values_as_bytes
from mecha_exp.system.byte_cache import ByteCache
from mecha_exp.system.texts import json_hash

CACHED_DELTAS = 4
"""How many of the largest differences the cache has room for: workers share the tiles of a few keys."""


class DeltaSource(SourceView):
    """A source with a model's keys, whose values are what an adapter adds to the model's tensors.

    `keys()` are the keys that the adapter changes. Any other key of the model reads as zeros. A difference is
    computed as a whole, in float32 (float64 if one of the files has it), and cached.

    Args:
        original: the adapter.
        dtype: of the differences.
        changed: the keys that it changes.
        budget: the largest size of the cache in bytes.
    """

    is_partial = True

    def __init__(self, original: Source, dtype: torch.dtype, changed: Collection[str], budget: int) -> None:
        super().__init__(original)
        self._bases: list[Source] = []
        self._dtype = dtype
        self._changed = dict.fromkeys(changed)
        largest = max((self.info(key).nbytes for key in self._changed), default=0)
        self._cache = ByteCache(min(budget, CACHED_DELTAS * largest))

    def _depend_on(self, base: Source) -> None:
        """The differences are those of two sources: the adapter, and the model that it changes."""
        self.files = tuple(dict.fromkeys((*self.files, *base.files)))
        parts = (self.identity, base.identity)
        self.identity = None if None in parts else (json_hash(parts),)
        self._bases.append(base)

    def check_unchanged(self) -> None:
        self._original.check_unchanged()
        for base in self._bases:
            base.check_unchanged()

    @abstractmethod
    def all_keys(self) -> Collection[str]:
        """The keys of the model that have a difference, be it zero."""

    @abstractmethod
    def _shape(self, key: str) -> tuple[int, ...]:
        """The shape of a tensor of the model."""

    @abstractmethod
    def _delta(self, key: str) -> torch.Tensor:
        """The difference to a tensor that the adapter changes."""

    def keys(self) -> Collection[str]:
        return self._changed.keys()

    def __contains__(self, key: object) -> bool:
        return key in self.all_keys()

    def info(self, key: str) -> TensorInfo:
        return TensorInfo.made(dtype_name(self._dtype), self._shape(key))

    def read_into(self, key: str, start: int, out: torch.Tensor) -> None:
        if key in self._changed:
            delta = self._cache.get(key, lambda: self._delta(key).to(self._dtype).reshape(-1))
            out.copy_(delta[start : start + out.numel()])
        else:
            out.zero_()

    def read_bytes_into(self, key: str, start: int, view: memoryview) -> None:
        read_values_as_bytes(self, key, start, view)

    def region(self, key: str) -> FileRegion | None:
        return None

    def _read(self, key: str) -> torch.Tensor:
        """A tensor of the adapter, in the dtype of the differences."""
        return self._original.read(key).to(self._dtype)


class AdapterSource(DeltaSource):
    """The differences that a LoRA file makes to a model of a known config.

    Args:
        original: the file.
        deltas: computes the differences.
        budget: the largest size of the cache in bytes.
        base: the model, for modules that depend on its tensors; None where it is not at hand.

    Raises:
        CheckpointError: the file has keys that belong to no module, modules that do not fit the model, or
            factors of whole numbers.
    """

    def __init__(self, original: Source, deltas: Deltas, budget: int, base: Source | None = None) -> None:
        infos = infos_of(original)
        deltas.check({key: info.shape for key, info in infos.items()}, original.name, base is not None)
        require_numbers(original.name, infos)
        self._deltas = deltas
        self._unused = deltas.unused(infos)
        super().__init__(original, dtype_of(infos), deltas.changed(infos), budget)
        self._base = None
        if base is not None and deltas.reading(infos):
            self._base = convert_source(base, deltas.config.base, deltas.target)
            self._depend_on(base)

    def notes(self, keys: Collection[str]) -> Iterator[str]:
        """Say which modules are left out, such as those of a text encoder beside a UNet."""
        if self._unused:
            yield (
                f"{counted(len(self._unused), 'key is', 'keys are')} left out, as "
                f"'{self._deltas.target.identifier}' has nothing that they change: {some(self._unused, 5)}"
            )

    def all_keys(self) -> Collection[str]:
        return [key for key in self._deltas.target.keys() if key in self._deltas]

    def __contains__(self, key: object) -> bool:
        return key in self._deltas

    def _shape(self, key: str) -> tuple[int, ...]:
        return self._deltas.shape(key)

    def _delta(self, key: str) -> torch.Tensor:
        base = None if self._base is None else self._base.read
        return self._deltas.delta(key, self._original.__contains__, self._read, base)


def dtype_of(*files: Mapping[str, TensorInfo]) -> torch.dtype:
    """The dtype of differences: float64 where a file has it, else float32."""
    infos = (info for infos in files for info in infos.values())
    return torch.float64 if any(info.dtype == "F64" for info in infos) else torch.float32


def require_numbers(name: str, infos: Mapping[str, TensorInfo]) -> None:
    """Refuse factors of whole numbers, which are codes whose scales are not in the file.

    Raises:
        CheckpointError: naming them.
    """
    codes = [
        f"{key} ({info.dtype})"
        for key, info in infos.items()
        if not is_arithmetic(info.dtype)
        and not (key.endswith((f".{ALPHA}", f".{IA3_ON_INPUT}")) and info.numel == 1)
    ]
    if codes:
        raise CheckpointError(
            f"{name}: the factors of a LoRA are floating point, and {some(codes, 3)} are whole numbers: "
            "codes of a quantised file whose scales are not known. Use it as it was before it was quantised."
        )
