"""Adam on a few numbers within bounds, in float64, as a function of its last state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

DECAYS = (0.9, 0.999)
EPSILON = 1e-8


@dataclass(frozen=True)
class Adam:
    """The state of Adam (Kingma and Ba 2015, arXiv:1412.6980) after some steps.

    A value may leave its bounds and is cut to them where it is used; outside of them its gradient is 0, as
    that of `torch.clamp`, which AdaMerging's code has.

    Attributes:
        raw: the values, float64 [parts, experts], before they are cut.
        mean, square: the moments of the gradient, of the same shape.
        steps: how many were made.
        rate: the learning rate.
        low, high: the bounds.
    """

    raw: Floats
    mean: Floats
    square: Floats
    steps: int
    rate: float
    low: float
    high: float

    @classmethod
    def begin(cls, start: Floats, rate: float, low: float, high: float) -> Adam:
        """The state before the first step."""
        return cls(start, np.zeros_like(start), np.zeros_like(start), 0, rate, low, high)

    @property
    def values(self) -> Floats:
        """The values within the bounds."""
        return np.clip(self.raw, self.low, self.high)

    def after(self, gradient: Floats) -> Adam:
        """The state one step later.

        Args:
            gradient: of the loss with respect to `values`, of their shape.
        """
        inside = (self.raw >= self.low) & (self.raw <= self.high)
        gradient = np.where(inside, gradient, 0.0)
        steps, (first, second) = self.steps + 1, DECAYS
        mean = first * self.mean + (1 - first) * gradient
        square = second * self.square + (1 - second) * gradient**2
        change = (mean / (1 - first**steps)) / (np.sqrt(square / (1 - second**steps)) + EPSILON)
        return replace(self, raw=self.raw - self.rate * change, mean=mean, square=square, steps=steps)

    def as_lists(self) -> dict[str, Any]:
        """The state that changes from step to step, for JSON, which keeps float64 exactly."""
        arrays = {"raw": self.raw, "mean": self.mean, "square": self.square}
        return {name: array.tolist() for name, array in arrays.items()} | {"steps": self.steps}

    def at(self, lists: dict[str, Any]) -> Adam:
        """The state that `as_lists` wrote, with the settings of this one."""
        raw, mean, square = (np.array(lists[name], dtype=np.float64) for name in ("raw", "mean", "square"))
        return replace(self, raw=raw, mean=mean, square=square, steps=int(lists["steps"]))
