"""`sweep=greedy_soup`: experts by validation, each kept only if the soup is better with it.

Source: Model soups, Wortsman et al. 2022, arXiv:2203.05482, recipe 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mecha_exp.app.adaptive.points import soup_setting
from mecha_exp.app.adaptive.request import Request
from mecha_exp.app.config.jobs import Batch
from mecha_exp.app.sweep.settings import require_numbered_folders
from mecha_exp.app.words.experts import names_of
from mecha_exp.errors import ConfigError, EvaluationError, did_you_mean
from mecha_exp.evaluation import Outcomes
from mecha_exp.lab.points import TRIAL, Setting
from mecha_exp.numbers import is_number
from mecha_exp.report.adaptive_records import CHOICES_FILE
from mecha_exp.runs.outcomes import OUTCOMES_FILE, POINT, WHOLE, models_in, read_outcomes
from mecha_exp.runs.record import Record
from mecha_exp.system.atomic_write import atomic_write_text
from mecha_exp.system.texts import csv_text
from mecha_exp.terminal.console import print_line

NOISE, PAPER = "noise", "paper"
RULES = (NOISE, PAPER)


@dataclass(frozen=True)
class Choice:
    """An expert that was tried, and whether it was kept.

    Attributes:
        expert: its name.
        alone: its own score.
        tried: the score of the soup with it.
        soup: the score of the soup without it.
        p: of the paired test of the two, two-sided; None by the paper's rule.
        kept: whether it is in the soup.
    """

    expert: str
    alone: float
    tried: float
    soup: float
    p: float | None
    kept: bool


@dataclass(frozen=True)
class GreedySoup:
    """The sweep: each expert alone and all of them, then one trial after another, then what was chosen.

    Attributes:
        paths: of the experts.
        rule: `noise` keeps an expert that is better in a paired test, `paper` one that is not worse.
        level: below which the p-value of that test must lie.
        metric, direction: of the evaluator.
        split: the part of the data by which experts are chosen; `all` without splits.
        begun: the points that are known beforehand.
        words: makes the overrides of a point from what it sets.
    """

    paths: Sequence[str]
    rule: str
    level: float
    metric: str
    direction: str
    split: str
    begun: Sequence[Setting]
    words: Callable[[Setting], list[str]]

    @property
    def trials(self) -> int:
        """The number of points: the known ones, a trial for each expert but the first, and the soup."""
        return len(self.begun) + len(self.paths)

    @property
    def notes(self) -> Sequence[str]:
        """Empty: there is nothing to say before the sweep runs."""
        return ()

    def check_folder(self, folder: Path) -> None:
        """Do nothing: what was chosen is found again from the records of the points."""

    def batches(self, folder: Path) -> Iterator[Batch]:
        """Yield the points in batches; the records of each tell what the next one is.

        Raises:
            EvaluationError: an expert was not measured, or has no outcomes for the test.
        """
        names = names_of(self.paths)
        yield Batch([self.words(setting) for setting in self.begun])
        alone = [self._score(folder, number, name) for number, name in enumerate(names)]
        sign = -1 if self.direction == "minimize" else 1
        order = sorted(range(len(names)), key=lambda expert: -sign * alone[expert])
        soup, current = [order[0]], order[0]  # the members, and the number of the point that has them
        choices = [Choice(names[order[0]], alone[order[0]], alone[order[0]], math.nan, None, True)]
        for number, expert in enumerate(order[1:], len(self.begun)):
            yield Batch([self.words(soup_setting(TRIAL, [*soup, expert], names, self.paths))], number)
            choice = self._choice(folder, names[expert], alone[expert], current, number)
            choices.append(choice)
            _show(choice)
            if choice.kept:
                soup, current = [*soup, expert], number
            _write(choices, folder)
        self._show_soup(choices)
        chosen = self.words(soup_setting("greedy", soup, names, self.paths))
        yield Batch([chosen], first=self.trials - 1)

    def _choice(self, folder: Path, expert: str, alone: float, soup: int, trial: int) -> Choice:
        """Decide on an expert from the points of the soup without and with it."""
        before, tried = self._score(folder, soup, "the soup"), self._score(folder, trial, f"+ {expert}")
        gain = tried - before if self.direction == "maximize" else before - tried
        if self.rule == PAPER:
            return Choice(expert, alone, tried, before, None, gain >= 0)
        p = p_value(self._outcomes(folder, soup), self._outcomes(folder, trial))
        return Choice(expert, alone, tried, before, p, gain > 0 and p < self.level)

    def _show_soup(self, choices: Sequence[Choice]) -> None:
        """Print what the soup is made of, and what the paper's rule may have kept."""
        members = ", ".join(choice.expert for choice in choices if choice.kept)
        print_line(f"greedy soup of {members}")
        sign = -1 if self.direction == "minimize" else 1
        better = [c.expert for c in choices if not c.kept and sign * (c.tried - c.soup) > 0]
        if better:
            print_line(f"better with {', '.join(better)}, within the noise: sweep.rule=paper keeps such")

    def _score(self, folder: Path, number: int, name: str) -> float:
        record = Record.find(folder / str(number))
        value = record.metrics.get(self.metric, math.nan) if record and record.finished else math.nan
        if not math.isfinite(value):
            raise EvaluationError(
                f"sweep=greedy_soup: {name} has no {self.metric} (point {number}, see above), so nothing can "
                "be compared with it. Mend that, or leave the expert out of models.experts, and start again."
            )
        return value

    def _outcomes(self, folder: Path, number: int) -> Outcomes:
        path = folder / str(number) / OUTCOMES_FILE
        for model in models_in(read_outcomes(path)) if path.is_file() else ():
            by_split = model.of_metric(self.metric) if model.role == POINT else {}
            if self.split in by_split:
                return by_split[self.split]
        raise EvaluationError(
            f"sweep.rule={NOISE}: the evaluator gives one {self.metric} for each model, and a test needs "
            "outcomes by example (mecha_exp.Outcomes). Use sweep.rule=paper, which needs no test."
        )


