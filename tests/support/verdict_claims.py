"""Whether verdicts keep their word: detectable differences, intervals of few or uneven outcomes, choices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from mecha_exp.evaluation.outcomes import Outcomes
from mecha_exp.verdict import Candidate, Verdict, conclude

FLIPS = 999
ACCURACY = 0.8


@dataclass(frozen=True)
class Compared:
    """A kind of sweep with a base: how many points on how many examples, and how alike the base errs."""

    points: int
    examples: int
    binary: bool = True
    splits: int = 2
    base_likeness: float = 0.5
    likeness: float = 0.8

    @property
    def name(self) -> str:
        """As a row's heading."""
        of = f"{self.examples} {'hits' if self.binary else 'losses'}"
        alike = "" if self.base_likeness == self.likeness else ", base less alike"
        return f"{self.points} points, {of}, {self.splits} split{'s' if self.splits > 1 else ''}{alike}"

    def conclude(self, random: np.random.Generator, difference: float) -> Verdict:
        """Conclude on a sweep: the first point exceeds the second and the base by `difference`."""
        lift = np.zeros(self.points + 1)
        lift[[1, self.points]], lift[0] = -difference / 2, difference / 2
        splits = [self._split(random, lift) for _ in range(self.splits)]
        names = ("validation", "test")[: self.splits]
        means = splits[0].mean(axis=0)[: self.points]
        best = int(means.argmax() if self.binary else means.argmin())

        def outcomes(column: int, everywhere: bool) -> dict[str, Outcomes]:
            shown = zip(names, splits, strict=True)
            seen = [(n, values) for n, values in shown if n == "validation" or everywhere]
            return {n: Outcomes({"t": values[:, column]}) for n, values in seen}

        points = [Candidate(f"p{i}", "r", outcomes=outcomes(i, i == best)) for i in range(self.points)]
        base = Candidate("base", outcomes=outcomes(self.points, True))
        return conclude(
            points,
            metric="accuracy",
            direction="maximize" if self.binary else "minimize",
            inputs=[base],
            base="base",
            splits=names,
            resamples=2,
            flips=FLIPS,
        )

    def _split(self, random: np.random.Generator, lift: NDArray[np.float64]) -> NDArray[np.float64]:
        """The outcomes of all points and the base on the examples of a split, [examples, points + 1]."""
        shares = np.full(self.points + 1, self.likeness)
        shares[-1] = self.base_likeness
        latent = np.sqrt(shares) * random.normal(size=(self.examples, 1))
        latent = latent + np.sqrt(1 - shares) * random.normal(size=(self.examples, self.points + 1))
        return (latent < ndtri(ACCURACY + lift)).astype(np.float64) if self.binary else latent - lift


COMPARED = [
    Compared(3, 400),
    Compared(10, 400),
    Compared(30, 400),
    Compared(10, 400, base_likeness=0.8),
    Compared(30, 400, base_likeness=0.8),
    Compared(30, 300, binary=False, base_likeness=0.8),
    Compared(10, 400, splits=1),
    Compared(10, 300, binary=False, splits=1),
]


def detectable(kind: Compared, sweeps: int) -> list[str]:
    """How often the printed differences, which are two, are found where they are true."""
    row = [kind.name]
    for against in ("base", None):
        random, smallest = np.random.default_rng(5), 0.05 if kind.binary else 0.15
        for _ in range(3):  # the spread of differences depends a little on the difference
            shown = [printed(kind.conclude(random, smallest), against) for _ in range(12)]
            smallest = float(np.mean(shown))
        seen = [found(kind.conclude(random, smallest), against or "p0") for _ in range(sweeps)]
        known = [each for each in seen if each is not None]
        row += [f"{smallest:.3f}", f"{100 * float(np.mean(known)):.0f}"]
    return row


def printed(verdict: Verdict, against: str | None) -> float:
    assert verdict.cost is not None
    return next(d.difference for d in verdict.cost.detectable if d.against == against)


def found(verdict: Verdict, against: str) -> bool | None:
    """Whether the difference of the first point is found; None where another point was chosen."""
    if verdict.selected is None or verdict.selected.point != "p0":
        return None
    point = "p0" if against == "base" else "p1"
    return next(c.distinguishable for c in verdict.against(against) if c.point == point)


@dataclass(frozen=True)
class Sampled:
    """Outcomes of a kind: their distribution, how many, and in which clusters."""

    name: str
    examples: int
    log_normal: bool = False
    sizes: tuple[int, ...] = ()
    points: int = 2
    binary: bool = False

    def draw(self, random: np.random.Generator) -> list[Candidate]:
        """Equally good points with a difficulty of examples and of clusters in common."""
        sizes = np.array(self.sizes or [1] * self.examples)
        group = np.repeat(np.arange(len(sizes)), sizes)
        shape = (len(group), self.points)
        latent = np.sqrt(0.8) * random.normal(size=(len(group), 1)) + np.sqrt(0.2) * random.normal(size=shape)
        if self.sizes:
            common = random.normal(size=(len(sizes), 1)) + 0.5 * random.normal(size=(len(sizes), self.points))
            latent = np.sqrt(0.5) * latent + np.sqrt(0.4) * common[group]
        values = np.exp(latent) if self.log_normal else latent
        if self.binary:
            values = (latent < ndtri(ACCURACY)).astype(np.float64)
        clusters = {"t": group.astype(str)}
        return [
            Candidate(f"p{i}", f"r{i}", outcomes={"s": Outcomes({"t": values[:, i]}, clusters=clusters)})
            for i in range(self.points)
        ]

    @property
    def truth(self) -> float:
        """The mean of every point."""
        if self.binary:
            return ACCURACY
        return float(np.exp(0.5)) if self.log_normal else 0.0


UNEVEN = (*[1] * 30, *[5] * 6, *[20] * 3, 40)
SAMPLED = [
    *(Sampled(f"{n} normal outcomes", n) for n in (5, 10, 20, 30)),
    *(Sampled(f"{n} log-normal outcomes", n, log_normal=True) for n in (10, 20, 30, 50, 100, 200)),
    Sampled("25 clusters of 8", 200, sizes=(8,) * 25),
    Sampled("40 clusters of 1 to 40", 160, sizes=UNEVEN),
    Sampled("10 points, 200 hits", 200, points=10, binary=True),
    Sampled("100 points, 200 hits", 200, points=100, binary=True),
    Sampled("10 points, 200 log-normal outcomes", 200, points=10, log_normal=True),
]


def held(kind: Sampled, sweeps: int) -> list[str]:
    """How often intervals of a score, a difference and the chosen point hold, and whether a note says so."""
    random, hits, noted = np.random.default_rng(6), np.zeros(3), 0
    for _ in range(sweeps):
        verdict = conclude(
            kind.draw(random),
            metric="accuracy",
            direction="maximize" if kind.binary else "minimize",
            splits=("s",),
            resamples=400,
            flips=2,
        )
        assert verdict.selected is not None
        difference = verdict.comparisons[0].difference
        score = verdict.score("p0")
        assert score is not None
        chosen = verdict.selected.overall
        hits += [
            score.overall.low <= kind.truth <= score.overall.high,
            difference.low <= 0 <= difference.high,
            chosen.low <= kind.truth <= chosen.high,
        ]
        noted += any("rare and large" in n or "strongly skewed" in n for n in verdict.notes)
    score_held, difference_held, chosen_held = (f"{100 * share:.1f}" for share in hits / sweeps)
    said = "yes" if noted == sweeps else f"{100 * noted / sweeps:.0f} %" if noted else "no"
    return [kind.name, score_held, difference_held if kind.points == 2 else "-", chosen_held, said]
