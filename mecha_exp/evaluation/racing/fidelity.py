"""Hyperband: points are measured at a low fidelity first, and those that do well there at higher ones.

A fidelity is a parameter of an evaluator, such as `limit`: less of it costs less and says less.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mecha_exp.errors import EvaluationError, Problems, did_you_mean
from mecha_exp.evaluation.declaration import Evaluator
from mecha_exp.evaluation.racing.race import Dropped

if TYPE_CHECKING:
    from mecha_exp.evaluation.scoring import Evaluation

HYPERBAND = "hyperband"
"""The rule of a race by fidelity."""
SETTING = "fidelity"
"""The key of the configuration's `evaluator` that names the parameter; `sweep.fidelity` sets it."""
_ETA = 3
_PARTS = (_ETA**2, _ETA)
"""The first and the second rung have one part in so many of the full fidelity."""
_SHARES = (9, 5, 3)
"""How the brackets share the points: that from the first rung on, from the second on, without any rung."""

Measure = Callable[[Sequence[str], int], Mapping[str, float | EvaluationError]]
"""Measures points at a fidelity; an error takes its point out of the race."""


@dataclass(frozen=True)
class Fidelity:
    """How points race by a parameter of their evaluator.

    Attributes:
        key: the parameter.
        full: its value for points that are left, at least 9.
        rule: `hyperband`.
    """

    key: str
    full: int
    rule: str = HYPERBAND

    @property
    def rungs(self) -> tuple[int, ...]:
        """The lower values at which points are measured first, a ninth and a third, rounded down."""
        return tuple(self.full // part for part in _PARTS)


class Hyperband:
    """Drops points that are not in the best third of those measured at the same fidelity so far.

    Of 17 points about nine begin at the first rung, five at the second and three are measured whole at once:
    these brackets hedge against a low fidelity that misleads. Points of a bracket are compared with each
    other alone, those of earlier passes included. Its error is not controlled.

    Args:
        settings: the parameter.
        minimized: whether less of the score is better.

    Source: Li et al. 2018, arXiv:1603.06560 (Hyperband); Li et al. 2020, arXiv:1810.05934 (asynchronous
    halving); the shares are those of Optuna's `HyperbandPruner`.
    """

    def __init__(self, settings: Fidelity, *, minimized: bool) -> None:
        self._rungs, self._sign = settings.rungs, -1.0 if minimized else 1.0
        self._earlier: dict[tuple[int, int], list[float]] = {}

    def run(
        self, points: Sequence[str], measure: Measure
    ) -> tuple[dict[str, Dropped], dict[str, EvaluationError]]:
        """Race the points of a pass; the others are to be measured at full fidelity.

        Args:
            points: by names that decide their brackets.
            measure: measures those that are still in the race.

        Returns:
            those that were dropped, and the errors of those that could not be measured.
        """
        active = {name: bracket_of(name) for name in points}
        dropped: dict[str, Dropped] = {}
        errors: dict[str, EvaluationError] = {}
        for rung, value in enumerate(self._rungs):
            measured = measure([name for name, bracket in active.items() if bracket <= rung], value)
            scores = {name: score for name, score in measured.items() if not isinstance(score, Exception)}
            errors |= {name: score for name, score in measured.items() if isinstance(score, Exception)}
            behind = self._behind(rung, active, scores)
            dropped |= {name: Dropped(value, scores[name]) for name in behind}
            active = {name: b for name, b in active.items() if name not in {*errors, *behind}}
        return dropped, errors

    def _behind(self, rung: int, brackets: Mapping[str, int], scores: Mapping[str, float]) -> list[str]:
        """The points to drop at a rung: all but the best third so far, and the best one, of each bracket."""
        signed = {name: self._sign * score for name, score in scores.items()}
        by_bracket: dict[int, list[str]] = {}
        for name in signed:
            by_bracket.setdefault(brackets[name], []).append(name)
        behind = []
        for bracket, names in by_bracket.items():
            so_far = self._earlier.setdefault((bracket, rung), [])
            so_far += [signed[name] for name in names if math.isfinite(signed[name])]
            least = sorted(so_far, reverse=True)[max(1, len(so_far) // _ETA) - 1] if so_far else math.inf
            behind += [name for name in names if not signed[name] >= least or not math.isfinite(signed[name])]
        return behind


def bracket_of(name: str) -> int:
    """The bracket of a point: 0 begins at the first rung, 1 at the second, 2 has none."""
    place = zlib.crc32(name.encode()) % sum(_SHARES)
    return next(number for number, end in enumerate(itertools.accumulate(_SHARES)) if place < end)


def read_fidelity(
    settings: Mapping[str, Any],
    evaluations: Sequence[Evaluation],
    metrics: Sequence[str],
    problems: Problems,
) -> Fidelity | None:
    """Read `fidelity`; None where points do not race by one.

    Args:
        settings: the `evaluator` part of a configuration.
        evaluations: what measures the points, the main evaluator first.
        metrics: the numbers by which points are chosen.
        problems: receives an error for what cannot be.
    """
    key = settings.get(SETTING)
    if key is None:
        return None
    what = f"sweep.fidelity={key}"
    if not evaluations:
        problems.add(f"{what}: no evaluator measures the points. Choose one, or leave it out.")
        return None
    main, full = evaluations[0].evaluator, evaluations[0].parameters.get(str(key))
    if key not in main.fidelities:
        problems.add(f"{what}: {_no_fidelity(str(key), main)}")
    elif others := [name for name in ("race", "race_looks") if settings.get(name)]:
        other = f"evaluator.{others[0]}={settings[others[0]]}"
        problems.add(f"{what} and {other} both drop points. Leave one of them out.")
    elif len(metrics) > 1:
        problems.add(f"{what} drops points by one metric, and evaluator.metric names {', '.join(metrics)}.")
    elif any(metrics[0].startswith(other.prefix) for other in evaluations[1:]):
        problems.add(
            f"{what} drops points by a number of the main evaluator, and evaluator.metric={metrics[0]} is of "
            "another one. Leave one of the two out."
        )
    elif type(full) is not int or full < _PARTS[0]:
        problems.add(
            f"{what}: evaluator.{key}={full}, and points are first measured with a ninth of it. Say how much "
            f"the best ones are measured with at last, a whole number of at least 9: evaluator.{key}=900."
        )
    else:
        return Fidelity(str(key), full)
    return None


def _no_fidelity(key: str, main: Evaluator) -> str:
    """Why an evaluator cannot measure less by a parameter, and what can be done."""
    if main.fidelities:
        names = ", ".join(main.fidelities)
        return (
            f"'{main.name}' has no such fidelity.{did_you_mean(key, main.fidelities) or f' It has {names}.'}"
        )
    if main.takes_examples:
        return f"'{main.name}' has no fidelity. It can measure some of its examples: evaluator.race=true."
    return (
        f"'{main.name}' can measure neither with less of a parameter nor some of its examples, so trials "
        "cannot be stopped early. Leave it out; an evaluator of yours can when it declares "
        "fidelities=('limit',) or takes_examples=True."
    )
