"""From the records and outcomes of a sweep to its verdict, `verdict.json`, and the footnotes of a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mecha_exp.errors import counted
from mecha_exp.lab.points import SEED_PATH, SET_KEY
from mecha_exp.report.intervals import SEEDS_ALONE, base_of, covered, prefix
from mecha_exp.report.results import REPLICATE_KEYS, Results
from mecha_exp.report.search.front import front_data, front_sentences
from mecha_exp.report.search.notes import MODE as SEARCH
from mecha_exp.report.settings import Setting
from mecha_exp.runs.environment import are_mixed
from mecha_exp.runs.outcomes import INPUT, POINT, WHOLE, ModelOutcomes
from mecha_exp.runs.record import RACE_EXAMPLES, Record, write_json

if TYPE_CHECKING:
    from mecha_exp.evaluation.outcomes import Outcomes
    from mecha_exp.verdict import Candidate, Verdict

VERDICT_FILE = "verdict.json"
BEST, TIED = "*", "~"
"""Marks of the best setting, and of those that the data cannot tell from it."""
ELSEWHERE = "†"
"""Mark of a result made with another torch or other vector features than this process has."""
_MIXED = (
    "Points were made with different versions of torch, or on different processors: differences as small as "
    "rounding may come from that."
)
_SOURCES = {SET_KEY: "experts", SEED_PATH: "seed"}
"""The names of what replicates differ in, where they are not the keys."""


def verdict_of(
    results: Results, models: Sequence[ModelOutcomes], fresh: Sequence[ModelOutcomes] = ()
) -> Verdict | None:
    """Conclude from the records of a sweep and the outcomes of its points and inputs.

    Args:
        results: of the sweep, by its own keys and its main metric.
        models: the outcomes, as `outcomes_of_sweep` reads them; a point is known by its number.
        fresh: the outcomes of the chosen setting with new seeds, named `SETTING (seed=N)`.

    Returns:
        The verdict; None where it is not known which direction of the metric is better.
    """
    from mecha_exp.verdict import conclude

    if not results.judged or not results.finished:
        return None
    base = base_of(results)
    inputs = inputs_of(results, models)
    verdict = conclude(
        candidates_of(results, models),
        metric=str(results.metric),
        direction=results.direction,
        inputs=inputs,
        base=base,
        expert_of=named_experts(results),
        splits=tuple(dict.fromkeys(splits_of(results))),
        dropped=sum(setting.dropped for setting in results.settings),
        fresh=_fresh_candidates(results, fresh),
    )
    mixed = [_MIXED] if are_mixed(record.tags for record in results.finished) else []
    return replace(verdict, notes=(*race_notes(results), *_twin_notes(results), *mixed, *verdict.notes))


def race_notes(results: Results) -> list[str]:
    """A sentence on the points that a race dropped, and on how sure that is; none without any."""
    if not results.dropped:
        return []
    counts = [record.dropped for record in results.dropped if record.dropped is not None]
    race = results.dropped[0].race
    if key := race.get("key"):
        at = " or ".join(f"{key}={count}" for count in sorted(set(counts)))
        return [
            f"Hyperband dropped {len(counts)} of {counted(len(results.records), 'point')} at {at}; the "
            "others were "
            f"measured with {key}={race['full']}. The best of the sweep may be among those that it dropped, "
            "and they are not compared."
        ]
    least, most = min(counts), max(counts)
    after = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    whole = max(
        (int(r.metrics.get(RACE_EXAMPLES, 0)) for r in results.finished if r.dropped is None), default=0
    )
    error = (
        f"the best of the sweep is among them with a probability of at most {race.get('alpha', 0):g}"
        if race.get("rule") != "halving"
        else "successive halving may have dropped the best of the sweep"
    )
    if results.mode == SEARCH and race.get("rule") != "halving":  # what comes next depends on the race
        error += ", as far as trials do not depend on what was dropped before them"
    return [
        f"A race dropped {len(counts)} of {counted(len(results.records), 'point')} after {after} of "
        f"{counted(whole, 'example')}: {error}, and they are not compared."
    ]


def candidates_of(results: Results, models: Sequence[ModelOutcomes]) -> list[Candidate]:
    """A candidate for each finished point that can be chosen, in the order of the table.

    Points that a race dropped and trials of a greedy soup are left out, and so are all but one of settings
    that are the same models, such as a greedy soup that kept every expert, and the uniform one.
    """
    from mecha_exp.verdict import Candidate

    twins = _twins(results)
    by_number = {model.point: model for model in models if model.role == POINT}
    numbers = {id(record): number for number, record in enumerate(results.records)}
    return [
        Candidate(
            setting.name,
            str(results.method_of(setting) or record.parameters.get("method") or "merge"),
            dict(setting.values),
            _of_metric(by_number.get(numbers[id(record)]), results),
            label,
            _numbers(results, record.metrics),
            draws=_draws(record),
        )
        for setting in results.ranked
        if setting.name not in twins
        for label, record in _replicates(results, setting).items()
    ]


def _draws(record: Record) -> bool:
    """Whether a point's method draws numbers; one that may drop entries draws none where it drops nothing."""
    drops = record.parameters.get("drop") != 0  # as KnOTS, whose default is 0
    return drops and ("seed" in record.parameters or SEED_PATH in record.parameters)


