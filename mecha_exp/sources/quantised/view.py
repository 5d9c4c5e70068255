"""A quantised model read as the plain one: each code times its scale, tile by tile."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

import torch

from mecha_exp.checkpoint import TensorInfo
from mecha_exp.checkpoint.positional import FileRegion, fill_by_units
from mecha_exp.checkpoint.quantisation import LAYERS, quantisation_of, refusal
from mecha_exp.errors import CheckpointError, Problems, counted
from mecha_exp.sources.quantised.layouts import Layout, layout_of
from mecha_exp.sources.source import Source, SourceView

DTYPE = "F32"
"""The dtype that a dequantised tensor counts as, which is that of the arithmetic."""

DECODED = 1 << 20
"""The numbers that are decoded at once, so that memory does not grow with the tensor."""

CACHED = 1 << 30
"""The bytes of stored tensors that are held at most, where a format has to be read as whole tensors."""

OPTION = "on_quantised=dequantise (convert --dequantise) reads it exactly, each code as the number it is."

_Name = TypeVar("_Name")


class DequantisedSource(SourceView):
    """A quantised source with the keys and shapes of the plain model.

    A tensor that is stored as codes reads as float32: code times scale, in float32 arithmetic. The companions
    of the codes are left out. All other tensors are as they are stored.

    Attributes:
        layout: the quantised tensors and their format.
    """

    def __init__(self, original: Source, layout: Layout) -> None:
        super().__init__(original)
        self.layout = layout
        plain = {tensor.keys[0]: key for key, tensor in layout.tensors.items()}
        hidden = {key for tensor in layout.tensors.values() for key in tensor.keys[1:]}
        hidden.update(layout.activations, layout.others)
        self._keys = dict.fromkeys(plain.get(key, key) for key in original.keys() if key not in hidden)
        self._infos = {key: TensorInfo.made(DTYPE, tensor.shape) for key, tensor in layout.tensors.items()}

    def __str__(self) -> str:
        count, dropped = len(self.layout.tensors), len(self.layout.activations)
        words = f"{self.name} is quantised: {self.layout.quantisation}. "
        words += f"{_tensors(count)} read as float32, code times scale"
        scales = counted(dropped, "scale of activations is", "scales of activations are")
        return words + (f"; {scales} left out" if dropped else "")

    @property
    def metadata(self) -> Mapping[str, str]:
        return {name: text for name, text in self._original.metadata.items() if name != LAYERS}

    def keys(self) -> Collection[str]:
        return self._keys.keys()

    def info(self, key: str) -> TensorInfo:
        if key not in self._keys:
            raise self._unknown(key)
        return self._infos.get(key) or self._original.info(key)

    def read_bytes_into(self, key: str, start: int, view: memoryview) -> None:
        tensor = self.layout.tensors.get(key)
        if tensor is None:
            self._original.read_bytes_into(key, start, view)
        else:
            fill_by_units(view, start, torch.float32.itemsize, DECODED, tensor.decode)

    def region(self, key: str) -> FileRegion | None:
        return None if key in self._infos else self._original.region(key)


def dequantised(source: Source, budget: int = CACHED) -> Source:
    """The plain model that a quantised one stands for; the source itself where it is plain.

    Args:
        budget: the bytes of stored tensors that may be held, where a format has to be read as whole tensors.

    Raises:
        CheckpointError: it is quantised in a way that cannot be read exactly.
    """
    layout = layout_of(source, budget)
    return source if layout is None else DequantisedSource(source, layout)


def is_decoded(source: Source) -> bool:
    """Whether a model that is read as plain numbers is stored as codes."""
    return isinstance(source, DequantisedSource) or bool(source.codes)


def with_plain_keys(source: Source) -> Source:
    """A model with the keys and shapes of the plain one, where these can be told; for looking at them."""
    try:
        return dequantised(source)
    except CheckpointError:
        return source


def require_plain(
    sources: Mapping[_Name, Source], on_quantised: str, budget: int = CACHED
) -> dict[_Name, Source]:
    """The models as plain numbers.

    Args:
        on_quantised: `error`, or `dequantise`.
        budget: as for `dequantised`.

    Raises:
        CheckpointError: each model that is quantised and cannot be read, or is not to be read, and the way
            out.
    """
    plain: dict[_Name, Source] = {}
    problems = Problems()
    for name, source in sources.items():
        try:
            plain[name] = dequantised(source, budget)
        except CheckpointError as error:
            problems.add(error)
            continue
        if (plain[name] is not source or source.codes) and on_quantised == "error":
            quantisation = quantisation_of(source)
            assert quantisation is not None
            problems.add(refusal(source, quantisation, OPTION))
    problems.raise_as(CheckpointError)
    return plain


def _tensors(count: int) -> str:
    return counted(count, "tensor is", "tensors are")


def notes_on(sources: Collection[Source]) -> list[str]:
    """A line about each model that is dequantised."""
    views = [str(source) for source in sources if isinstance(source, DequantisedSource)]
    coded = [
        f"{source.name} is quantised: {quantisation_of(source)}. {_tensors(len(source.codes))} read as "
        "float32, as the package gguf dequantises them"
        for source in sources
        if source.codes
    ]
    return views + coded
