"""What is learned: a weight for each expert, or for each expert and part of the model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mecha_exp.app.adaptive.optimiser import Floats
from mecha_exp.app.adaptive.points import EXPERT, KEY
from mecha_exp.architectures.anatomy import Anatomy
from mecha_exp.errors import ConfigError
from mecha_exp.graph.by_key import DEFAULT
from mecha_exp.lab.points import SAMPLED_DIGITS

_SPECIAL = re.compile(r"([:\[\](){},=\\])")


@dataclass(frozen=True)
class Coefficients:
    """The parts of a model that have a weight for each expert.

    Attributes:
        kind: one of `KINDS` of `points.py`.
        parts: the selectors of the parts as recipes name them, `default` for the keys outside of the others.
        of_key: the place of each key's part.
        experts: how many there are.
    """

    kind: str
    parts: tuple[str, ...]
    of_key: Mapping[str, int]
    experts: int

    @classmethod
    def of(cls, kind: str, keys: Sequence[str], anatomy: Anatomy, experts: int, name: str) -> Coefficients:
        """The coefficients of a kind for the keys of a model.

        Args:
            kind: one of `KINDS`.
            keys: what is merged.
            anatomy: of the model.
            experts: how many there are.
            name: of the model, for messages.

        Raises:
            ConfigError: the model has no such parts.
        """
        selected = _parts(kind, keys, anatomy)
        if kind != EXPERT and not selected:
            raise ConfigError(
                f"sweep.by={kind}: {name} has no {kind}s that are known. Use sweep.by=key, which has a "
                "weight for each tensor, or sweep.by=expert."
            )
        named = [DEFAULT] * any(key not in selected for key in keys) + list(dict.fromkeys(selected.values()))
        place = {part: number for number, part in enumerate(named)}
        return cls(kind, tuple(named), {key: place[selected.get(key, DEFAULT)] for key in keys}, experts)

    @property
    def shape(self) -> tuple[int, int]:
        """The number of parts, and that of experts."""
        return len(self.parts), self.experts

    @property
    def identity(self) -> list[object]:
        """The kind, the parts, and the part of each key, as JSON has them."""
        return [self.kind, list(self.parts), dict(self.of_key)]

    def by_key(self, values: Floats) -> dict[str, Floats]:
        """The weights of the experts at each key, from those of the parts, float64 [parts, experts]."""
        return {key: values[place] for key, place in self.of_key.items()}

    def gradient(self, products: Floats) -> Floats:
        """The sums over the keys of each part, [keys, experts] to [parts, experts]."""
        sums = np.zeros(self.shape)
        np.add.at(sums, list(self.of_key.values()), products)
        return sums

    def weights(self, values: Floats) -> dict[str, list[float]] | list[float]:
        """The hyperparameter `weights` of a recipe, with six significant digits: a list, or one by part."""
        rounded = [[float(f"{value:.{SAMPLED_DIGITS}g}") for value in row] for row in values.tolist()]
        return rounded[0] if self.kind == EXPERT else dict(zip(self.parts, rounded, strict=True))

    def text(self, values: Floats) -> str:
        """The weights of the parts as they are typed on a command line."""
        weights = self.weights(values)
        if isinstance(weights, list):
            return _list(weights)
        named = (_SPECIAL.sub(r"\\\1", part) + f":{_list(row)}" for part, row in weights.items())
        return "{" + ",".join(named) + "}"


def _parts(kind: str, keys: Sequence[str], anatomy: Anatomy) -> dict[str, str]:
    """The part of each key that lies in one."""
    if kind == EXPERT:
        return {}
    if kind == KEY:
        return {key: key for key in keys}
    named = anatomy.components if kind == "component" else anatomy.blocks
    layers = set(anatomy.layers)
    return {key: named[key] for key in keys if named[key] and (kind != "layer" or named[key] in layers)}


def _list(values: Sequence[float]) -> str:
    return "[" + ",".join(f"{value:.{SAMPLED_DIGITS}g}" for value in values) + "]"
