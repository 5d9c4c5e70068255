"""Synthetic models with the size and the shapes of real ones: a base, and experts a little off it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from mecha_exp.checkpoint import CheckpointWriter

# How often each shape occurs in a model of Stable Diffusion 1.5's size: 1.07e9 parameters, 2.1 GB in fp16.
SD15 = {
    (1280, 1280, 3, 3): 16,
    (1280, 2560, 3, 3): 10,
    (49408, 768): 1,
    (10240, 1280): 20,
    (1280, 5120): 20,
    (1280, 1280): 62,
    (320,): 500,
    (1280,): 480,
}
SIZES = {
    "small": {shape: max(1, count // 20) for shape, count in SD15.items()},
    "half": {shape: max(1, count // 4) for shape, count in SD15.items()},
    "sd15": SD15,
    "matrices": {shape: count for shape, count in SD15.items() if len(shape) > 1},
    "sdxl": {shape: round(3.27 * count) for shape, count in SD15.items()},
}
_CHUNK = 1 << 22


def make_models(folder: Path, count: int, size: str) -> list[Path]:
    """`count` models in a folder, the first one the base; those that are there already are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{size}-{i}.safetensors" for i in range(count)]
    for number, path in enumerate(paths):
        if not path.exists():
            write_model(path, SIZES[size], number)
    return paths


def many_keys(folder: Path, count: int, keys: int) -> list[Path]:
    """`count` models of so many keys of ten elements each."""
    paths = [folder / f"keys{keys}-{i}.safetensors" for i in range(count)]
    for number, path in enumerate(paths):
        if path.exists():
            continue
        layout = {f"layer.{i}.weight": ("F16", (10,)) for i in range(keys)}
        values = drawn_values(keys * 10, number)
        with CheckpointWriter(path, layout, {}, durable=False) as writer:
            for index, key in enumerate(layout):
                writer.write(key, 0, values[10 * index : 10 * index + 10])
            writer.commit()
    return paths


def write_model(path: Path, shapes: dict[tuple[int, ...], int], number: int) -> None:
    """One model: model 0 is the base, the others are the base with a change of a tenth of its size."""
    layout = {
        f"block.{index}.{'x'.join(map(str, shape))}.weight": ("F16", shape)
        for shape, count in shapes.items()
        for index in range(count)
    }
    with CheckpointWriter(path, layout, {"format": "pt"}, durable=False) as writer:
        for seed, (key, (_, shape)) in enumerate(layout.items()):
            for start, values in _tensor(int(np.prod(shape)), seed, number):
                writer.write(key, start, values)
        writer.commit()


def _tensor(numel: int, seed: int, number: int) -> Iterator[tuple[int, torch.Tensor]]:
    for start in range(0, numel, _CHUNK):
        size = min(_CHUNK, numel - start)
        values = drawn_values(size, seed * 1000 + start // _CHUNK)
        if number:
            values = values + 0.1 * drawn_values(size, (number * 100_003 + seed) * 1000 + start // _CHUNK)
        yield start, values.half()


def drawn_values(size: int, seed: int) -> torch.Tensor:
    """A stretch of one sequence that is drawn once: drawing every value anew takes minutes a model."""
    start = int(np.random.Generator(np.random.SFC64(seed)).integers(_CHUNK))
    return _draws()[start : start + size]


@functools.cache
def _draws() -> torch.Tensor:
    draws = np.random.Generator(np.random.SFC64(0)).standard_normal(2 * _CHUNK, dtype=np.float32)
    return torch.from_numpy(draws * np.float32(0.02)).half()
