"""The text of a paper's table, in LaTeX or Markdown: rows, marks by the verdict, and the caption."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mecha_exp.errors import ConfigError, counted
from mecha_exp.system.texts import markdown_table, markdown_text

if TYPE_CHECKING:
    from mecha_exp.verdict import Estimate as Interval
    from mecha_exp.verdict import Score, Verdict

PRETRAINED, INDIVIDUAL = "Pretrained", "Individual"
_RECIPE = re.compile(r"^recipe(?:\.method)?=[^,]*,?")
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
    markdown_text,
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
    rows, marks = [head, *inputs, *methods], ["---", *["---:"] * (len(head) - 1)]
    return f"{markdown_table(rows, marks)}\n\n{MARKDOWN.text(caption(verdict, numbers))}\n"


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
