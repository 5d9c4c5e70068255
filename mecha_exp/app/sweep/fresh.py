"""`sweep.fresh=5`: measures the chosen setting again with new seeds, on data and seeds that chose nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from mecha_exp.app.grid import Grid
from mecha_exp.app.hydra.compose import Composer
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


@dataclass(frozen=True)
class NewSeeds:
    """What `sweep.fresh` asks for, and the points of the sweep.

    Attributes:
        count: of new seeds; None where none are asked for.
        jobs: the overrides of each point.
        points: their configurations.
        composer: makes those of new points.
    """

    count: Any
    jobs: Sequence[Sequence[str]]
    points: Grid
    composer: Composer

    def check(self, scoring: Scoring) -> None:
        """Check that new seeds of the chosen setting can be measured, where they are asked for.

        Raises:
            ConfigError: there is no split to report on, no number of seeds, or no recipe that draws.
        """
        if self.count is None:
            return
        if not is_whole(self.count, LEAST):
            raise ConfigError(
                f"sweep.fresh={self.count}: expected how many new seeds to run, {LEAST} or more."
            )
        if scoring.report_split is None or scoring.objectives:
            raise ConfigError(
                f"sweep.fresh={self.count} measures the one chosen setting on data that did not choose it. "
                "It needs one metric and an evaluator with two splits. Leave it out."
            )
        if not any(_seed_of(config) is not None for config in self.points.first_of_each):
            raise ConfigError(f"sweep.fresh={self.count}: no recipe of this sweep has a seed. Leave it out.")

    def measure(self, sweep: Sweep, folder: Path, bench: Workbench) -> bool:
        """Merge the chosen setting with new seeds and write `FRESH_FILE`, unless that is there.

        Returns:
            whether all could be measured; also where nothing is to be measured.
        """
        setting = results_of(sweep, folder, ended=True).best_setting if self.count else None
        path = folder / FRESH_FILE
        try:
            points = list(self._points(sweep, folder, bench, setting)) if setting else []
            if points:
                _measure(points, path, bench)
        except MechaError as error:
            show_error(f"sweep.fresh={self.count}: {error}")
            return False
        if setting and not points:
            print_line(f"sweep.fresh={self.count}: '{setting.name}' draws no random numbers: no new seeds")
        if not points:
            path.unlink(missing_ok=True)
        return True

    def _points(self, sweep: Sweep, folder: Path, bench: Workbench, setting: Setting) -> Iterator[Chosen]:
        """The chosen setting with seeds that no point of the sweep has."""
        of_it = setting.finished[0]
        records = sweep.records(folder).items()
        number = next(int(path.name) for path, record in records if record.signature == of_it.signature)
        if _seed_of(self.points[number]) is None:
            return
        key = next(k for k in SEED_KEYS if OmegaConf.select(self.points[number], k) is not None)
        words = [word for word in self.jobs[number] if word.lstrip("+").partition("=")[0] != key]
        used = [seed for seed in map(_seed_of, self.points.in_turn()) if seed is not None]
        seeds = range(max(used) + 1, max(used) + 1 + self.count)
        grid = Grid.of([[*words, f"++{key}={seed}"] for seed in seeds], self.composer)
        for seed, config in zip(seeds, grid.in_turn(), strict=True):
            enter(config)
            point = bench.sign(prepare_job(config, folder / f"fresh-{seed}"))
            scoring = point.scoring.on(str(of_it.report_split))
            yield Chosen(
                Record(f"{setting.name} ({key}={seed})"), replace(point, scoring=scoring, output=None)
            )


def _seed_of(config: object) -> int | None:
    """The seed of a configuration; None if its recipe draws no random numbers."""
    seeds = (OmegaConf.select(config, key) for key in SEED_KEYS)  # type: ignore[arg-type]
    return next((seed for seed in seeds if isinstance(seed, int)), None)


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
