"""The request for an adaptive sweep: a configuration, and what has been prepared of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from omegaconf import DictConfig

from mecha_exp.app.adaptive.points import AdaptivePoints
from mecha_exp.app.point import Point
from mecha_exp.evaluation import Scoring
from mecha_exp.lab.points import Setting


@dataclass(frozen=True)
class Request:
    """An adaptive sweep as it is asked for.

    Attributes:
        config: of a point, with the settings of `sweep`.
        point: one of its points.
        scoring: what measures it.
        known: its points that are known beforehand.
        words: makes the overrides of a point from what it sets.
    """

    config: DictConfig
    point: Point
    scoring: Scoring
    known: AdaptivePoints
    words: Callable[[Setting], list[str]]
