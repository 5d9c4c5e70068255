"""Files of statistics as `calibrate` writes them, with drawn numbers, for merges with data."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from bench.models import drawn_values
from mecha_exp.checkpoint import CheckpointWriter, open_stored
from mecha_exp.sources.statistics.header import FISHER, GRAM, MASK, StatisticsHeader, fingerprint

ROWS = 6000
"""How many rows of inputs the header tells of."""
OF_AN_ENTRY: dict[str, Callable[[Tensor], Tensor]] = {
    FISHER: lambda values: values.float().square(),
    MASK: lambda values: (values > 0.04).float(),  # of one entry in forty
}
VOCABULARY = 40_000
"""From so many rows on a matrix is an embedding, which has no Gram matrix."""
_CHUNK = 1 << 22


def make_statistics(models: Sequence[Path], kind: str) -> list[Path]:
    """A file of one kind of statistics beside each model; those that are there already are kept."""
    files = [model.with_suffix(f".{kind}.safetensors") for model in models]
    for number, (model, file) in enumerate(zip(models, files, strict=True)):
        if not file.exists():
            write_statistics(model, file, kind, number)
    return files


def write_statistics(model: Path, output: Path, kind: str, seed: int) -> None:
    """Write statistics of every key; Gram matrices of linear layers alone, which have small ones."""
    with open_stored(model) as stored:
        shapes = {key: stored.info(key).shape for key in stored.keys()}
        of_model = fingerprint(stored)
    if kind == GRAM:
        linear = {k: s for k, s in shapes.items() if len(s) == 2 and s[0] < VOCABULARY}
        shapes = {key: (inputs, inputs) for key, (_, inputs) in linear.items()}
    rows = dict.fromkeys(shapes, ROWS) if kind == GRAM else {}
    header = StatisticsHeader(str(model), "", of_model, "drawn", "", ROWS, 0, "true", (kind,), rows)
    layout = {f"{kind}/{key}": ("F32", shape) for key, shape in shapes.items()}
    with CheckpointWriter(output, layout, header.metadata(), durable=False) as writer:
        for number, (name, (_, shape)) in enumerate(layout.items()):
            for start, values in _values(kind, shape, 1000 * seed + number):
                writer.write(name, start, values)
        writer.commit()
    _products.cache_clear()


def _values(kind: str, shape: tuple[int, ...], seed: int) -> Iterator[tuple[int, Tensor]]:
    """Stretches of a statistic, each with where it begins."""
    if kind == GRAM:
        yield 0, _products(shape[0]).flatten()
        return
    numel = math.prod(shape)
    for start in range(0, numel, _CHUNK):
        size = min(_CHUNK, numel - start)
        yield start, OF_AN_ENTRY[kind](drawn_values(size, seed + start))


@functools.cache
def _products(inputs: int) -> Tensor:
    """A Gram matrix of drawn inputs, one for all layers of a size: drawing each anew takes minutes."""
    x = torch.randn(256, inputs, generator=torch.Generator().manual_seed(inputs))
    return x.mT @ x / 256 + torch.eye(inputs)
