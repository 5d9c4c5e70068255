"""A paper's table: methods by tasks, with the best in bold and what cannot be told from it underlined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mecha_exp.errors import counted
from mecha_exp.system.texts import markdown_table, markdown_text
from mecha_exp.verdict.result import Score, Verdict

_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_LATEX |= {letter: f"\\{letter}" for letter in "&%$#_{}"}


@dataclass(frozen=True)
class _Style:
    """How a table is written.

    Attributes:
        text: a text without what the format takes for itself.
        bold: the best of a column.
        underlined: a number that cannot be told from it.
        normalised: a number in parentheses, in small type.
    """

    text: Callable[[str], str]
    bold: Callable[[str], str]
    underlined: Callable[[str], str]
    normalised: Callable[[str], str]


def latex(verdict: Verdict, *, digits: int | None = None) -> str:
    r"""The table in LaTeX, for the package booktabs.

    Rows are the inputs and the chosen setting of each recipe. Columns are tasks and their mean, absolute,
    with the share of the expert's score in parentheses where experts are known.

    Args:
        verdict: whose scores on the reported split are shown.
        digits: after the point; chosen by the size of the numbers if not given.
    """
    style = _Style(
        lambda text: "".join(_LATEX.get(letter, letter) for letter in text),
        lambda text: rf"\textbf{{{text}}}",
        lambda text: rf"\underline{{{text}}}",
        lambda text: rf"{{\footnotesize ({text})}}",
    )
    head, inputs, methods = _rows(verdict, style, digits)
    bodies = [" \\\\\n".join(" & ".join(row) for row in rows) + " \\\\" for rows in (inputs, methods) if rows]
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{style.text(caption(verdict))}}}",
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


def markdown(verdict: Verdict, *, digits: int | None = None) -> str:
    """The table in Markdown, with the caption below it. Arguments as for `latex`."""
    style = _Style(
        markdown_text,
        lambda text: f"**{text}**",
        lambda text: f"<u>{text}</u>",
        lambda text: f"({text})",
    )
    head, inputs, methods = _rows(verdict, style, digits)
    rows, marks = [head, *inputs, *methods], ["---", *["---:"] * (len(head) - 1)]
    return f"{markdown_table(rows, marks)}\n\n{style.text(caption(verdict))}\n"


def caption(verdict: Verdict) -> str:
    """The sentences on the data, the choice and the intervals that a reader needs."""
    same = verdict.selected_on == verdict.reported_on
    data = f"{verdict.metric} on '{verdict.reported_on}'"
    if verdict.examples:
        data += f" ({counted(verdict.examples, 'example')}"
        data += f" of {counted(verdict.clusters, 'source')})" if verdict.clusters < verdict.examples else ")"
    count = verdict.cost.candidates if verdict.cost else 0
    where = "the same data" if same else f"'{verdict.selected_on}'"
    parts = [
        f"{data}. The setting of each method is the best on {where}, of {counted(count, 'setting')} in all."
    ]
    if verdict.columns:
        parts.append(
            "Best in bold; underlined is what paired tests cannot tell from it at 5 %, after Holm's "
            "correction for all pairs of methods in all columns."
        )
    if verdict.selected and verdict.selected.overall.low == verdict.selected.overall.low:
        low, high = verdict.selected.overall.ci95
        covered = "examples and replicates" if verdict.selected.replicates > 1 else "examples"
        parts.append(f"95 % interval of {verdict.selected.point}: {low:.4g} to {high:.4g}, over {covered}.")
    if verdict.selected and verdict.selected.normalised:
        parts.append("In parentheses: the share of the score of each task's expert.")
    return " ".join(parts)


def _rows(
    verdict: Verdict, style: _Style, digits: int | None
) -> tuple[list[str], list[list[str]], list[list[str]]]:
    """The head, the rows of inputs, and those of methods."""
    scores = [score for score in verdict.scores if score.split == verdict.reported_on]
    names = set((verdict.chosen or {}).values()) or {score.point for score in scores if score.recipe}
    inputs = [score for score in scores if score.recipe is None and score.point not in names]
    methods = [score for score in scores if score.point in names]
    tasks: list[str | None] = [*(scores[0].tasks if scores else {})]
    tasks = [*tasks, None] if len(tasks) != 1 else [None]
    digits = _digits(scores) if digits is None else digits
    head = ["method", *(style.text(task or verdict.metric) for task in tasks)]
    body = [[_row(verdict, score, tasks, style, digits) for score in group] for group in (inputs, methods)]
    return head, body[0], body[1]


def _row(
    verdict: Verdict, score: Score, tasks: Sequence[str | None], style: _Style, digits: int
) -> list[str]:
    """The cells of one setting or input."""
    point = score.point.removeprefix(f"recipe={score.recipe}").lstrip(",")
    setting = f" ({point})" if score.recipe and point not in ("", score.recipe) else ""
    cells = [style.text(f"{score.recipe or score.point}{setting}")]
    for task in tasks:
        value = score.overall.value if task is None else score.tasks[task].value
        cell = f"{value:.{digits}f}"
        column = next((column for column in verdict.columns if column.task == task), None)
        if column and column.best == score.point:
            cell = style.bold(cell)
        elif column and score.point in column.tied:
            cell = style.underlined(cell)
        if score.normalised:
            share = score.normalised.overall.value if task is None else score.normalised.tasks[task]
            cell += " " + style.normalised(f"{share:.{digits}f}")
        cells.append(cell)
    return cells


def _digits(scores: Sequence[Score]) -> int:
    """Three digits after the point for what lies within -1 and 1, one for what exceeds it."""
    return 3 if all(abs(score.overall.value) <= 1 for score in scores) else 1
