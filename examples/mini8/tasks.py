"""The eight tasks of mini8, made from handwritten digits, two photographs and computed gratings.

Every image comes from a *source*: a handwritten digit, a block of a photograph, a grating. Sources are split
into training, validation and test once, for all tasks, so no task trains on what another one is tested on.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

import torch
from safetensors.torch import load
from torch import Tensor

SPLITS = ("train", "validation", "test")
SHARES = (0.50, 0.15, 0.35)
"""The fraction of the sources in each split."""
SEED = 8
BLOCK = 16
"""Side in pixels of the blocks that photographs are split by; neighbouring patches lie in one block."""
GRATINGS = 1200


@dataclass(frozen=True)
class Task:
    """One task in one split.

    Attributes:
        images: float32 of shape `(n, 8, 8)`, from 0 (paper) to 1 (ink, or white of a photograph).
        labels: int64 of shape `(n,)`, from 0 to `classes - 1`.
        sources: the name of the source of each image, for example `digit 17`: examples with one source are
            not independent.
        classes: how many labels there are.
    """

    images: Tensor
    labels: Tensor
    sources: tuple[str, ...]
    classes: int

    def take(self, rows: Tensor) -> "Task":
        """The examples at these positions."""
        chosen = tuple(self.sources[i] for i in rows.tolist())
        return Task(self.images[rows], self.labels[rows], chosen, self.classes)


@lru_cache(maxsize=1)
def tasks() -> Mapping[str, Mapping[str, Task]]:
    """All tasks by split, then by name: `tasks()["test"]["digits"]`."""
    makers: dict[str, Callable[[str, torch.Generator], Task]] = {
        "digits": lambda split, random: _digits(split, lambda images: images),
        "rotated": lambda split, random: _digits(split, lambda images: images.rot90(1, (1, 2))),
        "permuted": lambda split, random: _digits(split, _permuted),
        "inverted": lambda split, random: _digits(split, lambda images: _inverted(images, random)),
        "rotation": _rotation,
        "halves": _halves,
        "photos": _photos,
        "gratings": _gratings,
    }
    generators = {
        (split, name): torch.Generator().manual_seed(SEED + 100 * number + position)
        for number, split in enumerate(SPLITS)
        for position, name in enumerate(makers)
    }
    return {s: {name: make(s, generators[s, name]) for name, make in makers.items()} for s in SPLITS}


@lru_cache(maxsize=1)
def _originals() -> dict[str, Tensor]:
    """The committed images: `digits`, `labels`, and the photographs `china` and `flower`, as uint8."""
    return load(resources.files("mecha_exp.examples.mini8").joinpath("sources.safetensors").read_bytes())


def _split_of(count: int, seed: int) -> Tensor:
    """The number of its split for each of `count` sources, at random but in the exact shares."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    bounds = (torch.tensor(SHARES).cumsum(0) * count).round().long()
    split = torch.empty(count, dtype=torch.long)
    split[order] = torch.searchsorted(bounds, torch.arange(count), right=True).clamp(max=2)
    return split


def _digit_rows(split: str) -> Tensor:
    """The rows of the digits in a split; each digit is split alike."""
    labels = _originals()["labels"]
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for digit in range(10):
        rows = torch.nonzero(labels == digit).flatten()
        chosen[rows[_split_of(len(rows), SEED + digit) == SPLITS.index(split)]] = True
    return torch.nonzero(chosen).flatten()


def _digits(split: str, change: Callable[[Tensor], Tensor]) -> Task:
    """Which digit it is, of images changed in some way."""
    rows = _digit_rows(split)
    images = change(_originals()["digits"][rows].float() / 16)
    return Task(images, _originals()["labels"][rows].long(), _names("digit", rows), 10)


def _permuted(images: Tensor) -> Tensor:
    """The pixels in another order, one order for all images."""
    order = torch.randperm(64, generator=torch.Generator().manual_seed(SEED))
    return images.flatten(1)[:, order].view(-1, 8, 8)


def _inverted(images: Tensor, random: torch.Generator) -> Tensor:
    """Ink and paper exchanged, with Gaussian noise of a quarter of the range."""
    return (1 - images + torch.randn(images.shape, generator=random) / 4).clamp(0, 1)


def _rotation(split: str, random: torch.Generator) -> Task:
    """By how many quarter turns a digit is turned."""
    digits = _digits(split, lambda images: images)
    turns = torch.randint(4, (len(digits.labels),), generator=random)
    images = torch.stack([image.rot90(int(n)) for image, n in zip(digits.images, turns, strict=True)])
    return Task(images, turns, digits.sources, 4)


def _halves(split: str, random: torch.Generator) -> Task:
    """Whether the left and the right half of a digit are exchanged."""
    digits = _digits(split, lambda images: images)
    exchanged = torch.randint(2, (len(digits.labels),), generator=random)
    images = torch.where(exchanged.bool().view(-1, 1, 1), digits.images.roll(4, 2), digits.images)
    return Task(images, exchanged, digits.sources, 2)


def _photos(split: str, random: torch.Generator) -> Task:
    """Which quadrant of which photograph a patch comes from; patches are split by blocks of 16x16 pixels."""
    images, labels, sources = [], [], []
    for number, name in enumerate(("china", "flower")):
        photo = _originals()[name].float() / 255
        blocks = photo.unfold(0, BLOCK, BLOCK).unfold(1, BLOCK, BLOCK)
        rows, columns = blocks.shape[:2]
        in_split = _split_of(rows * columns, SEED + number) == SPLITS.index(split)
        for block in torch.nonzero(in_split).flatten().tolist():
            row, column = divmod(block, columns)
            patches = blocks[row, column].unfold(0, 8, 8).unfold(1, 8, 8).reshape(-1, 8, 8)
            images.append(patches)
            quadrant = 2 * (2 * row >= rows) + (2 * column >= columns)
            labels += [4 * number + quadrant] * len(patches)
            sources += [f"{name} block {block}"] * len(patches)
    return Task(torch.cat(images), torch.tensor(labels), tuple(sources), 8)


def _gratings(split: str, random: torch.Generator) -> Task:
    """Which of six directions the stripes of a noisy grating run in."""
    rows = torch.nonzero(_split_of(GRATINGS, SEED) == SPLITS.index(split)).flatten()
    count = len(rows)
    direction = torch.randint(6, (count,), generator=random)
    phase, waves = (torch.rand(count, generator=random) for _ in range(2))
    angle = direction * (torch.pi / 6)
    y, x = torch.meshgrid(torch.linspace(-0.5, 0.5, 8), torch.linspace(-0.5, 0.5, 8), indexing="ij")
    along = x * angle.cos().view(-1, 1, 1) + y * angle.sin().view(-1, 1, 1)
    stripes = (2 * torch.pi * (along * (1 + 1.5 * waves).view(-1, 1, 1) + phase.view(-1, 1, 1))).sin()
    images = (0.5 + 0.3 * stripes + torch.randn(stripes.shape, generator=random) * 0.15).clamp(0, 1)
    return Task(images, direction, _names("grating", rows), 6)


def _names(kind: str, rows: Tensor) -> tuple[str, ...]:
    return tuple(f"{kind} {row}" for row in rows.tolist())
