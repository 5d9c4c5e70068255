"""A paper's table of one or several sweeps: pretrained, individual and merged models by tasks.

One verdict is made of the outcomes of all sweeps together, so the best of each column is in bold and what
paired tests cannot tell from it is underlined, corrected for all pairs of rows in all columns.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mecha_exp.errors import ConfigError, counted
from mecha_exp.report.intervals import base_of
from mecha_exp.report.results import Results
from mecha_exp.report.verdict import candidates_of, experts_of, inputs_of, splits_of
from mecha_exp.runs.outcomes import ModelOutcomes

if TYPE_CHECKING:
    from mecha_exp.verdict import Candidate, Score, Verdict
    from mecha_exp.verdict import Estimate as Interval

PRETRAINED, INDIVIDUAL = "Pretrained", "Individual"
_RECIPE = re.compile(r"^recipe(?:\.method)?=[^,]*,?")
_FINGERPRINT = "fingerprint/"
_WORDS = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_WORDS |= {
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
}
_WORDS |= {letter: f"\\{letter}" for letter in "&%$#_{}"}
_LIGATURE = re.compile("(?<=-)(?=-)|(?<=')(?=')|(?<=[`?!])(?=`)")
"""Between letters that LaTeX would join to a dash, a quotation mark or a sign of another language."""
_ARROWS = {"↑": r"\ensuremath{\uparrow}", "↓": r"\ensuremath{\downarrow}"}


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


@dataclass(frozen=True)
class Style:
    """How a table is written.

    Attributes:
        text: a text without what the format takes for itself.
        bold: the best of a column.
        underlined: a number that cannot be told from it.
        interval: in small type, where the format has any.
    """

    text: Callable[[str], str]
    bold: Callable[[str], str]
    underlined: Callable[[str], str]
    interval: Callable[[str], str]


@dataclass(frozen=True)
class Numbers:
    """How numbers are written.

    Attributes:
        percent: times 100, for shares from 0 to 1.
        intervals: with their 95 % intervals.
    """

    percent: bool = False
    intervals: bool = False


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
    groups: dict[str, list[tuple[str, list[Candidate]]]] = {}
    for part in parts:
        inputs, base = inputs_of(part.results, part.models), base_of(part.results)
        experts = experts_of(part.results, inputs, base) or {}
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


def latex_text(text: str) -> str:
    r"""A text for LaTeX: what LaTeX takes for itself is escaped, Greek letters are mathematics.

    >>> latex_text("50% of a_b, α")
    '50\\% of a\\_b, \\ensuremath{\\alpha}'
    """
    escaped = "".join(_WORDS.get(letter) or _ARROWS.get(letter) or _greek(letter) for letter in text)
    return _LIGATURE.sub("{}", escaped)


def _greek(letter: str) -> str:
    """A Greek letter as LaTeX names it; a control character as a space; any other letter as it is."""
    if unicodedata.category(letter).startswith("C"):
        return " "
    kind, _, name = unicodedata.name(letter, "").partition(" LETTER ")
    if kind not in ("GREEK SMALL", "GREEK CAPITAL") or " " in name:
        return letter
    command = {"LAMDA": "lambda", "FINAL SIGMA": "varsigma", "OMICRON": "mathrm{o}"}.get(name, name.lower())
    return rf"\ensuremath{{\{command if kind == 'GREEK SMALL' else command.capitalize()}}}"


LATEX = Style(
    latex_text,
    lambda text: rf"\textbf{{{text}}}",
    lambda text: rf"\underline{{{text}}}",
    lambda text: rf"{{\scriptsize {text}}}",
)
MARKDOWN = Style(
    lambda text: text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " "),
    lambda text: f"**{text}**",
    lambda text: f"<u>{text}</u>",
    lambda text: text,
)


def latex(verdict: Verdict, numbers: Numbers = Numbers()) -> str:
    r"""The table in LaTeX, for the package booktabs: inputs, then the best setting of each method.

    Raises:
        ConfigError: percentages are asked for of what is not a share.
    """
    head, inputs, methods = _cells(verdict, LATEX, numbers)
    bodies = [" \\\\\n".join(" & ".join(row) for row in rows) + " \\\\" for rows in (inputs, methods) if rows]
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{latex_text(caption(verdict, numbers))}}}",
        rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
        r"\toprule",
        " & ".join(head) + r" \\",
        r"\midrule",
        "\n\\midrule\n".join(bodies),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def markdown(verdict: Verdict, numbers: Numbers = Numbers()) -> str:
    """The table in Markdown, with the caption below it. Arguments and errors as for `latex`."""
    head, inputs, methods = _cells(verdict, MARKDOWN, numbers)
    rows = [head, ["---", *["---:"] * (len(head) - 1)], *inputs, *methods]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"{table}\n\n{MARKDOWN.text(caption(verdict, numbers))}\n"


def caption(verdict: Verdict, numbers: Numbers) -> str:
    """The sentences on the data, the choice, the settings and the marks that a reader needs."""
    data = f"{verdict.metric}{' in %' if numbers.percent else ''} on '{verdict.reported_on}'"
    if verdict.examples:
        data += f" ({counted(verdict.examples, 'example')}"
        data += f" of {counted(verdict.clusters, 'source')})" if verdict.clusters < verdict.examples else ")"
    same = verdict.selected_on == verdict.reported_on
    count = verdict.cost.candidates if verdict.cost else 0
    where = "the same data" if same else f"'{verdict.selected_on}'"
    chosen = "; ".join(f"{score.recipe}: {_setting(score)}" for score in _methods(verdict))
    parts = [
        f"{data}. Each method has the setting that is best on {where}, of {counted(count, 'setting')} in all "
        f"({chosen})."
    ]
    if verdict.columns:
        parts.append(
            "Best in bold; underlined is what paired tests cannot tell from it at 5 %, after Holm's "
            "correction for all pairs of methods in all columns."
        )
    else:
        parts.append("Nothing here tells whether differences are chance, so nothing is marked.")
    if numbers.intervals:
        replicated = any(score.replicates > 1 for score in _methods(verdict))
        over = "examples and replicates" if replicated else "examples"
        parts.append(f"In brackets: 95 % intervals over {over if verdict.examples else 'replicates'}.")
    if any(score.point.startswith(INDIVIDUAL) for score in verdict.scores):
        parts.append(f"{INDIVIDUAL}: each expert on its own task.")
    return " ".join(parts)


def _setting(score: Score) -> str:
    """The hyperparameters of a setting, without the sweep and the recipe."""
    return _RECIPE.sub("", score.point.rpartition(": ")[2]) or "nothing swept"


def _methods(verdict: Verdict) -> list[Score]:
    """The scores of the best setting of each method on the reported split."""
    scores = [s for s in verdict.scores if s.split == verdict.reported_on and s.recipe is not None]
    if verdict.chosen is not None:
        return [score for score in scores if score.point in verdict.chosen.values()]
    sign = 1 if verdict.direction == "maximize" else -1
    best: dict[str, Score] = {}
    for score in scores:
        chosen_by = verdict.score(score.point, verdict.selected_on) or score
        other = best.get(str(score.recipe))
        known = (verdict.score(other.point, verdict.selected_on) or other) if other else None
        if known is None or sign * chosen_by.overall.value > sign * known.overall.value:
            best[str(score.recipe)] = score
    return list(best.values())


def _cells(
    verdict: Verdict, style: Style, numbers: Numbers
) -> tuple[list[str], list[list[str]], list[list[str]]]:
    """The head, the rows of inputs, and those of methods."""
    methods = _methods(verdict)
    inputs = [s for s in verdict.scores if s.split == verdict.reported_on and s.recipe is None]
    tasks: list[str | None] = [*(methods[0].tasks if methods else {})]
    tasks = [*tasks, None] if len(tasks) > 1 else [None]
    digits = _digits([*inputs, *methods], numbers)
    head = ["Method", *(style.text(task or verdict.metric) for task in tasks)]

    def row(score: Score) -> list[str]:
        estimates = [score.overall if task is None else score.tasks[task] for task in tasks]
        marked = zip(tasks, (_number(e, style, digits, numbers) for e in estimates), strict=True)
        cells = [_marked(verdict, score, task, style, *texts) for task, texts in marked]
        return [style.text(score.recipe or score.point), *cells]

    return head, [row(score) for score in inputs], [row(score) for score in methods]


def _number(estimate: Interval, style: Style, digits: int, numbers: Numbers) -> tuple[str, str]:
    """A number and its interval as texts; the latter is empty where none is shown."""
    scale = 100 if numbers.percent else 1
    value = f"{scale * estimate.value:.{digits}f}"
    if not numbers.intervals or math.isnan(estimate.low):
        return value, ""
    low, high = (f"{scale * end:.{digits}f}" for end in estimate.ci95)
    return value, " " + style.interval(f"[{low}, {high}]")


def _marked(verdict: Verdict, score: Score, task: str | None, style: Style, value: str, interval: str) -> str:
    """A cell, marked as the verdict has it and not by its last digit."""
    column = next((column for column in verdict.columns if column.task == task), None)
    if column and column.best == score.point:
        value = style.bold(value)
    elif column and score.point in column.tied:
        value = style.underlined(value)
    return value + interval


def _digits(scores: Iterable[Score], numbers: Numbers) -> int:
    """One digit after the point for percentages and for what exceeds 1, else three.

    Raises:
        ConfigError: percentages are asked for of what is not a share.
    """
    values = [e.value for score in scores for e in (score.overall, *score.tasks.values())]
    if numbers.percent and any(not 0 <= value <= 1 for value in values):
        off = next(value for value in values if not 0 <= value <= 1)
        raise ConfigError(f"--percent: expected shares from 0 to 1, and there is {off:.4g}. Leave it out.")
    return 1 if numbers.percent or any(abs(value) > 1 for value in values) else 3
