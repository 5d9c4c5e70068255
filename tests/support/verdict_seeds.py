"""Simulated sweeps whose points are drawn with seeds: how often verdicts err, and what they find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri, stdtr

from mecha_exp.verdict.candidates import Direction
from mecha_exp.verdict.choice import best
from mecha_exp.verdict.comparisons import Family, independent_family, selected_family
from mecha_exp.verdict.paired_tests import holm, squared_errors, two_way
from mecha_exp.verdict.panel import Integers, Panel, TaskPanel
from mecha_exp.verdict.scoring import counting_choice, measure

Floats = NDArray[np.float64]
RESAMPLES = 200
COUNTS = (2, 3, 5, 10)
LIKENESS = 0.8


@dataclass(frozen=True)
class Seeds:
    """A kind of sweep whose points have seeds, and a base that has none.

    Attributes:
        effects: `own` (each point and seed), `shared` (each seed, for all points), `both`, or `uneven` (own,
            a hundredfold variance from one point to another).
        replicates: seeds of each point.
        splits: 2 where points are chosen on a validation split and reported on test.
        binary: hits (more is better), or losses (less is better).
        points, examples: how many; of each split.
        spread: standard deviation of the seeds' effects, in units of the latent one of an example: 0.1 moves
            the accuracy by 0.028.
        accuracy: of a point, over all seeds.
    """

    effects: str
    replicates: int
    splits: int
    binary: bool
    points: int = 10
    examples: int = 300
    spread: float = 0.1
    accuracy: float = 0.8

    @property
    def name(self) -> str:
        """As a row's heading."""
        of, splits = "hits" if self.binary else "losses", "two splits" if self.splits == 2 else "one split"
        of += "" if self.examples == 300 else f" of {self.examples:,} examples"
        return f"{self.effects}, {self.replicates} seeds, {of}, {splits}"

    @property
    def direction(self) -> Direction:
        return "maximize" if self.binary else "minimize"

    @property
    def truth(self) -> float:
        """The mean of every point and of the base, over seeds and examples."""
        return self.accuracy if self.binary else 0.0

    def draw(self, random: np.random.Generator, gain: float = 0.0) -> list[Panel]:
        """The panels of one sweep, a split each; the first point is better by `gain`, the base is last."""
        shape = (self.points, self.replicates)
        spreads = np.full(self.points, self.spread)
        if self.effects == "uneven":
            spreads *= np.exp(random.uniform(np.log(0.3), np.log(3), self.points))
        own = spreads[:, None] * random.normal(size=shape)
        shared = self.spread * random.normal(size=self.replicates)
        part = {"own": (1, 0), "uneven": (1, 0), "shared": (0, 1), "both": (0.5**0.5, 0.5**0.5)}[self.effects]
        effects = part[0] * own + part[1] * shared
        total = part[0] ** 2 * spreads**2 + part[1] ** 2 * self.spread**2
        return [self._panel(random, effects, np.sqrt(1 + total), gain) for _ in range(self.splits)]

    def _panel(self, random: np.random.Generator, effects: Floats, scale: Floats, gain: float) -> Panel:
        """A split: hits where easy examples and lucky points come together, or normal losses."""
        columns = self.points * self.replicates + 1
        latent = np.sqrt(1 - LIKENESS) * random.normal(size=(self.examples, columns))
        latent += np.sqrt(LIKENESS) * random.normal(size=(self.examples, 1))
        shift = np.zeros(self.points)
        shift[0] = gain
        if self.binary:
            bars = np.append((ndtri(self.accuracy + shift) * scale)[:, None] + effects, ndtri(self.accuracy))
            values = (latent < bars.ravel()).astype(np.float64)
        else:
            values = latent + np.append(effects - shift[:, None], 0.0)
        starts = np.arange(self.points + 1) * self.replicates
        labels = tuple(f"seed={i}" for i in range(self.replicates))
        return Panel(
            (*(f"p{i}" for i in range(self.points)), "base"),
            (*[labels] * self.points, ("",)),
            starts.astype(np.intp),
            {"t": TaskPanel(values, np.ones(len(values)), np.arange(len(values)), self.binary)},
            np.zeros(len(values), dtype=np.intp),
        )

    def families(self, panels: list[Panel]) -> tuple[Family, int]:
        """The comparisons that a verdict makes, and the chosen point."""
        points = np.arange(self.points)
        chosen = int(best(panels[0].scores[points], self.direction))
        if self.splits == 1:
            return selected_family(panels[0], "test", points, points, chosen, self.points), chosen
        return independent_family(
            panels[1], "test", points, chosen, self.points, eligible=self.points
        ), chosen


KINDS = [
    Seeds(effects, replicates, splits, binary)
    for binary, kinds in ((True, ("own", "shared", "both", "uneven")), (False, ("own", "uneven")))
    for splits in (2, 1)
    for effects in kinds
    for replicates in COUNTS
] + [Seeds("uneven", replicates, 2, True, examples=2000, spread=0.2) for replicates in COUNTS]


Parts = Sequence[tuple[Floats, Floats]]
"""Squared errors of each pair, over examples and replicates, with their degrees of freedom."""


def verdict(panel: Panel, pairs: Integers, parts: Parts) -> Floats:
    """The verdict's test: examples and replicates each with its own quantile of Student's t."""
    return two_way(panel, pairs)


