"""Experts and blocks as factors of a sweep: which of them points merge, and what each adds to the metric."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mecha_exp.lab.points import EXPERTS_KEY
from mecha_exp.report.results import Results
from mecha_exp.report.settings import Setting
from mecha_exp.runs.record import Record
from mecha_exp.runs.values import as_text

KEYS = {"subset": "expert", "blocks_merged": "block"}
"""What the members of a point's list are, by the swept key that lists them."""


def factor_columns(results: Results) -> dict[str, list[int | None]]:
    """A column for each expert (or block) with 1 where a point merges it and 0 where not, and their number.

    None where a point does not say. Empty where no point leaves experts or blocks out.
    """
    columns: dict[str, list[int | None]] = {}
    grouped = [(kind, [_members(results, r, key) for r in results.records]) for key, kind in KEYS.items()]
    if EXPERTS_KEY in results.swept:
        grouped.append(("expert", [_experts(record) for record in results.records]))
    for kind, groups in grouped:
        players = _players(groups)
        for player in players:
            columns[f"{kind}/{player}"] = [None if g is None else int(player in g) for g in groups]
        if players:
            columns[f"{kind}s"] = [None if group is None else len(group) for group in groups]
    return columns


def factor_notes(results: Results) -> list[str]:
    """What subsets of experts or blocks show: for each size the share that is better than the base."""
    key = next((key for key in KEYS if key in results.swept), None)
    if results.mode != "subsets" or not results.judged or key is None:
        return []
    notes = []
    for others, settings in settings_by_other_keys(results, key).items():
        worth = {group: value for group, value in coalitions_of(results, settings, key).items() if group}
        base = _base(results, settings)
        notes += _shares(worth, base, results, f" ({others})" if others else "")
    return notes


def coalitions_of(results: Results, settings: Sequence[Setting], key: str) -> dict[frozenset[str], float]:
    """The metric of each coalition of experts, or blocks; that of no expert is the base's, if it is known."""
    worth = {frozenset(_split(str(s.values[key]))): s.estimate(results.metric).mean for s in settings}
    base = _base(results, settings) if key == "subset" else None
    return worth if base is None else {**worth, frozenset(): base}


def players_of(results: Results, key: str) -> list[str]:
    """All experts, or blocks, that points merge."""
    return _players([_members(results, record, key) for record in results.records])


def settings_by_other_keys(results: Results, key: str) -> dict[str, list[Setting]]:
    """The settings in groups that differ in their subset alone, by the values of the other keys."""
    groups: dict[str, list[Setting]] = {}
    for setting in results.settings:
        others = {name: value for name, value in setting.values.items() if name != key}
        groups.setdefault(", ".join(f"{n}={as_text(v)}" for n, v in others.items()), []).append(setting)
    return groups


def _shares(
    worth: Mapping[frozenset[str], float], base: float | None, results: Results, of: str
) -> list[str]:
    """For each size the share of subsets that are better than the base, with Wilson's interval."""
    from mecha_exp.verdict.intervals import wilson

    if base is None or not math.isfinite(base):
        why = "no base was measured" if base is None else f"that of the base is {base}"
        return [f"whether subsets are better than the base is not known: {why}{of}"]
    notes = []
    for size in sorted({len(group) for group in worth}):
        values = [v for group, v in worth.items() if len(group) == size and math.isfinite(v)]
        better = sum(value < base if results.minimized else value > base for value in values)
        if values:
            low, high = wilson(better, len(values))
            notes.append(
                f"subsets of {size}{of}: {better} of {len(values)} are better than the base ({base:.4f}), "
                f"{better / len(values):.0%} ({float(low):.0%} to {float(high):.0%})"
            )
    return notes


def _base(results: Results, settings: Sequence[Setting]) -> float | None:
    """The metric of the base, which is the one input of all points; None if that cannot be told."""
    inputs = [{*record.inputs} for setting in settings for record in setting.finished]
    common = set.intersection(*inputs) if inputs else set()
    if len(common) != 1:
        return None
    return results.references.get(common.pop(), {}).get(results.metric or "")


def _experts(record: Record) -> tuple[str, ...] | None:
    """The inputs of a point but its base; None if it did not come to read any."""
    return tuple(name for name in record.inputs if name != record.base) or None


def _members(results: Results, record: Record, key: str) -> tuple[str, ...] | None:
    """The members of a point's list under a key; None if it has none."""
    text = results.text(record, key)
    return _split(text) if text else None


def _split(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.strip("[]").split(",") if part)


def _players(groups: Sequence[tuple[str, ...] | None]) -> list[str]:
    """All members, those of the largest group first and in its order."""
    listed = sorted((group for group in groups if group), key=len, reverse=True)
    return list(dict.fromkeys(player for group in listed for player in group))
