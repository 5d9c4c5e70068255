"""The results of a sweep with what its outcomes by example tell: the verdict, and intervals of changes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from mecha_exp.errors import ConfigError
from mecha_exp.report.results import Results
from mecha_exp.report.sweep_results import results_from
from mecha_exp.report.verdict import splits_of, verdict_of
from mecha_exp.report.why import ablation, shapley
from mecha_exp.runs.outcomes import FRESH_FILE, ModelOutcomes, models_in, outcomes_so_far, read_outcomes
from mecha_exp.runs.sweep import Sweep

if TYPE_CHECKING:
    from mecha_exp.verdict import Verdict

MOST_READ = 2_000
"""The finished points of a sweep that still runs from which a verdict is made within seconds."""


def concluded_results(sweep: Sweep, folder: Path, *, ended: bool = False) -> Results:
    """The results of a sweep so far with their verdict; arguments as for `results_of`."""
    records = sweep.all_records(folder, ended=ended)
    results = results_from(sweep, records)
    read = cache(partial(outcomes_so_far, sweep, folder, records, ended=ended, most=MOST_READ))
    if not results.objectives:
        concluded = replace(results, verdict=_read_and_conclude(results, read, folder / FRESH_FILE))
        if results.metric is None:
            return concluded
        with suppress(ConfigError):  # the verdict says it
            if results.mode in ablation.MODES:
                return replace(concluded, changes=ablation.intervals_of_changes(results, read()))
            if results.mode == shapley.MODE:
                return replace(concluded, attributed=shapley.attributions(results, read()))
        return concluded
    alone = {m: replace(results, chosen=m, better=better) for m, better in results.objectives.items()}
    verdicts = {metric: _read_and_conclude(part, read) for metric, part in alone.items()}
    return replace(results, by_objective={m: verdict for m, verdict in verdicts.items() if verdict})


def _read_and_conclude(
    results: Results, read: Callable[[], list[ModelOutcomes]], fresh: Path | None = None
) -> Verdict | None:
    """The verdict; where outcomes cannot be read, one that says so and concludes nothing."""
    if not results.judged or not results.finished:
        return None
    try:
        again = models_in(read_outcomes(fresh)) if fresh and fresh.is_file() else []
        return verdict_of(results, read(), again)
    except ConfigError as error:
        from mecha_exp.verdict import Verdict

        selected_on, reported_on = splits_of(results)
        return Verdict(
            str(results.metric),
            results.direction,
            selected_on,
            reported_on,
            notes=(f"Nothing is concluded: {error}",),
        )
