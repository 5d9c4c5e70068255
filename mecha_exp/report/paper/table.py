"""A paper's table of one or several sweeps: pretrained, individual and merged models by tasks.

One verdict is made of the outcomes of all sweeps together, so the best of each column is in bold and what
paired tests cannot tell from it is underlined, corrected for all pairs of rows in all columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mecha_exp.errors import ConfigError
from mecha_exp.report.intervals import base_of
from mecha_exp.report.paper.text import INDIVIDUAL, PRETRAINED
from mecha_exp.report.results import Results
from mecha_exp.report.verdict import candidates_of, inputs_of, named_experts, splits_of
from mecha_exp.runs.outcomes import ModelOutcomes

if TYPE_CHECKING:
    from mecha_exp.verdict import Candidate, Verdict

_FINGERPRINT = "fingerprint/"


@dataclass(frozen=True)
class Part:
    """A sweep of a table.

    Attributes:
        name: of the sweep.
        results: with the metric that the table shows.
        models: the outcomes of its points and inputs.
        titles: the names that its recipes have in papers, by their own.
    """

    name: str
    results: Results
    models: Sequence[ModelOutcomes]
    titles: Mapping[str, str]


def title_of(recipe: str, titles: Mapping[str, str]) -> str:
    """The name of a recipe in a paper: its own title, or its name as words; parts after a comma stay.

    >>> title_of("task_arithmetic, entropy/key", {}), title_of("tsv_m", {"tsv_m": "TSV-M"})
    ('Task arithmetic, entropy/key', 'TSV-M')
    """
    first, *rest = recipe.split(", ")
    name = titles.get(first) or first.replace("_", " ")
    return ", ".join([name[:1].upper() + name[1:], *rest])


def verdict_on(parts: Sequence[Part]) -> Verdict:
    """The verdict on the points of all sweeps together; recipes have their titles, inputs words of papers.

    Raises:
        ConfigError: the sweeps have other metrics, splits or examples, or nothing says which is better.
    """
    from mecha_exp.verdict import conclude

    first = parts[0].results
    _require_alike(parts)
    points = [point for part in parts for point in _points(part, parts)]
    inputs, base = _inputs(parts)
    verdict = conclude(
        points,
        metric=str(first.metric),
        direction=first.direction,
        inputs=inputs,
        base=base,
        splits=tuple(dict.fromkeys(splits_of(first))),
        dropped=sum(setting.dropped for part in parts for setting in part.results.settings),
    )
    shown = {score.recipe for score in verdict.scores if score.split == verdict.reported_on}
    lacking = {str(point.recipe) for point in points} - {str(recipe) for recipe in shown}
    if verdict.selected is None or lacking:
        raise ConfigError(
            f"A table of methods by tasks needs outcomes of the same examples for all of them; it lacks "
            f"{', '.join(sorted(lacking)) or 'all'}. {' '.join(verdict.notes)}"
        )
    return verdict


def _require_alike(parts: Sequence[Part]) -> None:
    """Check that sweeps can be compared.

    Raises:
        ConfigError: they cannot.
    """
    for part in parts:
        if not part.results.judged or not part.results.finished:
            raise ConfigError(
                f"{part.name}: a table of methods by tasks needs a verdict, and no evaluator says which "
                "points are better."
            )
    metrics = {str(part.results.metric): part.name for part in parts}
    if len(metrics) > 1:
        named = ", ".join(f"{metric} ({name})" for metric, name in metrics.items())
        raise ConfigError(f"the sweeps have other main metrics: {named}. Name one of both with --metric.")
    splits = {splits_of(part.results): part.name for part in parts}
    if len(splits) > 1:
        named = ", ".join(f"{' and '.join(dict.fromkeys(pair))} ({name})" for pair, name in splits.items())
        raise ConfigError(f"the sweeps were chosen and reported on other splits: {named}.")
    Results("", [], [record for part in parts for record in part.results.records])  # checks the evaluations


def _points(part: Part, parts: Sequence[Part]) -> Iterator[Candidate]:
    """The points of a sweep under the titles of their recipes."""
    results = part.results
    recipes = {
        setting.name: str(results.method_of(setting) or record.parameters.get("recipe") or "merge")
        for setting in results.settings
        for record in setting.finished[:1]
    }
    of_others = [_inputs_of_recipes(other) for other in parts if other is not part]
    own = _inputs_of_recipes(part)
    for candidate in candidates_of(results, part.models):
        title = title_of(recipes[candidate.name], part.titles)
        differs = any(title in other and other[title] != own[title] for other in of_others)
        name = candidate.name if len(parts) == 1 else f"{part.name}: {candidate.name}"
        yield replace(candidate, name=name, recipe=f"{title} ({part.name})" if differs else title)


def _inputs_of_recipes(part: Part) -> dict[str, set[str]]:
    """The contents of the inputs of each recipe, by its title."""
    contents: dict[str, set[str]] = {}
    for setting in part.results.settings:
        for record in setting.finished:
            recipe = str(part.results.method_of(setting) or record.parameters.get("recipe") or "merge")
            hashes = {value for tag, value in record.tags.items() if tag.startswith(_FINGERPRINT)}
            contents.setdefault(title_of(recipe, part.titles), set()).update(hashes)
    return contents


def _inputs(parts: Sequence[Part]) -> tuple[list[Candidate], str | None]:
    """The pretrained and the individual models of all sweeps, and the name of the base that all share.

    Where it is not known which input is the expert of which task, each input has a row of its own. Equal
    models of several sweeps are one; others are told apart by the name of their sweep.
    """
    from mecha_exp.verdict.normalisation import experts_of

    groups: dict[str, list[tuple[str, list[Candidate]]]] = {}
    for part in parts:
        inputs, base = inputs_of(part.results, part.models), base_of(part.results)
        split, by_task = splits_of(part.results)[1], named_experts(part.results)
        experts = experts_of(inputs, split, base, by_task, part.results.direction)
        named = {PRETRAINED: [c for c in inputs if c.name == base], INDIVIDUAL: _individual(inputs, experts)}
        if not named[INDIVIDUAL]:
            named |= {c.name: [o for o in inputs if o.name == c.name] for c in inputs if c.name != base}
        for name, candidates in named.items():
            if candidates:
                groups.setdefault(name, []).append((part.name, candidates))
    listed: list[Candidate] = []
    for name, of_sweeps in groups.items():
        same = all(_are_equal(of_sweeps[0][1], candidates) for _, candidates in of_sweeps)
        for sweep, candidates in of_sweeps[:1] if same else of_sweeps:
            listed += [replace(c, name=name if same else f"{name} ({sweep})") for c in candidates]
    return listed, PRETRAINED if any(c.name == PRETRAINED for c in listed) else None


def _individual(inputs: Sequence[Candidate], experts: Mapping[str, str]) -> list[Candidate]:
    """Each expert on its own task, as one model for each replicate; none where a task has no expert."""
    from mecha_exp.evaluation.outcomes import Outcomes
    from mecha_exp.verdict import Candidate

    found = []
    for replicate in dict.fromkeys(candidate.replicate for candidate in inputs):
        of_set = {c.name: c.outcomes for c in inputs if c.replicate == replicate}
        tasks = {task for outcomes in of_set.values() for part in outcomes.values() for task in part.values}
        if not tasks or any(experts.get(task) not in of_set for task in tasks):
            continue
        by_split = {}
        for split in set.intersection(*(set(of_set[name]) for name in experts.values())):
            own = {task: of_set[name][split] for task, name in experts.items()}
            by_split[split] = Outcomes.checked_before(
                {task: part.values[task] for task, part in own.items()},
                {task: part.examples[task] for task, part in own.items()},
                {task: part.clusters[task] for task, part in own.items()},
            )
        found.append(Candidate(INDIVIDUAL, outcomes=by_split, replicate=replicate))
    return found


def _are_equal(first: Sequence[Candidate], other: Sequence[Candidate]) -> bool:
    """Whether two models came to the same on all splits that both have."""
    return [c.numbers for c in first] == [c.numbers for c in other] and all(
        one.outcomes.keys() == two.outcomes.keys()
        and all(one.outcomes[split].equals(two.outcomes[split]) for split in one.outcomes)
        for one, two in zip(first, other, strict=True)
    )
