"""`sweep.fresh=5`: measures the chosen setting again with new seeds, on data and seeds that chose nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from omegaconf import OmegaConf

from mecha_exp.app.command_line import CommandLine
from mecha_exp.app.grid import Grid
from mecha_exp.app.hydra.jobs import enter
from mecha_exp.app.preparation import prepare_job
from mecha_exp.app.sweep.holdout import Chosen, models_of_chosen
from mecha_exp.app.sweep.replicates import SEED_KEYS
from mecha_exp.app.workbench import Workbench
from mecha_exp.errors import ConfigError, MechaError, counted
from mecha_exp.evaluation import Scoring
from mecha_exp.numbers import is_whole
from mecha_exp.report.settings import Setting
from mecha_exp.report.sweep_results import results_of
from mecha_exp.runs.outcomes import FRESH_FILE, POINT, read_outcomes, write_outcomes
from mecha_exp.runs.record import Record
from mecha_exp.runs.sweep import Sweep
from mecha_exp.terminal.console import print_line, show_error

LEAST = 2


def check_fresh(line: CommandLine, scoring: Scoring) -> None:
    """Check that new seeds of the chosen setting can be measured, where they are asked for.

    Raises:
        ConfigError: there is no split to report on, no number of seeds, or no recipe that draws.
    """
    count = line.config.sweep.get("fresh")
    if count is None:
        return
    if not is_whole(count, LEAST):
        raise ConfigError(f"sweep.fresh={count}: expected how many new seeds to run, {LEAST} or more.")
    if scoring.report_split is None or scoring.objectives:
        raise ConfigError(
            f"sweep.fresh={count} measures the one chosen setting on data that did not choose it. "
            "It needs one metric and an evaluator with two splits. Leave it out."
        )
    if not any(_seed_of(config) is not None for config in line.points.first_of_each):
        raise ConfigError(f"sweep.fresh={count}: no recipe of this sweep has a seed. Leave it out.")


def measure_fresh(line: CommandLine, sweep: Sweep, folder: Path, bench: Workbench) -> bool:
    """Merge the chosen setting with new seeds and write the outcomes to `FRESH_FILE`, unless they are there.

    Returns:
        whether all could be measured; also where nothing is to be measured.
    """
    path, count = folder / FRESH_FILE, line.config.sweep.get("fresh")
    setting = results_of(sweep, folder, ended=True).best_setting if count else None
    if setting is None:
        path.unlink(missing_ok=True)
        return True
    try:
        fresh = list(_fresh_points(line, sweep, folder, bench, setting, int(count)))
        if not fresh:
            print_line(
                f"sweep.fresh={count}: '{setting.name}' draws no random numbers, and needs no new seeds"
            )
            path.unlink(missing_ok=True)
            return True
        _measure(fresh, path, bench)
    except MechaError as error:
        show_error(f"sweep.fresh={count}: {error}")
        return False
    return True


def _seed_of(config: object) -> int | None:
    """The seed of a configuration; None if its recipe draws no random numbers."""
    seeds = (OmegaConf.select(config, key) for key in SEED_KEYS)  # type: ignore[arg-type]
    return next((seed for seed in seeds if isinstance(seed, int)), None)


def _fresh_points(
    line: CommandLine, sweep: Sweep, folder: Path, bench: Workbench, setting: Setting, count: int
) -> Iterator[Chosen]:
    """The chosen setting with seeds that no point of the sweep has."""
    signature = setting.finished[0].signature
    number = next(int(p.name) for p, r in sweep.records(folder).items() if r.signature == signature)
    words, used = line.jobs[number], {_seed_of(config) for config in line.points.in_turn()}
    if _seed_of(line.points[number]) is None:
        return
    key = next(k for k in SEED_KEYS if OmegaConf.select(line.points[number], k) is not None)
    others = [word for word in words if word.lstrip("+").partition("=")[0] != key]
    first = max(seed for seed in used if seed is not None) + 1
    grid = Grid.of([[*others, f"++{key}={first + i}"] for i in range(count)], line.composer)
    for i, config in enumerate(grid.in_turn()):
        enter(config)
        point = bench.sign(prepare_job(config, folder / f"fresh-{i}"))
        scoring = point.scoring.on(str(setting.finished[0].report_split))
        record = Record(f"{setting.name} ({key}={first + i})")
        yield Chosen(record, replace(point, scoring=scoring, output=None))


def _measure(fresh: Sequence[Chosen], path: Path, bench: Workbench) -> None:
    """Write the outcomes of new points; those that were written by an earlier start are kept."""
    names = {candidate.record.name for candidate in fresh}
    if path.is_file() and not bench.measures_again and {part.name for part in read_outcomes(path)} == names:
        return
    print_line(f"measuring the chosen setting with {counted(len(fresh), 'new seed')}")
    rows = []
    for candidate, merged in models_of_chosen(fresh, bench):
        if isinstance(merged, Exception):
            raise merged
        measured = bench.measurements.of_point(candidate.point, merged)
        rows += measured.rows(POINT, candidate.record.name, candidate.point.expert_set)
        merged.release()
    write_outcomes(rows, path)
