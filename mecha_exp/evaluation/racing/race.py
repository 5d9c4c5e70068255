"""A race of the points of a sweep over one evaluation, pass by pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mecha_exp.errors import EvaluationError
from mecha_exp.evaluation.outcomes import Outcomes
from mecha_exp.evaluation.racing.elimination import LOOKS, cannot_catch_up, halved, log_growth
from mecha_exp.evaluation.racing.order import Floats, Order, Part
from mecha_exp.evaluation.racing.settings import HALVING, RaceSettings

Measure = Callable[[Sequence[str], Part], Mapping[str, Outcomes | EvaluationError]]
"""Measures points on a part of the examples; an error takes its point out of the race."""
MeasureWhole = Callable[[str], Outcomes | EvaluationError]
"""Measures a point on all examples."""


@dataclass(frozen=True)
class Dropped:
    """What a dropped point was measured on.

    Attributes:
        examples: how many it was measured on; in a race by fidelity, the value of that parameter.
        score: the mean over tasks of its outcomes on them, or the metric.
    """

    examples: int
    score: float


@dataclass(eq=False)
class _Runner:
    """A point in the race.

    Attributes:
        contributions: of each cluster so far to its score, more is better, [clusters so far].
        log_capital: of the bet that others are better.
        tasks: the sum and the number of its outcomes, by task.
        whole: the contributions of all clusters, once it is measured on all, [clusters].
    """

    contributions: Floats = field(default_factory=lambda: np.zeros(0))
    log_capital: float = 0.0
    tasks: dict[str, tuple[float, int]] = field(default_factory=dict)
    whole: Floats | None = None

    @property
    def score(self) -> float:
        """What it has so far, more is better; the least of all where an outcome is not finite."""
        total = float(self.contributions.sum())
        return total if math.isfinite(total) else -math.inf

    def first(self, end: int) -> Floats:
        """The contributions of the first clusters, [end], or of all so far where they are fewer."""
        return (self.contributions if self.whole is None else self.whole)[:end]

    @property
    def dropped(self) -> Dropped:
        """What it was measured on so far."""
        means = [total / count for total, count in self.tasks.values()]
        return Dropped(sum(count for _, count in self.tasks.values()), float(np.mean(means)))


class Race:
    """Drops the points of a sweep that are worse than its best.

    With the rule `test`, the point that would be the best if all were measured on all examples is dropped
    with probability at most alpha, over the random order of the clusters, whatever the outcomes and however
    many points there are: only a point that is truly the best can be dropped wrongly, and it is bet against
    once (`log_growth`). Each look bets on the point that led at the look before. Outcomes must lie from 0 to
    1. A later pass races against the leaders of earlier passes, too, look by look.

    Where it is known how good an outcome can be, but not how bad, another point is ahead of the leader by at
    most what the leader lacks: bits are at least 0, a hundredfold cosine is at most 100. So the leader is
    measured on all examples at once, and the most that it lacks in one that remains is the bound of the bets.
    It is not dropped, so nothing is measured in vain.

    With the rule `halving`, the best third of a pass goes on at each look; its error is not controlled.

    Args:
        order: of the examples.
        settings: of the race.
        minimized: whether less of the score is better.
        best: the best outcome that an example can have where nothing bounds the worst; None is 0 where less
            is better, and else outcomes from 0 to 1.
    """

    def __init__(
        self, order: Order, settings: RaceSettings, *, minimized: bool, best: float | None = None
    ) -> None:
        self.order, self._settings = order, settings
        self._sign = -1.0 if minimized else 1.0
        self._best = 0.0 if best is None and minimized else best
        shares = settings.looks if settings.rule == HALVING else LOOKS
        ends = {round(share * order.clusters) for share in shares}
        self._ends = sorted(end for end in ends if 0 < end < order.clusters)
        self._leaders: dict[int, str] = {}
        self._runners: dict[str, _Runner] = {}

    def run(
        self, points: Sequence[str], measure: Measure, measure_whole: MeasureWhole
    ) -> tuple[dict[str, Dropped], dict[str, EvaluationError]]:
        """Race the points of a pass; the others are to be measured whole.

        Args:
            points: by any names that differ between all points of the sweep.
            measure: measures those that are still in the race.
            measure_whole: measures one that leads, where the test needs all its outcomes.

        Returns:
            those that were dropped, and the errors of those that could not be measured.
        """
        runners = {name: _Runner() for name in points}
        active = dict(runners)
        dropped: dict[str, Dropped] = {}
        errors: dict[str, EvaluationError] = {}
        led: dict[int, str | None] = {}
        start, leader = 0, None
        for end in self._ends:
            if self._is_over(active):
                break
            errors |= self._measure(active, measure, start, end)
            for name in self._behind(active, leader, start, end):
                dropped[name] = active.pop(name).dropped
            if self._needs_whole_leaders and not self._is_over(active) and end < self._ends[-1]:
                errors |= self._complete_leader(active, measure_whole, end)
            leader = led[end] = self._leading(active, end)
            start = end
        self._remember(runners, led, next(iter(active)) if len(active) == 1 else leader)
        return dropped, errors

    def complete(self, point: str, whole: Outcomes) -> None:
        """Note the outcomes of a point on all examples, for the races of later passes."""
        if point in self._runners:
            self._runners[point].whole = self._whole_contributions(whole)

    @property
    def _needs_whole_leaders(self) -> bool:
        """Whether bets on a leader are bounded by its own outcomes, not by 1."""
        return self._settings.rule != HALVING and self._best is not None

    def _is_over(self, active: Mapping[str, _Runner]) -> bool:
        """Whether no point can be dropped any more."""
        in_parts = [runner for runner in active.values() if runner.whole is None]
        return not in_parts or len(active) <= (0 if self._leaders else 1)

    def _complete_leader(
        self, active: dict[str, _Runner], measure_whole: MeasureWhole, end: int
    ) -> dict[str, EvaluationError]:
        """Measure who leads on all examples; takes out those that cannot be measured, and returns why."""
        errors: dict[str, EvaluationError] = {}
        while (name := self._leading(active, end)) in active and name and active[name].whole is None:
            try:
                if isinstance(outcomes := measure_whole(name), EvaluationError):
                    raise outcomes
                self._check_range(outcomes)
                whole = self._whole_contributions(outcomes)
            except EvaluationError as error:
                errors[name] = error
                del active[name]
                continue
            if np.isfinite(whole).all():
                active[name].whole = whole
            else:  # it is measured whole, and never the best
                del active[name]
        return errors

    def _whole_contributions(self, whole: Outcomes) -> Floats:
        self.order.check(whole, self.order.part(0, self.order.clusters))
        return self._contributions(whole, 0, self.order.clusters)

    def _measure(
        self, active: dict[str, _Runner], measure: Measure, start: int, end: int
    ) -> dict[str, EvaluationError]:
        """Measure the active points on more clusters; takes out those that cannot be, and returns why."""
        part = self.order.part(start, end)
        errors: dict[str, EvaluationError] = {}
        for runner in active.values():
            if runner.whole is not None:
                runner.contributions = runner.whole[:end]
        in_parts = [name for name, runner in active.items() if runner.whole is None]
        for name, outcomes in measure(in_parts, part).items():
            try:
                if isinstance(outcomes, EvaluationError):
                    raise outcomes
                self.order.check(outcomes, part)
                self._check_range(outcomes)
            except EvaluationError as error:
                errors[name] = error
                del active[name]
                continue
            runner = active[name]
            added = self._contributions(outcomes, start, end)
            runner.contributions = np.concatenate([runner.contributions, added])
            for task, values in outcomes.values.items():
                total, count = runner.tasks.get(task, (0.0, 0))
                runner.tasks[task] = total + float(values.sum()), count + len(values)
        return errors

    def _contributions(self, outcomes: Outcomes, start: int, end: int) -> Floats:
        return self._sign * self.order.contributions(outcomes, start, end)

    def _check_range(self, outcomes: Outcomes) -> None:
        if self._settings.rule == HALVING:
            return
        best = self._best
        if best is None:
            low, high, expected = 0.0, 1.0, "from 0 to 1, such as hits,"
        elif self._sign < 0:
            low, high, expected = best, math.inf, f"of at least {best:g}, such as bits,"
        else:
            low, high, expected = -math.inf, best, f"of at most {best:g},"
        for task, values in outcomes.values.items():
            outside = values[(values < low) | (values > high)]
            if len(outside):
                raise EvaluationError(
                    f"evaluator.race=true needs outcomes {expected} and an example of the task '{task}' has "
                    f"{outside[0]:g}. Say the best that there can be with evaluator.race_best, or use "
                    "evaluator.race=halving, which needs no bounds."
                )

    def _behind(self, active: Mapping[str, _Runner], leader: str | None, start: int, end: int) -> list[str]:
        """The points to drop after a look; always those with an outcome that is not finite."""
        in_parts = {name: runner for name, runner in active.items() if runner.whole is None}
        lost = [name for name, runner in in_parts.items() if runner.score == -math.inf]
        names = [name for name in in_parts if name not in lost]
        if not names:
            return lost
        contestants = [active[name] for name in names]
        if self._settings.rule == HALVING:
            return lost + [names[place] for place in halved(np.array([r.score for r in contestants]))]
        far = np.zeros(len(names), dtype=bool)
        rival = self._rival(active, leader, end)
        if rival is not None and start:
            far |= self._lost_the_bet(contestants, rival, start, end)
        best = self._leading(active, end)
        ahead = rival if self._needs_whole_leaders else self._rival(active, best, end)
        if ahead is not None:
            remaining = float(self._bounds(ahead)[end:].sum())
            far |= cannot_catch_up(_differences(ahead, contestants, end), remaining)
        return lost + [name for name, is_far in zip(names, far, strict=True) if is_far and name != best]

    def _lost_the_bet(self, runners: Sequence[_Runner], rival: _Runner, start: int, end: int) -> np.ndarray:
        """Bet on a rival over the new clusters; whether each runner's bet ever reached 1 / alpha."""
        bound = float(self._bounds(rival)[start:].max())
        if not bound:  # it loses nothing more: `cannot_catch_up` tells
            return np.zeros(len(runners), dtype=bool)
        growth = log_growth(_differences(rival, runners, end), bound, self.order.clusters, start)
        capital = np.array([runner.log_capital for runner in runners]) + growth
        for runner, final in zip(runners, capital[-1], strict=True):
            runner.log_capital = float(final)
        lost: np.ndarray = capital.max(axis=0) >= -math.log(self._settings.alpha)
        return lost

    def _leading(self, active: Mapping[str, _Runner], end: int) -> str | None:
        """Who leads after so many clusters: a point of this pass, or who led there in earlier passes."""
        scores = {name: runner.score for name, runner in active.items()}
        earlier = self._leaders.get(end)
        if earlier is not None and (rival := self._rival(active, earlier, end)) is not None:
            scores = {earlier: float(rival.first(end).sum()), **scores}
        return max(scores, key=scores.__getitem__, default=None)

    def _rival(self, active: Mapping[str, _Runner], name: str | None, end: int) -> _Runner | None:
        """A point to compare with after so many clusters; None where it was not measured on enough."""
        runner = active.get(name or "") or self._runners.get(name or "")
        if runner is None or (self._needs_whole_leaders and runner.whole is None):
            return None
        return runner if len(runner.first(end)) == end else None

    def _bounds(self, rival: _Runner) -> Floats:
        """By how much a point can be better than a rival in each cluster at most, [clusters]."""
        if self._best is None or rival.whole is None or not self._needs_whole_leaders:
            return self.order.bounds
        lacks: Floats = np.maximum(self._sign * self._best * self.order.bounds - rival.whole, 0)
        return lacks

    def _remember(
        self, runners: Mapping[str, _Runner], led: Mapping[int, str | None], last: str | None
    ) -> None:
        """Keep who led at each look, for later passes; after an early end it is who was left."""
        if self._settings.rule == HALVING:
            return
        leaders = {end: led.get(end, last) for end in self._ends}
        self._leaders |= {end: name for end, name in leaders.items() if name is not None}
        known = {**self._runners, **runners}
        self._runners = {name: known[name] for name in self._leaders.values()}


def _differences(rival: _Runner, runners: Sequence[_Runner], end: int) -> Floats:
    """A rival's contributions less those of each runner, [clusters so far, runners]."""
    return rival.first(end)[:, None] - np.stack([runner.contributions for runner in runners], axis=1)
