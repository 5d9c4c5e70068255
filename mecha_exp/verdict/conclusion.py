"""From the outcomes of a sweep to its verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from mecha_exp.verdict import sentences
from mecha_exp.verdict.candidates import Candidate, Direction, comparable
from mecha_exp.verdict.choice import best, cross_validated, minimum_detectable_difference
from mecha_exp.verdict.comparisons import Family, columns, independent_family, selected_family
from mecha_exp.verdict.intervals import RESAMPLES
from mecha_exp.verdict.normalisation import experts_of, usable_experts
from mecha_exp.verdict.numbers import verdict_of_numbers
from mecha_exp.verdict.paired_tests import FLIPS
from mecha_exp.verdict.panel import Integers, Panel
from mecha_exp.verdict.result import Comparison, Cost, Detectable, Score, Verdict
from mecha_exp.verdict.scoring import counting_choice, measure

MOST_COMPARED = 1000
"""How many settings are compared and have intervals. Time and memory grow with each by a bootstrap."""


@dataclass(frozen=True)
class _Question:
    """What is asked of the data: the arguments of `conclude`."""

    points: Sequence[Candidate]
    inputs: Sequence[Candidate]
    metric: str
    direction: Direction
    base: str | None
    expert_of: Mapping[str, str] | None
    resamples: int
    flips: int
    seed: int
    dropped: int = 0
    fresh: Sequence[Candidate] = ()

    @cached_property
    def recipes(self) -> dict[str, str | None]:
        """The recipe of each setting and input."""
        return {candidate.name: candidate.recipe for candidate in (*self.points, *self.inputs)}

    def places(self, panel: Panel) -> Integers:
        """The places of the points, without inputs."""
        sweep = {point.name for point in self.points}
        return np.array([i for i, name in enumerate(panel.names) if name in sweep], dtype=np.intp)

    def best_part(self, panel: Panel, chosen: Sequence[str]) -> Panel:
        """The panel of the chosen points, the best others, `MOST_COMPARED` in all, and the inputs."""
        places = self.places(panel)
        if len(places) <= MOST_COMPARED:
            return panel
        sign = 1 if self.direction == "minimize" else -1
        ranked = places[np.argsort(sign * panel.scores[places], kind="stable")]
        first = [panel.index(name) for name in dict.fromkeys(chosen)]
        ordered = [*first, *ranked[~np.isin(ranked, first)]]
        return panel.of_settings(np.setdiff1d(np.arange(len(panel.names)), ordered[MOST_COMPARED:]))

    def base_in(self, panel: Panel) -> int | None:
        """The place of the base; None if it is not there."""
        return _place(panel, self.base)

    def best_input(self, panel: Panel) -> str | None:
        """The best of the inputs; None if none is there."""
        names = [n for n in dict.fromkeys(model.name for model in self.inputs) if n in panel.names]
        if not names:
            return None
        places = [panel.index(name) for name in names]
        return names[best(panel.scores[places], self.direction)]


@dataclass(frozen=True, eq=False)
class _Data:
    """The outcomes on the split of the choice and on the one that is reported, which may be one.

    `fresh` has new replicates of the chosen setting, and the inputs, on the reported split.
    """

    selection: Panel
    selected_on: str
    reported: Panel
    reported_on: str
    chosen: str
    best_input: str | None = None
    fresh: Panel | None = None

    @property
    def separate(self) -> bool:
        """Whether the reported data had no part in the choice."""
        return self.selected_on != self.reported_on


def conclude(
    points: Sequence[Candidate],
    *,
    metric: str,
    direction: Direction = "maximize",
    inputs: Sequence[Candidate] = (),
    base: str | None = None,
    expert_of: Mapping[str, str] | None = None,
    splits: Sequence[str] = ("validation", "test"),
    resamples: int = RESAMPLES,
    flips: int = FLIPS,
    seed: int = 0,
    dropped: int = 0,
    fresh: Sequence[Candidate] = (),
) -> Verdict:
    """Choose the best point on one split, report it on another, and say what the data can tell apart.

    Of more than `MOST_COMPARED` points that were chosen and are compared on the same data, the best of each
    recipe and the best others are compared and have intervals; all take part in the choice.
    On the reported split, points that were chosen elsewhere are compared, and Holm's correction is for the
    comparisons that are made. Where points are chosen and compared on the same data, any two could have been
    compared, and the correction is for all pairs. Of points with replicates it is for all pairs in any case,
    since a choice favours lucky replicates. Where there are several kinds, the 5 % are shared among them.

    Examples are random, and so are replicates; effects of a replicate may be shared between settings or not,
    and may be larger in some. Intervals and tests cover both.

    Args:
        points: of the sweep, a candidate for each replicate.
        metric: the name of the main metric.
        direction: of the metric.
        inputs: the base and the experts, measured in the same way.
        base: the input with which all points are compared.
        expert_of: the input that is the expert of each task; of others the one that is best by far.
        splits: on which points are chosen, then reported. With one split, or a second that was not measured,
            both are done on the same data.
        resamples: bootstrap draws for intervals.
        flips: sign patterns for permutation tests.
        seed: same seed, same verdict.
        dropped: how many more settings could have been chosen, had a race not dropped them.
        fresh: new replicates of the chosen setting on the reported split, measured after the choice. The
            report is theirs then, if they are of the setting that is chosen, and two at least.

    Returns:
        The verdict. Whatever limits it is a sentence of its notes; unusable outcomes raise nothing.
    """
    question = _Question(
        points, inputs, metric, direction, base, expert_of, resamples, flips, seed, dropped, fresh
    )
    if not any(point.outcomes for point in points):
        return verdict_of_numbers(points, inputs, metric, direction, splits)
    notes: list[str] = []
    panels = _read(question, splits, notes)
    if isinstance(panels, Verdict):
        return replace(panels, notes=tuple(dict.fromkeys(notes)))
    chosen = _best_of_recipes(question, panels.selection)
    families = _families(question, panels, [*chosen.values()])
    eligible = question.places(panels.selection)
    notes += sentences.limits(panels.selection, eligible, direction, panels.selected_on, dropped=dropped)
    notes += sentences.limits_of_report(
        panels.fresh or panels.reported,
        panels.reported_on,
        panels.chosen,
        base,
        separate=panels.separate,
    )
    notes += _limits_of_replicates(question, panels)
    if (count := len(question.places(panels.selection))) > MOST_COMPARED and len(families[-1].pairs):
        notes.append(
            f"The best {MOST_COMPARED:,} of the {count:,} settings, with the best of each recipe, are "
            "compared with the chosen one and have intervals; the correction counts all pairs."
        )
    scores, selected, comparisons = _measure(question, panels, families, notes)
    notes += sentences.limits_of_tests(families, comparisons)
    rows = [panels.reported.index(name) for name in chosen.values() if name in panels.reported.names]
    table = columns(panels.reported, np.array(rows, dtype=np.intp), direction, flips=flips, seed=seed)
    return Verdict(
        metric,
        direction,
        panels.selected_on,
        panels.reported_on,
        selected,
        _cost(question, panels, families),
        tuple(scores),
        chosen,
        tuple(comparisons),
        table,
        panels.reported.examples,
        panels.reported.clusters,
        base,
        tuple(dict.fromkeys(notes)),
        panels.best_input,
        selected.replicates if panels.fresh else 0,
        _covered(question, panels),
    )


def _covered(question: _Question, panels: _Data) -> tuple[str, ...]:
    """What the interval of the chosen setting covers."""
    panel = panels.fresh or panels.reported
    replicated = panel.counts[panel.index(panels.chosen)] > 1
    counted = _counts_choice(question, panels)
    return ("examples", *(("replicates",) if replicated else ()), *(("choice",) if counted else ()))


def _counts_choice(question: _Question, panels: _Data) -> bool:
    """Whether the reported examples, or replicates, are those by which the setting was chosen."""
    several = len(question.places(panels.selection)) + question.dropped > 1
    replicated = panels.reported.counts[panels.reported.index(panels.chosen)] > 1
    return several and panels.fresh is None and (replicated or not panels.separate)


def _limits_of_replicates(question: _Question, panels: _Data) -> list[str]:
    """What limits a choice among models that were drawn: lucky replicates, or one of each alone."""
    if panels.fresh is not None:
        return []
    draws = any(point.draws for point in question.points if point.name == panels.chosen)
    count = int(panels.reported.counts[panels.reported.index(panels.chosen)])
    several = len(question.places(panels.selection)) + question.dropped > 1
    return sentences.limits_of_choice(panels.chosen, count, draws=draws, several=several)


def _read(question: _Question, splits: Sequence[str], notes: list[str]) -> _Data | Verdict:
    """The data of both splits; an empty verdict where nothing could be chosen."""
    measured = {split for point in question.points for split in point.outcomes}
    available = [split for split in splits if split in measured] or sorted(measured)
    if available[0] != splits[0]:
        notes.append(
            f"No point has outcomes on the split '{splits[0]}': points are chosen on '{available[0]}'."
        )
    selected_on, reported_on = available[0], available[min(1, len(available) - 1)]
    selection = _panel(question, selected_on, question.points, notes)
    if selection is None or not len(question.places(selection)):
        notes.append(f"Nothing was chosen: no point has outcomes on '{selected_on}' that can be compared.")
        return Verdict(question.metric, question.direction, selected_on, reported_on)
    chosen = selection.names[_best_place(question, selection)]
    if reported_on != selected_on:
        points = [point for point in question.points if reported_on in point.outcomes]
        reported = _panel(question, reported_on, points, notes)
        if reported is not None and chosen in reported.names:
            best_input = question.best_input(selection) or question.best_input(reported)
            fresh = _fresh(question, chosen, reported_on, notes)
            return _Data(selection, selected_on, reported, reported_on, chosen, best_input, fresh)
        notes.append(f"The chosen point '{chosen}' has no outcomes on '{reported_on}' that can be reported.")
    best_input = question.best_input(selection)
    return _Data(selection, selected_on, selection, selected_on, chosen, best_input)


def _fresh(question: _Question, chosen: str, split: str, notes: list[str]) -> Panel | None:
    """New replicates of the chosen setting, with the inputs; None where there are fewer than two."""
    if not question.fresh:
        return None
    if any(point.name != chosen for point in question.fresh):
        notes.append(f"The new replicates are of another setting than '{chosen}', which is chosen now.")
        return None
    panel = _panel(question, split, question.fresh, notes)
    return panel if panel and chosen in panel.names and panel.counts[panel.index(chosen)] > 1 else None


def _best_place(question: _Question, selection: Panel) -> int:
    """The place of the best point."""
    eligible = question.places(selection)
    return int(eligible[best(selection.scores[eligible], question.direction)])


def _panel(question: _Question, split: str, points: Sequence[Candidate], notes: list[str]) -> Panel | None:
    """The outcomes of points and measured inputs on a split; None where there are none."""
    inputs = [model for model in question.inputs if split in model.outcomes]
    candidates, remarks = comparable([*points, *inputs], split)
    notes += remarks
    return Panel.of(candidates, split) if candidates else None


def _families(question: _Question, panels: _Data, best_of_recipes: Sequence[str]) -> list[Family]:
    """The comparisons on the reported split, then those of points without outcomes there."""
    eligible = question.places(panels.selection)
    panel = question.best_part(panels.selection, [panels.chosen, *best_of_recipes])
    points, best_place, base = question.places(panel), panel.index(panels.chosen), question.base_in(panel)
    inputs = len({model.name for model in question.inputs} - {question.base})
    if not panels.separate:
        best_input = _place(panel, panels.best_input)
        return [
            selected_family(
                panel, panels.selected_on, eligible, points, best_place, base, best_input,
                inputs=inputs, dropped=question.dropped,
            )
        ]  # fmt: skip
    reported = panels.reported
    rest = np.array([p for p in points if panel.names[p] not in reported.names], dtype=np.intp)
    first = independent_family(
        reported,
        panels.reported_on,
        question.places(reported),
        reported.index(panels.chosen),
        question.base_in(reported),
        None if panels.fresh else _place(reported, panels.best_input),
        eligible=len(eligible) + question.dropped,
    )
    second = selected_family(
        panel, panels.selected_on, eligible, rest, best_place, base, dropped=question.dropped
    )
    families = [first, second]
    if panels.fresh is not None:
        families = [
            _of_fresh(question, panels, panels.fresh),
            first.without(panels.chosen, question.base),
            second,
        ]
    share = 1 / max(1, sum(len(family.pairs) > 0 for family in families))
    return [replace(family, share=share) for family in families]


def _of_fresh(question: _Question, panels: _Data, fresh: Panel) -> Family:
    """The chosen setting, by its new replicates, against the base and the best input."""
    place = np.array([fresh.index(panels.chosen)], dtype=np.intp)
    return independent_family(
        fresh,
        panels.reported_on,
        place,
        int(place[0]),
        question.base_in(fresh),
        _place(fresh, panels.best_input),
        eligible=1,
    )


def _place(panel: Panel, name: str | None) -> int | None:
    """The place of a setting or an input; None if it is not there."""
    return panel.index(name) if name is not None and name in panel.names else None


def _measure(
    question: _Question, panels: _Data, families: Sequence[Family], notes: list[str]
) -> tuple[list[Score], Score, list[Comparison]]:
    """Scores of all families, that of the chosen setting as it is reported, and comparisons."""
    scores: list[Score] = []
    fresh: list[Score] = []
    comparisons: list[Comparison] = []
    names = [model.name for model in question.inputs]
    named = question.expert_of or {}
    experts = experts_of(question.inputs, panels.reported_on, question.base, named, question.direction)
    for family in families:
        places, remarks = usable_experts(family.panel, experts, question.direction)
        if family.split == panels.reported_on and (experts or names):
            notes += remarks
        measured = measure(
            family.panel, family.pairs, places, resamples=question.resamples, seed=question.seed
        )
        of_family = fresh if family.panel is panels.fresh else scores
        of_family += measured.scores(family.panel, question.recipes, family.split)
        comparisons += family.comparisons(measured.differences, flips=question.flips, seed=question.seed)
    where = (panels.chosen, panels.reported_on)
    selected = next(score for score in (*fresh, *scores) if (score.point, score.split) == where)
    if _counts_choice(question, panels):
        overall = counting_choice(
            panels.reported,
            panels.reported.index(panels.chosen),
            selected.overall,
            candidates=len(question.places(panels.selection)) + question.dropped,
            direction=question.direction,
            same_data=not panels.separate,
        )
        selected = replace(selected, overall=overall)
    return scores, selected, comparisons


def _best_of_recipes(question: _Question, selection: Panel) -> dict[str, str]:
    """The best setting of each recipe, or of all after a race; a point without a recipe stands for itself."""
    if question.dropped:
        name = selection.names[_best_place(question, selection)]
        return {question.recipes[name] or name: name}
    groups: dict[str, list[int]] = {}
    for place in question.places(selection):
        name = selection.names[place]
        groups.setdefault(question.recipes[name] or name, []).append(int(place))
    return {
        recipe: selection.names[places[best(selection.scores[places], question.direction)]]
        for recipe, places in groups.items()
    }


def _cost(question: _Question, panels: _Data, families: Sequence[Family]) -> Cost:
    """What choosing cost: candidates, the gap between splits, the cross-validated score, the resolution."""
    eligible = question.places(panels.selection)
    estimate = float(panels.selection.scores[panels.selection.index(panels.chosen)])
    reported = float(panels.reported.scores[panels.reported.index(panels.chosen)])
    return Cost(
        len(eligible) + question.dropped,
        estimate,
        estimate - reported if panels.separate else None,
        None
        if question.dropped  # by all examples, so that none has no part in the choice
        else cross_validated(panels.selection, eligible, question.direction, seed=question.seed),
        question.dropped,
        tuple(_detectable(question, panels, families)),
    )


def _detectable(question: _Question, panels: _Data, families: Sequence[Family]) -> Iterator[Detectable]:
    """What the comparison with the base shows, and what most comparisons of settings do."""
    pairs: dict[str | None, list[tuple[Family, Integers]]] = {question.base: [], None: []}
    for family in families:
        names = np.array(family.panel.names)[family.pairs]
        chosen = (names == panels.chosen).any(axis=1)
        of_base = (names == question.base).any(axis=1)
        pairs[question.base].append((family, family.pairs[chosen & of_base]))
        settings = np.isin(names, list({point.name for point in question.points})).all(axis=1)
        pairs[None].append((family, family.pairs[chosen & settings]))
    for against, groups in pairs.items():
        family, most = max(groups, key=lambda group: len(group[1]))
        smallest = minimum_detectable_difference(
            family.panel, most, family.size, family.share, flips=question.flips
        )
        if smallest is not None:
            yield Detectable(against, family.split, smallest)