def p_value(one: Outcomes, other: Outcomes) -> float:
    """The two-sided p-value of the paired test of two models on the same examples; see `mecha_exp.verdict`.

    Raises:
        EvaluationError: they were not measured on the same examples.
    """
    from mecha_exp.verdict import Candidate
    from mecha_exp.verdict.candidates import comparable
    from mecha_exp.verdict.paired_tests import paired_p_values
    from mecha_exp.verdict.panel import Panel

    both, faults = comparable(
        [Candidate("one", outcomes={WHOLE: one}), Candidate("other", outcomes={WHOLE: other})], WHOLE
    )
    if len(both) < 2:
        raise EvaluationError(f"sweep=greedy_soup cannot compare two points: {' '.join(faults)}")
    return float(paired_p_values(Panel.of(both, WHOLE), np.array([[0, 1]], dtype=np.intp))[0])


def soup_of(request: Request) -> GreedySoup:
    """The sweep that is asked for.

    Raises:
        ConfigError: anything that is wrong with it; nothing has been written then.
    """
    settings, scoring = request.config.sweep, request.scoring
    if scoring.metric is None:
        raise ConfigError(
            "sweep=greedy_soup needs a metric to choose by: choose an evaluator with evaluator=..."
        )
    if scoring.objectives:
        raise ConfigError(
            f"sweep=greedy_soup chooses by one metric, and evaluator.metric names {len(scoring.objectives)}. "
            f"Name one, as in evaluator.metric={scoring.metric}."
        )
    if settings.rule not in RULES:
        raise ConfigError(
            f"sweep.rule={settings.rule}: there is no such rule.{did_you_mean(str(settings.rule), RULES)}"
        )
    level = settings.level
    if not is_number(level) or not 0 < level < 1:
        raise ConfigError(f"sweep.level={level}: expected a level of the test between 0 and 1, such as 0.05.")
    require_numbered_folders(request.config, "sweep=greedy_soup")
    split = scoring.selection_split or WHOLE
    decided_by = (settings.rule, float(level), scoring.metric, scoring.direction, split)
    return GreedySoup(request.known.experts, *decided_by, request.known.begun, request.words)


def _show(choice: Choice) -> None:
    test = "" if choice.p is None else f", p = {choice.p:.2g}"
    what = "kept" if choice.kept else "not kept"
    print_line(f"greedy soup + {choice.expert}: {choice.tried:.4g} against {choice.soup:.4g}{test}: {what}")


def _write(choices: Sequence[Choice], folder: Path) -> None:
    """Write the table of choices, in the order in which experts were tried."""
    rows = [["expert", "alone", "tried", "soup", "p", "kept"]]
    for choice in choices:
        soup = "" if math.isnan(choice.soup) else repr(choice.soup)
        p = "" if choice.p is None else repr(choice.p)
        kept = str(choice.kept).lower()
        rows.append([choice.expert, repr(choice.alone), repr(choice.tried), soup, p, kept])
    atomic_write_text(folder / CHOICES_FILE, csv_text(rows))
