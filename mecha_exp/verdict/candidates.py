"""Candidates: the measured models of a sweep, and which of them can be compared on a split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from mecha_exp.errors import counted
from mecha_exp.evaluation.outcomes import Outcomes

Direction = Literal["maximize", "minimize"]
_SHOWN = 3


@dataclass(frozen=True)
class Candidate:
    """One measured model: a point of a sweep in one of its replicates, or an input.

    Attributes:
        name: of the setting. Replicates of a setting share it; two settings never do.
        recipe: that made the model; None for an input.
        settings: the swept hyperparameters, by key.
        outcomes: by split. A split that was not measured is missing.
        replicate: what tells the replicates of a setting apart, such as `seed=1`. Settings whose replicates
            have the same labels are compared replicate by replicate.
        numbers: the main metric by split, of an evaluator that returns one number for each model.
        draws: whether its method draws random numbers, so that another seed makes another model.
    """

    name: str
    recipe: str | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    outcomes: Mapping[str, Outcomes] = field(default_factory=dict)
    replicate: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)
    draws: bool = False


def comparable(candidates: Sequence[Candidate], split: str) -> tuple[list[Candidate], list[str]]:
    """The candidates whose outcomes on a split can be compared, and a sentence for each reason why not.

    Outcomes can be compared when they have the tasks and the examples of most candidates, and no NaN. A
    setting with a replicate that cannot be compared is left out as a whole, since its mean would be another.
    """
    measured = [candidate for candidate in candidates if split in candidate.outcomes]
    if not measured:
        return [], []
    usual, shared = _usual_examples([candidate.outcomes[split] for candidate in measured])
    faults: dict[str, list[str]] = {}
    seen: set[tuple[str, str]] = set()
    for candidate in candidates:
        fault = _fault(candidate, split, usual, shared)
        if not fault and (candidate.name, candidate.replicate) in seen:
            fault = "is measured twice in the same replicate"
        seen.add((candidate.name, candidate.replicate))
        if fault:
            faults.setdefault(fault, []).append(candidate.name)
    excluded = {name for names in faults.values() for name in names}
    sentences = [not_compared(names, fault) for fault, names in faults.items()]
    return [candidate for candidate in candidates if candidate.name not in excluded], sentences


def not_compared(names: Sequence[str], fault: str) -> str:
    """The sentence that models cannot be compared, from a reason whose verb is in the singular.

    >>> not_compared(["a", "b"], "has no outcomes")
    "'a' and 'b' have no outcomes, and cannot be compared."
    """
    verb, _, rest = fault.partition(" ")
    if len(dict.fromkeys(names)) > 1:
        verb = {"has": "have", "is": "are"}[verb]
    return f"{listed(names)} {verb} {rest}, and cannot be compared."


def listed(names: Sequence[str]) -> str:
    """A few names as a subject, with how many there are.

    >>> listed(["a"])
    "'a'"
    >>> listed(["a", "b", "c", "d"])
    "'a', 'b', 'c' and 1 more"
    """
    names = list(dict.fromkeys(names))
    shown, rest = [f"'{name}'" for name in names[:_SHOWN]], len(names) - _SHOWN
    if rest > 0:
        return f"{', '.join(shown)} and {rest} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def _usual_examples(outcomes: Sequence[Outcomes]) -> tuple[Outcomes, set[int]]:
    """Outcomes with the examples that most have, and the identities of all that have them."""
    groups: list[tuple[Outcomes, list[int]]] = []
    for other in outcomes:
        for first, members in groups:
            if difference(first, other) is None:
                members.append(id(other))
                break
        else:
            groups.append((other, [id(other)]))
    first, members = max(groups, key=lambda group: len(group[1]))
    return first, set(members)


def difference(first: Outcomes, other: Outcomes) -> str | None:
    """What keeps two outcomes from being compared, as a predicate of the other; None if nothing does."""
    if set(first.values) != set(other.values):
        return f"has the tasks {sorted(other.values)}, not {sorted(first.values)}"
    for task, names in first.examples.items():
        others = other.examples[task]
        if len(names) != len(others):
            return f"has {counted(len(others), 'example')} of the task '{task}', not {len(names)}"
        same_order = names is others or np.array_equal(names, others)
        if not same_order and set(names) != set(others):
            return f"has other examples of the task '{task}' than most"
        sources, other_sources = first.clusters[task], other.clusters[task]
        if sources is other_sources or (same_order and np.array_equal(sources, other_sources)):
            continue
        pairs = zip(names, sources, strict=True), zip(others, other_sources, strict=True)
        if dict(pairs[0]) != dict(pairs[1]):
            return f"has other clusters in the task '{task}' than most"
    return None


def _fault(candidate: Candidate, split: str, usual: Outcomes, shared: set[int]) -> str | None:
    """Why a candidate cannot be compared, as a predicate."""
    outcomes = candidate.outcomes.get(split)
    if outcomes is None:
        return f"has no outcomes on the split '{split}'"
    if id(outcomes) not in shared:
        return difference(usual, outcomes) or "has other examples than most"
    bad = Counter({task: int((~np.isfinite(values)).sum()) for task, values in outcomes.values.items()})
    task, count = bad.most_common(1)[0]
    return f"has {count} outcomes that are not finite in the task '{task}'" if count else None