def _twins(results: Results) -> dict[str, str]:
    """The settings that are the same models as an earlier one of the table, by name, and that one's name."""
    first: dict[tuple[tuple[str, float | None], ...], str] = {}
    twins: dict[str, str] = {}
    for setting in results.ranked:
        records = _replicates(results, setting).values()
        models = tuple((record.signature, record.metrics.get(str(results.metric))) for record in records)
        known = models and all(signature for signature, _ in models)
        if known and first.setdefault(models, setting.name) != setting.name:
            twins[setting.name] = first[models]
    return twins


def _twin_notes(results: Results) -> list[str]:
    """A sentence on the settings that are counted once with another."""
    return [
        f"'{twin}' is the same model as '{name}', and is counted once."
        for twin, name in _twins(results).items()
    ]


def _fresh_candidates(results: Results, models: Sequence[ModelOutcomes]) -> list[Candidate]:
    """New replicates of a setting, by its name and their label: `alpha=0.3 (seed=7)`."""
    from mecha_exp.verdict import Candidate

    parts = [(model, *model.name.removesuffix(")").rpartition(" (")[::2]) for model in models]
    return [
        Candidate(name, outcomes=_of_metric(model, results), replicate=label) for model, name, label in parts
    ]


def _replicates(results: Results, setting: Setting) -> dict[str, Record]:
    """The measured points of a setting by what tells them apart.

    That is their seed and their set of experts, and a number where these come again.
    """
    labelled: dict[str, Record] = {}
    for record in () if setting.dropped or setting.is_trial else setting.finished:
        texts = {key: results.text(record, key) for key in REPLICATE_KEYS}
        label = ",".join(f"{_SOURCES.get(key, key)}={text}" for key, text in texts.items() if text)
        repeated = sum(known.partition(" ")[0] == label for known in labelled)
        labelled[label + (f" ({repeated + 1})" if repeated else "")] = record
    return labelled


def inputs_of(results: Results, models: Sequence[ModelOutcomes]) -> list[Candidate]:
    """A candidate for each input that was measured; with several sets of experts one for each replicate.

    So an expert of a set stands beside the points of this set, and the base beside all.
    """
    from mecha_exp.verdict import Candidate

    measured = {(model.name, model.experts): model for model in models if model.role == INPUT}
    numbers = {(name, n): of for name, sets in results.references_by_set.items() for n, of in sets.items()}
    replicates = [
        (label, results.expert_set(record))
        for setting in results.ranked
        for label, record in _replicates(results, setting).items()
    ]
    return [
        Candidate(
            name,
            outcomes=_of_metric(measured.get((name, experts)), results),
            replicate=label,
            numbers=_numbers(results, numbers.get((name, experts), {})),
        )
        for name, experts in dict.fromkeys([*measured, *numbers])
        for label in dict.fromkeys(
            [label for label, n in replicates if n == experts and n is not None] or [""]
        )
    ]


