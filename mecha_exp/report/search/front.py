"""The Pareto front of several objectives: its members, what they are on test, and its hypervolume."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mecha_exp.errors import counted
from mecha_exp.report.pareto import front_settings, with_direction
from mecha_exp.report.results import Results
from mecha_exp.report.search.hypervolume import hypervolumes, worst_values
from mecha_exp.report.settings import Setting

MAX_NAMED = 12
"""Members that are written out; the table marks all of them."""


@dataclass(frozen=True)
class Member:
    """A setting on the front.

    Attributes:
        point: the number of its first point, which is the name of the run's folder.
        name: what it sets.
        overrides: the words of its point.
        values: of the objectives, as it was chosen.
        reported: the same on the report split; empty where they were not measured there.
    """

    point: int
    name: str
    overrides: Sequence[str]
    values: Mapping[str, float]
    reported: Mapping[str, float]


@dataclass(frozen=True)
class Front:
    """The front of a sweep with several objectives.

    Attributes:
        directions: of the objectives, in their order.
        members: the best in the first objective first.
        candidates: how many settings have all objectives.
        selected_on, reported_on: the splits; None of an evaluator without splits.
        reference: the reference point of the hypervolume.
        is_given: whether `sweep.reference` gave it; else it is the worst of all settings.
        volumes: the hypervolume after each setting, in their order.
    """

    directions: Mapping[str, str]
    members: Sequence[Member]
    candidates: int
    selected_on: str | None
    reported_on: str | None
    reference: Mapping[str, float]
    is_given: bool
    volumes: Sequence[float]


def front_of(results: Results) -> Front | None:
    """The front of a sweep's objectives; None where it has one objective, or none of its points has all."""
    directions = results.objectives
    if not directions:
        return None
    metrics = {m: [s.estimate(m).mean for s in results.settings] for m in directions}
    given = dict(zip(directions, results.reference, strict=False))
    reference = given if len(given) == len(directions) else worst_values(metrics, directions)
    if not reference:
        return None
    members = [_member(setting, results) for setting in front_settings(results)]
    first, better = next(iter(directions.items()))
    members.sort(key=lambda m: m.values[first], reverse=better == "maximize")
    record = next(record for record in results.finished if record.objectives)
    return Front(
        directions,
        members,
        sum(all(map(math.isfinite, values)) for values in zip(*metrics.values(), strict=True)),
        record.split,
        record.report_split,
        reference,
        bool(given),
        hypervolumes(metrics, directions, reference),
    )


def _member(setting: Setting, results: Results) -> Member:
    record = setting.finished[0]
    place = next(n for n, other in enumerate(results.records) if other is record)
    named = {m: f"{record.report_split}/{m}" for m in results.objectives} if record.reported else {}
    return Member(
        results.numbers.get(id(record), place),
        setting.name,
        record.overrides,
        {metric: setting.estimate(metric).mean for metric in results.objectives},
        {m: setting.estimate(full).mean for m, full in named.items() if setting.estimate(full).count},
    )


def front_sentences(results: Results) -> list[str]:
    """What the front is, each member with its numbers, and the hypervolume; nothing with one objective."""
    front = front_of(results)
    if front is None:
        return []
    named = " and ".join(with_direction(m, d) for m, d in front.directions.items())
    where = f" on '{front.selected_on}'" if front.selected_on else ""
    lines = [
        f"The Pareto front of {named}{where} has {len(front.members)} of "
        f"{counted(front.candidates, 'setting')}. Single "
        "numbers decide who is on it, so a member may be there by chance."
    ]
    lines += [_line(member, front) for member in front.members[:MAX_NAMED]]
    if len(front.members) > MAX_NAMED:
        lines.append(f"  ... and {len(front.members) - MAX_NAMED} more, marked in the table")
    return [*lines, _volume_line(front)]


def _line(member: Member, front: Front) -> str:
    values = ", ".join(f"{metric} {value:.4g}" for metric, value in member.values.items())
    again = ", ".join(f"{value:.4g}" for value in member.reported.values())
    report = f"; on '{front.reported_on}' {again}" if again else ""
    return f"  point {member.point}, {member.name}: {values}{report}"


def _volume_line(front: Front) -> str:
    at = ", ".join(f"{metric}={value:.4g}" for metric, value in front.reference.items())
    why = "sweep.reference" if front.is_given else "the worst of all settings"
    final, half = front.volumes[-1], front.volumes[(len(front.volumes) - 1) // 2]
    share = f", {100 * half / final:.0f} % of it after half of the settings" if final else ""
    return f"Its hypervolume is {final:.4g} over the reference point {at} ({why}){share}."


def front_data(results: Results) -> dict[str, Any]:
    """The front for `verdict.json`; empty with one objective."""
    front = front_of(results)
    if front is None:
        return {}
    return {
        "front": {
            "objectives": dict(front.directions),
            "selected_on": front.selected_on,
            "reported_on": front.reported_on,
            "candidates": front.candidates,
            "members": [
                {
                    "point": member.point,
                    "name": member.name,
                    "overrides": list(member.overrides),
                    "values": dict(member.values),
                    "reported": dict(member.reported),
                }
                for member in front.members
            ],
            "reference": dict(front.reference),
            "hypervolume": front.volumes[-1],
            "hypervolumes": list(front.volumes),
        }
    }
