"""How often a verdict is wrong, and how often it sees what is there, in simulated sweeps.

    python -m bench.verdict                  # 400 sweeps of each kind; a quarter of an hour on two cores
    python -m bench.verdict --sweeps 2000 --part errors
    python -m bench.verdict --speed 1000 10000 1

Outcomes have the structure of real ones: an example is easy or hard for all points alike, neighbouring points
err alike, and examples of a cluster have a difficulty in common.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.report import table
from mecha_exp.evaluation.outcomes import Outcomes
from mecha_exp.verdict import Candidate, conclude
from mecha_exp.verdict.choice import best, minimum_detectable_difference
from mecha_exp.verdict.comparisons import Family, independent_family, selected_family
from mecha_exp.verdict.intervals import RESAMPLES, Estimate
from mecha_exp.verdict.paired_tests import holm, paired_p_values
from mecha_exp.verdict.panel import Panel
from tests.support import verdict_claims as claims
from tests.support import verdict_seeds as seeds
from tests.support.verdict_kinds import KINDS, Kind, effects

FLIPS = 999
SWEEPS = 400
WORKERS = 2


def naive(panel: Panel, chosen: int) -> NDArray[np.float64]:
    """What is often done: Holm over the comparisons with a best that the same data chose."""
    return holm(_p_values(_all(panel, chosen)))


def all_pairs(panel: Panel, chosen: int) -> NDArray[np.float64]:
    """The verdict's procedure on the same data: Holm over all pairs that could have been looked at."""
    family = _all(panel, chosen)
    return holm(_p_values(family), family.size)


def max_statistic(panel: Panel, chosen: int) -> NDArray[np.float64]:
    """An alternative: sign flips of examples, and the largest standardised difference of all pairs."""
    parts = panel.contributions
    squares = parts.T @ parts
    spread = np.sqrt(np.maximum(np.diag(squares)[:, None] + np.diag(squares) - 2 * squares, 0))
    spread[spread < 1e-12] = np.inf
    signs = np.random.default_rng(0).integers(0, 2, size=(FLIPS, len(parts))) * 2.0 - 1.0
    drawn = signs @ parts
    largest = np.zeros(FLIPS)
    for point in range(parts.shape[1]):
        np.maximum(largest, (np.abs(drawn - drawn[:, [point]]) / spread[point]).max(axis=1), out=largest)
    scores = parts.sum(axis=0)
    observed = np.abs(scores - scores[chosen]) / spread[chosen]
    others = np.delete(observed, chosen)
    return (1 + (largest[:, None] >= others - 1e-9).sum(axis=0)) / (FLIPS + 1)


def separate(panel: Panel, chosen: int) -> NDArray[np.float64]:
    """The verdict's procedure on a split that had no part in the choice: Holm over what is compared."""
    family = independent_family(panel, "test", np.arange(len(panel.names)), chosen, None)
    return holm(_p_values(family), family.size)


PROCEDURES: dict[str, Callable[[Panel, int], NDArray[np.float64]]] = {
    "Holm, best of the same data": naive,
    "Holm, all pairs": all_pairs,
    "largest statistic": max_statistic,
    "Holm, chosen on another split": separate,
}


def errors(kind: Kind, sweeps: int) -> list[str]:
    """The share of sweeps without any effect in which a procedure finds a difference."""
    random, wrong = np.random.default_rng(1), dict.fromkeys(PROCEDURES, 0)
    for _ in range(sweeps):
        panel = kind.draw(random)
        leader = best(panel.scores, "maximize")
        for name, procedure in PROCEDURES.items():
            if kind.replicates > 1 and procedure is max_statistic:
                continue
            chosen = 0 if procedure is separate else leader
            wrong[name] += bool((procedure(panel, chosen) < 0.05).any())
    shown = [f"{100 * count / sweeps:.1f}" for count in wrong.values()]
    return [kind.name, *(shown if kind.replicates == 1 else [*shown[:2], "-", shown[3]])]


def powers(kind: Kind, sweeps: int) -> list[str]:
    """The share of sweeps in which a true difference of once and twice the detectable one is found."""
    row = [kind.name]
    for procedure in (all_pairs, separate):
        random = np.random.default_rng(2)
        smallest = _detectable(kind, procedure, random)
        row.append(f"{smallest:.3f}")
        for times in (1, 2):
            found = 0
            for _ in range(sweeps):
                panel = kind.draw(random, effects(kind, times * smallest))
                adjusted = procedure(panel, 0)
                found += bool(adjusted[kind.points - 2] < 0.05)
            row.append(f"{100 * found / sweeps:.0f}")
    return row


def _detectable(kind: Kind, procedure: object, random: np.random.Generator) -> float:
    """The minimum detectable difference that verdicts of such sweeps print, at that difference."""
    smallest = 0.0
    for _ in range(5):  # the spread of differences depends a little on the difference
        shown = []
        for _ in range(10):
            panel = kind.draw(random, effects(kind, smallest))
            family = _all(panel, 0)
            pairs = family.pairs[: kind.points - 1]
            places = np.arange(kind.points)
            other = independent_family(panel, "test", places, 0, None)
            size = (family if procedure is all_pairs else other).size
            shown.append(minimum_detectable_difference(panel, pairs, size, flips=FLIPS) or 0.0)
        smallest = float(np.mean(shown))
    return smallest


