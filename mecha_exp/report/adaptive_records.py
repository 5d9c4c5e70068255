"""What adaptive sweeps leave in their folders beside the points: losses, learned weights, choices."""

from __future__ import annotations

import csv
from pathlib import Path

NOTHING = "nothing"
"""The label of points whose weights were not learned."""
GRADIENT, GREEDY_SOUP = "gradient", "greedy_soup"
"""The modes of sweeps that learn weights, and that choose experts one by one."""
LOSSES_FILE, WEIGHTS_FILE = "learning.csv", "learned_weights.csv"
CHOICES_FILE = "greedy_soup.csv"
FILES = (LOSSES_FILE, WEIGHTS_FILE, CHOICES_FILE)
"""Every file that such a sweep may leave."""


def losses_by_step(folder: Path) -> dict[str, list[float]]:
    """The loss before each step of each descent, by its name; none where the file is missing."""
    losses: dict[str, list[float]] = {}
    for row in _rows(folder / LOSSES_FILE):
        losses.setdefault(row["learned"], []).append(float(row["loss"]))
    return losses


def choices(folder: Path) -> list[dict[str, str]]:
    """The rows of a greedy soup's table: `expert`, `alone`, `tried`, `soup`, `p` and `kept`, as texts."""
    return _rows(folder / CHOICES_FILE)


def weights_at(folder: Path, learned: str, step: int) -> dict[str, dict[str, float]]:
    """The weights of experts by part of the model, as a descent had them after a step; empty if unknown."""
    weights: dict[str, dict[str, float]] = {}
    for row in _rows(folder / WEIGHTS_FILE):
        if (row["learned"], row["step"]) == (learned, str(step)):
            weights.setdefault(row["part"], {})[row["expert"]] = float(row["weight"])
    return weights


def _rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, as texts by column; none where there is no such file."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
