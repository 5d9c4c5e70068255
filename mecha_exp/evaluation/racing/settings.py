"""Reads the settings of a race from the `evaluator` part of a configuration."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from mecha_exp.errors import Problems, nearest
from mecha_exp.evaluation.declaration import Evaluator
from mecha_exp.evaluation.registry import all_evaluators
from mecha_exp.numbers import is_number, is_whole

TEST, HALVING = "test", "halving"
ALPHA = 0.05
HALVING_LOOKS: tuple[float, ...] = (1 / 12, 1 / 4)
_CHOICES = ("true", "false", HALVING)


@dataclass(frozen=True)
class RaceSettings:
    """How the points of a sweep race.

    Attributes:
        rule: `test` drops what a sequential test shows to be worse than the best, `halving` the worse ones.
        alpha: the greatest probability that the test drops the best point of the sweep, above 0, below 1.
        seed: of the order of the examples.
        looks: the parts of the examples after which `halving` drops points, ascending, above 0, below 1.
        best: the best outcome that an example can have, as a user says; None is what the evaluator says.
    """

    rule: str = TEST
    alpha: float = ALPHA
    seed: int = 0
    looks: tuple[float, ...] = HALVING_LOOKS
    best: float | None = None


def read_race(
    settings: Mapping[str, Any], main: Evaluator | None, metric: str | None, problems: Problems
) -> RaceSettings | None:
    """Read `race` and the settings that begin with `race_`; None where points do not race.

    Args:
        settings: the `evaluator` part of a configuration.
        main: the evaluator by which points are chosen; None if nothing measures them.
        metric: the number by which they are chosen.
        problems: receives an error for each setting that cannot be.
    """
    choice, alpha = settings.get("race") or False, settings.get("race_alpha", ALPHA)
    seed = settings.get("race_seed", 0)
    wrong = []
    if choice not in (True, False, HALVING):
        near = nearest(str(choice), _CHOICES)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        wrong.append(f"evaluator.race={choice}: expected true, false or {HALVING}.{hint}")
    if not is_number(alpha) or not 0 < alpha < 1:
        wrong.append(
            f"evaluator.race_alpha={alpha}: expected a probability between 0 and 1, such as {ALPHA}."
        )
    if not is_whole(seed, least=0):
        wrong.append(f"evaluator.race_seed={seed}: expected an integer of at least 0.")
    looks = HALVING_LOOKS
    if (given := settings.get("race_looks")) is not None:
        looks = _parts(given)
        if not looks:
            wrong.append(
                f"evaluator.race_looks={given}: expected ascending parts of the examples between 0 and 1, "
                "such as [1/12,1/4]."
            )
        elif choice != HALVING:
            wrong.append(
                f"evaluator.race_looks={given}: only evaluator.race={HALVING} takes it, and the race is "
                f"{str(choice).lower()}. Leave one of the two out."
            )
    if (best := settings.get("race_best")) is not None:
        if not is_number(best) or not math.isfinite(best):
            wrong.append(
                f"evaluator.race_best={best}: expected the best value that an example can have, such as 10."
            )
        elif choice is not True:
            wrong.append(
                f"evaluator.race_best={best}: only evaluator.race=true takes it, and the race is "
                f"{str(choice).lower()}. Leave one of the two out."
            )
    problems.add_all(wrong)
    if choice is False or wrong:
        return None
    _check_evaluator(main, metric, str(choice).lower(), problems)
    rule = HALVING if choice == HALVING else TEST
    return RaceSettings(rule, float(alpha), seed, looks, None if best is None else float(best))


def _parts(given: Any) -> tuple[float, ...]:
    """Numbers such as 0.25 or 1/4 in a list; empty unless they ascend within 0 to 1."""
    if not isinstance(given, list | tuple) or any(isinstance(part, bool) for part in given):
        return ()
    try:
        parts = [Fraction(str(part)) for part in given]
    except (ValueError, ZeroDivisionError):
        return ()
    ascending = all(low < high for low, high in itertools.pairwise([Fraction(0), *parts, Fraction(1)]))
    return tuple(map(float, parts)) if ascending else ()


def _check_evaluator(main: Evaluator | None, metric: str | None, choice: str, problems: Problems) -> None:
    """Check that the main evaluator can measure some of its examples, and decides the choice."""
    if main is None:
        problems.add(
            f"evaluator.race={choice}: no evaluator measures the points. Choose one, or leave it out."
        )
    elif not main.takes_examples:
        others = ", ".join(other.name for other in all_evaluators().values() if other.takes_examples)
        name = next(iter(main.fidelities), None)
        by_fidelity = f" A search can stop trials by sweep.fidelity={name}." if name else ""
        problems.add(
            f"evaluator.race={choice}: the evaluator '{main.name}' cannot measure some of its examples "
            f"alone, so points cannot race. Leave it out, or use one of {others}; one of yours can when it "
            f"declares takes_examples=True.{by_fidelity}"
        )
    elif metric != main.metric:
        problems.add(
            f"evaluator.race={choice}: points race by the outcomes of '{main.name}', whose mean is "
            f"{main.metric}, and are chosen by evaluator.metric={metric}. Leave one of the two out."
        )
