"""Which adaptive sweep a configuration asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from omegaconf import DictConfig

from mecha_exp.app.adaptive.gradient import learning_of
from mecha_exp.app.adaptive.points import AdaptivePoints, AdaptiveSweep
from mecha_exp.app.adaptive.soup import soup_of
from mecha_exp.app.point import Point
from mecha_exp.evaluation import Scoring
from mecha_exp.lab.points import Setting
from mecha_exp.report.adaptive import GRADIENT, GREEDY_SOUP

Words = Callable[[Setting], list[str]]
Make = Callable[[DictConfig, Point, Scoring, AdaptivePoints, Words], AdaptiveSweep]
_MAKERS: Mapping[str, Make] = {GRADIENT: learning_of, GREEDY_SOUP: soup_of}


def adaptive_sweep(
    config: DictConfig, point: Point, scoring: Scoring, known: AdaptivePoints, words: Words
) -> AdaptiveSweep:
    """The adaptive sweep of a configuration.

    Args:
        config: of a point, with the settings of `sweep`.
        point: one of its points.
        scoring: what measures it.
        known: its points that are known beforehand.
        words: makes the overrides of a point from what it sets.

    Raises:
        ConfigError: anything that is wrong with it; nothing has been written then.
    """
    return _MAKERS[config.sweep.mode](config, point, scoring, known, words)