def replicates_alone(panel: Panel, pairs: Integers, parts: Parts) -> Floats:
    """Student's t with the degrees of freedom of the replicates."""
    return _t_test(panel, pairs, [e.sum() for e, _ in parts], [f[1:].min() for _, f in parts])


def satterthwaite(panel: Panel, pairs: Integers, parts: Parts) -> Floats:
    """Student's t with degrees of freedom that are estimated, as many programs do."""
    squares = [e.sum() for e, _ in parts]
    return _t_test(panel, pairs, squares, [e.sum() ** 2 / (e**2 / f).sum() for e, f in parts])


def mixed_model(panel: Panel, pairs: Integers, parts: Parts) -> Floats:
    """A mixed model of points and seeds, with one variance for all points: REML of a balanced layout.

    `statsmodels.MixedLM` with a random intercept for each seed has the same estimates on such data; the
    variance over examples is added.
    """
    points = base = len(panel.names) - 1
    seeds = panel.column_scores[:-1].reshape(points, -1)
    replicates = seeds.shape[1]
    residual = seeds - seeds.mean(axis=0) - seeds.mean(axis=1)[:, None] + seeds.mean()
    freedom = (points - 1) * (replicates - 1)
    own = float((residual**2).sum()) / freedom
    shared = max(float(seeds.mean(axis=0).var(ddof=1)) - own / points, 0.0)
    of_base = (pairs == base).any(axis=1)
    over_seeds = np.where(of_base, own + shared, 2 * own) / replicates
    return _t_test(panel, pairs, np.array([e[0] for e, _ in parts]) + over_seeds, freedom)


def _t_test(panel: Panel, pairs: Integers, squares: ArrayLike, freedom: ArrayLike) -> Floats:
    differences = np.abs(panel.scores[pairs[:, 0]] - panel.scores[pairs[:, 1]])
    p_values: Floats = 2 * stdtr(np.asarray(freedom, float), -differences / np.sqrt(squares))
    return p_values


TESTS = {
    "the verdict": verdict,
    "t of replicates": replicates_alone,
    "mixed model": mixed_model,
    "Satterthwaite": satterthwaite,
}


def _parts(family: Family) -> Parts:
    return [squared_errors(family.panel, int(one), int(other)) for one, other in family.pairs]


def errors(kind: Seeds, sweeps: int) -> list[str]:
    """The share of sweeps without any effect in which each test finds a difference.

    The last column is what verdicts did at first: Satterthwaite, and Holm over the comparisons that are made
    where the split had no part in the choice.
    """
    random, wrong = np.random.default_rng(1), np.zeros(len(TESTS) + 1)
    for _ in range(sweeps):
        family, _ = kind.families(kind.draw(random))
        parts = _parts(family)
        for column, test in enumerate(TESTS.values()):
            p_values = test(family.panel, family.pairs, parts)
            wrong[column] += (holm(p_values, family.size) < 0.05).any()
        made = len(p_values) if kind.splits == 2 else family.size
        wrong[-1] += (holm(p_values, made) < 0.05).any()
    return [kind.name, *(f"{100 * share:.1f}" for share in wrong / sweeps)]


def coverage(kind: Seeds, sweeps: int) -> list[str]:
    """The share of 95 % intervals that hold the truth: of any point, and of the chosen one in three ways."""
    random, hits, width = np.random.default_rng(2), np.zeros(4), np.zeros(2)
    fresh_kind = replace(kind, points=1)
    none = np.empty((0, 2), dtype=np.intp)
    for _ in range(sweeps):
        panels = kind.draw(random)
        _, chosen = kind.families(panels)
        panel = panels[-1].of_settings(np.array([chosen, 0 if chosen else 1]))
        measured = measure(panel, none, {}, resamples=RESAMPLES, seed=0)
        counted = counting_choice(
            panel,
            0,
            measured.overall[0],
            candidates=kind.points,
            direction=kind.direction,
            same_data=kind.splits == 1,
        )
        fresh = fresh_kind.draw(random)[-1].of_settings(np.array([0]))
        again = measure(fresh, none, {}, resamples=RESAMPLES, seed=0).overall[0]
        shown = [measured.overall[1], measured.overall[0], counted, again]
        hits += [estimate.low <= kind.truth <= estimate.high for estimate in shown]
        width += [counted.high - counted.low, again.high - again.low]
    return [
        kind.name,
        *(f"{100 * share:.1f}" for share in hits / sweeps),
        *(f"{mean:.3f}" for mean in width / sweeps),
    ]


def power(kind: Seeds, sweeps: int) -> list[str]:
    """The share of sweeps in which the best point is told from another one, and from the base."""
    gain = 0.12 if kind.binary else 0.4
    random, found = np.random.default_rng(3), np.zeros((2, len(TESTS)))
    for _ in range(sweeps):
        panel = kind.draw(random, gain)[-1]
        points = np.arange(kind.points)
        family = independent_family(panel, "test", points, 0, kind.points, eligible=kind.points)
        settings = int(np.flatnonzero((family.pairs == [5, 0]).all(axis=1))[0])
        base = int(np.flatnonzero((family.pairs == [0, kind.points]).all(axis=1))[0])
        parts = _parts(family)
        for column, test in enumerate(TESTS.values()):
            adjusted = holm(test(family.panel, family.pairs, parts), family.size)
            found[:, column] += adjusted[[settings, base]] < 0.05
    shares = 100 * found / sweeps
    return [kind.name, *(f"{a:.0f} / {b:.0f}" for a, b in shares.T)]
