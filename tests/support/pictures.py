"""Small pictures in folders and tables, for tests of evaluators that see them."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image


def picture(seed: int, size: int = 20) -> Image.Image:
    """Coloured noise, the same for a seed."""
    chance = np.random.default_rng(seed)
    noise = chance.integers(0, 90, (size, size + seed % 5, 3)) + chance.integers(0, 160, 3)
    return Image.fromarray(noise.astype(np.uint8))


def content(seed: int) -> bytes:
    """The bytes of a PNG."""
    buffer = io.BytesIO()
    picture(seed).save(buffer, "PNG")
    return buffer.getvalue()


def write_folders(root: Path, classes: Sequence[str], count: int, *, splits: Sequence[str] = ("",)) -> Path:
    """Write `count` pictures of each class on each split; returns the folder of the task."""
    seed = sum(map(ord, root.name))
    for split in splits:
        for name in classes:
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                seed += 1
                picture(seed).save(folder / f"{number}.png")
    return root