def coverage(kind: Kind, sweeps: int) -> list[str]:
    """The share of 95 % intervals of a score and of a difference that hold the truth."""
    from mecha_exp.verdict.scoring import measure

    random, hits, pair = np.random.default_rng(3), np.zeros(2), np.array([[0, 1]])
    few = replace(kind, points=2)
    truth = few.accuracy if few.binary else 0.0
    for _ in range(sweeps):
        measured = measure(few.draw(random), pair, {}, resamples=RESAMPLES, seed=0)
        held = [(measured.overall[0], truth), (measured.differences[0], 0.0)]
        hits += [_holds(estimate, value) for estimate, value in held]
    return [kind.name, *(f"{100 * share:.1f}" for share in hits / sweeps)]


def _holds(estimate: Estimate, truth: float) -> bool:
    return estimate.low <= truth <= estimate.high


def _all(panel: Panel, chosen: int) -> Family:
    places = np.arange(len(panel.names))
    return selected_family(panel, "test", places, places, chosen, None)


def _p_values(family: Family) -> NDArray[np.float64]:
    return paired_p_values(family.panel, family.pairs, flips=FLIPS)


def speed(points: int, examples: int, binary: bool, tasks: int = 1) -> list[str]:
    """The processor time and the peak memory of one verdict."""
    random = np.random.default_rng(0)
    easy = random.normal(size=examples)
    candidates = []
    for point in range(points + 1):
        latent = 0.9 * easy + 0.44 * random.normal(size=examples) + 0.0003 * point
        values = (latent < 1).astype(float) if binary else latent
        rows = np.array_split(values, tasks)
        outcomes = Outcomes({f"t{i}": part for i, part in enumerate(rows)})
        candidates.append(Candidate(f"p{point}", f"r{point % 10}", outcomes={"validation": outcomes}))
    started = time.process_time()
    verdict = conclude(candidates[1:], metric="accuracy", inputs=candidates[:1], base="p0")
    seconds = time.process_time() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    what = "0/1" if binary else "real values"
    shape = f"{points:,} points, {examples:,} examples, {tasks} task{'s' if tasks > 1 else ''}, {what}"
    return [shape, f"{len(verdict.comparisons):,}", f"{seconds:.1f} s", f"{peak:.0f} MB"]


@dataclass(frozen=True)
class Table:
    """A table of the benchmark: a row for each kind of sweep.

    Attributes:
        head: of its columns.
        row: makes the row of a kind from so many sweeps.
        kinds: that it has rows of.
        share: of the sweeps that are asked for.
    """

    head: Sequence[str]
    row: Callable[[Any, int], list[str]]
    kinds: Sequence[Any]
    share: float = 1.0


_OF_POWER = ["all pairs: detectable", "at it", "twice", "other split: detectable", "at it", "twice"]
_HELD = "% of 95 % intervals that hold the truth"
_FOUND = "% that find it"
_OF_CHOSEN = ["chosen, as if alone", "chosen, counting the choice", "chosen, new seeds"]
TABLES = {
    "errors": Table(["sweeps without any effect: % with a difference", *PROCEDURES], errors, KINDS, 0.5),
    "power": Table(["% that find it", *_OF_POWER], powers, KINDS, 0.25),
    "coverage": Table([_HELD, "score", "difference"], coverage, KINDS, 0.5),
    "detectable": Table(
        ["printed detectable differences", "from the base", _FOUND, "between settings", _FOUND],
        claims.detectable,
        claims.COMPARED,
        0.5,
    ),
    "held": Table(
        [_HELD, "score", "difference", "chosen on the same data", "noted"],
        claims.held,
        claims.SAMPLED,
    ),
    "seeds-errors": Table(
        ["seeds, settings alike: % with a difference", *seeds.TESTS, "Satterthwaite, comparisons made"],
        seeds.errors,
        seeds.KINDS,
    ),
    "seeds-coverage": Table(
        [f"seeds: {_HELD}", "any setting", *_OF_CHOSEN, "width, counting the choice", "width, new seeds"],
        seeds.coverage,
        seeds.KINDS,
    ),
    "seeds-power": Table(
        ["seeds: % told from another setting / from the base", *seeds.TESTS], seeds.power, seeds.KINDS, 0.25
    ),
}


def _row(part: str, kind: int, sweeps: int) -> list[str]:
    chosen = TABLES[part]
    return chosen.row(chosen.kinds[kind], max(20, round(chosen.share * sweeps)))


def main() -> None:
    """Print the tables of bench/RESULTS.md about verdicts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sweeps", type=int, default=SWEEPS)
    parser.add_argument("--speed", nargs=3, metavar=("POINTS", "EXAMPLES", "TASKS"), type=int)
    parser.add_argument("--real", action="store_true", help="with --speed: real values in place of 0 and 1")
    parser.add_argument("--part", choices=TABLES, action="append", help="one table alone, or several")
    options = parser.parse_args()
    if options.speed:
        points, examples, tasks = options.speed
        head = ["verdict", "comparisons", "processor time", "peak memory"]
        sys.stdout.write(table([head, speed(points, examples, not options.real, tasks)]))
        return
    with ProcessPoolExecutor(WORKERS) as pool:
        rows = {
            part: [pool.submit(_row, part, i, options.sweeps) for i in range(len(chosen.kinds))]
            for part, chosen in TABLES.items()
            if part in (options.part or TABLES)
        }
        for part, waiting in rows.items():
            sys.stdout.write(table([TABLES[part].head, *(row.result() for row in waiting)]) + "\n\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
