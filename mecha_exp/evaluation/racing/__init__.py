"""Races: points are measured on a growing part of the examples, and those that fall behind are dropped."""

from mecha_exp.evaluation.racing.fidelity import Fidelity, Hyperband, read_fidelity
from mecha_exp.evaluation.racing.order import Order
from mecha_exp.evaluation.racing.race import Dropped, Race
from mecha_exp.evaluation.racing.settings import HALVING, TEST, RaceSettings, read_race

__all__ = [
    "HALVING",
    "TEST",
    "Dropped",
    "Fidelity",
    "Hyperband",
    "Order",
    "Race",
    "RaceSettings",
    "read_fidelity",
    "read_race",
]
