"""How many forward passes a race saves, and how often it keeps the winner.

    python -m bench.racing outputs/multiruns/2026-01-01_12-00-00   # replays races on the outcomes of sweeps
    python -m bench.racing --no-effect                             # how often the best is dropped wrongly

A sweep that was measured whole has the outcomes that a race would have seen. They are raced in many orders.
What is left in a race is measured whole afterwards, and that is counted, too.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.report import table
from mecha_exp.app.batch import MOST_POINTS
from mecha_exp.evaluation.outcomes import Outcomes
from mecha_exp.evaluation.racing import HALVING, TEST, Order, Race, RaceSettings
from mecha_exp.evaluation.racing.order import Part
from mecha_exp.evaluation.racing.settings import HALVING_LOOKS
from mecha_exp.runs.outcomes import POINT, outcomes_of_sweep

HEAD = [
    "outcomes",
    "points",
    "examples",
    "race",
    "forward passes saved",
    "winner kept",
    "points left",
    "score lost",
]
RULES = (
    ("true", TEST, HALVING_LOOKS),
    ("halving", HALVING, HALVING_LOOKS),
    ("halving after 1/9 and 1/3", HALVING, (1 / 9, 1 / 3)),
)
"""How races are named in the table, their rule, and when they drop points."""


@dataclass
class Replay:
    """Points with known outcomes, which count the examples that a race measures.

    Attributes:
        points: the outcomes on all examples, by name.
        measured: examples so far.
        complete: the points that were measured on all of them.
    """

    points: Mapping[str, Outcomes]
    measured: int = 0
    complete: set[str] = field(default_factory=set)

    def measure(self, names: Sequence[str], part: Part) -> dict[str, Outcomes]:
        """What an evaluator returns for a part of the examples."""
        self.measured += len(names) * sum(map(len, part.values()))
        return {name: _some(self.points[name], part) for name in names}

    def whole(self, name: str) -> Outcomes:
        """What an evaluator returns for all examples."""
        if name not in self.complete:
            self.complete.add(name)
            self.measured += sum(map(len, self.points[name].values.values()))
        return self.points[name]


@dataclass(frozen=True)
class Result:
    """What came of a race.

    Attributes:
        measured: examples, of all points.
        left: points that were measured whole.
        lost: the score of the best point less that of the best one left; 0 where the winner was kept.
    """

    measured: int
    left: int
    lost: float


def raced(points: Mapping[str, Outcomes], settings: RaceSettings, *, minimized: bool) -> Result:
    """Race points pass by pass, as a sweep does."""
    names = list(points)
    replay = Replay(points)
    order = Order.of(points[names[0]], settings.seed)
    race = Race(order, settings, minimized=minimized)
    left: list[str] = []
    for start in range(0, len(names), MOST_POINTS):
        batch = names[start : start + MOST_POINTS]
        dropped, _ = race.run(batch, replay.measure, replay.whole)
        for name in [name for name in batch if name not in dropped]:
            left.append(name)
            race.complete(name, replay.whole(name))
    sign = -1 if minimized else 1
    scores = {name: sign * outcomes.means("score")["score"] for name, outcomes in points.items()}
    return Result(replay.measured, len(left), max(scores.values()) - max(scores[name] for name in left))


def rows(
    name: str, points: Mapping[str, Outcomes], races: int, alpha: float, *, minimized: bool
) -> Iterator[list[str]]:
    """A row for each rule, over many orders of the examples."""
    examples = sum(map(len, next(iter(points.values())).values.values()))
    for label, rule, looks in RULES:
        settings = [RaceSettings(rule, alpha, seed, looks) for seed in range(races)]
        results = [raced(points, chosen, minimized=minimized) for chosen in settings]
        saved = len(points) * examples / np.mean([result.measured for result in results])
        kept = sum(result.lost <= 1e-12 for result in results)
        yield [
            name,
            str(len(points)),
            f"{examples:,}",
            label,
            f"{saved:.2f} times fewer",
            f"{kept} of {races}",
            f"{np.mean([result.left for result in results]):.1f}",
            f"{np.mean([result.lost for result in results]):.4f}",
        ]


def _some(outcomes: Outcomes, part: Part) -> Outcomes:
    values, names, clusters = outcomes.values, outcomes.examples, outcomes.clusters
    return Outcomes.checked_before(
        {task: values[task][places] for task, places in part.items()},
        {task: names[task][places] for task, places in part.items()},
        {task: clusters[task][places] for task, places in part.items()},
    )


def points_of(folder: Path) -> dict[str, Outcomes]:
    """The outcomes of a sweep's points on the split by which they were chosen."""
    points = {}
    for model in outcomes_of_sweep(folder):
        if model.role == POINT:
            by_split = next(iter(model.by_metric.values()))
            points[str(model.point)] = by_split.get("validation") or next(iter(by_split.values()))
    return points


def without_effect(
    random: np.random.Generator, likeness: float, points: int, examples: int, *, minimized: bool
) -> dict[str, Outcomes]:
    """Points of one accuracy, which err alike: the best one is the best by chance.

    Outcomes are hits, or where less is better bits, which are log-normal: few examples have most of them.
    """
    easy = random.normal(size=examples) * np.sqrt(likeness)
    own = random.normal(size=(points, examples)) * np.sqrt(1 - likeness)
    names = np.arange(examples).astype(str)
    drawn = np.exp(easy + own) if minimized else easy + own < 1
    return {str(i): Outcomes({"all": row}, examples={"all": names}) for i, row in enumerate(drawn)}


def errors(sweeps: int, alpha: float) -> Iterator[list[str]]:
    """How often the best of points without an effect is dropped, by how alike they err."""
    for what, likeness, points in itertools.product(("hits", "bits"), (0.0, 0.8, 0.95), (2, 10, 50)):
        random, lost = np.random.default_rng([points, int(100 * likeness)]), 0
        minimized = what == "bits"
        for seed in range(sweeps):
            drawn = without_effect(random, likeness, points, 300, minimized=minimized)
            lost += raced(drawn, RaceSettings(TEST, alpha, seed), minimized=minimized).lost > 1e-12
        result = f"{lost} of {sweeps} ({lost / sweeps:.1%})"
        yield [what, f"{likeness:g}", str(points), f"{alpha:g}", result]


def main() -> None:
    """Print a table for sweeps, or for points without an effect."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", type=Path, help="folders of sweeps that were measured whole")
    parser.add_argument("--races", type=int, default=100, help="orders of the examples")
    parser.add_argument("--alpha", type=float, default=0.05)
    parser.add_argument("--minimize", action="store_true", help="less is better, as of bits")
    parser.add_argument("--no-effect", action="store_true", help="simulate points that are all alike")
    options = parser.parse_args()
    if options.no_effect:
        head = ["outcomes", "likeness of the points", "points", "alpha", "best dropped"]
        sys.stdout.write(table([head, *errors(options.races, options.alpha)]) + "\n")
    races, alpha, minimized = options.races, options.alpha, options.minimize
    sweeps = [(folder.name, points_of(folder)) for folder in options.folders]
    lines = [row for sweep in sweeps for row in rows(*sweep, races, alpha, minimized=minimized)]
    if lines:
        sys.stdout.write(table([HEAD, *lines]) + "\n")


if __name__ == "__main__":
    main()
