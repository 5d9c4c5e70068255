"""Refuses a race where the points that it drops would be missed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mecha_exp.app.search.space import MODE as SEARCH
from mecha_exp.errors import ConfigError
from mecha_exp.evaluation import Scoring
from mecha_exp.evaluation.racing import HALVING, Fidelity
from mecha_exp.report.results import REPLICATE_KEYS

if TYPE_CHECKING:
    from mecha_exp.app.command_line import CommandLine

_CHOOSES = ("grid", "zip", "points", "random", "latin", "experts", SEARCH)
"""The modes of `sweep` that look for the best point; the others ask for effects, which need all points."""


def check_race(line: CommandLine, scoring: Scoring) -> None:
    """Check that the points of a sweep can race.

    Raises:
        ConfigError: there is one point, another launcher or sweeper, there are replicates, or the sweep asks
            for the effects of all points.
    """
    if scoring.race is None:
        return
    what = f"evaluator.race={HALVING if scoring.race.rule == HALVING else 'true'}"
    if isinstance(scoring.race, Fidelity):
        what = f"sweep.fidelity={scoring.race.key}"
    choices = line.config.hydra.runtime.choices
    replicates = [key for key in line.swept if key in REPLICATE_KEYS]
    if not line.is_sweep:
        raise ConfigError(
            f"{what}: one point has nothing to race against. Leave it out, or list several values with -m."
        )
    if not line.lists_points or line.adaptive is not None:
        searching = (
            f"sweep={line.config.sweep.mode}"
            if line.lists_points
            else f"hydra/sweeper={choices['hydra/sweeper']}"
        )
        raise ConfigError(
            f"{what}: {searching} needs the number of every point, and a race drops points before they have "
            "one. Leave it out, or list the points."
        )
    if choices["hydra/launcher"] != "onepass":
        raise ConfigError(
            f"{what}: hydra/launcher={choices['hydra/launcher']} runs points apart from each other, and "
            "points that race run together. Leave one of the two out."
        )
    if line.config.sweep.mode not in _CHOOSES:
        raise ConfigError(
            f"{what}: sweep={line.config.sweep.mode} asks for effects, which need the numbers of all "
            "points, and a race drops points. Leave it out."
        )
    if replicates:
        raise ConfigError(
            f"{what}: {replicates[0]} makes replicates, and the mean of a setting needs all of them, "
            "while a race drops points. Leave the race or the replicates out (sweep.replicate=[])."
        )