def _of_metric(model: ModelOutcomes | None, results: Results) -> Mapping[str, Outcomes]:
    """The outcomes of the main metric by split."""
    return model.of_metric(str(results.metric)) if model else {}


def _numbers(results: Results, metrics: Mapping[str, float]) -> dict[str, float]:
    """The main metric by split."""
    names = {split: f"{prefix(results, split)}{results.metric}" for split in splits_of(results)}
    return {split: metrics[name] for split, name in names.items() if name in metrics}


def splits_of(results: Results) -> tuple[str, str]:
    """On which splits points are chosen and reported."""
    record = next((r for r in results.finished if r.metric), results.finished[0])
    selected_on = record.split or WHOLE
    return selected_on, record.report_split or selected_on


def named_experts(results: Results) -> dict[str, str]:
    """The input that a configuration names as the expert of a task."""
    return {task: name for record in results.finished for task, name in record.expert_of.items()}


def write_verdict(results: Results, path: Path) -> bool:
    """Write `verdict.json`, or remove it where there is no verdict; returns whether it was written."""
    data = verdict_data(results)
    if not data:
        path.unlink(missing_ok=True)
        return False
    write_json(path, data)
    return True


def verdict_data(results: Results) -> dict[str, object]:
    """The content of `verdict.json`: the verdict, or the front of several objectives; empty without any."""
    if results.verdict is None:
        return front_data(results)
    from mecha_exp.verdict import as_json, sentence

    return {"sentence": sentence(results.verdict), **as_json(results.verdict)}


def conclusion(results: Results) -> list[str]:
    """The sentence of the verdict, then one for each thing that limits it; nothing without a verdict.

    Of several objectives it is their front.
    """
    if results.verdict is None:
        return front_sentences(results)
    from mecha_exp.verdict import sentence

    first = sentence(results.verdict)
    return [first, *(note for note in results.verdict.notes if note.lower() not in first.lower())]


def footnotes(results: Results, *, has_intervals: bool, has_spreads: bool) -> list[str]:
    """What the marks and the intervals of a table mean.

    Args:
        results: that the table shows.
        has_intervals: whether it has intervals in brackets.
        has_spreads: whether it has intervals after a plus-minus sign.
    """
    verdict, lines = results.verdict, []
    if verdict and verdict.tied:
        tests = "paired tests at 5 % after Holm's correction"
        lines.append(f"{TIED} the data cannot tell it from the best ({BEST}) in {tests}")
    if has_intervals and (over := covered(results)):
        lines.append(f"[low, high] 95 % interval over {over}")
    if has_spreads:
        lines.append(f"± 95 % interval (Student's t) over {SEEDS_ALONE}")
    if made_with := results.made_with:
        lines.append(f"{ELSEWHERE} {elsewhere_text(made_with)}")
    return lines


def elsewhere_text(made_with: Sequence[str]) -> str:
    """What the mark of results that were made elsewhere means."""
    return (
        f"made with {', '.join(made_with)}: bits may differ from those made here; "
        "the same command with rerun=always makes them here"
    )


def reported_numbers(results: Results) -> dict[str, float]:
    """The reported number of the chosen setting with its interval, and the p-value against the base.

    `test/accuracy`, `test/accuracy/ci95_low`, `test/accuracy/ci95_high` and `p_holm/base`, or as the metric,
    the split and the base are called; none where nothing was concluded.
    """
    verdict = results.verdict
    if verdict is None or verdict.selected is None:
        return {}
    name = f"{prefix(results, verdict.reported_on)}{verdict.metric}"
    low, high = verdict.selected.overall.ci95
    numbers = {name: verdict.selected.overall.value, f"{name}/ci95_low": low, f"{name}/ci95_high": high}
    compared = verdict.against(verdict.base) if verdict.base is not None else ()
    numbers |= {f"p_holm/{c.against}": c.p_holm for c in compared if c.point == verdict.selected.point}
    return {metric: value for metric, value in numbers.items() if math.isfinite(value)}
