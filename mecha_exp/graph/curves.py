"""Values that change with depth: gradients over the layers, and the published presets of block weights.

A curve gives a value for block `i` of `n` blocks in the order of depth. The presets are those that users of
merge-block weights (MBW) share as lists of numbers for Stable Diffusion 1 (25 blocks) and SDXL (19 blocks):
here they are what the lists are samples of, so that they fit any number of blocks.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from mecha_exp.errors import RecipeError, did_you_mean

Sampled: TypeAlias = Callable[[int, int], float]
"""(index of a block, number of blocks) -> its weight."""


@dataclass(frozen=True)
class Gradient:
    """Points that are spread evenly over the depth, with linear interpolation in between.

    >>> [Gradient((0.0, 1.0, 0.5)).at(i, 5) for i in range(5)]
    [0.0, 0.5, 1.0, 0.75, 0.5]
    """

    points: tuple[float, ...]

    def at(self, index: int, count: int) -> float:
        """The value of block `index` (from 0) of `count`; a single block has the first point."""
        position = index / max(count - 1, 1) * (len(self.points) - 1)
        before = min(int(position), max(len(self.points) - 2, 0))
        after = min(before + 1, len(self.points) - 1)
        share = position - before
        return self.points[before] * (1 - share) + self.points[after] * share

    @property
    def elsewhere(self) -> float | None:
        """The value of keys that lie in no layer, neither before nor after them: a gradient has none."""
        return None

    @property
    def range(self) -> tuple[float, ...]:
        """Values that bound the others."""
        return self.points


@dataclass(frozen=True)
class Preset:
    """A published curve, by name.

    Raises:
        RecipeError: there is no curve of that name.
    """

    name: str

    def __post_init__(self) -> None:
        if self.name not in PRESETS:
            raise RecipeError(f"unknown preset of blocks '{self.name}'.{did_you_mean(self.name, PRESETS)}")

    def at(self, index: int, count: int) -> float:
        """The value of block `index` (from 0) of `count`."""
        return PRESETS[self.name](index, count)

    @property
    def elsewhere(self) -> float | None:
        """The value of keys that lie in no layer: as published for BASE, 0 in all presets but one."""
        return 1.0 if self.name == "ALL_B" else 0.0

    @property
    def range(self) -> tuple[float, ...]:
        """Values that bound the others."""
        return (0.0, 1.0)


def _over_depth(curve: Callable[[float], float]) -> Sampled:
    """A curve over the depth, 0 at the first block and 1 at the last."""
    return lambda index, count: curve(index / max(count - 1, 1))


def _from_middle(curve: Callable[[float], float]) -> Sampled:
    """A curve over the distance to the middle block, in blocks and below 0 before it."""
    return lambda index, count: curve(index - (count - 1) / 2)


def _reversed(curve: Sampled) -> Sampled:
    return lambda index, count: 1 - curve(index, count)


def _smoothstep(t: float) -> float:
    return t * t * (3 - 2 * t)


def _folded(x: float) -> float:
    """A triangle wave: up from 0 to 1, down again, and so on."""
    return 1 - abs(x % 2 - 1)


def _wrap(blocks: int) -> Sampled:
    """1 at the first and the last blocks, `blocks` in all."""
    return lambda index, count: float(index < blocks / 2 or count - 1 - index < blocks / 2)


def _rings(blocks: int, gap: int) -> Sampled:
    """1 at two groups of blocks, `blocks` in all, with a gap around the middle."""
    return _from_middle(lambda x: float(gap / 2 <= abs(x) < (gap + blocks) / 2))


def _cubic_hermite(t: float, start: float = 0.0) -> float:
    """From `start` to 1 with a slope of 25/6 at both ends."""
    slope = 25 / 6
    return start * (2 * t**3 - 3 * t**2 + 1) + slope * (2 * t**3 - 3 * t**2 + t) + t * t * (3 - 2 * t)


def _presets() -> dict[str, Sampled]:
    curves: dict[str, Sampled] = {
        "GRAD_V": _over_depth(lambda t: abs(1 - 2 * t)),
        "GRAD_A": _over_depth(lambda t: 1 - abs(1 - 2 * t)),
        "FLAT_25": lambda index, count: 0.25,
        "FLAT_75": lambda index, count: 0.75,
        "WRAP08": _wrap(8),
        "WRAP12": _wrap(12),
        "WRAP14": _wrap(14),
        "WRAP16": _wrap(16),
        "MID12_50": _from_middle(lambda x: 0.5 * (-7 <= x <= 6)),
        "OUT07": lambda index, count: float(index >= count - 7),
        "OUT12": _from_middle(lambda x: float(x > 0)),
        "OUT12_5": _from_middle(lambda x: 0.5 * (x >= 0) + 0.5 * (x > 0)),
        "RING08_SOFT": _from_middle(lambda x: min(max(1.5 - abs(abs(x) - 5) / 2, 0), 1)),
        "RING08_5": _rings(8, 5),
        "RING10_5": _rings(10, 5),
        "RING10_3": _rings(10, 3),
        "SMOOTHSTEP": _over_depth(_smoothstep),
        "COSINE": _over_depth(lambda t: (1 + math.cos(math.pi * t)) / 2),
        "TRUE_CUBIC_HERMITE": _over_depth(lambda t: _cubic_hermite(t, 1 / 24) if t > 0 else 0.0),
        "FAKE_CUBIC_HERMITE": _over_depth(_cubic_hermite),
    }
    for times in (2, 3, 4):
        curves[f"SMOOTHSTEP*{times}"] = _over_depth(lambda t, n=times: _folded(n * _smoothstep(t)))  # type: ignore[misc]
        curves[f"SMOOTHSTEP/{times}"] = _over_depth(lambda t, n=times: _smoothstep(_folded(n * t)))  # type: ignore[misc]
    named = {"SMOOTHSTEP": "REVERSE-SMOOTHSTEP", "COSINE": "REVERSE_COSINE"}
    named |= {name: f"R_{name}" for name in curves if name.startswith("SMOOTHSTEP") and name[10:]}
    named |= {f"{kind}_CUBIC_HERMITE": f"{kind}_REVERSE_CUBIC_HERMITE" for kind in ("TRUE", "FAKE")}
    curves |= {reverse: _reversed(curves[name]) for name, reverse in named.items()}
    curves["LINEAR"] = _over_depth(lambda t: t)  # of LiNeS, arXiv:2410.17146
    return curves | {"ALL_A": lambda index, count: 0.0, "ALL_B": lambda index, count: 1.0}


PRESETS = _presets()
"""Every preset by its published name."""


def is_like_a_preset(word: str) -> bool:
    """Whether a word is the name of a preset, or a likely misspelling."""
    return bool(difflib.get_close_matches(word.upper(), PRESETS, n=1, cutoff=0.7))
